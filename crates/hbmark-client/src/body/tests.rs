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

/// A request for up to so many tokens, with everything else left to the server.
fn plain<'a>(model: &'a str, prompt: Prompt<'a>, max_tokens: u32) -> RequestSpec<'a> {
    RequestSpec {
        model,
        prompt,
        max_tokens,
        forced_length: false,
        sampling: Sampling::default(),
        cache: Cache::Shared,
        lora: None,
        constraint: None,
        extra: None,
    }
}

fn forced() -> RequestSpec<'static> {
    let sampling = Sampling { temperature: Some(0.0), ..Sampling::default() };
    RequestSpec { forced_length: true, sampling, ..plain("m", Prompt::Ids(IDS), 128) }
}

#[test]
fn the_bytes_of_a_request_of_forced_length_for_each_server() {
    let spec = forced();
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
        sampling: Sampling { temperature: Some(0.7), top_p: Some(0.95), top_k: None },
        ..plain("m", Prompt::Text("say \"hé\"\n"), 16)
    };
    assert_eq!(
        bytes(Dialect::OpenAi, Api::Chat, &spec).unwrap(),
        r#"{"model":"m","messages":[{"role":"user","content":"say \"hé\"\n"}],"stream":true,"max_tokens":16,"stream_options":{"include_usage":true},"temperature":0.7,"top_p":0.95}"#
    );
    let spec = RequestSpec { cache: Cache::Salt("a/0"), ..plain("m", Prompt::Text("u"), 16) };
    assert_eq!(
        bytes(Dialect::Vllm, Api::Chat, &spec).unwrap(),
        r#"{"model":"m","messages":[{"role":"user","content":"u"}],"stream":true,"max_completion_tokens":16,"stream_options":{"include_usage":true,"continuous_usage_stats":true},"cache_salt":"a/0"}"#
    );
}

#[test]
fn tgi_takes_its_parameters_in_an_object_of_their_own() {
    let greedy = RequestSpec {
        sampling: Sampling { temperature: Some(0.0), top_k: Some(4), ..Sampling::default() },
        ..plain("m", Prompt::Text("a"), 16)
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
            &RequestSpec { sampling: warm, ..plain("m", Prompt::Text("a"), 16) }
        )
        .unwrap(),
        r#"{"inputs":"a","parameters":{"max_new_tokens":16,"details":true,"temperature":0.5}}"#
    );
    let chat = bytes(Dialect::Tgi, Api::Chat, &plain("llama", Prompt::Text("a"), 16)).unwrap();
    assert!(chat.starts_with(r#"{"model":"tgi","messages""#), "{chat}");
}

#[test]
fn an_adapter_is_named_where_each_server_looks_for_it() {
    let spec = RequestSpec { lora: Some("sql"), ..plain("base", Prompt::Text("a"), 1) };
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
    let of = |dialect, api, constraint| -> Result<Value, BodyError> {
        let spec = RequestSpec { constraint: Some(&constraint), ..plain("m", Prompt::Text("a"), 1) };
        Ok(serde_json::from_str(&bytes(dialect, api, &spec)?).unwrap())
    };
    let schema_of = |dialect, api| of(dialect, api, Constraint::JsonSchema(schema.clone())).unwrap();
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
    let regex = || Constraint::Regex("a+".to_owned());
    let grammar = || Constraint::Grammar("root ::= x".to_owned());
    let vllm =
        |constraint| of(Dialect::Vllm, Api::Completions, constraint).unwrap()["structured_outputs"].clone();
    assert_eq!(vllm(regex()), json!({"regex": "a+"}));
    assert_eq!(vllm(grammar()), json!({"grammar": "root ::= x"}));
    assert_eq!(of(Dialect::Sglang, Api::Chat, grammar()).unwrap()["ebnf"], "root ::= x");
    assert!(of(Dialect::LlamaCpp, Api::Chat, regex()).is_err());
    assert!(of(Dialect::OpenAi, Api::Completions, Constraint::JsonSchema(schema.clone())).is_err());
}

#[test]
fn what_a_server_has_no_words_for_is_refused_by_name() {
    let plain = plain("m", Prompt::Text("a"), 1);
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
    let spec = RequestSpec { extra: extra.as_object(), ..forced() };
    assert_eq!(
        bytes(Dialect::Vllm, Api::Completions, &spec).unwrap(),
        r#"{"model":"m","prompt":[1,151643,7],"stream":true,"max_tokens":9,"stream_options":{"include_usage":true,"continuous_usage_stats":true,"x":1},"temperature":0.0,"priority":2}"#
    );
    let inner = json!({"parameters": {"watermark": true}, "inputs": "other"});
    let spec = RequestSpec { extra: inner.as_object(), ..plain("m", Prompt::Text("a"), 16) };
    assert_eq!(
        bytes(Dialect::Tgi, Api::Completions, &spec).unwrap(),
        r#"{"inputs":"other","parameters":{"max_new_tokens":16,"details":true,"watermark":true}}"#
    );
    let all = json!({"inputs": null, "parameters": null});
    let spec = RequestSpec { extra: all.as_object(), ..spec };
    assert_eq!(bytes(Dialect::Tgi, Api::Completions, &spec).unwrap(), "{}");
}

#[test]
fn an_empty_extra_body_changes_no_byte() {
    let none = Map::new();
    let with = RequestSpec { extra: Some(&none), ..forced() };
    assert_eq!(
        bytes(Dialect::Vllm, Api::Completions, &with).unwrap(),
        bytes(Dialect::Vllm, Api::Completions, &forced()).unwrap()
    );
}

proptest! {
    #[test]
    fn any_prompt_comes_back_out_of_the_body(text in any::<String>(), ids in proptest::collection::vec(any::<u32>(), 0..20), extra in any::<bool>()) {
        let none = Map::new();
        let extra = extra.then_some(&none);
        let spec = RequestSpec { extra, ..plain("m", Prompt::Text(&text), 1) };
        let body: Value = serde_json::from_str(&bytes(Dialect::Vllm, Api::Completions, &spec).unwrap()).unwrap();
        prop_assert_eq!(&body["prompt"], &json!(text));
        let spec = RequestSpec { extra, ..plain("m", Prompt::Ids(&ids), 1) };
        let body: Value = serde_json::from_str(&bytes(Dialect::Vllm, Api::Completions, &spec).unwrap()).unwrap();
        prop_assert_eq!(&body["prompt"], &json!(ids));
    }
}
