# The verbs of the project; CI calls the same ones. Needs only make and Python >= 3.11.
#   make demo PYTHON=/path/to/python3.12     picks the interpreter that .venv is made from
#   make test ARGS="-k kv -x"                hands arguments to pytest

PYTHON ?=
ARGS ?=
PY := .venv/bin/python
PIP_INSTALL := $(PY) -m pip install -qq --disable-pip-version-check -c constraints.txt
PYTEST := $(PY) -m pytest -n 2

.PHONY: help demo test check stats bench golden schema clean
.DELETE_ON_ERROR:

help:
	@echo "make demo     install the core, simulate a load peak, print the comparison"
	@echo "make test     install what the tests need, run them"
	@echo "make check    ruff, mypy --strict, import-linter"
	@echo "make stats    the statistical tests, on fresh seeds"
	@echo "make bench    speed, as ratios measured on this machine"
	@echo "make golden   record the golden files anew; look at the diff before committing"
	@echo "make schema   write scenarios/schema.json"
	@echo "make clean    remove caches and build outputs; .venv and runs/ stay"

demo: .venv/.core-stamp
	$(PY) -m sim.run scenarios/flash_peak.yaml

test: .venv/.dev-stamp
	$(PYTEST) $(ARGS)

check: .venv/.dev-stamp
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy --strict
	.venv/bin/lint-imports --no-logo

stats: .venv/.dev-stamp
	$(PYTEST) -m stats --seed-root=fresh --hypothesis-profile=fresh $(ARGS)

bench: .venv/.core-stamp
	$(PY) -m bench $(ARGS)

golden: .venv/.dev-stamp
	$(PY) -m pytest tests/golden --update-golden $(ARGS)
	git status --short -- tests/golden

schema: .venv/.core-stamp
	$(PY) -m sim.schema > scenarios/.schema.json.tmp
	mv scenarios/.schema.json.tmp scenarios/schema.json

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -path ./.venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

# ---- the environment: made once; installed anew only when pyproject.toml or constraints.txt changed

.venv/.made-stamp:
	@if ! $(PY) -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    found=; \
	    for python in $(if $(PYTHON),"$(PYTHON)",python3 python3.14 python3.13 python3.12 python3.11 python); do \
	        if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	            found=$$python; break; \
	        fi; \
	    done; \
	    if [ -z "$$found" ]; then \
	        echo "error: no Python >= 3.11 found$(if $(PYTHON), at PYTHON=$(PYTHON)); name one with: make PYTHON=/path/to/python3" >&2; \
	        exit 1; \
	    fi; \
	    echo "making .venv with $$("$$found" --version)"; \
	    "$$found" -m venv --clear .venv; \
	fi
	@touch $@

.venv/.core-stamp: pyproject.toml constraints.txt | .venv/.made-stamp
	@echo "installing the core into .venv (once)"
	@$(PIP_INSTALL) -e .
	@touch $@

.venv/.dev-stamp: pyproject.toml constraints.txt | .venv/.made-stamp
	@echo "installing the core, the decoder, Ray and the tools into .venv (once; torch is large)"
	@$(PIP_INSTALL) -e '.[decoder,dev,ray]'
	@touch .venv/.core-stamp $@
