#!/usr/bin/env bash
# Runs a command on a node with a driver, with CUDA 13's libraries found wherever they are: beside Python's packages, or installed.
#
#   dist/gpu-run.sh dist/hbmark verify --device cuda
set -euo pipefail
shopt -s nullglob
folders=()
if command -v python3 >/dev/null; then
    while read -r packages; do
        folders+=("$packages"/nvidia/cu13/lib)
    done < <(python3 -c 'import site; print("\n".join(site.getsitepackages() + [site.getusersitepackages()]))')
fi
folders+=(/usr/local/cuda*/lib64 /usr/local/nvidia/lib64)
path=$(IFS=:; echo "${folders[*]}")
export LD_LIBRARY_PATH="$path${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
exec "$@"
