//! Probes of a device through the engine's narrow [`Device`]: bandwidths, launches, spins of known length.
//!
//! Enters: a device, and how much of its memory to walk. Leaves: rates and times, after the data that the kernels read was checked. A GPU and the
//! emulated device run the same code; times of the emulated one mean nothing.

use std::time::Instant;

use super::ProbeError;
use crate::engine::native::cuda::device::{Argument, Device, KernelLaunch};
use crate::engine::{EngineError, Timeline};
use crate::measure::timer_checks::Check;
use hbmark_core::result::{Ceilings, GpuCeilings, Spread};
use hbmark_core::units::{Bytes, Nanos, whole};

/// Threads in a block of the bandwidth kernels.
const BLOCK: u32 = 256;

/// Loads that a thread has in flight.
const READS: [&str; 4] = ["read_u1", "read_u2", "read_u4", "read_u8"];

/// Bytes of a 16-byte vector, and words in it.
const VECTOR: usize = 16;
const WORDS: usize = 4;

/// Lengths of the spins, and how far a measured one may be off: max(0.5 %, 2 µs), and a tick of the device's timer.
#[cfg(feature = "cuda")]
pub const SPINS: [f64; 5] = [5e4, 2e5, 1e6, 5e6, 1e7];
const TIMER_TICK_NS: f64 = 1_000.0;

/// Nodes of the two graphs whose difference is the time of a node.
const NODES: [usize; 2] = [50, 250];

/// Launches that are waited for one by one.
const LAUNCHES: usize = 200;

/// How much of a device to walk, and how often.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// Bytes that a read walks; far beyond any L2 (50 to 60 MiB on Hopper), and long enough that ramp and tail vanish.
    pub working_set: usize,
    /// Bytes that L2 holds, and how often they are read in one launch.
    pub cached: usize,
    pub cached_passes: usize,
    /// Bytes in flight decide bandwidth, so the blocks of a multiprocessor are swept.
    pub blocks_per_multiprocessor: &'static [u32],
    pub runs: usize,
}

/// A device with a timeline.
pub struct DeviceProbe<D: Device> {
    device: D,
    timeline: Box<dyn Timeline>,
}

impl<D: Device> std::fmt::Debug for DeviceProbe<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DeviceProbe").field("device", &self.device).finish_non_exhaustive()
    }
}

impl<D: Device> DeviceProbe<D> {
    /// A probe of a device.
    pub fn new(device: D) -> Self {
        Self { timeline: device.timeline(), device }
    }

    /// The device.
    pub fn device(&mut self) -> &mut D {
        &mut self.device
    }

    /// Memory filled with the pattern, by a kernel.
    pub fn pattern(&mut self, bytes: usize) -> Result<D::Memory, EngineError> {
        let memory = self.device.allocate(bytes)?;
        self.fill(&memory)?;
        Ok(memory)
    }

    /// As [`Self::pattern`], in memory that the other devices of a group reach.
    pub fn shared_pattern(&mut self, bytes: usize) -> Result<D::Memory, EngineError> {
        let memory = self.device.allocate_shared(bytes)?;
        self.fill(&memory)?;
        Ok(memory)
    }

    fn fill(&mut self, memory: &D::Memory) -> Result<(), EngineError> {
        let blocks = self.device.multiprocessors() * 8;
        self.device.launch(&write(&memory_of::<D>(memory), blocks))?;
        self.device.synchronise()
    }

    /// The device, for other work.
    pub fn into_device(self) -> D {
        self.device
    }

    /// Seconds of device time of each of `runs` launches, behind one that is not counted.
    pub fn time(&mut self, runs: usize, launch: &KernelLaunch) -> Result<Vec<f64>, EngineError> {
        for run in 0..=runs {
            self.timeline.mark()?;
            self.device.launch(launch)?;
            self.timeline.mark()?;
            if run == 0 {
                self.timeline.drain()?;
            }
        }
        let marks = self.timeline.drain()?;
        Ok(marks.chunks_exact(2).map(|pair| Nanos(pair[1].0 - pair[0].0).seconds()).collect())
    }

    /// Rates of a kernel that moves `bytes` over the block counts, best median, and the blocks of a multiprocessor that gave it.
    pub(super) fn best(
        &mut self,
        extent: &Extent,
        bytes: f64,
        launch: impl Fn(u32) -> KernelLaunch,
    ) -> Result<(Spread, u32), ProbeError> {
        let mut best: Option<(Spread, u32)> = None;
        for &per in extent.blocks_per_multiprocessor {
            let times = self.time(extent.runs, &launch(self.device.multiprocessors() * per))?;
            let rates: Vec<f64> = times.iter().map(|seconds| bytes / seconds).collect();
            if let Some(rate) = Spread::of(&rates)
                && best.as_ref().is_none_or(|(so_far, _)| rate.median > so_far.median)
            {
                best = Some((rate, per));
            }
        }
        best.ok_or(ProbeError::Repetitions { repetitions: extent.runs })
    }

    /// As [`Self::best`] for a kernel that adds all words it reads to the one at its second argument; each sum is checked.
    pub(super) fn best_read(
        &mut self,
        extent: &Extent,
        kernel: &'static str,
        memory: &Memory,
        passes: usize,
    ) -> Result<(Spread, u32), ProbeError> {
        let sum = self.device.allocate(4)?;
        self.device.upload(&sum, 0, &[0; 4])?;
        let sums = Argument::Address(D::address(&sum));
        let bytes = (memory.bytes * passes) as f64;
        let best = self.best(extent, bytes, |blocks| {
            let mut arguments = vec![memory.address(), sums, memory.vectors()];
            if kernel == "read_cached" {
                arguments.push(Argument::I32(i32::try_from(passes).unwrap_or(i32::MAX)));
            }
            launch(kernel, blocks, arguments)
        })?;
        let mut found = [0; 4];
        self.device.download(&sum, 0, &mut found)?;
        let found = u32::from_le_bytes(found);
        let reads = (extent.runs + 1) * extent.blocks_per_multiprocessor.len() * passes;
        let reads = u32::try_from(reads).unwrap_or(u32::MAX);
        let wanted = pattern_sum((memory.bytes / VECTOR * WORDS) as u64).wrapping_mul(reads);
        if found == wanted {
            Ok(best)
        } else {
            Err(ProbeError::WrongSum { device: self.device.name().into(), kernel, wanted, found })
        }
    }

    /// From the launch of an empty kernel until the host has synchronised with it, nanoseconds.
    fn launch_latency(&mut self) -> Result<Option<Spread>, EngineError> {
        let empty = empty();
        let mut nanoseconds = Vec::with_capacity(LAUNCHES);
        for _ in 0..LAUNCHES {
            let begin = Instant::now();
            self.device.launch(&empty)?;
            self.device.synchronise()?;
            nanoseconds.push(Nanos::from(begin.elapsed()).0);
        }
        Ok(Spread::of(&nanoseconds))
    }

    /// What one more node adds to the replay of a graph of empty kernels, each of which waits for the last one, nanoseconds.
    fn graph_node(&mut self, runs: usize) -> Result<Option<Spread>, EngineError> {
        let mut times = Vec::with_capacity(NODES.len());
        for nodes in NODES {
            self.device.launch(&empty())?;
            self.device.begin_capture()?;
            for _ in 0..nodes {
                self.device.launch(&empty())?;
            }
            let graph = self.device.end_capture()?;
            self.device.replay(&graph)?;
            self.timeline.drain()?;
            for _ in 0..runs {
                self.timeline.mark()?;
                self.device.replay(&graph)?;
                self.timeline.mark()?;
            }
            let marks = self.timeline.drain()?;
            times.push(marks.chunks_exact(2).map(|pair| pair[1].0 - pair[0].0).collect::<Vec<f64>>());
            self.device.synchronise()?;
        }
        let more = (NODES[1] - NODES[0]) as f64;
        let each: Vec<f64> = times[1].iter().zip(&times[0]).map(|(many, few)| (many - few) / more).collect();
        Ok(Spread::of(&each))
    }

    /// Bandwidths and latencies of the device. Matrix products and the link to the host are not among them.
    pub fn ceilings(&mut self, extent: &Extent) -> Result<Ceilings, ProbeError> {
        let a = self.pattern(extent.working_set)?;
        let whole = memory_of::<D>(&a);
        let mut read: Option<(Spread, String)> = None;
        for kernel in READS {
            let (rate, per) = self.best_read(extent, kernel, &whole, 1)?;
            if read.as_ref().is_none_or(|(so_far, _)| rate.median > so_far.median) {
                read = Some((rate, format!("{kernel}, {per} blocks of {BLOCK} per SM")));
            }
        }
        let (read_bytes_per_s, read_configuration) =
            read.ok_or(ProbeError::Repetitions { repetitions: extent.runs })?;
        let cached = Memory { bytes: extent.cached.min(extent.working_set), ..whole };
        let (cache_read, _) = self.best_read(extent, "read_cached", &cached, extent.cached_passes)?;
        let (write_bytes_per_s, _) = self.best(extent, whole.bytes as f64, |blocks| write(&whole, blocks))?;

        let half = extent.working_set / 2 / VECTOR * VECTOR;
        let (b, c) = (self.pattern(half)?, self.pattern(half)?);
        let (from, to) = (memory_of::<D>(&b), memory_of::<D>(&c));
        let (copy_bytes_per_s, _) = self.best(extent, 2.0 * half as f64, |blocks| {
            launch("copy", blocks, vec![from.address(), to.address(), from.vectors()])
        })?;
        let (triad_bytes_per_s, _) = self.best(extent, 3.0 * half as f64, |blocks| {
            let half = Argument::F32(0.5);
            launch("triad", blocks, vec![whole.address(), from.address(), to.address(), half, from.vectors()])
        })?;
        self.device.synchronise()?;
        Ok(Ceilings {
            read_bytes_per_s,
            copy_bytes_per_s,
            triad_bytes_per_s,
            gemm_flops_per_s: std::collections::BTreeMap::new(),
            launch_ns: self.launch_latency()?,
            working_set_bytes: Bytes(extent.working_set as u64),
            last_cache_bytes: None,
            read_configuration,
            gpu: Some(GpuCeilings {
                write_bytes_per_s: Some(write_bytes_per_s),
                cache_read_bytes_per_s: Some(cache_read),
                graph_node_ns: self.graph_node(extent.runs)?,
                ..GpuCeilings::default()
            }),
            disturbed: Vec::new(),
            age_s: None,
        })
    }

    /// Known bytes: written by the host and read back, written by a kernel and read back, and summed by every kernel that reads; what
    /// each found, by its name.
    pub fn known_bytes(&mut self, bytes: usize) -> Result<Vec<(&'static str, bool)>, ProbeError> {
        let mut found = Vec::new();
        let host: Vec<u8> = (0..bytes).map(|i| (i.wrapping_mul(167) >> 3).to_le_bytes()[0]).collect();
        let mut back = vec![0; bytes];
        let memory = self.device.allocate(bytes + 32)?;
        self.device.upload(&memory, 13, &host)?;
        self.device.download(&memory, 13, &mut back)?;
        found.push(("the host's bytes come back", back == host));

        let vectors = bytes / VECTOR * VECTOR;
        let pattern: Vec<u8> =
            (0u32..).take(vectors / 4).flat_map(|i| pattern_word(i).to_le_bytes()).collect();
        let mut back = vec![0; vectors];
        let source = self.pattern(vectors)?;
        self.device.download(&source, 0, &mut back)?;
        found.push(("a kernel's bytes come back", back == pattern));

        let target = self.device.allocate(vectors)?;
        let (from, to) = (memory_of::<D>(&source), memory_of::<D>(&target));
        self.device.launch(&launch("copy", 3, vec![from.address(), to.address(), from.vectors()]))?;
        self.device.download(&target, 0, &mut back)?;
        found.push(("a copy on the device is the same", back == pattern));

        let once = Extent {
            working_set: vectors,
            cached: vectors,
            cached_passes: 3,
            blocks_per_multiprocessor: &[1],
            runs: 1,
        };
        for kernel in READS.into_iter().chain(["read_cached"]) {
            let passes = if kernel == "read_cached" { once.cached_passes } else { 1 };
            let summed = match self.best_read(&once, kernel, &from, passes) {
                Ok(_) => true,
                Err(ProbeError::WrongSum { .. }) => false,
                Err(error) => return Err(error),
            };
            found.push((kernel, summed));
        }
        Ok(found)
    }

    /// Spins of known length, timed by the device's timeline beyond what a kernel without work takes.
    pub fn spins(&mut self, lengths: &[f64]) -> Result<Vec<Check>, EngineError> {
        let mut checks = Vec::with_capacity(lengths.len());
        let mut fastest = |launch: &KernelLaunch| -> Result<f64, EngineError> {
            Ok(self.time(7, launch)?.into_iter().fold(f64::INFINITY, f64::min) * 1e9)
        };
        let without_work = fastest(&empty())?;
        for &wanted in lengths {
            let spin = KernelLaunch {
                kernel: "spin".into(),
                grid: [1; 3],
                threads: 1,
                shared_bytes: 0,
                arguments: vec![Argument::U64(whole(wanted))],
            };
            let found = fastest(&spin)? - without_work;
            let bound = (wanted * 0.005).max(2_000.0) + TIMER_TICK_NS;
            checks.push(Check::within(
                format!("CUDA events: a spin of {} (ns)", Nanos(wanted)),
                wanted,
                found,
                bound,
            ));
        }
        Ok(checks)
    }
}

/// Where memory lies.
#[derive(Debug, Clone, Copy)]
pub struct Memory {
    address: u64,
    bytes: usize,
}

impl Memory {
    fn address(&self) -> Argument {
        Argument::Address(self.address)
    }
    fn vectors(&self) -> Argument {
        Argument::U64((self.bytes / VECTOR) as u64)
    }
}

/// Where an allocation lies.
pub fn memory_of<D: Device>(memory: &D::Memory) -> Memory {
    Memory { address: D::address(memory), bytes: D::bytes(memory) }
}

fn launch(kernel: &str, blocks: u32, arguments: Vec<Argument>) -> KernelLaunch {
    KernelLaunch { kernel: kernel.into(), grid: [blocks, 1, 1], threads: BLOCK, shared_bytes: 0, arguments }
}

/// Fills memory with the pattern.
pub fn write(to: &Memory, blocks: u32) -> KernelLaunch {
    launch("write_pattern", blocks, vec![to.address(), to.vectors()])
}

/// Reads memory, and adds its words to the one at `sum`.
#[cfg(feature = "cuda")]
pub fn read(from: &Memory, sum: &Memory, blocks: u32) -> KernelLaunch {
    launch("read_u4", blocks, vec![from.address(), sum.address(), from.vectors()])
}

fn empty() -> KernelLaunch {
    KernelLaunch { kernel: "empty".into(), grid: [1; 3], threads: 32, shared_bytes: 0, arguments: Vec::new() }
}

/// A word of the pattern.
fn pattern_word(index: u32) -> u32 {
    index.wrapping_mul(2_654_435_761).wrapping_add(1)
}

/// Σ over the first n words of the pattern, mod 2^32, in closed form.
fn pattern_sum(n: u64) -> u32 {
    let pairs = u128::from(n) * u128::from(n.saturating_sub(1)) / 2;
    let sum = pairs.wrapping_mul(2_654_435_761).wrapping_add(u128::from(n));
    u32::try_from(sum % (1 << 32)).expect("a remainder of 2^32 fits 32 bits")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pattern_sums_to_what_the_closed_form_says() {
        for n in [0u32, 1, 2, 1000, 70_001] {
            let sum = (0..n).fold(0u32, |sum, i| sum.wrapping_add(pattern_word(i)));
            assert_eq!(pattern_sum(u64::from(n)), sum);
        }
    }

    #[cfg(debug_assertions)]
    mod emulated {
        use super::*;
        use crate::engine::native::cuda::emulator::Emulated;

        #[test]
        fn every_probe_sees_the_bytes_it_should() {
            let mut probe = DeviceProbe::new(Emulated::new(3));
            for bytes in [16, 4_096, 40_000] {
                for (what, right) in probe.known_bytes(bytes).unwrap() {
                    assert!(right, "{what}, {bytes} bytes");
                }
            }
        }

        #[test]
        fn the_ceilings_of_the_emulated_device_have_every_row() {
            let extent = Extent {
                working_set: 64 << 10,
                cached: 8 << 10,
                cached_passes: 4,
                blocks_per_multiprocessor: &[1, 2],
                runs: 3,
            };
            let found = DeviceProbe::new(Emulated::new(1)).ceilings(&extent).unwrap();
            let gpu = found.gpu.unwrap();
            assert!(gpu.write_bytes_per_s.unwrap().median > 0.0);
            assert!(gpu.cache_read_bytes_per_s.unwrap().median > 0.0);
            assert!(gpu.graph_node_ns.is_some() && found.launch_ns.is_some());
            assert!(found.read_configuration.starts_with("read_u"), "{}", found.read_configuration);
        }

        #[test]
        fn a_word_that_changed_is_a_wrong_sum() {
            let mut probe = DeviceProbe::new(Emulated::new(5));
            let memory = probe.pattern(4_096).unwrap();
            probe.device().upload(&memory, 400, &[7]).unwrap();
            let extent = Extent {
                working_set: 4_096,
                cached: 4_096,
                cached_passes: 2,
                blocks_per_multiprocessor: &[1],
                runs: 1,
            };
            for (kernel, passes) in [("read_u2", 1), ("read_cached", 2)] {
                let error = probe.best_read(&extent, kernel, &memory_of::<Emulated>(&memory), passes);
                assert!(matches!(error, Err(ProbeError::WrongSum { kernel: of, .. }) if of == kernel));
            }
        }

        #[test]
        fn a_spin_is_checked_against_its_length() {
            let checks = DeviceProbe::new(Emulated::new(2)).spins(&[5e4]).unwrap();
            assert_eq!((checks.len(), checks[0].wanted), (1, 5e4));
        }
    }
}
