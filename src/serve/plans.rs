//! One point, a sweep, a search, the matrix: which points are measured, and in which order.

use std::collections::BTreeMap;

use super::context::ServingContext;
use super::{Mode, ServeConfig, ServeError};
use crate::serve::point::ServingEngine;
use crate::worker::Observer;
use hbmark_core::result::Cause;
use hbmark_core::result::serving::{Offered, Point, Row, ServeReport, ServeResult, SweepVariable};
use hbmark_core::units::{PerSecond, whole_count};
use hbmark_traffic::matrix::{check, workload};
use hbmark_traffic::point::{PointSpec, TrafficSource};
use hbmark_traffic::search::{SearchConfig, Trial, find_max_rate};
use hbmark_traffic::workload::{SharedPrefix, Workload, splitmix64};

/// Fills the report with points.
pub(super) fn run(
    config: &ServeConfig,
    stage: &mut ServingContext<'_>,
    report: &mut ServeReport,
    observer: &mut dyn Observer,
) -> Result<(), ServeError> {
    match &config.mode {
        Mode::Single => single(config, stage, report, observer),
        Mode::Sweep { variable, values } => sweep(config, stage, *variable, values, report, observer),
        Mode::FindMaxRate { seeds, precision, sustain_s } => {
            let asked = SearchConfig { seeds: *seeds, precision: *precision, ..SearchConfig::default() };
            search(config, stage, asked, *sustain_s, report, observer)
        }
        Mode::Matrix { scale } => matrix(config, stage, *scale, report, observer),
        Mode::CompareLoops => compare(config, stage, report, observer),
    }
}

/// What a load is called.
fn label(offered: Offered) -> String {
    match offered {
        Offered::Rate(rate) => format!("rate {rate}"),
        Offered::AtOnce => "at once".into(),
        Offered::Concurrency(n) => format!("concurrency {n}"),
        Offered::AsRecorded => "as recorded".into(),
    }
}

fn single(
    config: &ServeConfig,
    stage: &mut ServingContext<'_>,
    report: &mut ServeReport,
    observer: &mut dyn Observer,
) -> Result<(), ServeError> {
    let mut spec = stage.spec(&label(config.offered), config.offered, config.seed);
    let without_adapters = baselines_without(stage, &spec, report, observer)?;
    if config.cold_baseline {
        // The cold one first: it leaves nothing behind that the warm one could find.
        let cold = PointSpec { label: format!("{} cold", spec.label), cold: true, ..spec.clone() };
        report.points.push(stage.measure(&cold, observer)?);
        spec.label.push_str(" warm");
    }
    let mut point = stage.measure(&spec, observer)?;
    let plain = without_adapters.and_then(|row| report.points[row].result.as_ref());
    if let (Some(cost), Some(own), Some(plain)) = (&mut point.adapters, &point.result, plain) {
        cost.against(own, plain);
    }
    report.points.push(point);
    Ok(())
}

/// The same load without adapters and without a grammar, as rows of their own; which row is the one without adapters.
fn baselines_without(
    stage: &mut ServingContext<'_>,
    spec: &PointSpec,
    report: &mut ServeReport,
    observer: &mut dyn Observer,
) -> Result<Option<usize>, ServeError> {
    let mut without_adapters = None;
    if spec.adapters.is_some() {
        without_adapters = Some(report.points.len());
        let label = format!("{} without adapters", spec.label);
        let plain = PointSpec { label, adapters: None, ..spec.clone() };
        report.points.push(stage.measure(&plain, observer)?);
    }
    if spec.constrained.is_some() {
        let label = format!("{} without grammar", spec.label);
        let plain = PointSpec { label, constrained: None, ..spec.clone() };
        report.points.push(stage.measure(&plain, observer)?);
    }
    Ok(without_adapters)
}

/// Changes the one variable of a sweep.
fn vary(spec: &mut PointSpec, variable: SweepVariable, value: f64) -> Result<(), ServeError> {
    let fail = |problem: String| Err(ServeError::Sweep { variable, problem });
    let workload =
        |spec: &mut PointSpec, change: &dyn Fn(&Workload) -> Result<Workload, ServeError>| match &spec.source
        {
            TrafficSource::Workload(w) => {
                spec.source = TrafficSource::Workload(change(w)?);
                Ok(())
            }
            TrafficSource::Trace(..) => fail("changes what a trace has recorded".into()),
            TrafficSource::Dataset(_) => fail("changes what a dataset has recorded".into()),
        };
    let count = whole_count(value);
    if !matches!(variable, SweepVariable::Rate | SweepVariable::PrefixShare)
        && (value.fract() != 0.0 || !(1.0..=1e9).contains(&value))
    {
        return fail(format!("takes whole numbers from 1 on, not {value}"));
    }
    if spec.is_remote && variable.is_of_scheduler() {
        return fail("changes a setting of our own scheduler, and not one of the server".into());
    }
    match variable {
        SweepVariable::Rate => {}
        SweepVariable::Concurrency => spec.offered = Offered::Concurrency(count),
        SweepVariable::MaxNumSeqs => spec.scheduler.max_num_seqs = count,
        SweepVariable::MaxNumBatchedTokens => spec.scheduler.max_num_batched_tokens = count,
        SweepVariable::NumGpuBlocksOverride => spec.scheduler.num_blocks = count,
        SweepVariable::BlockSize => {
            // The same memory, cut another way.
            let positions = spec.scheduler.num_blocks * spec.scheduler.block_size;
            spec.scheduler.block_size = count;
            spec.scheduler.num_blocks = (positions / count).max(1);
        }
        SweepVariable::InputLen => {
            let change = |w: &Workload| {
                let input = Workload::fixed(count, 1)?.input;
                Ok(Workload { input, ..w.clone() })
            };
            return workload(spec, &change);
        }
        SweepVariable::OutputLen => {
            let change = |w: &Workload| {
                let output = Workload::fixed(1, count)?.output;
                Ok(Workload { output, ..w.clone() })
            };
            return workload(spec, &change);
        }
        SweepVariable::PrefixShare => {
            let change = |w: &Workload| {
                let Some(prefix) = w.prefix else {
                    return Err(ServeError::Sweep { variable, problem: "needs --prefix-tokens".into() });
                };
                let prefix = Some(SharedPrefix { share: value, ..prefix });
                Ok(Workload { prefix, ..w.clone() }.checked()?)
            };
            return workload(spec, &change);
        }
    }
    spec.scheduler.check().or_else(|out| fail(format!("takes no such number: {out}")))
}

fn sweep(
    config: &ServeConfig,
    stage: &mut ServingContext<'_>,
    variable: SweepVariable,
    values: &[f64],
    report: &mut ServeReport,
    observer: &mut dyn Observer,
) -> Result<(), ServeError> {
    // A value that is none is said before anything is measured.
    for value in values {
        vary(&mut stage.spec("", config.offered, config.seed), variable, *value)?;
    }
    let mut stopped: Option<Cause> = None;
    for (index, value) in values.iter().enumerate() {
        // Prompts differ between points, or the second would find those of the first in the cache.
        let offered = if variable == SweepVariable::Rate { Offered::Rate(*value) } else { config.offered };
        let mut spec =
            stage.spec(&format!("{variable} {value}"), offered, splitmix64(config.seed, index as u64));
        vary(&mut spec, variable, *value)?;
        if let Some(reason) = &stopped {
            let (plan, measured) = spec.plan()?;
            report
                .points
                .push(Point { not_run: Some(reason.clone()), ..spec.without_result(&plan, &measured) });
            continue;
        }
        if variable == SweepVariable::BlockSize {
            stage.set_block_size(spec.scheduler.block_size, observer)?;
            spec.scheduler.num_blocks = stage.engine.scheduler.num_blocks.max(1);
            spec.scheduler.block_size = stage.engine.scheduler.block_size;
            if config.virtual_source.is_some() {
                vary(&mut spec, variable, *value)?;
            }
        }
        let point = stage.measure(&spec, observer)?;
        if let Some(result) = point.result.as_ref().filter(|_| !config.slo.clauses.is_empty()) {
            let (met, why) = result.held();
            // More load cannot help; of other variables every value is a question of its own.
            if met == Some(false) && variable.is_load() {
                stopped =
                    Some(Cause::SweepEnded { variable: variable.name().to_owned(), value: *value, why });
            }
        }
        report.points.push(point);
    }
    Ok(())
}

/// Requests per second that a workload gets when all requests are there at once, by the virtual clock.
fn capacity(stage: &ServingContext<'_>, spec: &PointSpec) -> Result<f64, ServeError> {
    let model = stage.step_model.clone().ok_or(ServeError::Needs {
        what: "choosing rates",
        needs: "a prediction of the engine's steps: leave out --no-predict",
    })?;
    let vocab = stage.vocab();
    let at_once = PointSpec {
        offered: Offered::AtOnce,
        requests: spec.scheduler.max_num_seqs.saturating_mul(8).clamp(64, 4096),
        slo: hbmark_core::result::serving::Slo::default(),
        time_limit: None,
        ..spec.clone()
    };
    let point = ServingEngine::Virtual { model, vocab }.measure(&at_once, &mut |_| {})?;
    Ok(point.result.map_or(1.0, |r| r.served_per_s).max(1e-6))
}

/// Requests that warm up before a few that are sent one at a time.
const ALONE_WARMUP: usize = 4;

fn search(
    config: &ServeConfig,
    stage: &mut ServingContext<'_>,
    asked: SearchConfig,
    sustain_s: f64,
    report: &mut ServeReport,
    observer: &mut dyn Observer,
) -> Result<(), ServeError> {
    if config.slo.clauses.is_empty() {
        return Err(ServeError::Needs {
            what: "a search",
            needs: "--slo, as in --slo ttft_p95=1s,tpot_p95=40ms",
        });
    }
    stage.spec("search", Offered::Rate(1.0), config.seed).check_trend()?;
    let start = match config.offered {
        Offered::Rate(rate) => rate,
        // Nothing is known of a server: the bracket grows from here.
        _ if config.server.is_some() => 1.0,
        _ => {
            // Half of the engine's capacity on the virtual clock.
            let spec = stage.spec("capacity", Offered::AtOnce, config.seed);
            capacity(stage, &spec)? / 2.0
        }
    };
    let recorded = stage.spec("search", Offered::Rate(1.0), config.seed).recorded();
    let search = SearchConfig { start, lowest: start / 65_536.0, highest: start * 256.0, recorded, ..asked };
    let mut points = Vec::new();
    let slo = config.slo.clone();
    let found = find_max_rate(&search, &slo, config.seed, &mut points, |trial, seed| {
        let mut spec = match trial {
            Trial::Rate(rate) | Trial::Sustained(rate) => {
                stage.spec(&format!("rate {}", PerSecond(rate)), Offered::Rate(rate), seed)
            }
            Trial::Alone(requests) => {
                let spec = stage.spec("one request at a time", Offered::Concurrency(1), seed);
                // So few judge nothing else.
                let slo = hbmark_core::result::serving::Slo::default();
                let warmup = spec.warmup.min(ALONE_WARMUP);
                PointSpec { requests, max_requests: requests, warmup, slo, ..spec }
            }
        };
        if let Trial::Sustained(rate) = trial {
            let lasting = whole_count((rate * sustain_s).ceil());
            spec.requests = spec.requests.saturating_mul(3).max(lasting);
            spec.max_requests = spec.max_requests.saturating_mul(3).max(spec.requests);
        }
        stage.measure(&spec, observer)
    })?;
    report.points.append(&mut points);
    report.search = Some(found);
    Ok(())
}

fn matrix(
    config: &ServeConfig,
    stage: &mut ServingContext<'_>,
    scale: f64,
    report: &mut ServeReport,
    observer: &mut dyn Observer,
) -> Result<(), ServeError> {
    if config.server.is_some() {
        return Err(ServeError::Needs {
            what: "the workload matrix",
            needs: "an engine in this process, whose capacity is predicted: leave out --url, or give one --workload after the other",
        });
    }
    let mut results: BTreeMap<Row, (ServeResult, Option<f64>)> = BTreeMap::new();
    let mut warm_rate = None;
    for (index, row) in Row::ALL.into_iter().enumerate() {
        let mut spec = stage.spec(row.title(), Offered::AtOnce, splitmix64(config.seed, index as u64));
        let recorded = matches!(spec.source, TrafficSource::Trace(..)) && row == Row::F;
        if !recorded {
            spec.source = TrafficSource::Workload(workload(row, spec.scheduler.max_model_len, scale)?);
        }
        spec.cold = row == Row::ECold;
        spec.slo = hbmark_core::result::serving::Slo::default();
        let mut rate = capacity(stage, &spec)? * row.utilisation();
        // The twins are asked at one rate, which both can take: the cold one's, measured without sharing.
        if row == Row::E {
            let cold = PointSpec { cold: true, ..spec.clone() };
            rate = capacity(stage, &cold)? * row.utilisation();
            warm_rate = Some((rate, spec.seed));
        }
        if let (Row::ECold, Some((warm, seed))) = (row, warm_rate) {
            (rate, spec.seed) = (warm, seed);
        }
        spec.offered = Offered::Rate(rate);
        let point = stage.measure(&spec, observer)?;
        if let Some(result) = &point.result {
            results.insert(row, (result.clone(), point.ideal_hit_rate));
        }
        report.points.push(point);
    }
    report.matrix = Row::ALL.into_iter().map(|row| check(row, &results)).collect();
    Ok(())
}

fn compare(
    config: &ServeConfig,
    stage: &mut ServingContext<'_>,
    report: &mut ServeReport,
    observer: &mut dyn Observer,
) -> Result<(), ServeError> {
    let Offered::Rate(rate) = config.offered else {
        return Err(ServeError::Needs {
            what: "--compare-loops",
            needs: "--rate, the load of the open loop",
        });
    };
    let open = stage.spec(&format!("open, rate {rate}"), config.offered, config.seed);
    let open = stage.measure(&open, observer)?;
    let Some(result) = &open.result else {
        report.points.push(open);
        report.warnings.push(
            "the closed loop was not run: how many requests it holds at a time is what the open loop had in the system, and that was lost"
                .into(),
        );
        return Ok(());
    };
    // As many at a time as the open loop had in the system on average.
    let inside = result.mean_running + result.mean_waiting;
    let concurrency = whole_count(inside.round().max(1.0));
    report.points.push(open);
    let offered = Offered::Concurrency(concurrency);
    let closed = stage.spec(&format!("closed, {concurrency} at a time"), offered, splitmix64(config.seed, 1));
    report.points.push(stage.measure(&closed, observer)?);
    report.warnings.push(
        "the closed loop sends a request when another is done: when the engine is slow it sends less, and the requests that would have \
         waited are never asked"
            .into(),
    );
    Ok(())
}
