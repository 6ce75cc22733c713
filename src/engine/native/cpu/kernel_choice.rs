//! The instruction set of each product, chosen by measurement.
//!
//! Enters: a packed matrix in a format that was not met before. Leaves: for products of one, two, four, eight and sixteen rows the
//! [`InstructionSet`] whose kernel was fastest on this processor. The widest set is not always the fastest: on some processors the dot product of
//! bf16 pairs is slower than two multiplications in f32. A format is timed once in a process, for some milliseconds, so that all its sessions
//! compute the same bits; of bf16, whose bits depend on the set, all rows have one, so that a row's do not depend on the others of its step.

use std::hint::black_box;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use hbmark_cpu_kernels::memory::flush;
use hbmark_cpu_kernels::simd::InstructionSet;
use hbmark_cpu_kernels::tiles::{MAX_PANELS, NEIGHBOURS, PackedFormat, Precision};

use super::linear;
use super::packed_activations::{InputShape, InputWriter, PackedActivations};
use super::packed_matrix::PackedMatrix;
use crate::engine::EngineError;

/// Names an instruction set that all kernels are to use.
pub const FORCED: &str = "HBMARK_CPU_KERNELS";

/// Rows that a product is timed with: each stands for those above the one before, and 16 for all above 8.
const ROWS: [usize; 5] = [1, 2, 4, 8, 16];

/// Formats with kernels of their own, by the names of `--dtype`.
const FORMATS: [&str; 14] = [
    "f32", "f16", "bf16", "int8", "fp8", "q8_0", "q4_0", "mxfp8", "mxfp4", "nvfp4", "int4", "q4_k", "q5_k",
    "q6_k",
];

/// Of products with a format, what was timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct OfFormat {
    /// In the order of [`ROWS`].
    sets: Option<[InstructionSet; ROWS.len()]>,
    /// Whether integer products of one and two rows prefetch their weights past the outer caches (`prefetchnta`): on some processors it is a tenth
    /// faster, on others three times slower.
    past_caches: Option<bool>,
}

/// Of all formats.
type OfFormats = [OfFormat; FORMATS.len()];
const NOT_TIMED: OfFormats = [OfFormat { sets: None, past_caches: None }; FORMATS.len()];

/// What this process has timed.
static TIMED: Mutex<OfFormats> = Mutex::new(NOT_TIMED);

/// What a process has timed of a format, by names, for a process that goes on with its work.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TimedFormat {
    format: String,
    sets: Option<[String; ROWS.len()]>,
    past_caches: Option<bool>,
}

/// What this process has timed.
pub fn timed() -> Vec<TimedFormat> {
    names_of(&TIMED.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Takes over what another process of this machine has timed, where this one has not yet: noise may decide between two sets, and the blocks of a
/// cell are to be of one.
pub fn take_over(timed: &[TimedFormat]) {
    add(&mut TIMED.lock().unwrap_or_else(PoisonError::into_inner), timed);
}

fn names_of(timed: &OfFormats) -> Vec<TimedFormat> {
    let each = FORMATS.iter().zip(timed).filter(|(_, of)| **of != NOT_TIMED[0]);
    let names = |sets: [InstructionSet; ROWS.len()]| sets.map(|set| set.id().to_owned());
    each.map(|(format, OfFormat { sets, past_caches })| TimedFormat {
        format: (*format).to_owned(),
        sets: sets.map(names),
        past_caches: *past_caches,
    })
    .collect()
}

fn add(known: &mut OfFormats, timed: &[TimedFormat]) {
    let available = InstructionSet::available();
    let set = |name: &String| available.iter().copied().find(|set| set.id() == name);
    for TimedFormat { format, sets, past_caches } in timed {
        let Some(of) = FORMATS.iter().position(|known| known == format) else { continue };
        let sets = sets.iter().flatten().map(set).collect::<Option<Vec<_>>>();
        known[of].sets = known[of].sets.or_else(|| sets?.try_into().ok());
        known[of].past_caches = known[of].past_caches.or(*past_caches);
    }
}

/// The name that [`FORCED`] gives, if it gives one.
pub fn forced_name() -> Option<String> {
    std::env::var_os(FORCED).map(|name| name.to_string_lossy().into_owned())
}

/// Bytes of weights that are read from memory to time how they are prefetched.
const READ: usize = 1 << 20;

/// Bursts of a set, whose fastest run counts.
const BURSTS: usize = 3;
const BURST: Duration = Duration::from_micros(60);

/// Readings of weights from memory, of which the fastest counts.
const READINGS: usize = 6;

/// Which kernels run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KernelChoice {
    /// Of everything that is not a product, and of products whose format was not timed.
    pub general: InstructionSet,
    formats: OfFormats,
    forced: bool,
}

impl KernelChoice {
    /// One set for everything.
    pub fn forced(set: InstructionSet) -> Self {
        Self { general: set, formats: NOT_TIMED, forced: true }
    }

    /// The fastest of this processor, or the set that `HBMARK_CPU_KERNELS` names.
    pub fn of_processor() -> Result<Self, EngineError> {
        let Some(name) = forced_name() else {
            return Ok(Self { forced: false, ..Self::forced(InstructionSet::best()) });
        };
        Self::named(&name, &InstructionSet::available())
    }

    fn named(name: &str, available: &[InstructionSet]) -> Result<Self, EngineError> {
        let found = available.iter().find(|set| set.id() == name);
        let others = || available.iter().map(|set| set.id()).collect::<Vec<_>>().join(", ");
        found.map(|set| Self::forced(*set)).ok_or_else(|| {
            let why = format!("this processor has {}", others());
            EngineError::unsupported("native", format!("{FORCED}={name}"), why)
        })
    }

    /// The set for products of so many rows with a format.
    #[inline]
    pub fn of(&self, format: PackedFormat, rows: usize) -> InstructionSet {
        match &self.formats[index(format)].sets {
            Some(sets) => sets[class(rows)],
            None => self.general,
        }
    }

    /// Whether integer products of one and two rows with a format prefetch past the outer caches.
    #[inline]
    pub fn past_caches(&self, format: PackedFormat) -> bool {
        self.formats[index(format)].past_caches == Some(true)
    }

    /// Times the kernels of a format, unless that was done or one set is forced, and how its weights are prefetched, where there are enough of them.
    pub fn meet(&mut self, matrix: &PackedMatrix) {
        let index = index(matrix.format);
        let mut timed = TIMED.lock().unwrap_or_else(PoisonError::into_inner);
        if !self.forced && matrix.panels() > 0 {
            self.formats[index].sets = Some(*timed[index].sets.get_or_insert_with(|| fastest_sets(matrix)));
        }
        let integer = matrix.format.precision() == Precision::Quads;
        if cfg!(target_arch = "x86_64") && integer && matrix.packed_bytes().len() >= READ {
            let set = self.of(matrix.format, 1);
            let time = || past_is_faster(times_from_memory(set, matrix));
            self.formats[index].past_caches = Some(*timed[index].past_caches.get_or_insert_with(time));
        }
    }

    /// The kernels by name: the general set, then what products of a format use instead.
    pub fn names(&self) -> Vec<String> {
        let mut names = vec![self.general.name().to_owned()];
        for (format, OfFormat { sets, past_caches }) in FORMATS.iter().zip(&self.formats) {
            if *past_caches == Some(true) {
                names.push(format!("prefetchnta for {format} products of 1 and 2 rows"));
            }
            let others = ROWS.iter().zip(sets.iter().flatten()).filter(|(_, set)| **set != self.general);
            names.extend(others.map(|(rows, set)| {
                let rows = match rows {
                    1 => "1 row",
                    2 => "2 rows",
                    4 => "3 and 4 rows",
                    8 => "5 to 8 rows",
                    _ => "9 rows and more",
                };
                format!("{} for {format} products of {rows}", set.name())
            }));
        }
        names
    }
}

/// What can be fastest: plain Rust only where there is nothing else, and of AMX and what it comes with the first alone where a format has no
/// matrices.
fn candidates(format: PackedFormat) -> Vec<InstructionSet> {
    let mut sets = InstructionSet::available();
    if sets.len() > 1 {
        sets.retain(|set| *set != InstructionSet::Portable);
    }
    if sets[0] == InstructionSet::Amx && !format.in_matrices(InstructionSet::Amx) {
        sets.retain(|set| *set != InstructionSet::Avx512);
    }
    sets
}

/// Of a format, for each of [`ROWS`].
fn fastest_sets(matrix: &PackedMatrix) -> [InstructionSet; ROWS.len()] {
    let sets = candidates(matrix.format);
    if let [only] = sets[..] {
        return [only; ROWS.len()];
    }
    let by_rows = ROWS.map(|rows| times(&sets, matrix, rows));
    if matrix.format == PackedFormat::Bf16 {
        let of_all: Vec<u128> =
            (0..sets.len()).map(|set| by_rows.iter().map(|times| times[set]).sum()).collect();
        return [sets[fastest(&of_all)]; ROWS.len()];
    }
    by_rows.map(|times| sets[fastest(&times)])
}

/// The first of the times, unless another is shorter by a tenth: what noise decides would change from one process to the next.
fn fastest(times: &[u128]) -> usize {
    let first = times[0];
    let (best, time) = times.iter().enumerate().min_by_key(|(_, time)| **time).unwrap_or((0, &first));
    if 10 * time <= 9 * first { best } else { 0 }
}

/// Whether the second time, that past the caches, is shorter by more than a twentieth.
fn past_is_faster([through, past]: [u128; 2]) -> bool {
    20 * past < 19 * through
}

/// So many rows, packed for a matrix.
fn packed_rows(
    inputs: &mut PackedActivations,
    set: InstructionSet,
    matrix: &PackedMatrix,
    rows: usize,
) -> InputWriter {
    let writer = inputs.writer(InputShape {
        precision: matrix.format.precision(),
        rows,
        columns: matrix.columns,
        padded: matrix.padded_columns(),
    });
    let values: Vec<f32> = (0..matrix.columns).map(|column| 0.25 + (column % 7) as f32 / 8.0).collect();
    for row in 0..rows {
        // SAFETY: nobody else has the rows; the set is this processor's.
        unsafe { writer.pack(set, row, &values, None) };
    }
    writer
}

/// Nanoseconds of a few tiles by each of the sets, the shortest of several bursts in turn. A processor that has not used its widest vectors, or its
/// matrices, for a while runs them slowly at first, as those are powered up: so each set runs for a while before the next does.
fn times(sets: &[InstructionSet], matrix: &PackedMatrix, rows: usize) -> Vec<u128> {
    let mut inputs = PackedActivations::default();
    let packed = packed_rows(&mut inputs, sets[0], matrix, rows);
    let mut shortest = vec![u128::MAX; sets.len()];
    for _ in 0..BURSTS {
        for (set, shortest) in sets.iter().zip(&mut shortest) {
            let burst = Instant::now();
            loop {
                let begin = Instant::now();
                // SAFETY: the rows are packed for this matrix; the set is this processor's.
                black_box(unsafe { linear::first_tiles(*set, matrix, MAX_PANELS, &packed, rows, false) });
                *shortest = begin.elapsed().as_nanos().min(*shortest);
                if burst.elapsed() >= BURST {
                    break;
                }
            }
        }
    }
    shortest
}

/// Nanoseconds of a row over weights that no cache has, prefetched through the caches and past the outer ones: the shortest of several runs in turn.
fn times_from_memory(set: InstructionSet, matrix: &PackedMatrix) -> [u128; 2] {
    let mut inputs = PackedActivations::default();
    let packed = packed_rows(&mut inputs, set, matrix, 1);
    let panels = (READ / matrix.panel_bytes).max(1).next_multiple_of(NEIGHBOURS).min(matrix.panels());
    let bytes = panels.next_multiple_of(NEIGHBOURS) * matrix.panel_bytes;
    let mut shortest = [u128::MAX; 2];
    for _ in 0..READINGS {
        for (past_caches, shortest) in [false, true].into_iter().zip(&mut shortest) {
            flush(&matrix.packed_bytes()[..bytes.min(matrix.packed_bytes().len())]);
            let begin = Instant::now();
            // SAFETY: the row is packed for this matrix; the set is this processor's.
            black_box(unsafe { linear::first_tiles(set, matrix, panels, &packed, 1, past_caches) });
            *shortest = begin.elapsed().as_nanos().min(*shortest);
        }
    }
    shortest
}

/// Which of [`ROWS`] a product has.
fn class(rows: usize) -> usize {
    rows.next_power_of_two().trailing_zeros().min(4) as usize
}

/// Which of [`FORMATS`].
fn index(format: PackedFormat) -> usize {
    match format {
        PackedFormat::F32 => 0,
        PackedFormat::F16 => 1,
        PackedFormat::Bf16 => 2,
        PackedFormat::Int8 => 3,
        PackedFormat::Fp8 { .. } => 4,
        PackedFormat::Q8_0 => 5,
        PackedFormat::Q4_0 => 6,
        PackedFormat::Mxfp8 => 7,
        PackedFormat::Mxfp4 => 8,
        PackedFormat::Nvfp4 => 9,
        PackedFormat::Int4 { .. } => 10,
        PackedFormat::Q4K => 11,
        PackedFormat::Q5K => 12,
        PackedFormat::Q6K => 13,
    }
}

#[cfg(test)]
mod tests {
    use super::super::huge_pages::Arena;
    use super::*;
    use crate::weights::{Packing, StoredMatrix};

    fn packed(packing: Packing) -> PackedMatrix {
        let values: Vec<f32> = (0..64 * 256).map(|i| (i % 31) as f32 / 16.0 - 1.0).collect();
        let matrix = StoredMatrix::from_f32_rows(64, 256, &values, packing);
        PackedMatrix::new(&mut Arena::default(), &matrix, |bytes, _| bytes.fill(0)).unwrap()
    }

    #[test]
    fn another_set_must_be_faster_by_a_tenth() {
        assert_eq!(fastest(&[100, 91, 95]), 0);
        assert_eq!(fastest(&[100, 90, 95]), 1);
        assert_eq!(fastest(&[100, 89, 60]), 2);
        assert_eq!(fastest(&[50, 100, 100]), 0);
    }

    #[test]
    fn every_number_of_rows_has_a_class() {
        assert_eq!([1, 2, 3, 4, 5, 8, 9, 512].map(class), [0, 1, 2, 2, 3, 3, 4, 4]);
        assert_eq!(ROWS.map(class), [0, 1, 2, 3, 4]);
    }

    #[test]
    fn every_set_is_timed_on_every_format_and_once() {
        let sets = InstructionSet::available();
        let mut met = [false; FORMATS.len()];
        for packing in Packing::NATIVE {
            let matrix = packed(packing);
            met[index(matrix.format)] = true;
            for rows in ROWS {
                assert!(times(&sets, &matrix, rows).iter().all(|time| *time < u128::MAX), "{packing:?}");
            }
            let mut choice = KernelChoice { forced: false, ..KernelChoice::forced(sets[0]) };
            choice.meet(&matrix);
            assert!(
                ROWS.iter().all(|rows| candidates(matrix.format).contains(&choice.of(matrix.format, *rows)))
            );
            // What was timed once is not timed again.
            let mut next = KernelChoice { forced: false, ..KernelChoice::forced(sets[0]) };
            next.meet(&matrix);
            assert_eq!(choice.formats[index(matrix.format)].sets, next.formats[index(matrix.format)].sets);
        }
        assert!(met.iter().all(|met| *met), "{met:?}");
    }

    #[test]
    fn another_process_goes_on_with_the_sets_that_were_timed() {
        let mut timed = NOT_TIMED;
        // Whatever is slowest here, which timing would not choose.
        let slowest = *InstructionSet::available().last().unwrap();
        timed[index(PackedFormat::Bf16)].sets = Some([slowest; ROWS.len()]);
        timed[index(PackedFormat::Q8_0)].past_caches = Some(true);
        let sent = serde_json::to_string(&names_of(&timed)).unwrap();
        let received: Vec<TimedFormat> = serde_json::from_str(&sent).unwrap();
        assert_eq!(received.len(), 2);
        let mut known = NOT_TIMED;
        add(&mut known, &received);
        assert_eq!(known, timed);
        // What a process has timed itself, its sessions have already.
        known[index(PackedFormat::Q8_0)].past_caches = Some(false);
        let own = known;
        add(&mut known, &received);
        assert_eq!(known, own);
        // Of a processor that has others nothing is taken.
        let foreign =
            TimedFormat { sets: Some(std::array::from_fn(|_| "sve9".to_owned())), ..received[0].clone() };
        let mut known = NOT_TIMED;
        add(&mut known, &[foreign]);
        assert_eq!(known, NOT_TIMED);
    }

    /// The row's bits depend on the set, and must not depend on how many others its step has.
    #[test]
    fn bf16_has_one_set_for_all_rows() {
        let mut choice = KernelChoice { forced: false, ..KernelChoice::forced(InstructionSet::best()) };
        choice.meet(&packed(Packing::Bf16));
        let set = choice.of(PackedFormat::Bf16, 1);
        assert!(
            [2, 3, 8, 17, 512]
                .map(|rows| choice.of(PackedFormat::Bf16, rows))
                .iter()
                .all(|other| *other == set)
        );
    }

    #[test]
    fn how_weights_of_a_format_are_prefetched_is_timed_once_on_a_matrix_that_is_large_enough() {
        let mut choice = KernelChoice { forced: false, ..KernelChoice::forced(InstructionSet::best()) };
        choice.meet(&packed(Packing::Q8_0));
        assert!(choice.formats.iter().all(|format| format.past_caches.is_none()));
        let values = vec![0.5; 1024 * 1024];
        let matrix = StoredMatrix::from_f32_rows(1024, 1024, &values, Packing::Q8_0);
        let matrix = PackedMatrix::new(&mut Arena::default(), &matrix, |bytes, _| bytes.fill(0)).unwrap();
        choice.meet(&matrix);
        let mut next = KernelChoice { forced: false, ..KernelChoice::forced(InstructionSet::best()) };
        next.meet(&matrix);
        let of = index(matrix.format);
        let timed = choice.formats[of].past_caches;
        assert_eq!(timed.is_some(), cfg!(target_arch = "x86_64"));
        assert_eq!(timed, next.formats[of].past_caches);
        choice.formats[of].past_caches = Some(true);
        assert!(choice.past_caches(matrix.format) && !choice.past_caches(PackedFormat::Q4_0));
        assert!(choice.names().contains(&"prefetchnta for q8_0 products of 1 and 2 rows".to_owned()));
    }

    #[test]
    fn prefetching_past_the_caches_must_be_faster_by_a_twentieth() {
        assert!(past_is_faster([100, 94]));
        assert!(!past_is_faster([100, 95]) && !past_is_faster([100, 100]) && !past_is_faster([100, 300]));
    }

    #[test]
    fn a_forced_set_is_used_for_everything_and_one_that_is_missing_is_refused() {
        let available = [InstructionSet::Avx2, InstructionSet::Portable];
        let mut forced = KernelChoice::named("portable", &available).unwrap();
        let matrix = packed(Packing::Bf16);
        forced.meet(&matrix);
        assert_eq!(forced, KernelChoice::forced(InstructionSet::Portable));
        assert_eq!(forced.names(), [InstructionSet::Portable.name()]);
        let error = KernelChoice::named("avx512", &available).unwrap_err().to_string();
        assert!(error.contains("HBMARK_CPU_KERNELS=avx512") && error.contains("avx2, portable"), "{error}");
    }

    #[test]
    fn products_that_use_another_set_are_named() {
        let mut choice = KernelChoice::forced(InstructionSet::Avx512);
        let mut sets = [InstructionSet::Avx512; ROWS.len()];
        sets[3] = InstructionSet::Avx512Base;
        choice.formats[index(PackedFormat::Bf16)].sets = Some(sets);
        assert_eq!(choice.of(PackedFormat::Bf16, 8), InstructionSet::Avx512Base);
        assert_eq!(choice.of(PackedFormat::Bf16, 4), InstructionSet::Avx512);
        assert_eq!(choice.names(), ["avx512 with bf16 and vnni", "avx512 for bf16 products of 5 to 8 rows"]);
    }
}
