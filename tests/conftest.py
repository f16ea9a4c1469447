"""Eight virtual CPU devices for every test, XLA quick to compile, and a fixed seed for hypothesis."""

import gc
import os

from of_the_day import says
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
