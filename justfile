# The loop: `just check`, `just test`; `just bench` on a quiet machine.

default: check test

# Formatting, lints and docs, as CI runs them.
check:
    cargo fmt --check
    cargo clippy --all-targets -- -D warnings
    RUSTDOCFLAGS="-D warnings" cargo doc --no-deps

# All tests: no GPU, no network.
test:
    cargo test

# Review changed snapshots.
snap:
    INSTA_UPDATE=always cargo test

# The main job on the best device present.
bench *args:
    cargo bench {{args}}

# The whole program once, every cell once; times mean nothing.
smoke:
    cargo run -- run --smoke

# Build for a GPU node on a machine without a toolkit: dist/hbmark.
gpu-build:
    scripts/gpu-build.sh

# Reference logits by transformers (needs Python with transformers, torch, gguf).
fixtures:
    python3 scripts/make_fixtures.py
