//! How many sequences decoded at once: what the file can hold, and what is made of a batch that was given.

use super::*;

/// Ten requests at once, of unlike lengths: the plain mean of TPOT is three times that of the tokens (SGLang's ShareGPT run of 2025).
const TEN_REQUESTS: &str = r#"{"backend": "sglang", "dataset_name": "sharegpt", "request_rate": Infinity, "max_concurrency": null,
    "random_input_len": 1024, "duration": 5.612175672999911, "completed": 10, "total_input_tokens": 1960,
    "total_output_tokens": 2774, "request_throughput": 1.781840160155685, "mean_e2e_latency_ms": 3852.0457373999875,
    "mean_ttft_ms": 94.39340209999045, "mean_tpot_ms": 41.11106232302352, "median_tpot_ms": 13.224892322199644,
    "mean_itl_ms": 13.594960980463128, "concurrency": 6.863729793655818}"#;

fn ten_requests(without: &[&str]) -> ForeignRow {
    let mut record: serde_json::Value =
        serde_json::from_str(&TEN_REQUESTS.replace("Infinity", "\"inf\"")).unwrap();
    for key in without {
        record.as_object_mut().unwrap().remove(*key).unwrap();
    }
    parse("sglang.jsonl", record.to_string()).unwrap().remove(0).rows.remove(0)
}

/// The batch a row was placed at, and what is said of it.
fn batch(row: &ForeignRow, given: Option<u64>) -> (usize, String) {
    let architecture = test_shapes::llama_3_1_8b();
    let given = UserOverrides { batch: given, ..on(&architecture, "h100-sxm", Some(Dtype::Bf16)) };
    let placed = placed(row, ForeignFormat::SglangServing, &given);
    let said = placed.assumptions.into_iter().find(|line| line.starts_with("batch")).unwrap();
    (placed.cell.batch, said)
}

#[test]
fn the_batch_comes_from_the_files_concurrency_before_any_estimate() {
    let concurrency = "mean_e2e_latency_ms";
    for (without, how) in [
        (&[][..], "mean concurrency of 6.9, for the share of mean E2E that is after TTFT"),
        (&["concurrency"], "request rate × (mean E2E − TTFT)"),
        (&[concurrency], "the file's mean concurrency, requests that wait or are in prefill included"),
        (&["concurrency", "mean_ttft_ms"], "request rate × mean E2E"),
        // 276.4 gaps of 13.6 ms: the mean over tokens, where that over requests would give 20 sequences of ten requests.
        (&["concurrency", concurrency], "request rate × (tokens − 1) × mean ITL"),
    ] {
        let (batch, said) = batch(&ten_requests(without), None);
        assert_eq!(batch, 7, "{said}");
        assert!(said.contains(how), "{said}");
    }
}

#[test]
fn no_estimate_is_above_what_the_file_can_hold() {
    let row = ten_requests(&["concurrency", "mean_e2e_latency_ms", "mean_itl_ms"]);
    let (at_once, said) = batch(&row, None);
    assert_eq!(at_once, 10, "20.2 by the plain mean of TPOT: {said}");
    assert!(said.contains("the number of requests") && said.contains("20.2"), "{said}");
    let mut limited = row.clone();
    limited.setup.max_concurrency = Some(4);
    assert_eq!(batch(&limited, None).0, 4);
    let mut stated = row;
    stated.setup.concurrency = Some(6.9);
    assert_eq!(batch(&stated, None).0, 7);
}

#[test]
fn a_batch_far_from_the_files_own_is_not_rated() {
    let architecture = test_shapes::llama_3_1_8b();
    let given =
        |batch| UserOverrides { batch: Some(batch), ..on(&architecture, "h100-sxm", Some(Dtype::Bf16)) };
    let row = ten_requests(&[]);
    let said = contradictions(&row, &given(256));
    assert_eq!(said, [("number of requests".to_owned(), "10".to_owned(), "256".to_owned())]);
    let far = contradictions(&row, &given(2));
    assert_eq!((far[0].0.as_str(), far[0].2.as_str()), ("mean batch", "2"), "{far:?}");
    assert!(far[0].1.starts_with("6.7 (the file's mean concurrency of 6.9"), "{far:?}");
    // The batch filled and drained: seven on average, ten while it was full.
    for near in [4, 7, 10] {
        let (batch, said) = batch(&row, Some(near));
        assert_eq!(batch as u64, near);
        assert!(said.starts_with(&format!("batch {near} as given: the file has 6.7 on average")), "{said}");
    }
    // Of an estimate by tokens alone, a wider band is left.
    let served = &one("vllm-serve-appended.json").rows[1];
    for (batch, wanted) in [(1, 1), (5, 0), (11, 0), (30, 0), (90, 1)] {
        let said = fields(served, &given(batch));
        let found = said.iter().filter(|field| !field.starts_with("model")).count();
        assert_eq!(found, wanted, "{batch}: {said:?}");
    }
}

#[test]
fn requests_that_come_one_by_one_have_a_batch_of_one_or_two() {
    let mut row = ten_requests(&[]);
    (row.setup.concurrency, row.setup.requests) = (Some(0.3), Some(100));
    assert_eq!(batch(&row, None).0, 1);
    assert_eq!(batch(&row, Some(2)).0, 2, "two that met by chance");
    let architecture = test_shapes::llama_3_1_8b();
    let given = UserOverrides { batch: Some(4), ..on(&architecture, "h100-sxm", Some(Dtype::Bf16)) };
    assert_eq!(fields(&row, &given), ["mean batch"]);
}

/// vLLM's files have no E2E unless it is asked for, and short answers have the longest TPOT.
#[test]
fn a_file_without_times_of_whole_requests_may_have_all_its_requests_at_once() {
    let mut record: serde_json::Value =
        serde_json::from_str(&TEN_REQUESTS.replace("Infinity", "\"inf\"").replace("null", "10")).unwrap();
    let judged = |record: &serde_json::Value| {
        parse("vllm.json", record.to_string()).unwrap().remove(0).rows.remove(0).problems
    };
    record.as_object_mut().unwrap().remove("mean_e2e_latency_ms").unwrap();
    assert_eq!(judged(&record), vec![]);
    // A rate that needs ten times as many at once as there may be.
    record["max_concurrency"] = 1.into();
    let reasons = judged(&record);
    assert!(reasons.iter().any(|cause| cause.to_string().contains("no more than 1")), "{reasons:?}");
}
