"""The order of the tests, and what all of them share."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The checkout that is under test."""
    return Path(__file__).resolve().parent.parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests with an engine go last: a fast test that fails is seen within seconds."""
    items.sort(key=lambda item: item.get_closest_marker("engine") is not None)
