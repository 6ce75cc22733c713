#!/usr/bin/env python3
"""Fails when the machine code of a decode kernel cannot keep the memory busy, or reads what it must not.

    cargo build --features cuda --message-format=json-render-diagnostics | scripts/check_sass.py
    scripts/check_sass.py --folder FOLDER      *.fatbin and *.ptxas as the build script leaves them
    scripts/check_sass.py --test               its parser, on listings with planted faults

Disassembles the fatbins (nvdisasm, see scripts/cuda-env.sh) and needs no GPU. Of every kernel of a decode step, for sm_80 and sm_90a:

- bytes in flight of a multiprocessor: loads of 16 bytes, and copies of 8, that are issued before the first of them is waited for, times threads, times the
  blocks that fit by registers, shared memory and threads. Only loads of weights, or of K and V, count: those that are read once.
- no generic loads, no spills.
- no load through the path for constants (LDG...CONSTANT) of anything but weights behind the wait for the last kernel: what that
  kernel wrote may still be on its way there. Below 9.0 there is no such wait, and the same code must not depend on that.

By Little's law a multiprocessor of an H200 needs 25 KB in flight at a latency of 780 ns (4.26 TB/s over 132): 40 KB leaves room.
"""

import re
import struct
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from check_fatbins import ELF, MAGIC, out_dir
from check_resources import REGISTERS, kernels

KIB = 1024
# Files of the decode step and of the fill before it, and what the names of kernels begin with that read weights, or K and V, once: bytes in flight that they need.
FILES = ["add_normed", "decode_attention", "embed", "experts", "fill_kv", "gate_up", "head", "join_state", "latent", "latent_attention", "norm_qkv", "prepare_rows", "project_add", "tiled_layers"]
NEEDS = {"norm_qkv": 40 * KIB, "gate_up": 40 * KIB, "project_add": 40 * KIB, "head": 40 * KIB, "decode_attention": 16 * KIB}
NEEDS |= {"experts_gate_up": 40 * KIB, "experts_down": 40 * KIB, "latent_product": 40 * KIB}
# Shared memory of a multiprocessor, of which every block costs 1 KiB more than it asks for; threads and blocks of a multiprocessor.
# Source: CUDA programming guide, compute capabilities.
SHARED = {"sm_80": 164 * KIB, "sm_90a": 228 * KIB}
RESERVED, THREADS_PER_SM, BLOCKS_PER_SM = KIB, 2048, 32

LINE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?(U?P\w+)\s+)?([A-Z][A-Z0-9_]*(?:\.[A-Za-z0-9_]+)*)\s*([^;]*);")
LABEL = re.compile(r"^(\.L_x_\d+):")
TEXT = re.compile(r"^\.text\.(\w+):")
REGISTER = re.compile(r"\bR(\d+)\b")
TARGET = re.compile(r"`\((\.L_x_\d+)\)")


@dataclass
class Instruction:
    """One line of a listing; `label` where only a label stands."""

    opcode: str = ""
    operands: str = ""
    predicated: bool = False
    label: str = ""

    @property
    def kind(self) -> str:
        return self.opcode.split(".")[0]

    @property
    def parts(self) -> list[str]:
        return self.opcode.split(".")


@dataclass
class InFlight:
    """What has been asked for and not been waited for: loads to registers, and groups of copies to shared memory."""

    loads: list[tuple[frozenset[int], int]] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    copies: int = 0

    def copy(self) -> "InFlight":
        return InFlight(list(self.loads), list(self.groups), self.copies)

    def bytes(self) -> int:
        return sum(size for _, size in self.loads) + sum(self.groups) + self.copies


def listing(text: str) -> dict[str, list[Instruction]]:
    """The kernels of a disassembly."""
    found: dict[str, list[Instruction]] = {}
    current: list[Instruction] = []
    for line in text.splitlines():
        if name := TEXT.match(line):
            current = found.setdefault(name[1], [])
        elif label := LABEL.match(line):
            current.append(Instruction(label=label[1]))
        elif one := LINE.match(line):
            current.append(Instruction(one[2], one[3], one[1] is not None))
    return found


def width(instruction: Instruction) -> int:
    return next((int(part) // 8 for part in instruction.parts if part in ("64", "128")), 4)


def counts(instruction: Instruction, copies: bool, attention: bool) -> bool:
    """Whether it loads bytes that are read once, no scales: 16, or 8 of a cache of one byte an element, to shared memory in a kernel that copies; or
    else 16 past the first cache, or in attention any."""
    if copies:
        return instruction.kind == "LDGSTS" and width(instruction) >= 8
    if width(instruction) != 16:
        return False
    return instruction.kind in ("LDG", "LD") and (attention or "NA" in instruction.parts)


def bytes_in_flight(code: list[Instruction], attention: bool) -> int:
    """The most bytes of a thread that are on their way at once, along any path forward. Attention is looked at until its first barrier, behind
    which splits are merged."""
    state, best, reachable = InFlight(), 0, True
    waiting: dict[str, InFlight] = {}
    copies = any(instruction.kind == "LDGSTS" for instruction in code)
    for instruction in code:
        if instruction.label:
            arriving = waiting.pop(instruction.label, None)
            if arriving and (not reachable or arriving.bytes() > state.bytes()):
                state = arriving
            elif not reachable:
                state = InFlight()
            reachable = True
            continue
        kind = instruction.kind
        if attention and kind == "BAR":
            break
        mentioned = {int(number) for number in REGISTER.findall(instruction.operands)}
        for index in range(len(state.loads) - 1, -1, -1):
            if state.loads[index][0] & mentioned:
                # Loads come back in order, near enough.
                del state.loads[: index + 1]
                break
        if counts(instruction, copies, attention):
            if kind == "LDGSTS":
                state.copies += width(instruction)
            else:
                first = int(REGISTER.search(instruction.operands)[1])
                state.loads.append((frozenset(range(first, first + 4)), 16))
        elif kind == "LDGDEPBAR":
            state.groups.append(state.copies)
            state.copies = 0
        elif kind == "DEPBAR" and (left := re.search(r"SB0,\s*(0x[0-9a-f]+)", instruction.operands)):
            keep = int(left[1], 16)
            state.groups = state.groups[len(state.groups) - keep :] if keep else []
        elif kind == "BRA" and (target := TARGET.search(instruction.operands)):
            known = waiting.get(target[1])
            if known is None or known.bytes() < state.bytes():
                waiting[target[1]] = state.copy()
        if kind in ("BRA", "EXIT", "RET") and not instruction.predicated and not re.match(r"!?U?P\d", instruction.operands):
            reachable = False
        best = max(best, state.bytes())
    return best


def forbidden(code: list[Instruction]):
    """What no decode kernel may have."""
    waits = any(instruction.kind == "ACQBULK" for instruction in code)
    behind_wait = not waits
    generic = constant = spilled = 0
    for instruction in code:
        behind_wait |= instruction.kind == "ACQBULK"
        generic += instruction.kind == "LD"
        spilled += instruction.kind in ("LDL", "STL")
        constant += instruction.kind == "LDG" and "CONSTANT" in instruction.parts and "NA" not in instruction.parts and behind_wait
    if generic:
        yield f"{generic} generic loads"
    if constant:
        yield f"{constant} loads as of constants behind the wait for the last kernel"
    if spilled:
        yield f"{spilled} loads and stores of spilled registers"


def blocks_per_sm(architecture: str, threads: int, registers: int, shared: int) -> int:
    """Blocks that a multiprocessor holds: each of its four parts has a quarter of the registers, in units of 8 per lane."""
    warps_of_part = REGISTERS // 4 // (32 * (-(-registers // 8) * 8))
    by_registers = 4 * warps_of_part // (threads // 32)
    by_shared = SHARED[architecture] // (shared + RESERVED)
    return min(by_registers, by_shared, THREADS_PER_SM // threads, BLOCKS_PER_SM)


# Threads of a block, its dynamic shared memory at the most, and blocks for each multiprocessor that the host launches, by what a kernel's name
# begins with (src/engine/native/cuda/{kernels,attention}.rs).
RING_BYTES, INPUT_BYTES = 32 * KIB, 40 * KIB
LAUNCHES = {
    "decode_attention": (256, 66 * KIB, 2),
    "norm_qkv": (256, RING_BYTES + INPUT_BYTES, 2),
    "gate_up": (256, RING_BYTES + INPUT_BYTES, 2),
    "project_add": (256, RING_BYTES + INPUT_BYTES, 2),
    "head": (256, RING_BYTES + INPUT_BYTES, 2),
    "experts_gate_up": (256, RING_BYTES + INPUT_BYTES, 2),
    "experts_down": (256, RING_BYTES + INPUT_BYTES, 2),
    "latent_product": (256, RING_BYTES + INPUT_BYTES, 2),
}


def elf_images(fatbin: bytes):
    """The cubins of a fatbin (layout: check_fatbins.py)."""
    magic, _, header, length = struct.unpack_from("<IHHQ", fatbin)
    if magic != MAGIC:
        raise ValueError("not a fatbin")
    at = header
    while at < header + length:
        kind, _, entry_header, size = struct.unpack_from("<HHIQ", fatbin, at)
        image = fatbin[at + entry_header : at + entry_header + size]
        (number,) = struct.unpack_from("<I", fatbin, at + 28)
        if kind == ELF:
            if image[:4] != b"\x7fELF":
                raise ValueError("a compressed cubin: build without -Xfatbin -compress-all")
            yield f"sm_{number}", image
        at += entry_header + size


def disassemble(fatbin: Path) -> dict[tuple[str, str], list[Instruction]]:
    found = {}
    for architecture, image in elf_images(fatbin.read_bytes()):
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(image)
            file.flush()
            text = subprocess.run(["nvdisasm", "-c", file.name], capture_output=True, text=True, check=True).stdout
        architecture = "sm_90a" if architecture == "sm_90" else architecture
        found |= {(name, architecture): code for name, code in listing(text).items()}
    return found


def check(folder: Path) -> int:
    resources = {(name, architecture): (registers, shared) for name, architecture, registers, shared, _ in kernels(folder)}
    if not resources:
        sys.exit("check_sass: the build left no *.ptxas files")
    bad = kernels_seen = 0
    met = set()
    print(f"{'kernel':<34}{'target':<8}{'registers':>9}{'fit':>6}{'blocks/SM':>10}{'bytes/thread':>13}{'KB in flight/SM':>16}")
    for file in FILES:
        for (name, architecture), code in sorted(disassemble(folder / f"{file}.fatbin").items()):
            registers, static = resources[name, architecture]
            faults = list(forbidden(code))
            launch = next((prefix for prefix in NEEDS if name.startswith(prefix)), None)
            if launch:
                met.add(launch)
                threads, dynamic, launched = LAUNCHES[launch]
                fit = blocks_per_sm(architecture, threads, registers, static + dynamic)
                blocks = min(fit, launched)
                each = bytes_in_flight(code, launch == "decode_attention")
                flying = each * threads * blocks
                print(f"{name:<34}{architecture:<8}{registers:>9}{fit:>6}{blocks:>10}{each:>13}{flying / KIB:>16.0f}")
                if flying < NEEDS[launch]:
                    faults.append(f"{flying / KIB:.0f} KB in flight, {NEEDS[launch] // KIB} are needed")
            kernels_seen += 1
            bad += len(faults)
            for fault in faults:
                print(f"{name} {architecture}: FAULT: {fault}")
    for prefix in sorted(NEEDS.keys() - met):
        print(f"no kernel begins with {prefix}")
        bad += 1
    print(f"{kernels_seen} kernels, {bad} faults")
    return bad


PLANTED = """
.text.streams:
        /*0000*/                   PREEXIT ;
        /*0010*/                   LDG.E.NA.128.CONSTANT R16, desc[UR8][R2.64] ;
        /*0020*/              @!P0 LDG.E.NA.128.CONSTANT R20, desc[UR8][R4.64] ;
        /*0030*/                   ACQBULK ;
        /*0040*/                   FADD R1, R16, R20 ;
        /*0050*/                   EXIT ;
.text.serial:
        /*0010*/                   LDG.E.NA.128.CONSTANT R16, desc[UR8][R2.64] ;
        /*0020*/                   FADD R1, R17, R1 ;
        /*0030*/                   LDG.E.NA.128.CONSTANT R16, desc[UR8][R2.64] ;
.text.either:
        /*0000*/               @P0 BRA `(.L_x_1) ;
        /*0010*/                   LDG.E.NA.128.CONSTANT R16, desc[UR8][R2.64] ;
        /*0020*/                   BRA `(.L_x_2) ;
.L_x_1:
        /*0030*/                   LDG.E.NA.128.CONSTANT R20, desc[UR8][R2.64] ;
.L_x_2:
        /*0040*/                   EXIT ;
.text.copies:
        /*0000*/                   LDGSTS.E.BYPASS.128 [R3], desc[UR8][R2.64], P0 ;
        /*0010*/                   LDGDEPBAR ;
        /*0020*/                   LDGSTS.E.BYPASS.128 [R3], desc[UR8][R2.64], P0 ;
        /*0030*/                   LDGDEPBAR ;
.L_x_3:
        /*0040*/                   DEPBAR.LE SB0, 0x1 ;
        /*0050*/                   LDGSTS.E.BYPASS.128 [R3], desc[UR8][R2.64], P0 ;
        /*0060*/                   LDGDEPBAR ;
        /*0070*/               @P0 BRA `(.L_x_3) ;
.text.faulty:
        /*0000*/                   LDG.E.CONSTANT R1, desc[UR8][R2.64] ;
        /*0010*/                   ACQBULK ;
        /*0020*/                   LD.E.128 R12, desc[UR10][R12.64] ;
        /*0030*/                   LDG.E.64.CONSTANT R18, desc[UR10][R18.64] ;
        /*0040*/                   STL [R1], R4 ;
.text.merges:
        /*0000*/                   LDG.E.128 R4, desc[UR10][R2.64] ;
        /*0010*/                   BAR.SYNC 0x0 ;
        /*0020*/                   LDG.E.128 R8, desc[UR10][R2.64] ;
        /*0030*/                   LDG.E.128 R12, desc[UR10][R2.64] ;
"""


def test() -> None:
    code = listing(PLANTED)
    found = {name: bytes_in_flight(one, name == "merges") for name, one in code.items()}
    assert found == {"streams": 32, "serial": 16, "either": 16, "copies": 32, "faulty": 0, "merges": 16}, found
    assert [len(list(forbidden(code[name]))) for name in ("streams", "faulty")] == [0, 3]
    assert any(fault.startswith("1 loads as of constants") for fault in forbidden(code["faulty"])), "the one before the wait is allowed"
    # 128 registers and 256 threads: two blocks; 129 are rounded up; shared memory of 100 KiB leaves room for one.
    assert [blocks_per_sm("sm_80", 256, registers, shared) for registers, shared in [(128, 0), (129, 0), (64, 100 * KIB)]] == [2, 1, 1]
    print("check_sass: the planted faults were found")


def build_folder() -> Path:
    """That of --folder, or of the build whose messages are on stdin."""
    return Path(sys.argv[2]) if sys.argv[1:2] == ["--folder"] else out_dir()


def main() -> None:
    test()
    if sys.argv[1:] == ["--test"]:
        return
    sys.exit(1 if check(build_folder()) else 0)


if __name__ == "__main__":
    main()
