# make demo    a long document answered by a real model, dense and with hisparse, side by side
# make test    everything that CI runs
# make lint    the part of it that takes seconds
# make setup   .venv/, which the others make themselves
# make range   the contract test on older releases of SGLang (scripts/sglang_range.sh), part of make test
# make lm-eval   .venv/lm-eval/, 600 MB more, which make test makes itself
# make gpu-check   on a machine with a CUDA GPU, PyTorch and nvcc: kernels, graphs, sanitizers, speed
# make gpu-wheels  what gpu-check needs besides, as wheels for such a machine without an index
# make clean   delete what the others made in this folder (models stay in ~/.cache/hisparse)

.DEFAULT_GOAL := demo
.PHONY: demo test lint setup range lm-eval gpu-check gpu-wheels clean

export PYTHONUNBUFFERED := 1
python := .venv/bin/python

demo: setup
	@$(python) -m hisparse.demo $(if $(MODEL),--model "$(MODEL)")

test: lint lm-eval range
	$(python) -m pytest

lint: setup
	$(python) -m ruff check .
	$(python) -m ruff format --check .
	$(python) -m mypy --strict

setup:
	@scripts/setup.sh

range: setup
	@scripts/sglang_range.sh

lm-eval: setup
	@cmp -s requirements/lm-eval.txt .venv/lm-eval/pins.txt || { \
		$(python) -m pip install --quiet --no-deps --upgrade --target .venv/lm-eval \
			-r requirements/lm-eval.txt && \
		cp requirements/lm-eval.txt .venv/lm-eval/pins.txt; }

# The GPU machine's own Python, which has PyTorch: GPU_PYTHON=/path/to/python to choose.
GPU_PYTHON ?= python3

gpu-check:
	@$(GPU_PYTHON) scripts/gpu_check.py

gpu-wheels:
	@scripts/gpu_wheels.sh

clean:
	rm -rf .venv build dist *.egg-info cpu_standins/build cpu_standins/*.egg-info
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find hisparse tests -name __pycache__ -type d -prune -exec rm -rf {} +
