//! What a VM is, as seen from its QEMU: how it is started, what it is made of, what stands in the way.

pub mod agent_socket;
pub mod binary;
pub mod blockers;
pub mod command_line;
pub mod cpr;
pub mod cpu_features;
pub mod diagnosis;
pub mod disks;
pub mod engine;
pub mod file_identity;
pub mod graph;
pub mod hardware;
pub mod last_words;
pub mod lock_holder;
pub mod memory;
pub mod migration_socket;
pub mod monitor;
pub mod moved_disk;
pub mod options;
pub mod process;
pub mod process_identity;
pub mod ram_home;
pub mod rehearsal;
pub mod shape;
