#!/usr/bin/env python3
"""Times PyTorch's decode beside hbmark's: the same shape, a static cache, the step replayed from a CUDA graph.

    scripts/peer_torch.py --shape models/Llama-3.2-1B.json --batch 1,8,32 --context 512,4096 --output peer.json

A plain Llama written with torch alone: random bf16 weights, K and V in tensors of a fixed length, one new token at a pinned position, greedy. The eager
step is recorded once in a CUDA graph and replayed (`--mode graph`, on a GPU the default), compiled with `mode="reduce-overhead"`, which fuses and replays
graphs too but takes a minute a cell (`--mode compile`), or run as it is (`--mode eager`). Without torch or without the device it says so and exits
with 77. Times are host times around steps that are waited for, as a decoder sees them; the median over the steps is printed. The output file is written
after each cell.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

SKIPPED = 77
WARM_UP = 5


def skip(why: str):
    print(f"peer_torch: {why}", file=sys.stderr)
    sys.exit(SKIPPED)


try:
    import torch
    from torch import nn
    from torch.nn import functional
except ImportError as error:
    skip(f"no PyTorch here ({error})")


class Layer(nn.Module):
    def __init__(self, shape, dtype, device):
        super().__init__()
        hidden, inner = shape["hidden_size"], shape["intermediate_size"]
        self.heads, self.kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
        self.dim = shape.get("head_dim") or hidden // self.heads

        def linear(columns, rows):
            return nn.Linear(columns, rows, bias=False, dtype=dtype, device=device)

        self.qkv = linear(hidden, (self.heads + 2 * self.kv_heads) * self.dim)
        self.output = linear(self.heads * self.dim, hidden)
        self.gate_up = linear(hidden, 2 * inner)
        self.down = linear(inner, hidden)
        eps = shape["rms_norm_eps"]
        self.before = nn.RMSNorm(hidden, eps=eps, dtype=dtype, device=device)
        self.between = nn.RMSNorm(hidden, eps=eps, dtype=dtype, device=device)

    def forward(self, x, keys, values, position, turn):
        batch = x.shape[0]
        q, k, v = self.qkv(self.before(x)).split([h * self.dim for h in (self.heads, self.kv_heads, self.kv_heads)], dim=-1)
        q = rotate(q.view(batch, self.heads, 1, self.dim), turn)
        k = rotate(k.view(batch, self.kv_heads, 1, self.dim), turn)
        keys.index_copy_(2, position, k)
        values.index_copy_(2, position, v.view(batch, self.kv_heads, 1, self.dim))
        attended = functional.scaled_dot_product_attention(q, keys, values, enable_gqa=self.heads != self.kv_heads)
        x = x + self.output(attended.reshape(batch, -1))
        gate, up = self.gate_up(self.between(x)).chunk(2, dim=-1)
        return x + self.down(functional.silu(gate) * up)


def rotate(x, turn):
    cosine, sine = turn
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


class Model(nn.Module):
    def __init__(self, shape, dtype, device):
        super().__init__()
        vocab, hidden = shape["vocab_size"], shape["hidden_size"]
        self.table = nn.Embedding(vocab, hidden, dtype=dtype, device=device)
        self.layers = nn.ModuleList(Layer(shape, dtype, device) for _ in range(shape["num_hidden_layers"]))
        self.norm = nn.RMSNorm(hidden, eps=shape["rms_norm_eps"], dtype=dtype, device=device)
        self.head = nn.Linear(hidden, vocab, bias=False, dtype=dtype, device=device)
        if shape.get("tie_word_embeddings"):
            self.head.weight = self.table.weight
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.ndim == 2:
                    parameter.normal_(0.0, 0.02)
        dim = self.layers[0].dim
        # Whole steps take as long whatever the angles are, so rope scaling is left out.
        self.rates = shape.get("rope_theta", 10_000.0) ** (-torch.arange(0, dim, 2, device=device) / dim)

    def forward(self, tokens, position, cache):
        angle = position * self.rates
        turn = (angle.cos().to(self.head.weight.dtype), angle.sin().to(self.head.weight.dtype))
        x = self.table(tokens)
        for layer, (keys, values) in zip(self.layers, cache):
            x = layer(x, keys, values, position, turn)
        return self.head(self.norm(x)).argmax(dim=-1)


def wait(device):
    if device == "cuda":
        torch.cuda.synchronize()


def recorded(model, tokens, position, cache):
    """A step that replays the model from a CUDA graph. Its inputs stay where they are."""
    # What is allocated at a first call must not be recorded.
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            model(tokens, position, cache)
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = model(tokens, position, cache)

    def step(*_):
        graph.replay()
        return found

    return step


def time_cell(model, mode, shape, dtype, device, batch, context, steps, deadline):
    """Seconds of each step at one batch and context."""
    layer = model.layers[0]
    size = (batch, layer.kv_heads, context + 1, layer.dim)
    cache = [tuple(torch.randn(size, dtype=dtype, device=device) for _ in range(2)) for _ in model.layers]
    tokens = torch.randint(shape["vocab_size"], (batch,), device=device)
    position = torch.tensor([context], device=device)
    if mode == "graph":
        step = recorded(model, tokens, position, cache)
    elif mode == "compile":
        for tensor in (tensor for pair in cache for tensor in pair):
            # A step writes into them; graphs are only used over inputs that stay where they are.
            torch._dynamo.mark_static_address(tensor)
        step = torch.compile(model, mode="reduce-overhead", dynamic=False)
    else:
        step = model
    first, seconds = None, []
    for index in range(WARM_UP + steps):
        wait(device)
        begin = time.perf_counter()
        found = step(tokens, position, cache).tolist()
        taken = time.perf_counter() - begin
        if first is None:
            first = found
        elif found != first:
            raise RuntimeError("identical steps gave different tokens")
        if index >= WARM_UP:
            seconds.append(taken)
        if time.monotonic() > deadline and seconds:
            break
    return seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=Path, required=True, help="a config.json-style shape: models/*.json")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--batch", default="1")
    parser.add_argument("--context", default="512")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=100.0, help="no new cell is begun after so long")
    parser.add_argument("--mode", choices=["graph", "compile", "eager"], help="default: graph on a GPU, eager on a CPU")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        skip(f"PyTorch {torch.__version__} sees no GPU")
    shape = json.loads(given.shape.read_text())
    dtype, device = torch.bfloat16, given.device
    deadline = time.monotonic() + given.seconds
    torch.manual_seed(7)
    mode = given.mode or ("graph" if device == "cuda" else "eager")
    if mode == "graph" and device != "cuda":
        parser.error("--mode graph needs --device cuda")
    names = {"graph": "eager under a CUDA graph", "compile": "compiled", "eager": "eager"}
    rows = []
    result = {
        "engine": f"PyTorch {torch.__version__}, static cache, {names[mode]}",
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "shape": given.shape.stem if given.shape.stem != "config" else given.shape.resolve().parent.name,
        "dtype": "bf16",
        "cells": rows,
    }
    with torch.inference_mode():
        model = Model(shape, dtype, device)
        for batch in map(int, given.batch.split(",")):
            for context in map(int, given.context.split(",")):
                row = {"batch": batch, "context": context, "tpot_ns": None, "steps": 0, "reason": None}
                rows.append(row)
                if time.monotonic() > deadline:
                    row["reason"] = "no time was left"
                    continue
                try:
                    seconds = time_cell(model, mode, shape, dtype, device, batch, context, given.steps, deadline)
                    row["tpot_ns"], row["steps"] = statistics.median(seconds) * 1e9, len(seconds)
                except RuntimeError as error:
                    row["reason"] = str(error).splitlines()[0]
                finally:
                    if given.output:
                        given.output.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{result['engine']} · {result['device']} · {result['shape']} · bf16")
    print(f"{'batch':>6} {'context':>8} {'TPOT':>12} {'steps':>6}")
    for row in rows:
        shown = f"{row['tpot_ns'] / 1e6:.3f} ms" if row["tpot_ns"] else "-"
        print(f"{row['batch']:>6} {row['context']:>8} {shown:>12} {row['steps']:>6}  {row['reason'] or ''}".rstrip())


if __name__ == "__main__":
    main()
