# Everything runs in .venv, which each target makes first. pip, not uv: see README.
PYTHON ?= python3
BIN := .venv/bin

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@
