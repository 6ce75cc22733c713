//! The validity checklist: the questions a reviewer asks, each answered from the result itself.
//!
//! Enters: a [`Report`], or a [`ForeignResult`]. Leaves: a [`Checklist`]. What a result does not report counts against it
//! where it is essential: a benchmark that does not name its hardware cannot be repeated, however good it was. Pure.

use super::distinct;
use super::words::counted;
use CheckOutcome::{Failed, Inapplicable, NotSaid, Passed};
use serde::{Deserialize, Serialize};

use super::import::placement::stated_storage;
use super::import::{
    ForeignFormat, ForeignResult, ForeignRow, Metric, Rate, Setup, Statistic, UserOverrides, Value,
    objections, place,
};
use hbmark_core::result::comparison::{Comparison, Method, Settings};
use hbmark_core::result::serving::{
    ColdStart, GateName, MIN_REQUESTS, Offered, Point, ServeKind, ServeReport, ServeResult, Validity,
};
use hbmark_core::result::{
    Cause, CellResult, Environment, Finding, Phase, Report, ReportKind, Severity, Status, UNKNOWN_PRODUCT,
};
use hbmark_core::stats;
use hbmark_core::units::BytesPerSecond;

/// The share of memory beyond which a run has no headroom.
const HEADROOM: f64 = 0.95;
/// Steps of warm-up of the shortest protocol that warms up.
const WARMUP_STEPS: usize = 5;
const NO_MACHINE: &str = "neither CPU nor GPU is named";
const NO_VERSION: &str = "no version was kept";
const MEASURED: &str = "something was measured";
const RUN_AGAIN: &str = "run with this version of hbmark";
const EXPLAIN_AND_AGAIN: &str = "hbmark explain, then the same points again";
/// Requests behind a p99 that is more than its largest value.
const P99_REQUESTS: u64 = 1_000;
/// Seconds of load below which a serving benchmark has hardly left its start.
const SHORT_SECONDS: f64 = 60.0;
/// Tokens below which prompts and outputs are not those of people.
const SHORT_TOKENS: f64 = 16.0;

/// The answer to one question.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CheckOutcome {
    Passed,
    Failed,
    /// Not reported in the result.
    NotSaid,
    /// The question does not apply to this kind of benchmark.
    Inapplicable,
}

impl CheckOutcome {
    /// The word for a table.
    pub fn word(self) -> &'static str {
        match self {
            Self::Passed => "ok",
            Self::Failed => "FAILED",
            Self::NotSaid => "not reported",
            Self::Inapplicable => "-",
        }
    }
}

/// One question with its answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Check {
    pub question: String,
    pub outcome: CheckOutcome,
    /// Whether the result is invalid without it.
    pub essential: bool,
    pub evidence: String,
    /// What to run or record next; empty where nothing is wanting.
    pub next: String,
}

impl Check {
    /// Whether a result with this answer is invalid.
    fn invalidates(&self) -> bool {
        self.essential && matches!(self.outcome, Failed | NotSaid)
    }
}

/// All questions of one result.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Checklist {
    /// What was checked.
    pub subject: String,
    pub valid: bool,
    pub checks: Vec<Check>,
}

/// What the answers together say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChecklistVerdict {
    Valid,
    /// Something essential is not reported, and nothing essential failed.
    Incomplete,
    Invalid,
}

impl ChecklistVerdict {
    /// The word for a heading.
    pub fn word(self) -> &'static str {
        match self {
            Self::Valid => "VALID",
            Self::Incomplete => "INCOMPLETE",
            Self::Invalid => "INVALID",
        }
    }
}

impl Checklist {
    /// The worst of the essential answers.
    pub fn verdict(&self) -> ChecklistVerdict {
        let has = |outcome| self.checks.iter().any(|check| check.essential && check.outcome == outcome);
        match (has(CheckOutcome::Failed), has(CheckOutcome::NotSaid)) {
            (true, _) => ChecklistVerdict::Invalid,
            (false, true) => ChecklistVerdict::Incomplete,
            (false, false) => ChecklistVerdict::Valid,
        }
    }

    fn new(subject: String, checks: Vec<Check>) -> Self {
        Self { subject, valid: !checks.iter().any(Check::invalidates), checks }
    }

    /// What is wrong or not reported, as findings: for results that keep no samples to explain.
    pub fn findings(&self) -> Vec<Finding> {
        let wanting = self.checks.iter().filter(|check| matches!(check.outcome, Failed | NotSaid));
        let finding = |check: &Check| Finding {
            rule: check.question.replace([' ', ','], "_").replace("__", "_"),
            severity: match (check.essential, check.outcome) {
                (true, Failed) => Severity::Problem,
                (true, _) | (false, Failed) => Severity::Warn,
                (false, _) => Severity::Note,
            },
            symptom: format!("{}: {}", check.outcome.word(), check.evidence),
            regime: format!(
                "{}: {}",
                if check.outcome == Failed { "not so" } else { "not known" },
                check.question
            ),
            evidence: vec![self.subject.clone()],
            // A check knows one thing to do, and nothing to measure first.
            next: String::new(),
            response: check.next.clone(),
            cells: Vec::new(),
        };
        let mut findings: Vec<Finding> = wanting.map(finding).collect();
        findings.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
        findings
    }

    /// Why the result is invalid: the essential questions it does not pass.
    pub fn reasons(&self) -> impl Iterator<Item = &Check> {
        self.checks.iter().filter(|check| check.invalidates())
    }
}

/// An answer, its evidence, and what to do next.
type Answer = (CheckOutcome, String, &'static str);

/// A question being answered.
fn ask(question: &str, essential: bool, (outcome, evidence, next): Answer) -> Check {
    let next = if matches!(outcome, Passed | Inapplicable) { String::new() } else { next.to_owned() };
    Check { question: question.to_owned(), outcome, essential, evidence, next }
}

/// Passed or failed, with one sentence for both.
fn decide(passed: bool, evidence: String, next: &'static str) -> Answer {
    (if passed { Passed } else { Failed }, evidence, next)
}

/// Said or not.
fn reported(what: Option<String>, missing: &str, next: &'static str) -> Answer {
    match what {
        Some(evidence) => (Passed, evidence, next),
        None => not_said(missing, next),
    }
}

/// Not said in the result.
fn not_said(missing: impl Into<String>, next: &'static str) -> Answer {
    (NotSaid, missing.into(), next)
}

/// Checks a result of our own.
pub fn of_report(report: &Report) -> Checklist {
    let cells: Vec<&CellResult> = report.cells.iter().filter(|cell| cell.status != Status::Skipped).collect();
    // A prediction is for the machine of a data sheet.
    let sheet = report.datasheet.as_ref().filter(|_| report.kind == ReportKind::Predict);
    let hardware = sheet.map(|sheet| sheet.product.clone()).or_else(|| machine(&report.environment));
    let checks = vec![
        ask("measured, not computed", true, measured(report)),
        ask("warm-up before the first sample", true, warm_up(report, &cells)),
        ask("enough samples, with their spread", true, samples(report, &cells)),
        ask("every cell undisturbed", true, undisturbed(report, &cells)),
        ask("held against measured ceilings", report.ceilings.is_none(), ceilings(report)),
        ask("outputs checked", true, quality(&cells)),
        ask("both phases, apart", false, phases(&cells)),
        ask("a sweep, not one point", false, sweep(&cells)),
        ask("hardware named", true, reported(hardware, NO_MACHINE, RUN_AGAIN)),
        ask("software named", true, reported(build(&report.environment), NO_VERSION, RUN_AGAIN)),
        ask("model named", true, model(Some(&report.model.name))),
        ask("storage of weights and cache named", true, storage(&cells)),
        ask("memory headroom", false, headroom(report, &cells)),
        ask("tails by enough steps", false, tails(&cells)),
        ask("working set beyond the caches", false, caches(report, &cells)),
        ask("open-loop load", false, (Inapplicable, "a step benchmark has no arrivals".to_owned(), "")),
    ];
    let subject = format!("{} · {}", report.model.name, counted(cells.len(), "cell"));
    Checklist::new(subject, checks)
}

fn measured(report: &Report) -> Answer {
    let real = report.kind == ReportKind::Run;
    let evidence = if real { "by hbmark run" } else { "a prediction from a data sheet" };
    decide(real, evidence.to_owned(), "hbmark run on the device itself")
}

fn warm_up(report: &Report, cells: &[&CellResult]) -> Answer {
    const NEXT: &str = "hbmark run without --smoke";
    let Some(protocol) = &report.protocol else { return not_said("no protocol was kept", NEXT) };
    let unsteady = cells.iter().filter(|cell| cell.status == Status::NoSteadyState).count();
    let enough = protocol.warmup_min_steps >= WARMUP_STEPS
        && protocol.warmup_min_seconds > 0.0
        && !protocol.is_smoke()
        && unsteady == 0;
    let evidence = if unsteady > 0 {
        format!("{} never became steady", counted(unsteady, "cell"))
    } else {
        format!(
            "protocol {}: at least {} steps and {} s before sampling",
            protocol.name, protocol.warmup_min_steps, protocol.warmup_min_seconds
        )
    };
    decide(enough, evidence, NEXT)
}

fn samples(report: &Report, cells: &[&CellResult]) -> Answer {
    const NEXT: &str = "the full protocol for the cells that are not converged";
    let loose = cells.iter().filter(|cell| cell.status == Status::NotConverged).count();
    let Some(protocol) = &report.protocol else { return not_said("no protocol was kept", NEXT) };
    let short = protocol.short_of_full();
    let full = short.is_empty() && !protocol.is_smoke();
    let evidence = match (full, loose) {
        (true, 0) => format!("{} protocol, every interval as narrow as asked", protocol.name),
        (true, loose) => format!("{loose} of {} did not converge", counted(cells.len(), "cell")),
        (false, _) => {
            let what = if short.is_empty() { String::new() } else { format!(": {}", short.join(", ")) };
            format!("{} protocol: shortened, not comparable with full runs{what}", protocol.name)
        }
    };
    decide(full && loose == 0, evidence, NEXT)
}

fn undisturbed(report: &Report, cells: &[&CellResult]) -> Answer {
    if report.kind == ReportKind::Predict {
        return (Inapplicable, "nothing was measured".to_owned(), "");
    }
    let bad = |status| {
        use Status::{Disturbed, Failed, Incomplete, Invalid, Noisy, Oom, Predicted, Simulated, Smoke};
        matches!(
            status,
            Disturbed | Noisy | Smoke | Simulated | Invalid | Failed | Oom | Incomplete | Predicted
        )
    };
    let lost: Vec<&str> = cells.iter().filter(|cell| bad(cell.status)).map(|cell| cell.id.as_str()).collect();
    let evidence = match lost.as_slice() {
        [] => "no cell disturbed, invalid or failed".to_owned(),
        [one] => format!("{one} is not valid"),
        many => format!("{} of {} cells are not valid, {} first", many.len(), cells.len(), many[0]),
    };
    decide(lost.is_empty() && !cells.is_empty(), evidence, "hbmark explain, then the same cells again")
}

fn quality(cells: &[&CellResult]) -> Answer {
    const NEXT: &str = "hbmark logits beside a reference";
    let checks: Vec<_> = cells.iter().filter_map(|cell| cell.quality.as_ref()).collect();
    let failed = checks.iter().filter(|check| !check.passed).count();
    let unchecked = cells.len() - checks.len();
    match (checks.first(), failed, unchecked) {
        (_, 1.., _) => (Failed, format!("wrong outputs in {}", counted(failed, "cell")), NEXT),
        (None, ..) => not_said("no outputs were checked", NEXT),
        (Some(first), 0, 0) => (Passed, first.check.clone(), NEXT),
        (Some(_), 0, _) => {
            let of = counted(cells.len(), "cell");
            not_said(format!("the outputs of {unchecked} of {of} were not checked"), NEXT)
        }
    }
}

fn phases(cells: &[&CellResult]) -> Answer {
    let has = |phase| cells.iter().any(|cell| cell.phase == phase);
    let evidence = match (has(Phase::Prefill), has(Phase::Decode)) {
        (true, true) => "prefill and decode timed apart",
        (true, false) => "prefill alone",
        (false, true) => "decode alone",
        (false, false) => "no cell",
    };
    decide(has(Phase::Prefill) && has(Phase::Decode), evidence.to_owned(), "--phase prefill,decode")
}

fn sweep(cells: &[&CellResult]) -> Answer {
    let count = |of: fn(&CellResult) -> usize| distinct(cells.iter().map(|cell| of(cell))).len();
    let (batches, contexts) = (count(|cell| cell.batch), count(|cell| cell.context));
    let evidence = format!("{}, {}", counted(batches, "batch size"), counted(contexts, "context"));
    decide(
        batches > 1 || contexts > 1,
        evidence,
        "several --batch or --context values, to see what the time grows with",
    )
}

/// A text that says something.
fn said(text: Option<&String>) -> Option<String> {
    text.filter(|text| !text.trim().is_empty()).cloned()
}

/// The product that ran.
fn machine(environment: &Environment) -> Option<String> {
    let gpu = environment.gpu.as_ref().and_then(|gpu| said(gpu.name.as_ref()));
    gpu.or_else(|| said(environment.cpu.model.as_ref()))
}

/// The program that ran.
fn build(environment: &Environment) -> Option<String> {
    let build = &environment.build;
    let version = said(Some(&build.version))?;
    let revision = build.git_revision.as_deref().unwrap_or("unknown revision");
    Some(format!("hbmark {version} ({revision}), candle {}", build.candle))
}

fn model(name: Option<&String>) -> Answer {
    reported(said(name), "no model is named", RUN_AGAIN)
}

fn ceilings(report: &Report) -> Answer {
    const NEXT: &str = "hbmark run on an idle machine: ceilings are measured first";
    let Some(ceilings) = &report.ceilings else {
        return not_said("no ceiling was kept: nothing shows which times are possible", NEXT);
    };
    let read = BytesPerSecond(ceilings.read_bytes_per_s.median);
    match ceilings.doubt() {
        Some(cause) => (Failed, format!("a read ceiling of {read}, disturbed: {cause}"), NEXT),
        None => (Passed, format!("a read ceiling of {read}"), NEXT),
    }
}

fn storage(cells: &[&CellResult]) -> Answer {
    let kinds = distinct(cells.iter().map(|c| format!("{} weights, {} cache", c.dtype, c.kv_dtype)));
    let what = (!kinds.is_empty()).then(|| format!("{}, cell by cell", kinds.join("; ")));
    reported(what, "no cell", "hbmark run")
}

fn headroom(report: &Report, cells: &[&CellResult]) -> Answer {
    const NEXT: &str = "smaller batches or contexts, until five percent of the memory is free";
    let peak = cells.iter().filter_map(|cell| cell.memory_peak_bytes.or(cell.memory_predicted_bytes)).max();
    let (Some(peak), Some(all)) = (peak, report.environment.device_memory()) else {
        return not_said("memory in use or memory in all is not known", NEXT);
    };
    let share = peak.as_f64() / all.as_f64();
    let free = (1.0 - share) * 100.0;
    decide(
        share <= HEADROOM,
        format!("{free:.0} % of {} free: {} in use at the most", all.capacity(), peak.capacity()),
        NEXT,
    )
}

fn tails(cells: &[&CellResult]) -> Answer {
    let with = cells.iter().filter(|c| c.step_ns.as_ref().is_some_and(|s| s.p99.is_some())).count();
    let evidence = format!("{with} of {} with the 1,000 steps a p99 needs", counted(cells.len(), "cell"));
    decide(with == cells.len() && with > 0, evidence, "longer cells, where a p99 is to be claimed")
}

fn caches(report: &Report, cells: &[&CellResult]) -> Answer {
    const NEXT: &str = "a larger model or batch: from the cache a bandwidth means nothing";
    let Some(cache) = report.ceilings.as_ref().and_then(|c| c.last_cache_bytes) else {
        return not_said("the size of the last cache is not known", NEXT);
    };
    let small = cells
        .iter()
        .filter(|c| c.bytes.ideal().0 < hbmark_core::ledger::CACHE_MARGIN.saturating_mul(cache.0))
        .count();
    decide(
        small == 0,
        format!("fewer bytes than three caches of {cache} in {small} of {}", counted(cells.len(), "cell")),
        NEXT,
    )
}

/// Checks a result under load.
pub fn of_serving(report: &ServeReport) -> Checklist {
    let live = report.server.as_ref();
    let sheet = || said(report.datasheet.as_ref().map(|sheet| &sheet.product));
    let own = || machine(&report.environment);
    let measured = match report.kind {
        ServeKind::ServeVirtual => {
            let model = report.step_model.as_deref().unwrap_or("computed");
            (Failed, format!("a virtual clock: step times are {model}"), "the same without --virtual")
        }
        ServeKind::Serve => (Passed, "an engine in real time".to_owned(), ""),
        ServeKind::ServeCold => (Passed, "launches of a process in real time".to_owned(), ""),
        ServeKind::ServeLive => (Passed, "a live server, over HTTP".to_owned(), ""),
    };
    let hardware = match report.kind {
        ServeKind::ServeVirtual => reported(sheet(), "the data sheet is not named", "--gpu"),
        // Its own machine is the client's.
        ServeKind::ServeLive => {
            reported(sheet(), "a server does not say what it runs on", "record it beside the file")
        }
        ServeKind::Serve | ServeKind::ServeCold => reported(own().or_else(sheet), NO_MACHINE, RUN_AGAIN),
    };
    let version = live.and_then(|server| said(server.version.as_ref()));
    let software = match report.kind {
        ServeKind::ServeLive => reported(
            version.map(|version| format!("{version}, as the server says")),
            "the server does not say its version",
            "record it beside the file",
        ),
        _ => reported(build(&report.environment), NO_VERSION, RUN_AGAIN),
    };
    let name = live.map(|server| &server.model).or_else(|| report.model.as_ref().map(|model| &model.name));
    let named_checks = vec![
        ask("measured, not computed", true, measured),
        ask("hardware named", true, hardware),
        ask("software named", true, software),
        ask("model named", true, model(name)),
        ask(
            "storage of weights named",
            true,
            reported(
                report.dtype.map(|dtype| format!("{dtype} weights")),
                "not named",
                "name them with --model and --dtype",
            ),
        ),
    ];
    let (count, load) = match &report.cold_start {
        Some(cold) => (launches(cold), launch_checks(cold, load_checks(report))),
        None => (counted(report.points.len(), "point"), load_checks(report)),
    };
    let checks = load.into_iter().chain(named_checks).collect();
    Checklist::new(format!("{} · {count}", report.model_name()), checks)
}

fn launches(cold: &ColdStart) -> String {
    counted(cold.launches.len(), "start")
}

/// The questions about a load, of a cold start: what it measured are starts, and none of the others applies.
fn launch_checks(cold: &ColdStart, mut questions: Vec<Check>) -> Vec<Check> {
    for check in &mut questions {
        let answer = if check.question == MEASURED {
            decide(!cold.launches.is_empty(), launches(cold), "hbmark serve cold")
        } else {
            (Inapplicable, "launches of a process carry no load".to_owned(), "")
        };
        *check = ask(&check.question, check.essential, answer);
    }
    questions
}

/// The questions about the load and its points.
fn load_checks(report: &ServeReport) -> Vec<Check> {
    let results: Vec<(&str, &ServeResult)> =
        report.points.iter().filter_map(|p| Some((p.label.as_str(), p.result.as_ref()?))).collect();
    let first_that = |of: &dyn Fn(&ServeResult) -> bool| {
        results.iter().find(|(_, result)| of(result)).map(|(label, _)| (*label).to_owned())
    };
    let least =
        |of: &dyn Fn(&ServeResult) -> f64| results.iter().map(|(_, result)| of(result)).reduce(f64::min);
    let invalid = first_that(&|result| result.validity == Validity::Invalid);
    let lost = first_that(&|result| result.unfinished > 0 || !result.rejected.is_empty());
    let requests = least(&|result| result.measured as f64).unwrap_or(0.0);
    let warm_up = least(&|result| result.warmup_requests as f64).unwrap_or(0.0);
    let window = least(&|result| result.window_s).unwrap_or(0.0);
    let open = |point: &Point| matches!(point.offered, Offered::Rate(_) | Offered::AsRecorded);
    let open_loop = report.points.iter().all(open);
    vec![
        ask(
            MEASURED,
            true,
            decide(
                !results.is_empty(),
                format!("{} with a result", counted(results.len(), "point")),
                "the points that were not run",
            ),
        ),
        ask(
            "every point valid",
            true,
            match (&invalid, missing_gate(report)) {
                (Some(label), _) => (Failed, format!("{label} is not valid"), EXPLAIN_AND_AGAIN),
                (None, Some(missing)) => not_said(missing, RUN_AGAIN),
                (None, None) => (Passed, "no point is invalid by its gates".to_owned(), ""),
            },
        ),
        ask("every point undisturbed", true, undisturbed_points(report)),
        keeps_up(report),
        ask("figures follow from the requests", false, recomputed(&results)),
        ask(
            "every request completed",
            true,
            match &lost {
                Some(label) => (Failed, format!("{label} lost requests"), "a longer drain, or fewer at once"),
                None => (Passed, "no request lost".to_owned(), ""),
            },
        ),
        ask(
            "warm-up before the first sample",
            false,
            decide(
                warm_up > 0.0,
                format!("at least {warm_up:.0} requests before those that count"),
                "--warmup-requests above 0",
            ),
        ),
        ask(
            "enough samples for a p99",
            false,
            decide(
                requests >= P99_REQUESTS as f64,
                format!("at least {requests:.0} requests a point; a p99 is reported from {P99_REQUESTS} on"),
                "--requests 1000 or more, where a p99 is to be claimed",
            ),
        ),
        ask(
            "open-loop load",
            false,
            decide(
                open_loop,
                if open_loop {
                    "arrivals do not wait for the engine"
                } else {
                    "all at once, or as many as are done"
                }
                .to_owned(),
                "a finite --rate",
            ),
        ),
        ask(
            "long enough",
            false,
            decide(
                window >= SHORT_SECONDS,
                format!("the shortest window is {window:.0} s"),
                "at least a minute of steady load",
            ),
        ),
    ]
}

/// A gate that a point should have, and does not.
fn missing_gate(report: &ServeReport) -> Option<String> {
    report.points.iter().find_map(|point| {
        let result = point.result.as_ref().filter(|result| result.measured >= MIN_REQUESTS)?;
        let open = matches!(point.offered, Offered::Rate(_) | Offered::AsRecorded);
        let wanted = [Some(GateName::InjectionLag), open.then_some(GateName::KeepsUp)];
        let kept = |name: &GateName| result.gates.iter().any(|gate| gate.name == *name);
        let missing = wanted.into_iter().flatten().find(|name| !kept(name))?;
        Some(format!("{} has no gate `{missing}`", point.label))
    })
}

/// Whether other work, or a machine that changed its speed, is in the latencies.
fn undisturbed_points(report: &ServeReport) -> Answer {
    const NEXT: &str = "hbmark doctor until it names no other process, then the same points";
    // On a virtual clock nothing disturbs; of launches each is timed with its range.
    if matches!(report.kind, ServeKind::ServeVirtual | ServeKind::ServeCold) {
        return (Inapplicable, "no requests were timed on a machine".to_owned(), "");
    }
    let run = || report.points.iter().filter_map(|point| Some((point, point.result.as_ref()?)));
    let found: Vec<(&Point, Vec<String>)> = run()
        .map(|(point, _)| (point, point.disturbances()))
        .filter(|(_, found)| !found.is_empty())
        .collect();
    let unseen = run().filter(|(_, result)| result.foreign_cores.is_none()).count();
    let of = counted(run().count(), "point");
    match found.first() {
        Some((point, why)) => {
            let evidence =
                format!("{} of {of} disturbed, {} first: {}", found.len(), point.label, why.join("; "));
            (Failed, evidence, NEXT)
        }
        None if unseen == 0 => (Passed, "no other process kept a core busy".to_owned(), NEXT),
        // The work of a server on the same machine cannot be told from that of others.
        None if report.kind == ServeKind::ServeLive => {
            (Inapplicable, "the server ran on the client's machine, or its load was not seen".to_owned(), "")
        }
        None => not_said(format!("the load of other processes is not known for {unseen} of {of}"), RUN_AGAIN),
    }
}

/// Whether the summaries of the points are what their requests say.
fn recomputed(results: &[(&str, &ServeResult)]) -> Answer {
    let inconsistent =
        results.iter().flat_map(|(_, result)| &result.reasons).find_map(|reason| match reason {
            Cause::Inconsistent { detail, .. } => Some(detail),
            _ => None,
        });
    let without_requests = results.iter().filter(|(_, result)| result.requests.is_none()).count();
    if let Some(detail) = inconsistent {
        (Failed, detail.clone(), RUN_AGAIN)
    } else if without_requests > 0 {
        let of = counted(results.len(), "point");
        let evidence = format!("{without_requests} of {of} keep no requests: nothing recomputes them");
        not_said(evidence, "at most 100,000 requests a point")
    } else {
        let what = "counts, latencies and objectives, recomputed; rates and gates are the file's own";
        (Passed, what.to_owned(), "")
    }
}

/// Whether a point keeps up. One that is too short to tell is not said to: where there are only such, something essential is missing.
fn keeps_up(report: &ServeReport) -> Check {
    const LOWER: &str = "lower rates: past saturation latencies depend on how long one measures";
    const LONGER: &str = "longer runs: as many requests as explain names";
    let run: Vec<&Point> = report.points.iter().filter(|point| point.result.is_some()).collect();
    let count = |validity| {
        run.iter()
            .filter(|point| point.result.as_ref().is_some_and(|result| result.validity == validity))
            .count()
    };
    let (saturated, invalid) = (count(Validity::Saturated), count(Validity::Invalid));
    let kept = run.iter().filter(|point| point.keeps_up() == Some(true)).count();
    let undecided = run.len() - saturated - invalid - kept;
    let of = counted(run.len(), "point");
    let invalid_too = if invalid > 0 { format!(", {invalid} invalid") } else { String::new() };
    let evidence = format!("{kept} of {of}; {saturated} saturated, {undecided} not judged{invalid_too}");
    let answer = match (kept, undecided, saturated) {
        (1.., ..) => (Passed, evidence, ""),
        (0, 1.., _) => not_said(evidence, LONGER),
        (0, 0, 1..) => (Failed, evidence, LOWER),
        (0, 0, 0) => not_said(evidence, EXPLAIN_AND_AGAIN),
    };
    ask("a point that keeps up", kept == 0 && undecided > 0, answer)
}

/// Checks a comparison.
pub fn of_comparison(found: &Comparison) -> Checklist {
    let usual = Settings::new(0.0, 0);
    let least = stats::least_pairs(usual.alpha);
    // Rounds in which both sides have a time, of the cell that has the fewest.
    let rounds = found.cells.iter().map(|cell| cell.effect.rounds).min().unwrap_or(0);
    let lenient = found.settings.alpha > usual.alpha || found.settings.confidence < usual.confidence;
    let lost = found.cells.iter().filter(|cell| cell.effect.ratio.is_none()).count();
    let floor = found.floor.iter().flat_map(|floor| &floor.cells);
    let floor = floor.filter(|cell| cell.effect.low.is_some()).count();
    let machine = Some(&found.machine).filter(|machine| !machine.starts_with(UNKNOWN_PRODUCT));
    let paired = match found.method {
        Method::SavedResults => "two saved results: one process a side".to_owned(),
        Method::SavedProcesses => "saved processes of each side, not in pairs".to_owned(),
        Method::PairedRounds if lenient => {
            format!("decided at a level of {}, and {} is asked for", found.settings.alpha, usual.alpha)
        }
        Method::PairedRounds => {
            format!(
                "{} in the cell with the fewest; {least} are the fewest that can decide",
                counted(rounds, "round")
            )
        }
    };
    let checks = vec![
        ask(
            "paired rounds",
            true,
            decide(
                found.method == Method::PairedRounds && rounds >= least && !lenient,
                paired,
                match found.method {
                    Method::SavedResults | Method::SavedProcesses => "hbmark compare with two configurations",
                    Method::PairedRounds => {
                        "hbmark doctor, then the same comparison with nothing else running"
                    }
                },
            ),
        ),
        ask("warm-up and samples of each process", false, processes(found)),
        ask(
            "every cell timed on both sides",
            true,
            decide(
                lost == 0 && !found.cells.is_empty(),
                format!("{lost} of {} without a ratio", counted(found.cells.len(), "cell")),
                "the remarks of the comparison, then the same cells again",
            ),
        ),
        ask(
            "A against A beside it",
            false,
            if floor > 0 {
                (Passed, format!("the floor of the machine was measured in {}", counted(floor, "cell")), "")
            } else {
                not_said("the machine's own differences are not known", "--aa")
            },
        ),
        ask("hardware named", true, reported(said(machine), "no machine is named", RUN_AGAIN)),
        ask("model named", true, model(Some(&found.model))),
    ];
    Checklist::new(format!("{} against {}", found.a.given, found.b.given), checks)
}

/// The protocol of each process.
fn processes(found: &Comparison) -> Answer {
    const NEXT: &str = "hbmark compare --protocol full";
    match found.protocol.as_deref().map(str::trim) {
        None | Some("") => not_said("no protocol is named", NEXT),
        Some("smoke") => (Failed, "every cell ran once a process: the times mean nothing".to_owned(), NEXT),
        Some(name) => (Passed, format!("the {name} protocol, by name"), NEXT),
    }
}

/// A row with what a person adds to it, where the file is silent.
fn completed_by(row: &ForeignRow, given: &UserOverrides<'_>, engine: Option<&str>) -> ForeignRow {
    let mut row = row.clone();
    let setup = &mut row.setup;
    let said = "as given";
    if setup.gpu.is_none() && setup.cpu.is_none() {
        setup.gpu = given.gpu.map(|gpu| format!("{}, {said}", gpu.product));
    }
    if setup.stored_as.is_none() {
        let by_name = stated_storage(setup).map(|dtype| format!("{dtype}, by the model's name"));
        setup.stored_as = by_name.or_else(|| given.dtype.map(|dtype| format!("{dtype}, {said}")));
    }
    if setup.model.is_none() {
        setup.model = given.model_name.map(|name| format!("{name}, {said}"));
    }
    if let Some(engine) = engine
        && setup.engine_version.is_none()
    {
        let (name, version) = engine.split_once(' ').unwrap_or((engine, ""));
        setup.engine = Some(name.to_owned());
        setup.engine_version = (!version.is_empty()).then(|| format!("{version}, {said}"));
    }
    row
}

/// Whether figures contradict one another, the flags contradict the file, or a time is impossible.
fn agree(rows: &[ForeignRow], format: ForeignFormat, given: &UserOverrides<'_>) -> Answer {
    const NEXT: &str = "the file as its program wrote it, and flags that say what ran";
    let mut found = rows.iter().flat_map(|row| {
        let causes = objections(row, &place(row, format, given));
        causes.into_iter().map(|cause| format!("{}: {cause}", row.label))
    });
    match found.next() {
        None => (Passed, "no figure contradicts another or is impossible".to_owned(), NEXT),
        Some(first) => match found.count() {
            0 => (Failed, first, NEXT),
            more => (Failed, format!("{first}; and {more} more"), NEXT),
        },
    }
}

/// Checks a result of another program: mostly what it does not report. What `given` and `engine` (a name and a version) say counts where
/// the file is silent.
pub fn of_foreign(result: &ForeignResult, given: &UserOverrides<'_>, engine: Option<&str>) -> Checklist {
    let (stated, format) = (&result.rows, result.format);
    let rows: Vec<ForeignRow> = stated.iter().map(|row| completed_by(row, given, engine)).collect();
    let rows = &rows;
    let served = format.served();
    let not_served = || (Inapplicable, "a step benchmark has no requests".to_owned(), "");
    let record = "record it beside the file: the program does not";
    let checks = vec![
        ask(MEASURED, true, something(rows)),
        ask("figures agree", true, agree(stated, format, given)),
        ask("warm-up before the first sample", false, foreign_warm_up(rows, format)),
        ask("enough samples, with their spread", true, foreign_samples(rows, served)),
        ask("every request completed", true, if served { completion(rows) } else { not_served() }),
        ask(
            "outputs checked",
            false,
            not_said("no program of this kind writes it", "compare logits or answers with a reference"),
        ),
        ask("both phases, apart", false, foreign_phases(rows)),
        ask(
            "a sweep, not one point",
            false,
            decide(
                rows.len() > 1,
                counted(rows.len(), "configuration"),
                "several rates, concurrencies or contexts",
            ),
        ),
        ask("open-loop load", false, if served { open_loop(rows) } else { not_served() }),
        ask("long enough", false, if served { duration(rows) } else { not_served() }),
        ask("realistic lengths", false, lengths(rows)),
        ask("hardware named", true, each(rows, |s| s.gpu.clone().or_else(|| s.cpu.clone()), "GPU", record)),
        ask(
            "software named",
            true,
            each(
                rows,
                |s| Some(format!("{} {}", s.engine.clone()?, s.engine_version.clone()?)),
                "engine and version",
                record,
            ),
        ),
        ask(
            "storage of weights named",
            true,
            each(rows, |s| s.stored_as.clone(), "dtype or quantisation", record),
        ),
        ask("model named", true, each(rows, |s| s.model.clone(), "model", record)),
        ask(
            "cache reuse excluded or stated",
            false,
            if served {
                not_said(
                    "the file does not say whether prompts shared a prefix or the cache was on",
                    "record it, or use random prompts",
                )
            } else {
                not_served()
            },
        ),
        ask(
            "memory headroom",
            false,
            not_said("the file does not say", "record the memory in use beside the memory in all"),
        ),
    ];
    Checklist::new(format!("{} · {} · {}", result.source, format.name(), counted(rows.len(), "row")), checks)
}

fn something(rows: &[ForeignRow]) -> Answer {
    let empty = rows.iter().filter(|row| row.values.is_empty()).count();
    let evidence = match rows.iter().find(|row| row.values.is_empty()) {
        Some(row) => {
            format!(
                "{empty} of {} hold no measurement: {}",
                counted(rows.len(), "row"),
                row.problems
                    .iter()
                    .map(ToString::to_string)
                    .chain(row.remarks.clone())
                    .collect::<Vec<_>>()
                    .join("; ")
            )
        }
        None => format!("{} figures", rows.iter().map(|row| row.values.len()).sum::<usize>()),
    };
    decide(empty == 0 && !rows.is_empty(), evidence, "the run again, with a server that answers")
}

/// A fact that every row should state.
fn each(
    rows: &[ForeignRow],
    of: impl Fn(&Setup) -> Option<String>,
    what: &str,
    next: &'static str,
) -> Answer {
    let stated: Vec<String> = rows.iter().filter_map(|row| of(&row.setup)).collect();
    match stated.first() {
        Some(first) if stated.len() == rows.len() => (Passed, first.clone(), next),
        _ => {
            not_said(format!("{what}: reported for {} of {}", stated.len(), counted(rows.len(), "row")), next)
        }
    }
}

fn foreign_warm_up(rows: &[ForeignRow], format: ForeignFormat) -> Answer {
    const NEXT: &str = "a run before the one that counts, and a note that it was";
    let warmed = rows.iter().filter_map(|row| row.setup.warmup).min();
    match (warmed, format) {
        (Some(0), _) => (Failed, "no warm-up".to_owned(), NEXT),
        (Some(count), _) => (Passed, format!("at least {count} before sampling"), NEXT),
        (None, ForeignFormat::LlamaBench) => {
            not_said("llama-bench warms up unless that is switched off, and does not record which", NEXT)
        }
        (None, _) => not_said("the file does not say", NEXT),
    }
}

fn foreign_samples(rows: &[ForeignRow], served: bool) -> Answer {
    const NEXT: &str = "more requests or repetitions: a tail needs a thousand";
    if served {
        // Gaps between tokens are many more than requests.
        let of_requests = |v: &Value| {
            v.statistic == Statistic::Percentile(9900) && v.metric.is_time() && v.metric != Metric::Itl
        };
        let claims_tail = rows.iter().any(|row| row.values.iter().any(of_requests));
        let Some(least) = rows.iter().filter_map(|row| row.setup.completed.or(row.setup.requests)).min()
        else {
            return not_said("the number of requests is not reported", NEXT);
        };
        let enough = !claims_tail || least >= P99_REQUESTS;
        let claim = if claims_tail { "a p99 is claimed of" } else { "no p99 is claimed of" };
        return decide(enough, format!("{claim} {least} requests"), NEXT);
    }
    let Some(least) = rows.iter().filter_map(|row| row.setup.repetitions).min() else {
        return not_said("the number of repetitions is not reported", NEXT);
    };
    decide(least >= 3, format!("at least {least} repetitions"), NEXT)
}

fn completion(rows: &[ForeignRow]) -> Answer {
    const NEXT: &str = "count the others as infinitely late, and find out why they failed";
    let mut known = false;
    for row in rows {
        let (asked, done, failed) = (row.setup.requests, row.setup.completed, row.setup.failed);
        known |= failed.is_some() || (asked.is_some() && done.is_some());
        let short = asked.zip(done).is_some_and(|(asked, done)| done < asked);
        if failed.is_some_and(|n| n > 0) || short {
            let of = asked.map_or_else(|| "? requests".to_owned(), |n| counted(n, "request"));
            return (Failed, format!("{}: {} of {of} completed", row.label, done.unwrap_or(0)), NEXT);
        }
    }
    if known {
        (Passed, "no failed request".to_owned(), NEXT)
    } else {
        not_said("failures are not counted", NEXT)
    }
}

fn foreign_phases(rows: &[ForeignRow]) -> Answer {
    let has = |metrics: &[Metric]| metrics.iter().any(|m| rows.iter().any(|row| row.center(*m).is_some()));
    let prefill = has(&[Metric::PrefillStep, Metric::Ttft]);
    let decode = has(&[Metric::DecodeStep, Metric::Tpot, Metric::Itl]);
    let evidence = match (prefill, decode) {
        (true, true) => "a time for the first token and one for each after it",
        (true, false) => "prefill or first token alone",
        (false, true) => "tokens after the first alone",
        (false, false) => "neither: only requests or throughput as a whole",
    };
    decide(
        prefill && decode,
        evidence.to_owned(),
        "a run that streams, so that the first token is seen apart",
    )
}

fn open_loop(rows: &[ForeignRow]) -> Answer {
    const NEXT: &str = "a finite request rate below saturation, arrivals drawn beforehand";
    let rates: Vec<Rate> = rows.iter().filter_map(|row| row.setup.request_rate).collect();
    let limited = rows.iter().any(|row| row.setup.max_concurrency.is_some());
    match rates.iter().find(|rate| matches!(rate, Rate::PerSecond(_))) {
        _ if rates.is_empty() && !limited => not_said("neither rate nor concurrency is reported", NEXT),
        Some(_) if limited => (
            Failed,
            "a rate, but no more requests at once than a limit: late ones wait outside the figures"
                .to_owned(),
            NEXT,
        ),
        Some(Rate::PerSecond(rate)) => {
            (Passed, format!("requests arrive at {rate} per second whatever the server does"), NEXT)
        }
        _ => (
            Failed,
            "all at once or as many as the server frees: latency is that of the loop, not of users"
                .to_owned(),
            NEXT,
        ),
    }
}

fn duration(rows: &[ForeignRow]) -> Answer {
    let Some(least) = rows.iter().filter_map(|row| row.setup.duration_s).reduce(f64::min) else {
        return not_said("the duration is not reported", "record it");
    };
    decide(
        least >= SHORT_SECONDS,
        format!("the shortest run took {least:.0} s"),
        "at least a minute of steady load",
    )
}

fn lengths(rows: &[ForeignRow]) -> Answer {
    const NEXT: &str = "prompts and answers as long as those to be served";
    let known: Vec<f64> = rows.iter().filter_map(|row| row.setup.output_tokens).collect();
    let Some(shortest) = known.iter().copied().reduce(f64::min) else {
        return not_said("lengths are not reported", NEXT);
    };
    decide(shortest >= SHORT_TOKENS, format!("at least {shortest:.0} tokens made"), NEXT)
}

#[cfg(test)]
mod tests;
