"""Eight virtual CPU devices for every test, XLA quick to compile, and a fixed seed for hypothesis."""

import gc
import os

import pytest
from of_the_day import runs_today, says
from quick import FLAGS

os.environ["JAX_PLATFORMS"] = "cpu"  # the tests are about virtual devices, also where a GPU is at hand
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8", *FLAGS])

import hypothesis

hypothesis.settings.register_profile("jscaler", deadline=None, derandomize=True, database=None, print_blob=True)
hypothesis.settings.load_profile("jscaler")
gc.set_threshold(100_000, 20, 20)  # jaxprs and graphs live long: the default walks over all of them again and again


def pytest_report_header() -> str:
    """Which cases of the sweeps run."""
    return says()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that run on another day, unless they are asked for by name."""
    if config.option.keyword or any("::" in argument for argument in config.args):
        return
    days = {item: mark.args[0] for item in items if (mark := item.get_closest_marker("one_day_in"))}
    left = {item for item, one_in in days.items() if not runs_today(item.nodeid, one_in)}
    config.hook.pytest_deselected(items=list(left))
    items[:] = [item for item in items if item not in left]
