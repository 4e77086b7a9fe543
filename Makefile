# Two commands do everything on a fresh machine: `make demo` and `make test`.
# PYTHON picks the interpreter, VENV the environment; pip's own configuration decides where packages come from.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SOURCES := starsd_edge server/starsd_server jetson/starsd_jetson deploy/starsd_deploy tests

.PHONY: setup demo test test-lab check fmt lint types imports bench dist clean

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "installing into $(VENV): some minutes and about 1.5 GB with a CPU build of PyTorch"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: setup
	$(BIN)/starsd demo
	@echo
	@echo "next: . $(BIN)/activate"
	@echo "      starsd draft serve                              # and in another terminal"
	@echo "      starsd chat --service tcp://127.0.0.1:7731"

test: setup
	$(BIN)/pytest

check: setup
	$(BIN)/ruff format --check $(SOURCES)
	$(MAKE) --no-print-directory lint types imports
	$(BIN)/pytest

fmt: setup
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

lint: setup
	$(BIN)/ruff check $(SOURCES)

types: setup
	$(BIN)/mypy
	$(BIN)/python tests/jetson/tensorrt_types.py $(VENV)/tensorrt-stubs

imports: setup
	$(BIN)/lint-imports

bench: setup
	$(BIN)/starsd bench --help

dist: setup
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir dist .

clean:
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis

# The link over real TCP that loses, delays and breaks; then the deployer against devices with real systemd and
# sshd, one of them aarch64 under emulation. Needs root,
# installs Debian packages, takes up to 30 minutes; where it cannot be run, or not in that time, it says NOT RUN.
test-lab: setup
	tests/lab/run $(BIN)/pytest
