"""The order that hides collectives: it respects what is read, and puts off what nobody waits for."""

import random

import pytest

from jscaler.xla_model.block import BlockStep, Kernel, Kind, Value
from jscaler.xla_model.kernel_order import ordered, siblings_together


def kernel(name: str, reads: list[Value], size: int = 1 << 20, kind: Kind = "call") -> Kernel:
    made = Value(size, name)
    step = BlockStep(kind, name, tuple(reads), (made,))
    over = tuple((made, v) for v in reads if v.nbytes == size) if kind == "fused" else ()
    return Kernel(step, {v: v.nbytes for v in reads}, (made,), over)


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


def mlp_backward() -> list[Kernel]:
    """The hidden units are computed again: of them the activation, for a weight's gradient, and its derivative."""
    given = Value(1 << 20, "given")
    hidden = kernel("hidden", [given])
    activation = kernel("activation", [hidden.writes[0]], kind="fused")
    weight = kernel("weight", [activation.writes[0], given], size=100)
    cotangent = kernel("cotangent", [given])
    derivative = kernel("derivative", [cotangent.writes[0], hidden.writes[0]], kind="fused")
    return [hidden, activation, weight, cotangent, derivative, kernel("next", [derivative.writes[0]])]


def test_siblings_are_one_kernel_and_what_reads_the_first_waits() -> None:
    kernels = mlp_backward()
    found = siblings_together(kernels)
    assert shown(found) == ["hidden", "cotangent", "activation", "derivative", "weight", "next"]
    assert [k.over for k in found if k.step.kind == "fused"] == [(), ()]
    assert all(kernel in kernels for kernel in found if kernel.step.kind == "call")


def test_small_ones_others_sizes_and_what_needs_the_other_stay() -> None:
    shared = Value(1 << 20, "shared")
    first = kernel("first", [shared], kind="fused")
    others = (
        kernel("needs", [shared, first.writes[0]], kind="fused"),
        kernel("half", [shared], size=1 << 19, kind="fused"),
        kernel("alone", [Value(1 << 20, "other")], kind="fused"),
        kernel("product", [shared]),
    )
    for other in others:
        assert siblings_together([first, other]) == (first, other)
    small = [kernel(name, [Value(100, "s")], size=100, kind="fused") for name in "ab"]
    assert siblings_together(small) == tuple(small)


def test_a_fence_stands_between_siblings() -> None:
    kernels = mlp_backward()
    steps = [kernel.step for kernel in kernels]
    fence = BlockStep("alias", "optimization_barrier", (), ())
    assert siblings_together(kernels, [fence, *steps, fence]) == siblings_together(kernels)
    assert siblings_together(kernels, [*steps[:3], fence, *steps[3:]]) == tuple(kernels)


@pytest.mark.parametrize("seed", range(20))
def test_siblings_together_are_an_order_of_the_same_kernels(seed: int) -> None:
    draw = random.Random(seed)
    values = [Value(1 << 20, f"in{i}") for i in range(3)]
    kernels: list[Kernel] = []
    for number in range(60):
        kind: Kind = draw.choice(["fused", "fused", "call"])
        kernels.append(
            kernel(f"k{number}", draw.sample(values, min(2, len(values))), draw.choice([1 << 20, 1 << 18]), kind)
        )
        values = [*values, *kernels[-1].writes][-12:]
    found = siblings_together(kernels)
    assert sorted(shown(found)) == sorted(shown(tuple(kernels)))
    assert shown(found) != shown(tuple(kernels))
    made: set[Value] = set()
    every = {v for k in kernels for v in k.writes}
    for one in found:
        assert made.issuperset(v for v in one.reads if v in every)
        made.update(one.writes)
