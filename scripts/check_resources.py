#!/usr/bin/env python3
"""Fails when a kernel spills registers, keeps a stack, or leaves no room for a second block beside it.

    cargo build --features cuda --message-format=json-render-diagnostics | scripts/check_resources.py

Reads what ptxas said of each kernel when the build script compiled it (`*.ptxas` beside the fatbins), so it needs no GPU. A register that
spills is traffic through memory in the very kernels that are limited by it.
"""

import re
import sys
from pathlib import Path

from check_fatbins import out_dir

ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(sm_\w+)'")
STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?")

# Registers of a multiprocessor, sm_80 to sm_90 (CUDA programming guide, compute capabilities), handed out to warps in eights per lane.
REGISTERS = 65_536
# Threads of a block by the start of a kernel's name, where two blocks must fit: the kernels of a decode step. Eight heads of attention
# (_g8_) take a multiprocessor for themselves.
TWO_BLOCKS = {"decode_attention": 256, "norm_qkv": 256, "project_add": 256, "gate_up": 256, "head": 256}
TWO_BLOCKS |= {"experts_router": 256, "experts_gate_up": 256, "experts_down": 256, "latent_product": 256}


def kernels(folder: Path):
    for file in sorted(folder.glob("*.ptxas")):
        name = architecture = None
        stack = (0, 0, 0)
        for line in file.read_text().splitlines():
            if found := ENTRY.search(line):
                name, architecture = found.groups()
            elif found := STACK.search(line):
                stack = tuple(map(int, found.groups()))
            elif (found := USED.search(line)) and name:
                yield name, architecture, int(found[1]), int(found[2] or 0), stack
                name = None


def faults(name: str, registers: int, stack: tuple[int, int, int]):
    if any(stack):
        yield f"{stack[0]} bytes of stack, {stack[1]} spilled, {stack[2]} read back"
    for prefix, threads in TWO_BLOCKS.items():
        if name.startswith(prefix) and "_g8_" not in name and 2 * threads * (-(-registers // 8) * 8) > REGISTERS:
            yield f"two blocks of {threads} threads do not fit"


def main() -> None:
    found = list(kernels(out_dir()))
    if not found:
        sys.exit("check_resources: the build left no *.ptxas files")
    bad = 0
    for name, architecture, registers, shared, stack in found:
        for fault in faults(name, registers, stack):
            bad += 1
            print(f"{name} {architecture}: {registers} registers, {shared} bytes of shared memory: {fault}")
    most = max(found, key=lambda kernel: kernel[2])
    print(f"{len(found)} kernels, at most {most[2]} registers ({most[0]} {most[1]}), {bad} faults")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
