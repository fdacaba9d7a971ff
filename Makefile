# make run     builds .venv, installs, runs the main job on embedded data
# make test    the same, and runs every test
# make check   lint, format and types, as the tests' companions

PYTHON ?= python3
VENV ?= .venv
RUN ?= method=fedglad
export OMP_NUM_THREADS ?= 1

READY := $(VENV)/.installed

.PHONY: run test check clean

run: $(READY)
	$(VENV)/bin/python -m rayfed.run $(RUN)

test: check
	$(VENV)/bin/python -m pytest -n 2 --dist loadgroup $(ARGS)

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
