//! The operations: each a pure machine that decides, a plan that looks before anything is touched, and a thin runner
//! that acts.

pub mod effect;
pub mod hibernate;
pub mod interrupt;
pub mod recover;
pub mod suspend;
pub mod volume;
pub mod wake;
