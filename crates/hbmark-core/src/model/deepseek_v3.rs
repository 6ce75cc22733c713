//! DeepSeek V3 and R1: latent attention, routed and shared experts after a few dense layers.
//!
//! The layers that predict further tokens (`num_nextn_predict_layers`) take no part in a decode step and are left out.

use serde_json::json;

use super::config::{Conventions, FamilySpec, Fields, Windows, decoder, experts_per_token, limits};
use super::{Architecture, Biases, Experts, Family, LatentAttention, ModelError};

pub(super) const SPEC: FamilySpec =
    FamilySpec { model_type: "deepseek_v3", class: "DeepseekV3ForCausalLM", read };

fn read(fields: &Fields) -> Result<Architecture, ModelError> {
    fields.only("mlp_bias", &json!(false))?;
    fields.only("scoring_func", &json!("sigmoid"))?;
    fields.only("topk_method", &json!("noaux_tc"))?;
    let latent = latent(fields)?;
    let attention = fields.flag("attention_bias", false)?;
    let conventions = Conventions {
        family: Family::DeepseekV3,
        // Latent attention has no key heads; one per query head is what the projections expand to.
        kv_heads_may_be_absent: true,
        // `head_dim`, where a config has it, is the rotary part alone.
        head_dim: Some(latent.qk_nope_head_dim + latent.qk_rope_head_dim),
        theta: None,
        qk_norm: false,
        biases: Biases { qkv: attention, o: attention, mlp: false },
        windows: Windows::Never,
    };
    let architecture = decoder(fields, &conventions)?;
    let experts = experts(fields, architecture.layers)?;
    Ok(Architecture { experts: Some(experts), latent: Some(latent), ..architecture })
}

fn latent(fields: &Fields) -> Result<LatentAttention, ModelError> {
    let key = "q_lora_rank";
    if fields.is_absent(key) {
        return Err(fields.missing(key, "the rank of the compressed query, or null for a direct projection"));
    }
    let width = |key| fields.need_integer(key, 1..=limits::HEAD_DIM);
    let latent = LatentAttention {
        q_rank: fields.integer(key, 1..=limits::HIDDEN)?,
        kv_rank: fields.need_integer("kv_lora_rank", 1..=limits::HIDDEN)?,
        qk_nope_head_dim: width("qk_nope_head_dim")?,
        qk_rope_head_dim: width("qk_rope_head_dim")?,
        v_head_dim: width("v_head_dim")?,
    };
    if !latent.qk_rope_head_dim.is_multiple_of(2) {
        return Err(fields.bad("qk_rope_head_dim", "an even number: the rotary embedding turns pairs"));
    }
    Ok(latent)
}

fn experts(fields: &Fields, layers: usize) -> Result<Experts, ModelError> {
    let count = fields.need_integer("n_routed_experts", 1..=limits::EXPERTS)?;
    let per_token = experts_per_token(fields, count)?;
    check_groups(fields, count, per_token)?;
    let ffn_size = fields.need_integer("moe_intermediate_size", 1..=limits::FFN)?;
    let shared_count = fields.integer("n_shared_experts", 0..=limits::EXPERTS)?.unwrap_or(0);
    let first = fields.need_integer("first_k_dense_replace", 0..=layers)?;
    let frequency = fields.integer("moe_layer_freq", 1..=limits::LAYERS)?.unwrap_or(1);
    Ok(Experts {
        count,
        per_token,
        ffn_size,
        shared_count,
        shared_ffn_size: shared_count * ffn_size,
        dense_layers: (0..layers)
            .filter(|layer| *layer < first || !layer.is_multiple_of(frequency))
            .collect(),
    })
}

/// Experts are chosen within the best `topk_group` of `n_group` groups.
fn check_groups(fields: &Fields, count: usize, per_token: usize) -> Result<(), ModelError> {
    let groups = fields.integer("n_group", 1..=count)?.unwrap_or(1);
    if !count.is_multiple_of(groups) {
        return Err(fields.bad("n_group", format!("a divisor of `n_routed_experts` ({count})")));
    }
    let chosen = fields.integer("topk_group", 1..=groups)?.unwrap_or(groups);
    let reachable = chosen * (count / groups);
    if per_token > reachable {
        return Err(fields
            .bad("num_experts_per_tok", format!("at most the {reachable} experts of the chosen groups")));
    }
    Ok(())
}
