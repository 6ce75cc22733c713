//! How near to the read bandwidth the CPU's kernels stream each format of weights, beside one another.
//!
//! One linear layer of 4096 × 4096 by a few rows, over copies that together are three times the last cache. Formats take turns within a
//! round, with a read probe at its beginning, so that a machine whose bandwidth swings does so for all of them. The figures are medians over
//! rounds: the rate in GB/s of the bytes the operation counted itself, the fraction of the probe of its round, and the time of the bytes of q8_0 over it,
//! weight for weight.
//!
//! `HBMARK_DTYPE` names the formats, `HBMARK_BATCH` the rows, `HBMARK_ROUNDS` the rounds.

#![expect(clippy::unwrap_used, reason = "a bench that cannot go on panics")]
#![expect(clippy::print_stdout, reason = "its result is what it prints")]

use std::time::Instant;

use hbmark::engine::native::CpuOperations;
use hbmark::engine::native::operations::{Embedding, FusedLayout, LinearPart, Operations, Storage};
use hbmark::engine::native::{DEFAULT_BLOCK_SIZE, Rows, random_kv};
use hbmark::machine::environment::last_cache;
use hbmark::measure::canary::{Canary, CpuCanary};
use hbmark::run::config::parse_axis;
use hbmark::weights::{Packing, StoredMatrix};
use hbmark_core::model::Dtype;

/// Rows and columns of the layer.
const SIZE: usize = 4096;
/// All copies together are at least this many times the last cache.
const CACHE_FACTOR: u64 = 3;
/// Passes over all copies in a round.
const PASSES: usize = 3;

type Linear = <CpuOperations as Storage>::Linear;
type Buffer = <CpuOperations as Storage>::Buffer;

fn variable(key: &str, default: &str) -> String {
    std::env::var(key).ok().filter(|v| !v.is_empty()).unwrap_or_else(|| default.to_owned())
}

/// One format: its copies, and what was found in each round.
struct Format {
    dtype: Dtype,
    copies: Vec<Linear>,
    rates: Vec<f64>,
    fractions: Vec<f64>,
    seconds: Vec<f64>,
}

fn noise(rows: usize) -> Vec<f32> {
    let mut values = vec![0.0; rows * SIZE];
    random_kv::fill(1, 0, 0, false, &mut values);
    values
}

fn format(operations: &mut CpuOperations, name: &str, values: &[f32]) -> Format {
    let dtype = <Dtype as clap::ValueEnum>::from_str(name.trim(), true).unwrap();
    let packing = Packing::of(dtype, 32).unwrap();
    let matrix = StoredMatrix::from_f32_rows(SIZE, SIZE, values, packing);
    let cache = last_cache().map_or(32 << 20, |cache| cache.0);
    let count = (CACHE_FACTOR * cache).div_ceil(matrix.bytes().0).max(2);
    let copies = (0..count)
        .map(|_| {
            let part = LinearPart { matrix: matrix.clone(), bias: None };
            operations.linear(vec![part], FusedLayout::Stacked).unwrap()
        })
        .collect();
    Format { dtype, copies, rates: Vec::new(), fractions: Vec::new(), seconds: Vec::new() }
}

/// Streams all copies of a format; keeps its rate, and the seconds of one copy.
fn stream(
    operations: &mut CpuOperations,
    format: &mut Format,
    rows: &Rows,
    [input, out]: [&mut Buffer; 2],
    read: f64,
) {
    let mut pass = |operations: &mut CpuOperations| {
        for copy in &format.copies {
            operations.project_add(rows, copy, None, input, out).unwrap();
        }
    };
    pass(operations);
    operations.take_bytes_moved();
    let begin = Instant::now();
    (0..PASSES).for_each(|_| pass(operations));
    let seconds = begin.elapsed().as_secs_f64();
    let rate = operations.take_bytes_moved().as_f64() / seconds;
    format.rates.push(rate);
    format.fractions.push(rate / read);
    format.seconds.push(seconds / (PASSES * format.copies.len()) as f64);
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}

fn main() {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let mut operations = CpuOperations::new(threads).unwrap();
    let mut probe = CpuCanary::beyond_caches(None).unwrap();
    let rounds: usize = variable("HBMARK_ROUNDS", "21").parse().unwrap();
    let values = noise(SIZE);
    let names = variable("HBMARK_DTYPE", "bf16,q8_0,q6_k,q5_k,q4_k,q4_0");
    let mut formats: Vec<Format> =
        names.split(',').map(|name| format(&mut operations, name, &values)).collect();
    for batch in parse_axis("batch", &variable("HBMARK_BATCH", "1,4")).unwrap() {
        let mut rows = Rows::new(DEFAULT_BLOCK_SIZE);
        (0..batch).for_each(|_| rows.push(&[1], 0, &[0]));
        let table = operations
            .table(StoredMatrix::from_f32_rows(2, SIZE, &values[..2 * SIZE], Packing::F32))
            .unwrap();
        let mut input = operations.buffer(batch, SIZE).unwrap();
        let mut out = operations.buffer(batch, SIZE).unwrap();
        operations.embed(&rows, Embedding::Table(&table), 1.0, &mut input).unwrap();
        for format in &mut formats {
            (format.rates, format.fractions, format.seconds) = (Vec::new(), Vec::new(), Vec::new());
        }
        let mut reads = Vec::new();
        for _ in 0..rounds {
            let read = probe.host_memory().as_f64() / probe.run();
            reads.push(read);
            for format in &mut formats {
                stream(&mut operations, format, &rows, [&mut input, &mut out], read);
            }
        }
        println!(
            "{batch} rows, {threads} threads, {}, {rounds} rounds, probe {:.1} GB/s",
            operations.kernels().join("; "),
            median(&reads) / 1e9
        );
        let eight =
            formats.iter().find(|format| format.dtype == Dtype::Q8_0).map(|format| format.seconds.clone());
        for format in &formats {
            let over = eight.as_ref().map(|eight| {
                median(&eight.iter().zip(&format.seconds).map(|(eight, own)| eight / own).collect::<Vec<_>>())
            });
            println!(
                "  {:5} {:6.1} GB/s  {:.3} of the probe  {}",
                format.dtype.name(),
                median(&format.rates) / 1e9,
                median(&format.fractions),
                over.map_or_else(String::new, |over| format!("q8_0 takes {over:.2} times as long"))
            );
        }
    }
}
