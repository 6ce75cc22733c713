//! `DeepSeek` V2 Lite to V3.2, Kimi K2 and GLM-5: latent attention, routed and shared experts after a few dense layers; from V3.2 on an indexer
//! picks the positions.
//!
//! The layers that predict further tokens (`num_nextn_predict_layers`) take no part in a decode step and are left out.

use serde_json::json;

use super::config::{
    Conventions, FamilySpec, Fields, decoder, experts_per_token, limits, mscale_all_dim,
    routed_scaling_factor,
};
use super::{
    Activation, Architecture, Biases, Dense, Experts, Family, FeedForward, Indexer, LatentAttention, Layer,
    Mixer, Mixture, ModelError, Norms, Routing, Stack,
};

pub(super) const SPEC: FamilySpec = FamilySpec {
    names: &[
        ("deepseek_v2", "DeepseekV2ForCausalLM"),
        ("deepseek_v3", "DeepseekV3ForCausalLM"),
        ("deepseek_v32", "DeepseekV32ForCausalLM"),
        ("kimi_k2", "DeepseekV3ForCausalLM"),
        ("kimi_k25", "KimiK25ForConditionalGeneration"),
        ("glm_moe_dsa", "GlmMoeDsaForCausalLM"),
    ],
    keys: &["index_topk", "indexer_types"],
    read,
};

fn read(fields: &Fields) -> Result<Architecture, ModelError> {
    fields.only("mlp_bias", &json!(false))?;
    fields.only("rope_interleave", &json!(true))?;
    let latent = latent(fields)?;
    let attention = fields.flag("attention_bias", false)?;
    let conventions = Conventions {
        // Latent attention has no key heads; one per query head is what the projections expand to.
        kv_heads_may_be_absent: true,
        // `head_dim`, where a config has it, is the rotary part alone.
        head_dim: Some(latent.qk_nope_head_dim + latent.qk_rope_head_dim),
        biases: Biases { qkv: attention, o: attention, mlp: false },
        ..Conventions::of(Family::DeepseekV3)
    };
    let a = decoder(fields, &conventions)?;
    let (experts, mixture) = experts(fields, a.layers)?;
    let indexer = indexer(fields, &latent)?;
    let dense = Dense { width: a.ffn_size, activation: Activation::Silu, bias: false, fused: false };
    let stack = Stack::new((0..a.layers).map(|layer| Layer {
        mixer: Mixer::Latent { heads: a.heads, latent, indexer },
        feed_forward: if experts.dense_layers.contains(&layer) {
            FeedForward::Dense(dense)
        } else {
            FeedForward::Mixture(mixture)
        },
        norms: Norms::Before,
    }));
    Ok(Architecture { experts: Some(experts), latent: Some(latent), stack: Some(stack), ..a })
}

fn indexer(fields: &Fields, latent: &LatentAttention) -> Result<Option<Indexer>, ModelError> {
    // GLM-5.2 shares what some layers pick with others; those of GLM-5.1 all pick their own.
    let kinds = fields.list("indexer_types", limits::LAYERS)?.unwrap_or_default();
    if kinds.iter().any(|kind| kind != &json!("full")) {
        return Err(fields.unsupported("indexer_types", "full for every layer"));
    }
    let Some(top_k) = fields.integer("index_topk", 1..=limits::POSITIONS)? else { return Ok(None) };
    if latent.q_rank.is_none() {
        return Err(
            fields.missing("q_lora_rank", "the rank of the compressed query, which the indexer reads")
        );
    }
    Ok(Some(Indexer {
        heads: fields.need_integer("index_n_heads", 1..=limits::HEADS)?,
        head_dim: fields.need_integer("index_head_dim", 1..=limits::HEAD_DIM)?,
        top_k,
    }))
}

fn latent(fields: &Fields) -> Result<LatentAttention, ModelError> {
    let key = "q_lora_rank";
    if fields.is_absent(key) {
        return Err(fields.missing(key, "the rank of the compressed query, or null for a direct projection"));
    }
    let width = |key| fields.need_integer(key, 1..=limits::HEAD_DIM);
    let mut latent = LatentAttention {
        q_rank: fields.integer(key, 1..=limits::HIDDEN)?,
        kv_rank: fields.need_integer("kv_lora_rank", 1..=limits::HIDDEN)?,
        qk_nope_head_dim: width("qk_nope_head_dim")?,
        qk_rope_head_dim: width("qk_rope_head_dim")?,
        v_head_dim: width("v_head_dim")?,
        scale: None,
    };
    if let Some(factor) = mscale_all_dim(fields)? {
        latent.scale = Some(factor * factor / (latent.query_dim() as f64).sqrt());
    }
    if !latent.qk_rope_head_dim.is_multiple_of(2) {
        return Err(fields.bad("qk_rope_head_dim", "an even number: the rotary embedding turns pairs"));
    }
    Ok(latent)
}

/// The experts, as all fields of a model and as one of its layers has them.
pub(super) fn experts(fields: &Fields, layers: usize) -> Result<(Experts, Mixture), ModelError> {
    // As transformers saves V2, it has no key for its scores.
    let by_softmax = fields.get("model_type") == Some(&json!("deepseek_v2"));
    if by_softmax {
        fields.only("scoring_func", &json!("softmax"))?;
        fields.only("norm_topk_prob", &json!(false))?;
    } else {
        fields.only("scoring_func", &json!("sigmoid"))?;
        fields.only("topk_method", &json!("noaux_tc"))?;
    }
    let count = fields.need_integer("n_routed_experts", 1..=limits::EXPERTS)?;
    let per_token = experts_per_token(fields, count)?;
    let by_groups = !by_softmax || fields.get("topk_method") == Some(&json!("group_limited_greedy"));
    if !by_groups {
        fields.only("topk_method", &json!("greedy"))?;
    }
    let (groups, chosen_groups) = if by_groups { groups(fields, count, per_token)? } else { (1, 1) };
    let ffn_size = fields.need_integer("moe_intermediate_size", 1..=limits::FFN)?;
    let shared_count = fields.integer("n_shared_experts", 0..=limits::EXPERTS)?.unwrap_or(0);
    let first = fields.need_integer("first_k_dense_replace", 0..=layers)?;
    let frequency = fields.integer("moe_layer_freq", 1..=limits::LAYERS)?.unwrap_or(1);
    let dense = (0..layers).filter(|layer| *layer < first || !layer.is_multiple_of(frequency)).collect();
    let routing = if by_softmax && by_groups {
        Routing::GroupedSoftmax { groups, chosen_groups, renormalised: false }
    } else if by_softmax {
        Routing::Softmax { renormalised: false }
    } else {
        let renormalised = fields.flag("norm_topk_prob", true)?;
        Routing::Sigmoid { correction: true, groups, chosen_groups, renormalised }
    };
    let mixture = Mixture {
        shared_width: shared_count * ffn_size,
        routed_scaling_factor: routed_scaling_factor(fields)?,
        ..Mixture::new(count, per_token, ffn_size, routing)
    };
    Ok((Experts { shared_count, ..Experts::of(&mixture, dense) }, mixture))
}

/// Experts are chosen within the best `topk_group` of `n_group` groups.
fn groups(fields: &Fields, count: usize, per_token: usize) -> Result<(usize, usize), ModelError> {
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
    Ok((groups, chosen))
}
