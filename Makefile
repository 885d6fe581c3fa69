# make quickstart: the main job on the text of Python's own library, in minutes, without a download
# make test:       the tests, but for those that take long: in minutes
# make test-all:   all of them
# make check:      style, types, imports, and the tests of `make test`
# make fuzz:       the fuzzers, many rounds of each
# make gpu:        what is right, how fast, and how much memory, on one GPU; goes on where it stopped
# make gpu-wheels: wheels for `make gpu` on a machine without a network, into ./wheels
# make clean:      removes what the above made, .venv and ./quickstart included

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.installed
ELASTRATA_FUZZ_ROUNDS ?= 20
# Two processes, each with whole files: a test that waits for Ray leaves its core to the other one.
SIDE_BY_SIDE := -n 2 --dist loadfile --no-loadscope-reorder
EVERY := -m ""
ALONE := tests/clusters tests/faults
# Options: GPU_OPTIONS="--minutes 10 --cases check". Machines with PyTorch lack pydantic at most;
# others of the engine's needs: GPU_NEEDS="pydantic numpy pyarrow pyyaml fsspec".
GPU_RESULTS ?= gpu.jsonl
GPU_OPTIONS ?=
GPU_NEEDS ?= pydantic
GPU_PYTHON ?= 3.12
GPU_PLATFORMS ?= manylinux_2_28_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64

.PHONY: quickstart test test-all slow slow-again lint check chaos fuzz gpu gpu-wheels clean

quickstart: $(READY)
	@$(BIN)/elastrata quickstart

test: $(READY)
	@echo "== running the tests"
	@$(BIN)/python -m pytest -q $(SIDE_BY_SIDE)

# Faults and clusters come last, one at a time: a run that is starved looks like one that hangs.
test-all: $(READY)
	@echo "== running all tests, slow ones too"
	@$(BIN)/python -m pytest -q $(EVERY) $(SIDE_BY_SIDE) $(addprefix --ignore=,$(ALONE)); \
		others=$$?; $(BIN)/python -m pytest -q $(EVERY) $(ALONE) && exit $$others

slow: $(READY)
	@echo "== running the slow tests"
	@$(BIN)/python -m pytest -q -m slow $(SIDE_BY_SIDE) $(addprefix --ignore=,$(ALONE)); \
		others=$$?; $(BIN)/python -m pytest -q -m slow $(ALONE) && exit $$others

slow-again: $(READY)
	@echo "== running the slow tests that failed, one at a time"
	@$(BIN)/python -m pytest -q -m slow --last-failed --last-failed-no-failures=none

chaos: $(READY)
	@echo "== kills, hangs, drains and additions at random; the run must not notice"
	@$(BIN)/python tests/faults/chaos.py

fuzz: $(READY)
	@echo "== damaged files and hostile input, $(ELASTRATA_FUZZ_ROUNDS) rounds of each"
	@ELASTRATA_FUZZ_ROUNDS=$(ELASTRATA_FUZZ_ROUNDS) $(BIN)/python -m pytest -q tests/fuzz

# No virtual environment of ours: the machine's Python has the PyTorch that fits its GPU.
gpu:
	@echo "== the first half hour on a GPU: rows in $(GPU_RESULTS)"
	@$(PYTHON) benchmarks/gpu.py --results $(GPU_RESULTS) $(GPU_OPTIONS)

gpu-wheels:
	@echo "== downloading $(GPU_NEEDS) for Python $(GPU_PYTHON) into ./wheels"
	@$(PYTHON) -m pip download -q --disable-pip-version-check -c constraints.txt -d wheels \
		--only-binary=:all: --implementation cp --python-version $(GPU_PYTHON) \
		$(addprefix --platform ,$(GPU_PLATFORMS)) $(GPU_NEEDS)
	@ls wheels

lint: $(READY)
	@echo "== style (ruff)"
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@echo "== types (mypy --strict)"
	@$(BIN)/mypy
	@echo "== imports (import-linter)"
	@$(BIN)/lint-imports

check: lint test

clean:
	@echo "== removing .venv, ./quickstart and the tools' caches"
	@rm -rf .venv quickstart build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis \
		.import_linter_cache
	@find platform pipelines workloads tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "Elastrata needs Python 3.11 or later; $(PYTHON) is $$($(PYTHON) -V 2>&1)." \
			"Name another one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@test -x $(BIN)/python || { echo "== making .venv with $$($(PYTHON) -V)"; \
		$(PYTHON) -m venv .venv; }
	@echo "== installing Elastrata and what it needs into .venv (about 2.5 GB, some minutes, once)"
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[dev]" \
		2> .venv/pip.log; code=$$?; grep -v "^WARNING: Location" .venv/pip.log >&2; exit $$code
	@touch $@
