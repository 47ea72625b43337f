# Every target does its own set-up, so a fresh clone needs nothing but Python >= 3.11.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
STAMP = $(VENV)/.installed
WORKERS ?= 2
PYTEST_MODULE = pytest -n $(WORKERS) --dist worksteal
PYTEST = $(BIN)/python -m $(PYTEST_MODULE)
# Tests, with the types checked beside them: fails where either does.
checked = $(MAKE) --no-print-directory check & check=$$!; $(1); tests=$$?; wait $$check && exit $$tests
# What a newer jax could change: tracing, lowering, sums, pipelines.
CORE = $(addprefix tests/,lower/test_exact.py lower/test_groups.py lower/test_pipeline_programs.py \
	lower/test_segments_tensor.py lower/test_slots.py lower/test_words.py session/test_job.py \
	lower/test_decisions.py lower/test_dropless.py jax/test_ordered_adds.py graph/test_fused_attention.py \
	graph/test_trace.py jax/test_jaxpr.py choose/test_patterns.py)
# XLA's compiler for NVIDIA GPUs, with which the tests compile programs without one. Make reads the
# names a target needs when it comes to the target: this line stands above them.
GPU_COMPILER = $(VENV)/gpu-compiler
# An interpreter that has torch, for make bench; TORCH= leaves PyTorch out.
TORCH ?= .venv-torch/bin/python

# The site's own environment: it reads hxla's source and needs none of its dependencies.
DOCS ?= .venv-docs

.PHONY: demo test test-all coverage mutants core check format docs chaos elastic fuzz bench bench-gpu clean

$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("hxla needs Python 3.11 or newer, this is " + sys.version.split()[0] + ": make PYTHON=python3.12") if sys.version_info < (3, 11) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

# Two to four minutes on two quiet cores; ARGS=--long trains until the model spells.
demo: $(STAMP)
	$(BIN)/hxla run --mesh cpu-1.0-0.33 examples/01_mixed_cluster.py $(ARGS)

# A covering set of every table.
test: $(STAMP) $(GPU_COMPILER)
	$(call checked,$(PYTEST))

# Everything, and many examples of each property.
test-all: $(STAMP) $(GPU_COMPILER)
	$(call checked,$(PYTEST) --all)

# Lines and branches that tests run, into .coverage-quick.json, or -all with ARGS=--all.
coverage: $(STAMP) $(GPU_COMPILER)
	rm -f .coverage .coverage.*
	$(BIN)/python -m coverage run -m $(PYTEST_MODULE) $(ARGS)
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage json --quiet -o .coverage-$(if $(findstring --all,$(ARGS)),all,quick).json

# Faults of one line each, which the quick tests must notice: ARGS="--rooms lower plan"
mutants: $(STAMP)
	PYTHONPATH=tests $(BIN)/python -m support.mutants $(ARGS)

# The numerical core: make core PYTHON=python3.12 VENV=.venv-3.12
core: $(STAMP)
	$(PYTEST) $(CORE)

# Damaged files of every kind that is read; ARGS="--inputs 1500 --seed 7" for others.
fuzz: $(STAMP)
	PYTHONPATH=tests $(BIN)/python -m support.fuzz $(ARGS)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Faults against real small jobs, about 25 seconds each: make chaos ARGS="--events 100 --seed 60"
chaos: $(STAMP)
	PYTHONPATH=tests $(BIN)/python -m support.chaos $(ARGS)

# Events against elastic jobs, about 10 seconds each: make elastic ARGS="--events 100 --seed 7"
elastic: $(STAMP)
	PYTHONPATH=tests $(BIN)/python -m support.elastic_chaos $(ARGS)

# Into site/, warnings as errors. Once the environment is made nothing is fetched, nor by a reader.
docs: $(DOCS)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs build --strict --quiet
	@echo "Open site/index.html in a browser; the search works there too."

$(DOCS)/.installed: docs/requirements.txt
	test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --requirement docs/requirements.txt
	touch $@

# The CPU build is enough and much smaller: pip prefers it to one of the same version without label.
bench: $(STAMP)
	if [ "$(TORCH)" = .venv-torch/bin/python ] && ! $(TORCH) -c 'import torch' 2> /dev/null; then \
		$(PYTHON) -m venv .venv-torch && $(TORCH) -m pip install --quiet --retries 1 \
		--extra-index-url https://download.pytorch.org/whl/cpu torch numpy \
		|| echo "PyTorch cannot be installed here: its comparisons are left out"; fi
	$(BIN)/python benchmarks/run_all.py --torch "$(TORCH)"

# PYTHON has jax with a GPU and hxla's dependencies; nothing is installed. ARGS=--tiny needs no GPU.
bench-gpu:
	$(PYTHON) benchmarks/gpu.py $(ARGS)

$(GPU_COMPILER): $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $@ \
		"jax-cuda12-pjrt==$$($(BIN)/python -c 'import jaxlib; print(jaxlib.__version__)')" \
		'nvidia-cuda-nvcc-cu12>=12.8' \
		|| echo "there is no compiler for GPUs to install here: its tests are skipped"

clean:
	rm -rf $(VENV) $(DOCS) .venv-3.12 .venv-torch runs dist build site
