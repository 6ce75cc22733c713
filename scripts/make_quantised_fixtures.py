#!/usr/bin/env python3
"""Writes tests/fixtures/quantised: tiny random models as the writers of quantised checkpoints store them, with what transformers computes.

Enters: nothing but the shapes below and the seed of make_fixtures.py. Leaves: one folder per layout, with the last-position logits and greedy
continuations of a few prompts, computed in f32 from what the stored codes and scales stand for. Where transformers or compressed-tensors reads a
layout itself on a CPU, it must compute the same from the folder.
"""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import transformers
from make_fixtures import (
    GREEDY_LEAD_QUANTIZED,
    DEEPSEEK_ROPE,
    YARN_ROPE,
    Config,
    Fixture,
    emptied_folder,
    last_logits,
    random_model,
    shape,
    weights,
    write_reference,
)
from safetensors.torch import save_file
from transformers import (
    DeepseekV3Config,
    FineGrainedFP8Config,
    GptOssConfig,
    LlamaConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.utils.quantization_config import CompressedTensorsConfig

# Rows and columns of a block of fp8 with one scale; published ones are of 128 each.
BLOCK = (16, 32)
# Inputs that share a scale of 4-bit integers, and weights in a word.
GROUP, WORD = 32, 8
E4M3_LARGEST = 448.0
# Of the codes without their sign, by the OCP Microscaling Formats Specification 1.0.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)
# Which output each 4 bits of a word belong to in AutoAWQ's files.
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]

# What a writer makes of a linear layer `[out, in]`: its tensors by ending, and the values that they stand for.
Stored = tuple[dict[str, torch.Tensor], torch.Tensor]
Writer = Callable[[torch.Tensor], Stored]


def fp8_codes(weight: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    codes = (weight / scales).clamp(-E4M3_LARGEST, E4M3_LARGEST).to(torch.float8_e4m3fn)
    return codes, codes.float() * scales


def fp8_block(weight: torch.Tensor) -> Stored:
    rows, columns = BLOCK
    out, inputs = weight.shape
    padded = torch.zeros(-(-out // rows) * rows, -(-inputs // columns) * columns)
    padded[:out, :inputs] = weight
    tiles = padded.reshape(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)
    scales = tiles.abs().amax(dim=(1, 3)) / E4M3_LARGEST
    spread = scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[:out, :inputs]
    codes, values = fp8_codes(weight, spread)
    return {"weight": codes, "weight_scale_inv": scales}, values


def fp8_tensor(weight: torch.Tensor) -> Stored:
    scale = weight.abs().amax() / E4M3_LARGEST
    codes, values = fp8_codes(weight, scale)
    return {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.01)}, values


def fp8_channel(weight: torch.Tensor) -> Stored:
    scales = (weight.abs().amax(1, keepdim=True) / E4M3_LARGEST).bfloat16()
    codes, values = fp8_codes(weight, scales.float())
    return {"weight": codes, "weight_scale": scales}, values


def int8_channel(weight: torch.Tensor) -> Stored:
    scales = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
    codes = (weight / scales.float()).round().clamp(-128, 127)
    return {"weight": codes.to(torch.int8), "weight_scale": scales}, codes * scales.float()


def int4_codes(weight: torch.Tensor, half: torch.dtype, symmetric: bool) -> tuple[torch.Tensor, ...]:
    """Codes and zeros from 0 to 15 and scales by group, and the values: (code - zero) · scale."""
    groups = weight.reshape(weight.shape[0], -1, GROUP)
    if symmetric:
        scales = (groups.abs().amax(-1, keepdim=True) / 7.5).to(half)
        zeros = torch.full_like(scales, 8, dtype=torch.float32)
    else:
        low, high = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True).clamp(min=0)
        scales = ((high - low) / 15).to(half)
        zeros = (-low / scales.float()).round().clamp(0, 15)
    codes = (groups / scales.float() + zeros).round().clamp(0, 15)
    values = (codes - zeros) * scales.float()
    return codes.reshape(weight.shape), zeros[..., 0], scales[..., 0], values.reshape(weight.shape)


def words(codes: torch.Tensor, order: list[int] | None = None) -> torch.Tensor:
    """Eight codes of the last axis in each int32, the lowest bits first."""
    eights = codes.numpy().astype(np.uint32).reshape(*codes.shape[:-1], -1, WORD)
    eights = eights[..., order or list(range(WORD))]
    packed = (eights << (4 * np.arange(WORD, dtype=np.uint32))).sum(axis=-1, dtype=np.uint32)
    return torch.from_numpy(packed.view(np.int32).copy())


def int4_compressed(symmetric: bool) -> Writer:
    def write(weight: torch.Tensor) -> Stored:
        codes, zeros, scales, values = int4_codes(weight, torch.bfloat16, symmetric)
        tensors = {"weight_packed": words(codes), "weight_scale": scales, "weight_shape": torch.tensor(weight.shape)}
        if not symmetric:
            tensors["weight_zero_point"] = words(zeros.T).T.contiguous()
        return tensors, values

    return write


def awq(weight: torch.Tensor) -> Stored:
    codes, zeros, scales, values = int4_codes(weight, torch.float16, symmetric=False)
    packed = {"qweight": words(codes.T, AWQ_ORDER), "qzeros": words(zeros.T, AWQ_ORDER)}
    return packed | {"scales": scales.T.contiguous()}, values


def gptq(weight: torch.Tensor) -> Stored:
    codes, zeros, scales, values = int4_codes(weight, torch.float16, symmetric=True)
    return {
        "qweight": words(codes).T.contiguous(),
        # The first version of the format stores one less.
        "qzeros": words(zeros.T - 1),
        "scales": scales.T.contiguous(),
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // GROUP,
    }, values


def e2m1_codes(scaled: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of codes, the first in the low half of a byte, and what they stand for."""
    codes = np.abs(np.abs(scaled)[..., None] - E2M1).argmin(axis=-1)
    values = np.sign(scaled) * E2M1[codes]
    codes = (codes | (scaled < 0) << 3).astype(np.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4, values


def mxfp4_codes(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Blocks and scales of rows, as openai's checkpoints have them, and the values that they stand for."""
    groups = np.ascontiguousarray(weight).reshape(*weight.shape[:-1], -1, 32)
    exponents = np.floor(np.log2(np.abs(groups).max(axis=-1))) - 2
    blocks, values = e2m1_codes(groups / np.exp2(exponents)[..., None])
    values = values * np.exp2(exponents)[..., None]
    return blocks, (exponents + 127).astype(np.uint8), values.reshape(weight.shape).astype(np.float32)


def mxfp4(weight: torch.Tensor) -> Stored:
    blocks, scales, values = mxfp4_codes(weight.numpy())
    packed = torch.from_numpy(blocks.reshape(weight.shape[0], -1))
    return {"weight_packed": packed, "weight_scale": torch.from_numpy(scales)}, torch.from_numpy(values)


def nvfp4_codes(weight: torch.Tensor, tensor_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Packed codes, a scale in e4m3 for every 16 inputs, and the values."""
    groups = weight.reshape(weight.shape[0], -1, 16)
    scales = (groups.abs().amax(-1) / float(E2M1[-1]) / tensor_scale).to(torch.float8_e4m3fn)
    spread = (scales.float() * tensor_scale)[..., None]
    blocks, values = e2m1_codes((groups / spread).numpy())
    packed = torch.from_numpy(blocks.reshape(weight.shape[0], -1))
    return packed, scales, (torch.from_numpy(values) * spread).reshape(weight.shape)


def nvfp4_modelopt(weight: torch.Tensor) -> Stored:
    tensor_scale = weight.abs().amax() / (float(E2M1[-1]) * E4M3_LARGEST)
    packed, scales, values = nvfp4_codes(weight, tensor_scale)
    more = {"weight_scale_2": tensor_scale, "input_scale": torch.tensor(0.01)}
    return {"weight": packed, "weight_scale": scales} | more, values


def nvfp4_compressed(weight: torch.Tensor) -> Stored:
    divisor = float(E2M1[-1]) * E4M3_LARGEST / weight.abs().amax()
    packed, scales, values = nvfp4_codes(weight, 1 / divisor)
    return {"weight_packed": packed, "weight_scale": scales, "weight_global_scale": divisor[None]}, values


def mxfp8(weight: torch.Tensor) -> Stored:
    groups = weight.reshape(weight.shape[0], -1, 32)
    exponents = groups.abs().amax(-1).log2().floor() - 8
    codes, values = fp8_codes(groups, exponents.exp2()[..., None])
    scales = (exponents + 127).to(torch.uint8)
    return {"weight": codes.reshape(weight.shape), "weight_scale": scales}, values.reshape(weight.shape)


def compressed(fmt: str, **weights: object) -> Config:
    """A `quantization_config` of compressed-tensors with one scheme for all linear layers but the head."""
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": fmt,
        "config_groups": {"group_0": scheme},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


DENSE = shape(64, 4, 2, 211, intermediate_size=96)
FP8 = {"quant_method": "fp8", "weight_block_size": list(BLOCK), "activation_scheme": "dynamic"}
INT4 = {"bits": 4, "group_size": GROUP}
WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
MXFP4_WEIGHTS = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
NVFP4_WEIGHTS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}

# Name, shape, what is not quantised, writer, `quantization_config`.
FOLDERS: list[tuple[str, object, torch.dtype, Writer, Config]] = [
    ("qwen3-fp8-block", Qwen3Config(**DENSE, head_dim=16), torch.bfloat16, fp8_block, FP8),
    (
        "qwen3-moe-fp8-block",
        Qwen3MoeConfig(
            **DENSE, head_dim=16, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True
        ),
        torch.bfloat16,
        fp8_block,
        FP8 | {"modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]},
    ),
    # Heads of whole blocks, so that the expansion of latents can be turned round as it is stored.
    (
        "deepseek-v3-fp8-block",
        DeepseekV3Config(
            **DENSE | {"num_key_value_heads": 4},
            q_lora_rank=32,
            kv_lora_rank=32,
            qk_nope_head_dim=16,
            qk_rope_head_dim=16,
            v_head_dim=16,
            first_k_dense_replace=1,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_shared_experts=1,
            n_group=2,
            topk_group=1,
            moe_intermediate_size=32,
            rope_parameters=DEEPSEEK_ROPE,
        ),
        torch.bfloat16,
        fp8_block,
        FP8 | {"modules_to_not_convert": ["lm_head", "model.layers.1.mlp.gate"]},
    ),
    (
        "llama-fp8-tensor",
        LlamaConfig(**DENSE),
        torch.bfloat16,
        fp8_tensor,
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
    ),
    (
        "llama-fp8-channel",
        LlamaConfig(**DENSE),
        torch.bfloat16,
        fp8_channel,
        compressed("float-quantized", num_bits=8, type="float", strategy="channel", symmetric=True, dynamic=False),
    ),
    (
        "llama-int8-channel",
        LlamaConfig(**DENSE),
        torch.bfloat16,
        int8_channel,
        compressed("int-quantized", num_bits=8, type="int", strategy="channel", symmetric=True, dynamic=False),
    ),
    (
        "llama-int4-symmetric",
        LlamaConfig(**DENSE),
        torch.bfloat16,
        int4_compressed(symmetric=True),
        compressed("pack-quantized", **WEIGHTS, symmetric=True),
    ),
    (
        "llama-int4-zeros",
        LlamaConfig(**DENSE),
        torch.bfloat16,
        int4_compressed(symmetric=False),
        compressed("pack-quantized", **WEIGHTS, symmetric=False),
    ),
    (
        "qwen2-awq",
        Qwen2Config(**DENSE),
        torch.float16,
        awq,
        {"quant_method": "awq", "version": "gemm", "zero_point": True} | INT4,
    ),
    (
        "llama-gptq",
        LlamaConfig(**DENSE),
        torch.float16,
        gptq,
        {"quant_method": "gptq", "sym": True, "desc_act": False} | INT4,
    ),
    (
        "llama-mxfp4",
        LlamaConfig(**DENSE),
        torch.bfloat16,
        mxfp4,
        compressed("mxfp4-pack-quantized", **MXFP4_WEIGHTS, symmetric=True),
    ),
    (
        "llama-nvfp4",
        LlamaConfig(**DENSE),
        torch.bfloat16,
        nvfp4_compressed,
        compressed("nvfp4-pack-quantized", **NVFP4_WEIGHTS, symmetric=True),
    ),
    (
        "qwen3-moe-nvfp4",
        Qwen3MoeConfig(
            **DENSE, head_dim=16, moe_intermediate_size=48, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True
        ),
        torch.bfloat16,
        nvfp4_modelopt,
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "model.layers.*.mlp.gate"]},
    ),
    (
        "llama-mxfp8",
        LlamaConfig(**DENSE),
        torch.bfloat16,
        mxfp8,
        {"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": ["lm_head"]},
    ),
]

GPT_OSS = Fixture(
    "gpt-oss-mxfp4",
    GptOssConfig(
        **shape(
            64,
            4,
            2,
            203,
            head_dim=16,
            intermediate_size=32,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=8,
            swiglu_limit=1.5,
            rope_parameters=YARN_ROPE,
        )
    ),
)


def layers(key: str, parameter: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """The linear layers of a parameter by their names in quantised checkpoints, each a view of it."""
    if key.endswith("experts.gate_up_proj"):
        width, prefix = parameter.shape[1] // 2, key.removesuffix("gate_up_proj")
        halves = [("gate_proj", slice(0, width)), ("up_proj", slice(width, None))]
        return [(f"{prefix}{e}.{name}", parameter[e, rows]) for e in range(len(parameter)) for name, rows in halves]
    if key.endswith("experts.down_proj"):
        prefix = key.removesuffix("down_proj")
        return [(f"{prefix}{e}.down_proj", parameter[e]) for e in range(len(parameter))]
    return [(key.removesuffix(".weight"), parameter)] if key.endswith(("_proj.weight", "_with_mqa.weight")) else []


def write_folder(folder: Path, name: str, config: object, plain: torch.dtype, writer: Writer, how: Config) -> None:
    model = random_model(name, config)
    tensors = {}
    with torch.no_grad():
        for key, parameter in weights(model):
            parts = layers(key, parameter)
            for module, weight in parts:
                stored, values = writer(weight.clone())
                tensors |= {f"{module}.{ending}": tensor for ending, tensor in stored.items()}
                weight.copy_(values)
            if not parts:
                # Corrections of scores are f32 in every checkpoint.
                tensors[key] = parameter.to(torch.float32 if key.endswith("correction_bias") else plain)
                parameter.copy_(tensors[key])
    save(folder, model, tensors, {"dtype": str(plain).removeprefix("torch."), "quantization_config": how})
    cases = write_reference(folder / "reference.json", name, model, GREEDY_LEAD_QUANTIZED)
    read_back(folder, how, cases)


def read_back(folder: Path, how: Config, cases: list[Config]) -> None:
    """Compares with a library that reads the layout on a CPU, where there is one."""
    if how["quant_method"] == "fp8":
        reader, tolerance = FineGrainedFP8Config(weight_block_size=BLOCK, dequantize=True), 1e-5
    elif how["quant_method"] == "compressed-tensors" and "mxfp4" not in how["format"]:
        # It multiplies codes and scales in bf16.
        reader, tolerance = CompressedTensorsConfig(dequantize=True), 2e-2
    else:
        return
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=reader, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    )
    for case in cases:
        wanted = torch.tensor(case["logits"])
        error = ((last_logits(model.float().eval(), case["tokens"]) - wanted).abs().max() / wanted.abs().max()).item()
        if error > tolerance:
            raise SystemExit(f"{folder.name}: the library that reads it back is {error:.1e} away")


def save(folder: Path, model: PreTrainedModel, tensors: dict[str, torch.Tensor], more: Config) -> None:
    folder.mkdir()
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    config = model.config.to_diff_dict() | {"architectures": [type(model).__name__]} | more
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def write_gpt_oss(folder: Path, fixture: Fixture) -> None:
    """A folder whose experts are stored in 4 bits and all else in bf16; the reference is computed from what they stand for."""
    model = random_model(fixture.name, fixture.config)
    tensors = {}
    for key, parameter in model.named_parameters():
        if not key.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[key] = parameter.detach().to(torch.bfloat16)
            with torch.no_grad():
                parameter.copy_(tensors[key])
            continue
        blocks, scales, values = mxfp4_codes(parameter.detach().numpy().swapaxes(1, 2))
        tensors[f"{key}_blocks"], tensors[f"{key}_scales"] = torch.from_numpy(blocks), torch.from_numpy(scales)
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(values.swapaxes(1, 2).copy()))
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    how = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    save(folder, model, tensors, {"dtype": "bfloat16", "quantization_config": how})
    write_reference(folder / "reference.json", fixture.name, model, GREEDY_LEAD_QUANTIZED)


def main() -> None:
    out = emptied_folder("quantised", __doc__)
    write_gpt_oss(out / GPT_OSS.name, GPT_OSS)
    for name, config, plain, writer, how in FOLDERS:
        print(name)
        write_folder(out / name, name, config, plain, writer, how)
    print(sum(path.stat().st_size for path in out.rglob("*") if path.is_file()), "bytes")


if __name__ == "__main__":
    main()
