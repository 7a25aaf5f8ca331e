PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# pip would compile what it installs, 24,000 files, for a minute; Python compiles the sixth of them that is used, once.
PIP := $(BIN)/pip install -q --no-compile
TORCH := $(shell sed -n 's/^ *"\(torch[<>=].*\)",.*/\1/p' pyproject.toml)
# Each process has its part of the tests and takes from another's when it is done, so that no file of tests
# keeps one core busy while the others wait; plain `pytest` runs all one by one. tests/conftest.py says how many.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/pytest --dist worksteal -n auto

.PHONY: demo test check test-fast lint docs numbers clean

# `make demo`: install, then the main job on real handwriting, 16 seconds of two idle cores.
demo: $(VENV)/.installed
	PATH="$(CURDIR)/$(BIN):$$PATH" sh examples/demo.sh

# `make test`: what a contributor waits for. `make check`: sockets, Flower, wheels, browsers, notebooks and the site.
# Continuous integration runs both.
test: $(VENV)/.installed-dev lint
	$(PYTEST) --ignore tests/checks

check: $(VENV)/.installed-dev
	$(PYTEST) tests/checks

test-fast: $(VENV)/.installed-dev
	$(PYTEST) --ignore tests/checks -m "not slow"

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# `make docs`: the documentation site in docs/_build/index.html, with the output of the tutorials; warnings are errors.
docs: $(VENV)/.installed-dev
	$(BIN)/sphinx-build -q -W --keep-going -b html docs docs/_build

# `make numbers`: ten cheap numbers of the board, drawn by the day, run again; it fails if one does not hold.
numbers: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python reproduce/replay.py

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# Linux without an NVIDIA driver takes the CPU build of torch, a tenth of the other's size; where its index can't be
# reached, pip takes what its own indexes have.
$(VENV)/.torch: $(VENV)/bin/python
	if [ "$$(uname)" = Linux ] && ! command -v nvidia-smi >/dev/null; then \
		$(PIP) --retries 0 --timeout 15 --index-url https://download.pytorch.org/whl/cpu '$(TORCH)' \
			|| echo "no CPU build of torch from download.pytorch.org; taking that of pip's own index"; fi
	touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	$(PIP) -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.torch pyproject.toml
	$(PIP) -e ".[dev]"
	touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
