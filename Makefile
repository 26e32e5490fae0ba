# Every target builds the environment first if it is not there (see scripts/env.sh).

.DEFAULT_GOAL := help
.PHONY: help demo test lint format unit engine-test conformance bench fleet wheel env clean clean-env

RUN := scripts/env.sh run

help: ## show this
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: ## the main job: agent traces against a real engine, stock vLLM beside vllm_thunder
	@$(RUN) python -m vllm_thunder demo $(ARGS)

test: lint ## everything that must pass: lint, then all tests, those with an engine last
	@$(RUN) python -m pytest $(ARGS)

lint: ## ruff, mypy, import directions
	@$(RUN) ruff check .
	@$(RUN) ruff format --check .
	@$(RUN) mypy
	@$(RUN) lint-imports

format: ## let ruff rewrite the code
	@$(RUN) ruff check --fix .
	@$(RUN) ruff format .

unit: ## tests without an engine
	@$(RUN) python -m pytest -m "not engine" $(ARGS)

engine-test: ## tests with a real engine
	@$(RUN) python -m pytest -m engine $(ARGS)

conformance: ## vLLM's own tests/v1/core with our scheduler and pool; downloads vLLM's source archive
	@$(RUN) python -m scripts.conformance $(ARGS)

bench: ## every claim, stock vLLM beside vllm_thunder: about an hour; ARGS="--plan", ARGS="thrash mixed"
	@$(RUN) python -m benchmarks.suite $(ARGS)

fleet: ## three engines behind the coordinator beside other routers: an hour; ARGS=--plan
	@$(RUN) python -m benchmarks.fleet $(ARGS)

wheel: ## dist/*.whl and dist/*.tar.gz
	@$(RUN) python -m build --no-isolation --outdir dist .

env: ## the environment alone
	@$(RUN) python scripts/check_env.py

clean: ## what builds and tools left in this checkout
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

clean-env: ## this checkout's environment (several GB, shared with checkouts of the same pins)
	scripts/env.sh remove
