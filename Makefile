# Every target but test-gpu first makes .venv and installs into it what pyproject.toml names; nothing else is needed.
PYTHON ?= python3
# A line of quantbench/device/wheels.py: cpu, volta, cuda12 or cuda13. If empty, driver and card decide.
WHEELS ?=
BIN := .venv/bin
# One thread: two threads on shared cores are 20 % noise. On a machine with a GPU the processor is not what is timed.
ifeq ($(wildcard /dev/nvidia[0-9]*),)
export OMP_NUM_THREADS ?= 1
endif

.PHONY: install check quick test test-extras test-gpu mutants bench bench-import sweep docs \
	test-aot test-volta test-cuda-wheel fuzz shelf clean

install: .venv/installed

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python quantbench/device/wheels.py $(if $(WHEELS),--line $(WHEELS)) --editable '.[dev]'
	@touch $@

# Times real work on the device at hand and leaves results/<device>/<run>/.
sweep: install
	$(BIN)/quantbench sweep --dim hidden

# Formatting, lint rules, the layers of imports, and types.
check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/mypy

# All tests, or those in TESTS, a file at a time in each of so many processes.
PROCESSES ?= 2
TESTS ?=
test: install
	$(BIN)/python -m pytest --benchmark-skip -n $(PROCESSES) --dist loadfile $(TESTS)

# The tests to run while working: all but those marked slow.
quick: install
	$(BIN)/python -m pytest --benchmark-skip -n $(PROCESSES) --dist loadfile -q -m "not slow"

# The tests that a plain `make test` skips for want of a package: Ray, public tables, what loads our exports, the site.
# vidur's own requirements are 1.3 GB. The tests of a page in a browser need Debian's packages chromium,
# and axe-core (npm install --no-save axe-core) for contrast and labels.
EXTRAS := tests/cluster/test_cluster_ray.py tests/importers tests/profile tests/project tests/report/test_report_browser.py tests/explore
.venv/extras: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,tables,ray,consumers,docs]'
	@touch $@

test-extras: .venv/extras
	QUANTBENCH_BUILD=1 $(BIN)/python -m pytest --benchmark-skip -n $(PROCESSES) --dist loadfile $(EXTRAS)

# The tests that need a GPU, with the interpreter that is there: what is right in parallel processes, which compile;
# what is measured alone. Nothing is installed; without pytest-xdist: PARALLEL=
PARALLEL ?= -n 12 --dist worksteal
test-gpu:
	$(PYTHON) -m pytest --benchmark-skip -W default -m "gpu and not gpu_timing" $(PARALLEL)
	$(PYTHON) -m pytest --benchmark-skip -W default -m gpu_timing

# Mutation testing of the core modules, on mutants drawn at random, in a clone: fails if more than 10 % survive.
MUTANTS ?= 151
mutants: install
	$(BIN)/python -m pip install --quiet --disable-pip-version-check cosmic-ray
	rm -rf build/mutants
	git clone --quiet . build/mutants
	cd build/mutants && export PATH=$(CURDIR)/$(BIN):$$PATH && \
		cosmic-ray init tools/mutants.toml session.sqlite && \
		cr-filter-operators session.sqlite tools/mutants.toml && \
		python -m tools.mutants session.sqlite $(MUTANTS) && \
		cosmic-ray exec tools/mutants.toml session.sqlite && \
		cr-report --surviving-only --show-diff session.sqlite && \
		cr-rate --fail-over 10 session.sqlite

# Kernels compiled ahead of time by one triton, 3.6 or newer, in an environment of its own: no spills, no serialised wgmma.
# `make test` compiles a few of them. QUANTBENCH_EXHAUSTIVE=1 compiles every tile in every dtype and layout.
TRITON ?= 3.6.0
.venv-aot-%/installed: Makefile
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python quantbench/device/wheels.py --line cpu triton==$* numpy setuptools pytest pytest-xdist
	@touch $@

test-aot: .venv-aot-$(TRITON)/installed
	QUANTBENCH_AOT=1 $(<D)/bin/python -m pytest -n $(PROCESSES) tests/kernels/test_compile_*.py

# The same for V100 and T4, which need triton 3.2.
test-volta: .venv-aot-3.2.0/installed
	$(<D)/bin/python -m pytest -n $(PROCESSES) tests/volta

# The CUDA build of torch, without a GPU, in an environment of its own of 5 to 8 GB: every name and call
# that the project takes from it, and every provider on fake tensors. From PyPI alone: other places may
# offer builds for the CPU.
TORCH ?= newest
.venv-cuda-%/installed: Makefile
	$(PYTHON) -m venv $(@D)
	env -u PIP_FIND_LINKS -u PIP_EXTRA_INDEX_URL PIP_CONFIG_FILE=/dev/null $(@D)/bin/python -m pip install --quiet \
		--disable-pip-version-check --index-url https://pypi.org/simple torch$(patsubst %,==%,$(filter-out newest,$*)) \
		numpy scipy psutil nvidia-ml-py setuptools pytest
	@touch $@

test-cuda-wheel: .venv-cuda-$(TORCH)/installed
	$(<D)/bin/python -m pytest tests/cuda_wheel

# The benchmark suite: pairs of sizes on both sides of predicted edges.
bench: install
	$(BIN)/python -m pytest --benchmark-only

# CPU time and memory of import, check, report and profile export at 25,000, 50,000 and 100,000 rows.
bench-import: install
	$(BIN)/python tests/benchmarks/large_import.py

# 10,000 hostile files for every loader.
FUZZ_FILES ?= 10000
fuzz: install
	QUANTBENCH_FUZZ_EXAMPLES=$(FUZZ_FILES) $(BIN)/python -m pytest tests/project/test_fuzz_loaders.py

# README's samples, the main table of docs/accuracy.md, the list in docs/api.md, and the pictures.
docs: install
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[tables,docs]'
	mkdir -p build && $(BIN)/python -m tools.accuracy.page docs/accuracy.md
	$(BIN)/python -m tools.guide.front
	$(BIN)/python -m tools.guide.api
	$(BIN)/python -m tools.guide.explorer
	$(BIN)/python -m mkdocs build --strict --quiet --config-file docs/site/mkdocs.yml
	$(BIN)/python -m tools.guide.explorer build/site/explore.html

# The profiles of GPUs that public tables are of: results/<gpu>/profile.json.
shelf: install
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[tables]'
	$(BIN)/python -m tools.shelf

clean:
	rm -rf .venv .venv-aot-* .venv-cuda-* build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
