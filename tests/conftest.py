"""Eight virtual CPU devices for every test, and a fixed seed for hypothesis."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"  # the tests are about virtual devices, also where a GPU is at hand
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import hypothesis

hypothesis.settings.register_profile("jscaler", deadline=None, derandomize=True, database=None, print_blob=True)
hypothesis.settings.load_profile("jscaler")
