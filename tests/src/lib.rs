//! The laboratory: real QEMU builds, guests that can be checked from outside, and faults to order.
//!
//! A test reads like what a person would do. [`Lab`] is its folder and sweeps up after it; a guest
//! ([`BootSectorGuest`], [`SectorWriter`], [`LinuxGuest`]) knows its QEMU command line and what it should be saying;
//! [`Dormouse`] runs the command-line program; [`Monitor`] looks into a guest through a second
//! monitor of its own; [`play_agent`] is a guest's agent; [`faults`] breaks things, and [`interrupted`] kills Dormouse.
//!
//! `tests/lab/fetch all` brings what is needed. Everything runs under TCG, so any machine will do.

#![forbid(unsafe_code)]

mod agent;
mod asleep;
mod dormouse;
pub mod faults;
mod feed;
mod foreign;
mod guest;
mod huge_pages;
pub mod interrupted;
mod lab;
mod launcher;
mod monitor;
mod moving;
mod processes;
mod qemu;
mod scene;
mod sector_writer;
mod stand_in;
mod unpluggable;
mod volumes;
mod wait;

pub use agent::{Suspend, play_agent};
pub use asleep::Asleep;
pub use dormouse::{Dormouse, Outcome, Supervisor};
pub use foreign::Foreign;
pub use guest::{BootSectorGuest, Guest, LinuxGuest};
pub use huge_pages::HugePages;
pub use lab::Lab;
pub use launcher::Launcher;
pub use monitor::Monitor;
pub use moving::MovingGuest;
pub use qemu::{PlainQemu, QemuBuild};
pub use scene::Scene;
pub use sector_writer::SectorWriter;
pub use stand_in::StandIn;
pub use unpluggable::{DeviceOnVolume, UnpluggableDevice};
pub use volumes::LoopDevice;
pub use wait::{PATIENCE, until, within};
