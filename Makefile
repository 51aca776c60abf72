PYTHON ?= python3
# Another interpreter gets an environment of its own, so switching back costs nothing.
VENV ?= .venv$(if $(filter-out python3,$(PYTHON)),-$(notdir $(PYTHON)))
BIN := $(VENV)/bin

.DELETE_ON_ERROR:
.PHONY: help demo test lint docs results check-results bench bench-gpu clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-13s %s\n", $$1, $$2}' Makefile
	@echo "  PYTHON=python3.12 make ... uses another interpreter"

demo: $(VENV)/.installed ## compare all methods on handwritten digits: a table and a page
	@"$(BIN)/syngap" demo --fresh

test: $(VENV)/.with-dev ## run every test and docstring example
	@"$(BIN)/python" -m pytest -rs -n auto --maxprocesses 4 --dist loadgroup

lint: $(VENV)/.with-dev ## check style, types and the direction of imports
	"$(BIN)/ruff" check .
	"$(BIN)/ruff" format --check .
	"$(BIN)/mypy"
	"$(BIN)/lint-imports" --no-cache

docs: $(VENV)/.with-docs ## build the documentation into site/
	@NO_MKDOCS_2_WARNING=1 "$(BIN)/mkdocs" build --strict --quiet
	@echo "The documentation is in site/index.html"

DOCUMENTS = README.md results/README.md docs/*.md

results: $(VENV)/.installed ## put the numbers and figures of results/ into README and docs
	@"$(BIN)/syngap" fill $(DOCUMENTS)
	@"$(BIN)/syngap" report results/short-batches-cifar100 --figures docs/figures > /dev/null
	@"$(BIN)/syngap" report results/digits --figure docs/demo.svg --figures build/figures > /dev/null
	@cp build/figures/landscape.svg docs/figures/landscape-digits.svg

check-results: $(VENV)/.installed ## fail where README or docs say another number than results/
	@"$(BIN)/syngap" fill --check $(DOCUMENTS)

bench: $(VENV)/.with-bench ## measure speed and memory against other packages, on a CPU
	@"$(BIN)/python" benchmarks/run.py cpu $(if $(KEEP),--keep "$(KEEP)")

bench-gpu: $(VENV)/.installed ## the same on a GPU
	@"$(BIN)/python" benchmarks/run.py cuda $(if $(KEEP),--keep "$(KEEP)")

clean: ## remove the environment, caches and build outputs
	rm -rf "$(VENV)" build dist site .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -path './.venv*' -prune -o -type d -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/.created:
	@echo "Creating $(VENV) with $(PYTHON)"
	@"$(PYTHON)" -m venv "$(VENV)"
	@touch "$@"

INSTALL = "$(BIN)/python" -m pip install --quiet --quiet --disable-pip-version-check \
	--constraint constraints.txt --editable

$(VENV)/.installed: pyproject.toml constraints.txt $(VENV)/.created
	@echo "Installing syngap into $(VENV) (with torch: minutes)"
	@$(INSTALL) .
	@touch "$@"

$(VENV)/.with-%: $(VENV)/.installed
	@echo "Installing what syngap[$*] adds into $(VENV)"
	@$(INSTALL) ".[$*]"
	@touch "$@"
