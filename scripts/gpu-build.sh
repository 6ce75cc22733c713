#!/usr/bin/env bash
# Builds dist/ (hbmark, and the scripts that run it) for a GPU node on a machine without a GPU or a toolkit: thin LTO, stripped. candle's kernels are built for the one
# architecture in CUDA_COMPUTE_CAP: 90 (default) is Hopper only, 80 is A100.
set -euo pipefail
cd "$(dirname "$0")/.."
env=$(scripts/cuda-env.sh)
eval "$env"
cargo build --locked --profile dist --features cuda --bin hbmark
mkdir -p dist
cp "${CARGO_TARGET_DIR:-target}/dist/hbmark" dist/hbmark
cp scripts/gpu-run.sh scripts/gpu-day.sh scripts/peer_torch.py dist/
mkdir -p dist/models
cp models/Llama-3.2-1B.json models/Llama-3.1-8B.json dist/models/
ls -lh dist
