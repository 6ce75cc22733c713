use super::*;

fn endpoints() -> impl Iterator<Item = (&'static Server, &'static Endpoint)> {
    SERVERS.iter().flat_map(|server| [(server, &server.completions), (server, &server.chat)])
}

#[test]
fn every_dialect_finds_its_own_row() {
    for dialect in
        [Dialect::OpenAi, Dialect::Vllm, Dialect::Sglang, Dialect::TrtLlm, Dialect::Tgi, Dialect::LlamaCpp]
    {
        assert_eq!(server(dialect).dialect, dialect);
        assert_eq!(server(dialect).name.parse::<Backend>().unwrap().dialect, dialect);
    }
}

#[test]
fn every_template_is_a_piece_of_an_object() {
    for (server, endpoint) in endpoints() {
        let fields = endpoint.fields.iter().copied().flatten().map(|(_, template)| *template);
        for template in fields.chain([endpoint.evidence]) {
            let object = format!("{{{}}}", template.replace('$', "0"));
            let value: Result<serde_json::Value, _> = serde_json::from_str(&object);
            assert!(value.is_ok_and(|value| value.is_object()), "{}: {template}", server.name);
        }
    }
}

#[test]
fn every_endpoint_can_stream_a_prompt_of_limited_length() {
    for (server, endpoint) in endpoints() {
        assert!(endpoint.path.starts_with('/'), "{}", server.name);
        assert!(endpoint.has(RequestField::MaxTokens), "{}", server.name);
        assert!(endpoint.has(RequestField::Text) != endpoint.has(RequestField::Messages), "{}", server.name);
        assert!(endpoint.has(RequestField::Temperature), "{}", server.name);
    }
}

#[test]
fn names_that_users_type() {
    let backend = |name: &str| name.parse::<Backend>().unwrap();
    assert_eq!(backend("vllm"), Backend { dialect: Dialect::Vllm, api: Api::Completions });
    assert_eq!(backend("openai-chat"), Backend { dialect: Dialect::OpenAi, api: Api::Chat });
    assert_eq!(backend("SGLang-OAI"), Backend { dialect: Dialect::Sglang, api: Api::Completions });
    assert_eq!(backend("llama.cpp").dialect, Dialect::LlamaCpp);
    assert_eq!(backend("tensorrt-llm").dialect, Dialect::TrtLlm);
    let error = "vlm".parse::<Backend>().unwrap_err().to_string();
    assert!(error.contains("`vlm`") && error.contains("vllm-chat") && error.contains("llama.cpp"), "{error}");
}

#[test]
fn no_name_is_listed_twice() {
    for (at, (name, ..)) in BACKENDS.iter().enumerate() {
        assert!(BACKENDS[..at].iter().all(|(before, ..)| before != name), "{name}");
    }
}
