#!/usr/bin/env python3
"""A model of a decode step of the native engine on a GPU: how much of the read ceiling its launches can reach, by arithmetic. Nothing here is measured.

    cargo build --features cuda --message-format=json-render-diagnostics | scripts/step_model.py
    scripts/step_model.py --folder FOLDER      *.fatbin and *.ptxas as the build script leaves them
    scripts/step_model.py --test               its arithmetic, on cases done by hand

Reads the launches that a test writes down (src/engine/native/cuda/tests/snapshots/*launches.snap: kernels, grids, shared memory, and the bytes that
each operation must move) and, of the machine code, registers and bytes in flight (check_sass.py). Of each launch:

    time = EDGE + exposed latency + bytes / rate

- rate: what is in flight over the latency (Little's law), at most the read ceiling, and at most what the multiprocessors that have blocks can take
  in. In flight are the bytes of a block that are asked for before the first is waited for, times the blocks that run beside each other: no more
  than registers, shared memory and threads let onto a multiprocessor. Blocks beyond one wave run in waves, and the last has the rate of its blocks.
- blocks of the streaming product share its outputs in whole pairs: bytes are those of the block that has most, times the blocks.
- exposed latency: one LATENCY where a kernel asks for its bytes only behind the wait for the kernel in front of it (attention, and kernels that
  only prepare or pick), and MERGE where splits of attention are merged.
- EDGE: from the last block of one kernel to the first of the next inside a graph.

Exit status: 1 when a share is below its goal (GOALS), or the last wave of a launch, which has fewer blocks to keep memory busy, costs the launch over WAVE_LOSS; 0 otherwise.

The floor is the bytes of all operations over the ceiling. The constants are estimates, each with its reason below, so shares are good to some 15 %.
A GPU's word replaces all of this.
"""

import json
import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from check_resources import kernels
from check_sass import FILES, NEEDS, blocks_per_sm, build_folder, bytes_in_flight, disassemble

SNAPSHOT = Path(__file__).parent / "../src/engine/native/cuda/tests/snapshots/hbmark__engine__native__cuda__tests__launches__launches.snap"


@dataclass(frozen=True)
class Gpu:
    name: str
    architecture: str
    multiprocessors: int
    ceiling: float  # bytes a second that reading reaches
    latency: float  # seconds from asking to having
    edge: float
    intake: float  # bytes a second that a multiprocessor takes in


# Ceilings: 89 % of the data sheet. Source: assumed; copies of several GB are published at 88 to 93 % on H100 and H200, and none of them is ours. Latency: loads beyond L2 take
# 600 to 800 ns under load on Hopper and Ampere (microbenchmarks in the literature; not ours). Edges: 0.9 µs where the next kernel is launched ahead
# of the end of the last (programmatic dependent launch, 9.0 and later), 1.5 µs between plain nodes of a graph. Intake: 64 bytes a clock
# from L2, at 1.755 and 1.41 GHz.
GPUS = [
    Gpu("H200", "sm_90a", 132, 4.26e12, 780e-9, 0.9e-6, 112e9),
    Gpu("H100", "sm_90a", 132, 2.98e12, 780e-9, 0.9e-6, 112e9),
    Gpu("A100 80GB", "sm_80", 108, 1.81e12, 700e-9, 1.5e-6, 90e9),
]
# Write what a split found, count it, and read what all found: three trips to L2 and beyond.
MERGE = 2e-6
# Shares that a change must keep on an H200: model, batch, and the least of any context, or of one.
GOALS = [("Llama-3.1-8B", 1, None, 0.90), ("Llama-3.1-8B", 8, None, 0.85), ("Llama-3.1-8B", 32, 8192, 0.85), ("Llama-3.2-1B", 1, None, 0.80)]
WAVE_LOSS = 0.10
# A block of the tiled product in bf16: its outputs by its rows, and the bytes of an output or a row in a stage (kernels/tiled.cuh).
TILE_OUTPUTS = {16: 32, 32: 32, 64: 32, 128: 128}
STAGE_ROW = 128


@dataclass
class Launch:
    operation: str
    bytes: int  # of the operation; 0 where another launch of it moves them
    kernel: str
    grid: tuple[int, int, int]
    threads: int
    shared: int

    @property
    def blocks(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2]


@dataclass
class Step:
    model: str
    layers: int
    batch: int
    context: int
    multiprocessors: int
    launches: list[Launch]


LINE = re.compile(r"^  (\w+) bytes=(\d+) (\w+) grid=(\d+),(\d+),(\d+) threads=(\d+) shared=(\d+)$")
STEP = re.compile(r"^(\S+) layers=(\d+) batch=(\d+) context=(\d+) multiprocessors=(\d+)$")


def steps(text: str) -> list[Step]:
    found: list[Step] = []
    for line in text.splitlines():
        if one := STEP.match(line):
            found.append(Step(one[1], *map(int, one.groups()[1:]), []))
        elif one := LINE.match(line):
            grid = (int(one[4]), int(one[5]), int(one[6]))
            found[-1].launches.append(Launch(one[1], int(one[2]), one[3], grid, int(one[7]), int(one[8])))
    for step in found:
        for operation in {launch.operation for launch in step.launches}:
            of = [launch for launch in step.launches if launch.operation == operation]
            # The bytes are those of the product; what prepares its rows, or picks from its results, moves few.
            product = next((launch for launch in of if not is_helper(launch.kernel)), of[0])
            for launch in of:
                launch.bytes = launch.bytes if launch is product else 0
    return found


def is_helper(kernel: str) -> bool:
    return kernel.startswith(("prepare_rows", "finish", "first_largest", "add_normed", "join_state"))


class MachineCode:
    """Registers of kernels, and bytes that a thread has in flight."""

    def __init__(self, folder: Path):
        self.registers = {(name, architecture): (count, shared) for name, architecture, count, shared, _ in kernels(folder)}
        self.flying = {}
        for file in FILES:
            for (name, architecture), code in disassemble(folder / f"{file}.fatbin").items():
                if any(name.startswith(prefix) for prefix in NEEDS):
                    self.flying[name, architecture] = bytes_in_flight(code, name.startswith("decode_attention"))

    def fit(self, launch: Launch, gpu: Gpu) -> int:
        registers, static = self.registers[launch.kernel, gpu.architecture]
        return blocks_per_sm(gpu.architecture, launch.threads, registers, static + launch.shared)

    def of_block(self, launch: Launch, gpu: Gpu) -> int:
        if tile := re.match(r"tiled_\w+_t(\d+)$", launch.kernel):
            rows = int(tile[1])
            outputs = TILE_OUTPUTS[rows]
            stages = launch.shared // ((outputs + rows) * STAGE_ROW)
            return outputs * STAGE_ROW * (stages - 1)
        return self.flying.get((launch.kernel, gpu.architecture), 0) * launch.threads


def active(launch: Launch, step: Step) -> int:
    """Blocks that have something to do: attention cuts no split shorter than 64 positions."""
    if not launch.kernel.startswith("decode_attention"):
        return launch.blocks
    splits = launch.grid[2]
    each = max(-(-(step.context + 1) // splits), 64)
    return launch.blocks // splits * -(-(step.context + 1) // each)


def uneven(blocks: int, outputs: int) -> float:
    """What the block with most pairs of outputs has over an even share."""
    pairs = outputs / 2
    return -(-pairs // blocks) / (pairs / blocks)


def rate(blocks: int, launch: Launch, gpu: Gpu, code) -> float:
    """Bytes a second of so many blocks that run beside each other."""
    flying = blocks * code.of_block(launch, gpu) / gpu.latency
    return min(gpu.ceiling, flying, min(blocks, gpu.multiprocessors) * gpu.intake)


def seconds(launch: Launch, step: Step, gpu: Gpu, code) -> float:
    time = gpu.edge
    if is_helper(launch.kernel) or not launch.bytes or launch.kernel.startswith("embed"):
        # Rows of a few kilobytes: asking, having, and writing.
        return time + 2 * gpu.latency
    blocks, slots = active(launch, step), gpu.multiprocessors * code.fit(launch, gpu)
    size = launch.bytes / blocks
    if not launch.kernel.startswith(("decode_attention", "tiled")):
        size *= uneven(blocks, launch.bytes // (2 * inputs(launch, step)))
    waves, last = divmod(blocks, slots)
    time += waves * slots * size / rate(slots, launch, gpu, code) if waves else 0
    time += last * size / rate(last, launch, gpu, code) if last else 0
    if launch.kernel.startswith("decode_attention"):
        time += gpu.latency + (MERGE if blocks > launch.blocks // launch.grid[2] else 0)
    return time


@cache
def shape(model: str) -> dict:
    return json.loads((Path(__file__).parent / f"../models/{model}.json").read_text())


def inputs(launch: Launch, step: Step) -> int:
    return shape(step.model)["intermediate_size" if launch.operation == "Down" else "hidden_size"]


def times(step: Step, gpu: Gpu, code) -> tuple[float, float, dict[str, float]]:
    """The step, its floor, and the time of each operation."""
    total = floor = 0.0
    parts: dict[str, float] = {}
    for launch in step.launches:
        often = 1 if launch.operation in ("Embed", "Head") else step.layers
        time = often * seconds(launch, step, gpu, code)
        total += time
        floor += often * launch.bytes / gpu.ceiling
        parts[launch.operation] = parts.get(launch.operation, 0.0) + time
    return total, floor, parts


def table(code, all_steps: list[Step]) -> None:
    print("A model, not a measurement. Share: of the read ceiling, floor over step.")
    print(f"{'gpu':<10} {'model':<13} {'batch':>5} {'context':>7} {'floor ms':>9} {'step ms':>8} {'share':>6}   ms of operations")
    for gpu in GPUS:
        for step in all_steps:
            if step.multiprocessors != gpu.multiprocessors:
                continue
            total, floor, parts = times(step, gpu, code)
            shown = " ".join(f"{name} {1e3 * time:.2f}" for name, time in parts.items())
            print(
                f"{gpu.name:<10} {step.model:<13} {step.batch:>5} {step.context:>7} {1e3 * floor:>9.2f} {1e3 * total:>8.2f} "
                f"{100 * floor / total:>5.0f}%   {shown}"
            )


def wave_loss(launch: Launch, step: Step, gpu: Gpu, code) -> float:
    """What a launch of more than one wave takes over one whose waves are all full, less one."""
    blocks, slots = active(launch, step), gpu.multiprocessors * code.fit(launch, gpu)
    waves, last = divmod(blocks, slots)
    if waves == 0 or last == 0:
        return 0.0
    full, rest = rate(slots, launch, gpu, code), rate(last, launch, gpu, code)
    return (waves * slots + last * full / rest) / blocks - 1


def failures(code, all_steps: list[Step]) -> list[str]:
    found, met = [], set()
    for step in all_steps:
        for gpu in (gpu for gpu in GPUS if gpu.multiprocessors == step.multiprocessors):
            total, floor, _ = times(step, gpu, code)
            for goal in GOALS:
                model, batch, context, least = goal
                if gpu.name != "H200" or (step.model, step.batch) != (model, batch) or step.context != (context or step.context):
                    continue
                met.add(goal)
                if floor / total < least:
                    found.append(f"{model}, batch {batch}, context {step.context}: {floor / total:.3f} of the ceiling, {least} wanted")
            for launch in step.launches:
                if launch.bytes and not launch.kernel.startswith("embed") and (loss := wave_loss(launch, step, gpu, code)) > WAVE_LOSS:
                    found.append(f"{gpu.name}, {launch.kernel}, {active(launch, step)} blocks: {100 * loss:.0f} % more than with full waves")
    return found + [f"no step is of the goal {goal}" for goal in GOALS if goal not in met]


class Given:
    """Machine code of a case done by hand."""

    def __init__(self, fit: int, of_block: int):
        self._fit, self._of_block = fit, of_block

    def fit(self, *_):
        return self._fit

    def of_block(self, *_):
        return self._of_block


def test() -> None:
    gpu = Gpu("by hand", "sm_90a", 100, 1e12, 1e-6, 1e-6, 1e11)
    step = steps("Llama-3.1-8B layers=2 batch=1 context=511 multiprocessors=100\n"
                 "  Output bytes=33554432 prepare_rows_bf16 grid=8,1,1 threads=256 shared=0\n"
                 "  Output bytes=33554432 project_add_bf16_m1 grid=200,1,1 threads=256 shared=40960\n"
                 "  Attention bytes=1000000 decode_attention_bf16_g4_d128 grid=1,8,16 threads=256 shared=65536\n")[0]
    prepare, product, attention = step.launches
    assert (prepare.bytes, product.bytes) == (0, 33554432)

    def near(found: float, wanted: float) -> bool:
        return abs(found / wanted - 1) < 1e-9

    # 4,096 outputs are 2,048 pairs over 200 blocks: 11 for some, 10.24 on average. A megabyte in flight keeps 1 TB/s busy: 200 blocks of 5 kB do.
    assert near(seconds(product, step, gpu, Given(2, 5_000)), 1e-6 + 33554432 * 11 / 10.24 / 1e12)
    # Half of that in flight is half the rate.
    assert near(seconds(product, step, gpu, Given(2, 2_500)), 1e-6 + 33554432 * 11 / 10.24 / 0.5e12)
    # 512 positions are 8 splits of 64 for each of 8 heads: 64 of 128 blocks have work. Edge, latency, merge, bytes.
    assert active(attention, step) == 64
    assert near(seconds(attention, step, gpu, Given(2, 64_000)), 1e-6 + 1e-6 + MERGE + 1e-6)
    # In 50 places they are a wave of 50, and one of 14 that has 14 of 50 kB in flight: 0.7 TB/s for 14 of 64 parts of a megabyte.
    small = Gpu("small", "sm_90a", 50, 1e12, 1e-6, 1e-6, 1e11)
    assert near(seconds(attention, step, small, Given(1, 50_000)), 2e-6 + MERGE + 1e-6 * (50 / 64 + 14 / 64 / 0.7))
    # And no more than what 14 multiprocessors take in.
    slow = Gpu("slow", "sm_90a", 50, 1e12, 1e-6, 1e-6, 2.5e10)
    assert near(seconds(attention, step, slow, Given(1, 50_000)), 2e-6 + MERGE + 1e-6 * (50 / 64 + 14 / 64 / 0.35))
    assert near(seconds(prepare, step, gpu, Given(8, 0)), 3e-6)
    # As above, 14 of 64 blocks come alone, at 0.7 TB/s.
    assert near(wave_loss(attention, step, small, Given(1, 50_000)), (50 + 14 / 0.7) / 64 - 1) and wave_loss(attention, step, gpu, Given(1, 1)) == 0
    total, floor, parts = times(step, gpu, Given(2, 64_000))
    assert near(floor, 2 * 34_554_432 / 1e12) and near(sum(parts.values()), total) and len(parts) == 2
    print("step_model: the cases done by hand agree")


def main() -> None:
    test()
    if sys.argv[1:] == ["--test"]:
        return
    code, all_steps = MachineCode(build_folder()), steps(SNAPSHOT.read_text())
    table(code, all_steps)
    if found := failures(code, all_steps):
        sys.exit("step_model: " + "\nstep_model: ".join(found))


if __name__ == "__main__":
    main()
