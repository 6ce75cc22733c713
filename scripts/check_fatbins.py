#!/usr/bin/env python3
"""Fails unless the fatbin of every kernel file holds code for each named architecture.

    cargo build --features cuda --message-format=json-render-diagnostics | scripts/check_fatbins.py 80 90a 90-ptx

The toolkit from Python wheels has no cuobjdump. The layout read here is what nvcc 13.0 writes: a header (u32 magic, u16 version,
u16 header size, u64 bytes of entries), then entries (u16 kind, u16 version, u32 header size, u64 bytes; at 28 u32 architecture; at 40
u64 flags, of which bit 20 marks an architecture-specific target).
"""

import json
import struct
import sys
from pathlib import Path

MAGIC = 0xBA55ED50
PTX, ELF = 1, 2
SPECIFIC = 1 << 20


def architectures(image: bytes) -> set[str]:
    magic, _, header, length = struct.unpack_from("<IHHQ", image)
    if magic != MAGIC:
        raise ValueError(f"starts with {magic:#x}, not with a fatbin's {MAGIC:#x}")
    found = set()
    at = header
    while at < header + length:
        kind, _, entry_header, size = struct.unpack_from("<HHIQ", image, at)
        (number,) = struct.unpack_from("<I", image, at + 28)
        (flags,) = struct.unpack_from("<Q", image, at + 40)
        suffix = "a" if flags & SPECIFIC else ""
        if kind in (PTX, ELF):
            found.add(f"{number}{suffix}" + ("-ptx" if kind == PTX else ""))
        at += entry_header + size
    return found


def out_dir() -> Path:
    """Where the build script of hbmark wrote, from cargo's messages on stdin."""
    # Read to the end: a pipe closed early would fail the build.
    messages = [json.loads(line) for line in sys.stdin]
    for message in messages:
        if message["reason"] == "build-script-executed" and any(Path(message["out_dir"]).glob("*.fatbin")):
            return Path(message["out_dir"])
    sys.exit("check_fatbins: no build script of hbmark among cargo's messages; was the build asked for JSON?")


def main() -> None:
    wanted = set(sys.argv[1:])
    folder = out_dir()
    sources = sorted(Path("kernels").glob("*.cu"))
    if not sources:
        sys.exit("check_fatbins: no kernels/*.cu here; run it at the root of the repository")
    bad = 0
    for source in sources:
        found = architectures((folder / source.with_suffix(".fatbin").name).read_bytes())
        missing = wanted - found
        bad += bool(missing)
        print(f"{source}: {', '.join(sorted(found))}" + (f"; MISSING {', '.join(sorted(missing))}" if missing else ""))
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
