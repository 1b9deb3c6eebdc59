# make demo      create .venv, install, train a small model in a minute or two: `adjoint train`
# make verify    the same set-up, then check every promise here: `adjoint verify`
# make test      the same set-up, then lint, types and tests (no GPU needed)
# make test-all  the long one: every case, every build target
# make record    measures every op's errors here again, as recorded figures: after a new op, case or revision
# make docs      the documentation as a site, in build/site
# make mutants   breaks every operator and constant of the kernels in turn; goes on where it was interrupted
#
# Another Python: make test PYTHON=python3.12

PYTHON ?= python3
JOBS ?= 2
BIN := .venv/bin
READY := .venv/installed

.DEFAULT_GOAL := help
.PHONY: help setup demo verify test test-all docs record mutants lint style format bench wheel clean

help:
	@sed -n 's/^# \{0,1\}//; 1,8p' Makefile

setup: $(READY)

# The constraints keep pip from choosing a newer torch, and gigabytes of CUDA libraries with it.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "adjoint needs Python 3.11 or newer, and '$(PYTHON)' is not;" \
		     "name one that is: make PYTHON=python3.12" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(READY)
	$(BIN)/adjoint train

verify: $(READY)
	$(BIN)/adjoint verify

lint: $(READY) style
	$(BIN)/mypy

style: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Triton runs kernels either on a GPU or in its interpreter, and one process can do only one of the two. Whatever the
# environment says, modules are compiled once for the many processes that tests start.
PYTEST = OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest tests -n $(JOBS) --dist worksteal

# Types are checked beside the first tests: alone they keep one core busy.
test: $(READY) style
	$(BIN)/mypy & types=$$!; $(PYTEST); tests=$$?; wait $$types && exit $$tests
	TRITON_INTERPRET=1 $(PYTEST) -m kernels

test-all: lint
	$(PYTEST) --all
	TRITON_INTERPRET=1 $(PYTEST) -m kernels --all

# On a GPU: adjoint verify --device cuda --record adjoint/verify/recorded
RECORD = $(BIN)/adjoint verify --device cpu --record adjoint/verify/recorded --jobs $(JOBS)

record: $(READY)
	$(RECORD)
	TRITON_INTERPRET=1 $(RECORD)
	$(BIN)/python -m tests.verify.counts
	$(BIN)/python -m tests.verify.limits

# Broken links, anchors and pages that no menu leads to end the build.
docs: $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet

mutants: $(READY)
	$(BIN)/python -m tests.mutants.run --jobs $(JOBS)

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	$(BIN)/adjoint bench

wheel: $(READY)
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find adjoint tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
