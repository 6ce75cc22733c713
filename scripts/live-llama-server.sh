#!/usr/bin/env bash
# A real server to measure, from packages alone: llama.cpp's llama-server, and a tiny random model for it to serve.
#
#   eval "$(scripts/live-llama-server.sh [DIR])"
#   "$LLAMA_SERVER" -m "$LLAMA_MODEL" --port 8080 --metrics -np 4
#
# Prints `export` lines on stdout, progress on stderr. Everything lives in one folder (DIR, or hbmark/llama below $XDG_CACHE_HOME) and is made once;
# a folder that was interrupted goes on where it stopped. The sources are those that the package llama-cpp-python carries. Needs Python 3 and a C++
# compiler. JOBS (default 1) compilers at a time, at the lowest priority.
set -euo pipefail

version=0.3.36
here=$(cd "$(dirname "$0")" && pwd)
dir=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/hbmark/llama}
mkdir -p "$dir"
dir=$(cd "$dir" && pwd)
jobs=${JOBS:-1}
python=$dir/venv/bin/python
server=$dir/build/bin/llama-server
model=$dir/tiny.gguf

say() { echo "live-llama-server: $*" >&2; }

if [ ! -e "$dir/tools-1" ]; then
    say "tools in $dir/venv"
    python3 -m venv "$dir/venv" >&2
    "$python" -m pip install --quiet --disable-pip-version-check \
        cmake==4.4.4 ninja==1.13.2 numpy==2.4.6 gguf==0.19.0 >&2
    touch "$dir/tools-1"
fi

if [ ! -e "$dir/source-$version" ]; then
    say "sources of llama-cpp-python $version"
    rm -rf "$dir/source" "$dir/sdist"
    mkdir -p "$dir/source" "$dir/sdist"
    "$python" -m pip download --quiet --disable-pip-version-check --no-deps --no-binary llama-cpp-python \
        --dest "$dir/sdist" "llama-cpp-python==$version" >&2
    tar -xzf "$dir/sdist"/*.tar.gz -C "$dir/source" --strip-components=1
    rm -r "$dir/sdist"
    touch "$dir/source-$version"
fi

if [ ! -e "$dir/built-$version" ]; then
    say "building llama-server with $jobs compiler(s) at a time; this takes a while"
    begin=$(date +%s)
    export PATH="$dir/venv/bin:$PATH"
    # Without the flags about the user interface and TLS, the build would fetch files from the network.
    nice -n 19 cmake -S "$dir/source/vendor/llama.cpp" -B "$dir/build" -G Ninja -DCMAKE_BUILD_TYPE=Release \
        -DBUILD_SHARED_LIBS=OFF -DGGML_NATIVE=ON -DGGML_OPENMP=OFF -DGGML_CCACHE=OFF \
        -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF \
        -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF >&2
    nice -n 19 cmake --build "$dir/build" --target llama-server -j "$jobs" >&2
    say "built in $(($(date +%s) - begin)) s"
    touch "$dir/built-$version"
fi

if [ ! -e "$model" ]; then
    "$python" "$here/make_tiny_gguf.py" "$model.part" >&2
    mv "$model.part" "$model"
fi

cat <<END
export LLAMA_SERVER="$server"
export LLAMA_MODEL="$model"
END
