#!/usr/bin/env bash
# Everything that is worth knowing of a GPU, in ten minutes and one folder: checks, ceilings, the ladder of a 1B and an 8B shape, operations apart,
# and a peer where one is on the machine. Every part has a time cap; one that fails or is cut off is a line of the summary, and the rest goes on.
#
#   scripts/gpu-day.sh [--hbmark FILE] [--out DIR] [--device cuda:N] [--rehearse]
#
# Needs no Rust: --hbmark (or dist/hbmark, or hbmark beside this script) is a prebuilt binary, of scripts/gpu-build.sh. Without one, cargo builds it.
# --rehearse runs the same parts on the CPU, over a small model and every cell once, to see that the script itself works: its times mean nothing.
# HBMARK_PYTHON is the Python that has torch, where python3 is not it.
# Exit status: 0 when every part ended well, 1 otherwise.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
hbmark='' out='' device=cuda rehearse=''
while [ $# -gt 0 ]; do
    case $1 in
    --hbmark) hbmark=$2 && shift 2 ;;
    --out) out=$2 && shift 2 ;;
    --device) device=$2 && shift 2 ;;
    --rehearse) rehearse=1 && shift ;;
    *) echo "gpu-day: unknown argument $1; see the head of $0" >&2 && exit 2 ;;
    esac
done
out=${out:-results/gpu-day-$(date -u +%Y%m%d-%H%M%S)}
mkdir -p "$out"
out=$(cd "$out" && pwd)

if [ -z "$hbmark" ]; then
    for known in "$here/hbmark" "$here/../dist/hbmark"; do [ -x "$known" ] && hbmark=$known && break; done
fi
if [ -z "$hbmark" ]; then
    command -v cargo >/dev/null || {
        echo "gpu-day: no hbmark and no cargo; give --hbmark FILE (scripts/gpu-build.sh makes one)" >&2
        exit 2
    }
    features=(--features cuda)
    [ -z "$rehearse" ] || features=()
    (cd "$here/.." && cargo build --locked --release "${features[@]}" --bin hbmark)
    hbmark="$here/../${CARGO_TARGET_DIR:-target}/release/hbmark"
    case ${CARGO_TARGET_DIR:-} in /*) hbmark=$CARGO_TARGET_DIR/release/hbmark ;; esac
fi

if [ -n "$rehearse" ]; then
    device=cpu small=SmolLM2-135M large=SmolLM2-135M dtype=bf16 batches=1,2 contexts=16,32 depth=--smoke engines=native
else
    small=Llama-3.2-1B large=Llama-3.1-8B dtype=bf16 batches=1,8,32 contexts=512,4096 depth=--quick engines=stock,native
fi

echo "part	seconds	status" >"$out/parts.tsv"
failed=0

# part NAME CAP COMMAND...: runs it for at most CAP seconds, its output in NAME.txt.
part() {
    local name=$1 cap=$2 begin=$SECONDS status=0 word
    shift 2
    echo "== $name (at most $cap s)"
    timeout --kill-after=10 "$cap" "$here/gpu-run.sh" "$@" >"$out/$name.txt" 2>"$out/$name.log" || status=$?
    case $status in
    0) word=ok ;;
    77) word="skipped: $(tail -n 1 "$out/$name.log")" ;;
    124 | 137) word="cut off after $cap s" && failed=1 ;;
    *) word="exit status $status: $(tail -n 1 "$out/$name.log")" && failed=1 ;;
    esac
    printf '%s\t%s\t%s\n' "$name" $((SECONDS - begin)) "$word" >>"$out/parts.tsv"
    echo "== $name: $word, $((SECONDS - begin)) s"
}

sweep() {
    local name=$1 cap=$2 model=$3
    part "$name" "$cap" "$hbmark" run --device "$device" --model "$model" --dtype "$dtype" --engine "$engines" --phase decode \
        --batch "$batches" --context "$contexts" "$depth" --out "$out/$name"
}
operations() {
    local name=$1 cap=$2 model=$3
    part "$name" "$cap" "$hbmark" run --device "$device" --model "$model" --dtype "$dtype" --engine native --phase decode \
        --batch "${batches%%,*}" --context "${contexts##*,}" "$depth" --show-ops --out "$out/$name"
}
# The peer has to find the shapes: beside a prebuilt binary, or in the repository.
models=$here/models
[ -d "$models" ] || models=$here/../models
peer() {
    local name=$1 cap=$2 model=$3
    local limits=(--seconds $((cap - 20)))
    [ -z "$rehearse" ] || limits+=(--steps 2 --eager)
    part "$name" "$cap" "${HBMARK_PYTHON:-python3}" "$here/peer_torch.py" --shape "$models/$model.json" --device "${device%%:*}" --batch "$batches" \
        --context "$contexts" "${limits[@]}" --output "$out/$name.json"
}

# The caps sum to ten minutes; a rehearsal on a slow machine may take its time.
slow=${rehearse:+10}
slow=${slow:-1}
part machine $((10 * slow)) "$hbmark" doctor
command -v nvidia-smi >/dev/null && nvidia-smi -q >"$out/nvidia-smi.txt" 2>&1 || true
part verify $((90 * slow)) "$hbmark" verify --device "$device" --output "$out/verify.json"
part ceiling $((40 * slow)) "$hbmark" ceiling --device "$device" --quick --format json
sweep 1b $((75 * slow)) "$small"
operations 1b-operations $((20 * slow)) "$small"
sweep 8b $((235 * slow)) "$large"
operations 8b-operations $((40 * slow)) "$large"
peer 1b-peer $((40 * slow)) "$small"
peer 8b-peer $((50 * slow)) "$large"

# One page over all of it.
{
    echo "# A GPU day"
    echo
    [ -z "$rehearse" ] || echo "A rehearsal: no time in it means anything."
    echo
    echo "| part | seconds | status |"
    echo "|---|---|---|"
    tail -n +2 "$out/parts.tsv" | while IFS=$'\t' read -r name seconds word; do echo "| $name | $seconds | $word |"; done
    for name in 1b 1b-operations 8b 8b-operations; do
        [ ! -e "$out/$name/result.md" ] || { echo && echo "## $name" && echo && cat "$out/$name/result.md"; }
    done
    for name in machine verify ceiling 1b-peer 8b-peer; do
        [ ! -s "$out/$name.txt" ] || { echo && echo "## $name" && echo && echo '```' && cat "$out/$name.txt" && echo '```'; }
    done
} >"$out/summary.md"
echo "everything is in $out; begin with summary.md"
exit "$failed"
