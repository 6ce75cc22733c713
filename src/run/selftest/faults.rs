//! Planted faults with a figure that is known: each must be named, and the row shows the figure. What must be named or left alone and no more is
//! in [`plants`](super::plants).

use super::step::{RunScenario, StepFault, decode};
use super::{Check, Record, evidence, label, names, serve};
use crate::engine::EngineError;
use hbmark_core::result::{CellResult, Finding, FittedModel, Report};
use hbmark_core::units::{Bytes, Nanos};

const AREA: &str = "fault";
const US: f64 = 1e3;
const SEED: u64 = 20;

/// A run with its findings.
struct Seen {
    report: Report,
    findings: Vec<Finding>,
}

impl Seen {
    fn of(world: &RunScenario) -> Result<Self, EngineError> {
        let report = world.run()?;
        let findings = hbmark_report::analysis::explain(&report);
        Ok(Self { report, findings })
    }

    fn faulty(faults: Vec<StepFault>) -> Result<Self, EngineError> {
        Self::of(&RunScenario::new(SEED, faults))
    }

    fn cell(&self) -> &CellResult {
        &self.report.cells[0]
    }

    /// Device span, median.
    fn device(&self) -> f64 {
        self.cell().step_ns.as_ref().map_or(f64::NAN, |step| step.median)
    }

    /// Wait between steps, median.
    fn wait(&self) -> f64 {
        self.cell().host_bubble_ns.unwrap_or(f64::NAN)
    }

    fn label(&self) -> &str {
        label(&self.findings)
    }
}

/// A verdict and its figures.
type Shown = Result<(bool, String), EngineError>;
/// A row's name and what shows it.
type Row = (&'static str, fn() -> Shown);

/// Every row of the table.
pub fn planted(record: &mut Record<'_>) {
    let rows: &[Row] = &[
        ("no fault", nothing),
        ("host delay of 50 us", || host_delay(50.0)),
        ("host delay of 200 us", || host_delay(200.0)),
        ("host delay of 1 ms", || host_delay(1000.0)),
        ("the same delay behind a queue", hidden_delay),
        ("a spin of 20 us in every layer", spin),
        ("KV read twice", kv_twice),
        ("CPU stress", stress),
        ("a leak of 1 MiB a step", leak),
        ("a stall of 1.4 s", || Ok(serve::long_stall())),
    ];
    for (name, row) in rows {
        record(match row() {
            Ok((passed, detail)) => Check::new(AREA, *name, passed, detail),
            Err(error) => Check::failed(AREA, *name, error.to_string()),
        });
    }
}

fn nothing() -> Shown {
    let seen = Seen::faulty(Vec::new())?;
    let passed = seen.label() == "memory_bound_decode" && seen.findings.len() == 1;
    Ok((passed, format!("{}: {}", seen.label(), Nanos(seen.device()))))
}

/// D flat, G larger by the delay within the larger of a tenth and 5 us.
fn host_delay(delay_us: f64) -> Shown {
    let delay = delay_us * US;
    let (base, seen) = (Seen::faulty(Vec::new())?, Seen::faulty(vec![StepFault::HostDelay(Nanos(delay))])?);
    let (flat, added) = (seen.device() / base.device(), seen.wait() - base.wait());
    let near = (added - delay).abs() <= (0.1 * delay).max(5.0 * US);
    let passed = seen.label() == "host_bound" && (flat - 1.0).abs() < 0.01 && near;
    Ok((passed, format!("{}: D {:+.2} %, G {} more", seen.label(), (flat - 1.0) * 100.0, Nanos(added))))
}

fn hidden_delay() -> Shown {
    let base = Seen::faulty(Vec::new())?;
    let seen = Seen::faulty(vec![StepFault::HiddenDelay(Nanos(50.0 * US))])?;
    let added = seen.wait() - base.wait();
    let passed = seen.label() == base.label() && !names(&seen.findings, "host_bound") && added.abs() < US;
    Ok((passed, format!("{}: G {} more", seen.label(), Nanos(added))))
}

fn spin() -> Shown {
    let per_layer = 20.0 * US;
    let base = Seen::of(&RunScenario::new(SEED, Vec::new()).profiled())?;
    let seen = Seen::of(&RunScenario::new(SEED, vec![StepFault::Spin(Nanos(per_layer))]).profiled())?;
    let layers = seen.report.model.architecture.layers as f64;
    let added = seen.device() - base.device();
    let near = (added / (per_layer * layers) - 1.0).abs() < 0.05;
    let passed = seen.label() == "extra_kernel" && !names(&base.findings, "extra_kernel") && near;
    Ok((passed, format!("{}: D {} more over {layers} layers", seen.label(), Nanos(added))))
}

/// Decode cells over which the step is a line in cache and batch.
pub(super) fn grid() -> Vec<hbmark_core::result::Cell> {
    [(1, 64), (1, 2048), (1, 4096), (4, 64), (4, 1024), (4, 3072)].map(|(b, c)| decode(b, c)).to_vec()
}

fn kv_twice() -> Shown {
    let fit = |faults| -> Result<(Seen, Option<FittedModel>), EngineError> {
        let seen = Seen::of(&RunScenario::new(SEED, faults).with_cells(grid()))?;
        let fit = seen.report.fits.first().cloned();
        Ok((seen, fit))
    };
    let (base, plain) = fit(Vec::new())?;
    let (seen, twice) = fit(vec![StepFault::KvTimes(2.0)])?;
    let Some((plain, twice)) = plain.zip(twice) else { return Ok((false, "no fit".into())) };
    let Some((a, b)) = plain.kv_bytes_per_s.zip(twice.kv_bytes_per_s) else {
        return Ok((false, "no slope".into()));
    };
    let (slope, intercept) = (a / b, twice.intercept_ns / plain.intercept_ns);
    let named = seen.label() == "kv_costs_more" && !names(&base.findings, "kv_costs_more");
    let passed = named && (slope / 2.0 - 1.0).abs() <= 0.05 && (intercept - 1.0).abs() <= 0.05;
    Ok((passed, format!("{}: slope {slope:.3} times, intercept {intercept:.3} times", seen.label())))
}

fn stress() -> Shown {
    let base = Seen::faulty(Vec::new())?;
    let seen = Seen::faulty(vec![StepFault::HostTail { share: 0.1, time: Nanos(40.0 * US) }])?;
    let flat = seen.device() / base.device();
    let passed = seen.label() == "host_jitter" && (flat - 1.0).abs() < 0.01;
    Ok((passed, format!("D {:+.2} %; {}", (flat - 1.0) * 100.0, evidence(&seen.findings))))
}

fn leak() -> Shown {
    let seen = Seen::faulty(vec![StepFault::Leak(Bytes(1 << 20))])?;
    let near = Seen::faulty(vec![StepFault::Leak(Bytes(1 << 10))])?;
    let steps: usize = seen.cell().blocks.iter().map(|b| b.step_ns.len()).sum();
    let passed = seen.label() == "memory_leak" && steps <= 200 && !names(&near.findings, "memory_leak");
    Ok((passed, format!("{} within {steps} sampled steps; 1 KiB a step is {}", seen.label(), near.label())))
}
