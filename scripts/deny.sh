#!/usr/bin/env bash
# Licences, sources, duplicates and known vulnerabilities of every dependency, by deny.toml. Installs cargo-deny below HBMARK_DENY_ROOT where
# there is none. The first three need no network. The advisories come from a git host: where it cannot be reached they are skipped, and
# that is said in the last line.
set -euo pipefail
cd "$(dirname "$0")/.."

version=0.20.2
root=${HBMARK_DENY_ROOT:-${XDG_CACHE_HOME:-$HOME/.cache}/hbmark-ci/deny}
export PATH="$root/bin:$PATH"
if [ "$(cargo deny --version 2>/dev/null)" != "cargo-deny $version" ]; then
    # It reads one lock file: no reason to optimise it.
    cargo install --quiet --locked --debug --root "$root" --version "$version" cargo-deny
fi

cargo deny --locked check --hide-inclusion-graph bans licenses sources

said=$(mktemp)
trap 'rm -f "$said"' EXIT
if cargo deny --locked check advisories >"$said" 2>&1; then
    echo "advisories ok"
elif grep -q "failed to fetch advisory database" "$said"; then
    echo "SKIPPED: advisories were not checked: the database could not be fetched"
else
    cat "$said"
    exit 1
fi
