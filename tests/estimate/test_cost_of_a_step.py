"""What ``jscaler.cost`` holds and launches over a step."""

import pytest
from report.stand_in import arguments, step

import jscaler
from jscaler.ir import Graph


@pytest.fixture(scope="module")
def graph() -> Graph:
    return jscaler.parallelize("single")(step).graph(*arguments())


def test_moments_add_up_by_kind(graph: Graph) -> None:
    held = jscaler.cost(graph, "zero1", "4xH100-80GB").held
    memory = held.memory
    assert all(sum(m.kinds.values()) == m.nbytes for m in held.timeline)
    fullest = max(held.timeline, key=lambda m: m.nbytes)
    assert fullest.kinds["parameter"] == memory.parameters
    assert fullest.kinds["optimizer"] == memory.optimizer
    assert fullest.kinds.get("gradient", 0) == memory.gradients
    assert fullest.kinds.get("activation", 0) == memory.activations
    assert fullest.kinds.get("temporary", 0) == memory.temporaries


def test_launches_are_kernels_and_collectives(graph: Graph) -> None:
    one, four = jscaler.cost(graph, "single", "H100-80GB"), jscaler.cost(graph, "data_parallel", "4xH100-80GB")
    collectives = sum(count for count, _ in four.sent.kinds.values())
    assert collectives > 0
    assert four.launches - collectives >= one.launches > 0
    assert one.as_json()["launches"] == one.launches
