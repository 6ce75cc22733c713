#!/usr/bin/env bash
# Whether a release binary calls processor intrinsics in the program's own kernels: there each should have become one instruction.
#
#   cargo build --release && scripts/check_simd.sh target/release/hbmark
#
# A function without a kernel's processor features, as a closure that was left out of line, cannot take an intrinsic in: it calls it, which
# made products of q4_k seven times slower. Calls in other crates are not ours and not counted. Needs objdump and a binary with symbols.
set -euo pipefail

calls=$(objdump -d --no-show-raw-insn -C "${1:?a release binary}" | awk '
    /^[0-9a-f]+ <.*>:$/ { name = substr($0, index($0, "<")) }
    /call.*<core::core_arch::/ { count[name] += 1 }
    END { for (name in count) print count[name], name }' | sort -rn)
# Generic adapters of the standard library carry no crate: a closure of ours is among them.
ours=$(grep -vE '<(<?gemm_|<?candle_|<?matrixmultiply|compiler_builtins|std_detect|<?memchr|<?aho_corasick|<?sha2|<?ring|<?rustls)' <<<"$calls" || true)
if [ -n "$ours" ]; then
    echo "intrinsics that are called and not compiled in:"
    echo "$ours"
    exit 1
fi
echo "no intrinsic is called in a kernel"
