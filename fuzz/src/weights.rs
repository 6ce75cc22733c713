//! The readers of weights and tokenizers: fuzz targets that need candle.

use std::path::{Path, PathBuf};

use crate::targets::{FuzzTarget, Seed, bytes_of, fixture, prepared, put, refused, seed_file, text_target};
use hbmark::weights::OpenModel;
use hbmark::weights::tokenizer::Tokenizer;
use hbmark_core::model::Dtype;

/// A file whose weights begin within so many bytes.
const HEADER: usize = 4_096;

pub const TARGETS: &[FuzzTarget] = &[
    FuzzTarget { head: HEADER, ..text_target("safetensors", safetensors, safetensors_seeds) },
    FuzzTarget { head: 2 * HEADER, ..text_target("quantised", quantised, quantised_seeds) },
    text_target("index", index, index_seeds),
    FuzzTarget { head: HEADER, ..text_target("gguf", gguf, gguf_seeds) },
    // The tokenizers crate allocates its own tables: twice the vocabulary, its merges, an automaton of the added tokens.
    FuzzTarget { per_byte: 32, ..text_target("tokenizer", tokenizer, tokenizer_seeds) },
];

/// Loads accepted weights as the engines do.
fn load(model: &OpenModel) -> bool {
    let device = candle_core::Device::Cpu;
    let dtype = if model.is_gguf() { Dtype::Gguf } else { Dtype::F32 };
    let loaded = model.load(dtype, &device, &mut |_| {});
    let streamed = model.stream(if model.is_gguf() { Dtype::Gguf } else { Dtype::Q8_0 }, &mut |_, _| Ok(()));
    loaded.is_ok() && streamed.is_ok()
}

fn open_model(path: &Path) -> bool {
    let path = path.to_str().expect("a scratch path is UTF-8");
    // What `predict` reads of it: headers alone, and more architectures.
    if let Err(error) = hbmark::weights::open_shape(path, None) {
        refused(error);
    }
    match hbmark::weights::open(path, None, 0) {
        Ok(model) => load(&model),
        Err(error) => refused(error),
    }
}

fn safetensors(bytes: &[u8], scratch: &Path) -> bool {
    let config = fixture("models/llama-bf16/config.json");
    let folder = prepared(scratch, "safetensors", &[("config.json", config)]);
    put(&folder.join("model.safetensors"), bytes);
    open_model(&folder)
}

fn safetensors_seeds() -> Vec<Seed> {
    vec![Seed::new("llama-bf16", bytes_of(&fixture("models/llama-bf16/model.safetensors")))]
}

/// Folders of quantised weights, one for each way in which parts of a layer are laid out.
const QUANTISED: [&str; 9] = [
    "qwen3-moe-fp8-block",
    "llama-fp8-tensor",
    "llama-int8-channel",
    "llama-int4-zeros",
    "qwen2-awq",
    "llama-gptq",
    "llama-nvfp4",
    "qwen3-moe-nvfp4",
    "llama-mxfp8",
];

/// The tensors under the config of each folder.
fn quantised(bytes: &[u8], scratch: &Path) -> bool {
    let streamed = QUANTISED.map(|name| {
        let config = fixture("quantised").join(name).join("config.json");
        let folder = prepared(scratch, name, &[("config.json", config)]);
        put(&folder.join("model.safetensors"), bytes);
        let opened = hbmark::weights::open(folder.to_str().expect("a scratch path is UTF-8"), None, 0);
        let mut dequantise = |_: &str, tensor: hbmark::weights::StoredTensor| {
            let _ = tensor.values();
            Ok(())
        };
        match opened.and_then(|model| model.stream(model.stored_dtype(), &mut dequantise)) {
            Ok(_) => true,
            Err(error) => refused(error),
        }
    });
    streamed.contains(&true)
}

fn quantised_seeds() -> Vec<Seed> {
    let of = |name| Seed::new(name, bytes_of(&fixture("quantised").join(name).join("model.safetensors")));
    QUANTISED.map(of).into()
}

fn index(bytes: &[u8], scratch: &Path) -> bool {
    let of = |name: &str| fixture("models/llama-sharded").join(name);
    let shards = [1, 2, 3].map(|n| format!("model-0000{n}-of-00003.safetensors"));
    let mut files: Vec<(&str, PathBuf)> = shards.iter().map(|name| (name.as_str(), of(name))).collect();
    files.push(("config.json", of("config.json")));
    let folder = prepared(scratch, "index", &files);
    put(&folder.join("model.safetensors.index.json"), bytes);
    open_model(&folder)
}

fn index_seeds() -> Vec<Seed> {
    vec![Seed::new("llama-sharded", bytes_of(&fixture("models/llama-sharded/model.safetensors.index.json")))]
}

fn gguf(bytes: &[u8], scratch: &Path) -> bool {
    let path = scratch.join("model.gguf");
    put(&path, bytes);
    open_model(&path)
}

fn gguf_seeds() -> Vec<Seed> {
    let of = |name: &str| Seed::new(name, bytes_of(&fixture("models").join(name)));
    vec![of("llama-q8_0.gguf"), of("qwen3-q8_0.gguf")]
}

fn tokenizer(bytes: &[u8], scratch: &Path) -> bool {
    let folder = prepared(scratch, "tokenizer", &[]);
    put(&folder.join("tokenizer.json"), bytes);
    match Tokenizer::open(&folder) {
        Ok(mut tokenizer) => {
            for text in [
                "",
                "a memory wall\n\n  é 一 123456",
                "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!",
                "\u{301}\u{0}\r\n",
            ] {
                if let Ok(tokens) = tokenizer.encode(text) {
                    let _ = tokenizer.decode(&tokens);
                }
            }
            let _ = tokenizer.decode(&[0, 1, u32::MAX]);
            if let Err(error) = tokenizer.check_vocab(1) {
                refused(error);
            }
            true
        }
        Err(error) => refused(error),
    }
}

fn tokenizer_seeds() -> Vec<Seed> {
    vec![seed_file("tokenizer-words.json"), seed_file("tokenizer-bpe.json")]
}
