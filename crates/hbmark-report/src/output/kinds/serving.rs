//! A serving result: points of load, one or many, a cold start, a search for the highest rate.
//!
//! Enters: points of load with their results. Leaves: the document, and the page with plots. What is null is shown as a dash, what is infinite
//! as such, and a percentile that the sample is too small for as the largest value with a `≥`.

use crate::analysis::words::{answer, counted};
use crate::analysis::{cached_before, explain_serving};
use crate::output::Kind;
use crate::output::document::{Column, Document, Line, Value, measured, numbers, words};
use crate::output::kinds::headline;
use crate::output::kinds::run::parameters;
use crate::output::metrics::{SERVING, Shown, Unit};
use crate::output::plot::Shape;
use hbmark_core::result::ModelSummary;
use hbmark_core::result::cause::joined;
use hbmark_core::result::serving::{
    Attempt, Breakdown, ColdPhase, ColdStart, GateName, Offered, Point, Quantiles, Quantity, Residual,
    RowVerdict, STEADY_DRIFT, Search, SearchStage, ServeKind, ServeReport, ServeResult, Validity,
};
use hbmark_core::units::{Nanos, PerSecond};

impl Kind for ServeReport {
    fn document(&self) -> Document {
        let mut head = head(self).into_iter();
        let mut document = Document::new(head.next().unwrap_or_default());
        document.lines(head.map(Line::plain).chain([Line::Command(self.command.clone())]));
        document.lines(self.search.iter().flat_map(search_answer).map(Line::plain));
        if self.search.is_none() && self.matrix.is_empty() && self.points.len() > 1 {
            document.lines(headline::highest_rate(self).map(|figure| Line::plain(figure.text())));
        }
        match (&self.cold_start, self.points.as_slice()) {
            (Some(cold), _) => document.table(cold_columns(cold)),
            (None, [point]) => {
                document.lines(point_lines(point).into_iter().map(Line::plain));
                if let Some(result) = &point.result {
                    document.table(latencies(&point.label, point, result));
                }
            }
            (None, points) => document.table(curve(points)),
        }
        let many = self.points.len() > 1;
        let named = |point: &Point| {
            let label = point.label.clone();
            let name = move |r: String| if many { format!("{label}: {r}") } else { r };
            remarks(point).into_iter().map(name).collect::<Vec<_>>()
        };
        // The steps of a search say what decided each point.
        let points = if self.search.is_some() { &[] } else { self.points.as_slice() };
        let lines = points.iter().flat_map(named).chain(steps_of_search(self));
        document.list(lines.chain(self.matrix.iter().map(matrix_lines)).chain(warnings(self)));
        document.sheet = Some(self.cold_start.as_ref().map_or_else(|| sheet(&self.points), cold_sheet));
        document
    }

    fn json(&self) -> serde_json::Result<String> {
        serde_json::to_string_pretty(self)
    }

    fn page(&self) -> Document {
        page::page(self, &explain_serving(self, None))
    }
}

/// The points side by side, without empty columns.
pub fn curve(points: &[Point]) -> Vec<Column> {
    let shown = SERVING.iter().filter(|metric| metric.shown == Shown::Table);
    let mut columns = vec![words("point", points.iter().map(|point| point.label.clone()))];
    let measured = shown.map(|metric| metric.column(points.iter().map(|p| p.result.as_ref())).each_alone());
    let disturbed: Vec<bool> = points.iter().map(|point| !point.disturbances().is_empty()).collect();
    columns.extend(measured.filter(|column| !column.is_empty()).map(|column| column.in_brackets(&disturbed)));
    columns.push(numbers("validity", points.iter().map(|point| validity(point).to_owned())));
    columns
}

/// Every number of every point, and of what was predicted its times.
pub fn sheet(points: &[Point]) -> Vec<Column> {
    let reasons = |point: &Point| match &point.result {
        Some(result) => joined(&result.reasons),
        None => joined(point.not_run.as_slice()),
    };
    let mut columns = vec![
        words("label", points.iter().map(|point| point.label.clone())),
        words("validity", points.iter().map(|point| validity(point).to_owned())),
        words("reasons", points.iter().map(reasons)),
        numbers("seed", points.iter().map(|point| point.seed.to_string())),
        words("cold", points.iter().map(|point| point.cold.to_string())),
        // As asked for; empty where the load was given in another way.
        numbers(
            "rate",
            points.iter().map(|point| match point.offered {
                Offered::Rate(rate) => rate.to_string(),
                Offered::AtOnce => "inf".to_owned(),
                Offered::Concurrency(_) | Offered::AsRecorded => String::new(),
            }),
        ),
        numbers(
            "concurrency",
            points.iter().map(|point| match point.offered {
                Offered::Concurrency(most) => most.to_string(),
                Offered::Rate(_) | Offered::AtOnce | Offered::AsRecorded => String::new(),
            }),
        ),
    ];
    columns.extend(SERVING.iter().map(|metric| metric.field(points.iter().map(|p| p.result.as_ref()))));
    columns.extend(SERVING.iter().filter(|metric| metric.unit == Unit::Nanoseconds).map(|metric| {
        let field = metric.field(points.iter().map(|p| p.predicted.as_ref()));
        Column { title: format!("predicted_{}", field.title), ..field }
    }));
    columns
}

/// The latencies of one point, under a name; in brackets where the machine was disturbed.
pub fn latencies(name: &str, point: &Point, result: &ServeResult) -> Vec<Column> {
    let mut all = vec![
        ("TTFT", result.ttft_ns.as_ref()),
        ("TPOT", result.tpot_ns.as_ref()),
        ("ITL", result.itl_ns.as_ref()),
        ("E2E", result.e2e_ns.as_ref()),
    ];
    if point.live.is_none() {
        all.push(("queue", result.queue_ns.as_ref()));
    }
    // On a virtual clock the loop is never late.
    if result.injection_lag_ns.max != Some(Quantity::Finite(0.0)) {
        all.push(("injection lag", Some(&result.injection_lag_ns)));
    }
    all.extend(point.live.iter().flat_map(live::rows));
    let column = |title: &str, unit: Unit, of: &dyn Fn(&Quantiles) -> Value| {
        measured(title, unit, all.iter().map(|(_, q)| q.map_or(Value::Word("not reported"), of)))
    };
    let percentile = |title: &str, p: f64, of: fn(&Quantiles) -> Option<Quantity>| {
        // Of fewer values than a percentile needs nothing is said but the largest, which may lie below it or above. Requests that failed are
        // infinitely late, and where they are more than lie above the percentile it is known to be.
        let beyond = |q: &Quantiles| q.infinite as f64 > (1.0 - p) * q.n as f64 + 1e-9;
        let infinite = |q: &Quantiles| beyond(q).then(|| Quantity::from(f64::INFINITY));
        column(title, Unit::Nanoseconds, &|q| of(q).or_else(|| infinite(q)).into()).each_alone()
    };
    let disturbed = vec![!point.disturbances().is_empty(); all.len()];
    let columns = vec![
        words(name, all.iter().map(|(name, _)| (*name).to_owned())),
        percentile("p50", 0.5, |q| q.p50),
        percentile("p75", 0.75, |q| q.p75),
        percentile("p90", 0.9, |q| q.p90),
        percentile("p95", 0.95, |q| q.p95),
        percentile("p99", 0.99, |q| q.p99),
        percentile("p99.9", 0.999, |q| q.p99_9),
        column("max", Unit::Nanoseconds, &|q| q.max.into()).each_alone(),
        column("n", Unit::Count, &|q| Value::Finite(q.n as f64)),
        column("failed", Unit::Count, &|q| Value::Finite(q.infinite as f64)),
    ];
    columns.into_iter().map(|column| column.in_brackets(&disturbed)).collect()
}

/// Phases of a cold start, and the launches they were taken from.
pub fn cold_columns(cold: &ColdStart) -> Vec<Column> {
    let phases = || cold.phases.iter().chain([&cold.to_first_token]);
    let time = |title: &str, of: fn(&ColdPhase) -> f64| {
        measured(title, Unit::Nanoseconds, phases().map(of)).each_alone()
    };
    vec![
        words("phase", phases().map(|phase| phase.name.clone())),
        time("median", |phase| phase.median_ns),
        time("min", |phase| phase.min_ns),
        time("max", |phase| phase.max_ns),
        time("first launch", |phase| phase.first_launch_ns),
        words("holds", phases().map(|phase| phase.holds.clone())),
    ]
}

/// One row per phase and launch, so that a launch is the unit of whatever is computed from it.
fn cold_sheet(cold: &ColdStart) -> Vec<Column> {
    let rows: Vec<(usize, &str, f64)> = (1..)
        .zip(&cold.launches)
        .flat_map(|(number, launch)| {
            let times = cold.phases.iter().zip(&launch.phases_ns).map(|(p, ns)| (p.name.as_str(), *ns));
            let whole = (cold.to_first_token.name.as_str(), launch.to_first_token_ns);
            times.chain([whole]).map(move |(name, ns)| (number, name, ns)).collect::<Vec<_>>()
        })
        .collect();
    vec![
        numbers("launch", rows.iter().map(|(number, ..)| number.to_string())),
        words("phase", rows.iter().map(|(_, name, _)| (*name).to_owned())),
        measured("time", Unit::Nanoseconds, rows.iter().map(|(.., ns)| *ns)),
    ]
}

pub fn validity(point: &Point) -> &'static str {
    match point.result.as_ref().map(|r| r.validity) {
        None => "not run",
        Some(Validity::Valid) if !point.disturbances().is_empty() => "disturbed",
        Some(Validity::Valid) => "ok",
        Some(Validity::Saturated) => "SATURATED",
        Some(Validity::Invalid) => "INVALID",
    }
}

/// The parts of the loop that took time, in its order. On a virtual clock only the device takes time.
fn busy_parts(b: &Breakdown) -> Vec<(&'static str, f64)> {
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
    ];
    parts.into_iter().filter(|(_, ns)| was_spent(*ns)).collect()
}

/// The same, and what was spent waiting for arrivals.
fn loop_parts(b: &Breakdown) -> Vec<(&'static str, f64)> {
    let mut parts = busy_parts(b);
    parts.extend(was_spent(b.idle_ns).then_some(("idle", b.idle_ns)));
    parts
}

fn was_spent(ns: f64) -> bool {
    ns.is_finite() && ns > 0.0
}

/// The style and shape of a point's mark: a cross where it is INVALID, faint where something disturbed the machine.
fn look(point: &Point, style: &str, shape: Shape) -> (String, Shape) {
    if is_invalid(point) {
        ("bad".to_owned(), Shape::Cross)
    } else if is_sound(point) {
        (style.to_owned(), shape)
    } else {
        (format!("{style} doubtful"), shape)
    }
}

fn is_invalid(point: &Point) -> bool {
    point.result.as_ref().is_some_and(|result| result.validity == Validity::Invalid)
}

/// Why a point is not valid, and what disturbed it: lines below the first one of a hover text.
fn doubts(point: &Point) -> String {
    let reasons = point.result.iter().flat_map(|result| &result.reasons);
    let reasons = reasons.map(|reason| format!("\n{}: {reason}", validity(point)));
    let disturbed = point.disturbances().into_iter().map(|why| format!("\ndisturbed: {why}"));
    reasons.chain(disturbed).collect()
}

/// Whether a line may go through a point.
fn is_sound(point: &Point) -> bool {
    !is_invalid(point) && point.disturbances().is_empty()
}

/// Whether a point is known to be within its objectives, on a machine that nothing disturbed.
pub fn met_objectives(point: &Point) -> bool {
    point.disturbances().is_empty()
        && point.result.as_ref().is_some_and(|result| result.within_objectives().0 == Some(true))
}

/// Whether the load of a point is shown to be held, on a machine that nothing disturbed.
pub fn held(point: &Point) -> bool {
    point.held() && point.disturbances().is_empty()
}

/// What a point's own verdict is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PointVerdict {
    /// Valid, within every objective, and the system keeps up.
    Held,
    /// Valid, and nothing is missed that was judged.
    Open,
    /// Not run, not valid, disturbed, or beyond an objective.
    Rejected,
}

/// Whether a point holds, is rejected, or neither is known.
pub fn point_verdict(point: &Point) -> PointVerdict {
    let missed = |result: &ServeResult| {
        result.validity != Validity::Valid || result.slo.iter().any(|clause| clause.met == Some(false))
    };
    match &point.result {
        _ if held(point) => PointVerdict::Held,
        Some(result) if !missed(result) && point.disturbances().is_empty() => PointVerdict::Open,
        _ => PointVerdict::Rejected,
    }
}

/// Where the loop's time went, as shares of the wall clock.
fn breakdown_line(b: &Breakdown) -> String {
    let share = |ns: f64| format!("{:.2} %", if b.wall_ns > 0.0 { ns / b.wall_ns * 100.0 } else { 0.0 });
    let per_step = |ns: f64| Nanos(ns / b.steps.max(1) as f64);
    let busy = busy_parts(b).into_iter().map(|(name, ns)| format!("{name} {} ({})", share(ns), per_step(ns)));
    let idle = was_spent(b.idle_ns).then(|| format!("idle {}", share(b.idle_ns)));
    let parts: Vec<String> = busy.chain(idle).collect();
    format!(
        "{} in {}: {} (share of the run, time per step)",
        counted(b.steps, "step"),
        Nanos(b.wall_ns),
        parts.join(" · ")
    )
}

fn offered(point: &Point) -> String {
    match point.offered {
        Offered::Rate(rate) => {
            let scaled = || "arrivals as recorded but scaled to that".to_owned();
            let arrivals = point.arrivals.map_or_else(scaled, |arrivals| format!("{arrivals} arrivals"));
            let rounded = (rate * 1e3).round() / 1e3;
            let rate = if rounded > 0.0 { rounded } else { rate };
            format!("{} per second, {arrivals}, open loop", counted(rate, "request"))
        }
        Offered::AtOnce => "all requests at time 0 (rate inf)".to_owned(),
        Offered::Concurrency(n) => format!(
            "closed loop of {n}: the load waits for the system, so what an independent user would wait is hidden"
        ),
        Offered::AsRecorded => "arrivals as recorded, open loop".to_owned(),
    }
}

/// How long the waiting line was. Of a live server it is seen from outside only until the first token.
pub fn mean_wait(point: &Point, result: &ServeResult) -> String {
    let for_what = if point.live.is_some() { " for their first token" } else { "" };
    format!("{:.2} requests waited{for_what} on average", result.mean_waiting.max(0.0))
}

/// Sentences about a point: why it is what it is, then what else is known of it.
pub fn remarks(point: &Point) -> Vec<String> {
    reasons(point).into_iter().chain(notes(point)).collect()
}

/// Why a point is rejected, or what is open about it; empty for one that holds.
pub fn reasons(point: &Point) -> Vec<String> {
    let mut lines = Vec::new();
    if let Some(reason) = &point.not_run {
        lines.push(format!("not run: {reason}"));
    }
    let Some(result) = &point.result else { return lines };
    lines.extend(result.reasons.iter().map(|r| format!("{}: {r}", validity(point))));
    // The latencies are shown, so warn that they may depend on the length of the run.
    lines.extend(
        result.gates.iter().filter(|gate| gate.name == GateName::KeepsUp && gate.passed.is_none()).map(
            |gate| {
                let waited = mean_wait(point, result);
                format!("{waited}; the run is too short to show that it stays so: {}", gate.detail)
            },
        ),
    );
    if result.unfinished > 0 {
        lines.push(format!(
            "never finished: {} of {}",
            result.unfinished,
            counted(result.measured, "measured request")
        ));
    }
    let said = |reason| point.live.as_ref().and_then(|live| live.messages.get(reason));
    for (reason, count) in &result.rejected {
        let words = said(reason).map_or_else(String::new, |words| format!("; the first one: {words}"));
        lines.push(format!(
            "not served: {count} of {}: {reason}{words}",
            counted(result.measured, "measured request")
        ));
    }
    lines.extend(result.slo.iter().filter(|c| c.met != Some(true)).map(|c| {
        match (result.validity, c.observed) {
            (Validity::Saturated, None) => format!("NOT met: {}: the longer such a run lasts, the longer requests wait", c.clause),
            _ if c.met.is_none() && c.is_unbounded() => format!(
                "undetermined: {c}: requests depend on each other, so that these are too few to bound the percentile from above; give more --requests, or \
                 leave it out and the run goes on until it is decided"
            ),
            _ => format!("{}: {c}", met(c.met)),
        }
    }));
    lines.extend(point.foreign_load().map(|cores| {
        format!("disturbed: other processes kept {cores:.1} cores busy over the run; its latencies are theirs, too")
    }));
    let goes_by = if point.predicted.is_some() { "; the prediction goes by their mean" } else { "" };
    lines.extend(point.drifted().map(|drifted| format!("disturbed: {drifted}{goes_by}")));
    lines.extend(cached_before(point, result).map(|found| format!("cached before: {found}")));
    lines
}

/// What a person should know of the whole result.
fn warnings(report: &ServeReport) -> impl Iterator<Item = String> + '_ {
    beyond_context(report).into_iter().chain(report.warnings.iter().cloned())
}

/// That requests were planned for which the server has too few positions.
fn beyond_context(report: &ServeReport) -> Option<String> {
    let context = report.server.as_ref()?.max_model_len?;
    let lives =
        || report.points.iter().filter_map(|point| Some((point.live.as_ref()?, point.result.as_ref()?)));
    let beyond: usize = lives().map(|(live, _)| live.beyond_context).sum();
    let planned: usize = lives().map(|(_, result)| result.measured).sum();
    (beyond > 0).then(|| {
        format!(
            "{beyond} of {} {} longer than the server's context of {context}: it refuses or cuts them",
            counted(planned, "planned request"),
            if beyond == 1 { "is" } else { "are" }
        )
    })
}

/// What is known of a point beside its verdict.
pub fn notes(point: &Point) -> Vec<String> {
    let mut lines = Vec::new();
    let Some(result) = &point.result else { return lines };
    lines.extend(result.slo.iter().filter(|c| c.met == Some(true)).map(|c| format!("{}: {c}", met(c.met))));
    if result.tpot_clause_dropped > 0 && !result.slo.is_empty() {
        lines.push(format!(
            "no TPOT, so that the TPOT clause was dropped: {}",
            counted(result.tpot_clause_dropped, "request")
        ));
    }
    if let (Some(seen), Some(ideal)) = (result.prefix_hit_rate, point.ideal_hit_rate)
        && ideal.max(seen) >= 0.001
    {
        lines.push(format!(
            "prefix cache: hit rate {:.1} % (infinite cache: {:.1} %), {}",
            seen * 100.0,
            ideal * 100.0,
            counted(result.prefix_evictions, "eviction")
        ));
    }
    lines.extend(adapters_and_grammar::remarks(point, result));
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
        lines.push(format!(
            "predicted against measured medians: TTFT {}, TPOT {}, E2E {}",
            pair(|r| r.ttft_ns.as_ref()),
            pair(|r| r.tpot_ns.as_ref()),
            pair(|r| r.e2e_ns.as_ref())
        ));
        let off = |residual: &Residual| !STEADY_DRIFT.contains(&residual.total_ratio);
        if let Some(residuals) = point.residuals.as_ref().filter(|r| r.kinds().any(|(_, kind)| off(&kind))) {
            let kinds: Vec<String> = residuals
                .kinds()
                .map(|(kind, r)| {
                    format!("{kind} {:+.1} % ({})", (r.total_ratio - 1.0) * 100.0, counted(r.steps, "step"))
                })
                .collect();
            lines.push(format!(
                "steps of the run over what the model of steps makes of them: {}",
                kinds.join(", ")
            ));
        }
    }
    lines
}

/// The lines above all tables.
pub fn head(report: &ServeReport) -> Vec<String> {
    let served = served(report).into_iter().map(|(what, how)| format!("{what} · {how}"));
    served.chain(setup(report)).collect()
}

/// What was served: the model, then the server, each with what follows its name.
fn served(report: &ServeReport) -> Vec<(String, String)> {
    let of_model = |model: &ModelSummary| {
        let dtype = report.dtype.map(|dtype| format!(" · {dtype}")).unwrap_or_default();
        let parameters = parameters(model.parameters);
        // What a server loaded is its own; what was given has a shape.
        let source = if report.server.is_some() { "the shape that was given" } else { &model.source };
        (model.name.clone(), format!("{source}{dtype} · {parameters} parameters"))
    };
    report.server.iter().map(live::server).chain(report.model.iter().map(of_model)).collect()
}

/// How it was served, and with which requests.
fn setup(report: &ServeReport) -> Vec<String> {
    let engine = match (&report.capabilities, &report.datasheet) {
        _ if report.server.is_some() => String::new(),
        (Some(c), _) => {
            format!("{} engine on {} ({:?} batches)", c.engine, c.device, c.ragged).to_lowercase()
        }
        (None, Some(sheet)) => format!("VIRTUAL: nothing was measured · {}", sheet.product),
        (None, None) if report.kind == ServeKind::ServeCold => {
            "a process per launch, one after the other".to_owned()
        }
        (None, None) => "VIRTUAL: nothing was measured".to_owned(),
    };
    let mut lines: Vec<String> = (!engine.is_empty()).then_some(engine).into_iter().collect();
    lines.extend(report.step_model.iter().map(|model| format!("step time model: {model}")));
    lines.extend(adapters_and_grammar::head(report));
    lines.push(if report.matrix.is_empty() {
        format!("workload: {} ({})", report.workload.name, report.workload.source)
    } else {
        "workload: another one in every row".to_owned()
    });
    if let Some(s) = report.points.first().and_then(|point| point.scheduler.as_ref()) {
        lines.push(format!(
            "{} and {} a step · {} of {} · prefix caching {} · chunked prefill {} · {}",
            counted(s.max_num_seqs, "sequence"),
            counted(s.max_num_batched_tokens, "token"),
            counted(s.num_blocks, "KV block"),
            s.block_size,
            if s.enable_prefix_caching { "on" } else { "off" },
            if s.enable_chunked_prefill { "on" } else { "off" },
            format!("{:?}", s.scheduling).to_lowercase()
        ));
    }
    lines.extend(report.hypothesis.iter().map(|h| format!("hypothesis: {h}")));
    lines.extend(report.note.iter().map(|n| format!("note: {n}")));
    lines
}

/// One point in full, but for its tables.
pub fn point_lines(point: &Point) -> Vec<String> {
    let Some(r) = &point.result else { return Vec::new() };
    let system = match &point.live {
        Some(_) => format!(
            "in flight on average: {:.1} decoding, {:.1} before their first token",
            r.mean_running, r.mean_waiting
        ),
        None => format!(
            "running {:.1}, waiting {:.1} on average · {:.1} sequences and {:.1} tokens a step · KV {:.1} % (most {:.1} %) · {}",
            r.mean_running,
            r.mean_waiting,
            r.mean_batch,
            r.mean_step_tokens,
            r.mean_kv_use * 100.0,
            r.max_kv_use * 100.0,
            counted(r.preemptions, "preemption")
        ),
    };
    let drafts = r.drafts.as_ref().and_then(|drafts| Some((drafts, drafts.mean_acceptance_length()?)));
    let speculation = drafts.map(|(drafts, length)| {
        let of_steps = |accepted: &u64| format!("{:.0} %", *accepted as f64 / drafts.num_drafts as f64 * 100.0);
        let positions: Vec<String> = drafts.num_accepted_tokens_per_pos.iter().map(of_steps).collect();
        format!(
            "speculative decoding, scripted: {length:.2} tokens of a sequence in a verify step on average, drafts accepted by position in {} of steps; drafting took no time",
            positions.join(", ")
        )
    });
    let mut lines = vec![
        format!(
            "{} · {} measured, {} warm-up before and {} cool-down after them · prompts {:.0} and outputs {:.0} tokens on average",
            offered(point),
            r.measured,
            r.warmup_requests,
            r.cooldown_requests,
            point.prompt_tokens(),
            point.output_tokens()
        ),
        format!(
            "served {:.3} requests/s, prompt {:.1} tok/s, output {:.1} tok/s over {:.1} s{}",
            r.served_per_s,
            r.prompt_tokens_per_s,
            r.output_tokens_per_s,
            r.window_s,
            r.goodput_per_s.map_or_else(String::new, |g| format!(
                " · goodput {g:.3} requests/s; {:.1} % of the measured requests met every objective",
                r.goodput_share.unwrap_or_default() * 100.0
            ))
        ),
        system,
    ];
    lines.extend(speculation);
    lines.extend(still_filling(point, r));
    match &point.live {
        Some(live) => lines.extend(live::lines(live, r)),
        None => lines.push(breakdown_line(&r.breakdown)),
    }
    lines.extend(r.gates.iter().map(|g| format!("gate {}: {}: {}", g.name, verdict(g.passed), g.detail)));
    lines
}

/// That requests were measured while the system filled up: a warm-up should have twice as many as are in the system.
fn still_filling(point: &Point, result: &ServeResult) -> Option<String> {
    let wanted = 2.0 * (result.mean_running + result.mean_waiting);
    let is_short = (result.warmup_requests as f64) < 0.9 * wanted && point.offered != Offered::AtOnce;
    is_short.then(|| {
        format!(
            "the first requests were measured while the system filled up: {:.1} were in it on average; --warmup-requests {wanted:.0} leaves them out",
            wanted / 2.0
        )
    })
}

/// The word for a gate's verdict.
fn verdict(passed: Option<bool>) -> &'static str {
    answer(passed, ["ok", "FAILED", "not judged"])
}

/// The word for a clause's verdict.
fn met(met: Option<bool>) -> &'static str {
    answer(met, ["met", "NOT met", "undetermined"])
}

/// A value that can be drawn on a logarithmic axis.
fn finite(quantity: Option<Quantity>) -> Option<f64> {
    quantity.map(Quantity::value).filter(|v| v.is_finite() && *v > 0.0)
}

/// The rates that were found with different seeds; empty for one seed.
pub fn range_over_seeds(search: &Search) -> String {
    let seeds = search.rate_by_seed.len();
    let range = search.range().filter(|_| seeds > 1);
    let text =
        |(low, high)| format!("single runs of {seeds} seeds: {} to {}", PerSecond(low), PerSecond(high));
    range.map(text).unwrap_or_default()
}

/// The rate that was found, with its range, or that there is none.
fn search_answer(search: &Search) -> Vec<String> {
    let objectives: Vec<String> = search.slo.clauses.iter().map(ToString::to_string).collect();
    let objectives = objectives.join(", ");
    let found = range_over_seeds(search);
    let mut lines = vec![match search.max_rate {
        Some(rate) => {
            let range = if found.is_empty() { String::new() } else { format!(" ({found})") };
            // The median of the rates found, where a longer run did not hold it.
            let lowered = search
                .median()
                .filter(|median| rate < median * (1.0 - 1e-9) && sustained_at(search, *median).is_some());
            let longer = match (search.sustained, lowered) {
                (Some(true) | None, Some(median)) => &format!(
                    "; lowered from their median of {}, {}",
                    PerSecond(median),
                    not_held_at(search, median)
                ),
                (Some(true), None) => "; a longer run at it held",
                (Some(false), _) => "; a longer run at it did NOT hold",
                (None, None) => "",
            };
            let rate = PerSecond(rate);
            if search.is_lower_bound() {
                format!(
                    "highest rate: at least {rate} requests per second under {objectives}{longer}; no higher rate failed, and none could be decided"
                )
            } else {
                format!("highest rate: {rate} requests per second{range} under {objectives}{longer}")
            }
        }
        None if found.is_empty() => format!("highest rate: none found under {objectives}"),
        None => format!("highest rate: none sustained under {objectives}; shorter runs held {found}"),
    }];
    lines.extend(Some(search.note.clone()).filter(|note| !note.is_empty()));
    lines
}

fn sustained(search: &Search) -> impl Iterator<Item = &Attempt> {
    search.attempts.iter().filter(|tried| tried.stage == SearchStage::Sustain)
}

/// The longer run at a rate. Of an even number of seeds, older results have another median.
fn sustained_at(search: &Search, rate: f64) -> Option<&Attempt> {
    sustained(search).find(|tried| (tried.rate / rate - 1.0).abs() < 1e-6)
}

/// What the last runs said of a rate that was lowered.
fn not_held_at(search: &Search, median: f64) -> String {
    match sustained_at(search, median) {
        Some(tried) if tried.met.is_none() => {
            let silent = sustained(search).filter(|tried| tried.met.is_none()).count();
            format!("at which the last run could not tell ({silent} such runs before one did): {}", tried.why)
        }
        _ => "which a longer run did not hold".to_owned(),
    }
}

/// The steps of a search, and what a live server said with the first failure of each kind.
fn steps_of_search(report: &ServeReport) -> Vec<String> {
    let Some(search) = &report.search else { return Vec::new() };
    let mut lines: Vec<String> = search_steps(search).collect();
    let mut named = Vec::new();
    for point in &report.points {
        for (failure, words) in point.live.iter().flat_map(|live| &live.messages) {
            if !named.contains(&failure) {
                named.push(failure);
                lines.push(format!("{}: the first {failure}: {words}", point.label));
            }
        }
    }
    lines
}

/// What was tried.
pub fn search_steps(search: &Search) -> impl Iterator<Item = String> + '_ {
    search.attempts.iter().map(|a| {
        let held = answer(a.met, ["held", "failed", "undetermined"]);
        format!("{} {}/s: {held} ({})", a.stage, PerSecond(a.rate), a.why)
    })
}

pub fn matrix_lines(row: &RowVerdict) -> String {
    let verdict = answer(row.held, ["held", "REFUTED", "not known"]);
    format!("{}: expected {}; {verdict}: {}", row.title, row.hypothesis, row.seen)
}

mod adapters_and_grammar;
mod latency_vs_load;
mod live;
pub mod page;
mod percentiles;
mod timeline;
mod times;

#[cfg(test)]
mod tests;
