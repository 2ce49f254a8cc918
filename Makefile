# The tasks of this tree. `make help` lists them.

.DEFAULT_GOAL := help
SHELL := /bin/bash

# Continuous integration runs everything and tells all failures at the end.
export NEXTEST_PROFILE ?= $(if $(CI),ci,default)

SCRIPTS := tests/lab/fetch tests/lab/demo tests/fuzz/run .ci/run

.PHONY: help
help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: demo
demo: ## a Linux guest hibernates and wakes before your eyes (fetches QEMU and the guest first)
	@tests/lab/demo

.PHONY: test
test: lab nextest ## all tests, with real QEMU 7.2, 10.0 and 11.1 (takes root for the small volumes)
	cargo build -p dormouse --bin dormouse
	cargo test --doc --workspace
	cargo test -p dormouse-benches --benches
	cargo nextest run --workspace

.PHONY: fuzz
fuzz: ## random bytes for what reads QEMU's words, a minute each (takes nightly Rust, cargo-fuzz and a C++ compiler; not in CI)
	@tests/fuzz/run

.PHONY: lint
lint: deny ## format, clippy, docs, licences and sources of dependencies
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --quiet
	cargo deny --all-features check bans licenses sources
	@if command -v shellcheck >/dev/null; then shellcheck $(SCRIPTS); else echo "shellcheck is not here: scripts not checked"; fi

.PHONY: lab
lab: ## the QEMU builds and guests that the tests run, into .lab/
	@tests/lab/fetch all

.PHONY: tools
tools: nextest deny ## cargo-nextest and cargo-deny, built where they are missing

.PHONY: nextest
nextest:
	@cargo nextest --version >/dev/null 2>&1 || cargo install --locked cargo-nextest

.PHONY: deny
deny:
	@cargo deny --version >/dev/null 2>&1 || cargo install --locked cargo-deny
