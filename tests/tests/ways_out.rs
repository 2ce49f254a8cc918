//! Every way out of every image: the same image, woken in each mode, brings every byte back, and its guest counts on.

use dormouse_tests::{Asleep, Guest, LoopDevice, QemuBuild, Scene};

/// Tests of one engine on one version each, so that they run beside each other and a failure names its place.
macro_rules! on_every_qemu {
    ($($name:ident: $build:ident, $engine:literal;)*) => {
        $(
            #[test]
            fn $name() {
                every_mode_brings_every_byte_back(QemuBuild::$build, $engine);
            }
        )*
    };
}

on_every_qemu! {
    what_was_saved_directly_on_qemu_7_2: V7_2, "direct";
    what_was_saved_directly_on_qemu_10_0: V10_0, "direct";
    what_was_saved_directly_on_qemu_11_1: V11_1, "direct";
    what_came_by_a_stream_from_qemu_7_2: V7_2, "stream";
    what_came_by_a_stream_from_qemu_10_0: V10_0, "stream";
    what_came_by_a_stream_from_qemu_11_1: V11_1, "stream";
}

/// The guest is paused before it is saved and stays so until its whole memory was compared. It is saved once to each
/// kind of volume, and everything is put back for each wake.
fn every_mode_brings_every_byte_back(build: QemuBuild, engine: &str) {
    for on_device in [false, true] {
        let scene = Scene::new(build);
        let Scene { dormouse, guest, lab } = &scene;
        let device = on_device.then(|| LoopDevice::with_old_data(lab, 144));
        let image = match &device {
            Some(device) => device.path().to_owned(),
            None => scene.image(),
        };
        let mut supervisor = scene.run();
        let mut monitor = guest.monitor();
        monitor.stop();
        let before = monitor.memory(guest.ram_bytes(), &lab.path("before"));
        drop(monitor);
        let options = ["--engine", engine, "--replace"];
        let hibernating = dormouse.start_hibernating_with("guest", &image, &options);
        let hibernated = dormouse.finish(hibernating).expect_success().result();
        assert_eq!(hibernated["engine"], engine);
        supervisor.wait_for_end();
        lab.wait_for_no_qemu();
        let asleep = Asleep::keep(&scene, image, before);
        for mode in ["lazy", "map", "eager", "stream"] {
            if mode == "map" && !build.maps_images() {
                continue;
            }
            let (mut supervisor, woken) = asleep.wakes(&["--mode", mode]);
            assert_eq!(woken["mode"], mode);
            supervisor.terminate();
            lab.wait_for_no_qemu();
        }
        drop(device);
    }
}
