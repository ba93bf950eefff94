# Everything a bare machine needs: Python >= 3.11 with venv, make. The environment is made here.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
RIVALS := .venv/.rivals
SERVERS := .venv/.servers
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-extra test-slow check bench bench-engine chaos soak gpu format clean

demo: $(STAMP)
	$(BIN)/asymlab demo

test: $(STAMP)
	$(BIN)/pytest -n 2 -m "not slow and not extra"

test-extra: $(RIVALS) $(SERVERS)
	@.ci/browser
	@.ci/java
	@.ci/network
	$(BIN)/pytest -n 2 --dist loadgroup -m "extra and not slow"

# More cases of what the other two try, and large models: by hand, before a release.
test-slow: $(RIVALS)
	$(BIN)/pytest -n 2 -m slow

# CI leaves the fast tests to `make test`, which runs them next.
FAST_TESTS ?= tests/unit tests/docs
check: $(STAMP)
	$(BIN)/ruff format --check src tests examples
	$(BIN)/ruff check src tests examples
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(if $(FAST_TESTS),$(BIN)/pytest -q -n 2 $(FAST_TESTS) -m "not slow and not extra")

# Half an hour on a machine that does nothing else.
bench: $(STAMP)
	$(BIN)/asymlab bench --docs docs/benchmarks.md

# A quarter of an hour on a machine that does nothing else.
bench-engine: $(STAMP)
	$(BIN)/asymlab engine --docs docs/benchmarks-engine.md

# Every failure under every strategy at every moment, then under a supervisor what ends a training:
# at most half an hour.
chaos: $(STAMP)
	$(BIN)/asymlab chaos --docs docs/reliability.md
	$(BIN)/asymlab chaos --supervised --quick --docs docs/reliability.md

# 2000 checkpoints and 30 kills: at most ten minutes.
soak: $(STAMP)
	$(BIN)/asymlab soak --docs docs/reliability.md

# Eight minutes with a CUDA device; without one it says so. Results go to OUT.
OUT ?= runs/gpu
gpu: $(STAMP)
	$(BIN)/asymlab gpu --out "$(OUT)"

format: $(STAMP)
	$(BIN)/ruff format src tests examples
	$(BIN)/ruff check --fix src tests examples

# torch first: an index may offer a build with GPU libraries of several GB to a plain range.
# A half-made environment (Debian without python3-venv leaves one) has no pip: it is made anew.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(None if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed, this is " + v + ": try make PYTHON=python3.12")'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
	@echo "installing into .venv: the first time this takes minutes, most of them for torch"
	$(PIP) torch
	$(PIP) -e ".[lab,dev,s3,hdfs,peers]"
	@touch $@

# The systems of others that benchmarks compare: two to three minutes, 550 MB. The last one lies
# apart, because every process that finds it imports it: it registers with torchrun.
$(RIVALS): $(STAMP)
	@echo "installing the systems of others: this takes two to three minutes"
	$(PIP) -e ".[lab,dev,s3,hdfs,peers,rivals]"
	$(PIP) --no-deps --upgrade --target .venv/rivals "lm-resiliency>=0.2"
	@touch $@

# The servers that tests start: object storage, name and data nodes.
$(SERVERS): $(STAMP)
	@echo "installing the servers that tests start: this takes a minute"
	$(PIP) -e ".[lab,dev,s3,hdfs,peers,servers]"
	@touch $@

clean:
	rm -rf .venv runs
