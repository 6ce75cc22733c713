//! Every rule with a file that holds it and one that does not.

use serde_json::{Value as Json, json};

use super::*;
use crate::analysis::import;

/// Four requests one at a time, with their lists, as vLLM writes a detailed result.
fn detailed() -> Json {
    let ttfts = [0.050, 0.052, 0.048, 0.054];
    let gaps = [[0.010, 0.011, 0.012], [0.010, 0.010, 0.010], [0.012, 0.012, 0.012], [0.009, 0.010, 0.011]];
    let sum: f64 = ttfts.iter().sum::<f64>() + gaps.iter().flatten().sum::<f64>();
    let duration = sum + 0.004;
    json!({
        "model_id": "meta-llama/Llama-3.1-8B", "num_prompts": 4, "completed": 4, "request_rate": "inf", "max_concurrency": 1,
        "duration": duration, "total_input_tokens": 400, "total_output_tokens": 16,
        "request_throughput": 4.0 / duration, "output_throughput": 16.0 / duration, "total_token_throughput": 416.0 / duration,
        "input_lens": [100, 100, 100, 100], "output_lens": [4, 4, 4, 4], "ttfts": ttfts, "itls": gaps, "errors": ["", "", "", ""],
        "mean_ttft_ms": 51.0, "median_ttft_ms": 51.0, "std_ttft_ms": 2.236, "p99_ttft_ms": 53.94,
        "mean_tpot_ms": 10.75, "median_tpot_ms": 10.5, "std_tpot_ms": 0.829, "p99_tpot_ms": 11.97,
        "mean_itl_ms": 10.75, "median_itl_ms": 10.5, "std_itl_ms": 1.01, "p99_itl_ms": 12.0,
        "mean_e2el_ms": 83.25, "median_e2el_ms": 83.5, "std_e2el_ms": 1.09, "p99_e2el_ms": 84.0,
    })
}

/// The rules that a file breaks after a change.
fn broken_by(change: impl FnOnce(&mut Json)) -> Vec<Rule> {
    let mut record = detailed();
    change(&mut record);
    let row = import::parse("f.json", record.to_string()).unwrap().remove(0).rows.remove(0);
    let rule = |cause: &Cause| match cause {
        Cause::Inconsistent { rule, .. } => *rule,
        other => panic!("{other:?}"),
    };
    row.problems.iter().map(rule).collect()
}

fn set(key: &str, value: impl Into<Json>) -> impl FnOnce(&mut Json) {
    move |record| record[key] = value.into()
}

/// A figure of the record times a factor.
fn times(record: &mut Json, key: &str, factor: f64) {
    record[key] = (record[key].as_f64().unwrap() * factor).into();
}

#[test]
fn a_file_as_its_program_wrote_it_breaks_no_rule() {
    assert_eq!(broken_by(|_| {}), []);
}

#[test]
fn no_real_result_breaks_a_rule() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/foreign");
    let mut rows = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        // Of the first nothing completed, which is not a rule between figures; the other's lengths are not of the requests it counts.
        if ["vllm-serve-all-failed.json", "inference-perf-server.json"]
            .iter()
            .any(|name| path.ends_with(name))
        {
            continue;
        }
        let Ok(results) = import::read(&path) else { continue };
        for row in results.iter().flat_map(|result| &result.rows) {
            assert!(row.problems.is_empty(), "{}: {}: {:?}", path.display(), row.label, row.problems);
            rows += 1;
        }
    }
    assert!(rows > 50, "{rows}");
}

#[test]
fn percentiles_rise() {
    // So low a tail is also further below the mean than the deviation allows.
    assert_eq!(broken_by(set("p99_itl_ms", 10.4)), [Rule::PercentileOrder, Rule::Spread]);
    assert_eq!(broken_by(set("p99_ttft_ms", 50.9)), [Rule::PercentileOrder]);
}

#[test]
fn figures_stay_within_their_standard_deviation() {
    assert_eq!(broken_by(set("std_tpot_ms", 0.0)), [Rule::Spread]);
    assert_eq!(broken_by(set("p99_tpot_ms", 40.0)), [Rule::Spread]);
}

#[test]
fn a_request_ends_after_its_first_token() {
    let early = |record: &mut Json| {
        for statistic in ["mean", "median", "p99"] {
            times(record, &format!("{statistic}_e2el_ms"), 0.5);
        }
    };
    assert!(broken_by(early).contains(&Rule::EndAfterFirstToken));
}

#[test]
fn amounts_over_the_duration_are_the_rates() {
    assert_eq!(broken_by(|r| times(r, "output_throughput", 10.0)), [Rule::Throughput]);
    assert_eq!(broken_by(|r| times(r, "request_throughput", 1.01)), [Rule::Throughput]);
    assert!(broken_by(set("duration", 0)).contains(&Rule::Throughput));
    let tenth = broken_by(set("total_output_tokens", 2));
    assert!(tenth.contains(&Rule::Throughput) && tenth.contains(&Rule::Lists), "{tenth:?}");
}

/// As two clients' results were once added up: 238 requests at a rate of their own.
#[test]
fn rates_of_a_merged_file_are_remarked_and_no_fault() {
    let remarks = |factor: f64| {
        let mut record = detailed();
        times(&mut record, "request_throughput", factor);
        let row = import::parse("f.json", record.to_string()).unwrap().remove(0).rows.remove(0);
        (row.problems.len(), row.remarks.iter().filter(|remark| remark.starts_with("req/s is ")).count())
    };
    assert_eq!((remarks(1.0), remarks(0.9994), remarks(0.994)), ((0, 0), (0, 1), (1, 0)));
}

/// As a server's own counters were once written: lengths that are not of the requests counted.
#[test]
fn rates_times_lengths_are_nearly_the_tokens_per_second() {
    // Some formats write a rate as a mean.
    for statistic in [Statistic::Single, Statistic::Mean] {
        let stated = |metric, value| Value { metric, statistic, value, key: String::new() };
        let row = |each: f64| ForeignRow {
            setup: Setup { input_tokens: Some(each), ..Setup::default() },
            values: vec![stated(Metric::RequestThroughput, 168.0), stated(Metric::InputThroughput, 33_840.0)],
            ..ForeignRow::default()
        };
        let rules = |row: &ForeignRow| of_row(row, ForeignFormat::InferencePerf).len();
        assert_eq!((rules(&row(201.0)), rules(&row(150.0)), rules(&row(12_860.0))), (0, 0, 1), "{statistic}");
    }
}

#[test]
fn no_more_requests_complete_than_were_sent() {
    assert!(broken_by(set("completed", 6)).contains(&Rule::RequestCount));
    assert!(broken_by(set("completed", 1)).contains(&Rule::Throughput));
    assert_eq!(broken_by(set("failed", 1)), [Rule::RequestCount]);
}

#[test]
fn no_more_are_served_than_arrive_beyond_chance() {
    assert_eq!(broken_by(set("request_rate", 2.0)), [Rule::OfferedRate]);
    // 12 served at a rate of 10: of four requests that is chance.
    assert_eq!(broken_by(set("request_rate", 10.0)), []);
}

#[test]
fn requests_under_way_are_within_the_limit_and_above_nothing() {
    let four = |record: &mut Json| {
        times(record, "duration", 0.25);
        for key in ["request_throughput", "output_throughput", "total_token_throughput"] {
            times(record, key, 4.0);
        }
    };
    assert_eq!(broken_by(four), [Rule::Concurrency]);
    let seconds = |record: &mut Json| {
        let keys: Vec<String> =
            record.as_object().unwrap().keys().filter(|k| k.ends_with("_ms")).cloned().collect();
        for key in keys {
            times(record, &key, 1e-3);
        }
        for list in ["ttfts", "itls", "errors", "output_lens"] {
            record[list] = Json::Null;
        }
    };
    assert_eq!(broken_by(seconds), [Rule::Concurrency]);
}

#[test]
fn lists_give_the_summary() {
    let ten_times = |record: &mut Json| {
        for gaps in record["itls"].as_array_mut().unwrap() {
            for gap in gaps.as_array_mut().unwrap() {
                *gap = (gap.as_f64().unwrap() * 10.0).into();
            }
        }
    };
    assert_eq!(broken_by(ten_times), [Rule::Lists]);
    assert_eq!(broken_by(set("errors", json!(["timeout", "timeout", "timeout", "timeout"]))), [Rule::Lists]);
    assert_eq!(broken_by(set("ttfts", json!([0.1, 0.1, 0.1, 0.1]))), [Rule::Lists]);
    // Cut to a few items, they say nothing of the whole.
    assert_eq!(broken_by(set("ttfts", json!([0.1]))), []);
}

#[test]
fn arrivals_in_a_ramp_or_in_bursts_may_be_faster_than_the_rate_of_the_file() {
    // A hundred requests of 150 ms at 2 a second: nothing was ever waiting.
    let sparse = |record: &mut Json| {
        for (key, factor) in
            [("request_throughput", 0.1), ("output_throughput", 0.1), ("total_token_throughput", 0.1)]
        {
            times(record, key, factor);
        }
        times(record, "duration", 10.0);
        record["max_concurrency"] = Json::Null;
        for key in ["ttfts", "itls", "errors"] {
            record.as_object_mut().unwrap().remove(key).unwrap();
        }
    };
    assert_eq!(broken_by(sparse), [Rule::Concurrency], "an unlimited rate leaves no gaps");
    for (key, value) in [("ramp_up_strategy", json!("linear")), ("rps_change_events", json!([{"rps": 1}]))] {
        let ramped = |record: &mut Json| {
            sparse(record);
            record[key] = value;
        };
        assert_eq!(broken_by(ramped), [], "{key}");
    }
    // 11.4 a second were served where 2 arrived, of four requests.
    let burst = |shape: f64| {
        move |record: &mut Json| {
            record["request_rate"] = 2.0.into();
            record["burstiness"] = shape.into();
        }
    };
    assert_eq!(broken_by(burst(1.0)), [Rule::OfferedRate]);
    assert_eq!(broken_by(burst(0.1)), []);
}
