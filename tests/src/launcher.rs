//! A launcher: it starts QEMU itself, with the arguments that an image says, and has a guest woken in it.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use rustix::process::Pid;
use serde_json::json;

use crate::{Guest, Monitor, Outcome, Scene, until};

/// A QEMU that waits for an image, and ends with this handle.
pub struct Launcher<'a> {
    scene: &'a Scene,
    socket: PathBuf,
    child: Child,
    log: PathBuf,
}

impl<'a> Launcher<'a> {
    /// Starts QEMU with exactly the arguments that the image's `dormouse wake --print-args` says.
    pub fn start(scene: &'a Scene, image: &Path, options: &[&str]) -> Self {
        let arguments = Self::arguments(scene, image, options);
        Self::start_with(scene, &arguments)
    }

    /// The arguments, of which the first is the program.
    pub fn arguments(scene: &Scene, image: &Path, options: &[&str]) -> Vec<String> {
        let socket = Self::socket_of(scene);
        let (image, socket) = (image.to_string_lossy(), socket.to_string_lossy());
        let mut all = vec!["wake", &*image, "--print-args", "--qmp", &*socket];
        all.extend(options);
        let printed = scene.dormouse.execute(&all).expect_success().stdout;
        printed.lines().map(str::to_owned).collect()
    }

    /// Starts QEMU with these arguments, and waits until its monitor listens.
    pub fn start_with(scene: &'a Scene, arguments: &[String]) -> Self {
        let mut launcher = Self::start_at_once(scene, arguments);
        until("QEMU to listen", || {
            assert!(launcher.is_alive(), "QEMU ended: {}", launcher.said());
            launcher.socket.exists().then_some(())
        });
        launcher
    }

    /// Starts QEMU with these arguments, and waits for nothing.
    pub fn start_at_once(scene: &'a Scene, arguments: &[String]) -> Self {
        // One that was killed leaves it.
        let _ = fs::remove_file(Self::socket_of(scene));
        let log = scene.lab.path("launcher.log");
        let output = fs::File::create(&log).expect("the log can be made");
        let child = Command::new(&arguments[0])
            .args(&arguments[1..])
            .stdin(Stdio::null())
            .stderr(output)
            .spawn()
            .expect("QEMU starts");
        Self {
            scene,
            socket: Self::socket_of(scene),
            child,
            log,
        }
    }

    /// Has the guest woken in it.
    pub fn wake(&self, image: &Path, options: &[&str]) -> Outcome {
        self.scene.dormouse.finish(self.start_waking(image, options))
    }

    /// Begins to.
    pub fn start_waking(&self, image: &Path, options: &[&str]) -> Child {
        let socket = self.socket.to_string_lossy();
        let image = image.to_string_lossy();
        let mut all = vec!["wake", &*image, "--qmp", &*socket, "--json"];
        all.extend(options);
        self.scene.dormouse.spawn(&all)
    }

    /// The run state of its QEMU.
    pub fn status(&self) -> String {
        self.monitor().status()
    }

    /// A session on another monitor than Dormouse's.
    pub fn monitor(&self) -> Monitor {
        self.scene.guest.monitor()
    }

    /// The monitor's socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// QEMU's process.
    pub fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Whether its QEMU is there.
    pub fn is_alive(&mut self) -> bool {
        self.child
            .try_wait()
            .expect("our own child can be waited for")
            .is_none()
    }

    /// Ends its QEMU, as a launcher does that has no use for it.
    pub fn end(mut self) {
        self.monitor().execute("quit", json!({}));
        self.child.wait().expect("our own child can be waited for");
    }

    /// Waits until its QEMU has ended by itself.
    pub fn wait_for_end(&mut self) {
        until("QEMU to end", || (!self.is_alive()).then_some(()));
    }

    fn said(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    fn socket_of(scene: &Scene) -> PathBuf {
        scene.lab.path("launched.sock")
    }
}

impl Drop for Launcher<'_> {
    fn drop(&mut self) {
        // Already gone is fine.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
