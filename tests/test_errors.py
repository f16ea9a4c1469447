"""Errors are what they were on the other side of a process."""

import pickle

import pytest

from jscaler import errors

RAISED = [
    errors.PlanError("no plan"),
    errors.PlanFitError("two_way", "op 'up/dot' is not in the graph"),
    errors.StateLostError(["state/w"], 2, "no memory"),
    errors.DeletedArgumentError(["state/w"]),
    errors.RuleError("b s -> b", "the op has 2 operands and the rule has 1"),
    errors.UnknownNameError("plan", "singel", ["single", "data_parallel"]),
    errors.SplitError("attn/qkv", "h", 12, 8),
]


@pytest.mark.parametrize("error", RAISED, ids=lambda e: type(e).__name__)
def test_pickled(error: errors.JscalerError) -> None:
    error.add_note("in block 3")
    found = pickle.loads(pickle.dumps(error))
    assert type(found) is type(error)
    assert (str(found), found.__notes__) == (str(error), ["in block 3"])
