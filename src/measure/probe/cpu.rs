//! The ceilings of a CPU: memory bandwidth over threads and kernels, the matrix product of the stock engine, and the time
//! to start a pass on a team of threads.
//!
//! Enters: [`ProbeConfig`]. Leaves: [`Ceilings`] and the winning configuration. Threads, memory and SIMD are those of the native engine.
//! Each thread is pinned, touches its own part first, starts with the others at a barrier and stamps its own start and end; a pass
//! lasts from the first start to the last end, without waking the threads. A thread that has read its part helps with the others', as in a
//! step of the native engine, so that a core that is interrupted delays a pass by its share only. Kernels alternate within a repetition, so
//! that a drift of the machine's speed affects all of them alike. Of the ways to read memory the fastest few are tried on all of it: those that were fastest
//! on parts of it.

use std::collections::BTreeMap;
use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Tensor};
use hbmark_cpu_kernels::memory::{self, Prefetch, Stores, Walk};

use super::{MIN_REPETITIONS, ProbeConfig, ProbeError};
use crate::engine::native::cpu::huge_pages::Pages;
use crate::engine::native::cpu::thread_team::{Team, Worker, binds, owned, pin};
use crate::engine::native::cpu::{self as native, InstructionSet};
use crate::machine::environment::{cores as allowed_cores, last_cache};
use crate::machine::system_files::Root;
use crate::weights::Packing;
use crate::weights::stored_matrix::SUPER_BLOCK;
use hbmark_core::result::{Ceilings, Spread};

/// What the threads of a team do with their parts of the buffer in one pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pass {
    /// Nothing: the cost of waking and gathering the team.
    Empty,
    /// Writes every word, so that its page lies near the thread.
    Touch,
    Read {
        set: InstructionSet,
        walk: Walk,
    },
    /// Reads one of [`SLICES`] slices: those behind each other are in no cache.
    ReadSlice {
        set: InstructionSet,
        walk: Walk,
        slice: usize,
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

/// Words of f32 of a piece that a thread reads at a time: 1 MiB.
const PIECE: usize = (1 << 20) / size_of::<f32>();
/// Slices of a part, of which each trial of a walk reads another.
const SLICES: usize = 16;
/// Trials of every walk on slices; their median counts.
const SLICE_TRIALS: usize = 3;
/// Walks that are tried on all of the memory.
const FINALISTS: usize = 3;

impl Pass {
    /// How a read walks memory; `None` for a pass that writes.
    fn walk(self) -> Option<(InstructionSet, Walk)> {
        match self {
            Self::Read { set, walk } | Self::ReadSlice { set, walk, .. } => Some((set, walk)),
            Self::Empty | Self::Touch | Self::Copy { .. } | Self::Triad { .. } => None,
        }
    }

    /// What a read reads of a part.
    fn of_part(self, part: &[f32]) -> &[f32] {
        match self {
            Self::ReadSlice { slice, .. } => &part[owned(slice % SLICES, SLICES, part.len())],
            _ => part,
        }
    }

    /// What a pass that is not a read does with a thread's own part.
    fn write(self, part: &mut [f32]) {
        match self {
            Self::Empty | Self::Read { .. } | Self::ReadSlice { .. } => {}
            // Neither zero nor constant: such pages can be merged or compressed by the system below.
            Self::Touch => part.iter_mut().enumerate().for_each(|(i, word)| *word = (i + 1) as f32),
            Self::Copy { set, stores } => {
                let half = part.len() / 2;
                let (from, to) = part.split_at_mut(half);
                memory::copy(set, stores, from, black_box(&mut to[..half]));
            }
            Self::Triad { set, stores } => {
                let third = part.len() / 3;
                let (a, rest) = part.split_at_mut(third);
                let (b, c) = rest.split_at(third);
                memory::triad(set, stores, black_box(a), b, &c[..third], 3.0);
            }
        }
    }

    /// Bytes the pass moves over a part of so many words.
    fn bytes(self, words: usize) -> u64 {
        let moved = match self {
            Self::Empty => 0,
            Self::Touch | Self::Read { .. } => words,
            Self::ReadSlice { .. } => words / SLICES,
            Self::Copy { .. } => words / 2 * 2,
            Self::Triad { .. } => words / 3 * 3,
        };
        (moved * size_of::<f32>()) as u64
    }

    fn name(self, threads: usize) -> String {
        let plural = if threads == 1 { "" } else { "s" };
        match self {
            Self::Read { set, walk } => format!("{threads} thread{plural}, {}, {walk}", set.name()),
            other => format!("{threads} thread{plural}, {other:?}"),
        }
    }
}

/// Cuts the words into one part per thread, whole cache lines each but for the last, which takes what is left.
fn partition(words: &mut [f32], threads: usize) -> Vec<&mut [f32]> {
    const LINE: usize = 64 / size_of::<f32>();
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
    /// From the call until all threads have ended, waking them included.
    pub(crate) outside: f64,
}

/// A thread's part of the buffer; others read it, too.
type Part<'a> = RwLock<&'a mut [f32]>;

/// Pieces of the largest part of what a pass reads.
fn pieces(parts: &[Part<'_>], pass: Pass) -> usize {
    let pieces = |part: &Part<'_>| {
        pass.of_part(&part.read().unwrap_or_else(PoisonError::into_inner)).len().div_ceil(PIECE)
    };
    parts.iter().map(pieces).max().unwrap_or(0)
}

/// Calls `read` for every piece of what a pass reads, so many of a part, from whichever thread is free; a thread's own part comes first.
fn read_pieces(
    worker: &Worker<'_>,
    parts: &[Part<'_>],
    pass: Pass,
    pieces: usize,
    mut read: impl FnMut(&[f32]),
) {
    worker.parallel_for(0, parts.len() * pieces, |unit| {
        let part = parts[unit / pieces].read().unwrap_or_else(PoisonError::into_inner);
        if let Some(piece) = pass.of_part(&part).chunks(PIECE).nth(unit % pieces) {
            read(piece);
        }
    });
}

fn time(team: &mut Team, parts: &[Part<'_>], pass: Pass) -> PassTime {
    let pieces = pieces(parts, pass);
    let origin = Instant::now();
    let now = || u64::try_from(origin.elapsed().as_nanos()).unwrap_or(u64::MAX);
    let (first_start, last_end) = (AtomicU64::new(u64::MAX), AtomicU64::new(0));
    team.run(&|worker: &Worker<'_>| {
        let own = || parts[worker.index].write().unwrap_or_else(PoisonError::into_inner);
        let mut own = pass.walk().is_none().then(own);
        worker.barrier();
        first_start.fetch_min(now(), Ordering::Relaxed);
        if let Some(own) = &mut own {
            pass.write(own);
        } else if let Some((set, walk)) = pass.walk() {
            read_pieces(worker, parts, pass, pieces, |piece| {
                black_box(memory::read(set, walk, black_box(piece)));
            });
        }
        last_end.fetch_max(now(), Ordering::Relaxed);
    });
    let outside = origin.elapsed().as_secs_f64();
    let inside = last_end.into_inner() - first_start.into_inner();
    PassTime { inside: inside as f64 / 1e9, outside }
}

/// Runs `script` with a team of threads, one for each of `cores` and pinned to it unless a CPU quota forbids, each owning its part of `words`. `script` gets a
/// function that runs one pass and returns how long it took.
pub(crate) fn with_team<R: Send>(
    cores: &[usize],
    words: &mut [f32],
    script: impl FnOnce(&mut dyn FnMut(Pass) -> PassTime) -> R + Send,
) -> Result<R, ProbeError> {
    let pinned = binds(&Root::system(), allowed_cores());
    let run = || {
        let mut team = Team::unpinned(cores.len())
            .map_err(|source| ProbeError::Start { threads: cores.len(), source })?;
        let unpinned = Mutex::new(None);
        team.run(&|worker: &Worker<'_>| {
            let core = cores[worker.index];
            if pinned && let Err(source) = pin(core) {
                let mut unpinned = unpinned.lock().unwrap_or_else(PoisonError::into_inner);
                unpinned.get_or_insert(ProbeError::Pin { core, source });
            }
        });
        if let Some(error) = unpinned.into_inner().unwrap_or_else(PoisonError::into_inner) {
            return Err(error);
        }
        let parts: Vec<_> = partition(words, cores.len()).into_iter().map(RwLock::new).collect();
        Ok(script(&mut |pass| time(&mut team, &parts, pass)))
    };
    // The first member is the calling thread: one of its own, so that the caller's affinity stays as it is.
    std::thread::scope(|scope| scope.spawn(run).join())
        .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// The sets with vectors of their own width, widest first: the products of the others do not matter to memory.
pub(crate) fn instruction_sets() -> Vec<InstructionSet> {
    let same_width = [InstructionSet::Amx, InstructionSet::Avx512];
    InstructionSet::available().into_iter().filter(|set| !same_width.contains(set)).collect()
}

/// Every way to read worth trying on this processor: all walks with its widest vectors, and without prefetches those with narrower ones.
fn reads(sets: &[InstructionSet]) -> Vec<(InstructionSet, Walk)> {
    if sets[0] == InstructionSet::Portable {
        return vec![(sets[0], Walk::PLAIN)];
    }
    let narrower = sets[1..].iter().filter(|set| **set != InstructionSet::Portable);
    let unaided = Walk::ALL.into_iter().filter(|walk| walk.prefetch == Prefetch::Hardware);
    Walk::ALL
        .map(|walk| (sets[0], walk))
        .into_iter()
        .chain(narrower.flat_map(|set| unaided.clone().map(|walk| (*set, walk))))
        .collect()
}

/// The fastest few of those on slices of the memory.
fn finalists(reads: &[(InstructionSet, Walk)], time: &mut dyn FnMut(Pass) -> PassTime) -> Vec<Pass> {
    let mut slice = 0;
    let mut times = vec![[0.0; SLICE_TRIALS]; reads.len()];
    for trial in 0..SLICE_TRIALS {
        for ((set, walk), times) in reads.iter().copied().zip(&mut times) {
            times[trial] = time(Pass::ReadSlice { set, walk, slice }).inside;
            slice += 1;
        }
    }
    let median = |times: &[f64; SLICE_TRIALS]| Spread::of(times).map_or(f64::INFINITY, |times| times.median);
    let mut ranked: Vec<_> = reads.iter().zip(times.iter().map(median)).collect();
    ranked.sort_by(|a, b| a.1.total_cmp(&b.1));
    ranked.iter().take(FINALISTS).map(|((set, walk), _)| Pass::Read { set: *set, walk: *walk }).collect()
}

/// The way to read that is fastest on slices of the memory.
pub(crate) fn fastest_read(time: &mut dyn FnMut(Pass) -> PassTime) -> Pass {
    finalists(&reads(&instruction_sets()), time)[0]
}

/// Copies and triads worth trying on a processor whose widest vectors are these.
fn writes(set: InstructionSet) -> Vec<Pass> {
    let mut passes = Vec::new();
    for stores in [Stores::Normal, Stores::NonTemporal] {
        if set != InstructionSet::Portable || stores == Stores::Normal {
            passes.extend([Pass::Copy { set, stores }, Pass::Triad { set, stores }]);
        }
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
        .filter_map(|trial| Some((trial, Spread::of(&trial.rates)?)))
        .max_by(|a, b| a.1.median.total_cmp(&b.1.median))
}

/// Measures the ceilings of the host processor.
pub fn measure_cpu(config: &ProbeConfig) -> Result<Ceilings, ProbeError> {
    let cores = super::usable_cores()?;
    // Two thirds of the time belong to memory, the figure that everything else is divided by.
    let share = 2.0 / 3.0 * config.seconds_cap / config.threads.len() as f64;
    let sets = instruction_sets();
    let (reads, writes) = (reads(&sets), writes(sets[0]));
    let mut trials = Vec::new();
    let mut wakes = Vec::new();
    for threads in config.threads.iter().copied() {
        // A fresh buffer per team, so that every part is first touched by the thread that will walk it.
        let words = words_in(config);
        let mut buffer = Pages::new(words.saturating_mul(size_of::<f32>()))
            .map_err(|source| ProbeError::Memory { bytes: config.working_set, source })?;
        let begin = Instant::now();
        let (rates, wake) = with_team(&cores[..threads], &mut buffer.floats_mut()[..words], |time| {
            let end = begin + Duration::from_secs_f64(share.max(0.0));
            time(Pass::Touch);
            let mut passes = finalists(&reads, time);
            passes.extend(&writes);
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
        launch_ns: wake.and_then(|(_, times)| Spread::of(times)),
        working_set_bytes: config.working_set,
        last_cache_bytes: last_cache(),
        read_configuration: winner.pass.name(winner.threads),
        gpu: None,
        disturbed: Vec::new(),
        age_s: None,
    })
}

fn words_in(config: &ProbeConfig) -> usize {
    usize::try_from(config.working_set.0).unwrap_or(usize::MAX) / size_of::<f32>()
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
        let Some(found) = Spread::of(rates) else { return };
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
                .map_err(|error| ProbeError::of_product("cpu", name, size, &error))?;
            keep(name, &rates);
        }
    }
    let threads = config.threads.iter().copied().max().unwrap_or(1);
    // Whole blocks of every format.
    let size = config.gemm_sizes.iter().copied().max().unwrap_or(512).next_multiple_of(SUPER_BLOCK);
    for packing in Packing::NATIVE {
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
    fn walks_that_are_fastest_on_slices_are_tried_on_all_memory_and_no_slice_is_read_twice_in_a_row() {
        let sets = [InstructionSet::Avx512Base, InstructionSet::Avx2, InstructionSet::Portable];
        let reads = reads(&sets);
        assert_eq!(reads.len(), Walk::ALL.len() + 3);
        let fast = Walk { streams: 4, prefetch: Prefetch::FarOnce };
        let mut slices = Vec::new();
        let found = finalists(&reads, &mut |pass| {
            let Pass::ReadSlice { set, walk, slice } = pass else { panic!("{pass:?}") };
            slices.push(slice % SLICES);
            // The first trial of the fast one is slow by accident.
            let fast = walk == fast && slices.len() > reads.len();
            let inside = if fast { 1.0 } else { 2.0 + f64::from(u8::from(set != sets[0])) };
            PassTime { inside, outside: inside }
        });
        assert_eq!(found.len(), FINALISTS);
        assert_eq!(found[0], Pass::Read { set: sets[0], walk: fast });
        assert!(slices.windows(2).all(|two| two[1] == (two[0] + 1) % SLICES));
        assert_eq!(super::reads(&sets[2..]), [(InstructionSet::Portable, Walk::PLAIN)]);
    }

    #[test]
    fn parts_cover_every_word_once() {
        for (len, threads) in [(0, 1), (1, 3), (64, 2), (1_000, 7), (4_096, 4)] {
            let mut words: Vec<f32> = vec![0.0; len];
            let parts = partition(&mut words, threads);
            assert_eq!(parts.len(), threads);
            for part in parts {
                for word in part {
                    *word += 1.0;
                }
            }
            assert!(
                words.iter().all(|word| (*word - 1.0).abs() < f32::EPSILON),
                "{len} words, {threads} threads"
            );
        }
    }

    #[test]
    fn a_team_runs_each_pass_on_every_part() {
        let core = super::super::usable_cores().unwrap()[0];
        let mut words = vec![0.0; 4_003];
        with_team(&[core, core, core], &mut words, |time| {
            time(Pass::Touch);
            time(Pass::Empty);
        })
        .unwrap();
        assert!(words.iter().all(|word| *word >= 1.0));
        assert!((words[0] - 1.0).abs() < f32::EPSILON);
    }

    #[test]
    fn threads_read_every_word_of_a_pass_once_between_them() {
        let (set, walk) = (InstructionSet::Portable, Walk::PLAIN);
        let mut words: Vec<f32> = (0..2 * PIECE + 1_003).map(|word| word as f32).collect();
        let len = words.len();
        for threads in [1, 2, 3] {
            let parts: Vec<_> = partition(&mut words, threads).into_iter().map(RwLock::new).collect();
            let read = |pass| {
                let (found, pieces) = (Mutex::new(Vec::new()), pieces(&parts, pass));
                Team::unpinned(threads).unwrap().run(&|worker: &Worker<'_>| {
                    read_pieces(worker, &parts, pass, pieces, |piece| found.lock().unwrap().extend(piece));
                });
                let mut found: Vec<f32> = found.into_inner().unwrap();
                let all = found.len();
                found.sort_by(f32::total_cmp);
                found.dedup();
                assert_eq!(all, found.len(), "{pass:?}, {threads} threads: a word was read twice");
                all
            };
            assert_eq!(read(Pass::Read { set, walk }), len, "{threads} threads");
            let slices = (0..SLICES).map(|slice| read(Pass::ReadSlice { set, walk, slice })).sum::<usize>();
            assert_eq!(slices, len, "{threads} threads");
        }
    }

    #[test]
    fn a_core_that_does_not_exist_is_named() {
        let error = with_team(&[1_000_000], &mut [0.0; 8], |time| time(Pass::Empty)).unwrap_err();
        assert!(error.to_string().contains("core 1000000"), "{error}");
    }

    #[test]
    fn copy_and_triad_count_every_stream() {
        let set = InstructionSet::Portable;
        assert_eq!(Pass::Read { set, walk: Walk::PLAIN }.bytes(10), 40);
        assert_eq!(Pass::ReadSlice { set, walk: Walk::PLAIN, slice: 3 }.bytes(160), 40);
        assert_eq!(Pass::Copy { set, stores: Stores::Normal }.bytes(11), 40);
        assert_eq!(Pass::Triad { set, stores: Stores::Normal }.bytes(11), 36);
        assert_eq!(Pass::Empty.bytes(10), 0);
    }

    #[test]
    fn the_best_median_wins_not_the_best_single_pass() {
        let trial = |streams, rates: &[f64]| Trial {
            pass: Pass::Read {
                set: InstructionSet::Avx512Base,
                walk: Walk { streams, prefetch: Prefetch::Far },
            },
            threads: 2,
            rates: rates.to_vec(),
        };
        let trials = [trial(1, &[5.0, 5.0, 99.0]), trial(8, &[6.0, 7.0, 8.0]), trial(4, &[])];
        let (winner, spread) = best(&trials, |_| true).unwrap();
        assert_eq!(winner.pass.name(winner.threads), "2 threads, avx512, 8 streams, prefetch 2 KiB ahead");
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
        let (floats, codes) =
            (["bf16", "f16", "f32", "fp8"], ["int4", "int8", "mxfp4", "mxfp8", "nvfp4", "q4_0", "q4_k"]);
        assert_eq!(dtypes, [&floats[..], &codes, &["q5_k", "q6_k", "q8_0"]].concat());
        assert!(ceilings.launch_ns.is_some());
    }
}
