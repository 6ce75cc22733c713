//! What the figures of one file must hold among themselves, whatever was measured.
//!
//! Enters: a row as it was read, and its record where that has lists of single requests. Leaves: a [`Cause`] for each rule that is broken.
//! The rules are arithmetic (order, Cantelli's inequality, Little's law, amounts over time), so that a file its program wrote breaks none;
//! what is tolerated is the rounding of the format and, where a rule is an estimate, what the estimate leaves out.

use crate::analysis::distinct;
use crate::analysis::words::{counted, precise};
use serde_json::Value as Json;

use super::decoding::{APART_BY_GAPS, mean_gaps};
use super::fields::Fields;
use super::vllm::BURSTINESS;
use super::{ForeignFormat, ForeignRow, Metric, Rate, Setup, Statistic, Value};
use hbmark_core::result::{Cause, ConsistencyRule as Rule};

/// Programs that write doubles in full: what is left is the rounding of sums.
const FULL: f64 = 1e-6;
/// Files that were merged of several clients add rates over durations of their own: one of vLLM's is 0.06 % off. Beyond this, amounts and rates are not of
/// one run.
const MERGED: f64 = 0.005;
/// The others keep two or three digits behind the point of numbers that may be small, and count time with or without their warm-up.
const ROUNDED: f64 = 0.02;
/// Means over requests that completed, and amounts over a window that cuts some: no further apart than this.
const OTHER_REQUESTS: f64 = 2.0;
/// Standard deviations by which arrivals drawn at random may be faster than their rate.
const ARRIVAL_DEVIATIONS: f64 = 5.0;
/// Of requests that are always waiting at least one is under way; half of that is left to the client.
const BUSY: f64 = 0.5;

/// The rules for the figures of a row.
pub(super) fn of_row(row: &ForeignRow, format: ForeignFormat) -> Vec<Cause> {
    let mut found = Vec::new();
    for metric in distinct(row.values.iter().map(|value| value.metric)) {
        found.extend(order(row, metric));
        found.extend(spread(row, metric));
    }
    found.extend(ends(row));
    let amounts = throughput(row, format, MERGED);
    if amounts.is_empty() {
        found.extend(lengths(row));
    }
    found.extend(amounts);
    found.extend(counts(&row.setup));
    found.extend(offered(row));
    found.extend(concurrency(row));
    found
}

/// A rate that is further from its amount than rounding, and may be of one run.
pub(super) fn remark(row: &ForeignRow, format: ForeignFormat) -> Option<String> {
    if !throughput(row, format, MERGED).is_empty() {
        return None;
    }
    let apart = throughput(row, format, FULL);
    Some(format!("{}, as where results of several clients were merged", apart.first()?))
}

fn broken(rule: Rule, detail: String) -> Cause {
    Cause::Inconsistent { rule, detail }
}

/// Where a statistic stands in its distribution, in ten thousandths.
fn rank(statistic: Statistic) -> Option<u16> {
    match statistic {
        Statistic::Min => Some(0),
        Statistic::Median => Some(5000),
        Statistic::Percentile(hundredths) => Some(hundredths),
        Statistic::Max => Some(10_000),
        Statistic::Mean | Statistic::StandardDeviation | Statistic::Single => None,
    }
}

fn shown(value: &Value) -> String {
    if value.metric.is_time() { precise(value.value) } else { format!("{:.3}/s", value.value) }
}

/// Rounding keeps an order, so none is tolerated.
fn order(row: &ForeignRow, metric: Metric) -> Option<Cause> {
    let mut ranked: Vec<(u16, &Value)> = row
        .values
        .iter()
        .filter(|v| v.metric == metric)
        .filter_map(|v| Some((rank(v.statistic)?, v)))
        .collect();
    ranked.sort_by_key(|(rank, _)| *rank);
    let (low, high) = ranked
        .windows(2)
        .find(|pair| pair[0].0 < pair[1].0 && pair[1].1.value < pair[0].1.value)
        .map(|p| (p[0].1, p[1].1))?;
    Some(broken(
        Rule::PercentileOrder,
        format!(
            "{} {} is {}, below its {} of {}",
            metric.title(),
            high.statistic,
            shown(high),
            low.statistic,
            shown(low)
        ),
    ))
}

/// Cantelli: no more than 1 / (1 + k²) of any distribution lies k deviations above its mean, or below it.
fn spread(row: &ForeignRow, metric: Metric) -> Option<Cause> {
    let mean = row.value(metric, Statistic::Mean)?;
    let deviation = row.value(metric, Statistic::StandardDeviation)?;
    let far = row.values.iter().filter(|v| v.metric == metric).find(|v| {
        let Some(rank) = rank(v.statistic).filter(|rank| (1..10_000).contains(rank)) else { return false };
        let share = f64::from(rank) / 1e4;
        let odds = if v.value >= mean { share / (1.0 - share) } else { (1.0 - share) / share };
        (v.value - mean).abs() > deviation * odds.sqrt() * (1.0 + ROUNDED) + mean * ROUNDED
    })?;
    Some(broken(
        Rule::Spread,
        format!(
            "{} {} of {} is further from the mean of {} than a standard deviation of {} allows",
            metric.title(),
            far.statistic,
            shown(far),
            precise(mean),
            precise(deviation)
        ),
    ))
}

/// Every request ends after its first token, so every statistic of the one is above the same of the other.
fn ends(row: &ForeignRow) -> Option<Cause> {
    row.values
        .iter()
        .filter(|v| v.metric == Metric::Ttft && v.statistic != Statistic::StandardDeviation)
        .find_map(|first| {
            let end = row.value(Metric::E2e, first.statistic)?;
            (end < first.value * (1.0 - FULL)).then(|| {
                broken(
                    Rule::EndAfterFirstToken,
                    format!(
                        "{} E2E is {}, and the first token came after {}",
                        first.statistic,
                        precise(end),
                        shown(first)
                    ),
                )
            })
        })
}

/// Amounts over the duration are the rates, within a tolerance, in the formats whose duration is that of the requests counted.
fn throughput(row: &ForeignRow, format: ForeignFormat, tolerance: f64) -> Vec<Cause> {
    if !matches!(format, ForeignFormat::VllmServe | ForeignFormat::SglangServing) {
        return Vec::new();
    }
    let Setup { completed: Some(completed), duration_s: Some(seconds), .. } = row.setup else {
        return Vec::new();
    };
    let completed = completed as f64;
    if completed > 0.0 && seconds <= 0.0 {
        return vec![broken(Rule::Throughput, format!("{completed:.0} requests completed in {seconds} s"))];
    }
    let (input, output) = (row.setup.input_tokens, row.setup.output_tokens);
    let amounts = [
        (Metric::RequestThroughput, Some(completed), "requests"),
        (Metric::OutputThroughput, output.map(|each| each * completed), "output tokens"),
        (Metric::InputThroughput, input.map(|each| each * completed), "prompt tokens"),
        (Metric::TotalThroughput, input.zip(output).map(|(i, o)| (i + o) * completed), "tokens"),
    ];
    let differs = |(metric, amount, what): (Metric, Option<f64>, &str)| {
        let stated = row.rate(metric)?;
        let (amount, rate) = (amount?, amount? / seconds);
        let apart = (stated - rate).abs() > rate.abs() * tolerance;
        apart.then(|| {
            broken(
                Rule::Throughput,
                format!(
                    "{} is {stated:.2}, and {amount:.0} {what} in {seconds:.2} s are {rate:.2}",
                    metric.title()
                ),
            )
        })
    };
    amounts.into_iter().filter(|_| seconds > 0.0).filter_map(differs).collect()
}

/// Requests per second times their tokens are the tokens per second, whatever the window was: nearly, since programs take these means over sets
/// of requests of their own.
fn lengths(row: &ForeignRow) -> Option<Cause> {
    let rate = row.rate(Metric::RequestThroughput)?;
    let sides = [
        (Metric::OutputThroughput, row.setup.output_tokens, "output"),
        (Metric::InputThroughput, row.setup.input_tokens, "prompt"),
    ];
    sides.into_iter().find_map(|(metric, tokens, what)| {
        let (stated, tokens) = (row.rate(metric)?, tokens?);
        let made = rate * tokens;
        let apart = stated > made * OTHER_REQUESTS || made > stated * OTHER_REQUESTS;
        (apart && made > 0.0).then(|| {
            let title = metric.title();
            let detail = format!(
                "{title} is {stated:.0}, and {rate:.2} req/s of {tokens:.0} {what} tokens are {made:.0}"
            );
            broken(Rule::Throughput, detail)
        })
    })
}

fn counts(setup: &Setup) -> Option<Cause> {
    let (asked, done, failed) = (setup.requests?, setup.completed?, setup.failed.unwrap_or(0));
    (done.saturating_add(failed) > asked).then(|| {
        broken(
            Rule::RequestCount,
            format!("{done} completed and {failed} failed, of {} sent", counted(asked, "request")),
        )
    })
}

/// The time of `n` arrivals drawn at random varies by one part in √n, and of gaps of shape `b` by one in √(b n).
fn offered(row: &ForeignRow) -> Option<Cause> {
    let Some(Rate::PerSecond(rate)) = row.setup.request_rate.filter(|_| row.setup.completed.is_some()) else {
        return None;
    };
    let served = row.rate(Metric::RequestThroughput)?;
    let requests = row.setup.completed.unwrap_or_default().max(1) as f64;
    let shape = row.setup.settings.get(BURSTINESS).and_then(|shape| shape.parse::<f64>().ok());
    let deviation = (1.0 / shape.filter(|shape| *shape > 0.0).unwrap_or(1.0).min(1.0) / requests).sqrt();
    (served > rate * (1.0 + ARRIVAL_DEVIATIONS * deviation)).then(|| {
        broken(Rule::OfferedRate, format!("{served:.2} requests per second were served, and {rate} arrived"))
    })
}

/// Little's law: requests per second times the time of each are those under way at once.
fn concurrency(row: &ForeignRow) -> Option<Cause> {
    let rate = row.rate(Metric::RequestThroughput)?;
    let exact = row.value(Metric::E2e, Statistic::Mean);
    let gaps = mean_gaps(row);
    let estimate = |gap: Option<&&Value>| {
        let first = row.value(Metric::Ttft, Statistic::Mean)?;
        let after = (row.setup.output_tokens? - 1.0).max(0.0);
        if after == 0.0 { Some(first) } else { Some(first + after * gap?.value) }
    };
    let under_way = |gap| Some(rate * exact.or_else(|| estimate(gap))? / 1e9);
    let (least, most) = (under_way(gaps.first())?, under_way(gaps.last())?);
    let slack = if exact.is_some() { 1.0 + ROUNDED } else { APART_BY_GAPS };
    let limit = row.setup.max_concurrency;
    let always_waiting = match row.setup.request_rate {
        Some(Rate::Unlimited) => true,
        Some(Rate::PerSecond(offered)) => limit.is_some() && rate < offered / 2.0,
        None => false,
    };
    let law = |at_once: f64| format!("{at_once:.3} requests were under way at once by their rate and times");
    match limit {
        Some(limit) if least > limit as f64 * slack => {
            Some(broken(Rule::Concurrency, format!("{}, and no more than {limit} were allowed", law(least))))
        }
        _ if always_waiting && most < BUSY => Some(broken(
            Rule::Concurrency,
            format!(
                "{}, and requests were always waiting: its latencies are too short for its rate, or in another unit",
                law(most)
            ),
        )),
        _ => None,
    }
}

/// The rules for lists of single requests, which detailed results of vLLM and SGLang have beside their summary. Of lists that were cut short
/// only the errors are looked at.
pub(super) fn of_lists(fields: &Fields<'_>, setup: &Setup, values: &[Value]) -> Vec<Cause> {
    let list = |key: &str| fields.get(key).and_then(Json::as_array);
    let completed = setup.completed.unwrap_or(0);
    let whole = |list: &&Vec<Json>| list.len() as u64 == completed;
    let mean_of = |metric| {
        values.iter().find(|v| v.metric == metric && v.statistic == Statistic::Mean).map(|v| v.value)
    };
    let mut found = Vec::new();
    if let Some(errors) = list("errors") {
        let failed =
            errors.iter().filter(|error| error.as_str().is_some_and(|text| !text.is_empty())).count() as u64;
        let sent = setup.requests.unwrap_or(errors.len() as u64).max(errors.len() as u64);
        if completed.saturating_add(failed) > sent {
            found.push(broken(
                Rule::Lists,
                format!("{completed} of {} completed, and errors are in {failed}", counted(sent, "request")),
            ));
        }
    }
    let mut differs = |what: &str, from_list: f64, stated: f64, unit: &str| {
        if (from_list - stated).abs() > stated.abs() * FULL {
            found.push(broken(
                Rule::Lists,
                format!("{what} is {stated:.3}{unit}, and {from_list:.3}{unit} by its list"),
            ));
        }
    };
    if let (Some(lengths), Some(each)) = (list("output_lens").filter(whole), setup.output_tokens) {
        let sum: f64 = lengths.iter().filter_map(Json::as_f64).sum();
        differs("the number of output tokens", sum, each * completed as f64, "");
    }
    let mean = |seconds: &[f64]| seconds.iter().sum::<f64>() / seconds.len() as f64 * 1e3;
    if let (Some(first), Some(stated)) = (list("ttfts").filter(whole), mean_of(Metric::Ttft)) {
        let seconds: Vec<f64> = first.iter().filter_map(Json::as_f64).collect();
        differs("mean TTFT", mean(&seconds), stated / 1e6, " ms");
    }
    if let (Some(gaps), Some(stated)) = (list("itls").filter(whole), mean_of(Metric::Itl)) {
        let seconds: Vec<f64> =
            gaps.iter().filter_map(Json::as_array).flatten().filter_map(Json::as_f64).collect();
        differs("mean ITL", mean(&seconds), stated / 1e6, " ms");
    }
    found
}

#[cfg(test)]
mod tests;
