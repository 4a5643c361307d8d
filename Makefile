# make demo   a real model: converted, inspected, verified, run
# make test   format, lint, types, and all tests that need no more than this clone and its Python packages
# make test-services   what fetches real models and vocabularies or builds for minutes: sanitizers, a build with Clang
# make test-peers   exports in the engines that they are for; builds llama.cpp, five minutes
# All do their set-up in .venv; a C++20 compiler, make and Python 3.11 or newer with venv are what they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NATIVE := $(shell find native -name '*.cpp' -o -name '*.h' -o -name 'CMakeLists.txt' -o -name '*.cmake')
PACKAGE := $(shell find w4conv -name '*.py' -o -name '*.pyi')

PEERS := $(addprefix tests/differential/test_,export_llama_cpp.py gguf_families.py tokenizers.py gptqmodel.py onnx.py)

# The installed package is what runs, not the source tree in the current folder.
export PYTHONSAFEPATH := 1

.PHONY: demo test test-services test-clang test-peers lint clean

demo: $(VENV)/.installed
	$(BIN)/python docs/demo/demo.py

# One process a core.
test: lint
	$(BIN)/python -m pytest -m "not services" -n auto --dist worksteal

test-services: $(VENV)/.services test-clang
	$(BIN)/python -m pytest -m services

# The native module as Clang compiles it, without a warning, gives the same bits.
test-clang: $(VENV)/.clang
	PYTHONPATH=$(CURDIR)/$(VENV)/clang $(BIN)/python -c 'from w4conv import _native; assert _native.BUILD.startswith("Clang")'
	PYTHONPATH=$(CURDIR)/$(VENV)/clang $(BIN)/python -m pytest -m "not services" -n auto --dist worksteal tests/native tests/golden

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

$(VENV)/.services: $(VENV)/.test-tools
	$(BIN)/python -m pip install --quiet --group services
	touch $@

$(VENV)/.clang: $(VENV)/.services tests/native/clang++
	CXX=$(CURDIR)/tests/native/clang++ ZIG_PYTHON=$(CURDIR)/$(BIN)/python $(BIN)/python -m pip install --quiet --no-deps \
	  --upgrade --target $(VENV)/clang . -Cbuild-dir=build/clang -Ccmake.define.W4CONV_OPTIMIZATION=-O1 \
	  -Ccmake.define.CMAKE_COMPILE_WARNING_AS_ERROR=ON
	touch $@

$(VENV)/.peers: $(VENV)/.test-tools
	$(BIN)/python -m pip install --quiet --group oracle --group peers
	$(BIN)/python -m pip install --quiet --no-deps gptqmodel
	touch $@

clean:
	rm -rf $(VENV) build
