//! Every number checked against one computed by hand.

use super::*;
use crate::samples::{self, decided, sweep};
use hbmark_core::model::{Architecture, Dtype, Quantization};
use hbmark_core::result::serving::{Clause, Offered, Requests, SavedOutcome, Search, Validity};
use hbmark_core::result::{Cause, ModelSummary};

/// Rates 2 and 8 held, 64 did not, 128 was not run; round numbers everywhere the arithmetic looks.
fn swept() -> ServeReport {
    let mut report = decided(sweep());
    for (point, rate) in report.points.iter_mut().zip([2.0, 8.0, 64.0, 128.0]) {
        point.mean_prompt_tokens = 1000.0;
        point.mean_output_tokens = 100.0;
        let scheduler = point.scheduler.as_mut().unwrap();
        scheduler.num_blocks = 1000;
        scheduler.block_size = 16;
        scheduler.max_num_seqs = 256;
        let Some(result) = &mut point.result else { continue };
        result.requests = None;
        result.offered_per_s = Some(rate);
        result.goodput_share = Some(0.9);
        result.max_kv_use = 0.4;
        result.mean_running = 64.0;
        result.prefix_hit_rate = Some(0.25);
    }
    let result = report.points[1].result.as_mut().unwrap();
    for (clause, share) in result.slo.iter_mut().zip([0.8, 0.5]) {
        clause.observed = Some((clause.clause.limit_ns * share).into());
    }
    report
}

fn question() -> Question {
    Question {
        target_rate: 100.0,
        mean_rate: None,
        slo: None,
        headroom: 0.2,
        gpus_per_instance: 2,
        prices: Some(Prices {
            currency: "$".into(),
            gpu_hour: 3.0,
            input_per_million: None,
            output_per_million: None,
        }),
        context: Some(100),
        concurrency: Some(100),
    }
}

#[track_caller]
fn near(found: f64, wanted: f64) {
    assert!((found / wanted - 1.0).abs() < 1e-9, "{found}, not {wanted}");
}

#[track_caller]
fn line<'a>(capacity: &'a Capacity, what: &str) -> &'a ArithmeticLine {
    capacity.lines.iter().find(|l| l.what == what).unwrap_or_else(|| panic!("no line {what}"))
}

#[test]
fn instances_are_the_target_over_what_one_carries_with_headroom() {
    let found = capacity(&swept(), &question()).unwrap();
    near(found.rate_per_instance, 8.0);
    // 100 ÷ (8 × 0.8) = 15.625.
    assert_eq!((found.instances, found.gpus), (16, 32));
    assert_eq!(line(&found, "instances").values, "⌈100 ÷ 6.400⌉ = ⌈15.62⌉");
    near(line(&found, "load at the target").value, 100.0 / 128.0);
    let exact = Question { target_rate: 6.4 * 3.0, ..question() };
    assert_eq!(capacity(&swept(), &exact).unwrap().instances, 3, "a rounding error needs no instance");
}

#[test]
fn a_rate_that_came_slower_than_asked_counts_as_it_came() {
    let mut report = swept();
    report.points[1].result.as_mut().unwrap().offered_per_s = Some(7.5);
    near(capacity(&report, &question()).unwrap().rate_per_instance, 7.5);
    report.points[1].result.as_mut().unwrap().offered_per_s = Some(8.5);
    near(capacity(&report, &question()).unwrap().rate_per_instance, 8.0);
}

#[test]
fn an_objective_that_the_run_left_open_is_not_met() {
    let mut report = swept();
    let clause = &mut report.points[1].result.as_mut().unwrap().slo[0];
    (clause.met, clause.high) = (None, Some((clause.clause.limit_ns * 1.2).into()));
    let found = capacity(&report, &question()).unwrap();
    near(found.rate_per_instance, 2.0);
    let tried = found.tried.iter().find(|tried| tried.rate > 7.0).unwrap();
    assert_eq!((tried.held, tried.runs_held), (None, 0));
    assert!(tried.why.contains("the interval holds the limit"), "{}", tried.why);
}

#[test]
fn a_stricter_objective_is_judged_by_the_interval_of_the_one_that_was_set() {
    let mut report = swept();
    let clause = &mut report.points[1].result.as_mut().unwrap().slo[0];
    let (limit, percentile) = (clause.clause.limit_ns, clause.clause);
    (clause.low, clause.high) = (Some((limit * 0.5).into()), Some((limit * 0.9).into()));
    let ask = |share: f64| {
        let slo = Slo { clauses: vec![Clause { limit_ns: limit * share, ..percentile }] };
        capacity(&report, &Question { slo: Some(slo), ..question() }).unwrap().rate_per_instance
    };
    near(ask(0.95), 8.0);
    // What was observed is within it, and its interval is not.
    near(ask(0.89), 2.0);
}

#[test]
fn a_rate_that_was_measured_beside_other_work_is_none_of_an_instance() {
    let mut report = swept();
    report.points[1].result.as_mut().unwrap().foreign_cores = Some(1.5);
    let found = capacity(&report, &question()).unwrap();
    near(found.rate_per_instance, 2.0);
    assert!(found.tried.iter().any(|tried| tried.why.contains("disturbed: other processes")));
}

#[test]
fn a_rate_that_was_not_shown_to_keep_up_is_none_of_an_instance() {
    let open = |indices: &[usize]| {
        let mut report = swept();
        for index in indices {
            samples::keeps_up(&mut report.points[*index], None);
        }
        capacity(&report, &question())
    };
    near(open(&[1]).unwrap().rate_per_instance, 2.0);
    // A higher rate that held answers for a lower one that could not tell.
    near(open(&[0]).unwrap().rate_per_instance, 8.0);
    let refused = open(&[0, 1]).unwrap_err().to_string();
    assert!(refused.contains("is shown to meet") && refused.contains("not shown to keep up"), "{refused}");
}

#[test]
fn no_rate_above_a_lost_one_is_accepted() {
    let lost = |index: usize| {
        let mut report = swept();
        report.points[index].result = None;
        report.points[index].not_run =
            Some(Cause::WorkerLost { detail: "the worker was killed by signal 9".into() });
        capacity(&report, &question())
    };
    near(lost(1).unwrap().rate_per_instance, 2.0);
    let refused = lost(0).unwrap_err().to_string();
    assert!(refused.contains("2/s not run: the worker was killed by signal 9"), "{refused}");
}

#[test]
fn costs_are_the_hour_over_requests_and_tokens() {
    let found = capacity(&swept(), &question()).unwrap();
    near(found.cost_per_hour.unwrap(), 96.0);
    // 360,000 requests an hour, nine of ten accepted; 360 and 36 million tokens.
    near(found.cost_per_accepted_request.unwrap(), 96.0 / 324_000.0);
    near(found.cost_per_million_input_tokens.unwrap(), 96.0 / 360.0);
    near(found.cost_per_million_output_tokens.unwrap(), 96.0 / 36.0);
    near(line(&found, "a million tokens, input and output alike").value, 96.0 / 396.0);
    let half = Question { mean_rate: Some(50.0), ..question() };
    near(capacity(&swept(), &half).unwrap().cost_per_million_output_tokens.unwrap(), 2.0 * 96.0 / 36.0);
    let free = capacity(&swept(), &Question { prices: None, ..question() }).unwrap();
    assert_eq!(
        (free.cost_per_hour, free.lines.iter().filter(|l| l.part == CapacityPart::Cost).count()),
        (None, 0)
    );
}

/// Outputs that ended early cost what they were: 60 tokens where 100 were planned.
#[test]
fn tokens_that_were_not_made_are_not_sold() {
    let mut report = swept();
    for point in &mut report.points {
        let Some(result) = &mut point.result else { continue };
        result.requests = Some(Requests {
            outcome: vec![SavedOutcome::Served, SavedOutcome::Unfinished],
            output_tokens: vec![60, 3],
            ..Requests::default()
        });
    }
    let found = capacity(&report, &question()).unwrap();
    near(found.cost_per_million_output_tokens.unwrap(), 96.0 / 21.6);
    assert!(
        found.assumptions.iter().any(|line| line.contains("outputs of 60 tokens")),
        "{:?}",
        found.assumptions
    );
}

/// The rate that a search names, where fewer requests came.
#[test]
fn a_search_proves_no_more_than_the_rate_that_came() {
    let mut report = swept();
    report.points[1].result.as_mut().unwrap().offered_per_s = Some(5.0);
    report.search = Some(Search { max_rate: Some(8.0), confirmed: true, ..Search::default() });
    near(capacity(&report, &question()).unwrap().rate_per_instance, 5.0);
}

#[test]
fn with_token_prices_the_cost_is_split_as_they_are() {
    let prices = Prices {
        currency: "€".into(),
        gpu_hour: 3.0,
        input_per_million: Some(1.0),
        output_per_million: Some(4.0),
    };
    let found = capacity(&swept(), &Question { prices: Some(prices), ..question() }).unwrap();
    // Income 360 × 1 + 36 × 4 = 504.
    near(line(&found, "income an hour").value, 504.0);
    near(found.cost_per_million_input_tokens.unwrap(), 96.0 / 504.0);
    near(found.cost_per_million_output_tokens.unwrap(), 4.0 * 96.0 / 504.0);
    near(line(&found, "margin").value, 1.0 - 96.0 / 504.0);
    assert_eq!(line(&found, "income an hour").result, "€504.00");
}

#[test]
fn kv_memory_is_counted_in_whole_blocks() {
    let found = capacity(&swept(), &question()).unwrap();
    // 100 positions in blocks of 16 are 7 blocks; 100 sequences 700 of 1,000.
    near(found.kv_headroom.unwrap(), 0.3);
    near(line(&found, "sequences that fit").value, 142.0);
    // Llama-3.1-8B: 32 layers of 8 heads of 128, K and V, in two bytes.
    near(line(&found, "KV bytes needed").value, 700.0 * 16.0 * 131_072.0);
    let mut fp8 = swept();
    fp8.config.insert("kv_dtype".into(), "fp8".into());
    near(line(&capacity(&fp8, &question()).unwrap(), "KV bytes needed").value, 700.0 * 16.0 * 65_536.0);
    let tight = Question { concurrency: Some(200), context: Some(200_000), ..question() };
    let tight = capacity(&swept(), &tight).unwrap();
    assert!(tight.kv_headroom.unwrap() < 0.0 && line(&tight, "KV headroom").result.contains("does NOT fit"));
    assert!(tight.caveats.iter().any(|c| c.contains("contexts of at most")), "{:?}", tight.caveats);
    let own = capacity(&swept(), &Question { context: None, concurrency: None, ..question() }).unwrap();
    // 1,100 positions are 69 blocks; 64 sequences ran.
    near(own.kv_headroom.unwrap(), 1.0 - 69.0 * 64.0 / 1000.0);
}

/// Five layers in six of Gemma-3-27B keep 1,024 positions; a checkpoint may ask for its cache in fp8.
#[test]
fn kv_memory_of_a_virtual_clock_is_what_sequences_keep_in_what_the_model_asks_for() {
    let gemma = hbmark_core::model::presets::find("Gemma-3-27B").unwrap().architecture;
    let virtual_of = |architecture: Architecture, dtype| {
        let model = swept().model.map(|model| ModelSummary { architecture, ..model });
        ServeReport { model, dtype: Some(dtype), capabilities: None, ..swept() }
    };
    // Ten full layers and 52 with windows, 8,192 B of a position in each; the traffic's sequences have 1,100 positions.
    let kept = |positions: f64| (10.0 * positions + 52.0 * positions.min(1024.0)) * 8192.0;
    let long = Question { context: Some(11_000), concurrency: Some(10), ..question() };
    let found = capacity(&virtual_of(gemma.clone(), Dtype::Bf16), &long).unwrap();
    let each = (kept(11_000.0) / (kept(1100.0) / 1100.0) / 16.0).ceil();
    near(line(&found, "blocks of a sequence").value, each);
    assert!(each < 11_000.0 / 16.0 / 2.0, "{each}");
    near(line(&found, "KV bytes needed").value, each * 10.0 * 16.0 * kept(1100.0) / 1100.0);
    // The blocks of an engine hold every position of every layer.
    let engine = serde_json::json!({"engine": "native", "device": "cuda:0", "max_batch": 256, "max_positions": 131_072,
        "ragged": "fused", "paged": true, "prefix_sharing": true, "graphs": true});
    let capabilities = Some(serde_json::from_value(engine).unwrap());
    let own = ServeReport { capabilities, ..virtual_of(gemma, Dtype::Bf16) };
    near(line(&capacity(&own, &long).unwrap(), "blocks of a sequence").value, 688.0);

    let own = Quantization {
        method: "modelopt".into(),
        bits: 8,
        float: true,
        kv_cache: Some(Dtype::Fp8),
        ..Quantization::default()
    };
    let llama = swept().model.unwrap().architecture;
    let fp8 = virtual_of(Architecture { quantization: Some(own), ..llama }, Dtype::Fp8);
    near(line(&capacity(&fp8, &question()).unwrap(), "KV bytes needed").value, 700.0 * 16.0 * 65_536.0);
}

#[test]
fn what_breaks_first_is_what_the_next_rate_broke() {
    let found = capacity(&swept(), &question()).unwrap();
    assert!(found.breaks_first.starts_with("at 64/s, the next rate tried: "), "{}", found.breaks_first);
    assert_eq!(found.nearness[0].what, "ttft_p95 ≤ 500 ms");
    near(found.nearness[0].used, 0.8);
    let mut held = swept();
    held.points.truncate(2);
    let held = capacity(&held, &question()).unwrap();
    assert!(held.breaks_first.contains("nearest to its limit is ttft_p95"), "{}", held.breaks_first);
    assert!(held.caveats.iter().any(|c| c.contains("upper bounds")), "{:?}", held.caveats);
}

#[test]
fn other_objectives_are_judged_from_the_percentiles_that_were_kept() {
    let mut report = swept();
    let quantiles = report.points[1].result.as_mut().unwrap().ttft_ns.as_mut().unwrap();
    (quantiles.p90, quantiles.p50) = (Some(3e8.into()), Some(1e8.into()));
    let ask = |slo: &str| Question { slo: Some(slo.parse().unwrap()), ..question() };
    near(capacity(&report, &ask("ttft_p90=301ms")).unwrap().rate_per_instance, 8.0);
    near(capacity(&report, &ask("ttft_p90=299ms")).unwrap().rate_per_instance, 2.0);
    let error = capacity(&report, &ask("ttft_p97=1s")).unwrap_err();
    assert!(matches!(error, CapacityError::UnknownPercentile { .. }), "{error}");
    let few = capacity(&report, &ask("ttft_p99=100s")).unwrap_err().to_string();
    assert!(few.contains("200 requests measured, too few for that percentile"), "{few}");
}

#[test]
fn a_seed_that_fails_takes_the_rate_with_it_unless_a_search_confirmed_it() {
    let mut report = swept();
    let mut again = report.points[1].clone();
    let clause = &mut again.result.as_mut().unwrap().slo[0];
    clause.observed = Some((clause.clause.limit_ns * 1.1).into());
    clause.met = Some(false);
    report.points.push(again);
    near(capacity(&report, &question()).unwrap().rate_per_instance, 2.0);
    let slo =
        Slo { clauses: report.points[0].result.as_ref().unwrap().slo.iter().map(|c| c.clause).collect() };
    report.search = Some(Search { slo, max_rate: Some(8.0), confirmed: true, ..Search::default() });
    let confirmed = capacity(&report, &question()).unwrap();
    near(confirmed.rate_per_instance, 8.0);
    assert!(!confirmed.caveats.iter().any(|c| c.contains("a single run decided")));
}

#[test]
fn what_limits_trust_is_said() {
    let said = capacity(&swept(), &question()).unwrap().caveats.join("\n");
    for part in
        ["PREDICTED: nothing was measured", "a single run decided", "measured: 200 requests", "between 8/s"]
    {
        assert!(said.contains(part), "{part}: {said}");
    }
    let assumed = capacity(&swept(), &question()).unwrap().assumptions.join("\n");
    assert!(
        assumed.contains("25.0 % of the prompt tokens are found")
            && assumed.contains("utilisation: the target rate lasts")
    );
}

#[test]
fn results_that_cannot_carry_it_are_refused_with_what_they_lack() {
    let refused = |report: &ServeReport| capacity(report, &question()).unwrap_err();
    let mut saturated = swept();
    for point in &mut saturated.points {
        let Some(result) = &mut point.result else { continue };
        (result.validity, result.reasons) = (Validity::Saturated, vec![Cause::other("planted")]);
    }
    let error = refused(&saturated).to_string();
    assert!(error.contains("2/s saturated: planted\n  8/s saturated: planted"), "{error}");
    let mut no_slo = swept();
    no_slo.points.iter_mut().filter_map(|p| p.result.as_mut()).for_each(|r| r.slo.clear());
    assert_eq!(refused(&no_slo), CapacityError::NoObjectives);
    let mut other = swept();
    other.swept = Some("max-num-seqs".into());
    assert_eq!(refused(&other), CapacityError::OtherSweep { variable: "max-num-seqs".into() });
    let mut closed = swept();
    closed.points.iter_mut().for_each(|p| p.offered = Offered::Concurrency(4));
    assert_eq!(refused(&closed), CapacityError::NoRate);
    let at_once = decided(crate::samples::single());
    assert!(capacity(&at_once, &question()).is_ok(), "one rate is a result, if a thin one");
}

#[test]
fn amounts_are_readable() {
    let shown: Vec<String> = [96.0, 0.000_296_3, 0.5, 0.0].iter().map(|v| money("$", *v)).collect();
    assert_eq!(shown, ["$96.00", "$0.000296", "$0.500", "$0.00"]);
    let shown: Vec<String> = [8.0, 15.625, 360_000.4, 0.123_45].iter().map(|v| number(*v)).collect();
    assert_eq!(shown, ["8", "15.62", "360000", "0.123"]);
}
