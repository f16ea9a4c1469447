"""The examples in the docstrings of the schedule search print what they say."""

import doctest
import importlib
import pkgutil
from types import ModuleType

import pytest

import jscaler.tables.search

MODULES = [
    importlib.import_module(f"{jscaler.tables.search.__name__}.{one.name}")
    for one in pkgutil.iter_modules(jscaler.tables.search.__path__)
]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_examples_of_the_search_print_what_they_say(module: ModuleType) -> None:
    said: list[str] = []
    for test in doctest.DocTestFinder().find(module):
        if test.examples:
            doctest.DocTestRunner().run(test, out=said.append)
    assert not said, "".join(said)


def test_all_that_is_public_has_an_example() -> None:
    for name in jscaler.tables.search.__all__:
        one = getattr(jscaler.tables.search, name)
        assert not callable(one) or ">>>" in (one.__doc__ or ""), name
