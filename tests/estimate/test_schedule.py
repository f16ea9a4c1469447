"""The order that hides collectives: it respects what is read, and puts off what nobody waits for."""

import random

import pytest

from jscaler.estimate.block import Kernel, Step, Value
from jscaler.estimate.schedule import ordered


def kernel(name: str, reads: list[Value], size: int = 1 << 20) -> Kernel:
    made = Value(size, name)
    step = Step("call", name, tuple(reads), (made,))
    return Kernel(step, {v: v.nbytes for v in reads}, (made,))


def shown(kernels: tuple[Kernel, ...]) -> list[str]:
    return [k.step.name for k in kernels]


def backward() -> tuple[list[Kernel], list[Value]]:
    """Two layers: a gradient of each weight, and what goes on to the layer before, joined between devices."""
    seed = Value(1 << 20, "seed")
    kernels, results, here = [], [], seed
    for layer in (1, 0):
        kernels += [kernel(f"weight{layer}", [here]), kernel(f"input{layer}", [here]), kernel("all_reduce", [])]
        moved = kernel("all_reduce", [kernels[-2].writes[0]])
        kernels[-1] = moved
        results.append(kernels[-3].writes[0])
        here = moved.writes[0]
    return kernels, [here, *results]


def test_without_collectives_and_behind_fences_the_order_is_the_program_s() -> None:
    kernels, outputs = backward()
    assert ordered(kernels, outputs, fenced=True) == tuple(kernels)
    local = [k for k in kernels if k.step.name != "all_reduce"]
    assert ordered(local, outputs, fenced=False) == tuple(local)


def test_gradients_of_weights_are_put_off() -> None:
    kernels, outputs = backward()
    names = shown(ordered(kernels, outputs, fenced=False))
    assert names.index("weight1") > names.index("input0")
    assert sorted(names) == sorted(shown(tuple(kernels)))


def test_what_leaves_little_runs_at_once() -> None:
    kernels, outputs = backward()
    norm = kernel("reduce_sum", [kernels[1].writes[0]], size=4)
    order = shown(ordered([*kernels, norm], [*outputs, norm.writes[0]], fenced=False))
    assert order.index("reduce_sum") == order.index("input1") + 1


@pytest.mark.parametrize("seed", range(20))
def test_nothing_runs_before_what_it_reads(seed: int) -> None:
    draw = random.Random(seed)
    given = [Value(100, "in")]
    kernels: list[Kernel] = []
    for number in range(40):
        known = [*given, *(v for k in kernels for v in k.writes)]
        name = draw.choice(("all_reduce", "dot_general", "fused"))
        reads = draw.sample(known, min(len(known), draw.randint(1, 3)))
        kernels.append(kernel(f"{name}" if number else "all_reduce", reads, draw.choice((4, 1 << 12, 1 << 20))))
    outputs = [draw.choice(kernels).writes[0] for _ in range(3)]
    order = ordered(kernels, outputs, fenced=False)
    assert len(order) == len(set(map(id, order))) == len(kernels)
    written = set(given)
    for one in order:
        assert set(one.reads) <= written
        written.update(one.writes)
