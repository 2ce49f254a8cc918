//! Benches of the paths that decide the pause; they live in `benches/`, one file per path.
