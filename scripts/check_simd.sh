#!/usr/bin/env bash
# Whether a binary has its kernels in one piece: every intrinsic one instruction, and every closure part of its kernel.
#
#   cargo build --release && scripts/check_simd.sh target/release/hbmark
#
# A function without a kernel's processor features, as a closure that was left out of line, cannot take an intrinsic in: it calls it, which
# made products of q4_k seven times slower. One that takes none in is not vectorised, and calls the C library for every rounding: activations of
# quantised products were packed four times slower. Calls in other crates are not ours and not counted. Needs objdump and a binary with symbols.
set -euo pipefail
binary=${1:?a binary}

closures=$(nm -C "$binary" | grep -E ' [tT] hbmark_cpu_kernels::.*\{\{closure\}\}' || true)
if [ -n "$closures" ]; then
    echo "closures of kernels that were left out of line:"
    echo "$closures"
    exit 1
fi
# In a debug build the crate of the kernels alone is optimised.
[[ $binary = */debug/* ]] && exit
calls=$(objdump -d --no-show-raw-insn -C "$binary" | awk '
    /^[0-9a-f]+ <.*>:$/ { name = substr($0, index($0, "<")) }
    /call.*<core::core_arch::/ { count[name] += 1 }
    END { for (name in count) print count[name], name }' | sort -rn)
# Generic adapters of the standard library carry no crate: a closure of ours is among them. Tables of crates that are not optimised call theirs.
ours=$(grep -vE '<(<?core::core_arch::|<?core::slice::ascii::|<?hashbrown::|<?gemm_|<?candle_|<?matrixmultiply|compiler_builtins|std_detect|<?memchr|<?aho_corasick|<?sha2|<?ring|<?rustls)' <<<"$calls" || true)
if [ -n "$ours" ]; then
    echo "intrinsics that are called and not compiled in:"
    echo "$ours"
    exit 1
fi
echo "kernels are in one piece"
