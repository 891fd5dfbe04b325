# Each target sets up what it needs in the project's own .venv, and is quick when repeated. pip prints errors only (-qq).
PYTHON ?= python3.11
TORCH ?= torch==2.13.0
RANKS ?= 2
TEXT ?=
SIZE ?= 1M
CONFIG ?= examples/zero2.json
MUTANTS ?=
PARTS ?=
# The oldest releases of trainers that pyproject.toml allows; the contract tests run on them too.
OLDER = $(shell sed -n '/^torch=/d; /==/p' requirements/oldest.txt)
# LLaMA-Factory, for the contract test, beside the libraries of .venv and without those that only its v0 and its web pages need.
LLAMA_FACTORY = $(shell sed -n '/==/p' requirements/llama_factory.txt)
# verl, for its contract test, in the same way. It imports Ray, which takes 240 MB.
VERL = $(shell sed -n '/==/p' requirements/verl.txt)
BIN = .venv/bin
# Processes that test at the same time. Some tests wait, and each has ranks of its own: 2 cores are busy with 3 processes, and
# take 10 % longer with 4, since ranks then wait for their turn to answer each other.
JOBS ?= 3
PYTEST = $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal
# For `make accelerator`: the Python whose torch knows the accelerator. Nothing is installed.
ACCELERATOR_PYTHON ?= $(or $(wildcard $(BIN)/python),python3)
MINUTES ?= 9
PART ?=
ROWS ?=
# For `make wheels`: the other machine's Python, and the libraries that it lacks.
FOR_PYTHON ?= 3.12
CARRIED ?= pydantic json5
OUT ?= runs/accelerator
export OMP_NUM_THREADS ?= 1
# The tests start many processes: each module is compiled once, not once in each of them.
unexport PYTHONDONTWRITEBYTECODE

# The tests to run while editing: imports between packages, configs, errors, layout, every stage against plain training, a checkpoint.
SMOKE = tests/project/test_architecture.py tests/engine/test_config.py tests/core/test_errors.py tests/promises/test_equality.py::test_models \
	tests/promises/test_memory_and_bytes.py::test_the_layout_pads_less_than_a_line_per_shard_and_parameter \
	tests/checkpoint/test_checkpoints.py::test_an_engine_resumes_bit_for_bit
# Variants of `make test-anywhere`; default: all. tests/support/anywhere.py lists them.
VARIANTS ?=

.PHONY: train smoke test test-rest test-all test-anywhere test-oldest test-newest coverage mutants bench accelerator accelerator-page wheels lint compare docs notebook package clean

# About two minutes of training on any machine: it times a few steps, and chooses their number. `zeroshard run` is torchrun that
# ends quietly at Ctrl-C.
train: .venv/light
	$(BIN)/zeroshard run --standalone --nproc-per-node $(RANKS) examples/train_gpt.py --config $(CONFIG) --size $(SIZE) $(if $(TEXT),--text $(TEXT))

smoke: .venv/ready
	$(PYTEST) -n 2 $(SMOKE)

# The quick set: each promise of docs/design.md with each value of each parameter, and one case of every other test.
test: .venv/ready .venv/simgpu
	$(PYTEST)

# The rest: of each test every two values of two parameters together, of one marked `every` all combinations; and what is large or
# long. Other combinations of three values or more run in neither.
test-rest: .venv/ready .venv/simgpu .venv/verl/ready
	$(PYTEST) --rest

# Both. The rest runs after a failure of the quick set, too: one failure hides no other.
test-all: .venv/ready .venv/simgpu .venv/verl/ready
	status=0; $(PYTEST) || status=1; $(PYTEST) --rest || status=1; exit $$status

# The quick set on the oldest or the newest releases, which requirements/ names. Each takes 6 GB: these torches bring CUDA.
test-oldest test-newest: test-%: .venv/%/ready
	PATH="$(CURDIR)/.venv/$*/bin:$$PATH" .venv/$*/bin/python -m pytest -q -n $(JOBS) --dist worksteal

# The quick set as other machines and users would run it. Each variant prints one line; PARTS: some of the tests only.
test-anywhere: .venv/ready .venv/simgpu
	JOBS=$(JOBS) $(BIN)/python tests/support/anywhere.py $(VARIANTS) -- $(PARTS)

# Measures which lines of zeroshard/ the quick set runs, in ranks, too. PARTS: some of the tests only.
coverage: .venv/ready .venv/simgpu
	rm -rf runs/coverage
	mkdir -p runs/coverage
	status=0; $(BIN)/coverage run -m pytest -q -n $(JOBS) --dist worksteal $(PARTS) || status=$$?; \
		$(BIN)/coverage combine --quiet && $(BIN)/coverage report --skip-covered --sort cover; exit $$status

# Plants single-line faults in a copy of the core and lists those that the quick set does not find. Takes hours.
mutants: .venv/ready .venv/simgpu
	$(BIN)/python tests/support/mutants.py $(MUTANTS)

bench: .venv/ready
	$(BIN)/python benchmarks/step.py
	$(BIN)/python benchmarks/zero_redundancy.py
	$(BIN)/python benchmarks/checkpoints.py
	$(BIN)/python benchmarks/offload.py

# Measures on one accelerator, into $(OUT): PART=facts, right, memory, speed or offload, each $(MINUTES) minutes at most; default: all.
# ROWS="7 8" runs these rows of the part offload, and keeps the others. benchmarks/results/README.md lists the measurements of each part.
accelerator:
	env -u OMP_NUM_THREADS $(ACCELERATOR_PYTHON) benchmarks/accelerator.py $(if $(PART),--part $(PART)) $(if $(ROWS),--rows $(ROWS)) --minutes $(MINUTES) --out $(OUT)

# Fills benchmarks/results/accelerator.md with the figures in $(OUT).
accelerator-page:
	$(ACCELERATOR_PYTHON) benchmarks/accelerator_page.py $(OUT)/results.json benchmarks/results/accelerator.md

# Wheels of the libraries that a machine with an accelerator may lack, for its Python, in $(OUT)/wheels.
wheels: .venv/ready
	$(BIN)/pip download --quiet --disable-pip-version-check --dest $(OUT)/wheels --only-binary :all: \
		--platform manylinux2014_x86_64 --python-version $(FOR_PYTHON) $(CARRIED)

# README's picture and table, of one run.
compare: .venv/ready
	$(BIN)/python examples/compare.py --plot docs/compare.png --table docs/compare.txt

# Runs the notebook and keeps what it printed and drew, so that it reads on the web.
notebook: .venv/ready
	$(BIN)/jupyter-execute --inplace examples/zero_stage_by_stage.ipynb

# A wheel and an sdist in dist/ that indexes accept; each is installed into a fresh environment and tried in an empty folder.
package: .venv/ready
	rm -rf dist .venv/package
	$(BIN)/python -m build --outdir dist
	$(BIN)/twine check --strict dist/*
	$(PYTHON) -m venv .venv/package
	.venv/package/bin/pip install -qq --disable-pip-version-check $(TORCH)
	set -e; for file in dist/*.whl dist/*.tar.gz; do \
		.venv/package/bin/pip install -qq --disable-pip-version-check --force-reinstall --no-deps $$file; \
		.venv/package/bin/pip install -qq --disable-pip-version-check $$file; \
		(cd "$$(mktemp -d)" && $(CURDIR)/.venv/package/bin/python -I $(CURDIR)/tests/support/smoke.py $(CURDIR)); \
	done

# The site, into runs/site; sets up only what builds it. Strict: a broken link, or a page that no menu names, is an error.
docs: .venv/docs/ready
	NO_MKDOCS_2_WARNING=1 .venv/docs/bin/mkdocs build --strict

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# What training needs. torch first and alone, with an exact pin: a range would take the newest build with gigabytes of CUDA packages.
.venv/light: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -qq --disable-pip-version-check $(TORCH)
	$(BIN)/pip install -qq --disable-pip-version-check --editable ".[plots]"
	touch $@

# What tests, checks and benchmarks need, too.
.venv/ready: .venv/light requirements/oldest.txt requirements/llama_factory.txt
	$(BIN)/pip install -qq --disable-pip-version-check --editable ".[dev]"
	$(BIN)/pip install -qq --disable-pip-version-check --no-deps --upgrade --target .venv/older $(OLDER)
	$(BIN)/pip install -qq --disable-pip-version-check --no-deps --upgrade --target .venv/llama_factory $(LLAMA_FACTORY)
	touch $@

.venv/verl/ready: .venv/ready requirements/verl.txt
	$(BIN)/pip install -qq --disable-pip-version-check --no-deps --upgrade --target .venv/verl $(VERL)
	touch $@

# The simulated accelerator of the tests.
.venv/simgpu: .venv/ready tests/support/simgpu/build.py $(wildcard tests/support/simgpu/csrc/*)
	PYTHONPATH=tests/support $(BIN)/python -c "from simgpu import build; build.why_not() or build.build()"
	touch $@

.venv/oldest/ready .venv/newest/ready: .venv/%/ready: pyproject.toml requirements/%.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install -qq --disable-pip-version-check --requirement requirements/$*.txt --editable ".[dev]"
	touch $@

# The site reads zeroshard's source and imports nothing of it: the extra `docs` alone, without torch and what zeroshard needs.
.venv/docs/ready: pyproject.toml
	$(PYTHON) -m venv .venv/docs
	$(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' > .venv/docs/needed.txt
	.venv/docs/bin/pip install -qq --disable-pip-version-check --requirement .venv/docs/needed.txt
	touch $@

clean:
	rm -rf .venv
