# The two commands of the README, and what the tests need. Everything happens in .venv.
PYTHON ?= python3
BIN := .venv/bin
TORCH := $(shell sed -n 's/^ *"\(torch==[^"]*\)".*/\1/p' pyproject.toml)
ARGS ?=

.PHONY: quickstart test test-slow lint types clean

quickstart: .venv/.installed
	$(BIN)/asyncrl launch --config configs/quickstart.yaml $(ARGS)

test: .venv/.tested
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(ARGS)

test-slow: .venv/.tested
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow --timeout 1200 $(ARGS)

lint: .venv/.tested
	$(BIN)/ruff check .
	$(BIN)/ruff format --check asyncrl scripts tests

types: .venv/.tested
	$(BIN)/mypy --strict asyncrl/

clean:
	rm -rf .venv build *.egg-info .mypy_cache .ruff_cache .pytest_cache

# torch first and alone: where pip knows a CPU wheel of this version it takes that one, and nothing later replaces it.
.venv/.torch:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "asyncrl needs Python 3.11 or newer, $(PYTHON) is older: make PYTHON=python3.11 ..." >&2; exit 2; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet $(TORCH)
	@touch $@

.venv/.installed: .venv/.torch pyproject.toml
	$(BIN)/pip install --quiet -e .
	@touch $@

.venv/.tested: .venv/.torch pyproject.toml
	$(BIN)/pip install --quiet -e '.[test]'
	@touch $@ .venv/.installed
