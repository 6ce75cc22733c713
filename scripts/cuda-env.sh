#!/usr/bin/env bash
# A CUDA 13 toolkit without root and without a GPU, from NVIDIA's Python wheels.
#
#   eval "$(scripts/cuda-env.sh)"        then   cargo build --release --features cuda
#
# Prints `export` lines on stdout, progress on stderr. Everything lives in one folder, $HBMARK_CUDA_DIR (default ./.cuda, about
# 1.5 GB), and is made once. CUDA_COMPUTE_CAP (default 90) is the architecture that candle's own kernels are built for.
set -euo pipefail

dir=${HBMARK_CUDA_DIR:-$(cd "$(dirname "$0")/.." && pwd)/.cuda}
mkdir -p "$dir"
dir=$(cd "$dir" && pwd)
done_mark="$dir/complete-13.0.88-2"

if [ ! -e "$done_mark" ]; then
    echo "cuda-env: building a toolkit in $dir" >&2
    python3 -m venv "$dir/venv" >&2
    "$dir/venv/bin/pip" install --quiet --disable-pip-version-check \
        nvidia-cuda-nvcc==13.0.88 nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85 nvidia-nvvm==13.0.88 \
        nvidia-cuda-crt==13.0.88 nvidia-cuda-nvrtc==13.0.88 nvidia-cublas==13.1.0.3 nvidia-curand==10.4.0.35 >&2
    toolkit=$(echo "$dir"/venv/lib/python3*/site-packages/nvidia/cu13)
    ln -sfn "$toolkit" "$dir/toolkit"
    # The linker wants names without a version.
    mkdir -p "$dir/link"
    for library in "$toolkit"/lib/lib{cublas,cublasLt,curand,nvrtc,cudart}.so.*; do
        name=$(basename "$library")
        ln -sf "$library" "$dir/link/${name%%.so.*}.so"
    done
    touch "$done_mark"
fi

# For scripts/check_sass.py. Its oldest version on PyPI is younger than the compiler's, and reads what that writes.
disassembler_mark="$dir/disassembler-13.2.51"
if [ ! -e "$disassembler_mark" ]; then
    "$dir/venv/bin/pip" install --quiet --disable-pip-version-check nvidia-cuda-nvdisasm==13.2.51 >&2
    touch "$disassembler_mark"
fi

driver_mark="$dir/link/driver-2"
if [ ! -e "$driver_mark" ]; then
    # The driver's library comes with the driver only. To link, a stand-in that exports its names is enough: those that are called, and
    # those that they are defined as.
    grep -ohE '\bcu[A-Z][A-Za-z0-9]*(_v[0-9]+)?(_ptsz|_ptds)?\b' "$dir/toolkit/include/cuda.h" | sort -u |
        awk '{ print $1; if ($1 !~ /_v[0-9]+$/) { print $1 "_v2"; print $1 "_v3" } }' | sort -u |
        sed 's/.*/void &(void) {}/' >"$dir/link/driver.c"
    cc -shared -fPIC -w -o "$dir/link/libcuda.so.1" -Wl,-soname,libcuda.so.1 "$dir/link/driver.c"
    ln -sf libcuda.so.1 "$dir/link/libcuda.so"
    touch "$driver_mark"
fi

toolkit="$dir/toolkit"
# Once: build scripts run again after every change of PATH.
case ":$PATH:" in
*":$toolkit/bin:"*) path=$PATH ;;
*) path="$toolkit/bin:$PATH" ;;
esac
cat <<EOF
export CUDA_HOME="$toolkit"
export CUDA_PATH="$toolkit"
export PATH="$path"
export CUDA_COMPUTE_CAP="${CUDA_COMPUTE_CAP:-90}"
export CUDARC_CUDA_VERSION=13000
export LIBRARY_PATH="$dir/link\${LIBRARY_PATH:+:\$LIBRARY_PATH}"
EOF
