#!/usr/bin/env bash
# hbmark's native engine beside llama.cpp on this machine's CPU, in alternating rounds: one command, everything from PyPI.
#
#   scripts/peers.sh                                              # 135M and 1B shapes, four formats, batch 1, 4 and 8, prompts of 512: an hour and more
#   scripts/peers.sh --shapes 1B --formats q4_k_m --prompt 0      # less of it; scripts/peers.py --help has all
#
# Needs a C++ compiler, Python 3 and cargo. The build of llama.cpp (ten minutes of two cores) and the models are kept in HBMARK_PEERS_DIR
# [default: target/peers]. The machine should have nothing else to do.
set -euo pipefail
cd "$(dirname "$0")/.."

dir=${HBMARK_PEERS_DIR:-${CARGO_TARGET_DIR:-target}/peers}
mkdir -p "$dir"
dir=$(cd "$dir" && pwd)
version=0.3.36
python=$dir/venv/bin/python

if [ ! -e "$dir/installed" ]; then
    python3 -m venv "$dir/venv"
    "$dir/venv/bin/pip" install --quiet --disable-pip-version-check numpy==2.4.6 gguf==0.19.0 cmake==4.1.2 ninja==1.13.0 scikit-build-core==0.11.6
    touch "$dir/installed"
fi
if [ ! -x "$dir/peer_llama" ]; then
    # The bindings' source package has that of llama.cpp with it. pip asks its build system, installed above, for the package's name.
    "$dir/venv/bin/pip" download --quiet --disable-pip-version-check --no-deps --no-build-isolation --no-binary llama-cpp-python --dest "$dir" "llama-cpp-python==$version"
    tar -xzf "$dir"/llama_cpp_python-$version.tar.gz -C "$dir"
    source=$dir/llama_cpp_python-$version/vendor/llama.cpp
    # gcc 12 takes the intrinsic for AMX's configuration to read 8 of its 64 bytes, drops the stores of the others, and the program dies of it.
    sed -i 's|_tile_loadconfig(&tc);|asm volatile("" : : "r"(\&tc) : "memory"); &|' "$source/ggml/src/ggml-cpu/amx/mmq.cpp"
    PATH="$dir/venv/bin:$PATH" cmake -S "$source" -B "$dir/llama" -G Ninja -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DGGML_NATIVE=ON \
        -DLLAMA_CURL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_SERVER=OFF >"$dir/cmake.log"
    PATH="$dir/venv/bin:$PATH" cmake --build "$dir/llama" --target llama >>"$dir/cmake.log"
    c++ -O2 -std=c++17 -I"$source/include" -I"$source/ggml/include" scripts/peer_llama.cpp -o "$dir/peer_llama" \
        "$dir/llama/src/libllama.a" "$dir"/llama/ggml/src/libggml.a "$dir"/llama/ggml/src/libggml-cpu.a "$dir"/llama/ggml/src/libggml-base.a -fopenmp -lpthread -ldl
fi
cargo build --locked --release --bin hbmark
"$python" scripts/peers.py --hbmark "${CARGO_TARGET_DIR:-target}/release/hbmark" --llama "$dir/peer_llama" --models "$dir/models" "$@"
