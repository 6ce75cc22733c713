use super::*;
use crate::fetch::tests::{Reply, Server, json, not_found, reply};

fn ask(server: &Server) -> Probe {
    probe(&Target::new(&format!("{}/v1", server.url()), Some("sk-secret")).unwrap(), None)
}

fn outcome(probe: &Probe, question: Question) -> Option<Outcome> {
    probe.asked.iter().find(|asked| asked.question == question).map(|asked| asked.outcome)
}

fn clues(probe: &Probe) -> Vec<(Dialect, Clue)> {
    probe.evidence.iter().map(|evidence| (evidence.dialect, evidence.clue)).collect()
}

#[test]
fn vllm_is_known_by_the_owner_of_its_model_and_by_its_series() {
    let server = Server::start(|path| match path {
        "/v1/models" => json(
            r#"{"object":"list","data":[
                {"id":"m","object":"model","created":1,"owned_by":"vllm","root":"/models/m","parent":null,"max_model_len":4096},
                {"id":"lora","owned_by":"vllm","root":"/l","parent":"m"}]}"#,
        ),
        "/version" => json(r#"{"version":"0.32.0"}"#),
        "/health" => reply("200 OK", "text/plain", ""),
        "/metrics" => reply("200 OK", "text/plain", "vllm:num_requests_running{engine=\"0\"} 0.0\n"),
        _ => not_found(),
    });
    let probe = ask(&server);
    assert_eq!(probe.dialect, Dialect::Vllm);
    assert_eq!(clues(&probe), [(Dialect::Vllm, Clue::ModelOwner), (Dialect::Vllm, Clue::MetricNames)]);
    assert_eq!(probe.root, server.url());
    assert_eq!((probe.healthy, probe.version.as_deref()), (Some(true), Some("0.32.0")));
    assert_eq!((probe.model_count, probe.max_model_len), (2, Some(4096)));
    assert_eq!(probe.models[0].root.as_deref(), Some("/models/m"));
    assert_eq!(probe.models[1].parent.as_deref(), Some("m"));
    let metrics = probe.metrics.as_ref().unwrap();
    assert_eq!(
        (metrics.page.as_str(), metrics.signals.as_slice()),
        ("/metrics", [Signal::Running].as_slice())
    );
    assert_eq!(outcome(&probe, Question::Props), Some(Outcome::Failed(FetchFailure::Status(404))));
    // The second page was not asked for.
    assert_eq!(outcome(&probe, Question::PrometheusMetrics), None);
    assert_eq!(probe.addresses.len(), 1);
    assert_eq!((probe.addresses[0].connections, probe.addresses[0].failure), (CONNECTIONS, None));
    assert!(probe.addresses[0].connect_ns.unwrap() > 0.0);
    assert!(probe.key_sent && server.heads().iter().all(|head| head.contains("Bearer sk-secret")));
    let text = serde_json::to_string(&probe).unwrap();
    assert!(!text.contains("secret"));
    assert_eq!(serde_json::from_str::<Probe>(&text).unwrap(), probe);
}

#[test]
fn sglang_is_known_by_its_server_info_of_either_name() {
    for name in ["/server_info", "/get_server_info"] {
        let server = Server::start(move |path| match path {
            "/v1/models" => {
                json(r#"{"data":[{"id":"m","owned_by":"sglang","root":"m","max_model_len":8192}]}"#)
            }
            "/model_info" => json(r#"{"model_path":"m","tokenizer_path":"m","is_generation":true}"#),
            path if path == name => json(
                r#"{"model_path":"m","disable_radix_cache":false,"max_total_num_tokens":123456,
                    "max_running_requests":256,"context_length":null,"version":"0.5.23"}"#,
            ),
            _ => not_found(),
        });
        let probe = ask(&server);
        assert_eq!(probe.dialect, Dialect::Sglang, "{name}");
        assert_eq!(
            clues(&probe),
            [
                (Dialect::Sglang, Clue::ModelOwner),
                (Dialect::Sglang, Clue::ServerInfo),
                (Dialect::Sglang, Clue::ModelInfo)
            ]
        );
        assert_eq!(probe.version.as_deref(), Some("0.5.23"));
        assert_eq!(
            (probe.kv_tokens, probe.slots, probe.prefix_caching),
            (Some(123_456), Some(256), Some(true))
        );
        assert_eq!(probe.max_model_len, Some(8192));
        assert_eq!((probe.metrics.is_none(), probe.healthy), (true, None));
    }
}

#[test]
fn llama_cpp_is_known_by_its_props() {
    let server = Server::start(|path| match path {
        "/v1/models" => json(include_str!("../../tests/fixtures/llama-server-models.json")),
        "/props" => json(include_str!("../../tests/fixtures/llama-server-props.json")),
        "/health" => json(r#"{"status":"ok"}"#),
        "/metrics" => reply("501 Not Implemented", "application/json", r#"{"error":{"code":501}}"#),
        _ => not_found(),
    });
    let probe = ask(&server);
    assert_eq!(probe.dialect, Dialect::LlamaCpp);
    assert_eq!((probe.slots, probe.version.as_deref()), (Some(4), Some("b1-0c1e570")));
    assert_eq!((probe.models[0].vocab_size, probe.models[0].train_context), (Some(343), Some(4096)));
    assert_eq!(probe.max_model_len, Some(4096));
    assert_eq!(outcome(&probe, Question::Metrics), Some(Outcome::Failed(FetchFailure::Status(501))));
}

#[test]
fn tgi_and_tensorrt_llm_are_known() {
    let server = Server::start(|path| match path {
        "/info" => json(
            r#"{"model_id":"m","version":"3.3.6","max_total_tokens":4096,"max_concurrent_requests":128,"router":"text-generation-router"}"#,
        ),
        _ => not_found(),
    });
    let probe = ask(&server);
    assert_eq!((probe.dialect, probe.version.as_deref()), (Dialect::Tgi, Some("3.3.6")));
    assert_eq!((probe.max_model_len, probe.slots), (Some(4096), Some(128)));
    let server = Server::start(|path| match path {
        "/v1/models" => json(r#"{"data":[{"id":"m","owned_by":"tensorrt_llm"}]}"#),
        "/version" => json(r#"{"version":"1.3.0"}"#),
        // Its own statistics, which are not a page of series.
        "/metrics" => json("[]"),
        "/prometheus/metrics" => reply("200 OK", "text/plain", "trtllm_num_requests_running 0\n"),
        _ => not_found(),
    });
    let probe = ask(&server);
    assert_eq!(clues(&probe), [(Dialect::TrtLlm, Clue::ModelOwner), (Dialect::TrtLlm, Clue::MetricNames)]);
    assert_eq!(outcome(&probe, Question::Metrics), Some(Outcome::Failed(FetchFailure::NotUnderstood)));
    assert_eq!(probe.metrics.unwrap().page, "/prometheus/metrics");
}

#[test]
fn a_server_that_says_nothing_of_itself_speaks_the_common_interface() {
    let server = Server::start(|path| match path {
        "/v1/models" => json(r#"{"object":"list","data":[{"id":"gpt","owned_by":"somebody"}]}"#),
        "/health" => reply("503 Loading", "application/json", "{}"),
        _ => reply("200 OK", "text/html", "<html><body>Welcome</body></html>"),
    });
    let probe = ask(&server);
    assert_eq!((probe.dialect, probe.evidence.as_slice()), (Dialect::OpenAi, [].as_slice()));
    assert_eq!((probe.healthy, probe.models.len()), (Some(false), 1));
    for question in [Question::Version, Question::Props, Question::Metrics, Question::PrometheusMetrics] {
        assert_eq!(
            outcome(&probe, question),
            Some(Outcome::Failed(FetchFailure::NotUnderstood)),
            "{question:?}"
        );
    }
}

#[test]
fn clues_that_contradict_each_other_are_all_kept() {
    let server = Server::start(|path| match path {
        "/v1/models" => json(r#"{"data":[{"id":"m","owned_by":"vllm"}]}"#),
        "/model_info" => json(r#"{"model_path":"m","is_generation":true}"#),
        "/metrics" => reply("200 OK", "text/plain", "sglang:num_running_reqs 0\n"),
        _ => not_found(),
    });
    let probe = ask(&server);
    assert_eq!(probe.dialect, Dialect::Sglang);
    assert_eq!(probe.evidence.len(), 3);
}

#[test]
fn hostile_answers_are_outcomes() {
    let server = Server::start(|path| {
        match path {
        "/v1/models" => json(&format!("{{\"data\":{}{}}}", "[".repeat(100_000), "]".repeat(100_000))),
        "/version" => json(r#"{"version":["no","text"]}"#),
        "/props" => json(r#"{"total_slots":-1,"build_info":{"a":1}}"#),
        "/server_info" => reply("200 OK", "application/json", vec![b' '; 10 << 20 | 1]),
        "/get_server_info" => reply("401 Unauthorized", "application/json", "{}"),
        "/model_info" => Reply::Bytes(
            b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
                .to_vec(),
        ),
        "/info" => Reply::Hang,
        "/health" => Reply::Bytes(b"HELLO\r\n\r\n".to_vec()),
        _ => not_found(),
    }
    });
    let probe = ask(&server);
    let failed = |question| match outcome(&probe, question) {
        Some(Outcome::Failed(failure)) => failure,
        other => panic!("{question:?} {other:?}"),
    };
    assert_eq!(failed(Question::Models), FetchFailure::NotUnderstood);
    assert_eq!(failed(Question::ServerInfo), FetchFailure::TooLarge);
    assert_eq!(failed(Question::GetServerInfo), FetchFailure::Status(401));
    assert_eq!(failed(Question::ModelInfo), FetchFailure::Redirect(302));
    assert_eq!(failed(Question::Info), FetchFailure::Timeout);
    assert_eq!(failed(Question::Health), FetchFailure::MalformedHttp);
    assert_eq!((probe.dialect, probe.version, probe.slots), (Dialect::OpenAi, None, None));
}

#[test]
fn texts_and_lists_of_a_server_are_cut() {
    let server = Server::start(|path| match path {
        "/v1/models" => {
            let models: Vec<String> =
                (0..500).map(|_| format!("{{\"id\":\"{}\"}}", "ä".repeat(1_000))).collect();
            json(&format!("{{\"data\":[{}]}}", models.join(",")))
        }
        _ => not_found(),
    });
    let probe = ask(&server);
    assert_eq!((probe.model_count, probe.models.len()), (500, 64));
    assert_eq!(probe.models[0].id, "ä".repeat(128));
}

#[test]
fn nobody_there_is_a_result() {
    let probe = probe(&Target::new("http://127.0.0.1:1/v1", None).unwrap(), None);
    assert_eq!(probe.addresses[0].failure, Some(FetchFailure::Refused));
    assert_eq!((probe.addresses[0].connect_ns, probe.addresses[0].connections), (None, 0));
    assert!(probe.asked.iter().all(|asked| asked.outcome == Outcome::Failed(FetchFailure::Refused)));
    assert_eq!(probe.dialect, Dialect::OpenAi);
}

#[test]
fn every_address_of_a_name_is_tried() {
    let server = Server::start(|_| not_found());
    let target = Target::new(&format!("http://localhost:{}", server.address.port()), None).unwrap();
    let probe = probe(&target, Some("/elsewhere"));
    assert!(probe.resolve_ns.is_some());
    let open = probe.addresses.iter().find(|found| found.address == server.address.to_string()).unwrap();
    assert_eq!(open.connections, CONNECTIONS);
    assert!(server.heads().iter().any(|head| head.starts_with("GET /elsewhere ")));
    assert!(!server.heads().iter().any(|head| head.contains("metrics")));
}

/// Against a real one: `scripts/live-llama-server.sh` builds it; start it with `--metrics`.
#[test]
#[ignore = "needs a running llama-server: its address in HBMARK_LLAMA_SERVER"]
fn a_running_llama_server_is_known() {
    let url = std::env::var("HBMARK_LLAMA_SERVER").expect("HBMARK_LLAMA_SERVER is its address");
    let probe = probe(&Target::new(&url, None).unwrap(), None);
    println!("{}", serde_json::to_string_pretty(&probe).unwrap());
    assert_eq!(probe.dialect, Dialect::LlamaCpp);
    assert_eq!(
        clues(&probe),
        [
            (Dialect::LlamaCpp, Clue::ModelOwner),
            (Dialect::LlamaCpp, Clue::Props),
            (Dialect::LlamaCpp, Clue::MetricNames)
        ]
    );
    assert!(probe.slots.is_some() && probe.metrics.is_some() && probe.healthy == Some(true));
}
