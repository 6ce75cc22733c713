# The loop: `just check`, `just test`; `just bench` on a quiet machine.

default: check test

# Formatting, lints and docs, as CI runs them.
check:
    cargo fmt --all --check
    cargo clippy --workspace --all-targets -- -D warnings
    cargo clippy --bench formats --bench kernels --bench scheduler -- -D warnings
    RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps

# All tests: no GPU, no network.
test:
    cargo test

# Rewrite what tests compare with (snapshots, saved results, schemas, counts of unsafe code, the glossary), to be read as a diff.
snap:
    INSTA_UPDATE=always cargo test

# The main job on the best device present.
bench *args:
    cargo bench {{args}}

# The whole program once, every cell once; times mean nothing.
smoke:
    cargo run -- run --smoke

# Look for an input that panics, hangs or takes too much memory: `just fuzz`, `just fuzz gguf 3600`. Runs on stable.
fuzz target="all" seconds="60" seed="1":
    cargo run -p hbmark-fuzz --bin drive -- {{target}} {{seconds}} {{seed}}

# The same, guided by coverage and under the address sanitiser (nightly and cargo-fuzz).
fuzz-guided target="gguf" seconds="600":
    cargo run -p hbmark-fuzz --bin drive -- corpus {{target}} fuzz/corpus/{{target}}
    cargo +nightly fuzz run {{target}} -- -max_total_time={{seconds}} -rss_limit_mb=4096 -timeout=30

# Runs and serves over and over, with kills at random moments: nothing may be lost, stay behind or grow. `just soak 60` for a minute.
soak seconds="7200" seed="1":
    SOAK_SECONDS={{seconds}} SOAK_SEED={{seed}} cargo test --release --test soak -- --ignored --nocapture

# Licences, sources, duplicates and known vulnerabilities of the dependencies (cargo-deny).
deny:
    scripts/deny.sh

# What the worker process costs, on a quiet machine: the same sweep with and without it, in turn.
isolation-cost rounds="5" *args:
    cargo build --release
    scripts/isolation_cost.sh {{rounds}} {{args}}

# The pages of docs/ as a site: target/site/index.html.
site *args:
    scripts/site.sh {{args}}

# Build for a GPU node on a machine without a toolkit: dist/.
gpu-build:
    scripts/gpu-build.sh

# What is worth knowing of a GPU, in calls of at most eight minutes, in one folder. `just gpu --rehearse` tries the script on a CPU.
gpu *args:
    scripts/gpu-day.sh {{args}}

# Reference logits by transformers (needs Python with transformers, torch, gguf).
fixtures:
    python3 scripts/make_fixtures.py
