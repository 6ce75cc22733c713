//! `hbmark serve --url` and `hbmark doctor --url` against a scripted server.

use std::path::Path;
use std::time::Duration;

use assert_cmd::Command;
use hbmark_client::mock::{Answer, Mock, Script, Stream};
use hbmark_core::result::serving::{Dialect, ServeKind, ServeReport, TokenEvidence};
use predicates::prelude::PredicateBooleanExt;
use predicates::str::contains;
use tempfile::tempdir;

fn hbmark() -> Command {
    let mut command = Command::cargo_bin("hbmark").unwrap();
    command.env("OPENAI_API_KEY", "sk-secret").env_remove("HBMARK_MODEL");
    command
}

/// A quick server: 5 ms to the first token, 1 ms between tokens.
fn server(answer: Option<Answer>) -> Mock {
    let stream = Stream {
        first_token: Duration::from_millis(5),
        token_gap: Duration::from_millis(1),
        ..Stream::default()
    };
    Mock::start(Script::new(answer.unwrap_or(Answer::Stream(stream)))).unwrap()
}

const LOAD: [&str; 9] = [
    "--rate",
    "100",
    "--requests",
    "30",
    "--warmup-requests",
    "5",
    "--input-len=16",
    "--output-len=8",
    "--metrics-interval=0.1",
];

/// Serves, and reads what was saved. A machine that is busy with other tests may make the point invalid, which is an exit code of 1.
fn served(url: &str, more: &[&str], folder: &Path) -> ServeReport {
    let out = folder.to_str().unwrap();
    let code = hbmark().args(["serve", "--url", url]).args(LOAD).args(more).args(["--out", out]).output().unwrap();
    assert!(matches!(code.status.code(), Some(0 | 1)), "{}", String::from_utf8_lossy(&code.stderr));
    let page = std::fs::read_to_string(folder.join("report.html")).unwrap();
    let text = std::fs::read_to_string(folder.join("serve.json")).unwrap();
    for kept in [&page, &text] {
        assert!(!kept.contains("sk-secret"), "a key is in no result");
    }
    serde_json::from_str(&text).unwrap()
}

#[test]
fn a_server_is_measured_as_an_engine_is() {
    let mock = server(None);
    let folder = tempdir().unwrap();
    let report = served(&mock.url(), &[], &folder.path().join("a"));
    let identity = report.server.as_ref().unwrap();
    assert_eq!((report.kind, identity.dialect), (ServeKind::ServeLive, Dialect::Vllm));
    assert!(report.model.is_none() && report.dtype.is_none(), "nothing is claimed of a model that was not given");
    let point = &report.points[0];
    let (result, live) = (point.result.as_ref().unwrap(), point.live.as_ref().unwrap());
    assert_eq!((result.served, result.measured, result.unfinished), (30, 30, 0));
    assert!(point.scheduler.is_none() && result.queue_ns.is_none());
    assert_eq!(live.evidence, [(TokenEvidence::ContinuousUsage, 30)].into());
    assert_eq!((live.short_outputs, live.long_outputs, live.disagreeing_counts), (0, 0, 0));
    assert_eq!(result.ttft_ns.as_ref().unwrap().n, 30);
    assert_eq!(result.itl_ns.as_ref().unwrap().n, 30 * 7);
    let counters = live.server.as_ref().unwrap();
    assert!(counters.generation_tokens.unwrap() >= 30 * 8, "its own counters are read beside the run");
    // What the server got is what was planned.
    let requests = mock.requests();
    let completions: Vec<_> = requests.iter().filter(|request| request.method == "POST").collect();
    assert!(completions.len() >= 30);
    assert!(completions.iter().all(|r| r.header("authorization").as_deref() == Some("Bearer sk-secret")));
    let body: serde_json::Value = serde_json::from_slice(&completions[0].body).unwrap();
    assert_eq!(body["prompt"].as_array().unwrap().len(), 16);
    assert_eq!((body["max_tokens"].as_u64(), body["ignore_eos"].as_bool()), (Some(8), Some(true)));

    // The same requests to the byte with the same seed, others with another.
    let hash = |report: &ServeReport| report.points[0].live.as_ref().unwrap().bodies_sha256.clone();
    let again = served(&mock.url(), &[], &folder.path().join("b"));
    let other = served(&mock.url(), &["--seed", "7"], &folder.path().join("c"));
    assert!(hash(&report) == hash(&again) && hash(&report) != hash(&other));
    hbmark().args(["report", folder.path().join("a/serve.json").to_str().unwrap()]).assert().stdout(contains("vLLM"));
}

#[test]
fn failures_are_counted_by_class_and_stay_in_the_percentiles() {
    let busy = Answer::status(429, "application/json", "retry-after: 1\r\n", r#"{"error":{"message":"too busy"}}"#);
    let mock = server(Some(busy));
    let folder = tempdir().unwrap();
    let report = served(&mock.url(), &[], &folder.path().join("a"));
    let point = &report.points[0];
    let (result, live) = (point.result.as_ref().unwrap(), point.live.as_ref().unwrap());
    assert_eq!(result.rejected, [("status_429".to_owned(), 30)].into());
    assert_eq!(live.e2e_from_dispatch_ns.infinite, 30);
    assert!(live.messages["status_429"].contains("too busy"));
}

#[test]
fn a_rate_beside_a_cap_counts_the_wait_from_the_schedule() {
    let mock = server(None);
    let folder = tempdir().unwrap();
    let report = served(&mock.url(), &["--max-concurrency", "1"], &folder.path().join("a"));
    let point = &report.points[0];
    let live = point.live.as_ref().unwrap();
    let (ttft, own) = (point.result.as_ref().unwrap().ttft_ns.clone(), live.ttft_from_dispatch_ns.p50.unwrap());
    // 12 ms of work came every 10 ms, one at a time. A point that is saturated reports no TTFT.
    assert!(ttft.is_none_or(|ttft| ttft.p50.unwrap().value() > own.value()));
    assert!(live.client_queue_ns.p50.unwrap().value() > 1e6);
    hbmark()
        .args(["serve", "--rate", "1", "--concurrency", "2", "--virtual"])
        .assert()
        .code(2)
        .stderr(contains("--url"));
}

#[test]
fn the_doctor_says_what_answers() {
    let mock = server(None);
    hbmark().args(["doctor", "--url", &mock.url()]).assert().code(0).stdout(contains("vLLM").and(contains("mock")));
    hbmark().args(["doctor", "--url", "http://127.0.0.1:9"]).assert().code(1).stdout(contains("nothing answers"));
    hbmark().args(["doctor", "--url", "localhost"]).assert().code(2).stderr(contains("http://127.0.0.1:8000"));
    hbmark()
        .args(["serve", "--url", "http://127.0.0.1:9"])
        .assert()
        .code(2)
        .stderr(contains("nothing answers at http://127.0.0.1:9"));
}
