//! A serving result as plain data, and its formats.
//!
//! Enters: points of load with their results. Leaves: one [`ServeReport`], printed as a table, JSON, CSV, Markdown or a page. What is null is
//! shown as a dash, what is infinite as such, and a percentile that the sample cannot carry as the largest value with a `≥`.

use std::fmt::Write;

use super::table::Column;
use super::{Format, TextFormat};
use crate::output::OutputError;
use hbmark_core::input::plain;
use hbmark_core::result::cause::joined;
use hbmark_core::result::serving::{
    Breakdown, ColdPhase, ColdStart, GateName, Offered, Point, Quantiles, Quantity, Residual, RowVerdict,
    Search, ServeKind, ServeReport, ServeResult, Validity,
};
use hbmark_core::result::{Finding, Limits};
use hbmark_core::units::Nanos;

/// Prints a serving result.
///
/// # Errors
/// When a format's writer fails.
pub fn render(report: &ServeReport, format: TextFormat) -> Result<String, OutputError> {
    match format {
        TextFormat::Table => Ok(table(report)),
        TextFormat::Json => Ok(serde_json::to_string_pretty(report)?),
        TextFormat::Csv => csv(report),
        TextFormat::Md => Ok(markdown(report)),
    }
}

/// Prints a serving result in any format; what was found in it stands on the page.
///
/// # Errors
/// When a format's writer fails.
pub fn render_any(report: &ServeReport, findings: &[Finding], format: Format) -> Result<String, OutputError> {
    match format.as_text() {
        Some(text) => render(report, text),
        None => Ok(super::html::render_serving(report, findings)),
    }
}

/// One quantity of a point.
struct Metric {
    key: &'static str,
    title: &'static str,
    /// In the table of many points, too.
    short: bool,
    time: bool,
    value: fn(&ServeResult) -> Option<Quantity>,
}

const fn metric(
    key: &'static str,
    title: &'static str,
    short: bool,
    time: bool,
    value: fn(&ServeResult) -> Option<Quantity>,
) -> Metric {
    Metric { key, title, short, time, value }
}

/// Every scalar of a point, in the order of columns.
const METRICS: &[Metric] = &[
    metric("offered_per_s", "offered/s", true, false, |r| r.offered_per_s.map(Quantity::from)),
    metric("served_per_s", "served/s", true, false, |r| Some(r.served_per_s.into())),
    metric("prompt_tokens_per_s", "prompt tok/s", true, false, |r| Some(r.prompt_tokens_per_s.into())),
    metric("output_tokens_per_s", "output tok/s", true, false, |r| Some(r.output_tokens_per_s.into())),
    metric("goodput_per_s", "goodput/s", true, false, |r| r.goodput_per_s.map(Quantity::from)),
    metric("ttft_p50_ns", "TTFT p50", true, true, |r| r.ttft_ns.as_ref()?.p50),
    metric("ttft_p95_ns", "TTFT p95", true, true, |r| r.ttft_ns.as_ref()?.p95),
    metric("ttft_p99_ns", "TTFT p99", false, true, |r| r.ttft_ns.as_ref()?.p99),
    metric("tpot_p50_ns", "TPOT p50", true, true, |r| r.tpot_ns.as_ref()?.p50),
    metric("tpot_p95_ns", "TPOT p95", true, true, |r| r.tpot_ns.as_ref()?.p95),
    metric("tpot_p99_ns", "TPOT p99", false, true, |r| r.tpot_ns.as_ref()?.p99),
    metric("itl_p50_ns", "ITL p50", false, true, |r| r.itl_ns.as_ref()?.p50),
    metric("itl_p99_ns", "ITL p99", false, true, |r| r.itl_ns.as_ref()?.p99),
    metric("e2e_p50_ns", "E2E p50", true, true, |r| r.e2e_ns.as_ref()?.p50),
    metric("e2e_p95_ns", "E2E p95", false, true, |r| r.e2e_ns.as_ref()?.p95),
    metric("e2e_p99_ns", "E2E p99", false, true, |r| r.e2e_ns.as_ref()?.p99),
    metric("queue_p50_ns", "queue p50", true, true, |r| r.queue_ns.as_ref()?.p50),
    metric("queue_p95_ns", "queue p95", false, true, |r| r.queue_ns.as_ref()?.p95),
    metric("injection_lag_max_ns", "lag max", false, true, |r| r.injection_lag_ns.max),
    metric("mean_batch", "batch", true, false, |r| Some(r.mean_batch.into())),
    metric("mean_waiting", "waiting", false, false, |r| Some(r.mean_waiting.into())),
    metric("mean_kv_use", "KV use", true, false, |r| Some(r.mean_kv_use.into())),
    metric("max_kv_use", "KV max", false, false, |r| Some(r.max_kv_use.into())),
    metric("prefix_hit_rate", "hits", true, false, |r| r.prefix_hit_rate.map(Quantity::from)),
    metric("mean_adapters", "adapters", true, false, |r| r.mean_adapters.map(Quantity::from)),
    metric("preemptions", "preempted", true, false, |r| Some((r.preemptions as f64).into())),
    metric("median_step_ns", "step", false, true, |r| r.median_step_ns.map(Quantity::from)),
    metric("median_schedule_ns", "schedule", false, true, |r| r.median_schedule_ns.map(Quantity::from)),
    metric("measured", "measured", false, false, |r| Some((r.measured as f64).into())),
    metric("served", "served", false, false, |r| Some((r.served as f64).into())),
];

fn shown(quantity: Option<Quantity>, time: bool) -> String {
    match quantity.map(Quantity::value) {
        None => "-".to_owned(),
        Some(value) if value.is_infinite() => "∞".to_owned(),
        Some(value) if time => Nanos(value).to_string(),
        Some(value) if value.abs() >= 100.0 => format!("{value:.0}"),
        Some(value) if value.abs() >= 1.0 || value == 0.0 => format!("{value:.2}"),
        Some(value) => format!("{value:.3}"),
    }
}

pub(super) fn validity(point: &Point) -> &'static str {
    match point.result.as_ref().map(|r| r.validity) {
        None => "not run",
        Some(Validity::Valid) => "ok",
        Some(Validity::Saturated) => "SATURATED",
        Some(Validity::Invalid) => "INVALID",
    }
}

/// Phases of a cold start, and the launches they were taken from.
pub(super) fn cold_grid(cold: &ColdStart) -> Grid {
    let head = ["phase", "median", "min", "max", "first launch", "holds"];
    let mut grid = vec![head.map(str::to_owned).to_vec()];
    let row = |p: &ColdPhase| {
        let times = [p.median_ns, p.min_ns, p.max_ns, p.first_launch_ns].map(|ns| Nanos(ns).to_string());
        std::iter::once(plain(&p.name)).chain(times).chain([plain(&p.holds)]).collect()
    };
    grid.extend(cold.phases.iter().chain([&cold.to_first_token]).map(row));
    grid
}

/// One row per phase and launch, so that a launch is the unit of whatever is computed from it.
fn cold_csv(cold: &ColdStart) -> Result<String, OutputError> {
    let mut writer = ::csv::Writer::from_writer(Vec::new());
    writer.write_record(["launch", "phase", "time_ns"])?;
    for (index, launch) in cold.launches.iter().enumerate() {
        let times = cold.phases.iter().zip(&launch.phases_ns).map(|(p, ns)| (&p.name, *ns));
        for (name, ns) in times.chain([(&cold.to_first_token.name, launch.to_first_token_ns)]) {
            writer.write_record([(index + 1).to_string(), super::csv::harmless(name), ns.to_string()])?;
        }
    }
    finish(writer)
}

fn finish(writer: ::csv::Writer<Vec<u8>>) -> Result<String, OutputError> {
    let bytes = writer.into_inner().map_err(|e| OutputError::Csv(e.into_error().into()))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn csv(report: &ServeReport) -> Result<String, OutputError> {
    if let Some(cold) = &report.cold_start {
        return cold_csv(cold);
    }
    let mut writer = ::csv::Writer::from_writer(Vec::new());
    let names = ["label", "validity", "reasons", "seed", "cold"];
    let metrics: Vec<String> = METRICS.iter().map(|m| m.key.to_owned()).collect();
    let predicted = METRICS.iter().filter(|m| m.time).map(|m| format!("predicted_{}", m.key));
    writer.write_record(names.iter().map(ToString::to_string).chain(metrics).chain(predicted))?;
    for point in &report.points {
        let reasons =
            point.result.as_ref().map_or_else(|| joined(point.not_run.as_slice()), |r| joined(&r.reasons));
        let mut row = vec![
            super::csv::harmless(&point.label),
            validity(point).to_owned(),
            super::csv::harmless(&reasons),
            point.seed.to_string(),
            point.cold.to_string(),
        ];
        // What is not known is an empty field, what is infinite the word.
        let number = |q: Option<Quantity>| match q {
            None => String::new(),
            Some(Quantity::Finite(value)) => value.to_string(),
            Some(Quantity::Infinite(_)) => "infinite".to_owned(),
        };
        row.extend(METRICS.iter().map(|m| number(point.result.as_ref().and_then(m.value))));
        let times = METRICS.iter().filter(|m| m.time);
        row.extend(times.map(|m| number(point.predicted.as_ref().and_then(m.value))));
        writer.write_record(row)?;
    }
    finish(writer)
}

/// A grid of text: titles, then rows.
pub(super) type Grid = Vec<Vec<String>>;

/// The points side by side; columns in which nobody has anything are left out.
pub(super) fn curve(points: &[Point]) -> Grid {
    let columns: Vec<&Metric> = METRICS
        .iter()
        .filter(|m| m.short)
        .filter(|m| points.iter().any(|p| p.result.as_ref().and_then(m.value).is_some()))
        .collect();
    let mut grid = vec![
        std::iter::once("point")
            .chain(columns.iter().map(|m| m.title))
            .chain(["validity"])
            .map(str::to_owned)
            .collect::<Vec<_>>(),
    ];
    for point in points {
        let mut row = vec![plain(&point.label)];
        row.extend(columns.iter().map(|m| shown(point.result.as_ref().and_then(m.value), m.time)));
        row.push(validity(point).to_owned());
        grid.push(row);
    }
    grid
}

/// The latencies of one point.
pub(super) fn latencies(result: &ServeResult) -> Grid {
    let head = ["", "p50", "p75", "p90", "p95", "p99", "p99.9", "max", "n", "infinite"];
    let mut grid = vec![head.map(str::to_owned).to_vec()];
    let all: [(&str, Option<&Quantiles>); 6] = [
        ("TTFT", result.ttft_ns.as_ref()),
        ("TPOT", result.tpot_ns.as_ref()),
        ("ITL", result.itl_ns.as_ref()),
        ("E2E", result.e2e_ns.as_ref()),
        ("queue", result.queue_ns.as_ref()),
        ("injection lag", Some(&result.injection_lag_ns)),
    ];
    for (name, quantiles) in all {
        let Some(q) = quantiles else {
            grid.push(std::iter::once(name.to_owned()).chain(vec!["refused".to_owned(); 9]).collect());
            continue;
        };
        // Below the number of values that a percentile needs, the largest seen is all that can be said.
        let at = |p: Option<Quantity>| match (p, q.max) {
            (None, Some(max)) => format!("≥ {}", shown(Some(max), true)),
            (p, _) => shown(p, true),
        };
        let mut row = vec![name.to_owned()];
        row.extend([q.p50, q.p75, q.p90, q.p95, q.p99, q.p99_9].map(at));
        row.extend([shown(q.max, true), q.n.to_string(), q.infinite.to_string()]);
        grid.push(row);
    }
    grid
}

/// Where the loop's time went, as shares of the wall clock.
fn breakdown_line(b: &Breakdown) -> String {
    let parts = [
        ("enqueue", b.enqueue_ns),
        ("schedule", b.schedule_ns),
        ("build", b.build_ns),
        ("launch", b.launch_ns),
        ("device", b.device_ns),
        ("sample", b.sample_ns),
        ("mask", b.mask_ns),
        ("mask apply", b.mask_apply_ns),
        ("detokenize", b.detokenize_ns),
        ("other", b.other_ns),
        ("idle", b.idle_ns),
    ];
    let share = |ns: f64| format!("{:.2} %", if b.wall_ns > 0.0 { ns / b.wall_ns * 100.0 } else { 0.0 });
    let per_step = |ns: f64| Nanos(ns / b.steps.max(1) as f64);
    // On a virtual clock only the device takes time.
    let told: Vec<String> = parts
        .iter()
        .filter(|(_, ns)| *ns > 0.0)
        .map(|(name, ns)| match *name {
            "idle" => format!("idle {}", share(*ns)),
            name => format!("{name} {} ({})", share(*ns), per_step(*ns)),
        })
        .collect();
    format!(
        "{} steps in {}: {} (share of the run, time per step)",
        b.steps,
        Nanos(b.wall_ns),
        told.join(" · ")
    )
}

fn offered(point: &Point) -> String {
    match point.offered {
        Offered::Rate(rate) => match point.arrivals {
            Some(arrivals) => format!("{rate} requests per second, {arrivals} arrivals, open loop"),
            None => format!("{rate} requests per second, arrivals as recorded but scaled to that, open loop"),
        },
        Offered::AtOnce => "all requests at once".to_owned(),
        Offered::Concurrency(n) => format!(
            "closed loop of {n}: the load waits for the system, so what an independent user would wait is hidden"
        ),
        Offered::AsRecorded => "arrivals as recorded, open loop".to_owned(),
    }
}

/// Sentences about a point.
pub(super) fn remarks(point: &Point) -> Vec<String> {
    let mut said = Vec::new();
    if let Some(reason) = &point.not_run {
        said.push(format!("not run: {reason}"));
    }
    let Some(result) = &point.result else { return said };
    said.extend(result.reasons.iter().map(|r| format!("{}: {r}", validity(point))));
    // Beside latencies that are shown, a reader must know that they may depend on how long one measured.
    said.extend(
        result
            .gates
            .iter()
            .filter(|gate| gate.name == GateName::KeepsUp && gate.passed.is_none())
            .map(|gate| format!("whether it keeps up is open: {}", gate.detail)),
    );
    if result.unfinished > 0 {
        said.push(format!("{} of {} measured requests never finished", result.unfinished, result.measured));
    }
    for (reason, count) in &result.rejected {
        said.push(format!("{count} of {} measured requests were rejected: {reason}", result.measured));
    }
    if result.tpot_clause_dropped > 0 && !result.slo.is_empty() {
        said.push(format!(
            "{} requests have no TPOT, and their TPOT clause was dropped",
            result.tpot_clause_dropped
        ));
    }
    for clause in &result.slo {
        let verdict = match clause.met {
            Some(true) => "met",
            Some(false) => "NOT met",
            None => "unknown",
        };
        said.push(format!("{}: {verdict}, {}", clause.clause, shown(clause.observed, true)));
    }
    if let (Some(seen), Some(ideal)) = (result.prefix_hit_rate, point.ideal_hit_rate)
        && ideal.max(seen) >= 0.001
    {
        said.push(format!(
            "prefix cache: {:.1} % of the prompt tokens found, {:.1} % by a cache without an end, {} evictions",
            seen * 100.0,
            ideal * 100.0,
            result.prefix_evictions
        ));
    }
    let limit = Limits::default().foreign_cores;
    said.extend(result.foreign_cores.filter(|cores| *cores > limit).map(|cores| {
        format!("disturbed: other processes kept {cores:.1} cores busy over the run; its latencies are theirs, too")
    }));
    said.extend(apart::remarks(point, result));
    if let Some(predicted) = &point.predicted {
        let pair = |of: fn(&ServeResult) -> Option<&Quantiles>| {
            let p50 = |r| of(r).and_then(|q| q.p50).map(Quantity::value);
            match (p50(predicted), p50(result)) {
                (Some(p), Some(m)) if p.is_finite() && m.is_finite() => {
                    format!("{} against {} ({:+.1} %)", Nanos(p), Nanos(m), (p / m - 1.0) * 100.0)
                }
                _ => "unknown".to_owned(),
            }
        };
        said.push(format!(
            "predicted against measured medians: TTFT {}, TPOT {}, E2E {}",
            pair(|r| r.ttft_ns.as_ref()),
            pair(|r| r.tpot_ns.as_ref()),
            pair(|r| r.e2e_ns.as_ref())
        ));
        // A prediction from steps cannot be closer than the steps are to themselves.
        said.extend(point.drift.filter(|drift| !(0.95..=1.05).contains(drift)).map(|drift| {
            format!(
                "the engine's own steps took {:+.1} % more time after the run than before it; the prediction goes by their mean",
                (drift - 1.0) * 100.0
            )
        }));
        let off = |residual: &Residual| !(0.95..=1.05).contains(&residual.total_ratio);
        if let Some(residuals) = point.residuals.as_ref().filter(|r| r.kinds().any(|(_, kind)| off(&kind))) {
            let kinds: Vec<String> = residuals
                .kinds()
                .map(|(kind, r)| {
                    format!("{kind} {:+.1} % ({} steps)", (r.total_ratio - 1.0) * 100.0, r.steps)
                })
                .collect();
            said.push(format!(
                "steps of the run over what the model of steps makes of them: {}",
                kinds.join(", ")
            ));
        }
    }
    said
}

/// The lines above all tables.
pub(super) fn head(report: &ServeReport) -> Vec<String> {
    let model = &report.model;
    let engine = match (&report.capabilities, &report.datasheet) {
        (Some(c), _) => {
            format!("{} engine on {} ({:?} batches)", c.engine, c.device, c.ragged).to_lowercase()
        }
        (None, Some(sheet)) => format!("VIRTUAL: nothing was measured · {}", plain(&sheet.product)),
        (None, None) if report.kind == ServeKind::ServeCold => {
            "a process per launch, one after the other".to_owned()
        }
        (None, None) => "VIRTUAL: nothing was measured".to_owned(),
    };
    let mut lines = vec![
        format!(
            "{} · {} · {} · {:.3} B parameters",
            plain(&model.name),
            plain(&model.source),
            report.dtype,
            model.parameters as f64 / 1e9
        ),
        engine,
    ];
    if let Some(told) = &report.step_model {
        lines.push(format!("step times: {told}"));
    }
    lines.extend(apart::head(report));
    lines.push(format!("workload: {} ({})", plain(&report.workload.name), plain(&report.workload.source)));
    if let Some(point) = report.points.first() {
        let s = &point.scheduler;
        lines.push(format!(
            "{} sequences and {} tokens a step · {} KV blocks of {} · prefix caching {} · chunked prefill {} · {}",
            s.max_num_seqs,
            s.max_num_batched_tokens,
            s.num_blocks,
            s.block_size,
            if s.enable_prefix_caching { "on" } else { "off" },
            if s.enable_chunked_prefill { "on" } else { "off" },
            format!("{:?}", s.scheduling).to_lowercase()
        ));
    }
    lines.extend(report.hypothesis.iter().map(|h| format!("hypothesis: {}", plain(h))));
    lines.extend(report.note.iter().map(|n| format!("note: {}", plain(n))));
    lines
}

/// What one point says beside its gates: tables are drawn by the caller.
pub(super) fn point_lines(point: &Point) -> Vec<String> {
    let Some(r) = &point.result else { return Vec::new() };
    vec![
        format!(
            "{} · {} measured after {} warm-up, {} behind them · prompts {:.0} and outputs {:.0} tokens on average",
            offered(point),
            r.measured,
            r.warmup_requests,
            r.cooldown_requests,
            point.mean_prompt_tokens,
            point.mean_output_tokens
        ),
        format!(
            "served {:.3} requests/s, prompt {:.1} tok/s, output {:.1} tok/s over {:.1} s{}",
            r.served_per_s,
            r.prompt_tokens_per_s,
            r.output_tokens_per_s,
            r.window_s,
            r.goodput_per_s.map_or_else(String::new, |g| format!(
                " · goodput {g:.3} requests/s ({:.1} % of the requests)",
                r.goodput_share.unwrap_or_default() * 100.0
            ))
        ),
        format!(
            "running {:.1}, waiting {:.1} on average · {:.1} sequences and {:.1} tokens a step · KV {:.1} % (most {:.1} %) · {} preemptions",
            r.mean_running,
            r.mean_waiting,
            r.mean_batch,
            r.mean_step_tokens,
            r.mean_kv_use * 100.0,
            r.max_kv_use * 100.0,
            r.preemptions
        ),
        breakdown_line(&r.breakdown),
    ]
}

/// What a point's gates say.
fn gate_lines(point: &Point) -> impl Iterator<Item = String> {
    point.result.iter().flat_map(|result| &result.gates).map(|gate| {
        let verdict = match gate.passed {
            Some(true) => "ok",
            Some(false) => "FAILED",
            None => "not judged",
        };
        format!("gate {}: {verdict}: {}", gate.name, gate.detail)
    })
}

pub(super) fn search_lines(search: &Search) -> Vec<String> {
    let objectives: Vec<String> = search.slo.clauses.iter().map(ToString::to_string).collect();
    let mut lines = vec![match search.max_rate {
        Some(rate) => format!(
            "highest rate under {}: {rate:.3} requests per second, confirmed by fresh seeds; a longer run at it {}",
            objectives.join(", "),
            match search.sustained {
                Some(true) => "held",
                Some(false) => "did NOT hold",
                None => "was not made",
            }
        ),
        None => format!("no rate found under {}", objectives.join(", ")),
    }];
    if !search.note.is_empty() {
        lines.push(search.note.clone());
    }
    lines.extend(search.attempts.iter().map(|a| {
        format!("{} {:.3}/s: {} ({})", a.stage, a.rate, if a.met { "held" } else { "failed" }, a.why)
    }));
    lines
}

pub(super) fn matrix_lines(row: &RowVerdict) -> String {
    let verdict = match row.held {
        Some(true) => "held",
        Some(false) => "REFUTED",
        None => "not known",
    };
    format!("{}: expected {}; {verdict}: {}", row.title, row.hypothesis, plain(&row.seen))
}

/// Titles of columns that hold words; the first column does in every grid.
const WORDS: &[&str] = &["holds"];

/// A grid by its columns.
pub(super) fn columns(grid: &Grid) -> Vec<Column> {
    let titles = grid.first().map_or(&[][..], Vec::as_slice);
    let column = |(index, title): (usize, &String)| Column {
        title: title.clone(),
        right: index > 0 && !WORDS.contains(&title.as_str()),
        cells: grid.iter().skip(1).map(|row| row[index].clone()).collect(),
    };
    titles.iter().enumerate().map(column).collect()
}

fn aligned(grid: &Grid) -> String {
    super::terminal::aligned(&columns(grid)).into_iter().fold(String::new(), |text, line| text + &line + "\n")
}

fn table(report: &ServeReport) -> String {
    let mut text = String::new();
    // Whatever a line is made of, it is one line.
    for line in head(report) {
        let _ = writeln!(text, "{}", plain(&line));
    }
    text.push('\n');
    if let Some(cold) = &report.cold_start {
        text.push_str(&aligned(&cold_grid(cold)));
    } else if let [point] = report.points.as_slice() {
        for line in point_lines(point).into_iter().chain(gate_lines(point)) {
            let _ = writeln!(text, "{}", plain(&line));
        }
        text.push('\n');
        if let Some(result) = &point.result {
            text.push_str(&aligned(&latencies(result)));
        }
    } else {
        text.push_str(&aligned(&curve(&report.points)));
    }
    let mut said: Vec<String> = Vec::new();
    for point in &report.points {
        let many = report.points.len() > 1;
        let name = |r: String| if many { format!("{}: {r}", plain(&point.label)) } else { r };
        said.extend(remarks(point).into_iter().map(name));
    }
    said.extend(report.search.iter().flat_map(search_lines));
    said.extend(report.matrix.iter().map(matrix_lines));
    said.extend(report.warnings.iter().map(|w| plain(w)));
    if !said.is_empty() {
        text.push('\n');
    }
    for line in said {
        let _ = writeln!(text, "  {}", plain(&line));
    }
    text
}

fn markdown(report: &ServeReport) -> String {
    let mut text = String::new();
    let escape = super::markdown::escape;
    for line in head(report) {
        let _ = writeln!(text, "- {}", escape(&line));
    }
    let _ = writeln!(text, "- command: `{}`\n", plain(&report.command).replace('`', "'"));
    let grids = match report.points.as_slice() {
        [] => report.cold_start.iter().map(cold_grid).collect(),
        [one] => one.result.as_ref().map(latencies).into_iter().collect(),
        many => vec![curve(many)],
    };
    for grid in grids {
        super::markdown::rows(&mut text, &columns(&grid));
        text.push('\n');
    }
    for point in &report.points {
        let lines = if report.points.len() == 1 {
            point_lines(point).into_iter().chain(gate_lines(point)).collect()
        } else {
            Vec::new()
        };
        for line in lines.into_iter().chain(remarks(point)) {
            let _ = writeln!(text, "- {}: {}", escape(&point.label), escape(&line));
        }
    }
    let search = report.search.iter().flat_map(search_lines);
    for line in search.chain(report.matrix.iter().map(matrix_lines)).chain(report.warnings.iter().cloned()) {
        let _ = writeln!(text, "- {}", escape(&line));
    }
    text
}

mod apart;
#[cfg(test)]
pub(crate) mod tests;
