"""Makes tests/fixtures/adapters/llama-gqa-r4: a LoRA adapter as PEFT saves one, for the model llama-gqa.

Needs nothing but Python 3: the safetensors layout is a length, a JSON header and the data.
Values are a fixed sequence, so the files come out the same to the byte everywhere.
"""

import json
import pathlib
import struct

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDER = ROOT / "tests/fixtures/adapters/llama-gqa-r4"
RANK, ALPHA = 4, 8
HIDDEN, QUERY, KV, FFN, LAYERS = 64, 64, 32, 112, 2
MODULES = {
    "self_attn.q_proj": (QUERY, HIDDEN),
    "self_attn.k_proj": (KV, HIDDEN),
    "self_attn.v_proj": (KV, HIDDEN),
    "self_attn.o_proj": (HIDDEN, QUERY),
    "mlp.gate_proj": (FFN, HIDDEN),
    "mlp.up_proj": (FFN, HIDDEN),
    "mlp.down_proj": (HIDDEN, FFN),
}

state = 12345


def draw():
    """Uniform between -1 and 1, from a linear congruential generator."""
    global state
    state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
    return (state >> 40) / 2**23 - 1.0


def main():
    header, data = {}, b""
    for layer in range(LAYERS):
        for module, (outputs, inputs) in MODULES.items():
            for half, shape, size in (("A", [RANK, inputs], inputs**-0.5), ("B", [outputs, RANK], 0.1)):
                values = [draw() * size for _ in range(shape[0] * shape[1])]
                packed = struct.pack(f"<{len(values)}f", *values)
                name = f"base_model.model.model.layers.{layer}.{module}.lora_{half}.weight"
                header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + len(packed)]}
                data += packed
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    config = {
        "alpha_pattern": {},
        "auto_mapping": None,
        "base_model_name_or_path": "llama-gqa",
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": RANK,
        "rank_pattern": {},
        "target_modules": [m.split(".")[1] for m in MODULES],
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }
    (FOLDER / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    main()
