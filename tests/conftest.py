"""Common to all tests."""

from __future__ import annotations

import pytest

WORKER = ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_XDIST_TESTRUNUID")


@pytest.fixture(autouse=True)
def as_if_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs started by a test must not take its pytest-xdist worker for one of theirs."""
    for name in WORKER:
        monkeypatch.delenv(name, raising=False)
