# Every target that needs Python uses the virtual environment in $(VENV) and makes it first where it is missing.
# Stamp files inside it remember what is installed, so pip runs again only when pyproject.toml or the pins change.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
CONFIG ?= tpu_gpu_configs/cpu/debug.yaml
MULTIMODAL := tpu_gpu_configs/cpu/multimodal.yaml
# Where train-multimodal leaves its run; beside it, with -blind, the one to compare with. Their data is in runs/words.
READING ?= runs/reading
# What JAX is installed for: cpu, cuda12, cuda13 or tpu; empty: what this machine calls for (rrfp_jax/hardware.py). system:
# the JAX that PYTHON has already, as in an image of a vendor.
ACCELERATOR ?=
# A folder that `make wheels` fills; `make setup` installs from it alone.
WHEELS ?=
# Extra arguments, for example: make train ARGS="--steps 20"   make test ARGS="-k window"
ARGS ?=

BIN := $(VENV)/bin
PINS := $(wildcard requirements/constraints-*.txt)
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
# What the environment is for, chosen when it is made and whenever ACCELERATOR says something else.
CHOSEN := $(VENV)/.accelerator
# $(1): what pip does, $(2): with what, $(3): for which accelerator. On a terminal with one line that tells what pip does;
# elsewhere a dot for every package. Where it fails, with pip's whole output.
pip = pins=$$($(BIN)/python -c 'import sys; print("py311" if sys.version_info < (3, 12) else "py312")'); \
	log=$(VENV)/install.log; what='$(2)'; also=; accelerator=$(3); constraints=requirements/constraints-$$pins.txt; \
	case $$accelerator in cpu) ;; \
	  system) $(BIN)/python -P requirements/beside $$constraints >$(VENV)/constraints.txt; constraints=$(VENV)/constraints.txt;; \
	  *) what="$$what[$$accelerator]"; also=" -c requirements/constraints-$$pins-$$accelerator.txt";; esac; \
	command="$(PIP) $(1) -c $$constraints$$also $(if $(filter install,$(1)),-e )$$what"; \
	say="printf ."; end="\n"; if [ -t 1 ]; then say="printf \r\033[K%.78s"; end="\r\033[K"; fi; \
	$$command 2>&1 | tee "$$log" | while IFS= read -r line; do case "$$line" in \
	  Collecting*|"  Downloading"*|Installing*|Saved*) $$say "$$line";; esac; done \
	&& printf "$$end" || { printf "$$end"; cat "$$log" >&2; \
	  echo "error: pip could not $(if $(filter wheel,$(1)),collect,install) '$$what'; its output is above" >&2; exit 1; }
OFFLINE := $(if $(WHEELS),--no-index --find-links $(WHEELS))
COLLECTED := $(or $(WHEELS),wheels)

.PHONY: help
help: ## list every target
	@awk -F ':.*## ' '/^[a-z -]+:.*## / { printf "  make %-20s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

# ------------------------------------------------------------------------------------------------ environment

$(BIN)/python:
	@command -v "$(PYTHON)" >/dev/null \
	  || { echo "error: no '$(PYTHON)' found: install Python 3.11 or newer, or name one: make setup PYTHON=/path/to/python3.12" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "error: $(PYTHON) is $$("$(PYTHON)" -V 2>&1), Python 3.11 or newer is needed: make setup PYTHON=/path/to/python3.12" >&2; exit 1; }
	@echo "making a virtual environment in $(VENV) ($$("$(PYTHON)" -V))"
	@"$(PYTHON)" -m venv --clear $(if $(filter system,$(ACCELERATOR)),--system-site-packages) "$(VENV)" >/dev/null \
	  || { rm -rf "$(VENV)"; echo "error: '$(PYTHON) -m venv' failed: on Debian or Ubuntu install the package python3-venv" >&2; exit 1; }

ifneq ($(ACCELERATOR),)
$(CHOSEN): FORCE
endif
$(CHOSEN): | $(BIN)/python
	@$(BIN)/python -P rrfp_jax/hardware.py "$(ACCELERATOR)" "$@"

.PHONY: FORCE
FORCE:

$(VENV)/.installed: pyproject.toml $(PINS) $(CHOSEN) | $(BIN)/python
	@wheels="$(WHEELS)"; [ -z "$$wheels" ] || { chosen=$$(cat $(CHOSEN)); made=$$(cat "$$wheels/accelerator" 2>/dev/null) \
	  || { echo "error: '$$wheels' holds no wheels: run 'make wheels WHEELS=FOLDER' where there is a network, and copy it" >&2; exit 1; }; \
	  case $$chosen in cpu|system|$$made) ;; *) echo "error: '$$wheels' is for $$made, and JAX is to be for $$chosen: run" \
	    "'make setup ACCELERATOR=$$made WHEELS=$$wheels', or collect others by 'make wheels ACCELERATOR=$$chosen'" >&2; exit 1;; esac; \
	  tag=$$($(BIN)/python -c 'import sys; print("cp%d%d" % sys.version_info[:2])'); \
	  compgen -G "$$wheels/*-$$tag-*.whl" >/dev/null || { echo "error: '$$wheels' is for another Python than $$($(BIN)/python -V): name" \
	    "the one that collected it by PYTHON=, after 'make clean', or collect with PYTHON=python$${tag:2:1}.$${tag:3}" >&2; exit 1; }; }
	@echo "installing the pinned dependencies into $(VENV) (about a minute)"
	@$(call pip,install $(OFFLINE),.,$$(cat $(CHOSEN)))
	@touch "$@"

# The tools go beside whatever JAX is there.
beside = $$(grep -x system $(CHOSEN) || echo cpu)

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "installing the development tools into $(VENV) (about a minute)"
	@$(call pip,install $(OFFLINE),.[dev],$(beside))
	@touch "$@"

$(VENV)/.installed-docs: $(VENV)/.installed
	@echo "installing what builds the site into $(VENV)"
	@$(call pip,install $(OFFLINE),.[docs],$(beside))
	@touch "$@"

.PHONY: setup dev wheels
setup: $(VENV)/.installed ## make .venv and install the pinned dependencies, for the GPU or TPU that it finds or ACCELERATOR=...

dev: $(VENV)/.installed-dev ## the same with the tools for tests, lint and types

wheels: | $(BIN)/python ## collect what setup installs, into WHEELS=FOLDER, for another host with this Python
	@mkdir -p "$(COLLECTED)"
	@$(BIN)/python -S -P rrfp_jax/hardware.py "$(ACCELERATOR)" "$(COLLECTED)/accelerator"
	@echo "collecting wheels in $(COLLECTED)"
	@$(call pip,wheel --wheel-dir $(COLLECTED) setuptools,.,$$(cat "$(COLLECTED)/accelerator"))

# -------------------------------------------------------------------------------------------------------- use

.PHONY: train train-multimodal bench bench-gpu bench-tpu
train: setup ## train a byte-level language model through a 4-stage pipeline on 4 virtual CPU devices
	@$(BIN)/python -m experiments.train --config "$(CONFIG)" $(ARGS)

train-multimodal: setup ## train a small model to read words in pictures, beside one that sees nothing (5 minutes)
	@$(BIN)/python -m experiments.reading.draw runs/words
	@$(BIN)/python -m experiments.train --config $(MULTIMODAL) --fresh --run-dir $(READING) $(ARGS)
	@echo "the same with blank pictures:"
	@$(BIN)/python -m experiments.train --config $(MULTIMODAL) --fresh --run-dir $(READING)-blind --data.path runs/words/blind/train.jsonl $(ARGS)
	@$(BIN)/python -m experiments.reading $(READING) --beside $(READING)-blind --picture $(READING)/words.png
	@echo "what it reads in some of them: $(READING)/words.png"

bench: setup ## measure what the runtime itself costs
	@$(BIN)/python -m experiments.bench $(ARGS)

bench-gpu bench-tpu: setup ## measure a pipeline on one accelerator beside a plain jitted loop
	@$(BIN)/python -m experiments.bench_device --accelerator $(ARGS)

.PHONY: paper
paper: setup ## measure the evaluation again, quickly, and write its report to runs/paper (goes on if stopped)
	@$(BIN)/python -m experiments.paper run $(ARGS)

# ----------------------------------------------------------------------------------------------------- checks

.PHONY: test test-slow test-slurm test-gpu test-tpu fuzz check lint types imports format
# In the order of the folders: by default modules with one long test would come last, and all cores but one would wait.
# With bytecode kept, also where the environment says otherwise: else each worker and each command that a test starts
# compiles the package and the tests for itself.
test: dev ## run the fast tests, on all cores
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n auto --dist loadscope --no-loadscope-reorder -m "not slow" $(ARGS)

test-slow: dev ## run the slow tests (larger exhaustive checks, long runs)
	@JAX_DISABLE_MOST_OPTIMIZATIONS=0 $(BIN)/python -m pytest -n auto --dist loadscope -m slow --timeout 3600 -o faulthandler_timeout=3600 $(ARGS)

test-slurm: dev ## run both SLURM scripts on a real SLURM of three nodes on this machine (root, Debian's packages)
	@JAX_DISABLE_MOST_OPTIMIZATIONS=0 $(BIN)/python -m pytest -m slow -rs tests/multiprocess/test_slurm.py --timeout 900 $(ARGS)

test-gpu test-tpu: dev ## run the tests that need an accelerator, on the one that JAX finds
	@RRFP_ACCELERATOR=$(@:test-%=%) JAX_DISABLE_MOST_OPTIMIZATIONS=0 $(BIN)/python -m pytest tests/accelerators --timeout 900 -o faulthandler_timeout=900 $(ARGS)

# Environments with the compiler for an accelerator and no more of it: no driver, and of NVIDIA's libraries cuDNN alone.
COMPILERS_h100 := cuda12 jax-cuda12-plugin jax-cuda12-pjrt nvidia-cudnn-cu12
COMPILERS_v5p := tpu libtpu
TARGETS ?= h100 v5p
.venv-%/.installed-compiler: pyproject.toml $(PINS)
	@$(MAKE) --no-print-directory PYTHON="$(PYTHON)" VENV=.venv-$* ACCELERATOR=$(if $(wildcard .venv-$*/.accelerator),,cpu) dev
	@echo "installing the compiler for $* into .venv-$* (a gigabyte)"
	@pins=$$(.venv-$*/bin/python -c 'import sys; print("py311" if sys.version_info < (3, 12) else "py312")'); \
	  .venv-$*/bin/python -m pip --disable-pip-version-check --no-input install -q --no-deps \
	  -c requirements/constraints-$$pins-$(firstword $(COMPILERS_$*)).txt $(wordlist 2,9,$(COMPILERS_$*))
	@touch "$@"

.PHONY: test-targets
test-targets: $(TARGETS:%=.venv-%/.installed-compiler) ## compile every preset for an H100 and a TPU v5p, which need not be here, and check the programs
	@for target in $(TARGETS); do \
	  RRFP_TARGET=$$target TPU_SKIP_MDS_QUERY=1 JAX_DISABLE_MOST_OPTIMIZATIONS=0 .venv-$$target/bin/python -m pytest tests/targets \
	  --timeout 1200 -o faulthandler_timeout=1200 $(ARGS); done

fuzz: dev ## try random compositions beside a plain loop: ARGS="--cases 600 --seed 1 2"; it goes on where it was stopped
	@$(BIN)/python -m tests.fuzz $(ARGS)

.PHONY: docs
docs: $(VENV)/.installed-docs ## build the site from docs/ and the docstrings into build/site; a broken link is an error
	@$(BIN)/python -m sphinx -q -E -W --keep-going -b html -c docs/site . build/site $(ARGS)
	@echo "the site is in build/site: open build/site/index.html"

check: lint types imports ## lint, types and import rule together

lint: dev ## check style and formatting with ruff, and the prose of docstrings
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/python -m tests.house rrfp_jax experiments

types: dev ## check types with mypy, strictly in the pure packages
	@$(BIN)/mypy

imports: dev ## check that packages import downwards only
	@$(BIN)/lint-imports --no-logo

format: dev ## reformat the code and mend what ruff can mend
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

# -------------------------------------------------------------------------------------------------- housekeeping

.PHONY: pins clean
pins: ## resolve the newest versions for the Python of PYTHON and write them to requirements/
	@PYTHON="$(PYTHON)" requirements/resolve

clean: ## remove .venv, caches and build leftovers (runs/ stays)
	@rm -rf "$(VENV)" .venv-newest $(TARGETS:%=.venv-%) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
