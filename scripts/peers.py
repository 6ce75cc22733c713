#!/usr/bin/env python3
"""Alternates hbmark's native engine with llama.cpp on a CPU, and prints medians and ratios.

Enters: a build of both (scripts/peers.sh makes them) and what to run. Leaves: a line for each program and round as it ends, then a table:
medians over the rounds, llama.cpp's time over hbmark's with its smallest and largest of a round, and the share that hbmark's steps took of
the rate at which memory was read beside them.
Weights are random blocks in GGUF files: times do not depend on them.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

# Hidden size, layers, heads, heads of K and V, feed-forward, vocabulary: SmolLM2-135M and Llama-3.2-1B.
SHAPES = {"135M": (576, 30, 9, 3, 1536, 49152), "1B": (2048, 16, 32, 8, 8192, 128256)}
# Weights and bytes of a block, and where its f16 scales are, with values that keep activations finite.
BLOCKS = {
    Type.Q8_0: (32, 34, {0: 3e-4}),
    Type.Q4_0: (32, 18, {0: 4e-3}),
    Type.Q4_K: (256, 144, {0: 3e-4, 2: 2e-3}),
    Type.Q6_K: (256, 210, {208: 2e-5}),
}
STEPS = 40
FORMATS = {"bf16": Type.BF16, "q8_0": Type.Q8_0, "q4_0": Type.Q4_0, "q4_k_m": Type.Q4_K}


def write_model(path: Path, shape: str, name: str) -> None:
    """A llama of random weights, tied, its blocks mixed as `Q4_K_M` mixes them where that is asked for."""
    hidden, layers, heads, kv_heads, inner, vocabulary = SHAPES[shape]
    width, base, random = hidden // heads, FORMATS[name], np.random.default_rng(1)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(4096)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(5e5)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocabulary)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([f"t{i}" for i in range(vocabulary)])
    writer.add_token_types([1] * vocabulary)
    writer.add_token_merges(["t 1"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)

    def matrix(tensor: str, rows: int, columns: int, kind: Type) -> None:
        # Rows that blocks of 256 do not divide stay in blocks of 32, as llama.cpp's quantiser has them.
        if kind in BLOCKS and columns % BLOCKS[kind][0]:
            kind = Type.Q8_0
        if kind == Type.BF16:
            values = (random.standard_normal((rows, columns), dtype=np.float32) / np.float32(columns**0.5)).view(np.uint32)
            data = (values >> 16).astype(np.uint16).view(np.uint8)
        else:
            weights, size, scales = BLOCKS[kind]
            blocks = random.integers(0, 256, size=(rows * columns // weights, size), dtype=np.uint8)
            for at, value in scales.items():
                blocks[:, at : at + 2] = np.frombuffer(np.float16(value).tobytes(), dtype=np.uint8)
            data = blocks.reshape(rows, -1)
        writer.add_tensor(tensor, data, raw_shape=data.shape, raw_dtype=kind)

    def norm(tensor: str) -> None:
        writer.add_tensor(tensor, np.ones(hidden, dtype=np.float32))

    def six_bits(layer: int) -> bool:
        return name == "q4_k_m" and (layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2)

    matrix("token_embd.weight", vocabulary, hidden, Type.Q6_K if name == "q4_k_m" else base)
    norm("output_norm.weight")
    for layer in range(layers):
        block, more = f"blk.{layer}.", Type.Q6_K if six_bits(layer) else base
        norm(block + "attn_norm.weight")
        norm(block + "ffn_norm.weight")
        for tensor, rows, columns, kind in [
            ("attn_q", hidden, hidden, base),
            ("attn_k", kv_heads * width, hidden, base),
            ("attn_v", kv_heads * width, hidden, more),
            ("attn_output", hidden, hidden, base),
            ("ffn_gate", inner, hidden, base),
            ("ffn_up", inner, hidden, base),
            ("ffn_down", hidden, inner, more),
        ]:
            matrix(f"{block}{tensor}.weight", rows, columns, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def run_hbmark(arguments: argparse.Namespace, model: Path) -> dict:
    """Milliseconds of each cell, and its share of the read rate beside it."""
    base = [arguments.hbmark, "run", "--engine", "native", "--model", str(model), "--quick", "--allow-noise", "--no-isolation"]
    base += ["--threads", str(arguments.threads), "--format", "json"]
    times = {}
    runs = [("decode", ["--batch", arguments.batches, "--context", str(arguments.context)])]
    if arguments.prompt:
        runs.append(("prefill", ["--batch", "1", "--context", str(arguments.prompt)]))
    for phase, axes in runs:
        ended = subprocess.run([*base, "--phase", phase, *axes], capture_output=True, text=True, check=False)
        if not ended.stdout:
            sys.exit(f"hbmark: {ended.stderr}")
        result = json.loads(ended.stdout)
        for cell in result["cells"]:
            if cell.get("step_ns"):
                times[phase, cell["batch"]] = (cell["step_ns"]["median"] / 1e6, cell.get("fraction_of_read_beside"))
    return times


def run_llama(arguments: argparse.Namespace, model: Path) -> dict:
    # Its steps go on from where they begin; on average they are as deep as hbmark's.
    command = [arguments.llama, model, arguments.threads, max(arguments.context - STEPS // 2, 1), STEPS, arguments.batches, arguments.prompt]
    ended = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=True)
    lines = (line.split() for line in ended.stdout.splitlines())
    return {(phase, int(batch)): float(median) for phase, batch, median in lines}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hbmark", required=True, help="the program, built with --release")
    parser.add_argument("--llama", required=True, help="scripts/peer_llama.cpp, built")
    parser.add_argument("--models", type=Path, required=True, help="folder of the generated models")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shapes", default="135M,1B")
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--batches", default="1,4,8")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prefill; 0 for none")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()

    arguments.models.mkdir(parents=True, exist_ok=True)
    rows = []
    for shape in arguments.shapes.split(","):
        for name in arguments.formats.split(","):
            model = arguments.models / f"{shape}-{name}.gguf"
            if not model.exists():
                write_model(model, shape, name)
            rounds = []
            for number in range(arguments.rounds):
                # Whoever is first warms the machine for the other: in turn.
                if number % 2 == 0:
                    ours, theirs = run_hbmark(arguments, model), run_llama(arguments, model)
                else:
                    theirs, ours = run_llama(arguments, model), run_hbmark(arguments, model)
                rounds.append((ours, theirs))
                told = [f"{phase} b{batch} {theirs[phase, batch]:.2f}/{ours[phase, batch][0]:.2f}" for phase, batch in ours]
                print(f"{shape} {name} round {number + 1}, ms, llama.cpp/hbmark:", *told, flush=True)
            for key in rounds[0][0]:
                pairs = [(ours[key][0], theirs[key]) for ours, theirs in rounds if key in ours and key in theirs]
                ratios = [theirs / ours for ours, theirs in pairs]
                medians = [statistics.median(side) for side in zip(*pairs)]
                shares = [ours[key][1] for ours, _ in rounds if ours.get(key, (0, None))[1] is not None]
                share = f"{statistics.median(shares):.2f} ({min(shares):.2f} to {max(shares):.2f})" if shares and key[0] == "decode" else ""
                rows.append((shape, name, f"{key[0]} b{key[1]}", medians, statistics.median(ratios), min(ratios), max(ratios), share))

    print("\n| shape | format | step | hbmark ms | llama.cpp ms | llama.cpp ÷ hbmark | of the read rate beside it |")
    print("|---|---|---|---|---|---|---|")
    for shape, name, step, (ours, theirs), ratio, low, high, share in rows:
        print(f"| {shape} | {name} | {step} | {ours:.2f} | {theirs:.2f} | {ratio:.2f} ({low:.2f} to {high:.2f}) | {share} |")


if __name__ == "__main__":
    main()
