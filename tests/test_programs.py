"""Random programs under random plans give one device's numbers. The full run is ``python -m bench.programs``."""

import jax
import pytest
from losing import losing
from of_the_day import of_the_day

from tests.programs import MAKERS, draw_program, measure

pytestmark = losing

SEEDS = range(100, 120)
TIMED = (2, 17, 19, 25, 29, 63, 172, 221)  # each was wrong once


@pytest.mark.one_day_in(2)
@pytest.mark.filterwarnings("ignore::jscaler.UnknownPrimitiveWarning")
@pytest.mark.parametrize("seed", of_the_day(SEEDS, 4))
def test_a_random_plan_gives_one_device_s_numbers(seed: int) -> None:
    with jax.enable_x64(True):
        found = measure(seed)
    assert found.splits > 0
    assert found.worst <= 1, f"{found.program.steps} on {found.devices} devices: {found.where} is {found.worst:.3g} off"


@pytest.mark.one_day_in(2)
@pytest.mark.filterwarnings("ignore::jscaler.UnknownPrimitiveWarning")
@pytest.mark.parametrize("seed", of_the_day(TIMED, 4))
def test_a_random_plan_with_time_axes_gives_one_device_s_numbers(seed: int) -> None:
    with jax.enable_x64(True):
        found = measure(seed, steps=1, timed=True)
    assert found.worst <= 1, f"{found.program.steps} on {found.devices} devices: {found.where} is {found.worst:.3g} off"


# Found by ``python -m bench.programs --groups``: one block that takes few of the leaves (others lie on a group
# of their own); parts of unequal size that cross; a loop on several groups that leaves a stack on another group than it is
# made on, where a block had nothing to do
FOUND = ((1439, False), (1747, False), (50075, True))


@pytest.mark.one_day_in(3)
@pytest.mark.filterwarnings("ignore::jscaler.UnknownPrimitiveWarning")
@pytest.mark.parametrize(("seed", "loops"), FOUND)
def test_a_random_plan_on_groups_that_was_wrong_once(seed: int, loops: bool) -> None:
    with jax.enable_x64(True):
        found = measure(seed, steps=1, groups=True, counts=loops)
    assert found.worst <= 1
    assert not found.refused


@pytest.mark.one_day_in(3)
@pytest.mark.filterwarnings("ignore::jscaler.UnknownPrimitiveWarning")
@pytest.mark.parametrize("seed", of_the_day(range(24), 4))
def test_a_random_plan_on_several_device_groups_gives_one_device_s_numbers(seed: int) -> None:
    with jax.enable_x64(True):
        loops = seed % 2 == 0
        found = measure(seed, steps=1, groups=True, counts=loops)
    assert loops or not found.refused
    assert found.worst <= 1, f"{found.program.steps} on {found.devices} devices: {found.where} is {found.worst:.3g} off"


def test_the_slice_draws_most_kinds_of_steps() -> None:
    with jax.enable_x64(True):
        drawn = {name for seed in SEEDS for name in draw_program(seed).steps}
    assert len(drawn) >= 0.8 * len({maker.__name__ for maker in MAKERS}), drawn


def test_a_backward_op_that_needs_a_whole_gradient_is_named_by_what_makes_it() -> None:
    """There is one gradient: nothing takes it at parameters that another changes."""
    with jax.enable_x64(True):
        found = measure(82770, groups=True, counts=True)
    assert "'normalise_4/exp@backward'" in found.refused
    assert "which 'dot_5/dot@backward' makes" in found.refused
