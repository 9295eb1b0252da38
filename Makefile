# make demo: the whole of chapter 1 on the tales world, offline once installed.
# make demo-tldr: the whole of chapter 2 there.    make demo-rlvr: chapter 3, on word problems.    make test: the tests.
# make check: lint, and whether the algorithm still holds, in less than a minute.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
THREADS := $(shell nproc 2>/dev/null || sysctl -n hw.ncpu)

.PHONY: demo demo-tldr demo-rlvr hub-check test check lint install

LAUNCH := $(BIN)/accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no \
	--num_cpu_threads_per_process $(THREADS)

demo: $(VENV)/installed
	$(BIN)/python ppo_rlhf/worlds/tales.py
	$(LAUNCH) ppo_rlhf/train_both.py --preset tales
	$(BIN)/python ppo_rlhf/report.py

demo-tldr: $(VENV)/installed
	$(BIN)/python ppo_rlhf/worlds/posts.py
	$(LAUNCH) ppo_rlhf/tldr_all.py --preset tales
	$(BIN)/python ppo_rlhf/report.py

demo-rlvr: $(VENV)/installed
	$(BIN)/python ppo_rlhf/worlds/sums.py
	$(LAUNCH) ppo_rlhf/rlvr_policy.py --preset sums
	$(BIN)/python ppo_rlhf/report.py

# Is everything that the presets take from the hub there?
hub-check: $(VENV)/installed
	$(BIN)/python benchmark/hub_check.py

# Two files of tests at a time, in the order of tests/conftest.py.
WORKERS := --numprocesses 2 --dist loadfile --no-loadscope-reorder

test: install
	$(BIN)/python -m pytest $(WORKERS)

# For whoever edits: golden numbers and mistakes that they reject, agreement of the chapters, who imports whom.
check: lint
	$(BIN)/python -m pytest $(WORKERS) --quiet tests/test_golden.py tests/test_golden_tldr.py \
		tests/test_golden_verl.py tests/test_copies.py tests/test_house.py

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

install: $(VENV)/tested

# The versions of poetry.lock. torch goes first, so that a CPU build that is at hand is not replaced.
$(VENV)/installed: pyproject.toml poetry.lock
	$(PYTHON) -m venv $(VENV)
	$(PYTHON) .ci/constraints.py > $(VENV)/constraints.txt
	$(BIN)/python -m pip install --quiet --constraint $(VENV)/constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint $(VENV)/constraints.txt --editable '.[report]'
	touch $@

# What the tests and benchmark/ need besides.
$(VENV)/tested: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --constraint $(VENV)/constraints.txt --editable '.[dev,benchmark]'
	touch $@
