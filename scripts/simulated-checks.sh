#!/usr/bin/env bash
# The program with the `cuda` feature on a simulated device: its checks, every engine on small models, and planted faults.
#
#   eval "$(scripts/simulated-cuda.sh)"; scripts/simulated-checks.sh target/debug/hbmark [NAME...]
#
# With names, only those checks. Exit status: 0 when all passed. Ends with how many entry points were called and kernels launched.
set -euo pipefail

hbmark=$(realpath "$1")
shift
only=("$@")
cd "$(dirname "$0")/.."
models=tests/fixtures/models quantised=tests/fixtures/quantised
out=$(mktemp -d)
touch "$out/calls"
trap 'kill $(jobs -p) 2>/dev/null || true; wait; rm -rf "$out"' EXIT
export HBMARK_SIMULATED_CALLS="$out/calls" NO_COLOR=1
# Few multiprocessors: grids that fill a device are small then, and end soon.
small=${HBMARK_SIMULATED_CUDA:-multiprocessors=4}
export HBMARK_SIMULATED_CUDA=$small
known=()
# As many at a time as there are processors: a check is one thread for most of its time.
jobs=$(($(nproc) < 8 ? $(nproc) : 8))

# check NAME STATUS TEXT COMMAND...: the command ends with the status and says the text, in 40 minutes, and skips no cell unless the text is of that.
check() {
    known+=("$1")
    if [ ${#only[@]} -gt 0 ] && [[ " ${only[*]} " != *" $1 "* ]]; then return; fi
    while [ "$(jobs -rp | wc -l)" -ge "$jobs" ]; do wait -n || true; done
    run_check "$@" &
}
run_check() {
    local name=$1 status=$2 text=$3 got=0 begin=$SECONDS
    shift 3
    timeout 2400 "$@" >"$out/$name.txt" 2>&1 || got=$?
    if [ "$got" = "$status" ] && grep -qE -- "$text" "$out/$name.txt" && { [[ $text == *skipped* ]] || ! grep -qw skipped "$out/$name.txt"; }; then
        echo "ok      $name ($((SECONDS - begin)) s)"
        return
    fi
    touch "$out/$name.failed"
    {
        echo "FAILED  $name ($((SECONDS - begin)) s): exit status $got, wanted $status and \"$text\":"
        sed 's/^/        /' "$out/$name.txt" | tail -n 60
    } >"$out/$name.why"
    cat "$out/$name.why"
}

run=("$hbmark" run --smoke --device cuda --model $models/qwen3-tied --context 8)

# The longest first.
# Every row but those of clocks, which a machine with other work does not pass, and which the host's does not on a device that is simulated. What
# is forgiven are times that differ, and not an error in their place.
check verify 0 '[0-9]+ checks on cuda:0: ' env HBMARK_SIMULATED_CUDA=$small,count=2,capacity=1400MiB,l2=1MiB bash -c \
    'rows=$("$1" verify --device cuda --quick); echo "$rows"; ! grep "^FAIL" <<<"$rows" | grep -vE "^FAIL  (timer .* wanted .* found |block .* the device timeline says |ceilings +read bandwidth is ordered )"' - "$hbmark"

check doctor 0 'SIMULATED DEVICE' "$hbmark" doctor
for dtype in f32 f16 bf16; do
    check "engines-$dtype" 0 'SIMULATED DEVICE' "${run[@]}" --dtype $dtype --engine stock,stock-graph,stock-pool,native --batch 1,3
done
check quantised 0 'SIMULATED DEVICE' "$hbmark" run --smoke --device cuda --model $models/llama-q8_0.gguf --engine stock --batch 1 --context 17
check quantised-batch 0 'skipped: .* take one sequence on a GPU' "$hbmark" run --smoke --device cuda --model $models/llama-q8_0.gguf --engine stock --batch 1,3 \
    --context 8
check mxfp4 0 'SIMULATED DEVICE' "$hbmark" run --smoke --device cuda --model $quantised/gpt-oss-mxfp4 --dtype mxfp4 --engine native --batch 1,9 --context 17
check gguf 0 'SIMULATED DEVICE' "$hbmark" run --smoke --device cuda --model $models/qwen3-q8_0.gguf --engine native --batch 1,9 --context 17
check nvfp4 0 'SIMULATED DEVICE' "$hbmark" run --smoke --device cuda --model $quantised/qwen3-moe-nvfp4 --engine native --batch 1,9 --context 17
check mxfp8 0 'SIMULATED DEVICE' "$hbmark" run --smoke --device cuda --model $quantised/llama-mxfp8 --engine native --batch 1,9 --context 17
check awq 0 'SIMULATED DEVICE' "$hbmark" run --smoke --device cuda --model $quantised/qwen2-awq --engine native --batch 1,9 --context 17
check fp8-blocks 0 'SIMULATED DEVICE' "$hbmark" run --smoke --device cuda --model $quantised/qwen3-moe-fp8-block --engine native --batch 1,9 --context 17
check latent 0 'SIMULATED DEVICE' "$hbmark" run --smoke --device cuda --model $quantised/deepseek-v3-fp8-block --engine native --batch 1,9 --context 17
for dtype in fp8 int8; do
    check "kv-$dtype" 0 'SIMULATED DEVICE' "${run[@]}" --engine native --kv-dtype $dtype --batch 1,9
done
check verify-steps 0 'verify-3 .*SIMULATED DEVICE' "${run[@]}" --engine native --phase verify --draft-tokens 1,3 --batch 1,3
for draft in mtp eagle; do
    check "draft-$draft" 0 'SIMULATED DEVICE' "$hbmark" run --smoke --device cuda --model $models/qwen3-tied+$draft --engine native --phase decode --batch 1,9 --context 8
done
# Four rows of 2,048 inputs are 16 KiB, and with 32 KiB of weights on their way exactly the 48 KiB that a launch has without asking, less what
# the kernel has of its own.
mkdir "$out/wide"
cat >"$out/wide/config.json" <<'END'
{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048, "intermediate_size": 256, "num_hidden_layers": 1,
 "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 256, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
 "rope_theta": 10000.0, "tie_word_embeddings": true, "torch_dtype": "bfloat16"}
END
python3 - "$out/wide" <<'END'
import json, sys
h, m, v = 2048, 256, 256
shapes = {"model.embed_tokens.weight": [v, h], "model.norm.weight": [h]}
p = "model.layers.0."
shapes |= {p + "self_attn." + n + "_proj.weight": s for n, s in {"q": [256, h], "k": [128, h], "v": [128, h], "o": [h, 256]}.items()}
shapes |= {p + "mlp." + n + "_proj.weight": s for n, s in {"gate": [m, h], "up": [m, h], "down": [h, m]}.items()}
shapes |= {p + n + "_layernorm.weight": [h] for n in ("input", "post_attention")}
header, at = {}, 0
for name, shape in shapes.items():
    size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
    header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
    at += size
head = json.dumps(header).encode()
with open(sys.argv[1] + "/model.safetensors", "wb") as f:
    f.write(len(head).to_bytes(8, "little") + head + b"\x80\x3c\x80\xbc" * (at // 4))
END
check shared-memory 0 'SIMULATED DEVICE' "$hbmark" run --smoke --device cuda --model "$out/wide" --dtype bf16 --engine native --batch 4 --context 8
check operations 0 'SIMULATED DEVICE' "${run[@]}" --engine native --phase decode --batch 1 --show-ops
# A share of little memory is walked, and a small product made.
little=$small,capacity=1180MiB,l2=1MiB
check ceiling 0 'read, L2 +[0-9.]+ [GT]B/s' env HBMARK_SIMULATED_CUDA=$small,capacity=1060MiB,l2=1MiB "$hbmark" ceiling --device cuda --quick
check compare 0 '7 rounds, a fresh process a side' "$hbmark" compare engine=stock engine=native --protocol smoke --rounds 7 \
    --both "device=cuda model=$models/qwen3-tied dtype=bf16 phase=decode batch=1 context=8"
# Its times mean nothing, so its point is invalid and says why.
check serve 1 'SIMULATED DEVICE: its times mean nothing' "$hbmark" serve --device cuda --model $models/qwen3-tied --engine native --rate 5 --requests 10 \
    --input-len 8 --output-len 4 --max-num-seqs 2 --max-model-len 32 --max-num-batched-tokens 32
check gpu-day 0 'prefill-8b: ok' env HBMARK_SIMULATED_CUDA=$little scripts/gpu-day.sh --rehearse --device cuda --hbmark "$hbmark" --out "$out/day" \
    machine ceiling smoke native-1b native-8b operations-1b operations-8b batches-8b stock-1b stock-8b prefill-8b
# Without dependent launches, with less shared memory, and the second of two.
for device in a100 h100 l40s b200; do
    check $device 0 'SIMULATED DEVICE' env HBMARK_SIMULATED_CUDA=$small,device=$device "${run[@]}" --dtype bf16 --engine stock,native --batch 1,6
done
check second 0 'cuda:1 · SIMULATED DEVICE' env HBMARK_SIMULATED_CUDA=$small,count=2 "$hbmark" run --smoke --device cuda:1 --model $models/qwen3-tied \
    --context 8 --engine stock,native --batch 1
# Groups of GPUs, and what they are not: enough of them, within reach of each other.
tp=("${run[@]}" --engine native --batch 1,3 --tensor-parallel-size)
check ranks 0 'native-tp4 .*SIMULATED DEVICE' env HBMARK_SIMULATED_CUDA=$small,count=4 "${tp[@]}" 1,2,4
check links 0 'all-reduce over 3 GPUs' env HBMARK_SIMULATED_CUDA=$small,capacity=1060MiB,l2=1MiB,count=3 "$hbmark" ceiling --device cuda --quick --gpus 3
check some-gpus 0 'skipped: .*this machine has 2' env HBMARK_SIMULATED_CUDA=$small,count=2 "${tp[@]}" 1,4
check few-gpus 2 'this machine has 2' env HBMARK_SIMULATED_CUDA=$small,count=2 "${tp[@]}" 4
check no-peer-access 2 'cannot access the memory' env HBMARK_SIMULATED_CUDA=$small,count=2,peer-access=off "${tp[@]}" 2
check lost-rank 1 'failed:.*CUDA_ERROR_ILLEGAL_ADDRESS' env HBMARK_SIMULATED_CUDA=$small,count=2,illegal-address=120 "${tp[@]}" 2
for fault in 'no-memory 1 CUDA_ERROR_OUT_OF_MEMORY out-of-memory=40' 'illegal-address 1 failed:.*CUDA_ERROR_ILLEGAL_ADDRESS illegal-address=40' \
    'lost 0 CUDA_ERROR_UNKNOWN.*the.visit.was.repeated lost=680'; do
    read -r name status text plant <<<"$fault"
    check "$name" "$status" "$text" env HBMARK_SIMULATED_CUDA=$small,$plant "${run[@]}" --engine native --batch 1
done

wait
python3 - "$out/calls" <<'END'
import json, sys
calls, kernels = {}, {}
for line in open(sys.argv[1]):
    process = json.loads(line)
    for into, name in ((calls, "calls"), (kernels, "kernels")):
        for key, count in process[name].items():
            into[key] = into.get(key, 0) + count
print(f"{len(calls)} entry points called {sum(calls.values())} times, {len(kernels)} kernels launched {sum(kernels.values())} times")
END
failed=0
for name in "${only[@]}"; do [[ " ${known[*]} " == *" $name "* ]] || { echo "there is no check $name" && failed=1; }; done
for why in "$out"/*.failed; do [ -e "$why" ] && echo "failed: $(basename "$why" .failed)" && failed=1; done
exit $failed
