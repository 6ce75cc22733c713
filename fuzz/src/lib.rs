//! Fuzzing of every reader of foreign bytes.
//!
//! [`doors`] holds the readers as functions of bytes, [`shapes`] inputs that were made to hurt, [`mutate`] what makes new ones of them,
//! [`meter`] the memory they take. `cargo fuzz run NAME` (nightly, coverage-guided) and `cargo run --bin drive` (stable, blind) both use
//! them, and so does `tests/hostile.rs` of the program itself.

pub mod doors;
pub mod meter;
pub mod mutate;
pub mod shapes;

/// A fuzz target: one door, with a scratch folder of the process.
#[macro_export]
macro_rules! target {
    ($name:literal) => {
        #[cfg(fuzzing)]
        libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
            static SCRATCH: std::sync::OnceLock<tempfile::TempDir> = std::sync::OnceLock::new();
            let scratch = SCRATCH.get_or_init(|| tempfile::tempdir().expect("a folder for scratch"));
            let door = $crate::doors::door($name).expect("a target is a door");
            (door.open)(bytes, scratch.path());
        });

        #[cfg(not(fuzzing))]
        fn main() {
            eprintln!("a target of cargo fuzz; without it: cargo run --release --bin drive -- {}", $name);
            std::process::exit(2);
        }
    };
}
