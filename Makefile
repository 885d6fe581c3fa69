# make quickstart: the main job on the text of Python's own library, in minutes, without a download
# make test:       the tests, but for those that take long: in minutes
# make test-all:   all of them
# make check:      style, types, imports, and the tests of `make test`
# make fuzz:       the fuzzers, many rounds of each
# make clean:      removes what the above made, .venv and ./quickstart included

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.installed
ELASTRATA_FUZZ_ROUNDS ?= 20
# Two processes, each with whole files: a test that waits for Ray leaves its core to the other one.
SIDE_BY_SIDE := -n 2 --dist loadfile --no-loadscope-reorder
EVERY := -m ""

.PHONY: quickstart test test-all slow lint check chaos fuzz clean

quickstart: $(READY)
	@$(BIN)/elastrata quickstart

test: $(READY)
	@echo "== running the tests"
	@$(BIN)/python -m pytest -q $(SIDE_BY_SIDE)

# The faults come last and alone: a run that is starved looks like one that hangs.
test-all: $(READY)
	@echo "== running all tests, slow ones too"
	@$(BIN)/python -m pytest -q $(EVERY) $(SIDE_BY_SIDE) --ignore=tests/faults
	@$(BIN)/python -m pytest -q $(EVERY) tests/faults

slow: $(READY)
	@echo "== running the slow tests"
	@$(BIN)/python -m pytest -q -m slow $(SIDE_BY_SIDE) --ignore=tests/faults
	@$(BIN)/python -m pytest -q -m slow tests/faults

chaos: $(READY)
	@echo "== kills, hangs, drains and additions at random; the run must not notice"
	@$(BIN)/python tests/faults/chaos.py

fuzz: $(READY)
	@echo "== damaged files and hostile input, $(ELASTRATA_FUZZ_ROUNDS) rounds of each"
	@ELASTRATA_FUZZ_ROUNDS=$(ELASTRATA_FUZZ_ROUNDS) $(BIN)/python -m pytest -q tests/fuzz

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
