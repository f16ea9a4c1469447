"""What a plan is compared with computes again what the plan computes again, and keeps what it keeps."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from plans.plan_steps import repeated

from jscaler.lower.gspmd import Constraints, constrained_step
from tests.capture.test_saveable import of_jaxpr
from tests.primitives.test_recompute_regions import PARAMS, X, chain, checkpointed, planned


@pytest.mark.parametrize("keep", ["b/dot", "*/dot", ()])
@pytest.mark.parametrize("loss_fn", [chain, checkpointed])
def test_the_rival_computes_again_what_the_plan_does(loss_fn, keep) -> None:
    step = planned(lambda graph, _: graph.recompute(["b/*", "c/*"], keep), loss_fn)
    run = constrained_step(step.source, Constraints(), Mesh(np.array(jax.devices()[:1]), ("x",)))
    theirs = of_jaxpr(jax.make_jaxpr(run)(*jax.tree.leaves((PARAMS, X))).jaxpr)
    ours = repeated(step)
    assert {k: theirs[k] for k in ("dot_general", "tanh", "cos")} == {k: ours[k] for k in ("dot_general", "tanh", "cos")}
