# make quickstart | test | distributed | check | docs | clean.  PYTHON chooses the interpreter, ARGS adds arguments:
#   make quickstart ARGS=--fresh PYTHON=python3.12
PYTHON ?= python3
ARGS ?=

# Only for the commands that run in the environment: PYTHON must be found outside of it.
IN_VENV := PATH="$(CURDIR)/.venv/bin:$$PATH"
READY := .venv/ready

# Tests start many processes, each of which would compile the packages anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: quickstart test distributed check docs clean

quickstart: $(READY)
	$(IN_VENV) headstart quickstart $(ARGS)

test: $(READY)
	$(IN_VENV) pytest -n auto $(ARGS)

# Runs of several processes: one at a time, after the others.
distributed: $(READY)
	$(IN_VENV) pytest -m 'distributed and not proof' $(ARGS)

check: $(READY)
	$(IN_VENV) ruff check .
	$(IN_VENV) ruff format --check .
	$(IN_VENV) pyright

# The documentation as a site, in build/site.
docs: $(READY)
	$(IN_VENV) python -m pip install --quiet -c constraints.txt -e '.[docs]'
	$(IN_VENV) NO_MKDOCS_2_WARNING=1 python -m mkdocs build $(ARGS)

# Brought up to date whenever what it is made from changes.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "headstart needs Python 3.11 or newer, and $(PYTHON) is not; try PYTHON=python3.12" >&2; exit 1; }
	[ -x .venv/bin/python ] || $(PYTHON) -m venv --clear .venv
	$(IN_VENV) python -m pip install -c constraints.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf .venv .venv-speculators build dist *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
