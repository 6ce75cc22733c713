use std::collections::BTreeSet;

use super::{Cause, ConsistencyRule};
use crate::model::Dtype;
use crate::result::saved;
use crate::result::serving::{Gate, GateName};
use crate::units::Bytes;

const BYTES: Bytes = Bytes(3_000_000);

fn samples() -> Vec<Cause> {
    let text = || "text".to_owned();
    let last = || Box::new(Cause::ForeignLoad { cores: 0.9 });
    vec![
        Cause::Throttled { reasons: vec!["hw_slowdown".into(), "hw_thermal".into()] },
        Cause::ForeignLoad { cores: 0.9 },
        Cause::CpuSteal { cores: 0.5 },
        Cause::CpuQuota { cores: 0.5 },
        Cause::ThreadsAway { threads: 1.0 },
        Cause::Canary { ratio: 1.031 },
        Cause::PowerCapped,
        Cause::ClockEvent { reason: "unknown_0x4000".into() },
        Cause::GpuShared { processes: 2 },
        Cause::BandwidthShifted { ratio: 1.5 },
        Cause::CeilingUnsteady { low_bytes_per_s: 1.1e10, high_bytes_per_s: 1.7e10 },
        Cause::CeilingDisturbed { cause: last() },
        Cause::RejectedInARow { blocks: 4, last: last() },
        Cause::MostRejected { rejected: 9, blocks: 10, last: last() },
        Cause::StillDrifting { drift: 0.08, warmup_s: 20.0 },
        Cause::IntervalTooWide { half_width: 0.031, wanted: 0.01, blocks: 40, sampled_s: 12.0 },
        Cause::TooFewBlocks { blocks: 1 },
        Cause::RunStopped { blocks: 3 },
        Cause::NotReached,
        Cause::TokensChanged { sequence: 1, first: 2, then: 3 },
        Cause::TokenCount { wanted: 4, found: 3 },
        Cause::ClocksDisagree { timeline_ns: 1e6, host_ns: 2e6 },
        Cause::WorkUnseen { timeline_ns: 1e3, host_ns: 1e6, bytes: BYTES },
        Cause::WrongOutputs { check: "logits".into(), max_relative_error: Some(0.2) },
        Cause::WeightsSize { found_bytes: Bytes(6_000_000), wanted_bytes: BYTES },
        Cause::WeightsStorage { bytes: BYTES, found: "f16".into(), wanted: "bf16".into() },
        Cause::AboveDatasheetBandwidth { share: 1.2, bytes: BYTES },
        Cause::AboveDatasheetPeak { share: 1.2 },
        Cause::AboveReadCeiling { share: f64::INFINITY },
        Cause::ImportMismatch { impossible: Box::new(Cause::AboveDatasheetPeak { share: 3.0 }) },
        Cause::ReadCeilingLow { share: 1.04 },
        Cause::PeakUnknown { dtype: Dtype::F16 },
        Cause::EngineTraffic { moved_share: 0.96, ideal_share: 0.4 },
        Cause::WorkingSetInCache { bytes: BYTES, cache_bytes: BYTES, margin: 3 },
        Cause::CacheBandwidth { share: 1.5 },
        Cause::DoesNotFit { needed_bytes: BYTES, device_bytes: BYTES, usable_share: 0.9 },
        Cause::EmptyBatch,
        Cause::DecodeOnly { engine: text() },
        Cause::BatchAboveLimit { batch: 16, limit: 8, limited_by: None },
        Cause::ExceedsContext { positions: 1025, limit: 1024, limited_by: None },
        Cause::NotEnoughMemory { needed_bytes: BYTES, available_bytes: BYTES },
        Cause::WeightsDoNotFit { needed_bytes: BYTES, available_bytes: BYTES, usable_percent: 90 },
        Cause::Unsupported { engine: text(), what: text(), why: text() },
        Cause::NotReplayed { engine: text(), why: text() },
        Cause::OutOfMemory { device: text(), detail: text(), during: Some(text()) },
        Cause::DeviceFailed { device: text(), detail: text() },
        Cause::EngineFailed { detail: text() },
        Cause::WorkerLost { detail: text() },
        Cause::GateFailed { gate: GateName::KvAccounting, detail: text() },
        Cause::AllAtOnce,
        Cause::LatenciesRise,
        Cause::SweepEnded { variable: "rate".into(), value: 8.0, why: text() },
        Cause::Interrupted { signal: "SIGINT".into() },
        Cause::FileContradicts { field: "dtype".into(), file: "fp8".into(), given: "bf16".into() },
        Cause::Inconsistent { rule: ConsistencyRule::Throughput, detail: text() },
        Cause::other("as it was"),
    ]
}

/// Codes, as the JSON schema has them.
fn codes() -> BTreeSet<String> {
    let schema = schemars::schema_for!(Cause).to_value();
    let code_of = |variant: &serde_json::Value| {
        let code = variant["properties"]["code"]["const"].as_str().unwrap().to_owned();
        assert!(variant["required"].as_array().unwrap().contains(&"message".into()), "{code}");
        code
    };
    schema["oneOf"].as_array().unwrap().iter().map(code_of).collect()
}

#[test]
fn every_cause_is_written_with_its_code_and_words_and_read_back() {
    let mut seen = BTreeSet::new();
    for cause in samples() {
        let text = serde_json::to_string(&cause).unwrap();
        assert_eq!(text.matches("\"message\":").count(), text.matches("\"code\":").count(), "{text}");
        let written: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(written["message"], cause.to_string());
        assert!(!cause.to_string().is_empty());
        seen.insert(written["code"].as_str().unwrap().to_owned());
        assert_eq!(serde_json::from_str::<Cause>(&text).unwrap(), cause, "{text}");
        assert_eq!(crate::input::json::from_str::<Cause>(&text, 1 << 20).unwrap(), cause, "{text}");
    }
    assert_eq!(seen, codes(), "every variant has a sample");
}

#[test]
fn the_words_are_the_numbers_and_never_what_a_file_says() {
    let edited = r#"{"code": "canary", "message": "all is well", "ratio": 1.031}"#;
    assert_eq!(
        serde_json::from_str::<Cause>(edited).unwrap().to_string(),
        "reference read (canary) +3.1 % off its usual time"
    );
}

#[test]
fn a_sentence_of_version_1_is_another_cause() {
    assert_eq!(
        serde_json::from_str::<Cause>("\"canary +3.1 % off\"").unwrap(),
        Cause::other("canary +3.1 % off")
    );
}

#[test]
fn a_code_that_nobody_knows_is_refused_by_name() {
    let error = serde_json::from_str::<Cause>(r#"{"code": "moon_phase", "message": "full"}"#).unwrap_err();
    assert!(error.to_string().contains("moon_phase"), "{error}");
}

#[test]
fn a_result_of_version_1_opens_with_its_sentences() {
    let old = include_str!("../../../../../fuzz/seeds/result-full.json");
    assert!(old.contains("\"schema_version\":1,"));
    let report = saved::parse(old).unwrap();
    let rejected =
        report.cells.iter().flat_map(|cell| &cell.blocks).find_map(|block| block.rejected.as_ref());
    assert_eq!(rejected, Some(&Cause::other("canary 1.05")));
    for version in [0, 3] {
        let other = old.replacen("\"schema_version\":1,", &format!("\"schema_version\":{version},"), 1);
        let error = saved::parse(&other).unwrap_err().to_string();
        assert!(error.contains(&format!("version {version}, this program reads")), "{error}");
    }
}

#[test]
fn gates_of_version_1_keep_their_names() {
    for name in ["injection lag", "realised rate", "Little's law", "KV books", "token count", "keeps up"] {
        let old = serde_json::json!({ "name": name, "passed": null, "detail": "" });
        let gate: Gate = serde_json::from_value(old).unwrap();
        assert_eq!(
            gate.name.to_string(),
            name.replace("books", "accounting").replace("realised", "achieved")
        );
        let written = serde_json::to_value(&gate).unwrap();
        assert_eq!(serde_json::from_value::<Gate>(written).unwrap(), gate);
    }
}

/// The table of `docs/causes.md`, in the order of the enum.
fn table() -> String {
    let schema = schemars::schema_for!(Cause).to_value();
    let row = |variant: &serde_json::Value| {
        let text = |value: &serde_json::Value| value.as_str().unwrap().replace('\n', " ");
        let fields = variant["properties"].as_object().unwrap();
        let own = fields.keys().filter(|name| !matches!(name.as_str(), "code" | "message"));
        let own: Vec<String> = own.map(|name| format!("`{name}`")).collect();
        let (code, meaning) = (text(&fields["code"]["const"]), text(&variant["description"]));
        format!("| `{code}` | {} | {} | {meaning} |\n", own.join(", "), text(&variant["where"]))
    };
    let rows: String = schema["oneOf"].as_array().unwrap().iter().map(row).collect();
    format!("| code | fields | where | meaning |\n|---|---|---|---|\n{rows}")
}

#[test]
fn the_table_of_the_document_is_the_one_of_the_program() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/causes.md");
    let document = std::fs::read_to_string(path).unwrap();
    let begin = document.find("| code |").unwrap();
    let wanted = format!("{}{}", &document[..begin], table());
    if std::env::var_os("INSTA_UPDATE").is_some_and(|v| v == "always") {
        std::fs::write(path, &wanted).unwrap();
        return;
    }
    assert_eq!(document, wanted, "docs/causes.md: run the tests with INSTA_UPDATE=always");
}

#[test]
fn what_hardly_does_not_fit_has_the_digits_that_say_so() {
    let needs = |mib: u64| {
        let device_bytes = Bytes(80 << 30);
        Cause::DoesNotFit { needed_bytes: Bytes(mib << 20), device_bytes, usable_share: 0.9 }.to_string()
    };
    let of = "above the usable 72";
    assert_eq!(
        needs(72 * 1024 + 30),
        format!("does not fit: needs 72.03 GiB, {of}.00 GiB, 90 % of the device's 80 GiB")
    );
    assert_eq!(
        needs(140 * 1024),
        format!("does not fit: needs 140.0 GiB, {of}.0 GiB, 90 % of the device's 80 GiB")
    );
}
