"""Equal names of time axes with unequal counts: right, or refused before anything is lowered; never wrong numbers."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from losing import losing
from of_the_day import of_the_day
from step_numbers import assert_trees_close

import jscaler
from jscaler import PlanError, Split, TimeSplit
from jscaler.runtime.executable import executable

DRAWS = np.random.default_rng(0)
PARAMS = {name: DRAWS.normal(size=(8, 8)) / 3 for name in "ab"}
X = DRAWS.normal(size=(8, 8))
SECOND = ("loss/dot@backward", "loss/dot.1", "loss/dot.1@backward")


def step(params: Any, x: Any) -> Any:
    def loss(params: Any, x: Any) -> Any:
        h = jnp.tanh(x @ params["a"])
        z = h + jnp.tanh(h @ params["b"])
        return jnp.mean(z * z)

    return jscaler.value_and_grad(loss)(params, x)


def lowered(policy: Any, devices: int) -> Any:
    return jscaler.parallelize(policy, devices=devices)(step).lower(PARAMS, X)


def in_time(path: str, parts: int, factor: str, axis: str, devices: int) -> Callable[[Any, Any], None]:
    """Parts in time of one op; two devices split another factor."""

    def split(graph: Any, places: Any) -> None:
        other = next(f for f in "acb" if f != factor)
        space = [Split(other, 2)] if devices == 2 else []
        graph.op_assign(graph.op_trans(path, *space, TimeSplit(factor, parts, axis)), places)

    return split


def sharing(path: str, parts: int, factor: str, devices: int) -> Callable[[Any, Any], None]:
    """As many cells of one op that share devices: in time without a name of the policy's."""

    def split(graph: Any, places: Any) -> None:
        other = next(f for f in "acb" if f != factor)
        space = [Split(other, 2)] if devices == 2 else []
        every = np.broadcast_to(places.reshape(-1, 1), (devices, parts)) if devices == 2 else np.repeat(places, parts)
        graph.op_assign(graph.op_trans(path, *space, Split(factor, parts)), every)

    return split


def both(*splits: Any) -> Any:
    def policy(graph: Any, places: Any) -> None:
        for split in splits:
            split(graph, places)

    return policy


def draws(seed: int, number: int) -> Iterator[tuple[tuple[int, str], str, tuple[int, str]]]:
    """Pairs of counts and factors of the first product and of another op."""
    ways = list(itertools.product((1, 2, 4, 8), "abc"))
    every = list(itertools.product(ways, SECOND, ways))
    for i in np.random.default_rng(seed).choice(len(every), number, replace=False):
        yield every[i]


@pytest.mark.one_day_in(2)
@losing
@pytest.mark.parametrize("devices", of_the_day([1, 2], 2))
def test_two_axes_of_any_counts_are_right(devices: int) -> None:
    """All in one program, which is compiled once."""
    with jax.enable_x64(True):
        cases = []
        for number, (first, path, second) in enumerate(draws(devices, 8)):
            one, other = ("loss/dot", *first), (path, *second)
            if number % 2:
                cases.append(both(sharing(*one, devices), sharing(*other, devices)))
            else:
                cases.append(both(in_time(*one, "t", devices), in_time(*other, "s", devices)))
        made = [lowered(policy, devices) for policy in cases]
        for one in made:
            jscaler.verify(one)
        runs = [executable(one.plan, jax.devices()[:devices], ()) for one in made]
        leaves = jax.tree.leaves((PARAMS, X))
        results = jax.jit(lambda *xs: [run.blocks[0].jitted(*xs) for run in runs])(*leaves)
        expected = jax.tree.leaves(jax.jit(step)(PARAMS, X))
        for result in results:
            assert_trees_close(result, expected)


@pytest.mark.parametrize("devices", [1, 2])
def test_one_axis_of_two_counts_is_refused(devices: int) -> None:
    seen = 0
    for first, path, second in draws(devices, 40):
        if first[0] != second[0]:
            policy = both(in_time("loss/dot", *first, "t", devices), in_time(path, *second, "t", devices))
            with pytest.raises(PlanError, match=f"'t' has {first[0]} parts of .* and {second[0]} parts .* as many parts"):
                lowered(policy, devices)
            seen += 1
    assert seen > 20


def test_the_fault_that_lost_half_of_a_gradient() -> None:
    policy = both(in_time("loss/dot", 4, "a", "t", 1), in_time("loss/dot@backward", 2, "a", "t", 1))
    with pytest.raises(PlanError, match="'t' has 4 parts of 'a' in 'loss/dot' and 2 parts of 'a' in 'loss/dot@backward'"):
        lowered(policy, 1)


def test_cells_that_share_a_device_run_in_loops_of_their_own_counts() -> None:
    made = lowered(both(sharing("loss/dot", 4, "a", 1), sharing("loss/dot.1", 2, "a", 1)), 1)
    graph = made.plan.graph
    assert [graph.loops[str(graph[path].loop)].length for path in ("loss/dot", "loss/dot.1")] == [4, 2]


@pytest.mark.parametrize("name", ["start", "sofar", "more", "stack"])
def test_an_axis_may_have_any_name(name: str) -> None:
    """Names of our own tensors stand beside it."""
    graph = lowered(both(in_time("loss/dot", 2, "c", name, 1), in_time("loss/dot.1", 2, "a", name, 1)), 1).plan.graph
    assert {loop.time for loop in graph.loops.values()} == {name}


def test_the_name_of_cells_that_share_devices_is_taken() -> None:
    with pytest.raises(PlanError, match=r"'loss/dot': a time axis cannot be called 'shared\+4'"):
        lowered(in_time("loss/dot", 2, "a", "shared+4", 1), 1)
