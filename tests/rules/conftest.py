"""Rules are checked in 64 bits, where rounding cannot be mistaken for a wrong rule."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True)
def _x64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield
