//! Findings: which regime a measured cell is in, what disturbed it, and what to do first.
//!
//! Enters: a judged [`Report`]. Leaves: [`Finding`]s, each with its evidence in numbers and the measurement that would confirm or refute
//! it. A rule is one row of [`RULES`]: a function from evidence to a finding or to nothing. A cell that matches no regime is called
//! unexplained, which is better than a wrong name. Pure.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

use super::evidence::{self, is_believable};
use super::explain_prediction::explain_prediction;
use super::finding::{self, Kind, NearMiss, Rule, UNEXPLAINED};
use hbmark_core::ledger::{CACHE_MARGIN, Ledger, StepShape};
use hbmark_core::model::Dtype;
use hbmark_core::result::{
    Block, Bound, Cause, CellResult, EngineKind, Finding, FittedModel, Phase, Report, ReportKind, Severity,
    Status, TimeSummary,
};
use hbmark_core::units::{Bytes, BytesPerSecond, Nanos, counted};

/// Share of a step that the bytes at the ceiling must explain before it is called memory-bound. Above the half at which a cell's bound
/// changes its name: between the two the other part is nearly as large, and neither name fits.
pub(super) const EXPLAINED: f64 = 0.6;
/// Growth of a step over a doubling or more of its batch that is still "the same time".
const FLAT: f64 = 1.1;
/// Growth of its floor from which a step that stays flat is one that does not follow its work.
const GROWN: f64 = 1.3;
/// How far the weights of a step may be from those of the shape: alignment and scales stay far below.
const WEIGHTS_TOLERANCE: f64 = 0.05;
/// Spread of a ceiling's own repetitions, and coefficient of variation of steps, beyond which a machine is noisy.
const NOISY_CEILING: f64 = 0.1;
const NOISY_STEPS: f64 = 0.1;
/// Share of a cell's blocks under a condition from which it characterises the cell.
const OFTEN: f64 = 0.25;

/// The evidence in one cell, if the rule matches.
type Detector = fn(&Case<'_>, &CellResult) -> Option<String>;

const RULES: &[Rule<Detector>] = &[
    Rule {
        name: "wrong_outputs",
        kind: Kind::Trust,
        severity: Severity::Problem,
        symptom: "the tokens are wrong",
        regime: "an engine that computes something else, whose time means nothing",
        next: "hbmark logits with this engine beside the reference",
        response: "do not use these times; report the engine, the dtype and the model's hash",
        detect: wrong_outputs,
    },
    Rule {
        name: "wrong_size_weights",
        kind: Kind::Trust,
        severity: Severity::Problem,
        symptom: "the step reads more or fewer weights than the model has",
        regime: "another model, another storage, or weights that were not all loaded",
        next: "hbmark predict with the same model and dtype; compare the weights column",
        response: "check --model, --revision and --dtype against what was loaded",
        detect: wrong_size_weights,
    },
    Rule {
        name: "wrong_storage",
        kind: Kind::Trust,
        severity: Severity::Problem,
        symptom: "the weights are stored in another way than was asked for",
        regime: "other arithmetic under the same name",
        next: "hbmark verify, and hbmark logits beside a reference",
        response: "check --dtype and what the checkpoint holds; do not compare these times with others",
        detect: |_, cell| evidence::wrong_storage(cell),
    },
    Rule {
        name: "clocks_disagree",
        kind: Kind::Trust,
        severity: Severity::Problem,
        symptom: "two clocks over one block disagree",
        regime: "a timeline that cannot be trusted: a clock at another rate, or marks that are not where the steps are",
        next: "hbmark verify on this device: the timer rows",
        response: "use no time of this run; report the driver and the device",
        detect: |_, cell| evidence::clocks_disagree(cell),
    },
    Rule {
        name: "marks_elsewhere",
        kind: Kind::Trust,
        severity: Severity::Problem,
        symptom: "the device says that it was done before it can have been",
        regime: "timing events on another stream than the work",
        next: "hbmark verify --device cuda: spins of a known length",
        response: "put the marks on the stream that runs the steps; intervals of the host are right, spans are not",
        detect: |_, cell| evidence::unseen_work(cell),
    },
    Rule {
        name: "impossible_time",
        kind: Kind::Trust,
        severity: Severity::Problem,
        symptom: "the step is faster than its bytes can be",
        regime: "a step that did not do its work: empty, cached, or of another size; or a wrong ceiling",
        next: "hbmark logits with this engine, then hbmark ceiling on the idle machine",
        response: "do not use these times",
        detect: |_, cell| evidence::impossible(cell),
    },
    Rule {
        name: "memory_leak",
        kind: Kind::Trust,
        severity: Severity::Problem,
        symptom: "memory in use grows with every step",
        regime: "a leak",
        next: "the same cell for twice as long: the growth should double",
        response: "find what is allocated per step and not freed; a long run will end out of memory",
        detect: |_, cell| evidence::leak(cell),
    },
    Rule {
        name: "kv_leak",
        kind: Kind::Trust,
        severity: Severity::Problem,
        symptom: "memory in use grows with every visit of the cell",
        regime: "sequences that are released keep their cache",
        next: "the same cell alone, with more visits: the growth should follow them",
        response: "free the blocks of a released sequence",
        detect: |_, cell| evidence::kv_leak(cell),
    },
    Rule {
        name: "cache_artefact",
        kind: Kind::Regime,
        severity: Severity::Warn,
        symptom: "the working set is small beside the last cache",
        regime: "partly served from the cache: neither a memory nor a cache measurement",
        next: "the same cell with a larger model, or a batch and context whose KV is several caches",
        response: "read no bandwidth from this cell; a real model of this size would share the cache with others",
        detect: cache_artefact,
    },
    Rule {
        name: "throttled",
        kind: Kind::Trust,
        severity: Severity::Problem,
        symptom: "blocks were slowed down by the hardware's own protection",
        regime: "throttled: clocks fell for heat or current",
        next: "hbmark doctor, then the same cells after five idle minutes",
        response: "fix the cooling or the power supply; times taken meanwhile are of a slower device",
        detect: throttled,
    },
    Rule {
        name: "power_capped",
        kind: Kind::Trust,
        severity: Severity::Note,
        symptom: "the device stood at its power limit",
        regime: "power-capped: the clock is what the limit leaves",
        next: "the same cells with the power limit raised, or with clocks locked below the cap",
        response: "report the limit beside the result; prefill suffers more than decode",
        detect: power_capped,
    },
    Rule {
        name: "foreign_load",
        kind: Kind::Trust,
        severity: Severity::Problem,
        symptom: "other work ran beside the measurement",
        regime: "disturbed: cores, memory bandwidth or the GPU were shared",
        next: "hbmark doctor until it names no other process, then the same cells",
        response: "stop the other work, or pin it to other cores; on a virtual machine ask for dedicated ones",
        detect: foreign_load,
    },
    Rule {
        name: "degraded",
        kind: Kind::Trust,
        severity: Severity::Problem,
        symptom: "known work beside the measurement became slower",
        regime: "degraded: something took memory bandwidth away",
        next: "hbmark doctor until it names no other process, then hbmark ceiling",
        response: "find who uses the memory; on a shared machine compare by paired rounds only",
        detect: |_, cell| evidence::degraded(cell, OFTEN),
    },
    Rule {
        name: "host_jitter",
        kind: Kind::Trust,
        severity: Severity::Warn,
        symptom: "the device is steady and the host between its steps is not",
        regime: "the host thread is preempted, or the CPU governor saves power",
        next: "the same cell with the process pinned to idle cores",
        response: "pin the host thread, stop what shares its cores; read the device span and not the interval",
        detect: |_, cell| is_believable(cell).then(|| evidence::host_jitter(cell))?,
    },
    Rule {
        name: "noisy_machine",
        kind: Kind::Trust,
        severity: Severity::Warn,
        symptom: "the same work takes different times",
        regime: "a noisy machine: shared caches or bandwidth, frequency changes, or a neighbour that is not visible from here",
        next: "hbmark verify, which measures the noise of known work",
        response: "compare only with paired rounds, and only differences above the noise",
        detect: noisy,
    },
    Rule {
        name: "not_converged",
        kind: Kind::Trust,
        severity: Severity::Warn,
        symptom: "the interval stayed wider than asked for",
        regime: "not converged: too few blocks for this machine's noise",
        next: "the same cell alone with the full protocol",
        response: "use the interval and not the middle; do not rank it against others",
        detect: not_converged,
    },
    Rule {
        name: "host_bound",
        kind: Kind::Regime,
        severity: Severity::Warn,
        symptom: "the device waits for the host between steps",
        regime: "host-bound: launches, sampling or bookkeeping between steps",
        next: "the same cell with the next step enqueued before the last is read: the wait should vanish and the span stay",
        response: "work ahead of the device, capture the step in a graph, or raise the batch to share the cost",
        detect: host_bound,
    },
    Rule {
        name: "extra_kernel",
        kind: Kind::Regime,
        severity: Severity::Warn,
        symptom: "an operation takes long and moves next to nothing",
        regime: "an extra kernel, or one that is badly launched",
        next: "the same cell without that operation: the step should lose its time",
        response: "fuse it into its neighbour or take it out",
        detect: |_, cell| timed(cell).and_then(|_| evidence::extra_kernel(cell)),
    },
    Rule {
        name: "memory_bound_decode",
        kind: Kind::Regime,
        severity: Severity::Ok,
        symptom: "the step takes about as long as its bytes",
        regime: "memory-bound decode",
        next: "the same cell with half the bytes (int8, q8_0): the time should fall with them",
        response: "fewer bytes a token: quantise weights or KV, or raise the batch to share the weights",
        detect: memory_bound,
    },
    Rule {
        name: "compute_bound_prefill",
        kind: Kind::Regime,
        severity: Severity::Ok,
        symptom: "the prefill takes about as long as its arithmetic",
        regime: "compute-bound prefill",
        next: "half the prompt: the time should halve, or fall faster where attention dominates",
        response: "a faster matrix format (fp8, int8 activations), or cache the prefix; bandwidth will not help",
        detect: |_, cell| compute_bound(cell).filter(|_| !cell.phase.is_over_cache()),
    },
    Rule {
        name: "compute_bound_decode",
        kind: Kind::Regime,
        severity: Severity::Ok,
        symptom: "at this batch the step takes about as long as its arithmetic",
        regime: "compute-bound decode: past the crossover",
        next: "half the batch: the step should get shorter, tokens per second hardly less",
        response: "a larger batch no longer raises throughput; add devices or a faster matrix format",
        detect: |_, cell| compute_bound(cell).filter(|_| cell.phase.is_over_cache()),
    },
    Rule {
        name: "launch_bound",
        kind: Kind::Regime,
        severity: Severity::Warn,
        symptom: "the step takes longer than its bytes or its arithmetic, and does not grow with its work",
        regime: "launch-bound: each operation costs its start",
        next: "the same cells as a replayed graph or with fused operations; --show-ops names what is slow",
        response: "capture the step in a graph, fuse operations, or raise the batch to share the cost",
        detect: launch_bound,
    },
    Rule {
        name: "engine_moves_more",
        kind: Kind::Regime,
        severity: Severity::Warn,
        symptom: "the engine moves more bytes than the step must",
        regime: "memory-bound by copies: the KV cache is concatenated, repeated or cast",
        next: "half the context: the time should fall with the copied bytes",
        response: "an engine that writes the cache in place and reads each KV head once",
        detect: moves_more,
    },
];

/// The one rule about cells together: their fit.
const KV_COSTS: Rule<fn(&Report, &FittedModel) -> Option<String>> = Rule {
    name: "kv_costs_more",
    kind: Kind::Trust,
    severity: Severity::Warn,
    symptom: "the step grows with its context faster than its bytes do",
    regime: "the cache is read more than once, or at a fraction of the bandwidth",
    next: "--show-ops at the longest context: attention should be far from the ceiling and the other operations near it",
    response: "an attention kernel that reads each byte of the cache once for all its query heads",
    detect: evidence::kv_costs,
};

/// The names of all rules about a run.
pub fn rule_names() -> Vec<&'static str> {
    RULES.iter().map(|rule| rule.name).chain([KV_COSTS.name, UNEXPLAINED]).collect()
}

/// A report under the rules, with the ledgers they need: a mixture of experts lists tens of thousands of tensors, and has many cells.
struct Case<'a> {
    report: &'a Report,
    ledgers: RefCell<HashMap<(Dtype, Dtype, usize), Rc<Ledger>>>,
}

impl<'a> Case<'a> {
    fn new(report: &'a Report) -> Self {
        Self { report, ledgers: RefCell::default() }
    }

    /// The ledger of a cell's storage of weights and cache and its ranks, made once.
    fn ledger(&self, cell: &CellResult) -> Rc<Ledger> {
        let CellResult { dtype, kv_dtype, .. } = *cell;
        let ranks = EngineKind::ranks(&cell.engine);
        let make = || {
            let architecture = &self.report.model.architecture;
            let (inventory, on_gpu) = (architecture.inventory(dtype), self.report.environment.gpu.is_some());
            Rc::new(Ledger::of_engine(architecture, &inventory, kv_dtype, ranks, on_gpu))
        };
        self.ledgers.borrow_mut().entry((dtype, kv_dtype, ranks)).or_insert_with(make).clone()
    }
}

impl std::ops::Deref for Case<'_> {
    type Target = Report;

    fn deref(&self) -> &Report {
        self.report
    }
}

/// Everything the rules find, what is wrong before what is merely so; cells that no regime explains are named at the end.
pub fn explain(report: &Report) -> Vec<Finding> {
    if report.kind == ReportKind::Predict {
        return explain_prediction(report);
    }
    let case = Case::new(report);
    let mut findings: Vec<Finding> = Vec::new();
    for rule in RULES {
        let detect = |cell: &CellResult| Some((cell.id.clone(), (rule.detect)(&case, cell)?));
        let found: Vec<(String, String)> = report.cells.iter().filter_map(detect).collect();
        if !found.is_empty() {
            findings.push(rule.finding(&found));
        }
    }
    let fits: Vec<String> = report.fits.iter().filter_map(|fit| (KV_COSTS.detect)(report, fit)).collect();
    if !fits.is_empty() {
        findings.push(KV_COSTS.finding_of_all(fits));
    }
    let unnamed = |cell: &&CellResult| {
        let mut trust = RULES.iter().filter(|rule| rule.kind == Kind::Trust);
        cell.status == Status::Invalid && !trust.any(|rule| (rule.detect)(&case, cell).is_some())
    };
    let unnamed: Vec<(String, String)> = report
        .cells
        .iter()
        .filter(unnamed)
        .filter_map(|cell| Some((cell.id.clone(), cell.reason.as_ref()?.to_string())))
        .collect();
    findings.extend(finding::invalid(&unnamed));
    findings.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
    let explained = |cell: &CellResult| {
        RULES.iter().any(|rule| rule.kind == Kind::Regime && (rule.detect)(&case, cell).is_some())
    };
    let rest: Vec<&CellResult> = report
        .cells
        .iter()
        .filter(|cell| timed(cell).is_some() && is_believable(cell) && !explained(cell))
        .collect();
    findings.extend(unexplained(&case, &rest));
    findings
}

fn unexplained(report: &Case<'_>, cells: &[&CellResult]) -> Option<Finding> {
    let evidence = |cell: &&CellResult| {
        let time = timed(cell).unwrap_or_default();
        let floor = floor(cell).map_or_else(
            || "no ceiling is known".to_owned(),
            |floor| format!("the higher floor is {}, {:.0} % of it", Nanos(floor), floor / time * 100.0),
        );
        let near =
            NearMiss::nearest(near_misses(report, cell)).map_or_else(String::new, |near| format!("; {near}"));
        (cell.id.clone(), format!("{} a step, {floor}{near}", Nanos(time)))
    };
    let next = if report.cells.iter().any(|cell| !cell.operations.is_empty()) {
        "a second batch and context, to see what the time grows with"
    } else {
        "--show-ops, to see which operation is far from the ceiling"
    };
    finding::unexplained(
        "neither bytes nor arithmetic nor waiting explains most of the step",
        next,
        &cells.iter().map(evidence).collect::<Vec<_>>(),
    )
}

/// The limits between an unexplained cell and the regimes that it is not in.
fn near_misses(report: &Case<'_>, cell: &CellResult) -> Vec<NearMiss> {
    let limit = |share: f64| if share < EXPLAINED { EXPLAINED } else { 1.1 };
    let share_of = |regime, share: Option<f64>| {
        let seen = share.filter(|share| !(EXPLAINED..=1.1).contains(share))?;
        Some(NearMiss { regime, seen, limit: limit(seen) })
    };
    let waits = || Some(cell.host_bubble_ns.filter(|bubble| *bubble > 0.0)? / cell.tpot_ns?);
    let growth = || {
        let grown = timed(cell)? / timed(smaller_batch(report, cell)?)?;
        (cell.bound == Some(Bound::Overhead) && grown >= FLAT).then_some(grown)
    };
    let missed = [
        share_of("the floor explains the step", explained(cell)),
        share_of("the bytes the engine moves explain the step", copied_share(cell)),
        waits().map(|seen| NearMiss {
            regime: "the device waits for the host",
            seen,
            limit: evidence::WAITING,
        }),
        growth().map(|grown| NearMiss {
            regime: "launch-bound, growth over the smallest batch",
            seen: grown - 1.0,
            limit: FLAT - 1.0,
        }),
    ];
    missed.into_iter().flatten().collect()
}

/// The typical time of a cell.
fn timed(cell: &CellResult) -> Option<f64> {
    let time = match cell.phase {
        Phase::Decode | Phase::Verify { .. } => cell.tpot_ns,
        Phase::Prefill => cell.step_ns.as_ref().map(TimeSummary::center),
    };
    time.filter(|time| time.is_finite() && *time > 0.0 && cell.status != Status::Predicted)
}

pub(super) fn floor(cell: &CellResult) -> Option<f64> {
    cell.predicted_ns.or(cell.predicted_datasheet_ns).filter(|floor| *floor > 0.0)
}

/// The share of the time that the floor explains, of a cell whose time may be read.
pub(super) fn explained(cell: &CellResult) -> Option<f64> {
    Some(floor(cell)? / timed(cell).filter(|_| is_believable(cell))?)
}

/// Share of memory traffic in the time: against the read rate beside the blocks, otherwise the measured ceiling or the data sheet.
fn memory_share(cell: &CellResult) -> Option<(f64, &'static str)> {
    timed(cell).filter(|_| is_believable(cell))?;
    let beside = cell.fraction_of_read_beside.map(|share| (share, "the read rate measured beside it"));
    let ceiling = || cell.fraction_of_ceiling.map(|share| (share, "the measured read ceiling"));
    beside.or_else(ceiling).or_else(|| cell.fraction_of_datasheet.map(|share| (share, "the data sheet")))
}

fn working_set_is_small(report: &Report, cell: &CellResult) -> Option<(Bytes, Bytes)> {
    let measured = report.ceilings.as_ref().and_then(|c| c.last_cache_bytes);
    let cache = measured.or_else(|| report.datasheet.as_ref().and_then(|d| d.l2_bytes))?;
    let set = cell.bytes.ideal();
    (set.0 > 0 && set.0 < CACHE_MARGIN.saturating_mul(cache.0)).then_some((set, cache))
}

fn wrong_outputs(_: &Case<'_>, cell: &CellResult) -> Option<String> {
    if let Some(reason) = evidence::wrong_tokens(cell) {
        return Some(reason);
    }
    let quality = cell.quality.as_ref().filter(|q| !q.passed)?;
    let error =
        quality.max_relative_error.map_or_else(String::new, |e| format!(", largest relative error {e:.1e}"));
    Some(format!("failed `{}`{error}", quality.check))
}

fn wrong_size_weights(report: &Case<'_>, cell: &CellResult) -> Option<String> {
    if let Some(reason) = evidence::wrong_size(cell) {
        return Some(reason);
    }
    // A GGUF file's mixture has no size of its own, and a quantised checkpoint is not made from a dtype alone.
    let architecture = &report.model.architecture;
    if cell.dtype == Dtype::Gguf || architecture.quantization.is_some() || cell.bytes.weights.0 == 0 {
        return None;
    }
    let ledger = report.ledger(cell);
    let shape = StepShape { phase: cell.phase, batch: cell.batch, context: cell.context };
    let wanted = ledger.step(shape).bytes.weights;
    let ratio = cell.bytes.weights.as_f64() / wanted.as_f64();
    ((ratio - 1.0).abs() > WEIGHTS_TOLERANCE).then(|| {
        format!(
            "reads {} of weights, and {} in {} has {} to read: {ratio:.2} times",
            cell.bytes.weights, report.model.name, cell.dtype, wanted
        )
    })
}

fn cache_artefact(report: &Case<'_>, cell: &CellResult) -> Option<String> {
    timed(cell)?;
    let (set, cache) = working_set_is_small(report, cell)?;
    let rate = cell.achieved_bytes_per_s.map_or_else(String::new, |r| format!(", at {}", BytesPerSecond(r)));
    Some(format!("moves {set} beside a last cache of {cache}, under {CACHE_MARGIN} times{rate}"))
}

/// Of a cell's blocks, those under a condition.
fn under(cell: &CellResult, is: impl Fn(&Block) -> bool) -> (usize, Option<&Block>) {
    let hit: Vec<&Block> = cell.blocks.iter().filter(|block| is(block)).collect();
    (hit.len(), hit.last().copied())
}

fn blocks(cell: &CellResult) -> String {
    counted(cell.blocks.len(), "block")
}

/// What a block was rejected for, or counts in spite of.
fn caught(block: &Block, is: impl Fn(&Cause) -> bool) -> Option<&Cause> {
    block.rejected.iter().chain(&block.conditions).find(|cause| is(cause))
}

fn throttled(_: &Case<'_>, cell: &CellResult) -> Option<String> {
    let is = |cause: &Cause| matches!(cause, Cause::Throttled { .. });
    let (count, last) = under(cell, |block| caught(block, is).is_some());
    let cause = caught(last?, is)?;
    let heat = last?.telemetry.as_ref().and_then(|t| t.temperature_celsius);
    let heat = heat.map_or_else(String::new, |c| format!(" at {c:.0} °C"));
    Some(format!("{count} of {} disturbed, the last for {cause}{heat}", blocks(cell)))
}

fn power_capped(_: &Case<'_>, cell: &CellResult) -> Option<String> {
    let (count, last) = under(cell, |block| block.conditions.contains(&Cause::PowerCapped));
    let telemetry = last?.telemetry.as_ref();
    if (count as f64) < OFTEN * cell.blocks.len() as f64 {
        return None;
    }
    let watts = telemetry.and_then(|t| t.power_watts).map_or_else(String::new, |w| format!(" at {w:.0} W"));
    let clock = telemetry.and_then(|t| t.sm_clock_mhz).map_or_else(String::new, |c| format!(", {c:.0} MHz"));
    Some(format!("{count} of {} at the limit{watts}{clock}", blocks(cell)))
}

fn foreign_load(_: &Case<'_>, cell: &CellResult) -> Option<String> {
    let is = |cause: &Cause| {
        matches!(cause, Cause::ForeignLoad { .. } | Cause::CpuSteal { .. } | Cause::ThreadsAway { .. })
    };
    let foreign = |block: &Block| {
        let beside = block.telemetry.as_ref().and_then(|t| t.gpu_other_processes).unwrap_or(0);
        caught(block, is).is_some() || beside > 0
    };
    let (count, last) = under(cell, foreign);
    // A cell that is good took other blocks for a few of these.
    let last =
        last.filter(|_| cell.status != Status::Ok || count as f64 >= OFTEN * cell.blocks.len() as f64)?;
    let what = caught(last, is).map_or_else(|| "another process on the GPU".to_owned(), ToString::to_string);
    Some(format!("{count} of {}, the last: {what}", blocks(cell)))
}

fn noisy(report: &Case<'_>, cell: &CellResult) -> Option<String> {
    let mut evidence = Vec::new();
    if evidence::degraded(cell, OFTEN).is_some() {
        return None;
    }
    let is = |cause: &Cause| matches!(cause, Cause::Canary { .. });
    let (count, last) = under(cell, |block| caught(block, is).is_some());
    if let Some(cause) = last.and_then(|block| caught(block, is))
        && count as f64 >= OFTEN * cell.blocks.len() as f64
    {
        evidence.push(format!("{count} of {} disturbed, the last: {cause}", blocks(cell)));
    }
    let step = cell.step_ns.as_ref();
    if let Some(cv) = step.and_then(|step| step.cv).filter(|cv| *cv > NOISY_STEPS) {
        evidence.push(format!("steps vary by {:.0} % of their mean", cv * 100.0));
    }
    let spread = report.ceilings.as_ref().map(|c| c.read_bytes_per_s);
    if let Some(spread) = spread.filter(|s| (s.high - s.low) / s.median > NOISY_CEILING) {
        // The ceiling is the run's and not the cell's: it counts where the cell shows noise too.
        if !evidence.is_empty() {
            evidence.push(format!(
                "the read ceiling itself lay between {} and {}",
                BytesPerSecond(spread.low),
                BytesPerSecond(spread.high)
            ));
        }
    }
    (!evidence.is_empty()).then(|| evidence.join("; "))
}

fn not_converged(_: &Case<'_>, cell: &CellResult) -> Option<String> {
    matches!(cell.status, Status::NotConverged | Status::NoSteadyState)
        .then(|| cell.reason.as_ref().map_or_else(|| "no reason was kept".to_owned(), ToString::to_string))
}

fn memory_bound(report: &Case<'_>, cell: &CellResult) -> Option<String> {
    if !cell.phase.is_over_cache()
        || cell.bound != Some(Bound::Memory)
        || working_set_is_small(report, cell).is_some()
        || evidence::host_waits(cell).is_some()
    {
        return None;
    }
    let (share, roof) = memory_share(cell)?;
    let rate = BytesPerSecond(cell.achieved_bytes_per_s?);
    // Far above the ceiling the ledger or the ceiling is wrong, and the name would be too.
    (EXPLAINED..=1.1).contains(&share).then(|| {
        format!(
            "{} in {}: {rate}, {:.0} % of {roof}",
            cell.bytes.ideal(),
            Nanos(timed(cell).unwrap_or_default()),
            share * 100.0
        )
    })
}

fn compute_bound(cell: &CellResult) -> Option<String> {
    if cell.bound != Some(Bound::Compute) || evidence::host_waits(cell).is_some() {
        return None;
    }
    let share = explained(cell).filter(|share| (EXPLAINED..=1.1).contains(share))?;
    let mfu = match (cell.mfu, &cell.mfu_dtype) {
        (Some(mfu), Some(peak)) => format!(", MFU {:.0} % of {peak}", mfu * 100.0),
        _ => String::new(),
    };
    let drafts = match cell.phase {
        Phase::Verify { draft_tokens } => {
            format!("; it checks {draft_tokens} draft tokens of each sequence, and fewer are less of it")
        }
        Phase::Prefill | Phase::Decode => String::new(),
    };
    Some(format!("its arithmetic explains {:.0} % of {}{mfu}{drafts}", share * 100.0, Nanos(timed(cell)?)))
}

fn launch_bound(report: &Case<'_>, cell: &CellResult) -> Option<String> {
    if cell.bound != Some(Bound::Overhead)
        || copies_explain(cell)
        || working_set_is_small(report, cell).is_some()
    {
        return None;
    }
    let (time, share) = (timed(cell)?, explained(cell)?);
    if evidence::host_waits(cell).is_some() {
        return None;
    }
    let smaller = smaller_batch(report, cell).filter(|smaller| {
        let growth = |of: fn(&CellResult) -> Option<f64>| Some(of(cell)? / of(smaller)?);
        // Where the work does not grow either, a flat time is not evidence.
        cell.batch >= 2 * smaller.batch
            && growth(floor).is_some_and(|g| g >= GROWN)
            && growth(timed).is_some_and(|g| g < FLAT)
    })?;
    Some(format!(
        "takes {} at batch {} and {} at batch {}; its floor explains {:.0} %",
        Nanos(timed(smaller)?),
        smaller.batch,
        Nanos(time),
        cell.batch,
        share * 100.0
    ))
}

fn host_bound(_: &Case<'_>, cell: &CellResult) -> Option<String> {
    let share =
        explained(cell).map_or_else(String::new, |s| format!("; its floor explains {:.0} %", s * 100.0));
    evidence::host_waits(cell).map(|waits| format!("{waits}{share}"))
}

/// The same cell at a smaller batch, the smallest.
fn smaller_batch<'a>(report: &'a Report, cell: &CellResult) -> Option<&'a CellResult> {
    let alike = |other: &&CellResult| {
        (other.phase, &other.engine, other.dtype, other.context)
            == (cell.phase, &cell.engine, cell.dtype, cell.context)
            && other.batch < cell.batch
            && is_believable(other)
            && timed(other).is_some()
    };
    report.cells.iter().filter(alike).min_by_key(|other| other.batch)
}

/// Whether what the engine really moves explains the step where what it must move does not.
fn copies_explain(cell: &CellResult) -> bool {
    copied_share(cell).is_some_and(|share| (EXPLAINED..=1.1).contains(&share))
}

fn copied_share(cell: &CellResult) -> Option<f64> {
    let (moved, ideal) = (cell.bytes.as_implemented?.as_f64(), cell.bytes.ideal().as_f64());
    let (share, _) = memory_share(cell)?;
    (moved > 1.2 * ideal).then(|| share * moved / ideal)
}

fn moves_more(report: &Case<'_>, cell: &CellResult) -> Option<String> {
    let share = copied_share(cell).filter(|_| copies_explain(cell))?;
    // A step that its necessary bytes explain needs no other name.
    if memory_bound(report, cell).is_some() || compute_bound(cell).is_some() {
        return None;
    }
    let moved = cell.bytes.as_implemented?;
    Some(format!(
        "moves {moved} where {} would do: these explain {:.0} % of {}",
        cell.bytes.ideal(),
        share * 100.0,
        Nanos(timed(cell)?)
    ))
}

#[cfg(test)]
mod tests;
