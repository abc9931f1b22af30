# Thin names over plain commands; README.md shows them without make.
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
LABS := $(VENV)/.installed-labs
# uv installs three times as fast as pip: the machine's own, or one inside the environment.
UV := $(shell command -v uv || echo $(BIN)/uv)
# make TORCH_BACKEND=cpu quickstart: PyTorch's CPU build, from PyTorch's own server, without CUDA.
# Kept for the next call.
TORCH_BACKEND := $(shell cat $(VENV)/.torch_backend 2>/dev/null)
# Lightning, Ray and the like, which the guide itself does not need, in an environment of their own.
FRAMEWORKS := .venv-frameworks
# What builds the guide as a site.
SITE := .venv-site
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadgroup
# A folder of its own for each run: nothing is overwritten.
RUN := runs/quickstart-$(shell date +%Y%m%d-%H%M%S)
COMPARED := runs/frameworks-$(shell date +%Y%m%d-%H%M%S)
BENCH := runs/bench-$(shell date +%Y%m%d-%H%M%S)
# Some containers set it: then each process compiles PyTorch's sources anew, 2 to 5 s of CPU.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help quickstart labs bench frameworks site test \
  gpu-ready test-all lint install

help:
	@echo "make quickstart   install, train on real digits with 2 processes, show the result"
	@echo "make labs         install what labs/ needs, without CUDA, and say what this machine lacks"
	@echo "make bench        compare seven strategies on 2 processes: 2 or 3 minutes on 2 cores"
	@echo "make frameworks   install Lightning, Accelerate, Ray and others, compare them: some minutes"
	@echo "make site         build the guide for a browser, page beside code: runs/site/index.html"
	@echo "make test         install, lint, run the quick tests: about 4 minutes on 2 cores"
	@echo "make gpu-ready    of these tests those that hold what a GPU would do, on a machine without one"
	@echo "make test-all     all tests, with every command of every page: what CI runs"
	@echo "make lint         ruff and codespell"

install: $(STAMP)

# Installed once; again only when what is pinned changes.
$(STAMP): requirements.txt labs/requirements.txt pyproject.toml
	$(call install,requirements.txt)

# The same environment, with less in it. A new one takes the CPU build, one with CUDA keeps it.
$(LABS): TORCH_BACKEND := $(if $(wildcard $(VENV)/.torch_backend),$(TORCH_BACKEND),cpu)
$(LABS): labs/requirements.txt pyproject.toml
	$(call install,labs/requirements.txt)

define install
	@python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python 3.11 or later is needed; python3 is $$(python3 --version 2>&1)"; exit 1; }
	@echo "Installing PyTorch and the rest into $(VENV): one to six minutes, once."
	test -x $(BIN)/python || python3 -m venv $(VENV)
	test -x $(UV) || $(BIN)/python -m pip install --quiet uv || true
	$(UV) pip install --python $(BIN)/python $(addprefix --torch-backend=,$(TORCH_BACKEND)) \
	  --requirement $(1) \
	  || { echo "uv failed; trying pip, which may be set up for this network"; \
	       $(BIN)/python -m pip install --requirement $(1); }
	@echo "$(TORCH_BACKEND)" > $(VENV)/.torch_backend
	@touch $@
endef

quickstart: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node=2 \
	  01-ddp-basics/ddp_mnist.py --output-dir $(RUN)
	@echo
	@echo "Loss and accuracy are drawn in $(RUN)/training.png"
	@echo "Type first: source $(VENV)/bin/activate; export OMP_NUM_THREADS=1"
	@echo "Read next:  01-ddp-basics/README.md, which begins with a dozen lines of code"
	@echo "Run next:   torchrun --standalone --nproc-per-node=4 \\"
	@echo "              01-ddp-basics/ddp_mnist.py --micro-batch-size 16"
	@echo "            (the same global batch on twice the processes: compare the losses)"

labs: $(LABS)
	$(BIN)/python labs/doctor.py
	@echo "Type first: source $(VENV)/bin/activate"
	@echo "Read next:  labs/README.md"

bench: $(STAMP)
	$(BIN)/python benchmarks/distributed_benchmarks.py sweep --config benchmarks/quick.toml \
	  --output-dir $(BENCH)

frameworks: $(FRAMEWORKS)/.installed
	$(BIN)/python benchmarks/compare_frameworks.py --output-dir $(COMPARED)

$(FRAMEWORKS)/.installed: $(STAMP)
	@echo "Installing the frameworks into $(FRAMEWORKS): a minute, once."
	test -x $(FRAMEWORKS)/bin/python || $(BIN)/python -m venv $(FRAMEWORKS)
	$(UV) pip install --python $(FRAMEWORKS)/bin/python \
	  $(addprefix --torch-backend=,$(TORCH_BACKEND)) --editable '.[frameworks]' \
	  || $(FRAMEWORKS)/bin/python -m pip install --editable '.[frameworks]'
	@touch $@

site: $(SITE)/.installed
	$(SITE)/bin/python site/build.py

# Node comes with it, so npm needs none on the machine; both check what they install by checksums.
$(SITE)/.installed: $(STAMP) site/requirements.txt site/package-lock.json
	@echo "Installing what builds the site, and a browser, into $(SITE) and site/node_modules."
	test -x $(SITE)/bin/python || $(BIN)/python -m venv $(SITE)
	$(UV) pip install --python $(SITE)/bin/python --requirement site/requirements.txt \
	  || $(SITE)/bin/python -m pip install --requirement site/requirements.txt
	cd site && PATH="$(abspath $(SITE))/bin:$$PATH" npm ci --ignore-scripts --no-audit --no-fund
	@touch $@

test: lint
	$(PYTEST) -m "not full"

gpu-ready: $(STAMP)
	$(PYTEST) -m gpu_ready

test-all: lint $(FRAMEWORKS)/.installed $(SITE)/.installed
	$(BIN)/python tests/run_all.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
