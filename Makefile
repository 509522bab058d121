# Two commands need nothing but Python 3.11 (with venv) and make:
#   make demo    installs, runs a small real study, ends with its headline and the report's path
#   make test    installs, lints, checks types and import contracts, tests (SLOW=1: all tests)

PYTHON ?= python3
VENV ?= .venv
COMPAT := $(VENV)-compat
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check install --quiet
# Processes that run groups of tests beside each other (tests/conftest.py): two more than the two cores that CI
# has, because tests of Slurm and of launches mostly wait.
WORKERS ?= 4
# PERF_BRIEF: benchmarks are to run, here; `make perf` measures.
PYTEST := PERF_BRIEF=1 OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) --dist loadgroup --no-loadscope-reorder

# Where the environment forbids Python to write bytecode, each process of the tests would compile all it imports.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test coverage quick seam compat engines programs planted grid knee gallery soak resume lint types contracts \
  perf perf-gate gpu reference docs format constraints clean

demo: $(VENV)/.installed
	$(BIN)/bench matrix docs/studies/demo.yaml

test: lint types contracts
	$(PYTEST) -m "$(if $(SLOW),not long,not slow)"

# Branch coverage of the tests' own processes, apart from `test` because tracing doubles the time of quick tests.
coverage: $(VENV)/.installed-dev
	$(PYTEST) -q -m "$(if $(SLOW),not long,not slow)" --cov --cov-report=term:skip-covered

# The tests alone, without the slow ones.
quick: $(VENV)/.installed-dev
	$(PYTEST) -m "not slow" -q

# The core's quick tests in copies of the tree that lack one feature each, or those that FEATURE names.
seam: $(VENV)/.installed-dev
	PERF_BRIEF=1 $(BIN)/python tests/features/without.py $(FEATURE)

# Every defect of tests/planted/defects.toml, one at a time, against the tests that must catch it.
planted: $(VENV)/.installed-dev
	$(BIN)/python tests/planted/plant.py $(WORDS)

# Every row of tests/worker/grid.txt, on up to 8 real ranks whatever the cores: proven, or refused before the launch.
grid: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/pytest -v -n 0 tests/worker/test_grid.py

# How often the size that a report names is the true one, and the band of a replay holds the truth, on generated studies
# (docs/evidence.md).
knee: $(VENV)/.installed
	$(BIN)/python tests/reports/knee_quality.py
	for table in $(wildcard tests/features/*/bands.py); do $(BIN)/python $$table || exit; done

# Pictures of the report's sections for docs/report.md, of a generated study, by Chromium.
gallery: $(VENV)/.installed-dev
	PYTHONPATH=tests/laws $(BIN)/python tests/reports/gallery.py

# The long forms of slow tests, then random faults at random moments, and a Markdown table of what they did. The same
# command continues a soak that was stopped. ROUNDS on this machine and as many on the tests' Slurm; SEED draws the faults and their moments.
ROUNDS ?= 100
SEED ?= 1
soak: $(VENV)/.installed-dev
	$(PYTEST) -q -m long --ignore tests/features/slurm/test_soak.py
	OMP_NUM_THREADS=1 SOAK_LEDGER=soak-$(SEED).jsonl SOAK_ROUNDS=$(ROUNDS) SOAK_SEED=$(SEED) \
	  $(BIN)/pytest -q tests/features/slurm/test_soak.py -m long; \
	$(BIN)/python tests/features/slurm/soak_table.py soak-$(SEED).jsonl

# Training runs killed at random moments and resumed, for SECONDS_OF_KILLS; the same command goes on with the next ones.
SECONDS_OF_KILLS ?= 600
resume: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python tests/strategies/resume_soak.py --seconds $(SECONDS_OF_KILLS) --seed $(SEED) \
	  --ledger resume-$(SEED).jsonl

lint: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

contracts: $(VENV)/.installed-dev
	$(BIN)/lint-imports

# What a machine with a GPU can show in MINUTES (tests/gpu/acceptance.py), environment included; a sentence where
# there is none. The same command continues. PARTS names some of its parts; ARCHIVE packs all that it found into one
# file; WHEELS is a folder with the packages that a machine without a network lacks; DEVICE=cpu runs small models.
MINUTES ?= 30
BEGAN := $(shell date +%s)
gpu: $(VENV)-gpu/.installed
	$(VENV)-gpu/bin/python tests/gpu/acceptance.py $(PARTS) --minutes $(MINUTES) --began $(BEGAN) \
	  --command "make gpu $(filter-out MINUTES=%,$(MAKEOVERRIDES))" $(if $(DEVICE),--device $(DEVICE)) \
	  $(if $(ARCHIVE),--archive $(ARCHIVE))

# Another version of torch or Python, in one environment that is replaced when either changes (a CUDA build takes
# about 5 GB): a study of every strategy on two ranks, and the quick tests of strategies and workloads.
compat: $(COMPAT)/.torch-$(TORCH)-$(subst /,_,$(PYTHON))
	OMP_NUM_THREADS=1 $(COMPAT)/bin/bench matrix docs/studies/strategies.yaml --name compat --workload gpt-nano \
	  --gpus 1,2 --repeats 1 --budget 1s --out runs/compat-$(TORCH)
	OMP_NUM_THREADS=1 $(COMPAT)/bin/pytest -n $(WORKERS) --dist loadgroup --no-loadscope-reorder -q -m "not slow" \
	  tests/strategies tests/workloads tests/worker/test_crew.py tests/worker/test_exchange.py
	OMP_NUM_THREADS=1 $(COMPAT)/bin/pytest -q -m "not long" tests/worker/test_streams.py

$(COMPAT)/.torch-$(TORCH)-$(subst /,_,$(PYTHON)): pyproject.toml
	@test -n "$(TORCH)" || { echo "give a version of torch: make compat TORCH=2.15.0"; exit 2; }
	@$(PYTHON) -c "" 2>/dev/null || { echo "$(PYTHON) does not run: install it, or give another PYTHON"; exit 2; }
	rm -rf $(COMPAT)
	$(PYTHON) -m venv $(COMPAT)
	$(COMPAT)/bin/pip --disable-pip-version-check install --quiet 'torch==$(TORCH)' --editable '.[dev]'
	touch $@

# The engines of docs/engines.md, and their tests, in an environment of its own over the packages of the first one.
ENGINES := $(VENV)-engines
engines: $(ENGINES)/.installed
	PERF_BRIEF=1 OMP_NUM_THREADS=1 $(ENGINES)/bin/python -m pytest -q -m "not slow" tests/engines

$(ENGINES)/.installed: $(VENV)/.installed-dev
	$(BIN)/python -m venv --clear $(ENGINES)
	$(BIN)/python -c "import site; print(site.getsitepackages()[0])" \
	  > "$$($(ENGINES)/bin/python -c 'import site; print(site.getsitepackages()[0])')/first.pth"
	$(ENGINES)/bin/pip --disable-pip-version-check install --quiet setuptools wheel
	DS_ACCELERATOR=cpu $(ENGINES)/bin/pip --disable-pip-version-check install --quiet --no-build-isolation \
	  --constraint constraints.txt 'deepspeed==0.19.8'
	touch $@

# Programs and models that others wrote, under bench (docs/programs.md), and uploads to trackers, in an environment like that of
# engines. DeepSpeed's program runs in theirs, if it is there. torchtitan lends its log line alone: it needs a GPU to run.
PROGRAMS := $(VENV)-programs
TRACKERS := $(wildcard tests/features/trackers/requirements.txt)
programs: $(PROGRAMS)/.installed
	FOREIGN=1 PERF_BRIEF=1 OMP_NUM_THREADS=1 $(BIN)/pytest -q -m "not long" tests/features/programs/test_foreign.py
	PERF_BRIEF=1 OMP_NUM_THREADS=1 $(PROGRAMS)/bin/python -m pytest -q tests/worker/test_transformers_models.py
	$(if $(TRACKERS),PERF_BRIEF=1 OMP_NUM_THREADS=1 $(PROGRAMS)/bin/python -m pytest -q -m "not long" $(dir $(TRACKERS)))

$(PROGRAMS)/.installed: $(VENV)/.installed-dev tests/features/programs/foreign/requirements.txt $(TRACKERS)
	$(BIN)/python -m venv --clear $(PROGRAMS)
	$(BIN)/python -c "import site; print(site.getsitepackages()[0])" \
	  > "$$($(PROGRAMS)/bin/python -c 'import site; print(site.getsitepackages()[0])')/first.pth"
	$(PROGRAMS)/bin/pip --disable-pip-version-check install --quiet --constraint constraints.txt \
	  $(addprefix --requirement ,$(filter %.txt,$^))
	$(PROGRAMS)/bin/pip --disable-pip-version-check install --quiet --no-deps 'torchtitan==0.3.0'
	touch $@

# The speed and memory goals of docs/evidence.md, measured on this machine.
perf: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/perf tests/features/*/test_*_speed.py -s

# The CPU time of the benchmarks of tests/perf in PERF_RUNS processes, one after another, against BASE: the tracked
# baseline `perf`, or a folder that an earlier call has left (docs/gate.md).
PERF_RUNS ?= 5
PERF_TESTS ?= tests/perf/test_plan_speed.py tests/perf/test_command_speed.py tests/perf/test_report_speed.py
BASE ?= perf
perf-gate: $(VENV)/.installed-dev
	rm -rf .benchmarks/gate && mkdir -p .benchmarks/gate
	for run in $$(seq $(PERF_RUNS)); do PYTHONPATH=tests/perf OMP_NUM_THREADS=1 $(BIN)/pytest -q $(PERF_TESTS) \
	  --benchmark-timer=cpu_time.cpu_s \
	  --benchmark-json .benchmarks/gate/$$run.json || exit; done
	$(BIN)/bench compare $(BASE) .benchmarks/gate

# docs/options.md, from the declarations of the options.
reference: $(VENV)/.installed
	$(BIN)/python -m harness.launchers.reference > docs/options.md

# Build the docs as a site in site/; a warning is an error.
docs: $(VENV)/.installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --site-dir site

format: $(VENV)/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The versions that everything is installed with: those that an installation without them gets today.
constraints:
	rm -rf $(VENV)-new
	$(PYTHON) -m venv $(VENV)-new
	$(VENV)-new/bin/pip --disable-pip-version-check install --quiet '.[dev]'
	{ echo '# Written by `make constraints`.'; \
	  $(VENV)-new/bin/pip freeze --exclude bench | sed 's/+cpu$$//'; } > constraints.txt
	rm -rf $(VENV)-new

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --constraint constraints.txt --editable .
	touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --constraint constraints.txt --editable '.[dev]'
	touch $@ $(VENV)/.installed

# With the torch of PYTHON, which fits its driver.
$(VENV)-gpu/.installed: pyproject.toml tests/gpu/environment.py
	$(PYTHON) tests/gpu/environment.py $(VENV)-gpu $(WHEELS)
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-gpu $(COMPAT) $(ENGINES) $(PROGRAMS) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .benchmarks .coverage* site
