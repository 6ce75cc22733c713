//! Findings about a serving result: about each point, and about a sweep as a whole.
//!
//! Enters: a [`ServeReport`], and what the user will pay. Leaves: [`Finding`]s, as for a run. A rule is one row of [`RULES`]: a
//! function from a point to evidence or to nothing. A cause comes before its consequence: a queue that grows because blocks ran out is
//! KV pressure first and saturation second. A measured point that matches no regime is unexplained. Pure.

use super::finding::{self, Kind, NearMiss, Rule, UNEXPLAINED};
use super::first_limit;
use super::words::counted;
use hbmark_core::result::serving::{
    Gate, GateName, LiveResult, Offered, Point, Quantiles, Quantity, ServeReport, ServeResult, Validity,
};
use hbmark_core::result::{Cause, Finding, Severity};
use hbmark_core::stats;
use hbmark_core::units::{Nanos, PerSecond};

/// Share of the busy time that the host may take before a step is called host-bound.
const HOST_SHARE: f64 = 0.2;
/// How much longer short requests wait beside long prompts before these are blamed, and how many there must be of each.
const BLOCKED: f64 = 2.0;
const FEW: usize = 10;
/// Of that wait, the share that must have passed in steps that computed long prompts.
const IN_LONG_STEPS: f64 = 0.5;
/// How much longer the first requests wait, and their steps take, before a start is called cold.
const COLD: f64 = 1.5;
/// How much smaller the share of found prompt tokens must be at the start.
const COLD_HITS: f64 = 0.2;
/// Share of preempted requests from which the cache is too small.
const PREEMPTED: f64 = 0.01;
/// Of the level at which one more request does not fit, the share that the mean must reach.
const FULL: f64 = 0.8;
/// A workload that shares less than this shares nothing worth finding, and a cache that finds less than this share of the ideal misses.
const WORTH_FINDING: f64 = 0.1;
const FOUND: f64 = 0.7;
/// More than the share that a run's own requests have in common, by this much, was in the cache before it.
const CACHED_BEFORE: f64 = 0.2;
/// p99 over p50 of the TTFT from which a tail is long, and the share of the slowest that must have met a stall.
const LONG_TAIL: f64 = 5.0;
const IN_STALLS: f64 = 0.5;
/// Stalls beyond this share of the steps are no tail but how the engine is.
const RARE: f64 = 0.05;
/// Requests behind a p99 that is more than the largest value.
const P99: f64 = 0.99;
/// Outputs shorter than this share of the plan are another workload.
const AS_PLANNED: f64 = 0.9;
/// Share of the TTFT spent in the queue beyond which waiting is the larger part.
const MOSTLY_WAITING: f64 = 0.5;
/// Sequences over their limit from which a batch is full.
const FULL_BATCH: f64 = 0.9;

/// The evidence in one point, if the rule matches.
type Detector = fn(&ServeReport, &Point, &ServeResult) -> Option<String>;

/// The rule of a system that does not keep up.
const SATURATION: &str = "scheduler_saturation";

const RULES: &[Rule<Detector>] = &[
    Rule {
        name: "injector_late",
        kind: Kind::Trust,
        severity: Severity::Problem,
        symptom: "requests were queued later than they could be",
        regime: "the harness is at fault: its own loop came late",
        next: "the same load on an idle machine, or at half of the rate",
        response: "believe no latency of this point; give the loop a core of its own",
        detect: |_, _, result| failed(result, GateName::InjectionLag),
    },
    Rule {
        name: "client_late",
        kind: Kind::Trust,
        severity: Severity::Problem,
        symptom: "the client read what the server sent later than it came, or had no processor to read it with",
        regime: "the client, not the server, was late",
        next: "the same load from another machine, or at half of the rate: the client's own figures should fall",
        response: "believe no latency of this point; give the client a core of its own, or a machine beside the server's",
        detect: |_, _, result| {
            let late = [GateName::ClientDelay, GateName::ClientProcessor];
            let details: Vec<String> = late.into_iter().filter_map(|name| failed(result, name)).collect();
            (!details.is_empty()).then(|| details.join("; "))
        },
    },
    Rule {
        name: "foreign_load",
        kind: Kind::Trust,
        severity: Severity::Problem,
        symptom: "other work ran beside the requests, or the machine's own speed changed",
        regime: "disturbed: the latencies are those of other work, too",
        next: "hbmark doctor until it names no other process, then the same point",
        response: "stop the other work, or pin it to other cores",
        detect: |_, point, _| Some(point.disturbances().join("; ")).filter(|found| !found.is_empty()),
    },
    Rule {
        name: "engine_failed",
        kind: Kind::Trust,
        severity: Severity::Problem,
        symptom: "the engine failed while it served",
        regime: "a failing engine: what it was serving counts as never done",
        next: "the same point with fewer sequences at a time (--max-num-seqs)",
        response: "fix the failure first; latencies around it are of a smaller load",
        detect: |_, _, result| failed(result, GateName::Engine),
    },
    Rule {
        name: "kv_block_leak",
        kind: Kind::Trust,
        severity: Severity::Problem,
        symptom: "KV blocks are in use that no request holds",
        regime: "a leak of KV blocks: the pool shrinks while it runs",
        next: "the same point for twice as long: more blocks should be missing",
        response: "find the path on which a finished or preempted request keeps its blocks",
        detect: |_, _, result| failed(result, GateName::KvAccounting),
    },
    Rule {
        name: "wrong_token_count",
        kind: Kind::Trust,
        severity: Severity::Problem,
        symptom: "outputs of a forced length have another one",
        regime: "an engine or a loop that does other work than was asked for",
        next: "hbmark verify",
        response: "use no figure of this point",
        detect: |_, _, result| failed(result, GateName::TokenCount),
    },
    Rule {
        name: "cached_before",
        kind: Kind::Trust,
        severity: Severity::Problem,
        symptom: "more of the prompts was in the prefix cache than the requests of this run share",
        regime: "the cache held these prompts from an earlier run: their prefill was not measured",
        next: "the same point with another --seed: the share found should fall to what the requests share",
        response: "believe no TTFT of this point; run it with another --seed, or with --cache-salt where the server knows salts",
        detect: |_, point, result| cached_before(point, result),
    },
    Rule {
        name: "host_bound_step",
        kind: Kind::Regime,
        severity: Severity::Warn,
        symptom: "a good part of each step is the host's work",
        regime: "host-bound: scheduling, building, launching and sampling hold the device up",
        next: "the same point with twice the model or half the sequences: the host's part should stay",
        response: "overlap the host's work with the step, or make fewer and larger steps",
        detect: |_, _, result| host_bound(result),
    },
    Rule {
        name: "kv_pressure",
        kind: Kind::Regime,
        severity: Severity::Warn,
        symptom: "the KV pool is full",
        regime: "KV pressure: requests are preempted and computed again, or wait for blocks",
        next: "the same point with more blocks (--num-gpu-blocks-override, --gpu-memory-utilization): preemptions should end",
        response: "more memory for the cache, a smaller KV dtype, or fewer sequences at a time",
        detect: kv_pressure,
    },
    Rule {
        name: "prefix_evicted",
        kind: Kind::Regime,
        severity: Severity::Warn,
        symptom: "prompts share beginnings that were in the cache and are not any more",
        regime: "prefix cache evicted: it is smaller than what is shared",
        next: "the same point with more blocks: the hit rate should approach the ideal one",
        response: "more blocks, or route requests of one prefix to one instance",
        detect: |_, point, result| prefix_missed(point, result, true),
    },
    Rule {
        name: "prefix_not_hit",
        kind: Kind::Regime,
        severity: Severity::Warn,
        symptom: "prompts share beginnings and the cache does not find them",
        regime: "prefix cache not hit, though nothing was evicted: the same prefix is being computed by several at once, or blocks are too large",
        next: "the same requests at a lower rate, or with smaller blocks (--block-size)",
        response: "let the first request of a prefix finish its prefill before the others start",
        detect: |_, point, result| prefix_missed(point, result, false),
    },
    Rule {
        name: "cold_start",
        kind: Kind::Regime,
        severity: Severity::Warn,
        symptom: "the first measured requests were slower than the others",
        regime: "cold start: they paid for what later ones found warm",
        next: "the same point with a longer --warmup: the difference should vanish",
        response: "warm up longer, or report the cold start as a figure of its own",
        detect: |_, _, result| cold_start(result),
    },
    Rule {
        name: "tail_failure",
        kind: Kind::Regime,
        severity: Severity::Warn,
        symptom: "a few requests are many times slower than the others, and most of them met a stalled step",
        regime: "tail failure: single steps stall",
        next: "the same point with the host's activity recorded (hbmark doctor): what runs when a step stalls",
        response: "find the stall (garbage collection, a page fault, another process, a clock change); percentiles below it are sound",
        detect: |_, _, result| tail(result),
    },
    Rule {
        name: "long_prompts_block",
        kind: Kind::Regime,
        severity: Severity::Warn,
        symptom: "short requests wait while a long prompt is computed",
        regime: "queueing interference of long prompts: head-of-line blocking",
        next: "the same requests without the long ones, or with the other setting of chunked prefill",
        response: "chunked prefill, with fewer tokens a step (--max-num-batched-tokens) where it is on already; or priorities for short requests",
        detect: long_prompts,
    },
    Rule {
        name: SATURATION,
        kind: Kind::Regime,
        severity: Severity::Warn,
        symptom: "requests come faster than they are served",
        regime: "scheduler saturation: the queue grows as long as one measures",
        next: "a sweep below this rate, or hbmark serve search with an objective",
        response: "fewer requests an instance, or more instances; latencies of this point mean nothing",
        detect: saturated,
    },
    Rule {
        name: "queueing",
        kind: Kind::Regime,
        severity: Severity::Note,
        symptom: "most of the time to the first token is spent in the queue",
        regime: "queueing: the system keeps up and is near the load it can take",
        next: "the same point at half of the rate: the wait should fall by more than half",
        response: "keep some distance to saturation; a burst will cost more than its share",
        detect: |_, point, result| queueing(point, result, true),
    },
    Rule {
        name: "keeps_up",
        kind: Kind::Regime,
        severity: Severity::Ok,
        symptom: "requests hardly wait, and steps make up their latency",
        regime: "the system keeps up",
        next: "twice the rate, to see how far it is from its limit",
        response: "latency is now a matter of the step: hbmark run says where its time goes",
        detect: |_, point, result| queueing(point, result, false),
    },
    Rule {
        name: "too_few_requests",
        kind: Kind::Trust,
        severity: Severity::Note,
        symptom: "there are too few requests for a tail",
        regime: "there are too few samples for a p99: it would be the largest value, and is not given",
        next: "the same point with --requests 1000 or more",
        response: "claim no p99, and judge objectives at percentiles that the sample carries",
        detect: |_, _, result| too_few(result),
    },
    Rule {
        name: "not_judged",
        kind: Kind::Trust,
        severity: Severity::Note,
        symptom: "whether the queue grows or only wanders is open",
        regime: "too short to tell growth of the queue from chance",
        next: "the same point with as many requests as the evidence names, or ten times as many where it names none",
        response: "read its latencies as those of this run alone, until a longer one shows that they stay so",
        detect: |_, point, result| {
            undecided(point, result).map(|detail| {
                format!("{:.2} requests waited on average; {detail}", result.mean_waiting.max(0.0))
            })
        },
    },
    Rule {
        name: "early_end",
        kind: Kind::Trust,
        severity: Severity::Note,
        symptom: "outputs are shorter than the workload plans",
        regime: "the model ends early: the load is another one than its name says",
        next: "the same point with forced lengths (without --stop-at-eos)",
        response: "state the lengths that were made; compare only with runs that made the same",
        detect: |_, _, result| early_end(result),
    },
];

/// What a reader will pay, where it should be held against.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Cost {
    pub price_per_hour: f64,
    pub limit_per_million_output_tokens: f64,
}

/// The names of all rules about serving.
pub fn serving_rule_names() -> Vec<&'static str> {
    RULES
        .iter()
        .map(|rule| rule.name)
        .chain([first_limit::FIRST_TARGET, first_limit::COST, UNEXPLAINED])
        .collect()
}

/// Everything the rules find about a serving result, what is wrong before what is merely so.
pub fn explain_serving(report: &ServeReport, cost: Option<Cost>) -> Vec<Finding> {
    let points: Vec<(&Point, &ServeResult)> =
        report.points.iter().filter_map(|point| Some((point, point.result.as_ref()?))).collect();
    let mut findings: Vec<Finding> = Vec::new();
    for rule in RULES {
        let found: Vec<(String, String)> = points
            .iter()
            .filter_map(|(point, result)| Some((point.label.clone(), (rule.detect)(report, point, result)?)))
            .collect();
        if found.is_empty() {
            continue;
        }
        let mut finding = rule.finding(&found);
        if report.server.is_some() {
            of_live_server(&mut finding);
        }
        if rule.name == SATURATION {
            finding.evidence.splice(0..0, edge(report, &points));
        } else if rule.kind == Kind::Regime {
            finding.severity = finding.severity.min(weight(&points, &finding));
        }
        findings.push(finding);
    }
    let unnamed = |(point, result): &(&Point, &ServeResult)| {
        let mut trust = RULES.iter().filter(|rule| rule.kind == Kind::Trust);
        let named = trust.any(|rule| (rule.detect)(report, point, result).is_some());
        // What a file contradicts is said beside the gates, too.
        let broken = result.reasons.iter().find(|reason| matches!(reason, Cause::Inconsistent { .. }));
        let other = || result.reasons.first().filter(|_| !named);
        let reason = broken.or_else(other).filter(|_| result.validity == Validity::Invalid)?;
        Some((point.label.clone(), reason.to_string()))
    };
    let unnamed: Vec<(String, String)> = points.iter().filter_map(unnamed).collect();
    findings.extend(finding::invalid(&unnamed));
    let first = first_limit::first_failure(report, &points, cost);
    findings.extend(first_limit::cost(&points, first.as_ref(), cost));
    findings.extend(first);
    // What makes a point saturate comes before its saturation, and that before what only makes others slower.
    let saturation = findings.iter().find(|finding| finding.rule == SATURATION);
    let saturated: Vec<String> = saturation.map_or_else(Vec::new, |finding| finding.cells.clone());
    let place = |finding: &Finding| match finding.rule.as_str() {
        SATURATION => 1,
        _ if finding.cells.iter().any(|cell| saturated.contains(cell)) => 0,
        _ => 2,
    };
    findings.sort_by_key(|finding| (std::cmp::Reverse(finding.severity), place(finding)));
    let explained = |point: &Point, result: &ServeResult| {
        RULES.iter().any(|rule| rule.kind == Kind::Regime && (rule.detect)(report, point, result).is_some())
    };
    let rest: Vec<(&Point, &ServeResult)> = points
        .into_iter()
        .filter(|(point, result)| result.validity != Validity::Invalid && !explained(point, result))
        .collect();
    findings.extend(unexplained(&rest));
    findings
}

/// Other words where the engine is another program: none of its parts can be checked from here.
fn of_live_server(finding: &mut Finding) {
    match finding.rule.as_str() {
        "wrong_token_count" => {
            "a server that does other work than it was asked for".clone_into(&mut finding.regime);
            "one request by hand: the tokens asked for beside those of its usage"
                .clone_into(&mut finding.next);
            "use no figure of this point; see that the server knows ignore_eos (--backend), and that requests fit its context"
                .clone_into(&mut finding.response);
        }
        "early_end" => {
            "the same point with a --backend that knows ignore_eos, or with --ignore-eos, and with requests that fit the server's context"
                .clone_into(&mut finding.next);
        }
        _ => {}
    }
}

/// How much an effect can matter: where every point that shows it meets its objectives, it is worth knowing and no more.
fn weight(points: &[(&Point, &ServeResult)], finding: &Finding) -> Severity {
    let mut shown = points.iter().filter(|(point, _)| finding.cells.contains(&point.label));
    let met = |(_, result): &(&Point, &ServeResult)| !result.slo.is_empty() && result.slo_met == Some(true);
    if shown.all(met) { Severity::Note } else { Severity::Problem }
}

fn unexplained(points: &[(&Point, &ServeResult)]) -> Option<Finding> {
    let evidence = |(point, result): &(&Point, &ServeResult)| {
        let p50 = |q: Option<&Quantiles>| {
            q.and_then(|q| q.p50).map_or("not known".to_owned(), |v| Nanos(v.value()).to_string())
        };
        let near =
            NearMiss::nearest(near_misses(result)).map_or_else(String::new, |near| format!("; {near}"));
        let numbers = format!(
            "TTFT p50 {}, TPOT p50 {}, {:.2} requests per second served{}{near}",
            p50(result.ttft_ns.as_ref()),
            p50(result.tpot_ns.as_ref()),
            result.served_per_s,
            why_not_the_queue(point, result)
        );
        (point.label.clone(), numbers)
    };
    finding::unexplained(
        "what was measured is within the limits of every rule",
        "the same load at half and at twice the rate, to see what grows",
        &points.iter().map(evidence).collect::<Vec<_>>(),
    )
}

/// Why a point has neither of the names that rest on the queue: that it waits there, or that it keeps up.
fn why_not_the_queue(point: &Point, result: &ServeResult) -> &'static str {
    if undecided(point, result).is_some() {
        "; whether requests queue or the system keeps up is open while the run is too short to tell"
    } else if readable(result) && result.queue_ns.is_none() {
        "; this server does not show how long requests queue, so that neither queueing nor keeping up can be told"
    } else {
        ""
    }
}

/// The limits between an unexplained point and the regimes that it is not in, as far as its results show them.
fn near_misses(result: &ServeResult) -> Vec<NearMiss> {
    let mut missed = Vec::new();
    let mut add = |regime, seen: f64, limit: f64| {
        if seen > 0.0 && seen < limit {
            missed.push(NearMiss { regime, seen, limit });
        }
    };
    if let Some((host, busy)) = host_time(result) {
        add("host-bound, share of the busy time", host / busy, HOST_SHARE);
    }
    let Some(evidence) = &result.evidence else { return missed };
    add(
        "KV pressure, share of the requests preempted",
        evidence.preempted_requests as f64 / result.measured.max(1) as f64,
        PREEMPTED,
    );
    if let Some((beside, alone)) =
        evidence.long_prompts.and_then(|long| long.ttft_p50_beside_ns.zip(long.ttft_p50_alone_ns))
    {
        add("long prompts block, TTFT p50 beside them over alone", beside / alone, BLOCKED);
    }
    if let Some((first, rest)) =
        evidence.start.and_then(|start| start.ttft_p50_first_ns.zip(start.ttft_p50_rest_ns))
    {
        add("cold start, TTFT p50 of the first requests over the others", first / rest, COLD);
    }
    missed
}

/// The rate of an open loop that names one.
pub(super) fn rate(point: &Point) -> Option<f64> {
    if let Offered::Rate(rate) = point.offered { Some(rate) } else { None }
}

/// The last rate that kept up and the first that did not, where points differ in their rate alone. What a run cannot tell is neither.
fn edge(report: &ServeReport, points: &[(&Point, &ServeResult)]) -> Option<String> {
    // The rows of a matrix are different workloads: one of their rates cannot be the last before another.
    if !report.matrix.is_empty() {
        return None;
    }
    let rates = |wanted: Option<bool>| {
        points.iter().filter(move |(point, _)| point.keeps_up() == wanted).filter_map(
            move |(point, result)| {
                let counts = wanted.is_some() || result.validity == Validity::Valid;
                Some((rate(point).filter(|_| counts)?, result.served_per_s))
            },
        )
    };
    let (first_not, served) = rates(Some(false)).min_by(|a, b| a.0.total_cmp(&b.0))?;
    let below = |(rate, _): &(f64, f64)| *rate < first_not;
    let kept = rates(Some(true)).filter(below).map(|(rate, _)| rate).reduce(f64::max);
    let mut open: Vec<f64> = rates(None).filter(below).map(|(rate, _)| rate).collect();
    open.retain(|rate| kept.is_none_or(|kept| *rate > kept));
    open.sort_by(f64::total_cmp);
    open.dedup();
    let open = match open.as_slice() {
        [] => String::new(),
        [one] => format!("; undetermined at {}", PerSecond(*one)),
        [low, .., high] => {
            let rates = counted(open.len(), "rate");
            format!("; undetermined at {rates} from {} to {}", PerSecond(*low), PerSecond(*high))
        }
    };
    let (not, served) = (PerSecond(first_not), PerSecond(served));
    Some(match kept.map(PerSecond) {
        Some(last) => format!(
            "the last rate that kept up is {last} per second, the first that did not {not}, which was served {served} per second{open}"
        ),
        None => format!(
            "no rate below {not} per second was shown to keep up; it was served {served} per second{open}"
        ),
    })
}

/// Whether latencies of a point may be read: it is valid, and the harness was in time.
fn readable(result: &ServeResult) -> bool {
    result.validity == Validity::Valid
}

/// Whether where its time went may be read: however the queue grew, but not when the measurement itself is wrong.
fn believable(result: &ServeResult) -> bool {
    result.validity != Validity::Invalid
}

fn gate(result: &ServeResult, name: GateName) -> Option<&Gate> {
    result.gates.iter().find(|gate| gate.name == name)
}

fn failed(result: &ServeResult, name: GateName) -> Option<String> {
    gate(result, name).filter(|gate| gate.passed == Some(false)).map(|gate| gate.detail.clone())
}

fn value(quantity: Option<Quantity>) -> Option<f64> {
    quantity.map(Quantity::value).filter(|value| value.is_finite())
}

/// The parts of a step that are the host's work.
fn host_parts(result: &ServeResult) -> [(&'static str, f64); 9] {
    let b = &result.breakdown;
    [
        ("enqueue", b.enqueue_ns),
        ("schedule", b.schedule_ns),
        ("build", b.build_ns),
        ("launch", b.launch_ns),
        ("sample", b.sample_ns),
        ("mask", b.mask_ns),
        ("mask apply", b.mask_apply_ns),
        ("detokenize", b.detokenize_ns),
        ("other", b.other_ns),
    ]
}

/// The host's work and the busy time it is of, where they may be read.
fn host_time(result: &ServeResult) -> Option<(f64, f64)> {
    let busy = result.breakdown.wall_ns - result.breakdown.idle_ns;
    let host = host_parts(result).iter().map(|(_, time)| time).sum();
    // A live server's steps are not ours: all of its time is the rest.
    let has_steps = result.breakdown.steps > 0;
    (believable(result) && has_steps && busy > 0.0).then_some((host, busy))
}

fn host_bound(result: &ServeResult) -> Option<String> {
    let (host, busy) = host_time(result).filter(|(host, busy)| *host >= HOST_SHARE * busy)?;
    let (most, time) = host_parts(result).into_iter().max_by(|a, b| a.1.total_cmp(&b.1))?;
    Some(format!(
        "of the busy time {:.0} % is the host's, {most} {:.0} %; a step has {} of it",
        host / busy * 100.0,
        time / busy * 100.0,
        Nanos(host / result.breakdown.steps.max(1) as f64)
    ))
}

fn kv_pressure(_: &ServeReport, point: &Point, result: &ServeResult) -> Option<String> {
    let evidence = result.evidence.as_ref().filter(|_| believable(result))?;
    let share = evidence.preempted_requests as f64 / result.measured.max(1) as f64;
    // A pool without room for one more, beside a batch with room: it is blocks that requests wait for.
    let tokens = point.mean_prompt_tokens + point.mean_output_tokens;
    let scheduler = point.scheduler.as_ref()?;
    let one_more = tokens / scheduler.block_size as f64 / scheduler.num_blocks as f64;
    let full = (1.0 - one_more).max(0.0);
    let waits = result.mean_waiting >= 1.0
        && result.max_kv_use >= full
        && result.mean_kv_use >= FULL * full
        && result.mean_running < FULL_BATCH * scheduler.max_num_seqs as f64;
    (share >= PREEMPTED || waits).then(|| {
        format!(
            "{} of {} were preempted, {:.1} % of their time was spent waiting to go on; the pool of {} blocks was {:.0} % full on \
             average and {:.0} % at most",
            evidence.preempted_requests,
            counted(result.measured, "request"),
            evidence.preempted_share * 100.0,
            scheduler.num_blocks,
            result.mean_kv_use * 100.0,
            result.max_kv_use * 100.0
        )
    })
}

fn prefix_missed(point: &Point, result: &ServeResult, evicted: bool) -> Option<String> {
    let ideal = point.ideal_hit_rate.filter(|ideal| *ideal >= WORTH_FINDING && believable(result))?;
    let seen = result.prefix_hit_rate?;
    // Where a pool is so full that requests are preempted, its being full is the cause.
    let preempted = result.evidence.as_ref().is_some_and(|e| e.preempted_requests > 0);
    (seen < FOUND * ideal && (result.prefix_evictions > 0) == evicted && !preempted).then(|| {
        format!(
            "{:.1} % of the prompt tokens were found, {:.1} % could be; {} cached blocks were evicted",
            seen * 100.0,
            ideal * 100.0,
            result.prefix_evictions
        )
    })
}

/// That prompts were in the prefix cache before the run that sends them: how much of them was found, and how much the run's requests share.
pub(crate) fn cached_before(point: &Point, result: &ServeResult) -> Option<String> {
    let ideal = point.ideal_hit_rate.filter(|_| believable(result))?;
    let of_server = |live: &LiveResult| {
        live.cached_share.or_else(|| live.server.as_ref().and_then(|server| server.prefix_hit_rate))
    };
    let seen = point.live.as_ref().and_then(of_server).or(result.prefix_hit_rate)?;
    (seen > ideal + CACHED_BEFORE).then(|| {
        format!(
            "{:.1} % of the prompt tokens were found in the cache, and these requests share {:.1} %",
            seen * 100.0,
            ideal * 100.0
        )
    })
}

fn cold_start(result: &ServeResult) -> Option<String> {
    let start = result.evidence.as_ref()?.start.filter(|_| readable(result))?;
    let (first, rest) = (start.ttft_p50_first_ns?, start.ttft_p50_rest_ns?);
    let slow_steps = start.step_ratio.filter(|ratio| *ratio >= COLD);
    let misses = start.hit_share_rest - start.hit_share_first >= COLD_HITS;
    (first >= COLD * rest && (slow_steps.is_some() || misses)).then(|| {
        let why = slow_steps.map_or_else(
            || {
                format!(
                    "they found {:.0} % of their prompts in the cache, later ones {:.0} %",
                    start.hit_share_first * 100.0,
                    start.hit_share_rest * 100.0
                )
            },
            |ratio| format!("their steps took {ratio:.1} times as long as later ones of their size"),
        );
        format!(
            "TTFT p50 of the first {} requests is {}, of the others {}: {why}",
            start.first,
            Nanos(first),
            Nanos(rest)
        )
    })
}

/// p99 of the TTFT, or its largest value where there are too few requests for one.
fn tail(result: &ServeResult) -> Option<String> {
    let stalls = result.evidence.as_ref()?.stalls;
    let ttft = result.ttft_ns.as_ref().filter(|_| readable(result))?;
    let (p50, high) = (value(ttft.p50)?, value(ttft.p99).or(value(ttft.max))?);
    let word = if ttft.p99.is_some() { "p99" } else { "the largest" };
    let met = stalls.slowest_in_stalls as f64 >= IN_STALLS * stalls.slowest as f64;
    let rare = (stalls.count as f64) <= RARE * result.breakdown.steps as f64;
    (high >= LONG_TAIL * p50 && stalls.count > 0 && stalls.slowest > 0 && met && rare).then(|| {
        format!(
            "TTFT {word} is {}, {:.0} times p50 ({}); {} of {} steps stalled, the longest for {}, and {} of the {} slowest requests met one",
            Nanos(high),
            high / p50,
            Nanos(p50),
            stalls.count,
            result.breakdown.steps,
            Nanos(stalls.longest_ns),
            stalls.slowest_in_stalls,
            stalls.slowest
        )
    })
}

fn long_prompts(_: &ServeReport, point: &Point, result: &ServeResult) -> Option<String> {
    let long = result.evidence.as_ref()?.long_prompts.filter(|_| believable(result))?;
    let (beside, alone) = (long.ttft_p50_beside_ns?, long.ttft_p50_alone_ns?);
    let enough = long.beside >= FEW && long.alone >= FEW;
    if !enough || beside < BLOCKED * alone || long.share_in_long_steps < IN_LONG_STEPS {
        return None;
    }
    let chunked = match &point.scheduler {
        Some(scheduler) if scheduler.enable_chunked_prefill => format!(
            "chunked prefill is on with {} tokens a step: a smaller --max-num-batched-tokens, or priorities, let short ones pass",
            scheduler.max_num_batched_tokens
        ),
        Some(_) => "chunked prefill is off: turn it on".to_owned(),
        None => "see that the server has chunked prefill on".to_owned(),
    };
    Some(format!(
        "TTFT p50 of short requests is {} where a prompt of {} tokens or more was computed meanwhile ({} of them) and {} where not ({}); {:.0} % \
         of that wait passed in such steps; {chunked}",
        Nanos(beside),
        long.from_tokens,
        long.beside,
        Nanos(alone),
        long.alone,
        long.share_in_long_steps * 100.0
    ))
}

fn saturated(_: &ServeReport, point: &Point, result: &ServeResult) -> Option<String> {
    if result.validity != Validity::Saturated || point.offered == Offered::AtOnce {
        return None;
    }
    let running = result.mean_running;
    let full = match &point.scheduler {
        _ if running <= 0.0 => {
            "no step ended while they came, so that this point says nothing of the engine's speed".to_owned()
        }
        Some(scheduler) if running >= FULL_BATCH * scheduler.max_num_seqs as f64 => {
            format!("the batch is full: {running:.1} of {} sequences ran", scheduler.max_num_seqs)
        }
        Some(scheduler) => {
            format!(
                "{running:.1} of {} sequences ran: the engine's own speed is the limit",
                scheduler.max_num_seqs
            )
        }
        None => format!("{running:.1} sequences gave tokens at a time on average"),
    };
    let offered = result
        .offered_per_s
        .map_or_else(String::new, |rate| format!("{rate:.3} per second were offered and "));
    Some(format!(
        "{offered}{:.3} per second served, {:.1} waited on average; {full}",
        result.served_per_s,
        result.mean_waiting.max(0.0)
    ))
}

/// A point that keeps up: with most of the TTFT in the queue, or with little.
fn queueing(point: &Point, result: &ServeResult, mostly: bool) -> Option<String> {
    if point.keeps_up() != Some(true) {
        return None;
    }
    let wait = value(result.queue_ns.as_ref()?.p50)?;
    let ttft = value(result.ttft_ns.as_ref()?.p50).filter(|ttft| *ttft > 0.0)?;
    ((wait / ttft >= MOSTLY_WAITING) == mostly).then(|| {
        format!(
            "of a TTFT p50 of {} {} are spent in the queue; {:.1} requests ran and {:.1} waited on average",
            Nanos(ttft),
            Nanos(wait),
            result.mean_running,
            result.mean_waiting
        )
    })
}

fn too_few(result: &ServeResult) -> Option<String> {
    let needed = stats::needed(P99);
    (result.measured < needed && believable(result))
        .then(|| format!("measured: {}; a p99 needs {needed}", counted(result.measured, "request")))
}

/// Why it is open whether the system keeps up, where it is.
fn undecided(point: &Point, result: &ServeResult) -> Option<String> {
    let judged = result.validity != Validity::Valid || point.keeps_up().is_some();
    let open = || {
        gate(result, GateName::KeepsUp).map_or_else(
            || format!("{}, and no trend of the queue was judged", counted(result.measured, "request")),
            |gate| gate.detail.clone(),
        )
    };
    (!judged && point.offered != Offered::AtOnce).then(open)
}

fn early_end(result: &ServeResult) -> Option<String> {
    let evidence = result.evidence.as_ref().filter(|_| believable(result))?;
    let (made, planned) = (evidence.output_tokens, evidence.planned_output_tokens);
    (planned > 0 && (made as f64) < AS_PLANNED * planned as f64).then(|| {
        format!(
            "{made} output tokens were made of {planned} planned, {:.0} %",
            made as f64 / planned as f64 * 100.0
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples::{self, ends, says};

    /// What is unexplained, in a line a point.
    fn unexplained(report: &ServeReport) -> Option<Finding> {
        explain_serving(report, None).into_iter().find(|finding| finding.rule == UNEXPLAINED)
    }

    #[test]
    fn every_rule_says_what_to_do_itself() {
        for rule in RULES {
            assert!(!rule.response.contains("evidence") && rule.response.len() > 15, "{}", rule.name);
        }
    }

    #[test]
    fn an_unexplained_point_says_what_stands_between_it_and_a_rule() {
        let mut short = samples::single();
        // Nothing but the queue is to be read from it.
        short.points[0].ideal_hit_rate = None;
        let result = short.points[0].result.as_mut().unwrap();
        result.evidence = None;
        let steps = &mut result.breakdown;
        (steps.enqueue_ns, steps.schedule_ns, steps.build_ns) = (0.0, 0.0, 0.0);
        (steps.launch_ns, steps.sample_ns, steps.detokenize_ns) = (0.0, 0.0, 0.0);
        let found = unexplained(&short).unwrap();
        says(&found, "is open while the run is too short to tell");

        let mut hidden = short.clone();
        samples::keeps_up(&mut hidden.points[0], Some(true));
        assert!(unexplained(&hidden).is_none(), "a server that shows its queue keeps up or queues");
        let result = hidden.points[0].result.as_mut().unwrap();
        result.queue_ns = None;
        // Of a busy second 190 ms are the host's.
        let steps = &mut result.breakdown;
        (steps.idle_ns, steps.build_ns) = (steps.wall_ns - 1e9, 190e6);
        let found = unexplained(&hidden).unwrap();
        says(&found, "does not show how long requests queue");
        ends(&found, "host-bound, share of the busy time, from 20.0 %; here 19.0 %, missed by 1.0 points");
    }

    #[test]
    fn masks_of_grammars_and_records_are_the_hosts_work() {
        let host = |change: &dyn Fn(&mut hbmark_core::result::serving::Breakdown)| {
            let mut report = samples::single();
            change(&mut report.points[0].result.as_mut().unwrap().breakdown);
            evidence(&report, "host_bound_step").map(|found| found[0].clone())
        };
        assert_eq!(host(&|_| ()), None);
        let masked = host(&|b| (b.idle_ns, b.mask_ns) = (b.wall_ns - 1e9, 5e8)).unwrap();
        assert!(masked.contains("of the busy time 50 % is the host's, mask 50 %"), "{masked}");
        let applied = host(&|b| (b.idle_ns, b.mask_apply_ns) = (b.wall_ns - 1e9, 5e8)).unwrap();
        assert!(applied.contains("mask apply 50 %"), "{applied}");
        let kept = |b: &mut hbmark_core::result::serving::Breakdown| {
            (b.idle_ns, b.other_ns) = (b.wall_ns - 1e9, 5e8);
        };
        assert!(host(&kept).unwrap().contains("other 50 %"));
        // Of a live server no step is seen, and all of the time is the rest.
        assert_eq!(host(&|b| (kept(b), b.steps = 0).0), None);
    }

    fn evidence(report: &ServeReport, rule: &str) -> Option<Vec<String>> {
        let found = explain_serving(report, None).into_iter().find(|finding| finding.rule == rule);
        found.map(|finding| finding.evidence)
    }

    /// A sweep whose points keep up, do not, or leave it open.
    fn swept(rates: &[(f64, Option<bool>)]) -> ServeReport {
        let mut report = samples::sweep();
        let any = report.points.iter().find(|point| point.result.is_some()).unwrap().clone();
        let at = |(rate, passed): &(f64, Option<bool>)| {
            let mut point =
                Point { offered: Offered::Rate(*rate), label: format!("rate {rate}"), ..any.clone() };
            samples::keeps_up(&mut point, *passed);
            point
        };
        report.points = rates.iter().map(at).collect();
        report
    }

    #[test]
    fn a_rate_at_which_it_is_open_is_not_the_last_that_kept_up() {
        let first = |rates: &[(f64, Option<bool>)]| evidence(&swept(rates), SATURATION).unwrap().remove(0);
        let (yes, no, open) = (Some(true), Some(false), None);
        let mixed =
            first(&[(20.0, yes), (30.0, yes), (93.358, open), (40.0, open), (103.6, no), (120.0, open)]);
        assert!(
            mixed.starts_with(
                "the last rate that kept up is 30.000 per second, the first that did not 103.600"
            ),
            "{mixed}"
        );
        assert!(mixed.ends_with("; undetermined at 2 rates from 40.000 to 93.358"), "{mixed}");
        let none = first(&[(93.358, open), (103.6, no)]);
        assert!(none.starts_with("no rate below 103.600 per second was shown to keep up"), "{none}");
        assert!(none.ends_with("; undetermined at 93.358"), "{none}");
        let mut matrix = swept(&[(105.0, yes), (326.0, no)]);
        matrix.matrix = samples::matrix();
        let rows = evidence(&matrix, SATURATION).unwrap();
        assert!(!rows.iter().any(|row| row.contains("the last rate")), "{rows:?}");
    }

    #[test]
    fn a_point_whose_queue_was_not_judged_is_not_said_to_keep_up() {
        let mut report = swept(&[(20.0, None)]);
        let regimes = |report: &ServeReport| {
            [
                evidence(report, "queueing").is_some(),
                evidence(report, "keeps_up").is_some(),
                evidence(report, "not_judged").is_some(),
            ]
        };
        assert_eq!(regimes(&report), [false, false, true]);
        // Nor where a file of before kept no gate of so few requests.
        let result = report.points[0].result.as_mut().unwrap();
        result.gates.retain(|gate| gate.name != GateName::KeepsUp);
        result.measured = 60;
        assert_eq!(regimes(&report), [false, false, true]);
        assert!(
            evidence(&report, "not_judged").unwrap()[0]
                .ends_with("60 requests, and no trend of the queue was judged")
        );
        let judged = swept(&[(20.0, Some(true))]);
        assert!(!regimes(&judged)[2]);
        assert!(regimes(&judged)[..2].contains(&true));
    }

    #[test]
    fn prompts_that_an_earlier_run_left_in_the_cache_are_named() {
        let mut report = samples::single();
        let point = &mut report.points[0];
        point.ideal_hit_rate = Some(0.1);
        point.live = Some(LiveResult { cached_share: Some(0.3), ..samples::live() });
        assert_eq!(evidence(&report, "cached_before"), None);
        report.points[0].live.as_mut().unwrap().cached_share = Some(0.85);
        let found = evidence(&report, "cached_before").unwrap();
        let says = "85.0 % of the prompt tokens were found in the cache, and these requests share 10.0 %";
        assert!(found[0].ends_with(says), "{found:?}");
        let text = crate::output::render(&report, crate::output::Format::Md, false).unwrap();
        assert!(text.contains("cached before: 85.0 %"), "{text}");
        // Where the plan shares as much there is no doubt.
        report.points[0].ideal_hit_rate = Some(0.8);
        assert_eq!(evidence(&report, "cached_before"), None);
    }

    #[test]
    fn a_live_server_is_not_told_to_verify_an_engine() {
        let mut report = samples::single();
        let result = report.points[0].result.as_mut().unwrap();
        result.gate(GateName::TokenCount, Some(false), "2 of 100 requests".to_owned());
        let next = |report: &ServeReport| {
            let found = explain_serving(report, None);
            found.into_iter().find(|finding| finding.rule == "wrong_token_count").unwrap().next
        };
        assert_eq!(next(&report), "hbmark verify");
        report.server = Some(samples::server());
        assert!(next(&report).starts_with("one request by hand"), "{}", next(&report));
    }

    #[test]
    fn a_machine_whose_speed_changed_disturbs_a_point_as_other_work_does() {
        let mut report = swept(&[(20.0, Some(true))]);
        assert_eq!(evidence(&report, "foreign_load"), None);
        report.points[0].drift = Some(0.403);
        let found = evidence(&report, "foreign_load").unwrap();
        assert!(found[0].ends_with("took 59.7 % less time after the run than before it"), "{found:?}");
        report.points[0].drift = None;
        report.points[0].result.as_mut().unwrap().foreign_cores = Some(1.5);
        let found = evidence(&report, "foreign_load").unwrap();
        assert!(found[0].ends_with("other processes kept 1.5 cores busy over the run"), "{found:?}");
    }
}
