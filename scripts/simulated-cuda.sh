#!/usr/bin/env bash
# A CUDA device that is not there: the libraries that a program with the `cuda` feature looks for, for a machine without a GPU.
#
#   eval "$(scripts/simulated-cuda.sh)"        then   target/debug/hbmark verify
#
# Prints `export` lines on stdout, progress on stderr. Builds simulated-cuda/, whose library is the driver's, and beside it the libraries
# of the toolkit, whose functions jump into it. What a library has and the device has not says so and fails. The folder is
# $HBMARK_SIMULATED_CUDA_DIR (default: `libraries` in the target folder of simulated-cuda). At run time HBMARK_SIMULATED_SEED (default 0)
# draws the order of threads, and the file HBMARK_SIMULATED_CALLS, if it is named, takes a line of JSON with what was called.
set -euo pipefail
export LC_ALL=C

root=$(cd "$(dirname "$0")/.." && pwd)
target=${CARGO_TARGET_DIR:-$root/simulated-cuda/target}
mkdir -p "$target"
target=$(cd "$target" && pwd)
dir=${HBMARK_SIMULATED_CUDA_DIR:-$target/libraries}
mkdir -p "$dir"
dir=$(cd "$dir" && pwd)
work="$target/facades"
mkdir -p "$work"

echo "simulated-cuda: building the device in $target" >&2
# It compiles candle's kernels from there.
cargo fetch --locked --quiet --manifest-path "$root/Cargo.toml" >&2
cargo build --locked --quiet --lib --manifest-path "$root/simulated-cuda/Cargo.toml" --target-dir "$target" >&2
cp "$target/debug/libsimulated_cuda.so" "$dir/libcuda.so.1.new"
mv "$dir/libcuda.so.1.new" "$dir/libcuda.so.1"
ln -sf libcuda.so.1 "$dir/libnvidia-ml.so.1"

# What there is, and what callers may know: all that cudarc declares of the version that the program is locked to.
nm -D --defined-only "$dir/libcuda.so.1" | awk '{ print $3 }' | sort -u >"$work/exported"
version=$(awk '/^name = "cudarc"/ { getline; gsub(/.*= "|"/, ""); print; exit }' "$root/Cargo.lock")
declared() {
    cat "${CARGO_HOME:-$HOME/.cargo}"/registry/src/*/cudarc-"$version"/src/"$1"/sys/mod.rs 2>/dev/null |
        grep -oE "\bfn $2[A-Z][A-Za-z0-9_]*\(" | sed 's/^fn //; s/($//' | sort -u
}

# C functions of the names on stdin, which tell that they are missing and return a status, or an empty text where they are to give one.
stubs() {
    echo '#include <stdio.h>'
    echo "static int missing(const char* name) { fprintf(stderr, \"simulated CUDA: there is no %s\\n\", name); return $1; }"
    sed -E '/(String|Name)$/s/.*/const char* &(void) { return missing("&"), ""; }/; t
        s/.*/int &(void) { return missing("&"); }/'
}

# The driver's symbols have no versions, so what is missing there may come from another library, which the runtime's brings along.
declared driver cu | grep -E '^cu[A-Z]' | comm -23 - "$work/exported" >"$work/driver.missing" || true
stubs 801 <"$work/driver.missing" >"$work/driver.c"
cc -shared -fPIC -O1 -w -o "$dir/libcuda-missing.so" "$work/driver.c" -Wl,-soname,libcuda-missing.so

# One library: its name, what its functions' names look like, its part of cudarc, and the status that stands for "not supported".
facade() {
    local soname=$1 pattern=$2 part=$3 status=$4 name=${1%%.so*}
    sed -n 's/^simulated_//p' "$work/exported" | grep -E "$pattern" >"$work/$name.there" || true
    # Each also as it is called from sources that are compiled for per-thread default streams.
    { declared "$part" "$5" || true; } | grep -E "$pattern" | sed 'p; s/$/_ptsz/' | sort -u | comm -13 "$work/$name.there" - >"$work/$name.missing" || true
    {
        echo '#if defined(__aarch64__)'
        echo '#define JUMP(name) .globl name; .type name, %function; name: b simulated_##name; .size name, . - name'
        echo '#else'
        echo '#define JUMP(name) .globl name; .type name, @function; name: jmp simulated_##name@PLT; .size name, . - name'
        echo '#endif'
        echo '.text'
        sed 's/.*/JUMP(&)/' "$work/$name.there"
        echo '.section .note.GNU-stack, "", %progbits'
    } >"$work/$name.S"
    stubs "$status" <"$work/$name.missing" >"$work/$name.c"
    # The names of versions are the libraries' own, as in NVIDIA's.
    { echo "$soname {"; echo '  global:'; sed 's/.*/    &;/' "$work/$name.there" "$work/$name.missing"; echo '  local: *;'; echo '};'; } \
        >"$work/$name.map"
    cc -shared -fPIC -O1 -w -o "$dir/$soname" "$work/$name.S" "$work/$name.c" "-Wl,-soname,$soname" "-Wl,--version-script,$work/$name.map" \
        -Wl,-z,defs -Wl,--no-as-needed -L"$dir" -l:libcuda.so.1 -l:libcuda-missing.so '-Wl,-rpath,$ORIGIN'
    echo "simulated-cuda: $soname: $(wc -l <"$work/$name.there") functions, $(wc -l <"$work/$name.missing") that tell they are missing" >&2
}

facade libcublas.so.13 '^cublas([^L]|L[^t])' cublas 15 cublas
facade libcublasLt.so.13 '^cublasLt' cublaslt 15 cublasLt
facade libcurand.so.10 '^curand' curand 999 curand
facade libcudart.so.13 '^(__)?cuda' runtime 801 cuda
facade libnvrtc.so.13 '^nvrtc' nvrtc 11 nvrtc
facade libnccl.so.2 '^nccl' nccl 3 nccl

cat <<END
export LD_LIBRARY_PATH="$dir\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}"
END
