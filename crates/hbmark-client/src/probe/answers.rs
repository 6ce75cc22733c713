//! What each answer says, by the fields it has.
//!
//! Fields: vLLM `entrypoints/openai`, SGLang `srt/entrypoints/http_server.py`, llama.cpp `tools/server/server-context.cpp`, TGI
//! `router/src/server.rs`, TensorRT-LLM `serve/openai_server.py`. A field of another type is as good as none.

use hbmark_core::result::serving::{Clue, Dialect, ServedModel};
use serde_json::Value;

use super::Findings;

/// Models that are kept.
const MAX_MODELS: usize = 64;
/// Bytes of a text that are kept.
const MAX_TEXT: usize = 256;

/// `/v1/models`.
pub(super) fn models(answer: &Value, findings: &mut Findings) {
    let Some(models) = answer.get("data").and_then(Value::as_array) else { return };
    findings.model_count = models.len();
    findings.models = models.iter().take(MAX_MODELS).filter_map(model).collect();
    let owner = findings.models.first().and_then(|model| model.owned_by.as_deref());
    let dialect = match owner {
        Some("vllm") => Dialect::Vllm,
        Some("sglang") => Dialect::Sglang,
        Some("llamacpp") => Dialect::LlamaCpp,
        Some("tensorrt_llm") => Dialect::TrtLlm,
        _ => return,
    };
    findings.clue(dialect, Clue::ModelOwner);
}

fn model(model: &Value) -> Option<ServedModel> {
    let of_meta = |key| number(model.get("meta")?, key);
    Some(ServedModel {
        id: text(model, "id")?,
        root: text(model, "root"),
        parent: text(model, "parent"),
        owned_by: text(model, "owned_by"),
        max_model_len: number(model, "max_model_len").or_else(|| of_meta("n_ctx")),
        vocab_size: of_meta("n_vocab"),
        train_context: of_meta("n_ctx_train"),
    })
}

/// `/version`: several servers have it, so it tells none.
pub(super) fn version(answer: &Value, findings: &mut Findings) {
    findings.version = text(answer, "version");
}

/// `/props` of llama.cpp.
pub(super) fn props(answer: &Value, findings: &mut Findings) {
    let slots = number(answer, "total_slots");
    let build = text(answer, "build_info");
    if slots.is_none() && build.is_none() {
        return;
    }
    findings.clue(Dialect::LlamaCpp, Clue::Props);
    let context = answer.get("default_generation_settings").and_then(|settings| number(settings, "n_ctx"));
    findings.slots = slots;
    findings.version = build.or(findings.version.take());
    findings.max_model_len = context;
}

/// `/server_info` of SGLang, of vLLM in its mode for developers.
pub(super) fn server_info(answer: &Value, findings: &mut Findings) {
    if answer.get("vllm_config").is_some() {
        findings.clue(Dialect::Vllm, Clue::ServerInfo);
        return;
    }
    // The whole command line is in it.
    if answer.get("max_total_num_tokens").is_none() && answer.get("disable_radix_cache").is_none() {
        return;
    }
    findings.clue(Dialect::Sglang, Clue::ServerInfo);
    findings.version = text(answer, "version").or(findings.version.take());
    findings.kv_tokens = number(answer, "max_total_num_tokens");
    findings.slots = number(answer, "max_running_requests");
    findings.max_model_len = number(answer, "context_length").or(findings.max_model_len);
    findings.prefix_caching = answer.get("disable_radix_cache").and_then(Value::as_bool).map(|off| !off);
}

/// `/model_info` of SGLang.
pub(super) fn model_info(answer: &Value, findings: &mut Findings) {
    if answer.get("model_path").is_some() && answer.get("is_generation").is_some() {
        findings.clue(Dialect::Sglang, Clue::ModelInfo);
    }
}

/// `/info` of TGI.
pub(super) fn router_info(answer: &Value, findings: &mut Findings) {
    if text(answer, "model_id").is_none() || number(answer, "max_total_tokens").is_none() {
        return;
    }
    findings.clue(Dialect::Tgi, Clue::RouterInfo);
    findings.version = text(answer, "version").or(findings.version.take());
    findings.max_model_len = number(answer, "max_total_tokens");
    findings.slots = number(answer, "max_concurrent_requests");
}

fn number(object: &Value, key: &str) -> Option<u64> {
    object.get(key)?.as_u64()
}

fn text(object: &Value, key: &str) -> Option<String> {
    let text = object.get(key)?.as_str()?;
    Some(text[..text.floor_char_boundary(MAX_TEXT)].to_owned())
}
