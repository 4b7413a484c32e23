# make demo: install, prepare, train and show, in one go.   make test: install what the tests need and run them.
# make test-fast: what needs no processes and no compiler, for the time between two edits.
# make docs: the documentation as a site, in site/.
# make torture: the promises again, with kill after kill, in at most GPTMILL_TORTURE_MINUTES, 40 if it is not set.
# make digests BASE=COMMIT: whether the bytes of runs, corpora and exports are still that commit's; ROOM=data for some.
# make size: lines, code and tokens of each room; with BASE=COMMIT, the difference.
# make wheel: sdist and wheel, in dist/.   make wheel-test: that wheel in an empty environment, tried out.
PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
UNUSED = /(scipy|sklearn|nltk|tests?|transformers/models|lm_eval/tasks)/
PIP = $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS)

.PHONY: demo test test-fast torture digests size wheel wheel-test lint docs clean
demo: $(VENV)/.installed
	$(VENV)/bin/gptmill train demo

test: $(VENV)/.installed-dev
	env -u PYTHONDONTWRITEBYTECODE $(VENV)/bin/python -m pytest -n 3

test-fast: $(VENV)/.installed-dev
	env -u PYTHONDONTWRITEBYTECODE $(VENV)/bin/python -m pytest -n 2 -m 'not slow and not torture'

torture: $(VENV)/.installed-dev
	$(VENV)/bin/python -m pytest -m torture -s --timeout 3600 -o faulthandler_timeout=0

digests: $(VENV)/.installed-dev
	$(VENV)/bin/python tests/digests.py $(BASE) $(if $(ROOM),--room $(ROOM))

size:
	$(PYTHON) tests/size.py $(if $(BASE),--base $(BASE))

wheel: | $(VENV)/bin/python
	rm -rf dist
	$(VENV)/bin/python -m venv build/tools
	build/tools/bin/python -m pip install --quiet --disable-pip-version-check build
	build/tools/bin/python -m build

wheel-test: wheel $(VENV)/.installed-dev
	rm -rf build/wheel
	$(VENV)/bin/python -m venv build/wheel
	build/wheel/bin/python -m pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS) dist/*.whl
	GPTMILL_WHEEL_PYTHON=build/wheel/bin/python $(VENV)/bin/python -m pytest -m wheel tests/contracts/test_wheel.py

lint: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy

docs: $(VENV)/.installed-docs
	$(VENV)/bin/python docs/site/reference.py
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

clean:
	rm -rf $(VENV) build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "gptmill needs Python 3.11 or newer; name one with: make demo PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml $(CONSTRAINTS) | $(VENV)/bin/python
	@echo "installing into $(VENV) (a few minutes, once)"
	$(PIP) --editable .
	@touch $@

$(VENV)/.installed-docs: pyproject.toml $(CONSTRAINTS) | $(VENV)/.installed
	$(PIP) --editable '.[docs]'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml $(CONSTRAINTS) | $(VENV)/bin/python
	@echo "installing into $(VENV) (a few minutes, once)"
	$(PIP) --no-compile --editable '.[dev]'
	@$(VENV)/bin/python -W ignore -m compileall -q -j 0 -x '$(UNUSED)' $(VENV)/lib >/dev/null 2>&1 || true  # on all cores, which pip does not
	@touch $@ $(VENV)/.installed
