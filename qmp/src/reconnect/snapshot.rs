//! What a machine is doing, asked as a whole.

use crate::client::Client;
use crate::command;
use crate::error::CommandError;
use crate::view::block::BlockInfo;
use crate::view::fdset::FdsetInfo;
use crate::view::job::JobInfo;
use crate::view::machine::StatusInfo;
use crate::view::migration::MigrationInfo;

/// The state of a QEMU, as it is queried on every connection anew.
///
/// The parts are queried one after the other and the machine does not wait in between, so they may
/// be of slightly different moments.
#[derive(Clone, Debug, PartialEq)]
pub struct Snapshot {
    /// Whether the guest runs: `query-status`.
    pub status: StatusInfo,
    /// The migration: `query-migrate`.
    pub migration: MigrationInfo,
    /// The jobs, those that concluded while nobody was connected among them: `query-jobs`.
    pub jobs: Vec<JobInfo>,
    /// The drives: `query-block`.
    pub block: Vec<BlockInfo>,
    /// The descriptors that were given to QEMU: `query-fdsets`.
    pub fdsets: Vec<FdsetInfo>,
}

impl Snapshot {
    /// Queries the state. Subscribe to the events before, and nothing falls between.
    pub async fn query(client: &Client) -> Result<Self, CommandError> {
        // In flight together: one round trip, and less time between the parts.
        let (status, migration, jobs, block, fdsets) = tokio::try_join!(
            client.query(&command::query_status {}),
            client.query(&command::query_migrate {}),
            client.query(&command::query_jobs {}),
            client.query(&command::query_block {}),
            client.query(&command::query_fdsets {}),
        )?;
        Ok(Self {
            status,
            migration,
            jobs,
            block,
            fdsets,
        })
    }
}
