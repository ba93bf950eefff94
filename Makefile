# Everything a bare machine needs: Python >= 3.11 with venv, make. The environment is made here.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: demo test test-extra check bench format clean

demo: $(STAMP)
	$(BIN)/asymlab demo

test: $(STAMP)
	$(BIN)/pytest -n 2 -m "not slow and not extra"

test-extra: $(STAMP)
	$(BIN)/pytest -m "extra and not slow"

check: $(STAMP)
	$(BIN)/ruff format --check src tests
	$(BIN)/ruff check src tests
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/pytest -q -n 2 tests/unit tests/docs -m "not slow and not extra"

format: $(STAMP)
	$(BIN)/ruff format src tests
	$(BIN)/ruff check --fix src tests

# torch first: an index may offer a build with GPU libraries of several GB to a plain range.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt torch
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[lab,dev]"
	touch $@

clean:
	rm -rf .venv runs
