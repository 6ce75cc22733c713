//! How many instances a rate needs, what they cost, and what would break first.
//!
//! Enters: a serving result that tried several rates, and a [`Question`]. Leaves: a [`Capacity`], in which every number has its formula and
//! inputs beside it, or an error that names what the result lacks. Pure: it measures nothing, and prices are given.
//!
//! The rate of one instance is the highest that was shown to hold (every objective met, and the system keeps up) with no lower rate failing. It
//! is never extrapolated beyond what was run.

mod arithmetic;
mod rates;

use arithmetic::{CapacityArithmetic, cost, instances, kv_memory, one_instance};
use rates::{Accepted, ObservedPercentile, Rates, objectives, observed, rates};
use serde::{Deserialize, Serialize};

use super::words::counted;
use hbmark_core::result::serving::{GateName, ServeKind, ServeReport, ServeResult, Slo};
use hbmark_core::units::{Nanos, whole_count};

/// Below so many requests a point decides about little.
const FEW_REQUESTS: usize = 1000;
/// A bracket between the rate that held and the first that did not is called wide from this factor on.
const WIDE_BRACKET: f64 = 1.2;
const SECONDS_PER_HOUR: f64 = 3600.0;

/// What things cost.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Prices {
    /// Currency symbol.
    pub currency: String,
    /// Of one GPU (or machine) for an hour.
    pub gpu_hour: f64,
    /// What a million tokens are sold for.
    pub input_per_million: Option<f64>,
    pub output_per_million: Option<f64>,
}

/// What is to be carried.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Question {
    /// Peak requests per second.
    pub target_rate: f64,
    /// Requests per second over the time that is paid for; the target where nothing else is given.
    pub mean_rate: Option<f64>,
    /// `None`: the objectives that the result was run with.
    pub slo: Option<Slo>,
    /// Share of an instance's rate that stays free.
    pub headroom: f64,
    pub gpus_per_instance: u64,
    pub prices: Option<Prices>,
    /// Positions of a sequence, for the KV memory.
    pub context: Option<u64>,
    /// Sequences at once in an instance.
    pub concurrency: Option<u64>,
}

/// A part of the arithmetic.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum CapacityPart {
    #[serde(rename = "one instance")]
    OneInstance,
    #[serde(rename = "instances")]
    Instances,
    #[serde(rename = "cost")]
    Cost,
    #[serde(rename = "KV memory")]
    KvMemory,
}

impl CapacityPart {
    /// As it is printed and saved.
    pub fn name(self) -> &'static str {
        match self {
            Self::OneInstance => "one instance",
            Self::Instances => "instances",
            Self::Cost => "cost",
            Self::KvMemory => "KV memory",
        }
    }
}

/// One line of the arithmetic.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ArithmeticLine {
    pub part: CapacityPart,
    pub what: String,
    pub formula: String,
    /// The formula with its values in it.
    pub values: String,
    /// With its unit.
    pub result: String,
    pub value: f64,
}

/// One rate and what became of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TriedRate {
    pub rate: f64,
    /// Runs at it, each with a seed of its own, and how many of them held.
    pub runs: usize,
    pub runs_held: usize,
    /// Null where no run failed and one could not tell.
    pub held: Option<bool>,
    pub why: String,
}

/// How near a limit the accepted point is.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LimitUsage {
    pub what: String,
    /// Of one; above one it is broken.
    pub used: f64,
    pub detail: String,
}

/// The plan.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Capacity {
    pub model: String,
    pub machine: String,
    /// Whether times were computed and nothing was measured.
    pub predicted: bool,
    pub question: Question,
    pub objectives: Vec<String>,
    /// The rate that was asked for at the accepted point; `rate_per_instance` is what came of it.
    pub accepted_rate: f64,
    pub rate_per_instance: f64,
    pub instances: u64,
    pub gpus: u64,
    /// Per hour, where prices are known.
    pub cost_per_hour: Option<f64>,
    pub cost_per_million_input_tokens: Option<f64>,
    pub cost_per_million_output_tokens: Option<f64>,
    pub cost_per_accepted_request: Option<f64>,
    /// Share of the KV pool that stays free at the context and concurrency of the question; negative where it does not fit.
    pub kv_headroom: Option<f64>,
    pub lines: Vec<ArithmeticLine>,
    pub tried: Vec<TriedRate>,
    pub breaks_first: String,
    /// The nearest first.
    pub nearness: Vec<LimitUsage>,
    pub assumptions: Vec<String>,
    /// What limits trust in all of it.
    pub caveats: Vec<String>,
}

/// Why a result cannot carry the question.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum CapacityError {
    #[error("a cold start serves no traffic: ask a result of `hbmark serve sweep rate=... --slo ...`")]
    ColdStart,
    #[error(
        "the rows of the matrix are different workloads, so no rate of theirs is a capacity: run `hbmark serve sweep rate=... --slo ...`"
    )]
    Matrix,
    #[error("the result sweeps {variable}, not the load: run `hbmark serve sweep rate=... --slo ...`")]
    OtherSweep { variable: String },
    #[error(
        "no point of the result has an open-loop rate: a closed loop, or all requests at once, hides how long independent users wait; run `hbmark serve sweep rate=... --slo ...`"
    )]
    NoRate,
    #[error(
        "no objectives: the result was run without --slo, so say them here (--slo ttft_p95=1s,tpot_p95=40ms)"
    )]
    NoObjectives,
    #[error(
        "{clause}: a saved result keeps p50, p75, p90, p95, p99 and p99.9 and the objectives it was run with; ask for one of those, or run again with this --slo"
    )]
    UnknownPercentile { clause: String },
    #[error("no rate that was tried is shown to meet the objectives:\n  {}", reasons.join("\n  "))]
    NothingHolds { reasons: Vec<String> },
}

/// Answers the question.
///
/// # Errors
/// [`CapacityError`] when the result cannot carry it.
pub fn capacity(report: &ServeReport, question: &Question) -> Result<Capacity, CapacityError> {
    let slo = objectives(report, question)?;
    let rates = rates(report, &slo)?;
    let accepted = rates.accepted()?;
    let mut sums = CapacityArithmetic { lines: Vec::new(), part: CapacityPart::OneInstance };
    let rate = one_instance(&mut sums, question, &accepted, rates.search.is_some());
    let noun = noun(report);
    let (instances, gpus) = instances(&mut sums, question, rate, noun);
    let cost = cost(&mut sums, question, &accepted, gpus, noun);
    let kv_headroom = kv_memory(&mut sums, report, question, &accepted);
    let nearness = nearness(&accepted, &slo);
    let next = rates.groups.iter().find(|g| g.tried.rate > accepted.rate && g.tried.held != Some(true));
    let breaks_first = match (next, nearness.first()) {
        (Some(next), _) => {
            let open = if next.tried.held.is_none() { "undetermined: " } else { "" };
            format!("at {}/s, the next rate tried: {open}{}", number(next.tried.rate), next.tried.why)
        }
        (None, Some(near)) => format!(
            "no rate above {}/s was tried and failed; nearest to its limit is {} ({})",
            number(accepted.rate),
            near.what,
            near.detail
        ),
        (None, None) => "nothing that was tried broke".to_owned(),
    };
    Ok(Capacity {
        model: report.model_name().to_owned(),
        machine: machine(report),
        predicted: report.kind == ServeKind::ServeVirtual,
        question: question.clone(),
        objectives: slo.clauses.iter().map(ToString::to_string).collect(),
        accepted_rate: accepted.rate,
        rate_per_instance: rate,
        instances,
        gpus,
        cost_per_hour: cost.per_hour,
        cost_per_million_input_tokens: cost.input,
        cost_per_million_output_tokens: cost.output,
        cost_per_accepted_request: cost.request,
        kv_headroom,
        lines: sums.lines,
        tried: rates.groups.iter().map(|g| g.tried.clone()).collect(),
        breaks_first,
        nearness,
        assumptions: assumptions(question, &accepted),
        caveats: caveats(report, question, &rates, &accepted),
    })
}

fn nearness(accepted: &Accepted<'_>, slo: &Slo) -> Vec<LimitUsage> {
    let (point, result) = accepted.longest();
    let mut near: Vec<LimitUsage> = slo
        .clauses
        .iter()
        .filter_map(|clause| {
            let ObservedPercentile::Value(value) = observed(result, clause) else { return None };
            let detail = format!("{} of {}", Nanos(value), Nanos(clause.limit_ns));
            Some(LimitUsage { what: clause.to_string(), used: value / clause.limit_ns, detail })
        })
        .collect();
    // Of a live server neither is known.
    let Some(scheduler) = &point.scheduler else {
        near.sort_by(|a, b| b.used.total_cmp(&a.used));
        return near;
    };
    near.push(LimitUsage {
        what: "KV blocks".into(),
        used: result.max_kv_use,
        detail: format!(
            "at most {} of the pool in use, {} preemptions",
            percent(result.max_kv_use),
            result.preemptions
        ),
    });
    let seats = scheduler.max_num_seqs.max(1) as f64;
    near.push(LimitUsage {
        what: "sequences at once".into(),
        used: result.mean_running / seats,
        detail: format!("{} of {seats} on average", number(result.mean_running)),
    });
    near.sort_by(|a, b| b.used.total_cmp(&a.used));
    near
}

fn assumptions(question: &Question, accepted: &Accepted<'_>) -> Vec<String> {
    let (point, result) = accepted.longest();
    let mut all = vec![
        format!(
            "requests like those that were run: prompts of {} and outputs of {} tokens on average",
            number(point.prompt_tokens()),
            number(point.output_tokens())
        ),
        "the balancer spreads requests evenly, and instances do not disturb each other: n of them carry n times the rate of one".into(),
    ];
    let live = point.live.as_ref();
    let counted = live.and_then(|live| live.server.as_ref()?.prefix_hit_rate.or(live.cached_share));
    match result.prefix_hit_rate.or(counted) {
        Some(hits) if hits >= 0.001 => all.push(format!(
            "prefix cache: {} of the prompt tokens are found, as in the run; several instances each have a cache of their own, and a \
             balancer that does not send a prefix where it is kept finds fewer",
            percent(hits)
        )),
        None if live.is_some() => all.push(
            "prefix cache: this server does not show what its cache finds; several instances each have a cache of their own".into(),
        ),
        _ => all.push("prefix cache: nothing is found, as in the run".into()),
    }
    if question.prices.is_some() {
        all.push(match question.mean_rate {
            Some(mean) => format!(
                "utilisation: every instance is paid for all the time and {} requests/s come on average, {} of the target",
                number(mean),
                percent(mean / question.target_rate)
            ),
            None => "utilisation: the target rate lasts as long as is paid for; at half of it on average (--mean-rate) everything costs \
                     twice as much"
                .into(),
        });
        all.push(
            "nothing but the price of the hours is in the cost: no network, storage, spares or people".into(),
        );
    }
    all
}

fn caveats(
    report: &ServeReport,
    question: &Question,
    rates: &Rates<'_>,
    accepted: &Accepted<'_>,
) -> Vec<String> {
    let mut all = Vec::new();
    let (point, result) = accepted.longest();
    if report.kind == ServeKind::ServeVirtual {
        all.push(format!(
            "PREDICTED: nothing was measured; step times are {}",
            report.step_model.as_deref().unwrap_or("computed")
        ));
    }
    if rates.search.is_none() && accepted.runs.len() == 1 {
        all.push(
            "a single run decided: percentiles of one queue are correlated, and other seeds may differ; \
             `hbmark serve search` asks fresh ones"
                .into(),
        );
    }
    if result.measured < FEW_REQUESTS {
        all.push(format!(
            "measured: {}; {FEW_REQUESTS} and more say something of the tail",
            counted(result.measured, "request")
        ));
    }
    let undecided =
        |r: &ServeResult| r.gates.iter().any(|g| g.name == GateName::KeepsUp && g.passed.is_none());
    if accepted.runs.iter().any(|(_, r)| undecided(r))
        || result.measured < hbmark_core::result::serving::MIN_REQUESTS
    {
        all.push("whether it keeps up at that rate was not decided: the run was too short".into());
    }
    let higher = || rates.groups.iter().filter(|g| g.tried.rate > accepted.rate);
    let failed = higher().find(|g| g.tried.held == Some(false)).map_or(f64::INFINITY, |g| g.tried.rate);
    if let Some(open) = higher().rfind(|g| g.tried.held.is_none() && g.tried.rate < failed) {
        all.push(format!(
            "whether higher rates hold, up to {}/s, was not decided: with longer runs (more --requests, or none) an instance may carry more",
            number(open.tried.rate)
        ));
    }
    match higher().next() {
        None => all.push(format!(
            "the highest rate tried, {}/s, held: an instance may carry more, so these counts are upper bounds",
            number(accepted.rate)
        )),
        Some(next) if next.tried.rate / accepted.rate > WIDE_BRACKET && rates.search.is_none() => all.push(format!(
            "between {}/s, which held, and {}/s, which was not shown to, nothing was tried: finer steps may need fewer instances",
            number(accepted.rate),
            number(next.tried.rate)
        )),
        Some(_) => {}
    }
    let odd = higher().find(|g| g.tried.held == Some(true));
    if let Some(odd) = odd.filter(|_| rates.search.is_none()) {
        all.push(format!(
            "{}/s held although a lower rate did not: chance decides between them, and the lower one is taken",
            number(odd.tried.rate)
        ));
    }
    if question.headroom == 0.0 {
        all.push(
            "no headroom: one instance that fails or restarts, or one burst, breaks the objectives".into(),
        );
    }
    let context = point.scheduler.as_ref().map(|scheduler| scheduler.max_model_len);
    let context = context.or_else(|| report.server.as_ref()?.max_model_len);
    if let Some(most) = context.filter(|most| question.context.is_some_and(|c| c > *most as u64)) {
        all.push(format!("the instance takes contexts of at most {most} positions"));
    }
    let scheduler = point.scheduler.as_ref();
    if let Some(scheduler) =
        scheduler.filter(|k| question.concurrency.is_some_and(|c| c > k.max_num_seqs as u64))
    {
        all.push(format!(
            "the instance runs at most {} at once; the others wait",
            counted(scheduler.max_num_seqs, "sequence")
        ));
    }
    all.extend(report.warnings.iter().cloned());
    all
}

/// What is counted: GPUs, or machines where no GPU was run or computed.
fn noun(report: &ServeReport) -> &'static str {
    let has_gpu = report.datasheet.is_some() || (report.server.is_none() && report.environment.gpu.is_some());
    if has_gpu { "GPUs" } else { "machines" }
}

fn machine(report: &ServeReport) -> String {
    let cpu = || report.environment.cpu.model.clone();
    let gpu = || report.environment.gpu.as_ref().and_then(|g| g.name.clone());
    match (&report.datasheet, &report.server) {
        (Some(sheet), _) => sheet.product.clone(),
        // This machine is the client's.
        (None, Some(server)) => format!("the machine of {}", server.url),
        (None, None) => gpu().or_else(cpu).unwrap_or_else(|| "an unnamed machine".into()),
    }
}

/// A number as short as four digits allow.
pub fn number(value: f64) -> String {
    let size = value.abs();
    let decimals = match size {
        _ if (value - value.round()).abs() < 1e-9 * size.max(1.0) => 0,
        s if s >= 1000.0 => 0,
        s if s >= 100.0 => 1,
        s if s >= 10.0 => 2,
        s if s >= 0.1 => 3,
        _ => 5,
    };
    format!("{value:.decimals$}")
}

fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

/// An amount with cents, or with three digits where it is less than a unit.
fn money(currency: &str, value: f64) -> String {
    let decimals = match value.abs() {
        s if s >= 1.0 || s == 0.0 => 2,
        s => whole_count((-s.log10()).ceil().clamp(0.0, 12.0)) + 2,
    };
    format!("{currency}{value:.decimals$}")
}

#[cfg(test)]
mod tests;
