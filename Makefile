# make demo    a long document answered by a real model, dense and with hisparse, side by side
# make test    lint and tests at small sizes: all but the parts below
# make test-all PART=sweeps    kernels under 20 orders of threads, the contract suite with all scopes
#                              and page sizes, many more examples of hypothesis
# make test-all PART=isa       the CPU kernels built for SSE, AVX2, this processor, NEON and SVE, and what
#                              their tests call on this processor called again in each build
# make test-all PART=sanitizers   the same calls in builds that find access out of bounds, undefined
#                                 behaviour, leaks and races
# make test-all PART=compile   every variant of a Triton kernel that the engine launches, with the
#                              Triton of .venv and with an older one, and the CUDA sources, for
#                              sm_80, sm_90 and sm_100; registers, spills and blocks of each
# make test-all PART=hostile   100,000 configurations and 10,000 damaged files at random, and
#                              every reader of files under a fuzzer that looks for new code
# make test-all PART=models    a tiny model of each family of docs/models.md, served densely and with
#                              hisparse; a family that was served before has to be served
# make test-all PART=modes     all cases of served modes, such as pairs of prefill and decode servers,
#                              drafts, windows, hybrids, Gemma 3; sweeps have a case or two of each
# make test-all PART=faults    killed processes and compilers, limits of memory and disk, odd requests
# make test-all PART=quality   the quality of all algorithms, at the size of the committed table
# make test-all PART=soak      make soak with 400 requests
# make soak    5,000 requests to the real server, from 32 clients at once: every answer, every leak
# make lint    what takes seconds of make test
# make setup   .venv/, which the others make themselves
# make datasets   .venv/datasets/, 260 MB more, which make test makes itself
# make ruler   .venv/ruler/, 250 MB more, RULER for `hisparse eval --ruler`; sweeps make it themselves
# make site    build/site/, the pages of docs/ as a site (mkdocs.yml); no network but for the set-up
# make site-tools   .venv/site/, 80 MB, which make site and make test make themselves
# make redis-tools   .venv/redis/, Debian's Redis, 5 MB, which make test makes itself on Debian
# make mooncake-tools   .venv/mooncake/, 150 MB, which PART=sweeps and make soak make on Debian
# make older-triton   .venv/triton/, 600 MB, which PART=compile makes itself
# make fuzz-tools   .venv/fuzz/, 130 MB, which PART=hostile makes itself where atheris has a wheel
# make gpu-check   on a machine with a CUDA GPU, PyTorch and nvcc: kernels, graphs, speed, a served
#                  SGLang, sanitizers; PART=kernels, engine, bench-kernels, bench-decode, bench-batch,
#                  bench-host, serve, serve-load or sanitizers for one of them alone, each below 8 minutes
# make gpu-wheels  what else gpu-check needs, as wheels for such a machine without an index
# make pins    the hashes in requirements/, after a version there has changed
# make wheel   dist/*.whl from the last commit: the same commit gives the same bytes
# make audit   known vulnerabilities of the pinned packages
# make licences   docs/licences.md, the licences of the packages that hisparse needs
# make docs    docs/configuration.md from the code, and the plots of docs/images/ from bench/results
# make clean   delete what the others made in this folder (models stay in ~/.cache/hisparse)

.DEFAULT_GOAL := demo
.PHONY: demo test test-all test-sweeps test-isa test-sanitizers test-quality \
	test-hostile test-models test-modes test-faults test-soak test-compile soak lint setup datasets ruler fuzz-tools \
	older-triton site site-tools redis-tools mooncake-tools gpu-check gpu-wheels pins audit \
	licences wheel docs clean

export PYTHONUNBUFFERED := 1
python := .venv/bin/python

demo: setup
	@$(python) -m hisparse.demo $(if $(MODEL),--model "$(MODEL)")

test: setup datasets site-tools
	-@$(MAKE) --no-print-directory redis-tools
	@$(python) scripts/run_tests.py

parts := sweeps isa sanitizers compile quality hostile models modes faults soak

test-all:
	$(if $(filter $(PART),$(parts)),,$(error PART is '$(PART)', expected one of: $(parts)))
	@$(MAKE) --no-print-directory test-$(PART)

test-sweeps: setup ruler
	-@$(MAKE) --no-print-directory mooncake-tools redis-tools
	@$(python) -m tests.prepare
	PART=sweeps OMP_NUM_THREADS=1 $(python) -m pytest -n 2 -m "sweeps or hypothesis" \
		--ignore tests/server
	PART=sweeps OMP_NUM_THREADS=1 $(python) -m pytest -n 2 -m "sweeps and not modes" tests/server

test-isa: setup
	@OMP_NUM_THREADS=2 $(python) -m tests.kernels.isa

test-hostile: setup
	@$(python) -m tests.prepare
	PART=hostile OMP_NUM_THREADS=1 $(python) -m pytest -n 2 -s tests/hostile
	-@$(MAKE) --no-print-directory fuzz-tools
	PYTHONPATH=bench:.venv/fuzz OMP_NUM_THREADS=1 $(python) -m tests.hostile.fuzz --seconds 20

test-modes: setup mooncake-tools
	@$(python) -m tests.prepare
	PART=modes OMP_NUM_THREADS=1 $(python) -m pytest -n 2 -m modes tests/server

test-models: setup
	@rm -f build/models.json
	@$(python) -m scripts.model_table build/models.json \
		--known $(lastword $(sort $(wildcard bench/results/*-models-*.json)))

test-sanitizers: setup
	@OMP_NUM_THREADS=2 $(python) -m tests.kernels.sanitizers

# All three run, whichever fails.
test-compile: setup older-triton
	@export OMP_NUM_THREADS=1; failed=0; \
	$(python) -m scripts.compile_cuda || failed=1; \
	PYTHONPATH=bench $(python) -m tests.kernels.triton_compile --whole || failed=1; \
	PYTHONPATH=bench:.venv/triton $(python) -m tests.kernels.triton_compile --whole || failed=1; \
	exit $$failed

test-faults: setup
	@$(python) -m tests.prepare
	PART=faults OMP_NUM_THREADS=1 $(python) -m pytest tests/server/test_faults.py \
		tests/server/test_http.py tests/kernels/test_build_faults.py tests/cache/test_allocate.py \
		tests/eval/test_records.py tests/memory/test_memory.py \
		tests/storage/test_lost_pages.py tests/storage/test_killed_writers.py \
		tests/storage/test_eviction.py tests/storage/test_random_faults.py \
		tests/sglang/test_storage_faults.py tests/sglang/test_storage_injected.py \
		tests/server/test_served_storage_faults.py tests/server/test_served_swap.py

test-quality: setup
	PART=quality $(python) -m pytest tests/eval/test_quality.py

soak := PYTHONPATH=tests/server $(python) -W ignore -m soak

soak: setup
	-@$(MAKE) --no-print-directory mooncake-tools
	@$(python) -m tests.prepare
	@$(soak)

test-soak: setup
	-@$(MAKE) --no-print-directory mooncake-tools
	@$(python) -m tests.prepare
	@$(soak) --requests 400

lint: setup
	$(python) -m ruff check .
	$(python) -m ruff format --check .
	$(python) -m mypy --strict

setup:
	@scripts/setup.sh

datasets: setup
	@cmp -s requirements/datasets.txt .venv/datasets/pins.txt || { \
		$(python) -m pip install --quiet --no-deps --upgrade --target .venv/datasets \
			--require-hashes -r requirements/datasets.txt && \
		cp requirements/datasets.txt .venv/datasets/pins.txt; }

ruler: setup
	@cmp -s requirements/ruler.txt .venv/ruler/pins.txt || { \
		$(python) -m pip install --quiet --no-deps --upgrade --target .venv/ruler \
			--only-binary :all: --require-hashes -r requirements/ruler.txt && \
		cp requirements/ruler.txt .venv/ruler/pins.txt; }

fuzz-tools: setup
	@cmp -s requirements/fuzz.txt .venv/fuzz/pins.txt || { \
		$(python) -m pip install --quiet --no-deps --upgrade --target .venv/fuzz \
			--only-binary :all: --require-hashes -r requirements/fuzz.txt && \
		cp requirements/fuzz.txt .venv/fuzz/pins.txt; }

site-tools: setup
	@cmp -s requirements/site.txt .venv/site/pins.txt || { \
		$(python) -m pip install --quiet --no-deps --upgrade --target .venv/site \
			--only-binary :all: --require-hashes -r requirements/site.txt && \
		cp requirements/site.txt .venv/site/pins.txt; }

# Mooncake, and the libraries of Debian that it loads: unpacked, not installed, so that nobody has to
# be root.
mooncake-tools: setup
	@cmp -s requirements/mooncake.txt .venv/mooncake/pins.txt || { \
		$(python) -m pip install --quiet --no-deps --upgrade --target .venv/mooncake \
			--only-binary :all: --require-hashes -r requirements/mooncake.txt && \
		rm -rf .venv/mooncake/debian && mkdir .venv/mooncake/debian && \
		cd .venv/mooncake/debian && \
		apt-get --quiet --quiet download libibverbs1 librdmacm1 libnl-3-200 libnl-route-3-200 && \
		for each in *.deb; do dpkg-deb --extract $$each . || exit 1; done && \
		cp ../../../requirements/mooncake.txt ../pins.txt; }

# Lists of packages may be absent on a new machine; who is root can get them.
redis-tools: setup
	@test -x .venv/redis/usr/bin/redis-server || { \
		rm -rf .venv/redis && mkdir .venv/redis && cd .venv/redis && \
		download() { apt-get --quiet --quiet download redis-server redis-tools libatomic1 \
			libjemalloc2 liblzf1; } && \
		{ download 2>/dev/null || { apt-get --quiet --quiet update && download; }; } && \
		for each in *.deb; do dpkg-deb --extract $$each . || exit 1; done; }

# The variable leaves out a notice about a release that the pins do not take. With --quiet, MkDocs
# would count no warnings.
site: site-tools
	@NO_MKDOCS_2_WARNING=1 PYTHONPATH=.venv/site $(python) -m mkdocs build --strict

older-triton: setup
	@cmp -s requirements/triton.txt .venv/triton/pins.txt || { \
		$(python) -m pip install --quiet --no-deps --upgrade --target .venv/triton \
			--only-binary :all: --require-hashes -r requirements/triton.txt && \
		cp requirements/triton.txt .venv/triton/pins.txt; }

# The GPU machine's own Python, which has PyTorch: GPU_PYTHON=/path/to/python to choose.
GPU_PYTHON ?= python3

gpu-check:
	@$(GPU_PYTHON) scripts/gpu_check.py $(if $(PART),--part $(PART))

gpu-wheels:
	@scripts/gpu_wheels.sh

pinned := $(addprefix requirements/,cpu.txt sglang.txt datasets.txt ruler.txt fuzz.txt triton.txt \
	site.txt mooncake.txt)

# Apart from .venv, whose packages are pinned.
release_python := .venv/release/bin/python

$(release_python): pyproject.toml
	@$(python) -m venv .venv/release
	@$@ -m pip install --quiet $(shell sed -n 's/^release = \[\(.*\)\]/\1/p' pyproject.toml | sed 's|", "|" "|g')
	@touch $@

pins: setup $(release_python)
	$(release_python) -m scripts.pin_hashes $(pinned)

audit: setup $(release_python)
	$(release_python) -m pip_audit --disable-pip --no-deps \
		$(addprefix -r ,$(pinned) requirements/constraints.txt)

licences: setup
	$(python) -m scripts.make_licences docs/licences.md

wheel: setup
	@scripts/build_wheel.sh

docs: setup
	$(python) -m scripts.make_reference docs/configuration.md
	$(python) -m scripts.make_plots quality \
		bench/results/2026-11-21-eval-qwen-4k-2e9299e.json docs/images/quality.svg
	$(python) -m scripts.make_plots ruler \
		bench/results/2026-11-28-ruler-qwen-4k-67e60f6.json docs/images/ruler.svg
	$(python) -m scripts.make_plots trace \
		bench/results/2026-11-22-trace-qwen-8k-086a4a3.json docs/images/trace.svg
	$(python) -m scripts.make_plots speed \
		$(foreach case,32k-float32 32k-bfloat16 4k-resident-float32 4k-resident-bfloat16, \
		bench/results/2026-11-28-decode-$(case)-avx512-13c718b.json) docs/images/speed.svg
	$(python) -m scripts.make_plots misses $(foreach percent,5 15 50 100, \
		bench/results/2026-11-28-decode-32k-misses-$(percent)-bfloat16-avx512-4ef9af8.json) docs/images/misses.svg

clean:
	rm -rf .venv build dist *.egg-info cpu_standins/build cpu_standins/*.egg-info
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find hisparse tests -name __pycache__ -type d -prune -exec rm -rf {} +
