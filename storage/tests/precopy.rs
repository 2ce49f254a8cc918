//! An image as the stream of a normal migration, read by several threads.

mod fixture;

use std::io;
use std::sync::atomic::AtomicBool;

use dormouse_storage::{
    ByteCount, Compression, CreateOptions, Image, ImageError, ImageKey, ImageWriter, PrecopyError, Progress,
    Recording, Run, try_write_precopy,
};
use fixture::{Laboratory, MIB, flip_bit, working};

fn written(image: &Image, except: &[&str], threads: usize) -> Vec<u8> {
    let (progress, cancelled) = (Progress::default(), AtomicBool::new(false));
    let run = Run {
        threads,
        progress: &progress,
        cancelled: &cancelled,
    };
    let mut stream = Vec::new();
    image.write_precopy(except, &run, &mut stream).expect("written");
    let blocks = image.layout().blocks();
    let expected = blocks
        .iter()
        .filter(|block| !except.contains(&block.name.as_str()));
    assert_eq!(
        progress.done(),
        expected.map(|block| block.length).sum::<ByteCount>()
    );
    stream
}

#[test]
fn the_stream_is_the_same_guest_however_many_threads_read_whatever_the_form() {
    let key = ImageKey::from_file_content(&[7; 32]).unwrap();
    for (compression, key) in [
        (Compression::None, None),
        (Compression::Zstd(1), None),
        (Compression::Zstd(1), Some(key)),
    ] {
        let laboratory = Laboratory::compressible();
        let options = CreateOptions {
            compression,
            key: key.clone(),
            ..CreateOptions::default()
        };
        ImageWriter::create(&laboratory.target(), laboratory.layout(), options)
            .and_then(|writer| laboratory.write(writer))
            .and_then(|writer| writer.seal(&laboratory.manifest(), &laboratory.recording()))
            .unwrap();
        let mut image = Image::open(&laboratory.target()).unwrap();
        if let Some(key) = &key {
            image.unlock(key).unwrap();
        }
        for except in [&[][..], &["pc.ram"]] {
            let mut one_by_one = Vec::new();
            let devices = image.device_state().unwrap();
            try_write_precopy(&devices, image.pages(except).unwrap(), &mut one_by_one).unwrap();
            let expected = Recording::parse(&one_by_one).unwrap();
            for threads in [0, 1, 2, 3, 100] {
                let found = Recording::parse(&written(&image, except, threads)).unwrap();
                assert!(found == expected, "{compression} {threads} {except:?}");
            }
        }
    }
}

#[test]
fn a_stream_without_ram_is_whole() {
    let laboratory = Laboratory::new();
    let image = laboratory.image();
    let names: Vec<&str> = image
        .layout()
        .blocks()
        .iter()
        .map(|block| block.name.as_str())
        .collect();
    let found = Recording::parse(&written(&image, &names, 3)).unwrap();
    assert_eq!(found.normalized(), image.device_state().unwrap().normalized());
    assert_eq!(found.pages().count(), 0);
}

#[test]
fn a_bad_chunk_ends_the_stream_before_it() {
    let laboratory = Laboratory::new();
    let image = laboratory.image();
    let block = image.layout().block("pc.ram").unwrap();
    flip_bit(&laboratory.target(), block.offset + 2 * MIB);
    let mut stream = Vec::new();
    let error = working(|run| image.write_precopy(&[], run, &mut stream)).unwrap_err();
    assert!(
        matches!(&error, PrecopyError::Page(ImageError::Corrupt { .. })),
        "{error:?}"
    );
    assert!(Recording::parse(&stream).is_err(), "a stream that was cut");
    assert!((stream.len() as u64) < image.layout().ram().0);
}

#[test]
fn a_reader_that_goes_away_or_a_cancel_ends_it() {
    struct Gone;
    impl io::Write for Gone {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::ErrorKind::BrokenPipe.into())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let laboratory = Laboratory::new();
    let image = laboratory.image();
    let error = working(|run| image.write_precopy(&[], run, Gone)).unwrap_err();
    assert!(matches!(error, PrecopyError::Output(_)), "{error:?}");
    let (progress, cancelled) = (Progress::default(), AtomicBool::new(true));
    let run = Run {
        threads: 3,
        progress: &progress,
        cancelled: &cancelled,
    };
    let error = image.write_precopy(&[], &run, io::sink()).unwrap_err();
    assert!(
        matches!(error, PrecopyError::Page(ImageError::Cancelled)),
        "{error:?}"
    );
}
