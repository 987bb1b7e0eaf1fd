# Two commands are all a newcomer needs: `make demo` and `make test`. Both make .venv on demand.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The lowest versions have no wheels for newer Python.
LOWEST_PYTHON ?= python3.11
LOWEST := .venv-lowest

.PHONY: demo test test-lowest check format bench docs nightly fuzz release-check clean
.DELETE_ON_ERROR:

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,flare,flower]'
	@touch $@

demo: $(STAMP)
	$(BIN)/privfed demo

# One thread per worker: small tensors are slower on two. A module's tests stay together, because they share what they set up.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist loadscope

# The other end of the ranges that pyproject.toml declares: constraints.txt has the newest. Without the engines, which demand more themselves.
$(LOWEST)/.installed: pyproject.toml constraints-lowest.txt
	$(LOWEST_PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet --upgrade pip
	$(LOWEST)/bin/python -m pip install --quiet --constraint constraints-lowest.txt --editable '.[dev]'
	@touch $@

test-lowest: $(LOWEST)/.installed
	OMP_NUM_THREADS=1 $(LOWEST)/bin/python -m pytest --numprocesses auto --dist loadscope

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/basedpyright
	$(BIN)/lint-imports
	$(BIN)/python -m pytest --doctest-modules privfed

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP)
	$(BIN)/python -m benchmarks.hot_paths

nightly: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m nightly

docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	$(BIN)/python -m sphinx -W -b html docs docs/_build/html

fuzz: $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[fuzz]'
	$(BIN)/python -m tests.fuzz.run --minutes 10

release-check: $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt build cyclonedx-bom pip-audit
	$(BIN)/python .ci/release_check.py

clean:
	rm -rf $(VENV) $(LOWEST) dist docs/_build .pytest_cache .ruff_cache .hypothesis
