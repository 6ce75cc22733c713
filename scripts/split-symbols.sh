#!/usr/bin/env bash
# Takes the symbols out of a program, into FILE.debug beside it, where gdb, perf and addr2line find them by the link that stays.
#
#   scripts/split-symbols.sh target/dist/hbmark
set -euo pipefail
program=$1
# Twice would lose them.
readelf --wide --sections "$program" | grep -q ' \.symtab ' || { echo "split-symbols: $program has no symbols" >&2 && exit 1; }
cd "$(dirname "$program")"
name=$(basename "$program")
objcopy --only-keep-debug "$name" "$name.debug"
objcopy --strip-all "$name"
objcopy --add-gnu-debuglink="$name.debug" "$name"
