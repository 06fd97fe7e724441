# Everything a checkout needs. `make demo` and `make test` set up their own virtual environment first.
# Variables: PYTHON=/path/to/python3 (3.11 or newer) · VENV=.venv · PYTEST="-k name" for a part of the tests.

VENV   ?= .venv
PREFIX ?= .demo
PYTEST ?=
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
LOCK   := offline_bundle/lock.txt

# Container images often set it. Then each of the many processes of tests and services compiles our code again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup lock demo demo-stop test test-kernels test-installations test-terminal test-compile test-cpus lint format bench test-gpu \
        test-runtime test-runtime-cuda test-appliance test-clients test-prometheus test-streams fuzz pictures clean

help:  ## Show this list
	@echo 'Atoll. Start with: make demo'
	@echo
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1@\2/p' $(MAKEFILE_LIST) | awk -F@ '{ printf "%-24s %s\n", $$1, $$2 }'

demo: $(VENV)/.demo  ## Bundle, sign, verify, install and run a small real model, and ask it a question
	@$(BIN)/python -m appliance.demo --prefix $(PREFIX)

demo-stop:  ## Stop the demo's service (make demo starts it again)
	@if [ -x $(BIN)/atoll ] && [ -d $(PREFIX) ]; then $(BIN)/atoll stop --prefix $(PREFIX); \
	else echo 'No demo is installed here.'; fi

test: $(VENV)/.dev  ## Test everything but kernels, without a GPU; PYTEST=tests/engine/core for a part
	@$(BIN)/python -m appliance.demo.model >/dev/null
ifeq ($(strip $(PYTEST)),)
	@$(BIN)/python tests/side_by_side.py
else
	@$(BIN)/python -m pytest $(PYTEST)
endif

test-kernels: $(VENV)/.dev  ## Test the GPU kernels and the steps around them, without a GPU, in Triton's interpreter
	@$(BIN)/python -m appliance.demo.model >/dev/null
	@$(BIN)/python tests/side_by_side.py kernels

test-installations: $(VENV)/.dev  ## Real installations, tuned, verified and piloted, by command and in a terminal, killed in between
	@$(BIN)/python -m appliance.demo.model >/dev/null
	@$(BIN)/python tests/side_by_side.py installations

test-terminal: $(VENV)/.dev  ## The screens from an empty prefix to a signed pilot, in tmux and as consoles show them: minutes
	@$(BIN)/python -m appliance.demo.model >/dev/null
	@$(BIN)/python -m pytest -m slow -rs -v tests/tui/terminal

test-compile: $(VENV)/.dev  ## Compile every GPU kernel for every supported GPU; a later run only what has changed
	@$(BIN)/python -m pytest -m slow tests/engine/kernels/test_triton_compile.py

test-cpus: $(VENV)/.dev  ## The tests of what a model answers, as weaker CPUs compute it; PYTEST=… for other tests
	@$(BIN)/python -m appliance.demo.model >/dev/null
	@PYTEST="$(PYTEST)" $(BIN)/python tests/side_by_side.py cpus

test-gpu:  ## On a machine with a CUDA GPU: its tests, then the benchmark (uses the system's python3)
	@tests/gpu/run.sh

test-runtime: $(VENV)/.dev  ## The whole code of a medium, PyTorch included: built, installed without a network, timed
	@$(BIN)/python -m pytest -m slow -s tests/offline_bundle/runtime/test_runtime_full.py

test-runtime-cuda: $(VENV)/.dev  ## The same for GPU servers (2.7 GB of packages, 25 GB of disk); as root on a machine that boots, too
	@$(BIN)/python -m appliance.demo.model >/dev/null
	@$(BIN)/python -m pytest -m slow -rs -s tests/offline_bundle/runtime/test_runtime_cuda.py
	@if [ "$$(id -u)" = 0 ]; then \
	ATOLL_BOOT_CUDA=1 $(BIN)/python -m pytest -m boot -rs -s --timeout=2400 tests/boot/test_boot_cuda.py; \
	else echo 'The machine that boots needs root: sudo make test-runtime-cuda'; fi

PROMETHEUS = .cache/prometheus
test-prometheus: $(VENV)/.dev  ## The alert rules and the Grafana dashboard in a real Prometheus (Debian's package) that scrapes a live service
	@mkdir -p $(PROMETHEUS)
	@test -x $(PROMETHEUS)/usr/bin/promtool || { cd $(PROMETHEUS) && apt-get download prometheus && dpkg -x prometheus_*.deb .; }
	@ATOLL_PROMETHEUS="$(CURDIR)/$(PROMETHEUS)/usr/bin" $(BIN)/python -m pytest -v tests/engine/server/observe/test_prometheus.py

test-appliance: $(VENV)/.dev  ## As root: a server's whole life with Atoll, on machines that boot without a network
	@$(BIN)/python -m appliance.demo.model >/dev/null
	@$(BIN)/python -m pytest -m boot -rs -v --timeout=2400 $(or $(PYTEST),tests/boot)

test-clients: $(VENV)/.dev  ## Clients that we did not write, each in an environment of its own, against a real service
	@$(BIN)/python tests/clients/run.py $(CLIENTS)

test-streams: $(VENV)/.dev  ## A thousand streams at once through a real gateway: none lost or mixed up, memory flat (a minute)
	@$(BIN)/python tests/engine/server/many_streams.py

SECONDS ?= 600
fuzz: $(VENV)/.dev  ## Fuzz the HTTP edge, the parsers and the engine's socket: SECONDS=600 for each, TARGETS="http parsers ipc", SEED=1
	@$(BIN)/python tests/fuzz/run.py --seconds $(SECONDS) $(if $(SEED),--seed $(SEED)) $(TARGETS)

pictures: $(VENV)/.dev  ## Draw every screen of the terminal interface for the documents, in both languages (about 15 minutes)
	@$(BIN)/python -m appliance.demo.model >/dev/null
	@$(BIN)/python -m pytest -m slow --timeout=1500 tests/tui/pictures

lint: $(VENV)/.dev  ## Check style, spelling, links, types and which room may import which
	@$(BIN)/ruff check .
	@git ls-files -z | xargs -0 $(BIN)/codespell
	@$(BIN)/python .ci/links.py
	@$(BIN)/pyright
	@$(BIN)/lint-imports --no-logo

format: $(VENV)/.dev  ## Sort imports and fix what ruff can fix safely
	@$(BIN)/ruff check --fix .

lock: $(VENV)/.dev  ## Choose the newest packages that fit, and write their exact versions for everybody
	@$(BIN)/python .ci/lock.py $(LOCK)

setup: $(VENV)/.dev  ## Make .venv with everything for development
	@echo 'Ready. Next: make demo, make test'

clean: demo-stop  ## Stop the demo and remove everything that was made here (environment, model, demo, caches)
	rm -rf $(VENV) $(PREFIX) .cache build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache

# The stamps depend on pyproject.toml and the lock, so a change of dependencies installs them; otherwise nothing happens.
# pip shows its lines and progress bars on a terminal, and only problems elsewhere.
$(VENV)/.demo: pyproject.toml $(LOCK) $(VENV)/.made
	@echo 'Installing the packages of the demo into $(VENV) (PyTorch is large: minutes the first time) …'
	@$(PIP) install $$([ -t 1 ] || echo --quiet) -c $(LOCK) -e '.[demo]'
	@touch $@

$(VENV)/.dev: pyproject.toml $(LOCK) $(VENV)/.made
	@echo 'Installing the packages for development into $(VENV) (PyTorch is large: minutes the first time) …'
	@$(PIP) install $$([ -t 1 ] || echo --quiet) -c $(LOCK) -e '.[dev]'
	@touch $(VENV)/.demo $@

$(VENV)/.made: .ci/venv.sh
	@sh .ci/venv.sh $(VENV) $(PYTHON)
	@touch $@
