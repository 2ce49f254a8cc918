//! The API of one VM's supervisor: HTTP and JSON on a unix socket in the VM's folder.
//!
//! | route | |
//! | --- | --- |
//! | `GET /v1/vm` | what the VM does |
//! | `GET /v1/vm/diagnosis` | what can be done with it, and what stands in the way |
//! | `POST /v1/operations` | begins an operation; `409` while another runs |
//! | `GET /v1/operations/{id}` | what an operation does; with `?seen=N` waits until there is news after version N |
//! | `POST /v1/operations/{id}/cancel` | asks for the guest back |
//!
//! The folder is only open to its owner, and so is the socket. Failures are problems in the sense of RFC 9457.

pub mod client;
pub mod routes;
pub mod snapshot;
pub mod types;
