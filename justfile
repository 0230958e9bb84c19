# Commands for contributors. `just` alone lists them; https://just.systems, or pip install rust-just.

venv := ".venv"
python := venv / "bin/python"
extras := if os() == "macos" { "test,dev,site" } else { "cpu,test,dev,site" }

[private]
default:
    @just --list --unsorted

# Make the virtual environment with tests, linters and mkdocs, and install the hooks of pre-commit.
setup:
    [ -x {{ python }} ] || python3 -m venv {{ venv }}
    {{ python }} -m pip install --quiet --editable ".[{{ extras }}]"
    {{ python }} -m pre_commit install

# Lint and test what is pure Python: under a minute on two idle cores.
quick:
    {{ python }} -m ruff format --check -q .
    {{ python }} -m ruff check -q .
    {{ python }} -m pytest -n 2 -m "quick and not slow" tests/core tests/scheduler tests/test_imports.py tests/test_limits.py tests/test_skips.py

# Run the everyday tests, or those that are named: just test tests/api -k tools
test *arguments:
    {{ python }} -m pytest -n 2 --dist loadfile {{ arguments }}

# Check format, lint and types.
lint:
    {{ python }} -m ruff format --check .
    {{ python }} -m ruff check .
    {{ python }} -m mypy

# Format the code, and mend what the linter can.
format:
    {{ python }} -m ruff check --fix .
    {{ python }} -m ruff format .

# Write the generated pages of docs/, and check links and names in all of them.
docs:
    {{ python }} -m quire.cli.reference > docs/settings.md
    {{ python }} -m tests.models.make_models_doc
    {{ python }} -m pytest tests/test_docs.py

# Build the documents as a site in site/. A dead link ends it.
site:
    NO_MKDOCS_2_WARNING=1 {{ python }} -m mkdocs build --strict

# Load a running server, or measure this machine: just bench --url http://127.0.0.1:8000
bench *arguments:
    {{ venv }}/bin/quire bench {{ arguments }}

# Compile the CPU kernels anew: after every change of their sources, by hand or by git pull.
kernels:
    {{ python }} -m quire.device.cpu.build

# Everything that must hold before a change lands, in environments of its own.
ci:
    bash .ci/run
