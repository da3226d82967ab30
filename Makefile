# make demo   install into .venv, plan and train a real model on 8 virtual CPU devices
# make test   install into .venv and run the tests, without those marked slow
# make test-all  all tests
# make quick  the tests of a change in the planner, in less than 90 seconds on two cores
# make zoo    plan, run and compare some 170 small programs, print the table
# make gallery  models of published packages: planned at real size, run at a small one
# make test-hosts  the tests of several processes and hosts, with every launcher that is there
# make test-ps  the tests of parameter servers, on Ray too
# make docs   build the documentation into build/docs, warnings are errors
# make reports  the documentation with the reports that it shows
# make release-check  build the wheel and the sdist, install and use each outside of the checkout
# make check  exactly what CI runs: format, types, borders, documentation, tests
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test quick test-all test-hosts test-ps zoo gallery gallery-packages release-check check lint docs reports benchmarks clean
.DELETE_ON_ERROR:

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("meshwright needs Python 3.11 or newer, got " + sys.version) if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[examples,test]'
	touch $@

$(VENV)/.lint: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[lint]'
	touch $@

demo: $(VENV)/.installed
	$(BIN)/planner inspect examples/gpt.py --cluster cpu:8
	$(BIN)/python examples/gpt.py --devices 8

test: $(VENV)/.installed
	$(BIN)/python -m pytest -n auto --maxprocesses 4

quick: $(VENV)/.installed
	$(BIN)/python -m pytest -n auto --maxprocesses 4 -m 'not slow and not long' \
	  tests/planner tests/costmodels tests/test_borders.py tests/test_docs.py

test-all: $(VENV)/.installed
	$(BIN)/python -m pytest -n auto --maxprocesses 4 -m ''

zoo: $(VENV)/.installed
	$(BIN)/python -m tests.zoo

$(VENV)/.gallery: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[gallery]'
	touch $@

gallery: $(VENV)/.gallery
	$(BIN)/python benchmarks/gallery.py

gallery-packages:  # without them the tests of the gallery are skipped
	-$(MAKE) $(VENV)/.gallery

$(VENV)/.hosts: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[k8s,ray]'
	touch $@

test-hosts: $(VENV)/.hosts
	$(BIN)/python -m pytest -m '' -rs tests/executor/test_roles.py tests/executor/test_hosts.py \
	  tests/executor/test_peers.py tests/executor/test_launch*.py tests/executor/test_data*.py \
	  tests/executor/test_checkpoint*.py \
	  tests/executor/test_train.py tests/executor/test_preempt.py tests/executor/test_faults.py

test-ps: $(VENV)/.hosts
	$(BIN)/python -m pytest -m '' -rs tests/executor/parameter_server tests/executor/test_launch_ps.py

lint: $(VENV)/.lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy --config-file benchmarks/mypy.ini
	$(BIN)/lint-imports

$(VENV)/.docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[docs]'
	touch $@

docs: $(VENV)/.docs
	JAX_PLATFORMS=cpu $(BIN)/sphinx-build -q -W --keep-going -b html docs build/docs

reports: docs  # those that the documentation shows
	mkdir -p build/docs/reports
	$(BIN)/planner inspect examples/gpt.py --cluster h100:8x4 --html build/docs/reports/gpt.html >/dev/null
	$(BIN)/planner inspect examples/llama.py:step --cluster v5p:4x4x4 --html build/docs/reports/llama-8b.html -- --size 8b --batch 256 >/dev/null
	$(BIN)/planner inspect examples/moe.py --cluster h100:8 --html build/docs/reports/moe.html >/dev/null
	$(BIN)/planner compare examples/gpt.py --cluster h100:8 --cluster v5e:2x4 --cluster b200:8 --batch 64,128 --html build/docs/reports/clusters.html >/dev/null

release-check:  # RELEASE_PYTHONS: those to install on, such as "python3.11 python3.12 python3.13"
	$(PYTHON) tests/release_check.py $(RELEASE_PYTHONS)

check: lint docs gallery-packages test

benchmarks: $(VENV)/.installed
	$(BIN)/python benchmarks/planning_time.py
	$(BIN)/python benchmarks/step_overhead.py
	$(BIN)/python benchmarks/chosen_vs_manual.py

clean:
	rm -rf $(VENV) build dist *.egg-info
