"""Random models that need a whole batch, on each micro-batch alone, against the same step traced on the part."""

import jax
import pytest
from losing import losing
from of_the_day import of_the_day

from tests.part_models import measure_model

RIGHT = (0, 1, 3, 5, 6, 7, 22, 102)
REFUSED = {
    35: "loop 'stat_1/scan' reads 'stat_1/stat_norm/sqrt:0', which each micro-batch has for itself",
}


@losing
@pytest.mark.parametrize("seed", of_the_day(RIGHT))
def test_a_micro_batch_has_the_numbers_of_a_step_traced_on_it(seed: int) -> None:
    with jax.enable_x64(True):
        found = measure_model(seed)
    assert not found.refused
    assert found.worst <= 1, f"{found.model.drawn}: {found.where} is {found.worst:.3g} off"


@pytest.mark.parametrize("seed", REFUSED)
def test_what_cannot_be_a_part_s_own_is_refused(seed: int) -> None:
    """The root of what each has for itself, added up over layers in the op that takes it: neither rows nor a sum."""
    with jax.enable_x64(True):
        assert REFUSED[seed] in measure_model(seed).refused
