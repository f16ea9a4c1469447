"""What is made of parameters alone is followed dim by dim; what reads anything else is not."""

import jax.numpy as jnp
import numpy as np

import jscaler
from jscaler.rules.made_of import made_of


def step(state: dict[str, jnp.ndarray], batch: dict[str, jnp.ndarray]) -> tuple[dict[str, jnp.ndarray], jnp.ndarray]:
    narrow = state["kernel"].astype(jnp.bfloat16)
    turned = jnp.sin(narrow).T
    norm = (state["kernel"] ** 2).sum(0)
    return state, (batch["x"].astype(jnp.bfloat16) @ turned).sum() + norm.sum()


def test_casts_and_transposes_are_followed() -> None:
    arguments = {"kernel": np.ones((8, 4), np.float32)}, {"x": np.ones((2, 4), np.float32)}
    graph = jscaler.parallelize("single", devices=1)(step).graph(*arguments)
    kernel = graph.input("state/kernel")
    for dim in (0, 1):
        found = made_of(graph, {kernel: dim})
        places = {t.shape: place for t, (leaf, place) in found.dims.items() if leaf == kernel}
        assert places.pop((8, 4)) == dim
        assert places.pop((4, 8), 1 - dim) == 1 - dim
        assert all(graph[path].kind != "backward" for path in found.factors)
    assert not [t for t in made_of(graph, {kernel: 0}).dims if not t.shape or 2 in t.shape]  # the batch's, and sums


def test_nothing_is_made_of_nothing() -> None:
    arguments = {"kernel": np.ones((8, 4), np.float32)}, {"x": np.ones((2, 4), np.float32)}
    graph = jscaler.parallelize("single", devices=1)(step).graph(*arguments)
    assert made_of(graph, {}).dims == made_of(graph, {}).factors == {}
