//! The part of a wake's runner for a QEMU of others: what is done besides, and what a failure leaves.

use tokio::time::Instant;

use super::Work;
use crate::error::{Code, Failure};
use crate::machine::effect::out_of_order;
use crate::machine::wake::Mode;
use crate::machine::wake::machine::Effect;
use crate::machine::wake::record::Point;
use crate::machine::wake::take_over::Qemu;

impl Work<'_> {
    /// The QEMU of others, which has to wait for an image.
    pub(super) async fn take_others(&mut self) -> Result<(), Failure> {
        let waiting = self.surroundings.others.take().ok_or_else(out_of_order)?;
        self.qemu_started = Some(Instant::now());
        let waits = waiting.check_waits().await;
        self.qemu = Some(Qemu::Others(waiting));
        waits
    }

    /// From here on a QEMU of others may get the guest, which is written down first.
    pub(super) async fn prepare_others(&mut self) -> Result<(), Failure> {
        if !matches!(self.qemu, Some(Qemu::Others(_))) {
            return Ok(());
        }
        self.begin_journal().await?;
        let (Some(Qemu::Others(waiting)), Some(plan), Some(image)) = (&self.qemu, &self.plan, &self.image)
        else {
            return Err(out_of_order());
        };
        let told = (&self.surroundings.progress, &self.interrupt);
        self.settings = Some(waiting.prepare(image, plan, &self.request, told).await?);
        Ok(())
    }

    /// The image that a QEMU of others has its memory from stays locked as long as that lives.
    pub(super) async fn pin(&self) {
        if let (Some(Qemu::Others(waiting)), Some(plan), Some(image)) = (&self.qemu, &self.plan, &self.image)
            && plan.mode == Mode::Map
            && let Err(failure) = waiting.pin(image).await
        {
            tracing::warn!(%failure, "the image is the guest's memory, and is not locked: leave it alone as long as QEMU lives");
        }
    }

    /// Leaves a QEMU of others to its owner.
    pub(super) async fn leave(&mut self) -> Result<(), Failure> {
        if let (Some(Qemu::Others(waiting)), true) = (&self.qemu, self.is_load_begun) {
            waiting.check_left_empty().await?;
        }
        self.put_settings_back().await;
        self.end_journal().await
    }

    pub(super) async fn put_settings_back(&mut self) {
        if let (Some(settings), Some(qemu)) = (self.settings.take(), &self.qemu)
            && let Err(error) = settings.put_back(qemu.client()).await
        {
            tracing::warn!(%error, "QEMU's migration settings are not as they were found");
        }
    }

    /// What a failure means for a QEMU of others.
    pub(super) async fn failed_in_others(&mut self, effect: Effect, failure: Failure) -> Failure {
        let was_refused = failure.code == Code::Refused;
        if effect == Effect::Resume && was_refused {
            // The guest has surely not run.
            let _ = self.advance(Point::Marked).await;
        }
        let Some(Qemu::Others(waiting)) = &self.qemu else {
            return failure;
        };
        match effect {
            Effect::Load if self.is_load_begun => waiting.not_loaded(failure),
            Effect::Mark => waiting.held().while_doing(&failure.message),
            Effect::Resume if was_refused => waiting.held().while_doing(&failure.message),
            _ => failure,
        }
    }
}
