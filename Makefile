# Two commands on a fresh clone:  make run   and   make test
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: run test test-slow test-nightly check proof mutants native chromium clean
run: $(VENV)/.installed-all
	$(BIN)/ingot quickstart

# tests/conftest.py sets the number of workers, and tests/schedule.py the order of files, each of which one worker plays.
# DONE=FILE leaves out the tests whose names are lines of FILE.
PYTEST := $(BIN)/python -m pytest -n auto --durations=60 --durations-min=2
test: $(VENV)/.installed-dev
	$(PYTEST) -m "not slow and not nightly" $(if $(DONE),--except=$(DONE))

# The tests that take seconds each: they compile, start many ranks or kill runs; .ci/run runs them too.
test-slow: $(VENV)/.installed-dev
	$(PYTEST) -m "slow and not nightly"

# Whole matrices of layouts on real ranks, of which `make test` runs a part; .ci/nightly runs them too.
test-nightly: $(VENV)/.installed-dev
	$(PYTEST) -m nightly

check: $(VENV)/.installed-dev
	./check

# Every composition of parallelism against one process; writes the table in docs/parallelism.md.
proof: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m proof

# Planted faults that the tests must see (docs/mutants.md); NAMES="rotary zero" chooses by name.
mutants: $(VENV)/.installed-dev
	$(BIN)/python -m tests.mutants $(NAMES)

# The browser that the planner's page is tested in (tests/web skip without it); Debian and Ubuntu, as root.
chromium:
	command -v chromium || { apt-get update -q && \
	  DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends chromium fonts-dejavu-core; }

# One environment, made again when the requirements change. `dev` contains everything `all` has.
$(VENV)/.installed-%: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[$*]'
	touch $@

# The compiled core again, after a change of its C files (installing ingot builds it too).
NATIVE := $(patsubst src/ingot/data/native/%.c,src/ingot/data/native/_%.abi3.so,$(wildcard src/ingot/data/native/*.c))
native: $(NATIVE)
src/ingot/data/native/_%.abi3.so: src/ingot/data/native/%.c
	$(CC) -O3 -Wall -Wextra -shared -fPIC -DPy_LIMITED_API=0x030B0000 \
	  -I$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("include"))') -o $@.tmp $< && mv $@.tmp $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache
