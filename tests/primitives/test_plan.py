"""A plan is data: a list of decisions with a digest that every process agrees on."""

import pytest

from jscaler.ir import Place
from jscaler.primitives import Assign, GridAxis, Order, Plan, Trans


def places(*devices: int) -> tuple[Place, ...]:
    return tuple(map(Place, devices))


DECISIONS = (
    Trans("up/dot", (GridAxis("a", 2), GridAxis(None, 2))),
    Assign("up/dot", ((0, 2), (0, 2)), places(0, 1, 2, 3)),
    Order("up/dot", "down/dot"),
)
PLAN = Plan("mine", 4, DECISIONS)


def test_str_is_a_table_of_decisions() -> None:
    assert str(PLAN).splitlines() == [
        "Plan mine on 4 devices",
        "op_trans  up/dot -> [a:2, copy:2]",
        "op_assign up/dot[0:2, 0:2] -> [d0 d1 d2 d3]",
        "op_order  up/dot < down/dot",
    ]


def test_equal_decisions_have_equal_digests() -> None:
    assert PLAN.digest == Plan("another name", 4, DECISIONS).digest
    assert len(PLAN.digest) == 12


@pytest.mark.parametrize(
    "other",
    [
        Plan("mine", 8, DECISIONS),
        Plan("mine", 4, DECISIONS[:2]),
        Plan("mine", 4, DECISIONS[::-1]),
        Plan("mine", 4, (Trans("up/dot", (GridAxis("b", 2), GridAxis(None, 2))), *DECISIONS[1:])),
        Plan("mine", 4, (DECISIONS[0], Assign("up/dot", ((0, 2), (0, 2)), places(0, 2, 1, 3)), DECISIONS[2])),
        Plan("mine", 4, (*DECISIONS[:2], Order("down/dot", "up/dot"))),
    ],
    ids=["devices", "fewer", "order", "factor", "placed", "direction"],
)
def test_other_decisions_have_other_digests(other: Plan) -> None:
    assert other.digest != PLAN.digest
