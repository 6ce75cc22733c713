use super::*;
use hbmark_core::result::serving::Dialect;
use proptest::prelude::*;
use serde_json::json;

fn bytes(dialect: Dialect, api: Api, spec: &RequestSpec<'_>) -> Result<String, BodyError> {
    let mut into = b"what was there before".to_vec();
    write(Backend { dialect, api }, spec, &mut into)?;
    Ok(String::from_utf8(into).unwrap())
}

fn refusal(dialect: Dialect, api: Api, spec: &RequestSpec<'_>) -> String {
    bytes(dialect, api, spec).unwrap_err().to_string()
}

const IDS: &[u32] = &[1, 151_643, 7];

fn forced(evidence: TokenEvidence) -> RequestSpec<'static> {
    let sampling = Sampling { temperature: Some(0.0), ..Sampling::default() };
    RequestSpec { forced_length: true, evidence, sampling, ..RequestSpec::new("m", Prompt::Ids(IDS), 128) }
}

#[test]
fn the_bytes_of_a_request_of_forced_length_for_each_server() {
    let spec = forced(TokenEvidence::ContinuousUsage);
    let usage = r#""stream_options":{"include_usage":true,"continuous_usage_stats":true}"#;
    let same = format!(
        r#"{{"model":"m","prompt":[1,151643,7],"stream":true,"max_tokens":128,"ignore_eos":true,{usage},"temperature":0.0}}"#
    );
    for dialect in [Dialect::Vllm, Dialect::Sglang, Dialect::TrtLlm] {
        assert_eq!(bytes(dialect, Api::Completions, &spec).unwrap(), same);
    }
    assert_eq!(
        bytes(Dialect::LlamaCpp, Api::Completions, &RequestSpec { cache: Cache::Off, ..spec }).unwrap(),
        r#"{"model":"m","prompt":[1,151643,7],"stream":true,"n_predict":128,"ignore_eos":true,"stream_options":{"include_usage":true},"timings_per_token":true,"temperature":0.0,"cache_prompt":false}"#
    );
}

#[test]
fn the_bytes_of_a_chat() {
    let spec = RequestSpec {
        evidence: TokenEvidence::FinalUsage,
        sampling: Sampling {
            temperature: Some(0.7),
            top_p: Some(0.95),
            seed: Some(7),
            ..Sampling::default()
        },
        ..RequestSpec::new("m", Prompt::Text("say \"hé\"\n"), 16)
    };
    assert_eq!(
        bytes(Dialect::OpenAi, Api::Chat, &spec).unwrap(),
        r#"{"model":"m","messages":[{"role":"user","content":"say \"hé\"\n"}],"stream":true,"max_tokens":16,"stream_options":{"include_usage":true},"temperature":0.7,"top_p":0.95,"seed":7}"#
    );
    let turns = [Message { role: "system", content: "s" }, Message { role: "user", content: "u" }];
    let spec = RequestSpec {
        evidence: TokenEvidence::TokenIds,
        cache: Cache::Salt("a/0"),
        ..RequestSpec::new("m", Prompt::Messages(&turns), 16)
    };
    assert_eq!(
        bytes(Dialect::Vllm, Api::Chat, &spec).unwrap(),
        r#"{"model":"m","messages":[{"role":"system","content":"s"},{"role":"user","content":"u"}],"stream":true,"max_completion_tokens":16,"stream_options":{"include_usage":true},"return_token_ids":true,"cache_salt":"a/0"}"#
    );
}

#[test]
fn tgi_takes_its_parameters_in_an_object_of_their_own() {
    let greedy = RequestSpec {
        evidence: TokenEvidence::TokenIds,
        sampling: Sampling { temperature: Some(0.0), top_k: Some(4), ..Sampling::default() },
        ..RequestSpec::new("m", Prompt::Text("a"), 16)
    };
    assert_eq!(
        bytes(Dialect::Tgi, Api::Completions, &greedy).unwrap(),
        r#"{"inputs":"a","parameters":{"max_new_tokens":16,"details":true,"do_sample":false,"top_k":4}}"#
    );
    let warm = Sampling { temperature: Some(0.5), ..Sampling::default() };
    assert_eq!(
        bytes(
            Dialect::Tgi,
            Api::Completions,
            &RequestSpec { sampling: warm, ..RequestSpec::new("m", Prompt::Text("a"), 16) }
        )
        .unwrap(),
        r#"{"inputs":"a","parameters":{"max_new_tokens":16,"temperature":0.5}}"#
    );
    let chat = bytes(Dialect::Tgi, Api::Chat, &RequestSpec::new("llama", Prompt::Text("a"), 16)).unwrap();
    assert!(chat.starts_with(r#"{"model":"tgi","messages""#), "{chat}");
}

#[test]
fn an_adapter_is_named_where_each_server_looks_for_it() {
    let spec = RequestSpec { lora: Some("sql"), ..RequestSpec::new("base", Prompt::Text("a"), 1) };
    let of = |dialect, api| -> Value { serde_json::from_str(&bytes(dialect, api, &spec).unwrap()).unwrap() };
    assert_eq!(of(Dialect::Vllm, Api::Completions)["model"], "sql");
    assert_eq!(of(Dialect::Tgi, Api::Chat)["model"], "sql");
    let sglang = of(Dialect::Sglang, Api::Chat);
    assert_eq!((&sglang["model"], &sglang["lora_path"]), (&json!("base"), &json!("sql")));
    assert_eq!(of(Dialect::Tgi, Api::Completions)["parameters"]["adapter_id"], "sql");
    assert!(refusal(Dialect::LlamaCpp, Api::Chat, &spec).contains("a LoRA adapter"));
}

#[test]
fn a_structure_is_asked_for_in_each_servers_words() {
    let schema = json!({"type": "object", "properties": {"b": {}, "a": {}}});
    let texts = ["yes".to_owned(), "no".to_owned()];
    let of = |dialect, api, structure| -> Result<Value, BodyError> {
        let spec = RequestSpec { structure: Some(structure), ..RequestSpec::new("m", Prompt::Text("a"), 1) };
        Ok(serde_json::from_str(&bytes(dialect, api, &spec)?).unwrap())
    };
    let schema_of = |dialect, api| of(dialect, api, Structure::JsonSchema(&schema)).unwrap();
    for (dialect, api) in [
        (Dialect::OpenAi, Api::Chat),
        (Dialect::Vllm, Api::Completions),
        (Dialect::Vllm, Api::Chat),
        (Dialect::Sglang, Api::Completions),
        (Dialect::Sglang, Api::Chat),
    ] {
        let body = schema_of(dialect, api);
        assert_eq!(body["response_format"]["json_schema"], json!({"name": "output", "schema": schema}));
    }
    assert_eq!(
        schema_of(Dialect::TrtLlm, Api::Chat)["response_format"],
        json!({"type": "json", "schema": schema})
    );
    assert_eq!(schema_of(Dialect::LlamaCpp, Api::Completions)["json_schema"], schema);
    assert_eq!(
        schema_of(Dialect::Tgi, Api::Completions)["parameters"]["grammar"],
        json!({"type": "json", "value": schema})
    );
    let vllm =
        |structure| of(Dialect::Vllm, Api::Completions, structure).unwrap()["structured_outputs"].clone();
    assert_eq!(vllm(Structure::Regex("a+")), json!({"regex": "a+"}));
    assert_eq!(vllm(Structure::Choice(&texts)), json!({"choice": ["yes", "no"]}));
    assert_eq!(vllm(Structure::Grammar("root ::= x")), json!({"grammar": "root ::= x"}));
    assert_eq!(of(Dialect::Sglang, Api::Chat, Structure::Grammar("g")).unwrap()["ebnf"], "g");
    assert!(of(Dialect::Sglang, Api::Chat, Structure::Choice(&texts)).is_err());
    assert!(of(Dialect::OpenAi, Api::Completions, Structure::JsonSchema(&schema)).is_err());
}

#[test]
fn what_a_server_has_no_words_for_is_refused_by_name() {
    let plain = RequestSpec::new("m", Prompt::Text("a"), 1);
    let cases = [
        (
            Dialect::OpenAi,
            Api::Completions,
            RequestSpec { forced_length: true, ..plain },
            "end of the sequence",
        ),
        (Dialect::OpenAi, Api::Chat, RequestSpec { cache: Cache::Salt("s"), ..plain }, "salt"),
        (Dialect::Vllm, Api::Chat, RequestSpec { cache: Cache::Off, ..plain }, "without the prefix cache"),
        (Dialect::LlamaCpp, Api::Chat, RequestSpec { cache: Cache::Salt("s"), ..plain }, "salt"),
        (Dialect::TrtLlm, Api::Completions, RequestSpec { cache: Cache::Salt("s"), ..plain }, "salt"),
        (Dialect::Vllm, Api::Chat, RequestSpec { prompt: Prompt::Ids(IDS), ..plain }, "token ids"),
        (Dialect::Tgi, Api::Completions, RequestSpec { prompt: Prompt::Ids(IDS), ..plain }, "token ids"),
        (Dialect::Vllm, Api::Completions, RequestSpec { prompt: Prompt::Messages(&[]), ..plain }, "messages"),
        (
            Dialect::OpenAi,
            Api::Chat,
            RequestSpec { evidence: TokenEvidence::ContinuousUsage, ..plain },
            "running count",
        ),
        (
            Dialect::OpenAi,
            Api::Chat,
            RequestSpec { sampling: Sampling { top_k: Some(1), ..Sampling::default() }, ..plain },
            "top-k",
        ),
    ];
    for (dialect, api, spec, word) in cases {
        let error = refusal(dialect, api, &spec);
        assert!(error.contains(word) && error.contains(crate::dialect::server(dialect).name), "{error}");
    }
    let hot = RequestSpec {
        sampling: Sampling { temperature: Some(f64::INFINITY), ..Sampling::default() },
        ..plain
    };
    assert!(refusal(Dialect::Vllm, Api::Chat, &hot).contains("finite"));
}

#[test]
fn an_extra_body_replaces_merges_and_takes_away() {
    let extra = json!({"max_tokens": 9, "stream_options": {"x": 1}, "ignore_eos": null, "priority": 2, "nothing": null});
    let spec = RequestSpec { extra: extra.as_object(), ..forced(TokenEvidence::FinalUsage) };
    assert_eq!(
        bytes(Dialect::Vllm, Api::Completions, &spec).unwrap(),
        r#"{"model":"m","prompt":[1,151643,7],"stream":true,"max_tokens":9,"stream_options":{"include_usage":true,"x":1},"temperature":0.0,"priority":2}"#
    );
    let inner = json!({"parameters": {"watermark": true}, "inputs": "other"});
    let spec = RequestSpec { extra: inner.as_object(), ..RequestSpec::new("m", Prompt::Text("a"), 16) };
    assert_eq!(
        bytes(Dialect::Tgi, Api::Completions, &spec).unwrap(),
        r#"{"inputs":"other","parameters":{"max_new_tokens":16,"watermark":true}}"#
    );
    let all = json!({"inputs": null, "parameters": null});
    let spec = RequestSpec { extra: all.as_object(), ..spec };
    assert_eq!(bytes(Dialect::Tgi, Api::Completions, &spec).unwrap(), "{}");
}

#[test]
fn an_empty_extra_body_changes_no_byte() {
    let none = Map::new();
    for evidence in [TokenEvidence::ContinuousUsage, TokenEvidence::TokenIds, TokenEvidence::Events] {
        let spec = forced(evidence);
        let with = RequestSpec { extra: Some(&none), ..spec };
        assert_eq!(
            bytes(Dialect::Vllm, Api::Completions, &with).unwrap(),
            bytes(Dialect::Vllm, Api::Completions, &spec).unwrap()
        );
    }
}

#[test]
fn every_default_evidence_can_be_asked_for() {
    for dialect in
        [Dialect::OpenAi, Dialect::Vllm, Dialect::Sglang, Dialect::TrtLlm, Dialect::Tgi, Dialect::LlamaCpp]
    {
        for api in [Api::Completions, Api::Chat] {
            let evidence = crate::dialect::server(dialect).endpoint(api).default_evidence();
            let spec = RequestSpec { evidence, ..RequestSpec::new("m", Prompt::Text("a"), 1) };
            assert!(
                bytes(dialect, api, &spec).is_ok_and(|body| serde_json::from_str::<Value>(&body).is_ok())
            );
        }
    }
}

proptest! {
    #[test]
    fn any_prompt_comes_back_out_of_the_body(text in any::<String>(), ids in proptest::collection::vec(any::<u32>(), 0..20), extra in any::<bool>()) {
        let none = Map::new();
        let extra = extra.then_some(&none);
        let spec = RequestSpec { extra, ..RequestSpec::new("m", Prompt::Text(&text), 1) };
        let body: Value = serde_json::from_str(&bytes(Dialect::Vllm, Api::Completions, &spec).unwrap()).unwrap();
        prop_assert_eq!(&body["prompt"], &json!(text));
        let spec = RequestSpec { extra, ..RequestSpec::new("m", Prompt::Ids(&ids), 1) };
        let body: Value = serde_json::from_str(&bytes(Dialect::Vllm, Api::Completions, &spec).unwrap()).unwrap();
        prop_assert_eq!(&body["prompt"], &json!(ids));
    }
}
