//! How many instances a rate needs, what they cost, and what would break first.
//!
//! Enters: a serving result that tried several rates, and a [`Question`]. Leaves: a [`Capacity`], in which every number stands beside its
//! formula and the values put into it, or a refusal that says what the result lacks. Pure: it measures nothing and knows no prices but
//! those it is told.
//!
//! The rate of one instance is the highest at which every objective held, with every lower rate that was tried holding, too. It is never
//! extrapolated beyond what was run.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::model::Dtype;
use crate::report::serving::{ServeKind, ServeReport};
use crate::roofline::Ledger;
use crate::serve::latency::{KEEPS_UP, Quantiles, Quantity, ServeResult, Validity};
use crate::serve::point::{Offered, Point};
use crate::serve::search::Search;
use crate::serve::slo::{Clause, Slo, SloMetric};
use crate::units::{Bytes, Nanos};

/// Below so many requests a point decides about little.
const FEW_REQUESTS: usize = 1000;
/// A bracket between the rate that held and the first that did not is called wide from this factor on.
const WIDE_BRACKET: f64 = 1.2;
const SECONDS_PER_HOUR: f64 = 3600.0;

/// What things cost.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Prices {
    /// In front of every amount.
    pub currency: String,
    /// Of one GPU (or machine) for an hour.
    pub gpu_hour: f64,
    /// What a million tokens are sold for.
    pub input_per_million: Option<f64>,
    pub output_per_million: Option<f64>,
}

/// What is to be carried.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Question {
    /// Requests per second at the busiest.
    pub target_rate: f64,
    /// Requests per second over the time that is paid for; the target where nothing else is said.
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

/// One line of the arithmetic.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Line {
    /// `one instance`, `instances`, `cost`, `KV memory`.
    pub part: String,
    pub what: String,
    pub formula: String,
    /// The formula with its values in it.
    pub values: String,
    /// With its unit.
    pub result: String,
    pub value: f64,
}

/// One rate and what became of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Tried {
    pub rate: f64,
    /// Runs at it, each with a seed of its own.
    pub runs: usize,
    pub held: bool,
    pub why: String,
}

/// How near a limit the accepted point is.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Nearness {
    pub what: String,
    /// Of one; above one it is broken.
    pub used: f64,
    pub detail: String,
}

/// The answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Capacity {
    pub model: String,
    pub machine: String,
    /// Whether times were computed and nothing was measured.
    pub predicted: bool,
    pub question: Question,
    pub objectives: Vec<String>,
    pub rate_per_instance: f64,
    pub instances: u64,
    pub gpus: u64,
    /// Per hour, where prices are known.
    pub cost_per_hour: Option<f64>,
    pub cost_per_million_input_tokens: Option<f64>,
    pub cost_per_million_output_tokens: Option<f64>,
    pub cost_per_accepted_request: Option<f64>,
    /// Share of the KV pool that stays free at the context and concurrency asked for; negative where it does not fit.
    pub kv_headroom: f64,
    pub lines: Vec<Line>,
    pub tried: Vec<Tried>,
    pub breaks_first: String,
    /// The nearest first.
    pub nearness: Vec<Nearness>,
    pub assumptions: Vec<String>,
    /// What limits trust in all of it.
    pub caveats: Vec<String>,
}

/// Why a result cannot carry the question.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum CapacityError {
    #[error("a cold start serves no traffic: ask a result of `hbmark serve --sweep rate=... --slo ...`")]
    ColdStart,
    #[error(
        "the rows of the matrix are different workloads, so no rate of theirs is a capacity: run `hbmark serve --sweep rate=... --slo ...`"
    )]
    Matrix,
    #[error("the result sweeps {variable}, not the load: run `hbmark serve --sweep rate=... --slo ...`")]
    OtherSweep { variable: String },
    #[error(
        "no point of the result has an open-loop rate: a closed loop, or all requests at once, hides how long independent users wait; run `hbmark serve --sweep rate=... --slo ...`"
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
    #[error("no rate that was tried meets the objectives: {}", reasons.join("; "))]
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
    let mut sums = Sums { lines: Vec::new(), part: "" };
    let rate = one_instance(&mut sums, question, &accepted);
    let noun = noun(report);
    let (instances, gpus) = instances(&mut sums, question, rate, noun);
    let cost = cost(&mut sums, question, &accepted, gpus, noun);
    let kv_headroom = kv_memory(&mut sums, report, question, &accepted);
    let nearness = nearness(&accepted, &slo);
    let next = rates.groups.iter().find(|g| g.tried.rate > accepted.rate && !g.tried.held);
    let breaks_first = match (next, nearness.first()) {
        (Some(next), _) => {
            format!("at {}/s, the next rate tried: {}", number(next.tried.rate), next.tried.why)
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
        model: report.model.name.clone(),
        machine: machine(report),
        predicted: report.kind == ServeKind::ServeVirtual,
        question: question.clone(),
        objectives: slo.clauses.iter().map(ToString::to_string).collect(),
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

fn objectives(report: &ServeReport, question: &Question) -> Result<Slo, CapacityError> {
    if report.cold_start.is_some() {
        return Err(CapacityError::ColdStart);
    }
    if !report.matrix.is_empty() {
        return Err(CapacityError::Matrix);
    }
    if let Some(variable) = report.swept.as_ref().filter(|v| *v != "rate") {
        return Err(CapacityError::OtherSweep { variable: variable.clone() });
    }
    let asked = question.slo.clone().filter(|slo| !slo.clauses.is_empty());
    let slo = asked.unwrap_or_else(|| {
        let first = report.points.iter().find_map(|p| p.result.as_ref());
        Slo { clauses: first.map(|r| r.slo.iter().map(|c| c.clause).collect()).unwrap_or_default() }
    });
    if slo.clauses.is_empty() {
        return Err(CapacityError::NoObjectives);
    }
    Ok(slo)
}

/// What a result has of the percentile of a clause.
enum Seen {
    Value(f64),
    /// The sample cannot carry it.
    TooFew,
    /// It was neither judged nor kept.
    NotKept,
}

impl From<Option<Quantity>> for Seen {
    fn from(quantity: Option<Quantity>) -> Self {
        quantity.map_or(Self::TooFew, |q| Self::Value(q.value()))
    }
}

/// A percentile, of one, and where a result keeps it.
type Level = (f64, fn(&Quantiles) -> Option<Quantity>);

fn observed(result: &ServeResult, clause: &Clause) -> Seen {
    let near = |p: f64| (p - clause.percentile).abs() < 1e-9;
    let judged = result.slo.iter().find(|c| c.clause.metric == clause.metric && near(c.clause.percentile));
    if let Some(judged) = judged {
        return judged.observed.into();
    }
    let quantiles = match clause.metric {
        SloMetric::Ttft => &result.ttft_ns,
        SloMetric::Tpot => &result.tpot_ns,
        SloMetric::E2e => &result.e2e_ns,
        SloMetric::Queue => &result.queue_ns,
    };
    let kept: [Level; 6] = [
        (0.5, |q| q.p50),
        (0.75, |q| q.p75),
        (0.9, |q| q.p90),
        (0.95, |q| q.p95),
        (0.99, |q| q.p99),
        (0.999, |q| q.p99_9),
    ];
    let known = kept.into_iter().find(|(p, _)| near(*p));
    known.map_or(Seen::NotKept, |(_, of)| quantiles.as_ref().and_then(of).into())
}

/// Whether a run met the objectives, and what decided.
fn judge(result: &ServeResult, slo: &Slo) -> Result<(bool, String), CapacityError> {
    match result.validity {
        Validity::Saturated => return Ok((false, format!("saturated: {}", result.reasons.join("; ")))),
        Validity::Invalid => return Ok((false, format!("invalid: {}", result.reasons.join("; ")))),
        Validity::Valid => {}
    }
    for clause in &slo.clauses {
        match observed(result, clause) {
            Seen::NotKept => return Err(CapacityError::UnknownPercentile { clause: clause.to_string() }),
            Seen::Value(value) if value <= clause.limit_ns => {}
            Seen::Value(value) if value.is_infinite() => {
                return Ok((
                    false,
                    format!("{clause}: infinite, requests that never finished are among them"),
                ));
            }
            Seen::Value(value) => return Ok((false, format!("{clause}: {}", Nanos(value)))),
            Seen::TooFew => {
                let few = format!("{clause}: {} requests are too few for that percentile", result.measured);
                return Ok((false, few));
            }
        }
    }
    Ok((true, "every objective was met".to_owned()))
}

/// The runs at one rate.
struct Group<'a> {
    tried: Tried,
    runs: Vec<(&'a Point, &'a ServeResult)>,
}

struct Rates<'a> {
    /// Ascending.
    groups: Vec<Group<'a>>,
    /// What a search confirmed with fresh seeds under the same objectives.
    confirmed: Option<f64>,
    /// The lowest rate of which nothing is known, and why.
    unknown: Option<(f64, String)>,
}

/// The runs of the rate that is accepted.
struct Accepted<'a> {
    rate: f64,
    runs: Vec<(&'a Point, &'a ServeResult)>,
}

fn rates<'a>(report: &'a ServeReport, slo: &Slo) -> Result<Rates<'a>, CapacityError> {
    let mut groups: Vec<Group<'a>> = Vec::new();
    // Of twins the warm one is the service; the cold one says what it would be without its cache.
    let warm = report.points.iter().filter(|p| !p.cold);
    for point in warm {
        let (Offered::Rate(rate), Some(result)) = (point.offered, &point.result) else { continue };
        let (held, why) = judge(result, slo)?;
        let same = |g: &&mut Group<'_>| (g.tried.rate / rate - 1.0).abs() < 1e-9;
        match groups.iter_mut().find(same) {
            Some(group) => {
                group.tried.runs += 1;
                if group.tried.held && !held {
                    (group.tried.held, group.tried.why) = (false, why);
                }
                group.runs.push((point, result));
            }
            None => {
                groups.push(Group { tried: Tried { rate, runs: 1, held, why }, runs: vec![(point, result)] });
            }
        }
    }
    if groups.is_empty() {
        return Err(CapacityError::NoRate);
    }
    groups.sort_by(|a, b| a.tried.rate.total_cmp(&b.tried.rate));
    let same = |search: &&Search| search.slo == *slo && search.confirmed;
    let confirmed = report.search.as_ref().filter(same).and_then(|s| s.max_rate);
    if let Some(rate) = confirmed {
        // Fresh seeds were asked there; a single run of the bracket or the bisection no longer decides.
        for group in groups.iter_mut().filter(|g| g.tried.rate <= rate * (1.0 + 1e-9)) {
            if !group.tried.held {
                group.tried.held = true;
                group.tried.why =
                    format!("one run did not ({}); the search confirmed a higher rate", group.tried.why);
            }
        }
    }
    let tried = |rate: f64| groups.iter().any(|g| (g.tried.rate / rate - 1.0).abs() < 1e-9);
    let unknown = report.points.iter().filter_map(|point| match (point.offered, &point.not_run) {
        (Offered::Rate(rate), Some(reason)) if !point.cold && !tried(rate) => Some((rate, reason.clone())),
        _ => None,
    });
    let unknown = unknown.min_by(|a, b| a.0.total_cmp(&b.0));
    Ok(Rates { groups, confirmed, unknown })
}

impl<'a> Rates<'a> {
    /// The highest rate that held, as did every lower one.
    fn accepted(&self) -> Result<Accepted<'a>, CapacityError> {
        let known = |rate: f64| self.unknown.as_ref().is_none_or(|(unknown, _)| rate < *unknown);
        let last = self.groups.iter().take_while(|g| g.tried.held && known(g.tried.rate)).last();
        let Some(group) = last else {
            let reasons = self.groups.iter().map(|g| format!("{}/s {}", number(g.tried.rate), g.tried.why));
            let unknown =
                self.unknown.iter().map(|(rate, why)| format!("{}/s not run: {why}", number(*rate)));
            return Err(CapacityError::NothingHolds { reasons: unknown.chain(reasons).collect() });
        };
        Ok(Accepted { rate: group.tried.rate, runs: group.runs.clone() })
    }
}

impl<'a> Accepted<'a> {
    /// The run with the most requests.
    fn longest(&self) -> (&'a Point, &'a ServeResult) {
        let longest = self.runs.iter().max_by_key(|(_, r)| r.measured);
        *longest.unwrap_or(&self.runs[0])
    }

    fn mean(&self, of: impl Fn(&ServeResult) -> Option<f64>) -> Option<f64> {
        let values: Option<Vec<f64>> = self.runs.iter().map(|(_, r)| of(r)).collect();
        values.filter(|v| !v.is_empty()).map(|v| crate::stats::mean(&v))
    }
}

/// The arithmetic as it is done.
struct Sums {
    lines: Vec<Line>,
    part: &'static str,
}

impl Sums {
    fn line(&mut self, what: &str, formula: &str, values: String, value: f64, result: String) -> f64 {
        let part = self.part.to_owned();
        self.lines.push(Line { part, what: what.into(), formula: formula.into(), values, result, value });
        value
    }
}

fn one_instance(sums: &mut Sums, question: &Question, accepted: &Accepted<'_>) -> f64 {
    sums.part = "one instance";
    let realised = accepted.mean(|r| r.offered_per_s).unwrap_or(accepted.rate);
    let rate = accepted.rate.min(realised);
    sums.line(
        "rate that held",
        "min(rate asked for, rate that came)",
        format!("min({}, {})", number(accepted.rate), number(realised)),
        rate,
        format!("{} requests/s", number(rate)),
    );
    let usable = rate * (1.0 - question.headroom);
    sums.line(
        "of it used",
        "rate × (1 − headroom)",
        format!("{} × (1 − {})", number(rate), number(question.headroom)),
        usable,
        format!("{} requests/s", number(usable)),
    );
    rate
}

/// Whole instances; a product such as 3 · 0.1 may lie a rounding error above the whole number it stands for.
fn whole(value: f64) -> u64 {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped")]
    let count = (value - 1e-9).ceil().clamp(1.0, 1e15) as u64;
    count
}

fn instances(sums: &mut Sums, question: &Question, rate: f64, noun: &str) -> (u64, u64) {
    sums.part = "instances";
    let usable = rate * (1.0 - question.headroom);
    let count = whole(question.target_rate / usable);
    sums.line(
        "instances",
        "⌈target ÷ usable rate⌉",
        format!(
            "⌈{} ÷ {}⌉ = ⌈{}⌉",
            number(question.target_rate),
            number(usable),
            number(question.target_rate / usable)
        ),
        count as f64,
        count.to_string(),
    );
    let gpus = count.saturating_mul(question.gpus_per_instance);
    sums.line(
        noun,
        "instances × per instance",
        format!("{count} × {}", question.gpus_per_instance),
        gpus as f64,
        gpus.to_string(),
    );
    let load = question.target_rate / (count as f64 * rate);
    sums.line(
        "load at the target",
        "target ÷ (instances × rate that held)",
        format!("{} ÷ ({count} × {})", number(question.target_rate), number(rate)),
        load,
        percent(load),
    );
    (count, gpus)
}

#[derive(Default)]
struct Cost {
    per_hour: Option<f64>,
    input: Option<f64>,
    output: Option<f64>,
    request: Option<f64>,
}

fn cost(sums: &mut Sums, question: &Question, accepted: &Accepted<'_>, gpus: u64, noun: &str) -> Cost {
    let Some(prices) = &question.prices else { return Cost::default() };
    sums.part = "cost";
    let money = |value: f64| money(&prices.currency, value);
    let (point, result) = accepted.longest();
    let rate = question.mean_rate.unwrap_or(question.target_rate);
    let hourly = gpus as f64 * prices.gpu_hour;
    sums.line(
        "an hour",
        &format!("{noun} × price of an hour"),
        format!("{gpus} × {}", money(prices.gpu_hour)),
        hourly,
        money(hourly),
    );
    let requests = SECONDS_PER_HOUR * rate;
    sums.line(
        "requests an hour",
        "3600 × mean rate",
        format!("3600 × {}", number(rate)),
        requests,
        number(requests),
    );
    let share = accepted_share(question, result);
    let request = hourly / (requests * share);
    sums.line(
        "an accepted request",
        "hour ÷ (requests × accepted share)",
        format!("{} ÷ ({} × {})", money(hourly), number(requests), number(share)),
        request,
        money(request),
    );
    let mut tokens = |what: &str, mean: f64| {
        let millions = requests * mean / 1e6;
        sums.line(
            &format!("{what} tokens an hour"),
            "requests × mean tokens ÷ 10⁶",
            format!("{} × {} ÷ 10⁶", number(requests), number(mean)),
            millions,
            format!("{} million", number(millions)),
        )
    };
    let (inward, outward) =
        (tokens("input", point.mean_prompt_tokens), tokens("output", point.mean_output_tokens));
    let both = hourly / (inward + outward);
    sums.line(
        "a million tokens, input and output alike",
        "hour ÷ (input + output)",
        format!("{} ÷ ({} + {})", money(hourly), number(inward), number(outward)),
        both,
        money(both),
    );
    let mut cost = Cost { per_hour: Some(hourly), request: Some(request), ..Cost::default() };
    if let (Some(buys), Some(sells)) = (prices.input_per_million, prices.output_per_million) {
        let income = inward * buys + outward * sells;
        sums.line(
            "income an hour",
            "input × its price + output × its price",
            format!("{} × {} + {} × {}", number(inward), money(buys), number(outward), money(sells)),
            income,
            money(income),
        );
        let mut split = |what: &str, price: f64| {
            let value = price * hourly / income;
            sums.line(
                &format!("a million {what} tokens, split as the prices are"),
                "price × hour ÷ income",
                format!("{} × {} ÷ {}", money(price), money(hourly), money(income)),
                value,
                money(value),
            )
        };
        (cost.input, cost.output) = (Some(split("input", buys)), Some(split("output", sells)));
        let margin = 1.0 - hourly / income;
        sums.line(
            "margin",
            "1 − hour ÷ income",
            format!("1 − {} ÷ {}", money(hourly), money(income)),
            margin,
            percent(margin),
        );
    } else {
        let mut alone = |what: &str, millions: f64| {
            let value = hourly / millions;
            sums.line(
                &format!("a million {what} tokens, if they carried it all"),
                &format!("hour ÷ {what} tokens"),
                format!("{} ÷ {}", money(hourly), number(millions)),
                value,
                money(value),
            )
        };
        (cost.input, cost.output) = (Some(alone("input", inward)), Some(alone("output", outward)));
    }
    cost
}

/// The share of requests that met every objective where that was counted under these, otherwise of those that were served.
fn accepted_share(question: &Question, result: &ServeResult) -> f64 {
    let recorded = Slo { clauses: result.slo.iter().map(|c| c.clause).collect() };
    let same = question.slo.as_ref().is_none_or(|asked| *asked == recorded);
    let counted = result.goodput_share.filter(|share| same && *share > 0.0);
    counted.unwrap_or(result.served as f64 / result.measured.max(1) as f64)
}

fn kv_memory(sums: &mut Sums, report: &ServeReport, question: &Question, accepted: &Accepted<'_>) -> f64 {
    sums.part = "KV memory";
    let (point, result) = accepted.longest();
    let knobs = &point.scheduler;
    let (blocks, size) = (knobs.num_blocks as f64, knobs.block_size as f64);
    let context = question.context.map_or(point.mean_prompt_tokens + point.mean_output_tokens, |c| c as f64);
    let concurrency = question.concurrency.map_or(result.mean_running, |c| c as f64);
    let each = (context / size - 1e-9).ceil().max(1.0);
    sums.line(
        "blocks of a sequence",
        "⌈context ÷ block⌉",
        format!("⌈{} ÷ {}⌉", number(context), number(size)),
        each,
        number(each),
    );
    let needed = each * concurrency;
    sums.line(
        "blocks needed",
        "blocks of a sequence × concurrency",
        format!("{} × {}", number(each), number(concurrency)),
        needed,
        number(needed),
    );
    let headroom = 1.0 - needed / blocks.max(1.0);
    let says = if headroom >= 0.0 {
        percent(headroom)
    } else {
        format!("{}: it does NOT fit, sequences wait or are preempted", percent(headroom))
    };
    sums.line(
        "KV headroom",
        "1 − needed ÷ pool",
        format!("1 − {} ÷ {}", number(needed), number(blocks)),
        headroom,
        says,
    );
    let fit = (blocks / each).floor();
    sums.line(
        "sequences that fit",
        "⌊pool ÷ blocks of a sequence⌋",
        format!("⌊{} ÷ {}⌋", number(blocks), number(each)),
        fit,
        number(fit),
    );
    let architecture = &report.model.architecture;
    // Quantised weights keep their KV cache in 16 bits.
    let kv = if matches!(report.dtype, Dtype::F32 | Dtype::F16) { report.dtype } else { Dtype::Bf16 };
    let position = Ledger::new(architecture, &architecture.inventory(Dtype::Bf16), kv).kv_bytes_per_token();
    let bytes = needed * size * position.as_f64();
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a positive count of bytes")]
    let shown = Bytes(bytes as u64);
    sums.line(
        "KV bytes needed",
        "blocks × positions × bytes of a position",
        format!("{} × {} × {} B ({kv})", number(needed), number(size), position.0),
        bytes,
        shown.to_string(),
    );
    headroom
}

fn nearness(accepted: &Accepted<'_>, slo: &Slo) -> Vec<Nearness> {
    let (point, result) = accepted.longest();
    let mut near: Vec<Nearness> = slo
        .clauses
        .iter()
        .filter_map(|clause| {
            let Seen::Value(value) = observed(result, clause) else { return None };
            let detail = format!("{} of {}", Nanos(value), Nanos(clause.limit_ns));
            Some(Nearness { what: clause.to_string(), used: value / clause.limit_ns, detail })
        })
        .collect();
    near.push(Nearness {
        what: "KV blocks".into(),
        used: result.max_kv_use,
        detail: format!(
            "at most {} of the pool in use, {} preemptions",
            percent(result.max_kv_use),
            result.preemptions
        ),
    });
    let seats = point.scheduler.max_num_seqs.max(1) as f64;
    near.push(Nearness {
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
            number(point.mean_prompt_tokens),
            number(point.mean_output_tokens)
        ),
        "the balancer spreads requests evenly, and instances do not disturb each other: n of them carry n times the rate of one".into(),
    ];
    match result.prefix_hit_rate {
        Some(hits) if hits >= 0.001 => all.push(format!(
            "prefix cache: {} of the prompt tokens are found, as in the run; several instances each have a cache of their own, and a \
             balancer that does not send a prefix where it is kept finds fewer",
            percent(hits)
        )),
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
    if rates.confirmed.is_none() && accepted.runs.len() == 1 {
        all.push(
            "a single run decided: percentiles of one queue are correlated, and other seeds may differ; \
             `hbmark serve --find-max-rate` asks fresh ones"
                .into(),
        );
    }
    if result.measured < FEW_REQUESTS {
        all.push(format!(
            "{} requests were measured; {FEW_REQUESTS} and more say something of the tail",
            result.measured
        ));
    }
    let undecided = |r: &ServeResult| r.gates.iter().any(|g| g.name == KEEPS_UP && g.passed.is_none());
    if accepted.runs.iter().any(|(_, r)| undecided(r)) || result.measured < crate::serve::latency::ENOUGH {
        all.push("whether it keeps up at that rate was not decided: the run was too short".into());
    }
    let above = rates.groups.iter().find(|g| g.tried.rate > accepted.rate);
    match above {
        None => all.push(format!(
            "the highest rate tried, {}/s, held: an instance may carry more, so these counts are upper bounds",
            number(accepted.rate)
        )),
        Some(next) if next.tried.rate / accepted.rate > WIDE_BRACKET && rates.confirmed.is_none() => all.push(format!(
            "between {}/s, which held, and {}/s, which did not, nothing was tried: finer steps may need fewer instances",
            number(accepted.rate),
            number(next.tried.rate)
        )),
        Some(_) => {}
    }
    if let Some(odd) = rates.groups.iter().find(|g| g.tried.held && g.tried.rate > accepted.rate) {
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
    let knobs = &point.scheduler;
    if question.context.is_some_and(|c| c > knobs.max_model_len as u64) {
        all.push(format!("the instance takes contexts of at most {} positions", knobs.max_model_len));
    }
    if question.concurrency.is_some_and(|c| c > knobs.max_num_seqs as u64) {
        all.push(format!(
            "the instance runs at most {} sequences at once; the others wait",
            knobs.max_num_seqs
        ));
    }
    all.extend(report.warnings.iter().cloned());
    all
}

/// What is counted: GPUs, or machines where no GPU was run or computed.
fn noun(report: &ServeReport) -> &'static str {
    if report.datasheet.is_some() || report.environment.gpu.is_some() { "GPUs" } else { "machines" }
}

fn machine(report: &ServeReport) -> String {
    let cpu = || report.environment.cpu.model.clone();
    let gpu = || report.environment.gpu.as_ref().and_then(|g| g.name.clone());
    match &report.datasheet {
        Some(sheet) => sheet.product.clone(),
        None => gpu().or_else(cpu).unwrap_or_else(|| "an unnamed machine".into()),
    }
}

/// A number as short as four digits allow.
#[must_use]
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
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a few decimals")]
        s => ((-s.log10()).ceil().clamp(0.0, 12.0) as usize) + 2,
    };
    format!("{currency}{value:.decimals$}")
}

#[cfg(test)]
mod tests;
