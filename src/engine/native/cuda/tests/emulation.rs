//! The emulation detects errors: tested with kernels that contain them on purpose.

use hbmark_emulated_kernels::Barrier;

use super::super::device::{Argument, Device, KernelLaunch};
use super::super::emulator::{Emulated, EmulatedMemory};
use crate::engine::EngineError;

const WORDS: usize = 128;

/// Runs a kernel by a seed over memory of a device.
fn run(
    of: &Emulated,
    seed: u64,
    kernel: &str,
    memories: &[&EmulatedMemory],
    blocks: u32,
) -> Result<Emulated, EngineError> {
    let mut device = of.beside(seed);
    device.launch(&KernelLaunch {
        kernel: kernel.into(),
        grid: [blocks, 1, 1],
        threads: u32::try_from(WORDS).unwrap(),
        shared_bytes: 0,
        arguments: memories.iter().map(|memory| Argument::Address(Emulated::address(memory))).collect(),
    })?;
    Ok(device)
}

pub(super) fn words(device: &mut Emulated, memory: &EmulatedMemory, count: usize) -> Vec<u32> {
    let mut bytes = vec![0; 4 * count];
    device.download(memory, 0, &mut bytes).unwrap();
    bytes.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect()
}

/// What a kernel that should turn 128 words around makes of them.
fn reversed(kernel: &str, seed: u64) -> Vec<u32> {
    let mut device = Emulated::new(0);
    let (from, to) = (device.allocate(4 * WORDS).unwrap(), device.allocate(4 * WORDS).unwrap());
    let bytes: Vec<u8> = (0..128u32).flat_map(u32::to_le_bytes).collect();
    device.upload(&from, 0, &bytes).unwrap();
    let mut device = run(&device, seed, kernel, &[&from, &to], 1).unwrap();
    words(&mut device, &to, WORDS)
}

#[test]
fn a_missing_barrier_or_wait_is_a_wrong_answer_under_every_seed() {
    let right: Vec<u32> = (0..128).rev().collect();
    for seed in 0..20 {
        assert_eq!(reversed("planted_reversal", seed), right);
        assert_ne!(reversed("planted_reversal_without_barrier", seed), right);
        assert_ne!(reversed("planted_reversal_without_wait", seed), right);
    }
}

#[test]
fn a_barrier_can_be_taken_away_by_its_line() {
    let right = reversed("planted_reversal", 1);
    let barrier = Barrier::met().into_iter().find(|b| b.to_string().starts_with("planted.cu")).unwrap();
    assert_ne!(barrier.without(|| reversed("planted_reversal", 1)), right);
    assert_eq!(reversed("planted_reversal", 1), right);
}

#[test]
fn shared_memory_is_poisoned_between_blocks() {
    let mut device = Emulated::new(0);
    let to = device.allocate(16).unwrap();
    let mut ran = run(&device, 3, "planted_shared_before_written", &[&to], 4);
    let found = words(ran.as_mut().unwrap(), &to, 4);
    // The threads of a block see their own 7, but the first of each block sees poison.
    assert!(found.iter().all(|word| *word == u32::MAX || *word == 7), "{found:?}");
    assert!(run(&device, 3, "planted_shared_before_written", &[&to], 1).is_ok());
}

#[test]
fn threads_that_wait_for_ever_are_an_error_that_says_where() {
    let mut device = Emulated::new(0);
    let to = device.allocate(16).unwrap();
    device.upload(&to, 0, &[0; 16]).unwrap();
    let error = run(&device, 3, "planted_half_meets", &[&to], 1).unwrap_err().to_string();
    assert!(error.contains("planted_half_meets") && error.contains("waits at"), "{error}");
}

#[test]
fn arguments_that_are_not_the_kernels_are_refused() {
    let mut device = Emulated::new(0);
    let to = device.allocate(16).unwrap();
    let refused = |kernel: &str, arguments: Vec<Argument>| {
        let launch =
            KernelLaunch { kernel: kernel.into(), grid: [1; 3], threads: 32, shared_bytes: 0, arguments };
        device.beside(0).launch(&launch).unwrap_err().to_string()
    };
    let address = Argument::Address(Emulated::address(&to));
    assert!(refused("planted_reversal", vec![address]).contains("takes 2 arguments and was given 1"));
    let error = refused("planted_reversal", vec![address, Argument::I32(1)]);
    assert!(error.contains("argument 1 is p8 and was given as u4"), "{error}");
    assert!(refused("no_such_kernel", vec![]).contains("no such kernel"));
}

#[test]
fn nothing_is_allocated_or_copied_while_a_graph_is_recorded() {
    let mut device = Emulated::new(0);
    let to = device.allocate(16).unwrap();
    device.begin_capture().unwrap();
    assert!(device.allocate(16).is_err());
    assert!(device.upload(&to, 0, &[0; 16]).is_err());
    let error = device.end_capture().unwrap_err().to_string();
    assert!(error.contains("the recording is void: a copy to the device"), "{error}");
    assert!(device.end_capture().is_err());
    device.begin_capture().unwrap();
    assert!(device.end_capture().is_ok());
}

#[test]
fn no_kernel_is_launched_for_the_first_time_while_a_graph_is_recorded() {
    let mut device = Emulated::new(0);
    device.only_checks = true;
    let launch = KernelLaunch {
        kernel: "planted_reversal".into(),
        grid: [1; 3],
        threads: 32,
        shared_bytes: 0,
        arguments: vec![],
    };
    device.begin_capture().unwrap();
    let error = device.launch(&launch).unwrap_err().to_string();
    assert!(error.contains("the first launch of planted_reversal"), "{error}");
    assert!(device.end_capture().is_err());
    device.launch(&launch).unwrap();
    device.begin_capture().unwrap();
    assert!(device.launch(&launch).is_ok() && device.end_capture().is_ok());
}

#[test]
fn a_grid_that_no_gpu_takes_is_refused_when_it_is_launched_and_when_it_is_recorded() {
    let mut device = Emulated::new(0);
    device.only_checks = true;
    let launch = |grid| KernelLaunch {
        kernel: "planted_reversal".into(),
        grid,
        threads: 32,
        shared_bytes: 0,
        arguments: vec![],
    };
    assert!(device.launch(&launch([131_072, 65_535, 65_535])).is_ok());
    for grid in [[1, 65_536, 1], [1, 1, 65_536], [1 << 31, 1, 1], [0, 1, 1]] {
        let error = device.launch(&launch(grid)).unwrap_err().to_string();
        assert!(error.contains("planted_reversal: a grid of"), "{error}");
        device.begin_capture().unwrap();
        assert!(device.launch(&launch(grid)).is_err() && device.end_capture().is_err());
    }
}
