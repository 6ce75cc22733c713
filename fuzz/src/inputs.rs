//! Hand-made hostile inputs for each target, which must refuse or survive them.
//!
//! They repeat published vulnerabilities of other readers (integer overflow of sizes, offsets beyond the file, dimensions of zero, headers
//! of a hundred thousand tensors, path traversal) and bugs of our own.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::targets::{Seed, all_of, fixture, seed_file};

/// The hostile inputs of a target.
pub fn of(target: &str) -> Vec<Seed> {
    match target {
        "safetensors" | "quantised" => safetensors(),
        "index" => index(),
        "gguf" => gguf(),
        "config" => config(),
        "tokenizer" => tokenizer(),
        "trace" => trace(),
        "workload" => workload(),
        "foreign" => foreign(),
        "result" => result(),
        "serve_result" => serve_result(),
        "fleet" => fleet(),
        _ => Vec::new(),
    }
}

fn seeds<B: Into<Vec<u8>>, const N: usize>(list: [(&str, B); N]) -> Vec<Seed> {
    list.into_iter().map(|(name, bytes)| Seed::new(name, bytes)).collect()
}

fn fleet() -> Vec<Seed> {
    seeds([
        ("a range of all numbers", "node[0-99999999999999999999]"),
        ("ranges of ranges", &"n[1-9]".repeat(40)),
        ("a range backwards", "node[9-1]"),
        ("an open range", "node[1-"),
        ("a folder above", "../../etc/passwd"),
        ("a name for the terminal", "node\u{1b}[31m"),
        ("a negative number", "name = \"a\"\nprocesses = -1\ntime_limit_minutes = 5\narguments = []"),
        ("a flag of its own", "name = \"a\"\ntime_limit_minutes = 5\narguments = [\"--out\", \"/\"]"),
        ("an unknown kind", r#"{"schema_version":1,"kind":"\u001b[31m"}"#),
    ])
}

/// A JSON file of the fixtures.
fn json_fixture(name: &str) -> Value {
    let text = std::fs::read_to_string(fixture(name)).expect("the fixture is there");
    serde_json::from_str(&text).expect("the fixture is JSON")
}

/// The document with another value at a JSON pointer.
fn replaced(document: &Value, path: &str, value: impl Into<Value>) -> String {
    let mut changed = document.clone();
    *changed.pointer_mut(path).unwrap_or_else(|| panic!("the document has no {path}")) = value.into();
    changed.to_string()
}

/// A header in front of `data` bytes of zeros.
pub fn safetensors_file(header: &str, data: usize) -> Vec<u8> {
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.resize(file.len() + data, 0);
    file
}

fn tensor(dtype: &str, shape: &str, begin: u64, end: u64) -> String {
    format!(r#"{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{begin},{end}]}}"#)
}

fn safetensors() -> Vec<Seed> {
    let one = |dtype: &str, shape: &str, begin, end, data| {
        safetensors_file(&format!(r#"{{"a":{}}}"#, tensor(dtype, shape, begin, end)), data)
    };
    let many: Vec<String> =
        (0..100_000).map(|i| format!(r#""{i:x}":{}"#, tensor("U8", "[0]", 0, 0))).collect();
    let claimed = |length: u64| [&length.to_le_bytes()[..], b"{}"].concat();
    let (x, y) = (tensor("F32", "[4]", 0, 16), tensor("F32", "[4]", 8, 24));
    seeds([
        ("empty", Vec::new()),
        ("only-a-length", 8_u64.to_le_bytes().to_vec()),
        ("length-beyond-the-file", claimed(1 << 20)),
        ("length-of-exabytes", claimed(u64::MAX)),
        ("length-above-the-limit", claimed(100_000_001)),
        ("exabyte-tensor", one("F32", "[1152921504606846976]", 0, 4_611_686_018_427_387_904, 16)),
        ("product-wraps-to-zero", one("F32", "[4294967296,4294967296]", 0, 0, 0)),
        ("product-wraps-to-small", one("U8", "[9223372036854775809,2]", 0, 2, 2)),
        ("dimension-of-zero", one("F32", "[0,18446744073709551615]", 0, 0, 0)),
        ("negative-dimension", one("F32", "[-1]", 0, 4, 4)),
        ("dimension-as-float", one("F32", "[1e30]", 0, 4, 4)),
        ("range-runs-backwards", one("F32", "[4]", 16, 0, 16)),
        ("range-beyond-the-file", one("F32", "[4]", 1_000_000, 1_000_016, 16)),
        ("range-ends-at-the-last-number", one("U8", "[1]", u64::MAX - 1, u64::MAX, 1)),
        ("overlapping-tensors", safetensors_file(&format!(r#"{{"x":{x},"y":{y}}}"#), 24)),
        ("duplicate-key", safetensors_file(&format!(r#"{{"x":{x},"x":{x}}}"#), 16)),
        ("hole", safetensors_file(&format!(r#"{{"x":{}}}"#, tensor("U8", "[1]", 4, 5)), 5)),
        ("data-behind-the-last", one("U8", "[1]", 0, 1, 100)),
        ("unknown-dtype", one("F1024", "[1]", 0, 1, 1)),
        ("ninety-dimensions", one("U8", &format!("[{}1]", "1,".repeat(89)), 0, 1, 1)),
        ("deep-metadata", safetensors_file(&format!(r#"{{"__metadata__":{}"#, "[".repeat(60_000)), 0)),
        ("hundred-thousand-tensors", safetensors_file(&format!("{{{}}}", many.join(",")), 0)),
        (
            "escape-in-a-name",
            safetensors_file(r#"{"\u001b[31m":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}"#, 0),
        ),
        ("name-of-a-megabyte", safetensors_file(&format!(r#"{{"{}":0}}"#, "n".repeat(1 << 20)), 0)),
        ("not-json", safetensors_file("\u{0}\u{0}\u{0}", 0)),
    ])
}

fn index() -> Vec<Seed> {
    let to = |shard: &str| format!(r#"{{"weight_map":{{"lm_head.weight":{}}}}}"#, json!(shard));
    let many: Vec<String> = (0..100_000).map(|i| format!(r#""{i:x}":"{i:x}.safetensors""#)).collect();
    seeds([
        ("parent-folder", to("../llama-bf16/model.safetensors")),
        ("absolute-path", to("/etc/passwd")),
        ("windows-path", to("..\\..\\secret")),
        ("dot", to(".")),
        ("nothing", to("")),
        ("nul", to("model\u{0}.safetensors")),
        ("below-a-folder", to("a/b.safetensors")),
        ("device", to("/dev/zero")),
        ("missing-shard", to("model-9.safetensors")),
        ("name-of-a-megabyte", to(&"n".repeat(1 << 20))),
        ("escape-in-a-name", to("\u{1b}]0;owned\u{7}")),
        ("shard-of-another-kind", to("config.json")),
        ("hundred-thousand-shards", format!(r#"{{"weight_map":{{{}}}}}"#, many.join(","))),
        ("duplicate-key", r#"{"weight_map":{"a":"x","a":"y"}}"#.to_owned()),
        ("duplicate-map", r#"{"weight_map":{},"weight_map":{}}"#.to_owned()),
        ("no-map", "{}".to_owned()),
        ("empty-map", r#"{"weight_map":{}}"#.to_owned()),
        ("list", "[]".to_owned()),
        ("deep", "{\"a\":".repeat(50_000)),
    ])
}

/// The pieces of a GGUF file.
#[derive(Debug, Default)]
pub struct Gguf {
    version: Option<u32>,
    counts: Option<(u64, u64)>,
    keys: Vec<Vec<u8>>,
    tensors: Vec<Vec<u8>>,
    data: usize,
}

fn text(value: &str) -> Vec<u8> {
    [&(value.len() as u64).to_le_bytes()[..], value.as_bytes()].concat()
}

impl Gguf {
    fn key(mut self, name: &str, kind: u32, value: &[u8]) -> Self {
        self.keys.push([&text(name)[..], &kind.to_le_bytes(), value].concat());
        self
    }

    fn tensor(mut self, name: &str, shape: &[u64], kind: u32, offset: u64) -> Self {
        let mut bytes = text(name);
        bytes.extend(u32::try_from(shape.len()).unwrap_or(u32::MAX).to_le_bytes());
        bytes.extend(shape.iter().flat_map(|d| d.to_le_bytes()));
        bytes.extend(kind.to_le_bytes());
        bytes.extend(offset.to_le_bytes());
        self.tensors.push(bytes);
        self
    }

    fn data(self, data: usize) -> Self {
        Self { data, ..self }
    }

    fn counts(self, tensors: u64, keys: u64) -> Self {
        Self { counts: Some((tensors, keys)), ..self }
    }

    fn bytes(self) -> Vec<u8> {
        let mut file = b"GGUF".to_vec();
        file.extend(self.version.unwrap_or(3).to_le_bytes());
        let (tensors, keys) = self.counts.unwrap_or((self.tensors.len() as u64, self.keys.len() as u64));
        file.extend(tensors.to_le_bytes());
        file.extend(keys.to_le_bytes());
        file.extend(self.keys.into_iter().chain(self.tensors).flatten());
        file.resize(file.len().next_multiple_of(32) + self.data, 0);
        file
    }
}

fn gguf() -> Vec<Seed> {
    let file = Gguf::default;
    let array = |kind: u32, length: u64| [&kind.to_le_bytes()[..], &length.to_le_bytes()].concat();
    let llama = || file().key("general.architecture", 8, &text("llama"));
    let absurd = [
        "llama.embedding_length",
        "llama.block_count",
        "llama.feed_forward_length",
        "llama.attention.head_count",
        "llama.context_length",
    ];
    let all_absurd = absurd.iter().fold(llama(), |f, key| f.key(key, 10, &u64::MAX.to_le_bytes()));
    let mut forty_three = b"GGUF".to_vec();
    forty_three.extend(3_u32.to_le_bytes());
    forty_three.extend(0_u64.to_le_bytes());
    forty_three.extend(u64::MAX.to_le_bytes());
    forty_three.resize(43, 0xff);
    seeds([
        ("empty", Vec::new()),
        ("only-the-magic", b"GGUF".to_vec()),
        ("version-1", Gguf { version: Some(1), ..Gguf::default() }.bytes()),
        ("forty-three-bytes-that-hang", forty_three),
        ("counts-of-exabytes", file().counts(u64::MAX, u64::MAX).bytes()),
        ("tensors-of-exabytes", file().counts(1 << 60, 0).bytes()),
        // The sum that overflowed after the product was guarded.
        ("size-overflows-when-aligned", file().tensor("t", &[u64::MAX - 31], 24, 0).bytes()),
        ("size-wraps-to-zero", file().tensor("t", &[1 << 32, 1 << 32], 0, 0).bytes()),
        ("size-wraps-to-small", file().tensor("t", &[1 << 62, 4, 1, 1], 1, 0).data(64).bytes()),
        ("exabyte-tensor", file().tensor("t", &[1 << 60], 0, 0).data(4096).bytes()),
        ("offset-and-size-beyond-the-file", file().tensor("t", &[1024], 0, 1 << 40).data(4096).bytes()),
        ("offset-wraps", file().tensor("t", &[32], 0, u64::MAX - 31).data(4096).bytes()),
        ("overlap", file().tensor("a", &[64], 0, 0).tensor("b", &[64], 0, 32).data(512).bytes()),
        ("duplicate-tensor", file().tensor("a", &[32], 0, 0).tensor("a", &[32], 0, 128).data(512).bytes()),
        ("dimension-of-zero", file().tensor("t", &[0, 32], 0, 0).data(64).bytes()),
        ("no-dimensions", file().tensor("t", &[], 0, 0).data(64).bytes()),
        ("hundred-dimensions", file().tensor("t", &[1; 100], 0, 0).data(64).bytes()),
        ("block-that-does-not-divide", file().tensor("t", &[33], 8, 0).data(64).bytes()),
        ("unknown-type", file().tensor("t", &[32], 9_999, 0).data(64).bytes()),
        ("alignment-of-zero", file().key("general.alignment", 4, &0_u32.to_le_bytes()).bytes()),
        ("alignment-of-three", file().key("general.alignment", 4, &3_u32.to_le_bytes()).bytes()),
        (
            "alignment-of-gigabytes",
            file()
                .key("general.alignment", 4, &(1_u32 << 31).to_le_bytes())
                .tensor("t", &[32], 0, 0)
                .data(128)
                .bytes(),
        ),
        ("alignment-as-text", file().key("general.alignment", 8, &text("32")).bytes()),
        ("string-of-exabytes", file().key("k", 8, &u64::MAX.to_le_bytes()).bytes()),
        (
            "key-of-exabytes",
            [
                &b"GGUF\x03\0\0\0"[..],
                &0_u64.to_le_bytes(),
                &1_u64.to_le_bytes(),
                &(1_u64 << 60).to_le_bytes(),
                &[0; 64],
            ]
            .concat(),
        ),
        ("array-of-exabytes", file().key("k", 9, &array(4, 1 << 62)).bytes()),
        (
            "array-of-empty-strings",
            file().key("k", 9, &[&array(8, 100_000)[..], &vec![0; 800_000]].concat()).bytes(),
        ),
        ("array-of-arrays", file().key("k", 9, &array(9, 1)).bytes()),
        ("array-of-nothing-known", file().key("k", 9, &array(77, 1)).bytes()),
        ("boolean-of-two", file().key("k", 7, &[2]).bytes()),
        ("duplicate-key", file().key("k", 7, &[1]).key("k", 7, &[0]).bytes()),
        ("escape-in-a-key", file().key("\u{1b}[2J", 7, &[2]).bytes()),
        ("absurd-dimensions", all_absurd.bytes()),
        ("no-architecture", file().bytes()),
        ("not-gguf", b"GGJT\x03\0\0\0".to_vec()),
    ])
}

fn config() -> Vec<Seed> {
    let tiny = json_fixture("models/llama-bf16/config.json");
    let with = |changes: Value| merged(tiny.clone(), changes);
    let numbers = [
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
        "max_position_embeddings",
    ];
    let million_in_each: serde_json::Map<_, _> =
        numbers.iter().map(|&key| (key.to_owned(), json!(1 << 20))).collect();
    let groups: serde_json::Map<_, _> =
        (0..1000).map(|i| (i.to_string(), json!({"weights": {"num_bits": 4}}))).collect();
    let quantized = |config: Value| with(json!({"quantization_config": config}));
    let mut seeds = seeds([
        ("empty", String::new()),
        ("list", "[]".to_owned()),
        ("deep", "[".repeat(100_000)),
        ("deep-object", "{\"a\":".repeat(100_000)),
        ("duplicate-key", format!("{{\"hidden_size\":64,{}", &tiny.to_string()[1..])),
        ("four-megabytes-of-lists", format!("{{\"a\":[{}0]}}", "[0],".repeat(1 << 20))),
        ("four-megabytes-of-numbers", format!("[{}0]", "0,".repeat((2 << 20) - 4))),
        ("bare-nan", "{\"rms_norm_eps\": NaN, \"x\": -Infinity}".to_owned()),
        ("million-in-each", with(million_in_each.into())),
        ("hundred-thousand-end-tokens", with(json!({"eos_token_id": vec![1; 100_000]}))),
        (
            "window-per-layer",
            with(json!({"sliding_window": u64::MAX, "layer_types": vec!["sliding"; 10_000]})),
        ),
        ("escape-in-a-value", with(json!({"hidden_act": "\u{1b}[31m\u{202e}silu"}))),
        ("group-of-zero", quantized(json!({"quant_method": "gptq", "bits": 4, "group_size": 0}))),
        (
            "thousand-groups",
            quantized(json!({"quant_method": "compressed-tensors", "config_groups": groups})),
        ),
        ("experts-times-layers", mixtral(&tiny, 65_536, 4_096)),
        ("experts-of-every-layer", mixtral(&tiny, 384, 61)),
        ("as-many-tensors-as-are-read", mixtral(&tiny, 329, 100)),
        ("large-latent-dimensions", deepseek()),
    ]);
    for key in numbers {
        for (what, value) in [
            ("zero", json!(0)),
            ("minus-one", json!(-1)),
            ("huge", json!(u64::MAX)),
            ("float", json!(1e300)),
            ("text", json!("64")),
        ] {
            seeds.push(Seed::new(format!("{key}-{what}"), replaced(&tiny, &format!("/{key}"), value)));
        }
    }
    for (what, value) in [("infinite", 1e308), ("zero", 0.0), ("negative", -1.0)] {
        let rope = json!({"rope_theta": value, "rope_type": "linear", "factor": value});
        let config = with(json!({"rope_parameters": rope, "rms_norm_eps": value}));
        seeds.push(Seed::new(format!("rope-{what}"), config));
    }
    seeds
}

/// The object with the keys of another added or replaced.
fn merged(mut object: Value, changes: Value) -> String {
    let Value::Object(changes) = changes else { panic!("changes are an object") };
    object.as_object_mut().expect("a config is an object").extend(changes);
    object.to_string()
}

fn mixtral(tiny: &Value, experts: usize, layers: usize) -> String {
    let changes = json!({
        "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": experts, "num_experts_per_tok": 2,
        "num_hidden_layers": layers, "hidden_size": 2, "intermediate_size": 1, "sliding_window": null
    });
    merged(tiny.clone(), changes)
}

fn deepseek() -> String {
    let changes = json!({
        "q_lora_rank": 8_192, "kv_lora_rank": 8_192, "qk_nope_head_dim": 8_192, "qk_rope_head_dim": 8_192, "v_head_dim": 8_192,
        "n_shared_experts": 8_192
    });
    merged(json_fixture("configs/deepseek-v3.json"), changes)
}

/// A tokenizer whose pre-tokenizer splits by a pattern.
pub fn split_by(pattern: &str) -> String {
    replaced(&words(), "/pre_tokenizer", split(pattern))
}

fn split(pattern: &str) -> Value {
    json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false})
}

fn words() -> Value {
    json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "added_tokens": [], "post_processor": null,
        "decoder": null, "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": {"a": 0, "memory": 1, "[unk]": 2}, "unk_token": "[unk]"}
    })
}

fn tokenizer() -> Vec<Seed> {
    let with = |key: &str, value: Value| replaced(&words(), &format!("/{key}"), value);
    let charsmap =
        |bytes: &str| with("normalizer", json!({"type": "Precompiled", "precompiled_charsmap": bytes}));
    let added = |id: u32, content: &str| {
        let token = json!({
            "id": id, "content": content, "single_word": false, "lstrip": true, "rstrip": true, "normalized": true, "special": false
        });
        with("added_tokens", json!([token]))
    };
    let unigram =
        json!({"type": "Unigram", "unk_id": 99, "vocab": [["a", -1.0], ["b", -2.0]], "byte_fallback": true});
    let bpe = json!({"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": ["a b", "x y"]});
    let splits = json!({"type": "Sequence", "pretokenizers": vec![split("(?=a)a+"); 1000]});
    let padding = json!({
        "strategy": {"Fixed": 1_000_000_000_000_000_000_u64}, "direction": "Right", "pad_to_multiple_of": 0, "pad_id": 0,
        "pad_type_id": 0, "pad_token": "a"
    });
    let truncation = json!({"direction": "Right", "max_length": 0, "strategy": "LongestFirst", "stride": 9});
    let strip = json!({"type": "Strip", "content": "a", "start": u64::MAX, "stop": u64::MAX});
    let replace = |pattern: &str, content: &str| json!({"type": "Replace", "pattern": {"String": pattern}, "content": content});
    let normalizers =
        |steps: Vec<Value>| with("normalizer", json!({"type": "Sequence", "normalizers": steps}));
    let optional = |groups: usize| format!("(?i){}a?{}", "(".repeat(groups), ")?".repeat(groups));
    seeds([
        ("empty", String::new()),
        ("deep", "[".repeat(100_000)),
        ("nested-optional-groups", split_by(&optional(10))),
        ("optional-groups-in-a-row", split_by(&format!("(?i){}", "(a?)".repeat(1_000)))),
        ("replacement-of-a-megabyte", normalizers(vec![replace("a", &"b".repeat(1_000_000))])),
        ("thirty-doublings", normalizers(vec![replace("a", "aa"); 30])),
        ("two-hundred-doublings", normalizers(vec![replace("a", "aa"); 200])),
        ("replacement-of-nothing", normalizers(vec![replace("", "a")])),
        (
            "doublings-of-a-decoder",
            with("decoder", json!({"type": "Sequence", "decoders": vec![replace("m", "mm"); 40]})),
        ),
        ("nested-quantifiers", split_by("(a+)+(?=!!)")),
        ("nested-lookaheads", split_by("(?:(?=(a+))\\1)*b|(?:a|a)*(?<=b)")),
        ("polynomial", split_by("a*a*a*a*a*a*(?=b)")),
        ("repetitions-that-multiply", split_by("(?:(?:(?=a){1000}){1000}){1000}")),
        ("large-repetition", split_by("(?:\\p{L}{1000}){10}")),
        ("pattern-of-megabytes", split_by(&"a|".repeat(1 << 20))),
        ("pattern-unclosed", split_by("(((((")),
        ("pattern-empty", split_by("")),
        ("pattern-of-brackets", split_by(&"(".repeat(8_000))),
        ("thousand-patterns", with("pre_tokenizer", splits)),
        ("trie-of-gigabytes", charsmap("/////wAAAAA=")),
        ("trie-out-of-bounds", charsmap("BAAAAP////8=")),
        ("padding-of-exabytes", with("padding", padding)),
        ("truncation-of-zero", with("truncation", truncation)),
        ("added-token-empty", added(3, "")),
        ("added-token-of-a-megabyte", added(3, &"x".repeat(1 << 20))),
        ("added-token-of-the-largest-id", added(u32::MAX, "z")),
        ("escape-in-a-token", added(7, "\u{1b}[31m\u{202e}")),
        ("unigram-unknown-out-of-range", with("model", unigram)),
        ("merge-of-unknown-tokens", with("model", bpe)),
        ("strip-more-than-there-is", with("decoder", strip)),
        ("duplicate-key", r#"{"model":{},"model":{}}"#.to_owned()),
    ])
}

fn trace() -> Vec<Seed> {
    let azure = |rows: &str| {
        format!("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n{rows}")
    };
    let burst =
        |rows: &str| format!("Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n{rows}");
    let mooncake = |more: &str| {
        format!("{{\"timestamp\": 0, \"input_length\": 10000000, \"output_length\": 1{more}}}\n")
    };
    let own = |more: &str| format!("{{\"arrival_s\": 1, \"input_tokens\": 3, \"output_tokens\": 2{more}}}\n");
    seeds([
        ("empty", String::new()),
        ("only-a-heading", burst("")),
        ("name-of-a-megabyte", own(&format!(", \"{}\": 1", "n".repeat(1 << 20)))),
        ("unsorted", azure("2023-11-16 18:15:45.0,1,1\n")),
        ("negative", burst("-1,x,1,1\n")),
        ("nan", burst("NaN,x,1,1\n")),
        ("infinite", burst("inf,x,1,1\n")),
        ("beyond-any-date", burst("0,x,1,1\n1e300,x,1,1\n")),
        ("tokens-beyond-64-bits", burst("0,x,99999999999999999999,1\n")),
        ("year-0000", azure("0000-00-00 00:00:00,1,1\n")),
        ("year-9999", azure("9999-12-31 23:59:60.999999999,1,1\n")),
        ("line-of-two-megabytes", azure(&"9".repeat(2 << 20))),
        ("million-short-lines", burst(&"0,,1,1\n".repeat(1_000_000))),
        ("million-empty-lines", burst(&"\n".repeat(1_000_000))),
        ("million-failures", burst(&"0,,0,0\n".repeat(300_000))),
        (
            "classes-by-the-thousand",
            mooncake(&format!(", \"hash_ids\": [{}0]", "0,".repeat(19_000))).repeat(60),
        ),
        ("classes-beyond-the-prompt", mooncake(&format!(", \"hash_ids\": [{}0]", "0,".repeat(400_000)))),
        ("block-of-zero", own(", \"prefix_ids\": [1], \"prefix_block\": 0")),
        ("block-of-everything", own(&format!(", \"prefix_ids\": [1], \"prefix_block\": {}", u64::MAX))),
        ("priority-beyond-32-bits", own(", \"priority\": 99999999999")),
        ("duplicate-key", own(", \"priority\": 1, \"priority\": 2")),
        ("deep", own(&format!(", \"x\": {}", "[".repeat(100_000)))),
        ("escape-in-the-first-line", "\u{1b}]0;owned\u{7}\u{202e}\n".to_owned()),
        ("nul", "\u{0}\u{0}\u{0}\n".to_owned()),
    ])
}

fn workload() -> Vec<Seed> {
    let with =
        |more: &str| format!("name = \"x\"\noutput = {{ distribution = \"fixed\", tokens = 3 }}\n{more}\n");
    let input = |distribution: &str, rest: &str| {
        with(&format!("input = {{ distribution = \"{distribution}\", {rest} }}"))
    };
    let histogram = |buckets: &str| input("histogram", &format!("buckets = [{buckets}]"));
    let fixed = |more: &str| with(&format!("input = {{ distribution = \"fixed\", tokens = 3 }}\n{more}"));
    let tenant = |share: &str| format!("[[tenants]]\nname = \"a\"\nshare = {share}\n");
    let empirical = format!("tokens = [{}1]", "1,".repeat(200_000));
    seeds([
        ("empty", String::new()),
        ("length-zero", input("fixed", "tokens = 0")),
        ("length-max", input("fixed", "tokens = 9223372036854775807")),
        ("length-negative", input("fixed", "tokens = -1")),
        ("weights-that-sum-to-infinity", histogram("[1, 2, 1e308], [3, 4, 1e308]")),
        ("weight-nan", histogram("[1, 2, nan]")),
        ("weights-zero", histogram("[1, 2, 0.0], [1, 2, -0.0]")),
        ("weights-denormal", histogram("[1, 2, 5e-324], [1, 2, 5e-324]")),
        ("no-buckets", histogram("")),
        ("bucket-backwards", histogram("[9, 2, 1.0]")),
        ("spread-nan", input("lognormal", "mean = nan, cv = nan, min = 1, max = 2")),
        ("spread-huge", input("lognormal", "mean = 5.0, cv = 1e308, min = 1, max = 20")),
        ("no-lengths", input("empirical", "tokens = []")),
        ("two-hundred-thousand-lengths", input("empirical", &empirical)),
        ("tenants-that-sum-to-infinity", fixed(&tenant("1e308").repeat(3))),
        ("tenant-infinite", fixed(&tenant("inf"))),
        ("two-thousand-tenants", fixed(&tenant("1.0").repeat(2_000))),
        ("think-time-infinite", fixed("session = { turns = 3, think_s = inf }")),
        ("turns-max", fixed("session = { turns = 9223372036854775807, think_s = 1.0 }")),
        ("prefix-max", fixed("prefix = { tokens = 9223372036854775807, share = 2.0, groups = 0 }")),
        ("deep", format!("a = {}", "[".repeat(100_000))),
        ("deep-tables", format!("a = {}", "{ a = ".repeat(50_000))),
        ("deep-keys", format!("{}a = 1", "a.".repeat(100_000))),
        ("duplicate-key", "name = \"a\"\nname = \"b\"\n".to_owned()),
        ("escape-in-a-key", "\"\\u001b[31m\" = 1\n".to_owned()),
    ])
}

fn foreign() -> Vec<Seed> {
    let record = json_fixture("foreign/vllm-serve-0.25.json");
    let vllm = record.to_string();
    let with = |key: &str, value: Value| replaced(&record, &format!("/{key}"), value);
    let name = "</script><img src=x onerror=1>\u{1b}[31m\u{202e}|`=1+1";
    let mut seeds = seeds([
        ("empty", String::new()),
        ("deep", "[".repeat(100_000)),
        ("four-million-numbers", format!("[{}0]", "0,".repeat(4_000_000))),
        ("million-lists", format!("[{}0]", "[0],".repeat(1_000_000))),
        ("million-objects", "{}\n".repeat(1_000_000)),
        ("million-small-objects", format!("[{}0]", "{\"\":0},".repeat(1_000_000))),
        ("twelve-thousand-records", format!("{vllm}\n").repeat(12_000)),
        ("duplicate-key", format!("{{\"duration\": 1, {}", &vllm[1..])),
        ("hostile-name", with("model_id", json!(name))),
        ("name-of-a-megabyte", with("model_id", json!("n".repeat(1 << 20)))),
        ("negative-duration", with("duration", json!(-1))),
        ("infinite-rate", with("request_rate", json!("inf"))),
        ("count-huge", with("completed", json!(1e300))),
        ("text-for-a-number", with("mean_tpot_ms", json!("fast"))),
        ("time-huge", with("mean_tpot_ms", json!(1e300))),
        ("time-denormal", with("mean_tpot_ms", json!(5e-324))),
        ("list-for-a-number", with("mean_tpot_ms", json!([1, 2]))),
        ("two-million-columns", ",".repeat(2_000_000)),
        ("million-rows", format!("a,b\n{}", "1,2\n".repeat(1_000_000))),
        ("half-a-million-tables", "|a|\n|-|\n".repeat(500_000)),
        ("hundred-thousand-inserts", "INSERT INTO t (a) VALUES (1);".repeat(100_000)),
        ("quote-never-closed", "INSERT INTO t (a) VALUES ('".to_owned() + &"'a".repeat(100_000)),
        ("empty-lines", "a,b\n\n".repeat(300_000)),
        ("byte-order-marks", "\u{feff}".repeat(100_000)),
        ("infinity-unfinished", "[Infinit".to_owned()),
        ("escape-unfinished", "[\"\\".to_owned()),
    ]);
    seeds.extend(all_of(&fixture("foreign")).into_iter().flat_map(counts_at_their_limit));
    seeds
}

/// A text with one whole number after another at the largest of 64 bits, and one more; of a long text its first numbers.
fn counts_at_their_limit(seed: Seed) -> Vec<Seed> {
    const NUMBERS: usize = 48;
    const LIMITS: [&str; 2] = ["18446744073709551615", "18446744073709551616"];
    let Ok(text) = String::from_utf8(seed.bytes) else { return Vec::new() };
    let digit = |at: usize| text.as_bytes().get(at).is_some_and(u8::is_ascii_digit);
    let starts = (0..text.len()).filter(|&at| digit(at) && !at.checked_sub(1).is_some_and(digit));
    let at_limit = |start: usize| {
        let end = (start..text.len()).find(|&at| !digit(at)).unwrap_or(text.len());
        LIMITS.map(|limit| {
            let changed = [&text[..start], limit, &text[end..]].concat();
            Seed::new(format!("{} with {limit} at byte {start}", seed.name), changed)
        })
    };
    starts.take(NUMBERS).flat_map(at_limit).collect()
}

fn result() -> Vec<Seed> {
    let full: Value = serde_json::from_slice(&seed_file("result-full.json").bytes).expect("the seed is JSON");
    let with = |path: &str, value: Value| replaced(&full, path, value);
    let experts = json!({
        "count": 65_536, "per_token": 8, "ffn_size": 1, "shared_count": 0, "shared_ffn_size": 0, "dense_layers": []
    });
    let no_bytes = json!({"weights": 0, "kv_read": 0, "kv_write": 0, "other": 0, "as_implemented": null});
    let block = |field: &str, value: Value| with(&format!("/cells/2/blocks/0/{field}"), value);
    let ceiling = |median: f64, low: f64, high: f64| {
        with("/ceilings/read_bytes_per_s", json!({"median": median, "low": low, "high": high}))
    };
    let mut seeds = seeds([
        ("empty", String::new()),
        ("only-a-version", "{\"schema_version\": 1}".to_owned()),
        ("another-version", "{\"schema_version\": 4294967295}".to_owned()),
        ("deep", format!("{{\"schema_version\": 1, \"config\": {}", "[".repeat(100_000))),
        ("duplicate-version", "{\"schema_version\": 1, \"schema_version\": 1}".to_owned()),
        ("twenty-thousand-cells", with("/cells", json!(vec![full["cells"][0].clone(); 20_000]))),
        ("prefill-batch-max", with("/cells/0/batch", json!(u64::MAX))),
        ("prefill-context-max", with("/cells/0/context", json!(u64::MAX))),
        ("bytes-zero", with("/cells/2/bytes", no_bytes)),
        ("flops-huge", with("/cells/0/flops", json!(1e308))),
        ("flops-negative", with("/cells/0/flops", json!(-1e308))),
        ("block-without-steps", block("step_ns", json!([]))),
        ("block-without-intervals", block("interval_ns", json!([]))),
        ("steps-zero", block("step_ns", json!([0, 0, 0]))),
        ("steps-huge", block("step_ns", json!([1e308, 1e308]))),
        ("steps-negative", block("interval_ns", json!([-1.0]))),
        ("hundred-thousand-steps", block("step_ns", json!(vec![0; 100_000]))),
        ("experts-times-layers", with("/model/architecture/experts", experts)),
        ("windows-of-another-model", with("/model/architecture/windows", json!([1]))),
        ("ceiling-zero", ceiling(0.0, 0.0, 0.0)),
        ("ceiling-huge", ceiling(1e308, -1e308, 1e308)),
        ("telemetry-huge", block("telemetry/power_watts", json!(1e308))),
        ("start-huge", block("at_ns", json!(1e308))),
        ("start-negative", with("/cells/2/blocks/1/at_ns", json!(-1e308))),
    ]);
    seeds.extend(extremes(&full));
    seeds
}

/// The document with each of its numbers at 0 and at the largest of 64 bits, one at a time; of a list's elements only the last counts.
fn extremes(whole: &Value) -> Vec<Seed> {
    fn numbers(value: &Value, path: &str, kind: &str, found: &mut BTreeMap<String, String>) {
        match value {
            Value::Number(_) => {
                found.insert(kind.to_owned(), path.to_owned());
            }
            Value::Object(map) => {
                for (key, value) in map {
                    let key = key.replace('~', "~0").replace('/', "~1");
                    numbers(value, &format!("{path}/{key}"), &format!("{kind}/{key}"), found);
                }
            }
            Value::Array(values) => {
                for (index, value) in values.iter().enumerate() {
                    numbers(value, &format!("{path}/{index}"), &format!("{kind}/*"), found);
                }
            }
            _ => {}
        }
    }
    let mut found = BTreeMap::new();
    numbers(whole, "", "", &mut found);
    let changed = |(kind, path): (&String, &String)| {
        [0, u64::MAX].map(|end| Seed::new(format!("{end} at {kind}"), replaced(whole, path, end)))
    };
    found.iter().flat_map(changed).collect()
}

fn serve_result() -> Vec<Seed> {
    let whole: Value = serde_json::from_slice(&seed_file("serve.json").bytes).expect("the seed is JSON");
    let with = |path: &str, value: Value| replaced(&whole, path, value);
    let mut seeds = seeds([
        ("empty", String::new()),
        ("only-a-kind", "{\"kind\": \"serve\"}".to_owned()),
        ("deep", format!("{{\"kind\": \"serve\", \"points\": {}", "[".repeat(100_000))),
        ("two-thousand-points", with("/points", json!(vec![whole["points"][0].clone(); 2_000]))),
        ("no-points", with("/points", json!([]))),
        ("window-huge", with("/points/0/result/window_s", json!(1e308))),
        ("fifty-thousand-reasons", with("/points/0/result/reasons", json!(vec!["x"; 50_000]))),
    ]);
    seeds.extend(extremes(&whole));
    seeds
}
