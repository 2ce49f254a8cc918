//! Which request for an operation is begun, joined to one that is known, kept waiting, or refused.
//!
//! A plain struct without a clock and without tasks; whoever owns it acts on what it decides.
//!
//! ```text
//!            ┌ known by its id ── same wish ──────────────► Joined (under way or ended)
//!            │                 └─ other wish ─────────────► Denied(OtherWish)
//!            │ the guest was woken from its image ────────► Denied(Woken)
//!   ask ─────┤ nothing under way ─────────────────────────► Begun
//!            │ under way is of lower priority ────────────► Waiting, and that one is cancelled
//!            │ some patience ─────────────────────────────► Waiting
//!            └ none ──────────────────────────────────────► Denied(Busy)
//!
//!   waiting ── the one under way ended ── highest priority, then first come ─► Begun
//!           ── and left no guest ────────► Denied(Gone)
//!           ── it is too late to cancel ─► Denied(TooLate), who relied on that
//!           ── out of patience ──────────► Denied(TimedOut)
//! ```
//!
//! What it guarantees: one operation is under way at a time, nobody waits without an end, and no id is used for two
//! different wishes as long as it is remembered (the last [`REMEMBERED`] operations).

use std::collections::VecDeque;
use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::time::Instant;
use uuid::Uuid;

use crate::api::types::NewOperation;
use crate::error::{Code, Failure};

/// How many ended operations are remembered.
pub const REMEMBERED: usize = 16;

/// How long a request that had another one cancelled waits for its end at least: a rollback waits for storage to let go
/// of a partial image.
const PREEMPTION_LIMIT: Duration = Duration::from_secs(60);

/// How much an operation matters. A higher one cancels a lower one that is under way.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, clap::ValueEnum,
)]
#[serde(rename_all = "kebab-case")]
pub enum Priority {
    /// What can be done again at any time.
    Low,
    /// What somebody asked for.
    #[default]
    Normal,
    /// What must get through: before a host goes down.
    High,
}

/// A request for an operation.
#[derive(Debug, Clone, PartialEq)]
pub struct Ask {
    /// The operation's id, chosen by who asks.
    pub id: Uuid,
    /// How much it matters.
    pub priority: Priority,
    /// How long it may wait until it can begin.
    pub patience: Duration,
    /// What is wished for.
    pub wish: NewOperation,
}

/// What becomes of a request. A ticket that is not in the answer is kept.
#[derive(Debug, PartialEq)]
pub enum Decision<T> {
    /// It is to be begun.
    Begun(Ask, T),
    /// The operation is known: it is under way or has ended.
    Joined(Uuid, T),
    /// It waits; the operation that has to be cancelled for it, if one has.
    Waiting {
        /// That one.
        cancel: Option<Uuid>,
    },
    /// It is refused.
    Denied(Denial, T),
}

/// Why a request is refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Denial {
    /// The id is that of another wish.
    OtherWish {
        /// The id.
        id: Uuid,
        /// What it stands for.
        title: String,
    },
    /// It ended, and the guest was woken since.
    Woken {
        /// The id.
        id: Uuid,
    },
    /// Another operation is under way, or waits, that matters no less.
    Busy(Holder),
    /// The operation under way cannot be cancelled any more.
    TooLate(Holder),
    /// The operation that was waited for ended well: there is no guest to do anything with.
    Gone(Holder),
    /// The operation under way did not end in time.
    TimedOut {
        /// That one.
        holder: Holder,
        /// How long was waited.
        waited: Duration,
    },
}

/// An operation that stands in the way.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    /// Its id.
    pub id: Uuid,
    /// What it does.
    pub title: String,
    /// How much it matters.
    pub priority: Priority,
}

/// All requests of one VM; `T` is what is kept for who waits.
#[derive(Debug)]
pub struct RequestQueue<T> {
    /// The operation whose image the guest was woken from.
    woken_from: Option<Uuid>,
    past: VecDeque<Ask>,
    current: Option<Ask>,
    waiting: Vec<Waiting<T>>,
}

#[derive(Debug)]
struct Waiting<T> {
    ask: Ask,
    since: Instant,
    until: Instant,
    /// Whether it waits for the cancel of a lower one.
    relies_on_cancel: bool,
    ticket: T,
}

impl<T> RequestQueue<T> {
    /// A VM that nobody asked for anything; `woken_from`: the operation whose image its guest was woken from.
    pub fn new(woken_from: Option<Uuid>) -> Self {
        Self {
            woken_from,
            past: VecDeque::new(),
            current: None,
            waiting: Vec::new(),
        }
    }

    /// Decides on a request. One that is begun is the current one until [`ended`](Self::ended).
    pub fn ask(&mut self, ask: Ask, ticket: T, now: Instant) -> Decision<T> {
        if let Some(known) = self.known(ask.id) {
            return if known.wish == ask.wish {
                Decision::Joined(ask.id, ticket)
            } else {
                Decision::Denied(other_wish(known), ticket)
            };
        }
        if self.woken_from == Some(ask.id) {
            return Decision::Denied(Denial::Woken { id: ask.id }, ticket);
        }
        if let Some(Waiting { ask: known, .. }) = self.waiting.iter().find(|waiting| waiting.ask.id == ask.id)
            && known.wish != ask.wish
        {
            return Decision::Denied(other_wish(known), ticket);
        }
        let first_waiting = self.waiting.iter().map(|waiting| &waiting.ask);
        let first_waiting = first_waiting.max_by_key(|ask| ask.priority);
        let Some(current) = &self.current else {
            self.current = Some(ask.clone());
            return Decision::Begun(ask, ticket);
        };
        let mut holders = std::iter::once(current).chain(first_waiting);
        let outranked = holders.find(|holder| holder.priority >= ask.priority);
        let (cancel, patience) = match outranked {
            None => (Some(current.id), ask.patience.max(PREEMPTION_LIMIT)),
            Some(_) if ask.patience > Duration::ZERO => (None, ask.patience),
            Some(holder) => return Decision::Denied(Denial::Busy(Holder::from(holder)), ticket),
        };
        self.waiting.push(Waiting {
            ask,
            since: now,
            until: now + patience,
            relies_on_cancel: cancel.is_some(),
            ticket,
        });
        Decision::Waiting { cancel }
    }

    /// The current operation was not begun after all: nobody is to join it.
    pub fn not_begun(&mut self) {
        self.current = None;
    }

    /// The current operation has ended.
    pub fn ended(&mut self) {
        self.past.extend(self.current.take());
        while self.past.len() > REMEMBERED {
            self.past.pop_front();
        }
    }

    /// With nothing under way: who is to be begun next, which is the current one then. It has waited, and has only the rest of
    /// its patience for what else it has to wait for.
    pub fn next(&mut self, now: Instant) -> Option<(Ask, T)> {
        if self.current.is_some() {
            return None;
        }
        // The first of those that matter most.
        let priority = self.waiting.iter().map(|waiting| waiting.ask.priority).max()?;
        let at = self
            .waiting
            .iter()
            .position(|waiting| waiting.ask.priority == priority)?;
        let Waiting {
            mut ask,
            since,
            ticket,
            ..
        } = self.waiting.remove(at);
        ask.patience = ask.patience.saturating_sub(now.duration_since(since));
        self.current = Some(ask.clone());
        Some((ask, ticket))
    }

    /// Who waits with the id of the current operation, and joins it.
    pub fn joining(&mut self) -> Vec<T> {
        let id = self.current.as_ref().map(|current| current.id);
        self.take(|waiting| Some(waiting.ask.id) == id)
            .into_iter()
            .map(|waiting| waiting.ticket)
            .collect()
    }

    /// The current operation cannot be cancelled any more: who relied on that is refused.
    pub fn too_late(&mut self) -> Vec<(Denial, T)> {
        let Some(holder) = self.current.as_ref().map(Holder::from) else {
            return Vec::new();
        };
        self.take(|waiting| waiting.relies_on_cancel)
            .into_iter()
            .map(|waiting| (Denial::TooLate(holder.clone()), waiting.ticket))
            .collect()
    }

    /// The operation that ended last left no guest behind: all who wait are refused.
    pub fn guest_gone(&mut self) -> Vec<(Denial, T)> {
        let Some(holder) = self.past.back().map(Holder::from) else {
            return Vec::new();
        };
        self.take(|_| true)
            .into_iter()
            .map(|waiting| (Denial::Gone(holder.clone()), waiting.ticket))
            .collect()
    }

    /// When somebody runs out of patience next.
    pub fn deadline(&self) -> Option<Instant> {
        self.waiting.iter().map(|waiting| waiting.until).min()
    }

    /// Who has run out of patience.
    pub fn expired(&mut self, now: Instant) -> Vec<(Denial, T)> {
        let Some(holder) = self.current.as_ref().map(Holder::from) else {
            return Vec::new();
        };
        self.take(|waiting| waiting.until <= now)
            .into_iter()
            .map(|waiting| {
                let denial = Denial::TimedOut {
                    holder: holder.clone(),
                    waited: waiting.until - waiting.since,
                };
                (denial, waiting.ticket)
            })
            .collect()
    }

    /// Takes back requests that wait.
    pub fn withdraw(&mut self, id: Uuid) -> Vec<T> {
        self.take(|waiting| waiting.ask.id == id)
            .into_iter()
            .map(|waiting| waiting.ticket)
            .collect()
    }

    fn known(&self, id: Uuid) -> Option<&Ask> {
        self.past.iter().chain(&self.current).find(|known| known.id == id)
    }

    fn take(&mut self, is_meant: impl Fn(&Waiting<T>) -> bool) -> Vec<Waiting<T>> {
        let (taken, kept): (Vec<_>, Vec<_>) = self.waiting.drain(..).partition(is_meant);
        self.waiting = kept;
        taken
    }
}

fn other_wish(known: &Ask) -> Denial {
    Denial::OtherWish {
        id: known.id,
        title: known.wish.title(),
    }
}

impl From<&Ask> for Holder {
    fn from(ask: &Ask) -> Self {
        Self {
            id: ask.id,
            title: ask.wish.title(),
            priority: ask.priority,
        }
    }
}

impl fmt::Display for Priority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Low => "low",
            Self::Normal => "normal",
            Self::High => "high",
        })
    }
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}, priority {})", self.title, self.id, self.priority)
    }
}

impl fmt::Display for Denial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OtherWish { id, title } => write!(
                f,
                "operation {id} is known with other parameters, as a {title}; another request takes another id"
            ),
            Self::Woken { id } => write!(
                f,
                "operation {id} has ended, and the guest was woken from its image since; another request takes another id"
            ),
            Self::Busy(holder) => write!(f, "another operation is under way: {holder}"),
            Self::TooLate(holder) => write!(
                f,
                "another operation is under way and can not be cancelled any more: {holder}"
            ),
            Self::Gone(holder) => write!(f, "the guest is not here any more: {holder} ended well"),
            Self::TimedOut { holder, waited } => write!(
                f,
                "waited {} for another operation to end: {holder}",
                humantime::format_duration(*waited)
            ),
        }
    }
}

impl From<Denial> for Failure {
    fn from(denial: Denial) -> Self {
        let code = match denial {
            Denial::TimedOut { .. } => Code::TimedOut,
            Denial::OtherWish { .. }
            | Denial::Woken { .. }
            | Denial::Busy(_)
            | Denial::TooLate(_)
            | Denial::Gone(_) => Code::Refused,
        };
        Self::new(code, denial.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn ask(id: u128, priority: Priority, patience: Duration) -> Ask {
        let wish = serde_json::from_value(serde_json::json!({"kind": "hibernate", "to": format!("/{id}")}));
        Ask {
            id: Uuid::from_u128(id),
            priority,
            patience,
            wish: wish.unwrap(),
        }
    }

    fn normal(id: u128) -> Ask {
        ask(id, Priority::Normal, Duration::ZERO)
    }

    fn under_way(first: Ask) -> (RequestQueue<&'static str>, Instant) {
        let (mut queue, now) = (RequestQueue::new(Some(id(99))), Instant::now());
        assert_eq!(
            queue.ask(first.clone(), "first", now),
            Decision::Begun(first, "first")
        );
        (queue, now)
    }

    fn id(id: u128) -> Uuid {
        Uuid::from_u128(id)
    }

    #[test]
    fn the_same_request_joins_its_operation_while_it_runs_and_after_it_ended() {
        let (mut queue, now) = under_way(normal(1));
        assert_eq!(
            queue.ask(normal(1), "again", now),
            Decision::Joined(id(1), "again")
        );
        queue.ended();
        assert_eq!(queue.ask(normal(1), "late", now), Decision::Joined(id(1), "late"));
        // Its priority and patience are no part of it.
        let pressing = ask(1, Priority::High, SECOND);
        assert_eq!(
            queue.ask(pressing, "pressing", now),
            Decision::Joined(id(1), "pressing")
        );
    }

    #[test]
    fn an_id_stands_for_one_wish_only() {
        let (mut queue, now) = under_way(normal(1));
        let other = Ask {
            id: id(1),
            ..normal(2)
        };
        for _ in 0..2 {
            let Decision::Denied(denial, _) = queue.ask(other.clone(), "other", now) else {
                panic!("an id was used twice")
            };
            assert!(matches!(&denial, Denial::OtherWish { title, .. } if title.contains("/1")));
            assert_eq!(Failure::from(denial).code, Code::Refused);
            queue.ended();
        }
        // Also while it waits.
        let (mut queue, now) = under_way(normal(1));
        queue.ask(ask(2, Priority::High, SECOND), "waits", now);
        let other = Ask {
            id: id(2),
            ..ask(3, Priority::High, SECOND)
        };
        assert!(matches!(
            queue.ask(other, "other", now),
            Decision::Denied(Denial::OtherWish { .. }, _)
        ));
    }

    #[test]
    fn what_matters_no_more_is_refused_and_told_by_whom() {
        for (mine, theirs) in [
            (Priority::Low, Priority::Low),
            (Priority::Low, Priority::High),
            (Priority::Normal, Priority::Normal),
            (Priority::High, Priority::High),
        ] {
            let (mut queue, now) = under_way(ask(1, theirs, Duration::ZERO));
            let Decision::Denied(denial, "second") = queue.ask(ask(2, mine, Duration::ZERO), "second", now)
            else {
                panic!("{mine} beside {theirs}")
            };
            let text = denial.to_string();
            assert!(
                text.contains("hibernation to /1") && text.contains(&id(1).to_string()),
                "{text}"
            );
        }
    }

    #[test]
    fn a_higher_request_has_a_lower_one_cancelled_and_is_next() {
        for (mine, theirs) in [
            (Priority::Normal, Priority::Low),
            (Priority::High, Priority::Low),
            (Priority::High, Priority::Normal),
        ] {
            let (mut queue, now) = under_way(ask(1, theirs, Duration::ZERO));
            let higher = ask(2, mine, Duration::ZERO);
            assert_eq!(
                queue.ask(higher.clone(), "higher", now),
                Decision::Waiting { cancel: Some(id(1)) }
            );
            assert_eq!(queue.next(now), None, "the first has not ended");
            queue.ended();
            assert_eq!(queue.next(now), Some((higher, "higher")));
        }
    }

    #[test]
    fn a_request_behind_one_that_waits_and_matters_as_much_is_refused() {
        let (mut queue, now) = under_way(ask(1, Priority::Low, Duration::ZERO));
        queue.ask(normal(2), "second", now);
        let Decision::Denied(Denial::Busy(holder), _) = queue.ask(normal(3), "third", now) else {
            panic!("two wait for one cancel")
        };
        assert_eq!(holder.id, id(2));
        // One that matters more overtakes it, and leaves it waiting.
        let drain = ask(4, Priority::High, Duration::ZERO);
        assert!(matches!(
            queue.ask(drain.clone(), "drain", now),
            Decision::Waiting { cancel: Some(_) }
        ));
        queue.ended();
        assert_eq!(queue.next(now), Some((drain, "drain")));
        assert_eq!(queue.next(now), None);
        assert_eq!(queue.expired(now + PREEMPTION_LIMIT).len(), 1);
    }

    #[test]
    fn patience_waits_for_its_turn_and_not_longer() {
        let (mut queue, now) = under_way(normal(1));
        let mut patient = ask(2, Priority::Normal, 5 * SECOND);
        assert_eq!(
            queue.ask(patient.clone(), "second", now),
            Decision::Waiting { cancel: None }
        );
        queue.ask(ask(3, Priority::Low, 3 * SECOND), "third", now);
        assert_eq!(queue.deadline(), Some(now + 3 * SECOND));
        let expired = queue.expired(now + 4 * SECOND);
        let [(denial @ Denial::TimedOut { .. }, "third")] = &expired[..] else {
            panic!("{expired:?}")
        };
        assert!(denial.to_string().contains("waited 3s"), "{denial}");
        assert_eq!(Failure::from(denial.clone()).code, Code::TimedOut);
        queue.ended();
        // It has only the rest of it for what else it has to wait for.
        patient.patience = SECOND;
        assert_eq!(queue.next(now + 4 * SECOND), Some((patient, "second")));
        assert_eq!(queue.deadline(), None);
    }

    #[test]
    fn who_relied_on_a_cancel_is_told_that_it_came_too_late_and_who_waits_anyway_waits_on() {
        let (mut queue, now) = under_way(normal(1));
        queue.ask(ask(2, Priority::Normal, 5 * SECOND), "patient", now);
        queue.ask(ask(3, Priority::High, Duration::ZERO), "pressing", now);
        let told = queue.too_late();
        assert!(
            matches!(&told[..], [(Denial::TooLate(holder), "pressing")] if holder.id == id(1)),
            "{told:?}"
        );
        queue.ended();
        assert_eq!(queue.next(now).map(|(_, ticket)| ticket), Some("patient"));
    }

    #[test]
    fn the_same_request_twice_in_the_queue_is_begun_once() {
        let (mut queue, now) = under_way(ask(1, Priority::Low, Duration::ZERO));
        queue.ask(ask(2, Priority::Normal, SECOND), "second", now);
        queue.ask(ask(2, Priority::Normal, SECOND), "second again", now);
        queue.ended();
        assert_eq!(queue.next(now).map(|(_, ticket)| ticket), Some("second"));
        assert_eq!(queue.joining(), ["second again"]);
        queue.ended();
        assert_eq!(queue.next(now), None);
    }

    #[test]
    fn who_waits_for_a_guest_that_is_in_its_image_is_told_where() {
        let (mut queue, now) = under_way(normal(1));
        queue.ask(ask(2, Priority::Normal, SECOND), "patient", now);
        queue.ended();
        let told = queue.guest_gone();
        let [(denial, "patient")] = &told[..] else {
            panic!("{told:?}")
        };
        assert!(denial.to_string().contains("hibernation to /1"), "{denial}");
    }

    #[test]
    fn a_request_that_was_taken_back_is_not_begun() {
        let (mut queue, now) = under_way(ask(1, Priority::Low, Duration::ZERO));
        queue.ask(normal(2), "second", now);
        assert_eq!(queue.withdraw(id(2)), ["second"]);
        queue.ended();
        assert_eq!(queue.next(now), None);
    }

    #[test]
    fn what_could_not_be_begun_may_be_asked_for_again() {
        let (mut queue, now) = under_way(normal(1));
        queue.not_begun();
        assert!(matches!(queue.ask(normal(1), "again", now), Decision::Begun(..)));
    }

    #[test]
    fn the_request_that_put_the_guest_into_the_image_it_was_woken_from_is_not_done_again() {
        let (mut queue, now) = under_way(normal(1));
        queue.ended();
        assert!(matches!(
            queue.ask(normal(99), "late", now),
            Decision::Denied(Denial::Woken { .. }, "late")
        ));
    }

    #[test]
    fn the_oldest_are_forgotten_first() {
        let (mut queue, now) = under_way(normal(0));
        queue.ended();
        for id in 1..=REMEMBERED as u128 {
            queue.ask(normal(id), "more", now);
            queue.ended();
        }
        assert!(matches!(queue.ask(normal(1), "kept", now), Decision::Joined(..)));
        assert!(matches!(
            queue.ask(normal(0), "forgotten", now),
            Decision::Begun(..)
        ));
    }
}
