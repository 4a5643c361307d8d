# make demo   a real model: converted, inspected, verified, run
# make test   everything that is checked: format, lint, types, tests
# make test-peers   exports in the engines that they are for; builds llama.cpp, five minutes
# Both do all their set-up in .venv; a C++20 compiler, make and Python 3.11 or newer with venv are what they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NATIVE := $(shell find native -name '*.cpp' -o -name '*.h' -o -name 'CMakeLists.txt' -o -name '*.cmake')
PACKAGE := $(shell find w4conv -name '*.py' -o -name '*.pyi')

PEERS := $(addprefix tests/differential/test_,export_llama_cpp.py gguf_families.py tokenizers.py gptqmodel.py onnx.py)

# The installed package is what runs, not the source tree in the current folder.
export PYTHONSAFEPATH := 1

.PHONY: demo test test-peers lint clean

demo: $(VENV)/.installed
	$(BIN)/python docs/demo/demo.py

test: lint
	$(BIN)/python -m pytest

test-peers: $(VENV)/.peers
	$(BIN)/python -m pytest $(PEERS)

lint: $(VENV)/.test-tools
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(filter %.cpp %.h,$(NATIVE))

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

$(VENV)/.installed: $(BIN)/python pyproject.toml $(NATIVE) $(PACKAGE)
	$(BIN)/python -m pip install --quiet .
	touch $@

$(VENV)/.test-tools: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --group lint --group test --group oracle
	touch $@

$(VENV)/.peers: $(VENV)/.test-tools
	$(BIN)/python -m pip install --quiet --group oracle --group peers
	$(BIN)/python -m pip install --quiet --no-deps gptqmodel
	touch $@

clean:
	rm -rf $(VENV) build
