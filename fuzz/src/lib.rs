//! Fuzzing of every reader of untrusted bytes.
//!
//! [`targets`] and `weights` hold the readers as functions of bytes, [`inputs`] hand-made hostile inputs, [`mutate`] seeded mutations,
//! [`allocator`] a counter of memory. `cargo fuzz run NAME` (nightly, coverage-guided), `cargo run --bin drive` (stable, blind) and
//! `tests/hostile.rs` of the program use them. Without the feature `weights` nothing here links candle.

pub mod allocator;
pub mod inputs;
pub mod mutate;
pub mod targets;
#[cfg(feature = "weights")]
pub mod weights;

use targets::FuzzTarget;

/// All targets of this build.
pub fn all() -> impl Iterator<Item = &'static FuzzTarget> {
    let all = targets::TARGETS.iter();
    #[cfg(feature = "weights")]
    let all = all.chain(weights::TARGETS);
    all
}

/// The body of a fuzz target's binary.
#[macro_export]
macro_rules! target {
    ($name:literal) => {
        #[cfg(fuzzing)]
        libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
            static SCRATCH: std::sync::OnceLock<tempfile::TempDir> = std::sync::OnceLock::new();
            let scratch = SCRATCH.get_or_init(|| tempfile::tempdir().expect("a scratch folder"));
            let target = $crate::all().find(|target| target.name == $name).expect("a target of this name");
            (target.run)(bytes, scratch.path());
        });

        #[cfg(not(fuzzing))]
        fn main() {
            eprintln!("built for cargo fuzz; on stable: cargo run --bin drive -- {}", $name);
            std::process::exit(2);
        }
    };
}
