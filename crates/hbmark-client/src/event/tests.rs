use super::*;
use proptest::prelude::*;

fn delta(data: &str) -> Delta<'_> {
    match decode(b"", data.as_bytes()) {
        Ok(Decoded::Delta(delta)) => delta,
        other => panic!("{data}: {other:?}"),
    }
}

fn error(name: &str, data: &str) -> String {
    match decode(name.as_bytes(), data.as_bytes()) {
        Ok(Decoded::Error(words)) => words.into_owned(),
        other => panic!("{data}: {other:?}"),
    }
}

fn is_malformed(data: &[u8]) -> bool {
    decode(b"", data).is_err()
}

fn known(output: u32, prompt: Option<u32>, cached: Option<u32>) -> Usage {
    Usage::Known(Counts { output, prompt, cached })
}

#[test]
fn a_vllm_completion_event_with_its_running_count_and_ids() {
    let delta = delta(
        r#"{"id":"cmpl-7","object":"text_completion","created":1780000000,"model":"m","choices":[{"index":0,"text":" the","logprobs":null,
        "finish_reason":null,"stop_reason":null,"token_ids":[262, 9]}],"usage":{"prompt_tokens":32,"total_tokens":37,"completion_tokens":5}}"#,
    );
    assert_eq!(
        delta,
        Delta {
            text: " the".into(),
            ids: Some(2),
            usage: known(5, Some(32), None),
            running: Some(5),
            ..Delta::default()
        }
    );
    assert!(matches!(delta.text, Cow::Borrowed(_)));
}

#[test]
fn the_events_of_a_vllm_chat() {
    let role = delta(
        r#"{"id":"chatcmpl-1","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],
        "usage":{"prompt_tokens":9,"total_tokens":9,"completion_tokens":0},"prompt_token_ids":[1,2,3]}"#,
    );
    assert!(role.text.is_empty() && role.ids.is_none());
    assert_eq!(role.running, Some(0));
    let thought = delta(r#"{"choices":[{"index":0,"delta":{"reasoning":"Hm"},"finish_reason":null}]}"#);
    assert_eq!((&*thought.reasoning, &*thought.text, thought.running), ("Hm", "", None));
    let last = delta(r#"{"choices":[{"index":0,"delta":{},"finish_reason":"length","stop_reason":null}]}"#);
    assert_eq!(last.finish, Some(Finish::Length));
    let usage = delta(
        r#"{"choices":[],"usage":{"prompt_tokens":9,"total_tokens":137,"completion_tokens":128,"prompt_tokens_details":{"cached_tokens":16}}}"#,
    );
    assert_eq!((usage.usage, usage.running), (known(128, Some(9), Some(16)), None));
}

#[test]
fn an_sglang_chat_with_nulls_in_every_field() {
    let chunk = delta(
        r#"{"choices":[{"index":0,"delta":{"role":null,"content":null,"reasoning_content":"So","tool_calls":null},"logprobs":null,"finish_reason":null,"matched_stop":null}],"usage":null}"#,
    );
    assert_eq!((&*chunk.reasoning, chunk.usage), ("So", Usage::Absent));
    let odd = delta(r#"{"choices":[],"usage":null,"sglext":{"routed_experts":"AA=="}}"#);
    assert_eq!(odd, Delta::default());
}

#[test]
fn escapes_are_undone_and_everything_else_is_borrowed() {
    let with = delta(r#"{"choices":[{"text":"a\nb\u00e9\ud83e\udd80"}]}"#);
    assert_eq!(with.text, "a\nbé🦀");
    assert!(matches!(with.text, Cow::Owned(_)));
    assert!(matches!(delta(r#"{"choices":[{"text":"é🦀"}]}"#).text, Cow::Borrowed(_)));
}

#[test]
fn fragments_of_tool_calls_are_joined() {
    let delta = delta(
        r#"{"choices":[{"delta":{"tool_calls":[{"index":0,"id":"c","type":"function","function":{"name":"f","arguments":""}},
        {"index":1,"function":{"name":null,"arguments":"{\"a\""}},{"index":2},{"index":3,"function":null}]}}]}"#,
    );
    assert_eq!(delta.tool_calls, "f{\"a\"");
}

#[test]
fn logprobs_are_counted_in_both_shapes() {
    let completion = r#"{"choices":[{"text":"ab","logprobs":{"text_offset":[0,1],"token_logprobs":[-1.5,null],"tokens":["a","b"],"top_logprobs":[{},null]}}]}"#;
    assert_eq!(delta(completion).logprobs, Some(2));
    let chat = r#"{"choices":[{"delta":{"content":"a"},"logprobs":{"content":[{"token":"a","logprob":-0.1,"top_logprobs":[]}],"refusal":null}}]}"#;
    assert_eq!(delta(chat).logprobs, Some(1));
    assert_eq!(delta(r#"{"choices":[{"text":"a","logprobs":null}]}"#).logprobs, None);
    assert_eq!(
        delta(r#"{"choices":[{"delta":{"content":"a"},"logprobs":{"content":null}}]}"#).logprobs,
        None
    );
}

#[test]
fn choices_absent_empty_null_and_two() {
    for data in ["{}", r#"{"choices":[]}"#, r#"{"choices":null}"#, "", "  "] {
        assert_eq!(delta(data), Delta::default(), "{data}");
    }
    assert_eq!(delta(r#"{"choices":[{"index":0,"text":"a"},{"index":1,"text":"b"}]}"#).text, "a");
}

#[test]
fn a_usage_that_cannot_be_used_is_reported_as_that() {
    for count in [
        "null",
        "-1",
        "9223372036854775808",
        "18446744073709551616",
        "1.5",
        "\"5\"",
        "true",
        "[5]",
        "{\"a\":5}",
    ] {
        let data = format!(
            r#"{{"choices":[{{"text":"a"}}],"usage":{{"completion_tokens":{count},"prompt_tokens":3}}}}"#
        );
        let delta = delta(&data);
        assert_eq!((delta.usage, delta.running), (Usage::Unusable, None), "{count}");
    }
    for usage in ["5", "\"many\"", "[1]", "false", "{}"] {
        let data = format!(r#"{{"choices":[],"usage":{usage}}}"#);
        assert_eq!(delta(&data).usage, Usage::Unusable, "{usage}");
    }
    // Only what is wrong is lost.
    let odd =
        r#"{"choices":[],"usage":{"completion_tokens":4,"prompt_tokens":-2,"prompt_tokens_details":7}}"#;
    assert_eq!(delta(odd).usage, known(4, None, None));
}

#[test]
fn every_reason_of_the_end() {
    let reasons = [
        ("stop", Finish::Stop),
        ("length", Finish::Length),
        ("tool_calls", Finish::ToolCalls),
        ("content_filter", Finish::ContentFilter),
        ("abort", Finish::Abort),
        ("error", Finish::Error),
        ("repetition", Finish::Other),
    ];
    for (name, finish) in reasons {
        let data = format!(r#"{{"choices":[{{"text":"","finish_reason":"{name}"}}]}}"#);
        assert_eq!(delta(&data).finish, Some(finish));
    }
}

#[test]
fn errors_in_every_shape_servers_have() {
    let message = "the input is too long";
    let nested =
        r#"{"error":{"message":"the input is too long","type":"BadRequestError","param":null,"code":400}}"#;
    assert_eq!(error("", nested), message);
    let flat = r#"{"object":"error","message":"the input is too long","type":"BadRequestError","param":null,"code":400}"#;
    assert_eq!(error("", flat), message);
    let tgi = r#"{"error":"Request failed during generation","error_type":"generation"}"#;
    assert_eq!(error("", tgi), "Request failed during generation");
    // Older llama.cpp servers: a field of the event stream that is called error.
    let llama = r#"{"code":400,"message":"the input is too long","type":"invalid_request_error"}"#;
    assert_eq!(error("error", llama), message);
    assert_eq!(error("error", "boom"), "boom");
    assert_eq!(error("", r#"{"error":{"message":{"a":1},"code":"x"}}"#), "");
}

#[test]
fn an_error_field_that_says_nothing_is_no_error() {
    for value in ["null", "false"] {
        let data = format!(r#"{{"choices":[{{"text":"a"}}],"error":{value}}}"#);
        assert_eq!(delta(&data).text, "a");
    }
}

#[test]
fn logits_that_are_no_numbers_are_an_error_though_the_server_calls_it_a_stop() {
    let data = r#"{"choices":[{"index":0,"text":"","finish_reason":"stop","matched_stop":"NaN happened"}]}"#;
    assert_eq!(error("", data), NOT_A_NUMBER);
    let stop = r#"{"choices":[{"text":"","finish_reason":"stop","matched_stop":128001}]}"#;
    assert_eq!(delta(stop).finish, Some(Finish::Stop));
}

#[test]
fn the_native_events_of_sglang_are_cumulative() {
    let delta = delta(
        r#"{"text":" a b","output_ids":[1,2],"meta_info":{"id":"x","finish_reason":{"type":"length","length":2},"prompt_tokens":7,"completion_tokens":2,"cached_tokens":4}}"#,
    );
    assert_eq!(
        delta,
        Delta {
            text: " a b".into(),
            usage: known(2, Some(7), Some(4)),
            running: Some(2),
            cumulative: true,
            finish: Some(Finish::Length),
            ..Delta::default()
        }
    );
}

#[test]
fn the_token_events_of_tgi() {
    let token = delta(
        r#"{"index":1,"token":{"id":262,"text":" the","logprob":-0.5,"special":false},"generated_text":null,"details":null}"#,
    );
    assert_eq!((&*token.text, token.ids, token.finish, token.usage), (" the", Some(1), None, Usage::Absent));
    let last = delta(
        r#"{"index":2,"token":{"id":2,"text":"</s>","logprob":-0.5,"special":true},"generated_text":" the","details":{"finish_reason":"eos_token","generated_tokens":2,"seed":null}}"#,
    );
    assert_eq!((&*last.text, last.ids, last.finish), ("", Some(1), Some(Finish::Stop)));
    assert_eq!((last.usage, last.running), (known(2, None, None), None));
}

#[test]
fn llama_cpp_counts_in_its_timings_and_in_its_native_events() {
    let chunk = delta(
        r#"{"choices":[{"text":" a","index":0,"logprobs":null,"finish_reason":null}],"timings":{"cache_n":3,"prompt_n":10,"prompt_ms":12.5,"predicted_n":4,"predicted_ms":40}}"#,
    );
    let timings = Timings { cached: Number(Some(3)), output: Number(Some(4)) };
    assert_eq!((chunk.running, chunk.timings), (Some(4), timings));
    let native = delta(
        r#"{"index":0,"content":" a","tokens":[262],"stop":false,"id_slot":0,"tokens_predicted":4,"tokens_evaluated":10}"#,
    );
    assert_eq!((&*native.text, native.ids, native.running, native.finish), (" a", Some(1), Some(4), None));
    let last = delta(
        r#"{"content":"","tokens":[],"stop":true,"stop_type":"limit","tokens_predicted":4,"tokens_evaluated":10}"#,
    );
    assert_eq!((last.finish, last.ids, last.usage), (Some(Finish::Length), None, known(4, Some(10), None)));
}

#[test]
fn done_is_the_end() {
    for data in ["[DONE]", " [DONE] "] {
        assert!(matches!(decode(b"", data.as_bytes()), Ok(Decoded::Done)));
    }
}

#[test]
fn what_is_no_event_is_malformed() {
    let broken: [&[u8]; 11] = [
        b"{",
        b"{} {}",
        b"[]",
        b"\"text\"",
        b"<html></html>",
        br#"{"choices":5}"#,
        br#"{"choices":[{"text":5}]}"#,
        br#"{"choices":[{"text":"a","text":"b"}]}"#,
        br#"{"choices":[{"text":"a"}],"usage":{"completion_tokens":NaN}}"#,
        b"{\"choices\":[{\"text\":\"\xff\"}]}",
        br#"{"choices":[{"text":"\ud83e"}]}"#,
    ];
    for data in broken {
        assert!(is_malformed(data), "{}", String::from_utf8_lossy(data));
    }
}

#[test]
fn a_hundred_thousand_brackets_do_no_harm_anywhere() {
    let open = "[".repeat(100_000);
    let close = "]".repeat(100_000);
    assert_eq!(
        delta(&format!(r#"{{"choices":[{{"text":"a","x":{open}{close}}}],"y":{open}{close}}}"#)).text,
        "a"
    );
    let maps = format!("{}1{}", r#"{"message":"#.repeat(100_000), "}".repeat(100_000));
    for data in [
        open.clone(),
        format!(r#"{{"choices":{open}{close}}}"#),
        format!(r#"{{"choices":[{{"text":{open}{close}}}]}}"#),
        format!(r#"{{"error":{maps}}}"#),
        format!(r#"{{"usage":{maps}}}"#),
        format!(r#"{{"meta_info":{maps}}}"#),
    ] {
        // Malformed or not: what matters is that there is an answer.
        let _ = decode(b"", data.as_bytes());
    }
}

/// Values that servers send, and some that they should not.
fn json() -> impl Strategy<Value = serde_json::Value> {
    use serde_json::{Value, json};
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        any::<String>().prop_map(Value::from),
        Just(json!("error")),
        Just(json!("length")),
    ];
    let names = prop_oneof![
        Just("choices"),
        Just("usage"),
        Just("timings"),
        Just("object"),
        Just("error"),
        Just("message"),
        Just("type"),
        Just("code"),
        Just("text"),
        Just("meta_info"),
        Just("content"),
        Just("tokens"),
        Just("stop"),
        Just("token"),
        Just("details"),
        Just("delta"),
        Just("token_ids"),
        Just("logprobs"),
        Just("finish_reason"),
        Just("tool_calls"),
        Just("function"),
        Just("arguments"),
        Just("completion_tokens"),
        Just("tokens_predicted"),
        Just("role"),
        Just("x"),
    ];
    leaf.prop_recursive(6, 64, 6, move |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            proptest::collection::vec((names.clone(), inner), 0..6).prop_map(|fields| fields
                .into_iter()
                .map(|(name, value)| (name.to_owned(), value))
                .collect::<Value>()),
        ]
    })
}

proptest! {
    #[test]
    fn any_json_and_any_bytes_have_an_answer(value in json(), bytes in proptest::collection::vec(any::<u8>(), 0..64), at in any::<usize>()) {
        let mut text = value.to_string().into_bytes();
        let _ = decode(b"", &text);
        let _ = decode(b"error", &text);
        let _ = decode(b"", &bytes);
        let at = at % (text.len() + 1);
        text.splice(at..at, bytes.iter().copied().take(2));
        let _ = decode(b"", &text);
    }

    #[test]
    fn any_text_comes_back(content in any::<String>(), reasoning in any::<String>()) {
        let data = serde_json::json!({"choices": [{"delta": {"content": content, "reasoning": reasoning}}]}).to_string();
        let delta = delta(&data);
        prop_assert_eq!((&*delta.text, &*delta.reasoning), (content.as_str(), reasoning.as_str()));
    }
}
