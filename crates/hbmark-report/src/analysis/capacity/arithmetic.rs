//! The arithmetic from an accepted rate to instances, money and memory, line by line as it is done.

use super::rates::Accepted;
use super::{ArithmeticLine, CapacityPart, Question, SECONDS_PER_HOUR, money, number, percent};
use hbmark_core::ledger::Ledger;
use hbmark_core::model::Dtype;
use hbmark_core::result::serving::{ServeReport, ServeResult, Slo};
use hbmark_core::units::{self, Bytes};

/// The arithmetic as it is done.
pub(super) struct CapacityArithmetic {
    pub(super) lines: Vec<ArithmeticLine>,
    pub(super) part: CapacityPart,
}

impl CapacityArithmetic {
    pub(super) fn line(
        &mut self,
        what: &str,
        formula: &str,
        values: String,
        value: f64,
        result: String,
    ) -> f64 {
        self.lines.push(ArithmeticLine {
            part: self.part,
            what: what.into(),
            formula: formula.into(),
            values,
            result,
            value,
        });
        value
    }
}

pub(super) fn one_instance(
    sums: &mut CapacityArithmetic,
    question: &Question,
    accepted: &Accepted<'_>,
    searched: bool,
) -> f64 {
    sums.part = CapacityPart::OneInstance;
    let realised = accepted.mean(|r| r.offered_per_s).unwrap_or(accepted.rate);
    let rate = accepted.rate.min(realised);
    sums.line(
        "rate that held",
        if searched {
            "min(answer of the search, rate that came)"
        } else {
            "min(rate asked for, rate that came)"
        },
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

/// Whole instances; a product such as 3 · 0.1 may be a rounding error above the whole number it means.
pub(super) fn rounded_up(value: f64) -> u64 {
    units::whole((value - 1e-9).ceil().clamp(1.0, 1e15))
}

pub(super) fn instances(
    sums: &mut CapacityArithmetic,
    question: &Question,
    rate: f64,
    noun: &str,
) -> (u64, u64) {
    sums.part = CapacityPart::Instances;
    let usable = rate * (1.0 - question.headroom);
    let count = rounded_up(question.target_rate / usable);
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
pub(super) struct Cost {
    pub(super) per_hour: Option<f64>,
    pub(super) input: Option<f64>,
    pub(super) output: Option<f64>,
    pub(super) request: Option<f64>,
}

pub(super) fn cost(
    sums: &mut CapacityArithmetic,
    question: &Question,
    accepted: &Accepted<'_>,
    gpus: u64,
    noun: &str,
) -> Cost {
    let Some(prices) = &question.prices else { return Cost::default() };
    sums.part = CapacityPart::Cost;
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
    let (inward, outward) = (tokens("input", point.prompt_tokens()), tokens("output", point.output_tokens()));
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
pub(super) fn accepted_share(question: &Question, result: &ServeResult) -> f64 {
    let recorded = Slo { clauses: result.slo.iter().map(|c| c.clause).collect() };
    let same = question.slo.as_ref().is_none_or(|asked| *asked == recorded);
    let counted = result.goodput_share.filter(|share| same && *share > 0.0);
    counted.unwrap_or(result.served as f64 / result.measured.max(1) as f64)
}

pub(super) fn kv_memory(
    sums: &mut CapacityArithmetic,
    report: &ServeReport,
    question: &Question,
    accepted: &Accepted<'_>,
) -> Option<f64> {
    sums.part = CapacityPart::KvMemory;
    let (point, result) = accepted.longest();
    let (scheduler, model) = (point.scheduler.as_ref()?, report.model.as_ref()?);
    let (blocks, size) = (scheduler.num_blocks as f64, scheduler.block_size as f64);
    let mean = point.prompt_tokens() + point.output_tokens();
    let context = question.context.map_or(mean, |c| c as f64);
    let concurrency = question.concurrency.map_or(result.mean_running, |c| c as f64);
    let architecture = &model.architecture;
    let weights = report.dtype.unwrap_or_default();
    // An engine of this program has all positions of its blocks, in 16 bits unless it is asked for others; blocks of the virtual clock are those of
    // sequences of the traffic's length, whose windows forget, in what the checkpoint asks for.
    let of_engine = report.capabilities.is_some();
    let usual = || if of_engine { weights.of_cache() } else { architecture.cache_of(weights) };
    let kv = report.kv_dtype().unwrap_or_else(usual);
    let ledger = Ledger::new(architecture, &architecture.inventory(Dtype::Bf16), kv);
    let position = |positions: f64| {
        let kept = || ledger.kept_per_position(units::whole_count(positions));
        if of_engine { ledger.kv_bytes_per_token().as_f64() } else { kept() }
    };
    let charged = context * position(context) / position(mean);
    let each = (charged / size - 1e-9).ceil().max(1.0);
    sums.line(
        "blocks of a sequence",
        if (charged - context).abs() > 1e-6 {
            "⌈positions as in the traffic's sequences ÷ block⌉"
        } else {
            "⌈context ÷ block⌉"
        },
        format!("⌈{} ÷ {}⌉", number(charged), number(size)),
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
    let bytes = needed * size * position(mean);
    let shown = Bytes(units::whole(bytes));
    sums.line(
        "KV bytes needed",
        "blocks × positions × bytes of a position",
        format!("{} × {} × {} B ({kv})", number(needed), number(size), number(position(mean))),
        bytes,
        shown.capacity(),
    );
    Some(headroom)
}
