# Thin names over plain commands; README.md shows them without make.
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# A folder of its own for each run: nothing is overwritten.
RUN := runs/quickstart-$(shell date +%Y%m%d-%H%M%S)

.PHONY: help quickstart test lint install

help:
	@echo "make quickstart   install, train on real digits with 2 processes, show the result"
	@echo "make test         install, lint, run every test"
	@echo "make lint         ruff and codespell"

install: $(STAMP)

# Installed once; again only when what is pinned changes.
$(STAMP): requirements.txt pyproject.toml
	@python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "Python 3.10 or later is needed; python3 is $$(python3 --version 2>&1)"; exit 1; }
	@echo "Installing PyTorch and the rest into $(VENV): one to ten minutes, once."
	test -x $(BIN)/python || python3 -m venv $(VENV)
	$(BIN)/python -m pip install --requirement requirements.txt
	@touch $@

quickstart: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node=2 \
	  01-ddp-basics/ddp_mnist.py --output-dir $(RUN)
	@echo
	@echo "Loss and accuracy are drawn in $(RUN)/training.png"
	@echo "Read next:  01-ddp-basics/README.md, which explains that script and its output"
	@echo "Run next:   $(BIN)/torchrun --standalone --nproc-per-node=4 \\"
	@echo "              01-ddp-basics/ddp_mnist.py --micro-batch-size 16"
	@echo "            (the same global batch on twice the processes: compare the losses)"

test: lint
	$(BIN)/python -m pytest

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
