"""The GPT is causal, has the sizes of the paper, and draws dropout only in training."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jscaler.errors import UnknownNameError
from models import make_model
from models.gpt import GPT, SIZES, GPTConfig


def test_a_later_token_does_not_change_earlier_logits() -> None:
    model = GPT(GPTConfig(hidden=16, layers=2, heads=2, sequence=8))
    tokens = jnp.arange(8)[None]
    params = model.init(jax.random.key(0), tokens)
    before, after = (model.apply(params, tokens.at[0, 5].set(t)) for t in (5, 99))
    np.testing.assert_array_equal(before[0, :5], after[0, :5])
    assert not np.allclose(before[0, 5:], after[0, 5:])


@pytest.mark.parametrize(("size", "billions"), [("1.3b", 1.3), ("2.6b", 2.6), ("6.7b", 6.7), ("15b", 15)])
def test_sizes_of_the_paper(size: str, billions: float) -> None:
    model, config = make_model("gpt", size)
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, config.sequence), jnp.int32))
    count = sum(p.size for p in jax.tree.leaves(shapes))
    assert count / 1e9 == pytest.approx(billions, rel=0.09)


def test_unknown_names_suggest_the_near_one() -> None:
    with pytest.raises(UnknownNameError, match=r"no model named 'gtp'; did you mean 'gpt'"):
        make_model("gtp", "nano")
    with pytest.raises(UnknownNameError, match=r"no size named 'mimi' of model gpt; did you mean 'mini'"):
        make_model("gpt", "mimi")
    assert set(SIZES) >= {"nano", "mini"}
