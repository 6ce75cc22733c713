//! The ceilings of a CPU: memory bandwidth over threads and kernels, the matrix product of the stock engine, and the time
//! to wake a team of threads.
//!
//! Enters: [`ProbeConfig`]. Leaves: [`Ceilings`] and the winning configuration. Each thread is pinned, touches its own part
//! first, starts with the others at a barrier and stamps its own start and end; a pass lasts from the first start to the
//! last end, so waking the threads is not in it. Kernels take turns within a repetition, so that a machine whose speed
//! drifts is unfair to none of them.

use std::collections::BTreeMap;
use std::hint::black_box;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Barrier, Mutex};
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Tensor};

use super::cpu_kernels::{self, HugePageBuffer, InstructionSet, Stores};
use super::{MIN_REPETITIONS, ProbeConfig, ProbeError, spread};
use crate::engine::native::cpu as native;
use crate::weights::Packing;
use hbmark_core::result::{Ceilings, Spread};

/// What every thread of a team does with its own part of the buffer in one pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pass {
    /// Nothing: the cost of waking and gathering the team.
    Empty,
    /// Writes every word, so that its page lies near the thread.
    Touch,
    Read {
        set: InstructionSet,
        streams: usize,
    },
    /// First half into the second.
    Copy {
        set: InstructionSet,
        stores: Stores,
    },
    /// First third = second + s · last.
    Triad {
        set: InstructionSet,
        stores: Stores,
    },
}

impl Pass {
    fn run(self, part: &mut [f64]) {
        match self {
            Self::Empty => {}
            // Neither zero nor constant: such pages can be merged or compressed by the system below.
            Self::Touch => part.iter_mut().enumerate().for_each(|(i, word)| *word = (i + 1) as f64),
            Self::Read { set, streams } => {
                black_box(cpu_kernels::read(set, streams, black_box(part)));
            }
            Self::Copy { set, stores } => {
                let half = part.len() / 2;
                let (from, to) = part.split_at_mut(half);
                cpu_kernels::copy(set, stores, from, black_box(&mut to[..half]));
            }
            Self::Triad { set, stores } => {
                let third = part.len() / 3;
                let (a, rest) = part.split_at_mut(third);
                let (b, c) = rest.split_at(third);
                cpu_kernels::triad(set, stores, black_box(a), b, &c[..third], 3.0);
            }
        }
    }

    /// Bytes the pass moves over a part of so many words.
    fn bytes(self, words: usize) -> u64 {
        let moved = match self {
            Self::Empty => 0,
            Self::Touch | Self::Read { .. } => words,
            Self::Copy { .. } => words / 2 * 2,
            Self::Triad { .. } => words / 3 * 3,
        };
        (moved * size_of::<f64>()) as u64
    }

    fn name(self, threads: usize) -> String {
        let plural = if threads == 1 { "" } else { "s" };
        match self {
            Self::Read { set, streams } => {
                let streams_plural = if streams == 1 { "" } else { "s" };
                format!("{threads} thread{plural}, {}, {streams} stream{streams_plural}", set.name())
            }
            other => format!("{threads} thread{plural}, {other:?}"),
        }
    }
}

/// Cuts the words into one part per thread, whole cache lines each but for the last, which takes what is left.
fn partition(words: &mut [f64], threads: usize) -> Vec<&mut [f64]> {
    const LINE: usize = 64 / size_of::<f64>();
    let each = words.len() / threads / LINE * LINE;
    let mut parts = Vec::with_capacity(threads);
    let mut rest = words;
    for _ in 1..threads {
        let (part, tail) = rest.split_at_mut(each);
        parts.push(part);
        rest = tail;
    }
    parts.push(rest);
    parts
}

/// How long a pass took, in seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct PassTime {
    /// First start to last end of the threads.
    pub(crate) inside: f64,
    /// From the caller's signal until the caller knows that all have ended.
    pub(crate) outside: f64,
}

struct Stage {
    gate: Barrier,
    /// The pass to run next; none ends the threads.
    next: Mutex<Option<Pass>>,
    origin: Instant,
    first_start: AtomicU64,
    last_end: AtomicU64,
    /// Core number of the first thread that could not be pinned, and why.
    unpinned: Mutex<Option<(usize, std::io::Error)>>,
    ready: AtomicUsize,
}

impl Stage {
    fn now(&self) -> u64 {
        u64::try_from(self.origin.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    fn current(&self) -> Option<Pass> {
        *self.next.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn set(&self, pass: Option<Pass>) {
        *self.next.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = pass;
    }

    fn work(&self, core: usize, part: &mut [f64]) {
        if let Err(error) = cpu_kernels::pin_to(core) {
            self.unpinned
                .lock()
                .unwrap_or_else(std::sync::PoisonError::into_inner)
                .get_or_insert((core, error));
        }
        self.ready.fetch_add(1, Ordering::Release);
        loop {
            self.gate.wait();
            let Some(pass) = self.current() else { return };
            self.first_start.fetch_min(self.now(), Ordering::Relaxed);
            pass.run(part);
            self.last_end.fetch_max(self.now(), Ordering::Relaxed);
            self.gate.wait();
        }
    }

    fn time(&self, pass: Pass) -> PassTime {
        self.set(Some(pass));
        self.first_start.store(u64::MAX, Ordering::Relaxed);
        self.last_end.store(0, Ordering::Relaxed);
        let signal = Instant::now();
        self.gate.wait();
        self.gate.wait();
        let outside = signal.elapsed().as_secs_f64();
        let inside = self.last_end.load(Ordering::Relaxed) - self.first_start.load(Ordering::Relaxed);
        PassTime { inside: inside as f64 / 1e9, outside }
    }
}

/// Runs `script` with a team of threads, one pinned to each of `cores`, each owning its part of `words`. `script` gets a
/// function that runs one pass and tells how long it took.
///
/// # Errors
/// The first thread that could not be pinned, found after the script has run.
pub(crate) fn with_team<R>(
    cores: &[usize],
    words: &mut [f64],
    script: impl FnOnce(&mut dyn FnMut(Pass) -> PassTime) -> R,
) -> Result<R, ProbeError> {
    let stage = Stage {
        gate: Barrier::new(cores.len() + 1),
        next: Mutex::new(None),
        origin: Instant::now(),
        first_start: AtomicU64::new(u64::MAX),
        last_end: AtomicU64::new(0),
        unpinned: Mutex::new(None),
        ready: AtomicUsize::new(0),
    };
    let result = std::thread::scope(|scope| {
        for (core, part) in cores.iter().zip(partition(words, cores.len())) {
            let stage = &stage;
            scope.spawn(move || stage.work(*core, part));
        }
        while stage.ready.load(Ordering::Acquire) < cores.len() {
            std::thread::yield_now();
        }
        let result = script(&mut |pass| stage.time(pass));
        stage.set(None);
        stage.gate.wait();
        result
    });
    match stage.unpinned.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner) {
        Some((core, source)) => Err(ProbeError::Pin { core, source }),
        None => Ok(result),
    }
}

/// Every pass worth trying on this processor.
fn candidates(sets: &[InstructionSet]) -> Vec<Pass> {
    let widest = sets.first().copied().unwrap_or(InstructionSet::Portable);
    let mut passes = Vec::new();
    for set in sets.iter().copied() {
        let streams: &[usize] = if set == InstructionSet::Portable { &[1] } else { &[1, 4, 8] };
        // Plain code is a fallback, not a rival of the vectors.
        if set == widest || set != InstructionSet::Portable {
            passes.extend(streams.iter().map(|streams| Pass::Read { set, streams: *streams }));
        }
    }
    let stores: &[Stores] = match widest {
        InstructionSet::Portable => &[Stores::Normal],
        _ => &[Stores::Normal, Stores::NonTemporal],
    };
    for stores in stores.iter().copied() {
        passes.push(Pass::Copy { set: widest, stores });
        passes.push(Pass::Triad { set: widest, stores });
    }
    passes
}

/// The rates of one pass with one team.
#[derive(Debug, Clone, PartialEq)]
struct Trial {
    pass: Pass,
    threads: usize,
    rates: Vec<f64>,
}

/// The trial with the best median among those of the wanted kind.
fn best(trials: &[Trial], wanted: impl Fn(Pass) -> bool) -> Option<(&Trial, Spread)> {
    trials
        .iter()
        .filter(|trial| wanted(trial.pass))
        .filter_map(|trial| Some((trial, spread(&trial.rates)?)))
        .max_by(|a, b| a.1.median.total_cmp(&b.1.median))
}

/// Measures the ceilings of the host processor.
///
/// # Errors
/// A config that cannot be run, or a system that refuses memory or pinning.
pub fn measure_cpu(config: &ProbeConfig) -> Result<Ceilings, ProbeError> {
    let cores = super::usable_cores()?;
    config.check(cores.len())?;
    // Two thirds of the time belong to memory, the figure that everything else is divided by.
    let share = 2.0 / 3.0 * config.seconds_cap / config.threads.len() as f64;
    let passes = candidates(&InstructionSet::available());
    let mut trials = Vec::new();
    let mut wakes = Vec::new();
    for threads in config.threads.iter().copied() {
        // A fresh buffer per team, so that every part is first touched by the thread that will walk it.
        let words = words_in(config);
        let mut buffer = HugePageBuffer::new(words.saturating_mul(size_of::<f64>()))
            .map_err(|source| ProbeError::Memory { bytes: config.working_set, source })?;
        let begin = Instant::now();
        let (rates, wake) = with_team(&cores[..threads], &mut buffer.words_mut()[..words], |time| {
            let end = begin + Duration::from_secs_f64(share.max(0.0));
            time(Pass::Touch);
            let rates = rates_of(&passes, config, threads, end, time);
            (rates, (0..200).map(|_| time(Pass::Empty).outside * 1e9).collect::<Vec<_>>())
        })?;
        trials.extend(rates);
        wakes.push((threads, wake));
    }
    let missing = || ProbeError::Repetitions { repetitions: 0 };
    let (winner, read) = best(&trials, |pass| matches!(pass, Pass::Read { .. })).ok_or_else(missing)?;
    let (_, copy) = best(&trials, |pass| matches!(pass, Pass::Copy { .. })).ok_or_else(missing)?;
    let (_, triad) = best(&trials, |pass| matches!(pass, Pass::Triad { .. })).ok_or_else(missing)?;
    let wake = wakes.iter().find(|(threads, _)| *threads == winner.threads);
    Ok(Ceilings {
        read_bytes_per_s: read,
        copy_bytes_per_s: copy,
        triad_bytes_per_s: triad,
        gemm_flops_per_s: matrix_products(config)?,
        launch_ns: wake.and_then(|(_, times)| spread(times)),
        working_set_bytes: config.working_set,
        last_cache_bytes: super::last_cache(),
        read_configuration: winner.pass.name(winner.threads),
        gpu: None,
    })
}

fn words_in(config: &ProbeConfig) -> usize {
    usize::try_from(config.working_set.0).unwrap_or(usize::MAX) / size_of::<f64>()
}

/// Runs the passes in turns until the repetitions or the time are used up.
fn rates_of(
    passes: &[Pass],
    config: &ProbeConfig,
    threads: usize,
    end: Instant,
    time: &mut dyn FnMut(Pass) -> PassTime,
) -> Vec<Trial> {
    let words = words_in(config);
    let mut trials: Vec<Trial> =
        passes.iter().map(|pass| Trial { pass: *pass, threads, rates: Vec::new() }).collect();
    for repetition in 0..=config.repetitions {
        if repetition > MIN_REPETITIONS && Instant::now() >= end {
            break;
        }
        for trial in &mut trials {
            let seconds = time(trial.pass).inside;
            // The first round warms caches of translations and the clock, and is not counted.
            if repetition > 0 && seconds > 0.0 {
                trial.rates.push(trial.pass.bytes(words) as f64 / seconds);
            }
        }
    }
    trials
}

/// The fastest matrix product that the engines have in each dtype: candle's `matmul` on its own threads, or the native
/// engine's; not the peak of the processor. Square, on normal random numbers. candle's half precisions only up to 512, because it
/// is many times slower in them for some shapes and the probe must end; thin products, as in decode, can stay far below.
fn matrix_products(config: &ProbeConfig) -> Result<BTreeMap<String, Spread>, ProbeError> {
    const SMALL: [usize; 2] = [256, 512];
    let kinds: [(&str, DType, &[usize]); 3] =
        [("f32", DType::F32, &config.gemm_sizes), ("bf16", DType::BF16, &SMALL), ("f16", DType::F16, &SMALL)];
    let mut peaks: BTreeMap<String, Spread> = BTreeMap::new();
    let mut keep = |name: &str, rates: &[f64]| {
        let Some(found) = spread(rates) else { return };
        let best = peaks.entry(name.to_owned()).or_insert(found);
        if found.median > best.median {
            *best = found;
        }
    };
    for (name, dtype, sizes) in kinds {
        for size in sizes.iter().copied() {
            // A ninth: a third of the time, shared by three dtypes; each size may take its part of that.
            let cap = Duration::from_secs_f64((config.seconds_cap / 9.0 / sizes.len() as f64).max(0.0));
            let rates = matrix_product(dtype, size, config.repetitions, cap)
                .map_err(|source| ProbeError::Gemm { dtype: name, size, source })?;
            keep(name, &rates);
        }
    }
    let threads = config.threads.iter().copied().max().unwrap_or(1);
    let size = config.gemm_sizes.iter().copied().max().unwrap_or(512);
    for packing in NATIVE_FORMATS {
        let rates =
            native::product_rates(threads, packing, size, MIN_REPETITIONS.max(config.repetitions.min(5)))
                .map_err(|source| ProbeError::NativeProduct {
                    dtype: packing.name(),
                    source: Box::new(source),
                })?;
        keep(packing.name(), &rates);
    }
    Ok(peaks)
}

/// What the native engine streams, and multiplies in its own way.
const NATIVE_FORMATS: [Packing; 7] = [
    Packing::F32,
    Packing::F16,
    Packing::Bf16,
    Packing::Int8,
    Packing::Q8_0,
    Packing::Q4_0,
    Packing::Int4 { group: 32 },
];

fn matrix_product(
    dtype: DType,
    size: usize,
    repetitions: usize,
    cap: Duration,
) -> candle_core::Result<Vec<f64>> {
    let random = || Tensor::randn(0f32, 1f32, (size, size), &Device::Cpu)?.to_dtype(dtype);
    let (left, right) = (random()?, random()?);
    black_box(left.matmul(&right)?);
    let flops = 2.0 * (size as f64).powi(3);
    let begin = Instant::now();
    let mut rates = Vec::with_capacity(repetitions);
    while rates.len() < MIN_REPETITIONS || (rates.len() < repetitions && begin.elapsed() < cap) {
        let start = Instant::now();
        black_box(left.matmul(&right)?);
        rates.push(flops / start.elapsed().as_secs_f64());
    }
    Ok(rates)
}

#[cfg(test)]
mod tests {
    use super::*;
    use hbmark_core::units::Bytes;

    #[test]
    fn parts_cover_every_word_once() {
        for (len, threads) in [(0, 1), (1, 3), (64, 2), (1_000, 7), (4_096, 4)] {
            let mut words: Vec<f64> = vec![0.0; len];
            let parts = partition(&mut words, threads);
            assert_eq!(parts.len(), threads);
            for part in parts {
                for word in part {
                    *word += 1.0;
                }
            }
            assert!(
                words.iter().all(|word| (*word - 1.0).abs() < f64::EPSILON),
                "{len} words, {threads} threads"
            );
        }
    }

    #[test]
    fn a_team_runs_each_pass_on_every_part() {
        let core = cpu_kernels::usable_cores().unwrap()[0];
        let mut words = vec![0.0; 4_003];
        with_team(&[core, core, core], &mut words, |time| {
            time(Pass::Touch);
            time(Pass::Empty);
        })
        .unwrap();
        assert!(words.iter().all(|word| *word >= 1.0));
        assert!((words[0] - 1.0).abs() < f64::EPSILON);
    }

    #[test]
    fn a_core_that_does_not_exist_is_named() {
        let error = with_team(&[1_000_000], &mut [0.0; 8], |time| time(Pass::Empty)).unwrap_err();
        assert!(error.to_string().contains("core 1000000"), "{error}");
    }

    #[test]
    fn copy_and_triad_count_every_stream() {
        let set = InstructionSet::Portable;
        assert_eq!(Pass::Read { set, streams: 1 }.bytes(10), 80);
        assert_eq!(Pass::Copy { set, stores: Stores::Normal }.bytes(11), 80);
        assert_eq!(Pass::Triad { set, stores: Stores::Normal }.bytes(11), 72);
        assert_eq!(Pass::Empty.bytes(10), 0);
    }

    #[test]
    fn the_best_median_wins_not_the_best_single_pass() {
        let trial = |streams, rates: &[f64]| Trial {
            pass: Pass::Read { set: InstructionSet::Avx512, streams },
            threads: 2,
            rates: rates.to_vec(),
        };
        let trials = [trial(1, &[5.0, 5.0, 99.0]), trial(8, &[6.0, 7.0, 8.0]), trial(4, &[])];
        let (winner, spread) = best(&trials, |_| true).unwrap();
        assert_eq!(winner.pass.name(winner.threads), "2 threads, avx512, 8 streams");
        assert_eq!(spread, Spread { median: 7.0, low: 6.0, high: 8.0 });
        assert!(best(&trials, |pass| pass == Pass::Empty).is_none());
    }

    #[test]
    fn a_small_probe_fills_every_ceiling() {
        let config = ProbeConfig {
            threads: vec![1],
            working_set: Bytes(2 << 20),
            repetitions: 3,
            seconds_cap: 0.0,
            gemm_sizes: vec![32],
        };
        let ceilings = measure_cpu(&config).unwrap();
        assert!(ceilings.read_bytes_per_s.low > 0.0 && ceilings.triad_bytes_per_s.low > 0.0);
        let dtypes: Vec<_> = ceilings.gemm_flops_per_s.keys().collect();
        assert_eq!(dtypes, ["bf16", "f16", "f32", "int4", "int8", "q4_0", "q8_0"]);
        assert!(ceilings.launch_ns.is_some());
    }
}
