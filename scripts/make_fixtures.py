#!/usr/bin/env python3
"""Writes tests/fixtures/models: tiny random models and what Hugging Face transformers computes from them.

Enters: nothing but the shapes and the seed below. Leaves: one folder per model, as `save_pretrained` writes it, two
GGUF files, and beside each the last-position logits and greedy continuations of a few prompts, in f32. The Rust tests
hold every engine against these numbers; nothing here may know what an engine does.

A fixture is worth its bytes only if a mistake moves its numbers. So every parameter is random (transformers starts
norms at one and biases at zero, where a forgotten one would not show), every special feature (rope scaling, window,
biases, q/k norms) is switched off once and must then change the logits, and prompts whose greedy choice hangs by a
rounding error are passed over. See tests/fixtures/README.md for the versions and the command.
"""

import argparse
import copy
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import gguf
import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    Glm4MoeConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MiniMaxM2Config,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

SEED = 20240229
# One token, just past a block of 16, and past 64.
PROMPT_LENGTHS = (1, 17, 70)
GREEDY_TOKENS = 12
MAX_POSITIONS = 256
# The least lead of the best token over the second at every greedy step: f32 engines differ by about 1e-5; an engine
# that quantises activations to eight bits differs by a few hundredths of the largest logit.
GREEDY_LEAD = 0.05
GREEDY_LEAD_QUANTIZED = 0.15
# The least that switching a feature off must move the 70-token logits (whose standard deviation is 1 to 4).
FEATURE_EFFECT = 0.1

# What the six frequencies of a head of 16, three quarters of which turn, are divided by.
LONG_FACTORS = [1.0, 1.1, 1.5, 2.4, 5.0, 9.5]

Config = dict[str, object]


@dataclass(frozen=True)
class Fixture:
    """One model: its shape, how it is stored, and what must matter to its logits."""

    name: str
    config: PreTrainedConfig
    stored: torch.dtype = torch.float32
    max_shard_size: str = "1GB"
    # Feature name → a function that switches it off in the config or in the weights.
    features: dict[str, Callable[[PreTrainedModel], PreTrainedModel]] = field(default_factory=dict)
    # The config as transformers 4 spelled it, made from the one transformers 5 writes.
    v4: Callable[[Config], Config] | None = None


def shape(hidden: int, heads: int, kv_heads: int, vocab: int, **others: object) -> Config:
    """What the configs of all families share; `others` adds and overrides."""
    return {
        "hidden_size": hidden,
        "intermediate_size": 72,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": MAX_POSITIONS,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    } | others


def default_rope(theta: float) -> Config:
    return {"rope_type": "default", "rope_theta": theta}


def reconfigured(**changes: object) -> Callable[[PreTrainedModel], PreTrainedModel]:
    """The same weights under another config."""

    def change(model: PreTrainedModel) -> PreTrainedModel:
        config = copy.deepcopy(model.config)
        for key, value in changes.items():
            setattr(config, key, value)
        other = type(model)(config)
        other.load_state_dict(model.state_dict())
        return other.eval()

    return change


def filled(name_part: str, value: float) -> Callable[[PreTrainedModel], PreTrainedModel]:
    """The same model with every parameter whose name contains `name_part` set to `value`."""

    def change(model: PreTrainedModel) -> PreTrainedModel:
        other = copy.deepcopy(model)
        touched = [p for name, p in weights(other) if name_part in name]
        assert touched, f"no parameter of {type(model).__name__} is named *{name_part}*"
        with torch.no_grad():
            for parameter in touched:
                parameter.fill_(value)
        return other

    return change


def rerouted(experts: int) -> Callable[[PreTrainedModel], PreTrainedModel]:
    """The same weights with so many experts for a token."""
    return reconfigured(num_experts_per_tok=experts)


def v4_spelling(
    rope_type_key: str = "rope_type", drop: tuple[str, ...] = (), **overrides: object
) -> Callable[[Config], Config]:
    """The config.json of transformers 4: theta, scaling and dtype at the top level, no list of layer types."""

    def convert(v5: Config) -> Config:
        v4 = {key: value for key, value in v5.items() if key not in ("dtype", "rope_parameters", "layer_types", *drop)}
        rope = dict(v5["rope_parameters"])
        if "full_attention" in rope:
            v4["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
            rope = dict(rope["full_attention"])
        if "partial_rotary_factor" in rope:
            v4["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
        v4["rope_theta"] = rope.pop("rope_theta")
        rope_type = rope.pop("rope_type")
        v4["rope_scaling"] = None if rope_type == "default" else {rope_type_key: rope_type} | rope
        v4["torch_dtype"] = v5["dtype"]
        v4["transformers_version"] = "4.44.2"
        v4 |= overrides
        return {key: v4[key] for key in sorted(v4) if key not in drop}

    return convert


LLAMA3_ROPE = {
    "rope_type": "llama3",
    # Wavelengths of 6.3, 20 and 63 positions and more: below 32/4, between, and above 32/1, so all branches run.
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    # One turn within 32 positions lies between the second and the third of eight pairs, eight turns below the first.
    "original_max_position_embeddings": 32,
    "beta_fast": 8.0,
    "truncate": False,
}
# Attention grows with the context by one scale and shrinks by another, so that both are felt.
DEEPSEEK_ROPE = YARN_ROPE | {"mscale": 1.0, "mscale_all_dim": 0.6, "truncate": True}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
# Two bases, and positions divided in the layers that see everything.
GEMMA3_ROPES = {
    "full_attention": LINEAR_ROPE | {"rope_theta": 1000000.0},
    "sliding_attention": default_rope(10000.0),
}
HALF_ROPE = default_rope(10000.0) | {"partial_rotary_factor": 0.5}
GEMMA_NORMS = {
    f"{name}_layernorm": filled(f"{name}_layernorm", 0.0)
    for name in ("input", "post_attention", "pre_feedforward", "post_feedforward")
}
QKV_BIASES = {f"{part}_proj.bias": filled(f"{part}_proj.bias", 0.0) for part in "qkv"}
LATENT_NORMS = {f"{part}_a_layernorm": filled(f"{part}_a_layernorm", 1.0) for part in ("q", "kv")}
LATENT_HEADS = {"kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
QK_NORMS = {f"{part}_norm": filled(f"{part}_norm", 1.0) for part in "qk"}

FIXTURES = [
    # An epsilon large enough to be felt.
    Fixture(
        "llama-gqa",
        LlamaConfig(
            **shape(64, 4, 2, 211, intermediate_size=112, rms_norm_eps=1e-3, rope_parameters=default_rope(500000.0))
        ),
        features={"rms_norm_eps": reconfigured(rms_norm_eps=1e-5)},
    ),
    Fixture("llama-tied", LlamaConfig(**shape(32, 2, 1, 199, num_hidden_layers=3, tie_word_embeddings=True))),
    # As sparse as the first Llama configs: everything left out that has a default.
    Fixture(
        "llama-mha",
        LlamaConfig(**shape(32, 2, 2, 203)),
        v4=v4_spelling(drop=("num_key_value_heads", "head_dim", "rope_theta", "attention_bias", "mlp_bias")),
    ),
    Fixture(
        "llama-llama3-rope",
        LlamaConfig(**shape(32, 2, 1, 205, rope_parameters=LLAMA3_ROPE)),
        features={"rope scaling": reconfigured(rope_parameters=default_rope(10000.0))},
        v4=v4_spelling(),
    ),
    # The key was `type` before it was `rope_type`.
    Fixture(
        "llama-linear-rope",
        LlamaConfig(**shape(32, 2, 1, 199, rope_parameters=LINEAR_ROPE)),
        features={"rope scaling": reconfigured(rope_parameters=default_rope(10000.0))},
        v4=v4_spelling("type"),
    ),
    Fixture(
        "llama-yarn",
        LlamaConfig(**shape(32, 2, 1, 199, rope_parameters=YARN_ROPE)),
        features={
            "rope scaling": reconfigured(rope_parameters=default_rope(10000.0)),
            "attention factor": reconfigured(rope_parameters=YARN_ROPE | {"attention_factor": 1.0}),
            "ramp without rounding": reconfigured(rope_parameters=YARN_ROPE | {"truncate": True}),
        },
        v4=v4_spelling(),
    ),
    Fixture("llama-sharded", LlamaConfig(**shape(48, 3, 1, 199)), max_shard_size="100KB"),
    Fixture("llama-bf16", LlamaConfig(**shape(64, 4, 2, 257)), stored=torch.bfloat16),
    Fixture(
        "mistral",
        MistralConfig(
            **shape(48, 4, 2, 201, head_dim=16, sliding_window=None, rope_parameters=default_rope(1000000.0))
        ),
        v4=v4_spelling(),
    ),
    Fixture(
        "mistral-window",
        MistralConfig(**shape(48, 4, 2, 199, head_dim=16, sliding_window=8)),
        features={"window": reconfigured(sliding_window=None), "one token less": reconfigured(sliding_window=7)},
        v4=v4_spelling(),
    ),
    Fixture(
        "qwen2",
        Qwen2Config(**shape(48, 3, 1, 207, rope_parameters=default_rope(1000000.0))),
        features=QKV_BIASES,
        # A window that is named and not used, as Qwen publishes it.
        v4=v4_spelling(sliding_window=8, use_sliding_window=False, max_window_layers=2),
    ),
    Fixture("qwen2-tied", Qwen2Config(**shape(32, 2, 1, 209, tie_word_embeddings=True)), features=QKV_BIASES),
    Fixture(
        "qwen3",
        Qwen3Config(**shape(48, 4, 2, 213, head_dim=16, rope_parameters=default_rope(1000000.0))),
        features=QK_NORMS,
        v4=v4_spelling(sliding_window=None, use_sliding_window=False, max_window_layers=2),
    ),
    Fixture(
        "qwen3-tied",
        Qwen3Config(**shape(32, 4, 2, 199, head_dim=16, tie_word_embeddings=True)),
        features=QK_NORMS,
    ),
    # Q, K and V in one matrix, gate and up in another; a window, as Phi-3-mini-4k has one.
    Fixture(
        "phi3",
        Phi3Config(
            **shape(64, 4, 2, 209, pad_token_id=None, sliding_window=8, rope_parameters=default_rope(1000000.0))
        ),
        features={"window": reconfigured(sliding_window=None)},
        v4=v4_spelling(),
    ),
    # A factor for each frequency, as Phi-3.5 and Phi-4-mini have. Engines that serve take the long ones at every length, transformers only
    # for prompts beyond the original context: both lists are the same here.
    Fixture(
        "phi3-longrope",
        Phi3Config(
            **shape(
                64,
                4,
                2,
                209,
                pad_token_id=None,
                original_max_position_embeddings=32,
                rope_parameters={
                    "rope_type": "longrope",
                    "rope_theta": 10000.0,
                    "partial_rotary_factor": 0.75,
                    "original_max_position_embeddings": 32,
                    "long_factor": LONG_FACTORS,
                    "short_factor": LONG_FACTORS,
                },
            )
        ),
        features={
            "longrope": reconfigured(
                rope_parameters=default_rope(10000.0) | {"partial_rotary_factor": 0.75}
            ),
        },
        v4=v4_spelling(
            # Phi writes the original context beside it.
            rope_scaling={"type": "longrope", "long_factor": LONG_FACTORS, "short_factor": LONG_FACTORS}
        ),
    ),
    # A dense layer between two with experts.
    Fixture(
        "qwen3-moe",
        Qwen3MoeConfig(
            **shape(
                32,
                4,
                2,
                201,
                head_dim=16,
                num_hidden_layers=3,
                num_experts=8,
                num_experts_per_tok=3,
                moe_intermediate_size=24,
                norm_topk_prob=True,
                mlp_only_layers=[1],
                rope_parameters=default_rope(1000000.0),
            )
        ),
        features={
            "renormalisation": reconfigured(norm_topk_prob=False),
            "the third expert": rerouted(2),
            "the router": filled("mlp.gate.weight", 0.0),
        },
    ),
    Fixture(
        "mixtral",
        MixtralConfig(
            **shape(
                32,
                4,
                2,
                203,
                head_dim=16,
                intermediate_size=40,
                num_local_experts=5,
                num_experts_per_tok=2,
                sliding_window=None,
                rope_parameters=default_rope(1000000.0),
            )
        ),
        features={"the second expert": rerouted(1), "the router": filled("gate.weight", 0.0)},
        v4=v4_spelling(),
    ),
    # Every second layer has experts; the best four keep their share of all eight, beside a shared expert with a gate.
    Fixture(
        "qwen2-moe",
        Qwen2MoeConfig(
            **shape(
                32,
                2,
                1,
                205,
                num_hidden_layers=4,
                num_experts=8,
                num_experts_per_tok=4,
                moe_intermediate_size=20,
                shared_expert_intermediate_size=44,
                norm_topk_prob=False,
                decoder_sparse_step=2,
                rope_parameters=default_rope(1000000.0),
            )
        ),
        features=QKV_BIASES
        | {
            "its own shares": reconfigured(norm_topk_prob=True),
            "the fourth expert": rerouted(3),
            "the shared expert": filled("shared_expert.down_proj", 0.0),
            "the shared expert's gate": filled("shared_expert_gate", 0.0),
        },
    ),
    # A dense layer, then two whose experts are chosen by corrected sigmoids within the best two of four groups, beside a shared one.
    Fixture(
        "glm4-moe",
        Glm4MoeConfig(
            **shape(
                32,
                4,
                2,
                207,
                head_dim=16,
                num_hidden_layers=3,
                attention_bias=True,
                use_qk_norm=True,
                first_k_dense_replace=1,
                n_routed_experts=8,
                num_experts_per_tok=3,
                n_shared_experts=1,
                n_group=4,
                topk_group=2,
                moe_intermediate_size=24,
                norm_topk_prob=True,
                routed_scaling_factor=1.7,
                rope_parameters=HALF_ROPE,
            )
        ),
        features=QK_NORMS
        | QKV_BIASES
        | {
            "the correction": filled("e_score_correction_bias", 0.0),
            "groups": reconfigured(topk_group=4),
            "the scale of shares": reconfigured(routed_scaling_factor=1.0),
            "renormalisation": reconfigured(norm_topk_prob=False),
            "the shared expert": filled("shared_experts.down_proj", 0.0),
            "the router": filled("mlp.gate.weight", 0.0),
        },
        v4=v4_spelling(),
    ),
    # Latent attention with compressed queries, a dense layer, then two with experts in groups.
    Fixture(
        "deepseek-v3",
        DeepseekV3Config(
            **shape(
                32,
                4,
                4,
                205,
                **LATENT_HEADS,
                q_lora_rank=24,
                num_hidden_layers=3,
                attention_bias=True,
                first_k_dense_replace=1,
                n_routed_experts=8,
                num_experts_per_tok=3,
                n_shared_experts=2,
                n_group=4,
                topk_group=2,
                moe_intermediate_size=24,
                routed_scaling_factor=2.5,
                rope_parameters=DEEPSEEK_ROPE,
            )
        ),
        features=LATENT_NORMS
        | {
            "neighbours": reconfigured(rope_interleave=False),
            "rope scaling": reconfigured(rope_parameters=default_rope(10000.0)),
            "the scale of scores": reconfigured(
                rope_parameters=DEEPSEEK_ROPE | {"mscale": 0.0, "mscale_all_dim": 0.0, "attention_factor": 1.128}
            ),
            "the attention factor": reconfigured(rope_parameters=DEEPSEEK_ROPE | {"attention_factor": 1.0}),
            "q_a_proj.bias": filled("q_a_proj.bias", 0.0),
            "kv_a_proj_with_mqa.bias": filled("kv_a_proj_with_mqa.bias", 0.0),
            "the correction": filled("e_score_correction_bias", 0.0),
            "groups": reconfigured(topk_group=4),
            "the shared expert": filled("shared_experts.down_proj", 0.0),
        },
        v4=v4_spelling(),
    ),
    # Queries projected directly, shares of a softmax that are not renormalised, as in V2-Lite.
    Fixture(
        "deepseek-v2",
        DeepseekV2Config(
            **shape(
                32,
                4,
                4,
                203,
                **LATENT_HEADS,
                q_lora_rank=None,
                num_hidden_layers=2,
                first_k_dense_replace=1,
                n_routed_experts=8,
                num_experts_per_tok=3,
                n_shared_experts=2,
                topk_method="greedy",
                moe_intermediate_size=24,
                routed_scaling_factor=4.0,
                rope_parameters=DEEPSEEK_ROPE | {"mscale": 0.6},
            )
        ),
        features={
            "kv_a_layernorm": LATENT_NORMS["kv_a_layernorm"],
            "the scale of scores": reconfigured(
                rope_parameters=DEEPSEEK_ROPE | {"mscale": 0.0, "mscale_all_dim": 0.0, "attention_factor": 1.0}
            ),
            "the third expert": rerouted(2),
            "the scale of shares": reconfigured(routed_scaling_factor=1.0),
            "the shared expert": filled("shared_experts.down_proj", 0.0),
        },
        v4=v4_spelling(),
    ),
    # Experts of a softmax within the best groups, as in V2 and V2.5.
    Fixture(
        "deepseek-v2-groups",
        DeepseekV2Config(
            **shape(
                32,
                4,
                4,
                207,
                **LATENT_HEADS,
                q_lora_rank=24,
                num_hidden_layers=2,
                first_k_dense_replace=1,
                n_routed_experts=12,
                num_experts_per_tok=3,
                n_shared_experts=1,
                topk_method="group_limited_greedy",
                n_group=4,
                topk_group=2,
                moe_intermediate_size=24,
                routed_scaling_factor=4.0,
                rope_parameters=DEEPSEEK_ROPE | {"mscale": 0.6},
            )
        ),
        features=LATENT_NORMS
        | {
            "the groups": reconfigured(topk_method="greedy"),
            "the third expert": rerouted(2),
            "the scale of shares": reconfigured(routed_scaling_factor=1.0),
        },
        v4=v4_spelling(),
    ),
    # Norms over the full width of q and k, half of each head turned, experts by corrected sigmoids.
    Fixture(
        "minimax-m2",
        MiniMaxM2Config(
            **shape(
                32,
                4,
                2,
                211,
                head_dim=16,
                intermediate_size=24,
                num_local_experts=6,
                num_experts_per_tok=2,
                rope_parameters=HALF_ROPE,
            )
        ),
        features=QK_NORMS
        | {
            "the correction": filled("e_score_correction_bias", 0.0),
            "the second expert": rerouted(1),
            "the router": filled("gate.weight", 0.0),
        },
    ),
    # Sinks, a window in every second layer, biases everywhere, clamped experts stored as one tensor, input by input.
    Fixture(
        "gpt-oss",
        GptOssConfig(
            **shape(
                32,
                4,
                2,
                209,
                head_dim=16,
                intermediate_size=24,
                num_hidden_layers=3,
                num_local_experts=6,
                num_experts_per_tok=2,
                sliding_window=8,
                swiglu_limit=1.5,
                rope_parameters=YARN_ROPE,
            )
        ),
        features={
            "sinks": filled("sinks", -100.0),
            "window": reconfigured(layer_types=["full_attention"] * 3),
            "rope scaling": reconfigured(rope_parameters=default_rope(10000.0)),
            "the clamp": reconfigured(swiglu_limit=7.0),
            "the second expert": rerouted(1),
            "the router": filled("router.weight", 0.0),
        }
        | {name: filled(name, 0.0) for name in ("o_proj.bias", "router.bias", "gate_up_proj_bias", "down_proj_bias")},
        v4=v4_spelling(layer_types=["sliding_attention", "full_attention", "sliding_attention"]),
    ),
    # The middle layer has no positions.
    Fixture(
        "smollm3",
        SmolLM3Config(
            **shape(
                32,
                4,
                2,
                199,
                num_hidden_layers=3,
                pad_token_id=None,
                tie_word_embeddings=True,
                no_rope_layers=[1, 0, 1],
                rope_parameters=default_rope(2000000.0),
            )
        ),
        features={
            "a layer without positions": reconfigured(no_rope_layers=[1, 1, 1]),
            "positions": reconfigured(no_rope_layers=[0, 0, 0]),
        },
        v4=v4_spelling(),
    ),
    # Every multiplier is another one; an epsilon that is felt beside the small embeddings.
    Fixture(
        "granite",
        GraniteConfig(
            **shape(
                32,
                4,
                2,
                201,
                tie_word_embeddings=True,
                rms_norm_eps=1e-2,
                embedding_multiplier=0.4,
                residual_multiplier=0.8,
                logits_scaling=0.7,
                attention_multiplier=0.5,
            )
        ),
        features={
            "the embedding multiplier": reconfigured(embedding_multiplier=1.0),
            "the residual multiplier": reconfigured(residual_multiplier=1.0),
            "the scaling of logits": reconfigured(logits_scaling=1.0),
            "the attention multiplier": reconfigured(attention_multiplier=8**-0.5),
            "epsilon": reconfigured(rms_norm_eps=1e-5),
        },
        v4=v4_spelling(),
    ),
    # Norms after the projections alone, and over the full width of Q and K.
    Fixture(
        "olmo2",
        Olmo2Config(**shape(32, 4, 2, 203, num_hidden_layers=3, pad_token_id=None)),
        features=QK_NORMS
        | {f"post_{part}_layernorm": filled(f"post_{part}_layernorm", 1.0) for part in ("attention", "feedforward")},
        v4=v4_spelling(),
    ),
    # Neighbours turn together, in half of each head; norms before and after.
    Fixture(
        "glm4",
        Glm4Config(
            **shape(48, 4, 2, 205, head_dim=16, pad_token_id=None, attention_bias=True, rope_parameters=HALF_ROPE)
        ),
        features=QKV_BIASES
        | {
            "the half that does not turn": reconfigured(rope_parameters=default_rope(10000.0)),
            "post_self_attn_layernorm": filled("post_self_attn_layernorm", 1.0),
            "post_mlp_layernorm": filled("post_mlp_layernorm", 1.0),
        },
        v4=v4_spelling(),
    ),
    # The first of two layers sees eight tokens. Both caps are low enough to be felt.
    Fixture(
        "gemma2",
        Gemma2Config(
            **shape(
                48,
                4,
                2,
                207,
                head_dim=16,
                pad_token_id=None,
                tie_word_embeddings=True,
                sliding_window=8,
                query_pre_attn_scalar=9,
                attn_logit_softcapping=4.0,
                final_logit_softcapping=3.0,
            )
        ),
        features=GEMMA_NORMS
        | {
            "window": reconfigured(sliding_window=100),
            "the scale of queries": reconfigured(query_pre_attn_scalar=16),
            "the cap of scores": reconfigured(attn_logit_softcapping=None),
            "the cap of logits": reconfigured(final_logit_softcapping=None),
        },
        v4=v4_spelling(hidden_act="gelu_pytorch_tanh"),
    ),
    # Two windows, then a full layer with a rotary embedding of its own.
    Fixture(
        "gemma3",
        Gemma3TextConfig(
            **shape(
                32,
                4,
                2,
                199,
                head_dim=16,
                num_hidden_layers=3,
                pad_token_id=None,
                tie_word_embeddings=True,
                sliding_window=8,
                query_pre_attn_scalar=9,
                layer_types=["sliding_attention", "sliding_attention", "full_attention"],
                rope_parameters=GEMMA3_ROPES,
            )
        ),
        features=GEMMA_NORMS
        | {f"{part}_norm": filled(f"{part}_norm", 0.0) for part in "qk"}
        | {
            "window": reconfigured(sliding_window=100),
            "the scale of queries": reconfigured(query_pre_attn_scalar=16),
            "the full layer's rope": reconfigured(
                rope_parameters=GEMMA3_ROPES | {"full_attention": default_rope(10000.0)}
            ),
            "the other layers' rope": reconfigured(
                rope_parameters=GEMMA3_ROPES | {"sliding_attention": default_rope(1000000.0)}
            ),
        },
        v4=v4_spelling(drop=("_sliding_window_pattern",), sliding_window_pattern=3),
    ),
]

# Rows of q8_0 are made of blocks of 32.
GGUF_LLAMA = LlamaConfig(**shape(64, 4, 2, 211, intermediate_size=96))
GGUF_QWEN3 = Qwen3Config(
    **shape(
        64,
        4,
        2,
        199,
        head_dim=32,
        intermediate_size=96,
        tie_word_embeddings=True,
        rope_parameters=default_rope(1000000.0),
    )
)

GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}

# Words for the tokenizers; any text with enough different pairs of letters does.
TOKENIZER_TEXT = """
a decode step reads every weight once and every key and value of the context once, so the memory bus sets its pace;
a prefill step reads the same weights for many tokens at a time, so the arithmetic units set its pace instead.
when the batch grows the weights are shared by more tokens, and what each sequence remembers begins to count for more.
a benchmark that does not say which of the two it measured has measured neither, and its numbers travel badly.
warm the machine, take the samples in blocks, keep the raw times, and never throw away a slow one without a cause.
"""


def stream(*labels: object) -> torch.Generator:
    """A random stream of its own for every label, so that adding a fixture leaves the others as they are."""
    seed = SEED
    for byte in "/".join(map(str, labels)).encode():
        seed = (seed * 1099511628211 + byte) % 2**63
    return torch.Generator().manual_seed(seed)


def weights(model: PreTrainedModel) -> list[tuple[str, torch.Tensor]]:
    """The parameters by name, and what is kept like one: corrections of routing scores."""
    corrections = [(key, buffer) for key, buffer in model.named_buffers() if key.endswith("correction_bias")]
    return [*model.named_parameters(), *corrections]


def random_model(name: str, config: PreTrainedConfig) -> PreTrainedModel:
    """A model in which every parameter is random."""
    config = copy.deepcopy(config)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for key, parameter in weights(model):
            noise = torch.randn(parameter.shape, generator=stream(name, key))
            if key.endswith("bias"):
                parameter.copy_(0.3 * noise)
            elif parameter.dim() == 1:
                parameter.copy_(1.0 + 0.15 * noise)
            elif "embed_tokens" in key:
                # Gemma multiplies them, and its layers add little beside: small enough that a token does not predict itself.
                parameter.copy_((0.1 if config.model_type.startswith("gemma") else 0.3) * noise)
            else:
                # Somewhat above 1/√fan_in: attention that chooses, logits that spread.
                parameter.copy_(1.4 * parameter.shape[-1] ** -0.5 * noise)
    return model


@torch.inference_mode()
def last_logits(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """The logits after the last token, by one pass over all of them without a KV cache."""
    return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]


def greedy(model: PreTrainedModel, prompt: list[int], lead: float) -> list[int] | None:
    """The greedy continuation, or None where a chosen token leads the next best by less than `lead`."""
    tokens = list(prompt)
    for _ in range(GREEDY_TOKENS):
        best = last_logits(model, tokens).topk(2)
        if (best.values[0] - best.values[1]).item() < lead:
            return None
        tokens.append(best.indices[0].item())
    return tokens[len(prompt) :]


def case(name: str, model: PreTrainedModel, length: int, lead: float) -> Config:
    """The first random prompt of this length whose continuation is beyond doubt, has no end in it and varies."""
    for attempt in range(2000):
        prompt = torch.randint(
            model.config.vocab_size, (length,), generator=stream(name, "prompt", length, attempt)
        ).tolist()
        continuation = greedy(model, prompt, lead)
        if continuation is None or model.config.eos_token_id in continuation:
            continue
        if len(set(continuation)) >= 4:
            logits = [float(f"{value:.9g}") for value in last_logits(model, prompt).tolist()]
            assert np.isfinite(logits).all() and int(np.argmax(logits)) == continuation[0]
            return {"tokens": prompt, "logits": logits, "greedy": continuation}
    raise SystemExit(f"{name}: no prompt of {length} tokens has a greedy lead of {lead}")


def write_reference(path: Path, name: str, model: PreTrainedModel, lead: float = GREEDY_LEAD) -> list[Config]:
    """Writes what transformers computes; one line per case keeps diffs readable."""
    assert model.dtype == torch.float32 and model.config._attn_implementation == "eager"
    cases = [case(name, model, length, lead) for length in PROMPT_LENGTHS]
    head = {"transformers": transformers.__version__, "torch": torch.__version__.split("+")[0], "dtype": "f32"}
    lines = ",\n".join("  " + json.dumps(case, separators=(",", ":")) for case in cases)
    path.write_text(json.dumps(head)[:-1] + ', "cases": [\n' + lines + "\n]}\n")
    return cases


def check_features(fixture: Fixture, model: PreTrainedModel, prompt: list[int]) -> None:
    """Switches every special feature off and demands that the logits move."""
    wanted = last_logits(model, prompt)
    for feature, switch_off in fixture.features.items():
        effect = (last_logits(switch_off(model), prompt) - wanted).abs().max().item()
        print(f"  without {feature}: {effect:.3f}")
        if effect < FEATURE_EFFECT:
            raise SystemExit(f"{fixture.name}: {feature} moves the logits by {effect} only, so a test would not see it")


def check_same(name: str, what: str, model: PreTrainedModel, cases: list[Config]) -> None:
    """Demands that a model read back some other way computes what was written."""
    for case in cases:
        torch.testing.assert_close(
            last_logits(model, case["tokens"]),
            torch.tensor(case["logits"]),
            rtol=1e-5,
            atol=1e-5,
            msg=f"{name}: {what}",
        )


def write_hugging_face(folder: Path, fixture: Fixture) -> None:
    """One folder as `save_pretrained` leaves it, with its reference."""
    random_model(fixture.name, fixture.config).to(fixture.stored).save_pretrained(
        folder, max_shard_size=fixture.max_shard_size
    )
    (folder / "generation_config.json").unlink(missing_ok=True)
    config_path = folder / "config.json"
    config = json.loads(config_path.read_text())
    config_path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")

    # What is on disk, computed in f32: for bf16 weights that is not what was in memory before.
    def read_back(path: Path) -> PreTrainedModel:
        return transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager", local_files_only=True
        ).eval()

    model = read_back(folder)
    cases = write_reference(folder / "reference.json", fixture.name, model)
    check_features(fixture, model, cases[-1]["tokens"])
    if fixture.v4 is not None:
        v4_path = folder / "config.v4.json"
        v4_path.write_text(json.dumps(fixture.v4(config), indent=2) + "\n")
        with tempfile.TemporaryDirectory() as temporary:
            for weights in folder.glob("*.safetensors*"):
                shutil.copy(weights, temporary)
            shutil.copy(v4_path, Path(temporary) / "config.json")
            check_same(fixture.name, "config.v4.json", read_back(Path(temporary)), cases)


def gguf_name(name: str) -> str:
    """`model.layers.0.self_attn.q_proj.weight` → `blk.0.attn_q.weight`."""
    if name in GGUF_NAMES:
        return GGUF_NAMES[name]
    layer, inner = name.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{GGUF_NAMES[inner.removesuffix('.weight')]}.weight"


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a head from (first half, second half) to pairs, as llama.cpp rotates the q and k of Llama models."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(folder: Path, arch: str, config: PreTrainedConfig) -> None:
    """A GGUF file with q8_0 matrices and f32 norms; the reference is computed from the dequantised matrices."""
    name = f"{arch}-q8_0"
    q8_0 = gguf.GGMLQuantizationType.Q8_0
    model = random_model(name, config)
    config = model.config
    path = folder / f"{name}.gguf"
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name(name)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if arch == "llama":
        writer.add_rope_dimension_count(config.head_dim)
        writer.add_vocab_size(config.vocab_size)
    else:
        # Files of Qwen3 name the head's width and neither the rotary width nor the vocabulary's size.
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>"] + [f"t{token}" for token in range(3, config.vocab_size)])
    writer.add_token_scores([float(-token) for token in range(config.vocab_size)])
    writer.add_token_types([2, 3, 3] + [1] * (config.vocab_size - 3))
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)

    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads} if arch == "llama" else {}
    for key, parameter in model.named_parameters():
        weight = parameter.detach().numpy()
        if weight.ndim == 1:
            writer.add_tensor(gguf_name(key), weight)
            continue
        for projection, count in heads.items():
            if projection in key:
                weight = interleaved(weight, count)
        writer.add_tensor(gguf_name(key), gguf.quantize(weight, q8_0), raw_dtype=q8_0)
        # Blocks lie along a row and only rows were moved, so both orders round alike.
        with torch.no_grad():
            rounded = gguf.dequantize(gguf.quantize(parameter.detach().numpy(), q8_0), q8_0)
            parameter.copy_(torch.from_numpy(rounded))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    cases = write_reference(folder / f"{name}.reference.json", name, model, GREEDY_LEAD_QUANTIZED)
    # The config is handed over because transformers does not take the width of a head from the file.
    read_back = (
        type(model)
        .from_pretrained(
            folder,
            config=config,
            gguf_file=path.name,
            dtype=torch.float32,
            attn_implementation="eager",
            local_files_only=True,
        )
        .eval()
    )
    check_same(name, "read back from GGUF", read_back, cases)


def write_tokenizer(path: Path, vocab_size: int) -> None:
    """A byte-pair tokenizer of exactly `vocab_size` entries."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=["<unk>", "<s>", "</s>"], min_frequency=1, show_progress=False
    )
    tokenizer.train_from_iterator(TOKENIZER_TEXT.strip().splitlines(), trainer)
    assert tokenizer.get_vocab_size() == vocab_size, f"{tokenizer.get_vocab_size()} entries instead of {vocab_size}"
    tokenizer.save(str(path))


def emptied_folder(name: str, description: str) -> Path:
    """The folder of fixtures that the command line asks for, with nothing in it."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    default = Path(__file__).resolve().parent.parent / "tests" / "fixtures" / name
    parser.add_argument("--out", type=Path, default=default, help="folder to replace (default: %(default)s)")
    out = parser.parse_args().out
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    return out


def main() -> None:
    out = emptied_folder("models", __doc__)
    for fixture in FIXTURES:
        print(fixture.name)
        write_hugging_face(out / fixture.name, fixture)
    for arch, config in (("llama", GGUF_LLAMA), ("qwen3", GGUF_QWEN3)):
        print(f"{arch}-q8_0")
        write_gguf(out, arch, config)
    write_tokenizer(out / "llama-gqa" / "tokenizer.json", 211)
    # More entries than the model has rows: an id it may produce has no embedding, so the pair must be refused.
    write_tokenizer(out / "llama-tied" / "tokenizer-wrong-vocab.json", 263)
    for path in out.rglob("*.safetensors"):
        path.chmod(0o644)
    print(sum(path.stat().st_size for path in out.rglob("*") if path.is_file()), "bytes")


if __name__ == "__main__":
    main()
