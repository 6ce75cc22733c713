#!/usr/bin/env bash
# What is worth knowing of a GPU, in parts that are each worth having alone, most valuable first: ceilings, checks, memcheck, the native engine on a
# 1B and an 8B shape, its operations, batches, candle beside it, and peers where they are on the machine.
#
#   scripts/gpu-day.sh [PART...] [--out DIR] [--limit SECONDS] [--hbmark FILE] [--device cuda:N] [--rehearse]
#
# One call begins no part that could run beyond --limit (480 s). What a part left is packed as it ends, DIR/PART.tar.gz, and DIR/summary.md is written
# anew; a later call with the same DIR (these files are enough) goes on with the first part that DIR has not. Parts that are named run in any case.
# Every part has a time cap; one that fails or is cut off is a line of the summary, and the rest goes on.
#
# Needs no Rust: --hbmark (or dist/hbmark, or hbmark or hbmark.xz beside this script) is a prebuilt binary, of scripts/gpu-build.sh. Without one, cargo
# builds it. --rehearse runs every part once over a tiny model, on the CPU or on the --device given, to see that the script works: its times mean
# nothing. HBMARK_PYTHON is the Python that has torch, where python3 is not it; HBMARK_LLAMA_BENCH and HBMARK_GGUF are llama.cpp's llama-bench and a
# model for it.
# Exit status: 0 when every part of this call ended well, 1 when one did not, 3 when all did and parts are left for a later call.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
hbmark='' out='' device='' rehearse='' limit=480 asked=()
while [ $# -gt 0 ]; do
    case $1 in
    --hbmark) hbmark=$2 && shift 2 ;;
    --out) out=$2 && shift 2 ;;
    --device) device=$2 && shift 2 ;;
    --limit) limit=$2 && shift 2 ;;
    --rehearse) rehearse=1 && shift ;;
    -*) echo "gpu-day: unknown argument $1; see the head of $0" >&2 && exit 2 ;;
    *) asked+=("$1") && shift ;;
    esac
done

# The shapes lie beside a prebuilt binary, or in the repository.
models=$here/models
[ -d "$models" ] || models=$here/../models
tiny=$models/tiny
[ -d "$tiny" ] || tiny=$here/../tests/fixtures/models/qwen3-tied
if [ -n "$rehearse" ]; then
    device=${device:-cpu} small=$tiny large=$tiny contexts=16,32 batches=2,3 depth=--smoke slow=10
else
    device=${device:-cuda} small=Llama-3.2-1B large=Llama-3.1-8B contexts=512,8192 batches=8,32 depth=--quick slow=1
fi
short=${contexts%%,*} replayed=stock-graph
case $device in cpu) replayed=stock ;; esac

# ---- The parts: what each runs, in the folder that it fills ---------------------------------------------------------------------------

skip() { echo "$*" >&2 && exit 77; }
found() { command -v "$1" >/dev/null || skip "no $1 here"; }
cells() {
    local model=$1 engines=$2 batch=$3 context=$4
    shift 4
    "$hbmark" run --device "$device" --model "$model" --dtype bf16 --engine "$engines" --phase decode --batch "$batch" --context "$context" "$@"
}
torch() { "${HBMARK_PYTHON:-python3}" "$here/peer_torch.py" --shape "$1" --device "${device%%:*}" --batch "$2" --context "$3" --output "$4" "${@:5}"; }

machine() {
    ldd "$hbmark" >ldd.txt 2>&1 || true
    if command -v nvidia-smi >/dev/null; then nvidia-smi -q >nvidia-smi.txt 2>&1 || true; fi
    "$hbmark" doctor
}
ceiling() { "$hbmark" ceiling --device "$device" --quick; }
verify() { "$hbmark" verify --device "$device" --output verify.json; }
smoke() { cells "$tiny" "stock,$replayed,native" 1,3 16 --smoke --out run; }
memcheck() {
    found compute-sanitizer
    compute-sanitizer --tool memcheck --target-processes all --error-exitcode 9 "$hbmark" run --no-isolation --device "$device" --model "$tiny" \
        --dtype bf16 --engine native --batch 1,3 --context 16 --smoke
}
native-1b() { cells "$small" native 1 "$short" "$depth" --out run; }
native-8b() { cells "$large" native 1 "$contexts" "$depth" --out run; }
operations-1b() { cells "$small" native 1 "$short" "$depth" --show-ops --out run; }
operations-8b() { cells "$large" native 1 "${contexts##*,}" "$depth" --show-ops --out run; }
batches-8b() { cells "$large" native "$batches" "$contexts" "$depth" --out run; }
profile() {
    found ncu
    ncu --target-processes all --clock-control none --kernel-name 'regex:decode_attention|gate_up|project_add' --launch-skip 12 --launch-count 12 \
        --set basic --csv --log-file ncu.csv "$hbmark" run --no-isolation --device "$device" --model "$large" --dtype bf16 --engine native --phase decode \
        --batch 1 --context "$short" --smoke
}
stock-1b() { cells "$small" "stock,$replayed" 1 "$short" "$depth" --out run; }
stock-8b() { cells "$large" "stock,$replayed" "1,${batches%%,*}" "$short" "$depth" --out run; }
prefill-8b() {
    "$hbmark" run --device "$device" --model "$large" --dtype bf16 --engine native --phase prefill --batch 1 --context "$short" "$depth" --out run
}
torch-1b() { torch "$(shape "$small")" 1 "$short" peer.json; }
torch-8b() { torch "$(shape "$large")" "1,$batches" "$contexts" peer.json; }
llama() {
    found "${HBMARK_LLAMA_BENCH:-llama-bench}"
    [ -n "${HBMARK_GGUF:-}" ] || skip "no HBMARK_GGUF, a model for llama-bench"
    "${HBMARK_LLAMA_BENCH:-llama-bench}" -m "$HBMARK_GGUF" -ngl 99 -p 0 -n 32 -d "$contexts" -o json >llama-bench.json
    "$hbmark" import llama-bench.json
}
shape() { if [ -d "$1" ]; then echo "$1/config.json"; else echo "$models/$1.json"; fi; }

# Name and cap in seconds, most valuable first.
parts=(machine:20 ceiling:40 verify:180 smoke:40 memcheck:90 native-1b:45 native-8b:90 operations-1b:30 operations-8b:60 batches-8b:180 profile:90
    stock-1b:45 stock-8b:90 prefill-8b:60 torch-1b:45 torch-8b:120 llama:60)

# ---- Running them ----------------------------------------------------------------------------------------------------------------------

# Inside a call of this script: one part, in its folder.
if [ -n "${HBMARK_GPU_DAY_PART:-}" ]; then
    "$HBMARK_GPU_DAY_PART"
    exit
fi

for name in "${asked[@]}"; do
    [[ " ${parts[*]} " == *" $name:"* ]] || { echo "gpu-day: no part $name; there are ${parts[*]%%:*}" >&2 && exit 2; }
done

out=${out:-results/gpu-day-$(date -u +%Y%m%d-%H%M%S)}
mkdir -p "$out"
out=$(cd "$out" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

unpack() {
    local to=$1
    if command -v xz >/dev/null; then xz -dc "$here/hbmark.xz" >"$to"; else
        python3 -c 'import lzma, shutil, sys; shutil.copyfileobj(lzma.open(sys.argv[1]), sys.stdout.buffer)' "$here/hbmark.xz" >"$to"
    fi
    chmod +x "$to"
}
if [ -z "$hbmark" ]; then
    for known in "$here/hbmark" "$here/../dist/hbmark"; do [ -x "$known" ] && hbmark=$known && break; done
fi
if [ -z "$hbmark" ] && [ -e "$here/hbmark.xz" ]; then
    hbmark=$work/hbmark
    unpack "$hbmark"
fi
if [ -z "$hbmark" ]; then
    command -v cargo >/dev/null || {
        echo "gpu-day: no hbmark and no cargo; give --hbmark FILE (scripts/gpu-build.sh makes one)" >&2
        exit 2
    }
    features=(--features cuda)
    [ "$device" != cpu ] || features=()
    (cd "$here/.." && cargo build --locked --release "${features[@]}" --bin hbmark)
    hbmark="$here/../${CARGO_TARGET_DIR:-target}/release/hbmark"
    case ${CARGO_TARGET_DIR:-} in /*) hbmark=$CARGO_TARGET_DIR/release/hbmark ;; esac
fi
hbmark=$(realpath "$hbmark")

# The driver compiles candle's kernels for the GPU; without a cache it would do that again in every process.
export CUDA_CACHE_PATH=${CUDA_CACHE_PATH:-${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/hbmark/cuda} CUDA_CACHE_MAXSIZE=${CUDA_CACHE_MAXSIZE:-2147483648}

# A line for each part that ended: name, seconds, status.
list=$out/parts.tsv
[ -e "$list" ] || printf 'part\tseconds\tstatus\n' >"$list"
ended() { cut -f 1 "$list" | grep -qx -- "$1"; }

# One page over all that is there: what is proven, then what each part said.
summarise() {
    local left=() entry name seconds word
    for entry in "${parts[@]}"; do ended "${entry%%:*}" || left+=("${entry%%:*}"); done
    {
        echo "# A GPU day"
        echo
        [ -z "$rehearse" ] || { echo "A rehearsal: no time in it means anything." && echo; }
        echo "On \`$device\`, with $("$hbmark" --version 2>/dev/null || echo hbmark). Proven is what ended \"ok\", and nothing else."
        echo
        echo "| part | seconds | status |"
        echo "|---|---|---|"
        tail -n +2 "$list" | while IFS=$'\t' read -r name seconds word; do echo "| $name | $seconds | $word |"; done
        [ ${#left[@]} -eq 0 ] || { echo && echo "Not run yet: ${left[*]}."; }
        tail -n +2 "$list" | while IFS=$'\t' read -r name seconds word; do
            case $word in skipped*) continue ;; esac
            echo && echo "## $name" && echo
            # Of a run its page; of all else what was printed.
            tar -xOzf "$out/$name.tar.gz" "$name/run/result.md" 2>/dev/null ||
                { echo '```' && tar -xOzf "$out/$name.tar.gz" "$name/stdout.txt" | tail -n 150 && echo '```'; }
        done
    } >"$out/summary.md.new"
    mv "$out/summary.md.new" "$out/summary.md"
}

# part NAME CAP: runs it for at most CAP seconds in a folder of its own, and packs that.
part() {
    local name=$1 cap=$2 begin=$SECONDS status=0 word
    echo "== $name (at most $cap s)"
    mkdir "$work/$name"
    export HBMARK_GPU_DAY_PART=$name
    (cd "$work/$name" && timeout --kill-after=10 "$cap" "$here/gpu-run.sh" "$here/gpu-day.sh" --hbmark "$hbmark" --device "$device" \
        ${rehearse:+--rehearse} >stdout.txt 2>stderr.txt) || status=$?
    unset HBMARK_GPU_DAY_PART
    case $status in
    0) word=ok ;;
    77) word="skipped: $(tail -n 1 "$work/$name/stderr.txt")" ;;
    124 | 137) word="cut off after $cap s" && failed=1 ;;
    *) word="exit status $status: $(tail -n 1 "$work/$name/stderr.txt")" && failed=1 ;;
    esac
    tar -czf "$out/$name.tar.gz.new" -C "$work" "$name"
    mv "$out/$name.tar.gz.new" "$out/$name.tar.gz"
    { grep -v "^$name	" "$list" || true; } >"$list.new"
    printf '%s\t%s\t%s\n' "$name" $((SECONDS - begin)) "${word//$'\t'/ }" >>"$list.new"
    mv "$list.new" "$list"
    rm -rf "${work:?}/$name"
    summarise
    echo "== $name: $word, $((SECONDS - begin)) s"
}

failed=0 left=0
for entry in "${parts[@]}"; do
    name=${entry%%:*} cap=$((${entry##*:} * slow))
    if [ ${#asked[@]} -gt 0 ]; then
        [[ " ${asked[*]} " == *" $name "* ]] || continue
    elif ended "$name"; then
        continue
    fi
    # A later part that is shorter waits, too: the order is one of value.
    if [ "$left" = 1 ] || [ $((SECONDS + cap)) -gt $((limit * slow)) ]; then
        [ "$left" = 1 ] || echo "== $name: left for a later call, it may take $cap s"
        left=1
        continue
    fi
    part "$name" "$cap"
done
summarise
echo "everything is in $out; begin with summary.md"
[ "$failed" = 0 ] || exit 1
[ "$left" = 0 ] || exit 3
