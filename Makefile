# make quickstart: the main job on the text of Python's own library, in minutes, without a download
# make test:       the quick tests, at most 10 minutes on two idle cores
# make e2e:        real runs on Ray's own processes: kills, nodes that come and go, jobs, sweeps
# make test-all:   every test, hours; FILES="tests/faults/test_chaos.py ..." for some files alone
# make docs:       the documentation as a site, in ./site; warnings are errors
# make check:      style, types, imports, the site, and the quick tests: what every change must pass
# make house:      files and lines of each folder, the largest files, names that repeat
# make fuzz:       the fuzzers, many rounds of each
# make bench:      one benchmark anew: NAME=balance BENCH_OPTIONS="..."; see docs/reference/measurements.md
# make gpu:        what is right, how fast, and how much memory, on one GPU; goes on where it stopped
# make gpu-wheels: wheels for `make gpu` on a machine without a network, into ./wheels
# make clean:      removes what the above made, .venv and ./quickstart included

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.installed
ELASTRATA_FUZZ_ROUNDS ?= 20
# Two processes, each with whole files: a test that waits for Ray leaves its core to the other one.
SIDE_BY_SIDE := -n 2 --dist loadfile --no-loadscope-reorder
# These start clusters: one at a time, as a run without a core looks like one that hangs.
ALONE := tests/clusters tests/e2e tests/faults
FILES ?=
# Options: GPU_OPTIONS="--minutes 10 --cases check". Machines with PyTorch lack these at most;
# others of the engine's needs: GPU_NEEDS="pydantic tenacity numpy pyarrow pyyaml fsspec".
GPU_RESULTS ?= gpu.jsonl
GPU_OPTIONS ?=
GPU_NEEDS ?= pydantic tenacity
GPU_PYTHON ?= 3.12
GPU_PLATFORMS ?= manylinux_2_28_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64

.PHONY: quickstart install test e2e test-all lint docs check house chaos fuzz gpu gpu-wheels clean

quickstart: $(READY)
	@$(BIN)/elastrata quickstart

install: $(READY)

test: $(READY)
	@echo "== quick tests"
	@$(BIN)/python -m pytest -q $(SIDE_BY_SIDE)

# One that fails runs once more, alone, in a new process.
e2e: $(READY)
	@echo "== end-to-end tests"
	@$(BIN)/python -m pytest -v -m e2e tests/e2e || { \
		test $$? -eq 1 && echo "== those that failed, alone" && \
		$(BIN)/python -m pytest -v -m e2e --last-failed --last-failed-no-failures=none tests/e2e; }

test-all: $(READY)
ifneq ($(FILES),)
	@$(BIN)/python -m pytest -v -m "" $(FILES)
else
	@echo "== all tests"
	@$(BIN)/python -m pytest -q -m "" $(SIDE_BY_SIDE) $(addprefix --ignore=,$(ALONE)); \
		others=$$?; $(BIN)/python -m pytest -v -m "" $(ALONE) && exit $$others
endif

house: $(READY)
	@$(BIN)/python tests/support/house.py

chaos: $(READY)
	@echo "== kills, hangs, drains and additions at random; the run must not notice"
	@$(BIN)/python tests/faults/chaos.py

fuzz: $(READY)
	@echo "== damaged files and hostile input, $(ELASTRATA_FUZZ_ROUNDS) rounds of each"
	@ELASTRATA_FUZZ_ROUNDS=$(ELASTRATA_FUZZ_ROUNDS) $(BIN)/python -m pytest -q tests/fuzz

bench: $(READY)
	@PYTHONPATH=tests $(BIN)/python benchmarks/$(NAME).py $(BENCH_OPTIONS)

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

docs: $(READY)
	@echo "== documentation (mkdocs)"
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -q

# Notes the commit that passed, unless files differ from it.
check: lint docs test
	@if test -z "$$(git status --porcelain)"; then git rev-parse HEAD > .venv/.checked; \
		else rm -f .venv/.checked; echo "== passed, but files differ from the commit"; fi

clean:
	@echo "== removing .venv, ./quickstart, ./site and the tools' caches"
	@rm -rf .venv quickstart site build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis \
		.import_linter_cache
	@find platform pipelines workloads tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || { \
		echo "Elastrata needs Python 3.11, 3.12 or 3.13; $(PYTHON) is $$($(PYTHON) -V 2>&1)." \
			"Name another one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@free=$$(df -Pk . | awk 'NR == 2 {print int($$4 / 1048576)}'); test "$$free" -ge 10 || \
		echo "== $$free GiB of disk are free, Elastrata needs 10: 2.5 for .venv, the rest for data" >&2
	@test -x $(BIN)/python || { echo "== making .venv with $$($(PYTHON) -V)"; \
		$(PYTHON) -m venv .venv || { rm -rf .venv; exit 1; }; }
	@echo "== installing Elastrata and what it needs into .venv (about 2.5 GB, some minutes, once)"
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[dev]" \
		2> .venv/pip.log; code=$$?; grep -v "^WARNING: Location" .venv/pip.log >&2; exit $$code
	@touch $@
