# make run     builds .venv, installs, runs the main job on embedded data
# make test    the same, and runs every test: those that start Ray one after another, beside them the check and the others
# make check   lint, format and types

PYTHON ?= python3
VENV ?= .venv
RUN ?= method=fedglad
export OMP_NUM_THREADS ?= 1
PYTEST = $(VENV)/bin/python -m pytest

READY := $(VENV)/.installed

.PHONY: run test check clean

run: $(READY)
	$(VENV)/bin/python -m rayfed.run $(RUN)

test: $(READY)
	@if [ -n "$(ARGS)" ]; then $(MAKE) --no-print-directory check && exec $(PYTEST) $(ARGS); exit 1; fi; \
	{ $(MAKE) --no-print-directory check && $(PYTEST) --ignore=tests/cli --ignore=tests/engine --ignore=tests/sweep; } \
		> .pytest-quiet.log 2>&1 & quiet=$$!; \
	$(PYTEST) tests/cli tests/engine tests/sweep; loud=$$?; \
	wait $$quiet; quiet=$$?; echo "and what starts no Ray:"; cat .pytest-quiet.log; \
	[ $$loud = 0 ] && [ $$quiet = 0 ]

check: $(READY)
	$(VENV)/bin/ruff check rayfed tests benchmarks
	$(VENV)/bin/ruff format --check rayfed tests benchmarks
	$(VENV)/bin/mypy

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"Python {v[0]}.{v[1]} is too old: rayfed needs 3.11 or newer; try make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --upgrade pip
	$(VENV)/bin/python -m pip install --quiet -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache
