//! Every way into an image, on every kind of volume, in every form: the guest comes back with every byte.

use std::fs;

use dormouse_tests::{Foreign, LoopDevice, QemuBuild};

/// A way into an image: what the guest's QEMU is started with, what the hibernation is told, and the engine that has to
/// come of it.
struct Way {
    arguments: &'static [&'static str],
    options: &'static [&'static str],
    engine: &'static str,
}

const PRIVATE: &[&str] = &[];

/// RAM that `x-ignore-shared` leaves out on every version.
const SHARED_FILE: &[&str] = &[
    "-object",
    "memory-backend-file,id=m0,size=64M,share=on,mem-path=/dev/shm",
    "-machine",
    "memory-backend=m0",
];

/// RAM that QEMU hands over.
const MEMFD: &[&str] = &[
    "-object",
    "memory-backend-memfd,id=m0,size=64M,share=on",
    "-machine",
    "memory-backend=m0,aux-ram-share=on",
];

const DIRECT: Way = Way {
    arguments: SHARED_FILE,
    options: &["--engine", "direct"],
    engine: "direct",
};
const HANDED_OVER: Way = Way {
    arguments: MEMFD,
    options: &["--engine", "direct"],
    engine: "direct-cpr",
};
const CHANNELS: Way = Way {
    arguments: PRIVATE,
    options: &["--engine", "stream", "--channels", "2"],
    engine: "stream",
};
const ONE_STREAM: Way = Way {
    arguments: PRIVATE,
    options: &["--engine", "stream", "--channels", "0"],
    engine: "stream",
};

/// Tests of one way on one version each, so that they run beside each other and a failure names its place.
macro_rules! matrix {
    ($($name:ident: $build:ident, $way:ident;)*) => {
        $(
            #[test]
            fn $name() {
                every_byte_comes_back_from_every_volume_and_form(QemuBuild::$build, &$way);
            }
        )*
    };
}

matrix! {
    direct_on_qemu_7_2: V7_2, DIRECT;
    direct_on_qemu_10_0: V10_0, DIRECT;
    direct_on_qemu_11_1: V11_1, DIRECT;
    handed_over_by_qemu_10_0: V10_0, HANDED_OVER;
    handed_over_by_qemu_11_1: V11_1, HANDED_OVER;
    over_channels_from_qemu_7_2: V7_2, CHANNELS;
    over_channels_from_qemu_10_0: V10_0, CHANNELS;
    over_channels_from_qemu_11_1: V11_1, CHANNELS;
    in_one_stream_from_qemu_7_2: V7_2, ONE_STREAM;
    in_one_stream_from_qemu_10_0: V10_0, ONE_STREAM;
    in_one_stream_from_qemu_11_1: V11_1, ONE_STREAM;
}

fn every_byte_comes_back_from_every_volume_and_form(build: QemuBuild, way: &Way) {
    for on_device in [false, true] {
        for form in ["none", "zstd", "encrypted"] {
            let mut foreign = Foreign::start(build, way.arguments);
            let key = foreign.scene.lab.path("key");
            fs::write(&key, [7; 32]).expect("a key can be written");
            let key = key.to_str().expect("a path of letters").to_owned();
            let mut options = way.options.to_vec();
            match form {
                "zstd" => options.extend(["--compress", "zstd:1"]),
                "encrypted" => {
                    options.extend(["--key-file", &key]);
                    foreign = foreign.with_key_file(&key);
                }
                _ => {}
            }
            let device = on_device.then(|| LoopDevice::with_old_data(&foreign.scene.lab, 160));
            if let Some(device) = &device {
                options.push("--replace");
                foreign = foreign.with_image_at(device.path().to_owned());
            }
            let mode = if form == "none" && build.maps_images() {
                // Where RAM was shared the command line says so, and mapped RAM is private.
                if way.arguments.is_empty() { "map" } else { "eager" }
            } else {
                "eager"
            };
            let told = format!("{form}, on a device: {on_device}");
            let (hibernated, mut woken) = foreign.keeps_every_byte(&options, mode);
            assert_eq!(hibernated["engine"], way.engine, "{told}: {hibernated:#}");
            let kind = if on_device { "block device" } else { "file" };
            assert_eq!(hibernated["storage"]["kind"], kind, "{told}");
            let smaller = hibernated["stored_bytes"].as_u64() < hibernated["data_bytes"].as_u64();
            assert_eq!(smaller, form == "zstd", "{told}: {hibernated:#}");
            // QEMU has the device open as long as the guest lives.
            woken.terminate();
            drop(device);
        }
    }
}
