"""Tests. `tests.models` holds the models that several folders share; `tests/contracts` checks the project itself."""
