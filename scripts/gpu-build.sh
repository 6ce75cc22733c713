#!/usr/bin/env bash
# Builds dist/ (hbmark.xz, and the scripts that run it) for a GPU node on a machine without a GPU or a toolkit: thin LTO, compressed. Its
# symbols are left in target/dist/hbmark.debug.
# Kernels, candle's and ours, are built for the one architecture in CUDA_COMPUTE_CAP: 90 (default) is Hopper only, 80 is A100. Line numbers, which only
# profilers read, are left out unless HBMARK_CUDA_LINE_INFO=1.
# Exit status: 1 when what travels would be larger than 25 MB.
set -euo pipefail
cd "$(dirname "$0")/.."
env=$(scripts/cuda-env.sh)
eval "$env"
architecture=$CUDA_COMPUTE_CAP
[ "$architecture" != 90 ] || architecture=90a
export HBMARK_CUDA_ARCHS=${HBMARK_CUDA_ARCHS:-$architecture} HBMARK_CUDA_LINE_INFO=${HBMARK_CUDA_LINE_INFO:-0}
cargo build --locked --profile dist --features cuda --bin hbmark
built=${CARGO_TARGET_DIR:-target}/dist
# A copy: what cargo made stays as it is.
mkdir -p "$built/apart" dist/models
cp "$built/hbmark" "$built/apart/"
scripts/split-symbols.sh "$built/apart/hbmark"
mv "$built/apart/hbmark.debug" "$built/"
xz -6 -T0 -c "$built/apart/hbmark" >dist/hbmark.xz
# Unpacked by hand it keeps its mode.
chmod +x dist/hbmark.xz
cp scripts/gpu-run.sh scripts/gpu-day.sh scripts/peer_torch.py dist/
cp models/Llama-3.2-1B.json models/Llama-3.1-8B.json dist/models/
rm -rf dist/models/tiny
cp -r tests/fixtures/models/qwen3-tied dist/models/tiny
ls -lh dist
bytes=$(stat -c %s dist/hbmark.xz)
[ "$bytes" -lt 25000000 ] || { echo "gpu-build: dist/hbmark.xz has $bytes bytes, more than 25 MB" >&2 && exit 1; }
