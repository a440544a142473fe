"""Slow tests: the long lists. They run with RESIDUA_SLOW=1 or `-m slow`."""

import os

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: the long lists; run with RESIDUA_SLOW=1 or -m slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if os.environ.get("RESIDUA_SLOW") == "1" or "slow" in (config.getoption("-m") or ""):
        return
    for item in items:
        if "slow" in item.keywords and item.path.is_relative_to(os.path.dirname(__file__)):
            item.add_marker(pytest.mark.skip(reason="slow: set RESIDUA_SLOW=1"))
