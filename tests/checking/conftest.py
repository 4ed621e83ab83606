"""Explorations are exhaustive, and there are many: the fast tests take one in four of each kind, the slow ones all."""

from collections import Counter

import pytest

ONE_IN = 4
_ARE_MANY = ("test_explore_", "test_groups_explore", "test_reductions")
"""How the names of modules begin whose tests explore one pipeline for each set of parameters."""


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    numbers: Counter[str] = Counter()
    for item in items:
        if item.path.name.startswith(_ARE_MANY) and item.path.parent.name == "checking":
            kind = item.nodeid.partition("[")[0]
            if numbers[kind] % ONE_IN:
                item.add_marker(pytest.mark.slow)
            numbers[kind] += 1
