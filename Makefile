VENV ?= .venv
PYTHONS ?= python3.12 python3.13
TESTS ?= tests/allocator tests/cache
PYTHON := "$(VENV)/bin/python"

.PHONY: demo test test-fast test-oldest test-ptxas mutants docs release lint format setup lock clean help
.DEFAULT_GOAL := demo

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: setup ## text from a real model through a paged cache
	$(PYTHON) examples/generate.py --chat --prompt-file examples/prompts.txt

test: setup lint ## what CI runs
	$(PYTHON) -m pytest -n 2

test-fast: setup ## the tests without the slow modules: no interpret mode, no random runs, no whole examples
	$(PYTHON) -m pytest -n 2 -m "not slow"

test-oldest: ## the same with the oldest JAX that is supported
	$(MAKE) test VENV=.venv-oldest JAX=0.11.2

test-ptxas: ## kernels compiled for six GPUs without one: registers, spills, shared memory; the engine's slice
	$(MAKE) setup VENV="$(VENV)-ptxas"
	"$(VENV)-ptxas/bin/python" -m pip install --quiet nvidia-cuda-nvcc \
		"jax-cuda13-plugin==$$("$(VENV)-ptxas/bin/python" -c 'import jaxlib; print(jaxlib.__version__)')"
	"$(VENV)-ptxas/bin/python" -m pytest tests/kernels/test_resources.py tests/engine/test_slice_for_gpu.py

mutants: setup ## mistakes made in a copy of the tree, which the tests must find
	$(PYTHON) -m tests.mutants

docs: ## the site, into build/site
	"$$(tools/find_python.sh)" -m venv "$(VENV)-docs"
	"$(VENV)-docs/bin/python" -m pip install --quiet zensical==0.0.73 mkdocstrings-python==2.0.11 ruff==0.17.6
	rm -rf build/docs
	mkdir -p build/docs
	cp -R README.md CHANGELOG.md CONTRIBUTING.md SECURITY.md docs examples benchmarks jaxpaged pallas_kernels build/docs
	find build/docs -name __pycache__ -prune -exec rm -rf {} +
	"$(VENV)-docs/bin/zensical" build --strict --clean
	"$(VENV)-docs/bin/python" tools/check_site.py build/site
	@echo "The site: build/site/index.html. Its search needs a server: python3 -m http.server --directory build/site"

release: ## sdist and wheel in dist, both checked with each Python of PYTHONS
	"$$(tools/find_python.sh)" -m venv "$(VENV)-release"
	"$(VENV)-release/bin/python" -m pip install --quiet --upgrade --constraint requirements.lock \
		pip build==1.6.1 mypy "pyright[nodejs]==1.1.414" twine==7.0.0
	rm -rf dist
	"$(VENV)-release/bin/python" -m build
	"$(VENV)-release/bin/python" tools/check_release.py --pythons $(PYTHONS) --tests $(TESTS)

lint: setup
	$(PYTHON) -m ruff check
	$(PYTHON) -m ruff format --check
	$(PYTHON) -m mypy

format: setup
	$(PYTHON) -m ruff check --fix
	$(PYTHON) -m ruff format

setup:
	@JAX="$(JAX)" tools/setup.sh "$(VENV)"

lock: ## renew requirements.lock; needs uv
	uv pip compile pyproject.toml --extra examples --extra serve --group dev --universal --python-version 3.12 \
		--no-annotate --no-emit-index-url --custom-compile-command "make lock" --upgrade -o requirements.lock

clean:
	rm -rf "$(VENV)" "$(VENV)-ptxas" "$(VENV)-docs" "$(VENV)-release" build dist
