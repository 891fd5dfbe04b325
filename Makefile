# Each target sets up what it needs in a .venv of the project's own, and is quick when repeated.
PYTHON ?= python3.11
TORCH ?= torch==2.13.0
RANKS ?= 2
TEXT ?=
CONFIG ?= examples/zero2.json
# Releases of trainers from before the newest, on which the contract tests run too.
OLDER = transformers==5.20.2 accelerate==1.13.0
BIN = .venv/bin
SIMGPU = tests/test_simgpu.py tests/test_simgpu_faults.py tests/test_accelerator.py
# For `make accelerator`: the Python whose torch knows the accelerator. Nothing is installed.
ACCELERATOR_PYTHON ?= $(or $(wildcard $(BIN)/python),python3)
MINUTES ?= 9
OUT ?= runs/accelerator
export OMP_NUM_THREADS ?= 1

.PHONY: train test test-rest test-simgpu test-all bench accelerator lint compare docs notebook package clean

train: .venv/ready
	$(BIN)/torchrun --standalone --nproc-per-node $(RANKS) examples/train_gpt.py --config $(CONFIG) $(if $(TEXT),--text $(TEXT))

# The quick set: every two values of two axes of a test meet at least once.
test: .venv/ready
	$(BIN)/python -m pytest -q

# What `make test` leaves out: the other combinations, and what is large or long. REST_MINUTES=25: as much as starts in that time, from
# a file on that the commit picks.
test-rest: .venv/ready
	$(BIN)/python -m pytest -q --rest $(if $(REST_MINUTES),--minutes $(REST_MINUTES)) $(SIMGPU:%=--ignore=%)

# The road for accelerators on the pretended one: every body in every scheduling mode, every planted fault.
test-simgpu: .venv/ready
	$(BIN)/python -m pytest -q --all $(SIMGPU)

test-all: .venv/ready
	$(BIN)/python -m pytest -q --all

bench: .venv/ready
	$(BIN)/python benchmarks/step.py
	$(BIN)/python benchmarks/zero_redundancy.py
	$(BIN)/python benchmarks/checkpoints.py
	$(BIN)/python benchmarks/offload.py

# All that a few minutes of one accelerator can tell, into $(OUT); docs/accelerators.md says what that is.
accelerator:
	OMP_NUM_THREADS=8 $(ACCELERATOR_PYTHON) benchmarks/accelerator.py --minutes $(MINUTES) --out $(OUT)

# README's picture and table, of one run.
compare: .venv/ready
	$(BIN)/zeroshard compare --plot docs/compare.png --table docs/compare.txt

# Runs the notebook and keeps what it printed and drew, so that it reads on the web.
notebook: .venv/ready
	$(BIN)/jupyter-execute --inplace examples/zero_stage_by_stage.ipynb

# A wheel and an sdist in dist/; each is installed into a fresh environment and tried in an empty folder.
package: .venv/ready
	rm -rf dist .venv/package
	$(BIN)/python -m build --outdir dist
	$(PYTHON) -m venv .venv/package
	.venv/package/bin/pip install --quiet --disable-pip-version-check $(TORCH)
	set -e; for file in dist/*.whl dist/*.tar.gz; do \
		.venv/package/bin/pip install --quiet --disable-pip-version-check --force-reinstall --no-deps $$file; \
		.venv/package/bin/pip install --quiet --disable-pip-version-check $$file; \
		(cd "$$(mktemp -d)" && $(CURDIR)/.venv/package/bin/python -I $(CURDIR)/tests/smoke.py $(CURDIR)); \
	done

# The site, into runs/site. Strict: a broken link, or a page that no menu names, is an error.
docs: .venv/docs-ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# torch first and alone, with an exact pin: a range would take the newest build with gigabytes of CUDA packages.
.venv/ready: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[dev]"
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --upgrade --target .venv/older $(OLDER)
	touch $@

.venv/docs-ready: .venv/ready
	$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[docs]"
	touch $@

clean:
	rm -rf .venv
