//! The list of checks of a GPU, run on the emulated device, right and wrong.

use super::*;
use crate::engine::native::cuda::emulator::{self, Emulated};
use crate::run::verify::native::QUICK;
use crate::run::verify::native::graphs;

/// As tests of the kernels have it, with prompts of two rows on tensor cores.
const SMALL: Tuning = Tuning { min_prefill_rows: 2, ..emulator::SMALL };

#[test]
fn the_emulated_device_passes_the_checks_of_a_gpu() {
    // Tests of the kernels go over more of them, and over every format.
    let kind = Kind { quantised: &[Dtype::Int8, Dtype::Int4, Dtype::Q4_0], ..SMALL_KIND };
    let extent = Extent { operations: 12..14, cut: 502..503, ..QUICK };
    let mut checks = Vec::new();
    on_a_device(&|| Ok(Emulated::new(7)), SMALL, (&kind, &extent), 5_003, &mut |check| checks.push(check));
    let wrong: Vec<&Check> = checks.iter().filter(|check| !check.passed).collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
    let count = |area| checks.iter().filter(|check| check.area == area).count();
    let areas = ["device memory", operations::AREA, steps::AREA, models::OUTPUTS, models::BYTES, "block"];
    // No sums of ranks; and latents are expanded by a test of their own, which these samples are too few for.
    assert_eq!(areas.map(count), [8, 3 * (Operation::ALL.len() - 2), 31, 47, 11, 1]);
}

#[test]
fn a_replay_that_leaves_kernels_out_is_not_eager() {
    let check = |forgets| {
        let make = move |_: usize| {
            let mut device = Emulated::new(3);
            device.forgets = forgets;
            Ok(CudaOperations::with_tuning(device, SMALL))
        };
        graphs::as_eager(&KIND, &make, 502..504)
    };
    let right = check(false);
    assert!(right.passed, "{}", right.detail);
    assert!(!check(true).passed);
}

#[test]
fn memory_that_loses_a_bit_fails_by_name() {
    let mut failed = Vec::new();
    let open = || {
        let mut device = Emulated::new(3);
        device.flips = true;
        Ok(device)
    };
    known(&open, 4_099, &mut |check| {
        if !check.passed {
            failed.push(check.name);
        }
    });
    assert!(failed.contains(&"the host's bytes come back".to_owned()), "{failed:?}");
    assert!(failed.contains(&"the sum of read_u1".to_owned()), "{failed:?}");
}
