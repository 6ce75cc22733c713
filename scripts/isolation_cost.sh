#!/usr/bin/env bash
# What a worker costs: the same sweep with and without isolation, in turn, on a quiet machine.
# Usage: scripts/isolation_cost.sh [ROUNDS] [hbmark run arguments...]
set -euo pipefail
rounds=${1:-5}
shift || true
[ $# -gt 0 ] || set -- --quick --phase decode
hbmark=${HBMARK:-target/release/hbmark}
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
# All steps of the accepted blocks of one run: median step in ms over the cells, and the run's wall time in s.
once() { # name, arguments...
    local name=$1 begin end
    shift
    rm -rf "${out:?}/$name"
    begin=$(date +%s.%N)
    "$hbmark" run "$@" --out "$out/$name" --format csv >/dev/null 2>"$out/$name.log" || [ $? -eq 1 ]
    end=$(date +%s.%N)
    python3 - "$out/$name/result.json" "$name" "$begin" "$end" <<'PYTHON'
import json, math, sys
path, name, begin, end = sys.argv[1:]
cells = [c for c in json.load(open(path))["cells"] if c["step_ns"]]
typical = math.exp(sum(math.log(c["step_ns"]["median"]) for c in cells) / len(cells)) / 1e6
blocks = sum(len(c["blocks"]) for c in cells)
wall = float(end) - float(begin)
print(f"{name:<9} {wall:8.2f} s of wall time  {blocks:4d} blocks  {wall / blocks * 1e3:8.2f} ms a block  {typical:8.4f} ms a step (geometric mean of medians)")
PYTHON
}
for round in $(seq "$rounds"); do
    if [ $((round % 2)) -eq 0 ]; then
        once isolated "$@"
        once alone "$@" --no-isolation
    else
        once alone "$@" --no-isolation
        once isolated "$@"
    fi
done
