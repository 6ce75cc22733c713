//! `hbmark serve --url` and `hbmark doctor --url` against a scripted server.

use std::path::Path;
use std::time::Duration;

use assert_cmd::Command;
use hbmark_client::mock::{Answer, Mock, Script, Stream};
use hbmark_core::result::serving::{Dialect, ServeKind, ServeReport, TokenEvidence};
use predicates::prelude::PredicateBooleanExt;
use predicates::str::contains;
use tempfile::tempdir;

use crate::runs::words;

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

const LOAD: &str =
    "--rate 100 --requests 30 --warmup-requests 5 --input-len=16 --output-len=8 --metrics-interval=0.1";

/// Serves, and reads what was saved. A machine that is busy with other tests may make the point invalid, which is an exit code of 1.
fn served(url: &str, more: &[&str], folder: &Path) -> ServeReport {
    let out = folder.to_str().unwrap();
    let code = hbmark()
        .args(["serve", "--url", url])
        .args(words(LOAD))
        .args(more)
        .args(["--out", out])
        .output()
        .unwrap();
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
    assert!(
        report.model.is_none() && report.dtype.is_none(),
        "nothing is claimed of a model that was not given"
    );
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
    hbmark()
        .args(["report", folder.path().join("a/serve.json").to_str().unwrap()])
        .assert()
        .stdout(contains("vLLM"));
}

#[test]
fn headers_an_endpoint_and_metadata_are_as_asked_for_and_no_secret_is_kept() {
    let mock = server(None);
    let folder = tempdir().unwrap();
    let dir = folder.path().to_str().unwrap();
    let more = [
        &["--header", "X-Team=inference", "x-api-key=$OPENAI_API_KEY", "--endpoint", "/v1/chat/completions"],
        &["--metadata", "tp=8", "completed=no", "--save-result", "--result-filename"][..],
        &["vllm.json", "--result-dir", dir],
    ];
    // Its page and its JSON are searched for the secret there.
    let report = served(&mock.url(), &more.concat(), &folder.path().join("a"));
    assert_eq!(report.server.as_ref().unwrap().path, "/v1/chat/completions");
    let server = &report.config["server"];
    assert_eq!(server["metadata"], serde_json::json!({"tp": "8", "completed": "no"}));
    let headers = serde_json::json!(["x-team=inference", "x-api-key=$OPENAI_API_KEY"]);
    assert_eq!(server["access"]["headers"], headers);
    let requests = mock.requests();
    let of = |name: &str| requests.iter().map(|request| request.header(name)).collect::<Vec<_>>();
    assert!(of("x-team").iter().all(|value| value.as_deref() == Some("inference")));
    assert!(of("x-api-key").iter().all(|value| value.as_deref() == Some("sk-secret")));
    let posts = requests.iter().filter(|request| request.method == "POST");
    assert!(posts.map(|request| &*request.target).all(|target| target == "/v1/chat/completions"));
    let written = std::fs::read_to_string(folder.path().join("vllm.json")).unwrap();
    assert!(!written.contains("sk-secret"));
    let written: serde_json::Value = serde_json::from_str(&written).unwrap();
    assert_eq!((&written["tp"], &written["completed"]), (&"8".into(), &30.into()));

    for (arguments, problem) in [
        (["--header", "Authorization=Bearer sk-secret"], "environment variable"),
        (["--header", "x-token=$HBMARK_NOT_SET"], "HBMARK_NOT_SET for the header x-token is not set"),
        (["--header", "content-length=3"], "content-length is set by the client"),
        (["--header", "x-a=b\r\nx-c: d"], "no header can have"),
        (["--endpoint", "v1/completions"], "not a path"),
        (["--endpoint", "/v1/completions?key=sk"], "without parameters"),
        (["--metadata", "tp"], "KEY=VALUE"),
    ] {
        let done = hbmark().args(["serve", "--url", &mock.url()]).args(arguments).output().unwrap();
        let said = String::from_utf8_lossy(&done.stderr);
        assert!(done.status.code() == Some(2) && said.contains(problem), "{arguments:?}: {said}");
        assert!(!said.contains("sk-secret"), "{said}");
    }
}

#[test]
fn failures_are_counted_by_class_and_stay_in_the_percentiles() {
    let busy =
        Answer::status(429, "application/json", "retry-after: 1\r\n", r#"{"error":{"message":"too busy"}}"#);
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
    let (ttft, own) =
        (point.result.as_ref().unwrap().ttft_ns.clone(), live.ttft_from_dispatch_ns.p50.unwrap());
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
    hbmark()
        .args(["doctor", "--url", &mock.url()])
        .assert()
        .code(0)
        .stdout(contains("vLLM").and(contains("mock")));
    hbmark()
        .args(["doctor", "--url", "http://127.0.0.1:9"])
        .assert()
        .code(1)
        .stdout(contains("nothing answers"));
    hbmark()
        .args(["doctor", "--url", "localhost"])
        .assert()
        .code(2)
        .stderr(contains("http://127.0.0.1:8000"));
    hbmark()
        .args(["serve", "--url", "http://127.0.0.1:9"])
        .assert()
        .code(2)
        .stderr(contains("nothing answers at http://127.0.0.1:9"));
}

#[test]
fn two_servers_are_compared_with_the_same_requests_in_every_round() {
    let (a, b) = (server(None), server(None));
    let folder = tempdir().unwrap();
    let out = folder.path().join("ab");
    let sides = [format!("url={}", a.url()), format!("url={}", b.url())];
    let load = "rate=400 requests=40 warmup=5 input-len=16 output-len=8 metrics-interval=0";
    let done = hbmark()
        .args(["compare", &sides[0], &sides[1], "--both", load, "--rounds", "8"])
        .args(["--out", out.to_str().unwrap()])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(matches!(done.status.code(), Some(0 | 1)), "{said}");
    let text = std::fs::read_to_string(out.join("comparison.json")).unwrap();
    let found: hbmark_core::result::comparison::Comparison = serde_json::from_str(&text).unwrap();
    let metrics: Vec<String> = found.cells.iter().map(|cell| cell.place.id()).collect();
    assert_eq!(metrics, ["ttft_p50", "ttft_p95", "tpot_p50", "tpot_p95", "e2e_p50", "e2e_p95"]);
    assert!(
        found.remarks.iter().any(|remark| remark.contains("the same bytes to both")),
        "{:?}",
        found.remarks
    );
    assert!(found.differences.iter().any(|difference| difference.key == "server.url"));
    // Every launch has a salt of its own, and both of a round the same prompts.
    let bodies = |mock: &Mock| -> Vec<(String, String)> {
        let requests = mock.requests();
        let posts = requests.iter().filter(|request| request.method == "POST");
        let mut all: Vec<(String, String)> = posts
            .map(|request| {
                let body: serde_json::Value = serde_json::from_slice(&request.body).unwrap();
                (body["prompt"].to_string(), body["cache_salt"].to_string())
            })
            .collect();
        all.sort();
        all
    };
    let (of_a, of_b) = (bodies(&a), bodies(&b));
    let prompts = |all: &[(String, String)]| {
        all.iter().map(|(prompt, _)| prompt.clone()).collect::<std::collections::BTreeSet<_>>()
    };
    // Behind the measured ones as many are sent as it takes until those are done.
    let common = prompts(&of_a).intersection(&prompts(&of_b)).count();
    // A busy machine makes launches invalid, and then it ends where seven usable rounds are out of reach.
    let rounds = found.rounds.unwrap();
    assert!(rounds >= 2 && common >= rounds * 45, "{common} of {} and {}", of_a.len(), of_b.len());
    let salts: std::collections::BTreeSet<&String> = of_a.iter().chain(&of_b).map(|(_, salt)| salt).collect();
    assert_eq!(salts.len(), 2 * rounds);
    for format in ["csv", "md", "table"] {
        let json = out.join("comparison.json");
        hbmark()
            .args(["report", json.to_str().unwrap(), "--format", format])
            .assert()
            .code(0)
            .stdout(contains("e2e").and(contains("p95")));
    }
}

#[test]
fn a_result_is_written_in_vllms_schema_and_placed_on_the_ladder() {
    let mock = server(None);
    let folder = tempdir().unwrap();
    let dir = folder.path().to_str().unwrap();
    let report = served(
        &mock.url(),
        &[
            "--save-result",
            "--result-dir",
            dir,
            "--result-filename",
            "vllm.json",
            "--percentile-metrics",
            "ttft,tpot,e2el",
        ],
        &folder.path().join("a"),
    );
    let written = std::fs::read_to_string(folder.path().join("vllm.json")).unwrap();
    let written: serde_json::Value = serde_json::from_str(&written).unwrap();
    let result = report.points[0].result.as_ref().unwrap();
    assert_eq!(written["completed"].as_u64(), u64::try_from(result.served).ok());
    assert_eq!(written["backend"], "vllm");
    assert!(written["median_e2el_ms"].as_f64().unwrap() > written["median_ttft_ms"].as_f64().unwrap());
    assert_eq!(written["total_input_tokens"].as_u64(), Some(30 * 16));
    // Of a server's steps and pool nothing is seen, and nothing is drawn.
    let page = std::fs::read_to_string(folder.path().join("a/report.html")).unwrap();
    assert!(page.contains("requests running and waiting") && !page.contains("KV blocks in use"));
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let roofline = ["--model", "Llama-3.1-8B", "--gpu", "h200", "--dtype", "bf16"];
    hbmark()
        .args(["import", &path("vllm.json"), &path("a/serve.json")])
        .args(roofline)
        .assert()
        .stdout(contains("vLLM bench serve").and(contains("hbmark serve")));
    hbmark()
        .args(["ladder", "--cell", "decode/ideal/bf16/b1/c64", "--url", &mock.url()])
        .args(["--model", "Llama-3.1-8B", "--gpu", "h200", "--dtype", "bf16"])
        .assert()
        .code(0)
        .stdout(contains("vLLM"));
}

#[test]
fn names_of_vllm_bench_serve_are_understood() {
    let mock = server(None);
    let url = mock.url();
    let done = hbmark()
        .args(["serve", "--backend", "vllm", "--base-url", &url, "--model", "mock"])
        .args(["--dataset-name", "random", "--random-input-len", "16", "--random-output-len", "8"])
        .args(words("--random-range-ratio 0.5 --num-prompts 40 --request-rate 200 --burstiness 0.5"))
        .args(["--max-concurrency", "8", "--num-warmups", "5", "--goodput", "ttft:200", "tpot:50"])
        .args(["--format", "json"])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(matches!(done.status.code(), Some(0 | 1)), "{said}");
    let report: ServeReport = serde_json::from_slice(&done.stdout).unwrap();
    let point = &report.points[0];
    let result = point.result.as_ref().unwrap();
    assert_eq!(result.measured, 40);
    assert!(result.goodput_share.is_some() && result.slo.len() == 2);
    let requests = result.requests.as_ref().unwrap();
    assert!(requests.prompt_tokens.iter().all(|tokens| (8..=24).contains(tokens)));
    assert!(requests.prompt_tokens.iter().any(|tokens| *tokens != 16));
    // Another model than the one that was asked for is not measured.
    hbmark()
        .args(["serve", "--base-url", &url, "--model", "some/unknown-model"])
        .assert()
        .code(2)
        .stderr(contains("does not list some/unknown-model").and(contains("it lists mock")));
    for (flag, wanted) in [("--host", "--url http://HOST:PORT"), ("--isl", "--input-len TOKENS")] {
        hbmark().args(["serve", flag, "1"]).assert().code(2).stderr(contains(wanted));
    }
    hbmark()
        .args(["serve", "--base-url", &url, "--goodput", "ttft=200"])
        .assert()
        .code(2)
        .stderr(contains("ttft:200"));
}

#[test]
fn the_prompts_of_a_dataset_are_sent_as_recorded() {
    let mock = server(None);
    let folder = tempdir().unwrap();
    let tokenizer = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/tokenizers/bytes.json");
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let rows: Vec<_> = (0..100)
        .map(|n| {
            let turn = |from: &str, value: String| serde_json::json!({"from": from, "value": value});
            let turns =
                [turn("human", format!("How far is it to number {n}?")), turn("gpt", "far ".repeat(3))];
            serde_json::json!({"id": n.to_string(), "conversations": turns})
        })
        .collect();
    std::fs::write(path("sharegpt.json"), serde_json::to_string(&rows).unwrap()).unwrap();
    let serve = |api: &str, dataset: &[&str]| {
        hbmark()
            .args(["serve", "--base-url", &mock.url(), "--backend", api, "--rate", "100", "--requests", "30"])
            .args(dataset)
            .args(["--format", "json"])
            .output()
            .unwrap()
    };
    let recorded = ["--dataset-name", "sharegpt", "--dataset-path", &path("sharegpt.json")];
    let done = serve("openai-chat", &[&recorded[..], &["--tokenizer", tokenizer]].concat());
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(matches!(done.status.code(), Some(0 | 1)), "{said}");
    let report: ServeReport = serde_json::from_slice(&done.stdout).unwrap();
    assert_eq!(report.workload.name, "ShareGPT dataset");
    let bodies: Vec<serde_json::Value> = mock
        .requests()
        .iter()
        .filter(|request| request.target.ends_with("/chat/completions"))
        .map(|request| serde_json::from_slice(&request.body).unwrap())
        .collect();
    let text = |body: &serde_json::Value| body["messages"][0]["content"].as_str().unwrap().to_owned();
    let texts: std::collections::BTreeSet<String> = bodies.iter().map(text).collect();
    assert!(texts.len() >= 30 && texts.iter().all(|text| text.starts_with("How far is it to number ")));
    // The tokenizer has a token for each byte.
    assert!(bodies.iter().all(|body| body.to_string().contains("12")), "as long as the recorded answers");
    let point = &report.points[0];
    assert!((26.0..=27.0).contains(&point.mean_prompt_tokens), "{}", point.mean_prompt_tokens);
    let requests = point.result.as_ref().unwrap().requests.as_ref().unwrap();
    assert!(
        requests.prompt_tokens.iter().all(|tokens| *tokens == 7),
        "this server counts words: {requests:?}"
    );
    for (arguments, problem) in [
        (&recorded[..], "--tokenizer"),
        (&recorded[..2], "--dataset-path"),
        (
            &["--dataset-name", "sharegpt", "--dataset-path", tokenizer, "--tokenizer", tokenizer][..],
            "ShareGPT",
        ),
        (&["--dataset-name", "random", "--dataset-path", tokenizer][..], "has no file"),
    ] {
        let done = serve("vllm", arguments);
        let said = String::from_utf8_lossy(&done.stderr);
        assert!(done.status.code() == Some(2) && said.contains(problem), "{arguments:?}: {said}");
    }
}

#[test]
fn a_grammar_and_adapters_go_to_the_server_in_its_own_words() {
    let mock = server(None);
    let folder = tempdir().unwrap();
    let more = ["--structured", "regex:[a-z]+", "--structured-share", "0.5"];
    served(&mock.url(), &more, &folder.path().join("a"));
    let bodies = |mock: &Mock| -> Vec<serde_json::Value> {
        let requests = mock.requests();
        let posts = requests.iter().filter(|request| request.method == "POST");
        posts.map(|request| serde_json::from_slice(&request.body).unwrap()).collect()
    };
    let constrained = |body: &&serde_json::Value| body.to_string().contains("[a-z]+");
    let all = bodies(&mock);
    let held: Vec<_> = all.iter().filter(constrained).collect();
    assert!(!held.is_empty() && held.len() < all.len());
    assert!(held.iter().all(|body| body.get("ignore_eos").is_none()), "a grammar ends its outputs");
    let prompts: std::collections::BTreeSet<String> =
        all.iter().map(|body| body["prompt"].to_string()).collect();
    assert_eq!(prompts.len(), all.len(), "the server's cache has no prompt of the run without a grammar");

    let mock = server(None);
    let report =
        served(&mock.url(), &["--enable-lora", "--lora-modules", "sql", "chat"], &folder.path().join("b"));
    // The server has no such adapters: what is left is the baseline without them.
    assert_eq!(report.points.len(), 1, "{:?}", report.warnings);
    assert!(report.warnings.iter().any(|warning| warning.contains("status_404")), "{:?}", report.warnings);
    let models: std::collections::BTreeSet<String> =
        bodies(&mock).iter().map(|body| body["model"].as_str().unwrap().to_owned()).collect();
    assert!(models.contains("sql") && models.contains("chat") && models.len() == 3, "{models:?}");
    hbmark()
        .args(["serve", "--url", &mock.url(), "--enable-lora"])
        .assert()
        .code(2)
        .stderr(contains("--lora-modules"));
}
