//! The main job under criterion: prefill and decode steps over batch × context, then one table.
//!
//! criterion does the sampling, filtering and baselines; its times come from our own timeline (CUDA events on a
//! GPU, the monotonic clock on a CPU), and its throughput is the bytes a step must move. What it collected is then judged
//! like any other result and printed as one table.
//!
//! The run is configured by environment, since criterion owns the flags:
//! `HBMARK_MODEL`, `HBMARK_ENGINE`, `HBMARK_DEVICE`, `HBMARK_DTYPE`, `HBMARK_PHASE`, `HBMARK_BATCH`, `HBMARK_CONTEXT`,
//! `HBMARK_SEED`, `HBMARK_OUT` (a folder for result.json), `HBMARK_NO_ISOLATION` (measure in this process, for profilers).

#![expect(clippy::print_stdout, reason = "a bench prints its result")]

use std::time::Duration;

use criterion::measurement::{Measurement, ValueFormatter};
use criterion::{BenchmarkId, Criterion, SamplingMode, Throughput};

use hbmark::run::bench::{Bench, SAMPLES};
use hbmark_core::units::Nanos;
use hbmark_report::output::{Format, render};

/// Device time in nanoseconds, taken from the session's timeline by `iter_custom`.
struct DeviceTime;

impl Measurement for DeviceTime {
    type Intermediate = std::time::Instant;
    type Value = f64;

    fn start(&self) -> Self::Intermediate {
        std::time::Instant::now()
    }
    fn end(&self, begin: Self::Intermediate) -> f64 {
        Nanos::from(begin.elapsed()).0
    }
    fn add(&self, a: &f64, b: &f64) -> f64 {
        a + b
    }
    fn zero(&self) -> f64 {
        0.0
    }
    fn to_f64(&self, value: &f64) -> f64 {
        *value
    }
    fn formatter(&self) -> &dyn ValueFormatter {
        &Formatter
    }
}

/// Prints times and bandwidths in decimal units.
struct Formatter;

impl Formatter {
    fn time_scale(typical: f64) -> (f64, &'static str) {
        match typical {
            t if t >= 1e9 => (1e-9, "s"),
            t if t >= 1e6 => (1e-6, "ms"),
            t if t >= 1e3 => (1e-3, "µs"),
            _ => (1.0, "ns"),
        }
    }
}

impl ValueFormatter for Formatter {
    fn scale_values(&self, typical: f64, values: &mut [f64]) -> &'static str {
        let (scale, unit) = Self::time_scale(typical);
        for value in values {
            *value *= scale;
        }
        unit
    }

    fn scale_throughputs(&self, _typical: f64, throughput: &Throughput, values: &mut [f64]) -> &'static str {
        let (amount, scale, unit) = match *throughput {
            Throughput::Bytes(bytes) | Throughput::BytesDecimal(bytes) => (bytes as f64, 1e-9, "GB/s"),
            Throughput::Elements(elements) => (elements as f64, 1.0, "tokens/s"),
            _ => (1.0, 1.0, "steps/s"),
        };
        for value in values {
            *value = amount / (*value / 1e9) * scale;
        }
        unit
    }

    fn scale_for_machines(&self, _values: &mut [f64]) -> &'static str {
        "ns"
    }
}

fn main() -> std::process::ExitCode {
    // criterion runs in one process, and what it measures in another.
    if hbmark::worker::child::is_worker_process() {
        return hbmark::cli::work();
    }
    let mut criterion = Criterion::default()
        .with_measurement(DeviceTime)
        .sample_size(SAMPLES)
        .warm_up_time(Duration::from_secs(1))
        .measurement_time(Duration::from_secs(4))
        .without_plots()
        .configure_from_args();
    let mut bench = match Bench::from_environment() {
        Ok(bench) => bench,
        Err(error) => {
            anstream::eprintln!("error: {}", hbmark::cli::one_line(&error));
            return std::process::ExitCode::from(2);
        }
    };
    for phase in bench.phases() {
        let mut group = criterion.benchmark_group(phase.to_string());
        group.sampling_mode(SamplingMode::Flat);
        for cell in bench.cells(phase) {
            let (name, bytes) = (bench.name(cell), bench.bytes(cell));
            group.throughput(Throughput::Bytes(bytes.0));
            group.bench_function(BenchmarkId::from_parameter(name), |bencher| {
                bencher.iter_custom(|steps| bench.sample(cell, steps));
            });
            bench.finish(cell);
        }
        group.finish();
    }
    criterion.final_summary();
    let asked = |flag: &str| std::env::args().any(|a| a == flag);
    // Without `--bench` (as `cargo test` calls it), with `--test` or `--list`, nothing was measured.
    if asked("--bench") && !asked("--test") && !asked("--list") {
        print_table(bench);
    }
    std::process::ExitCode::SUCCESS
}

/// One table over everything criterion measured, and the result as files where `HBMARK_OUT` is set.
fn print_table(bench: Bench) {
    let out = bench.out().map(std::path::Path::to_owned);
    let report = bench.report();
    let color =
        std::io::IsTerminal::is_terminal(&std::io::stdout()) && std::env::var_os("NO_COLOR").is_none();
    match render(&report, Format::Table, color) {
        Ok(table) => println!("\n{table}"),
        Err(error) => anstream::eprintln!("error: {error}"),
    }
    if let Some(folder) = out
        && let Err(error) = hbmark::cli::save(&report, "result", &folder)
    {
        anstream::eprintln!("error: {}", hbmark::cli::one_line(&error));
    }
}
