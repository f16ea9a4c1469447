"""Spaces: which points they have, how these are written, and what is refused."""

from typing import Any

import pytest

from jscaler import plans
from jscaler import spaces as s
from jscaler.errors import PlanError, UnknownNameError

EIGHT = s.Setting(devices=8, per_host=4, batch=12)


def texts(*spaces: s.Space, at: s.Setting = EIGHT) -> list[str]:
    return [point.text for space in spaces for point in space.points(at)]


def test_domains_know_devices_hosts_and_rows() -> None:
    domains = [s.divisors_of_devices(), s.divisors_of_devices(most=4, least=2), s.within_host(), s.parts_of_batch(most=4)]
    assert [[value.value for value in domain.values(EIGHT)] for domain in domains] == [
        [1, 2, 4, 8], [2, 4], [1, 2, 4], [1, 2, 3, 4],
    ]  # fmt: skip


def test_a_point_is_written_as_a_person_writes_it_and_read_again() -> None:
    for space in (one for made in s.SPACES.values() for one in made() if isinstance(one, s.Space)):
        for point in space.points(EIGHT):
            try:
                policy = plans.by_name(point.text)
            except PlanError as error:
                if not str(error).startswith("there is no schedule"):  # for these numbers
                    raise
            else:
                assert policy.__name__ == point.make().__name__


def test_inner_spaces_get_the_devices_of_a_stage() -> None:
    inner = s.Space("megatron", tp=s.within_host(), dp=s.rest_of_devices("tp"))
    space = s.Space("pipeline", stages=[2, 3, 8], microbatches=2, plan=s.in_each_stage(inner))
    assert texts(space) == [
        "pipeline(2, 2, plan=megatron(dp=4, tp=1))", "pipeline(2, 2, plan=megatron(dp=2, tp=2))",
        "pipeline(2, 2, plan=megatron(dp=1, tp=4))", "pipeline(8, 2, plan=megatron(dp=1, tp=1))",
    ]  # fmt: skip


def test_some_layers_are_parts_of_those_of_a_stage() -> None:
    space = s.Space("recompute_layers", layers=s.some_layers(), plan=s.Space("zero1"))
    staged = s.Space("pipeline", stages=[2, 8], microbatches=2, plan=s.in_each_stage(space))
    at = s.Setting(devices=8, per_host=4, batch=12, layers=12)
    some = [f"recompute_layers(plan=zero1(){layers})" for layers in (", layers=3", ", layers=6", ", layers=9", "")]
    assert texts(space, at=at) == some
    assert texts(staged, at=at) == [f"pipeline({n}, 2, plan={text})" for n, text in ((2, one) for one in (
        "recompute_layers(plan=zero1(), layers=1)", "recompute_layers(plan=zero1(), layers=3)",
        "recompute_layers(plan=zero1(), layers=4)", "recompute_layers(plan=zero1())"))] + [
        "pipeline(8, 2, plan=recompute_layers(plan=zero1()))"]  # fmt: skip
    assert len({point.family for point in space.points(at)}) == 1


def test_points_of_a_family_are_in_order() -> None:
    space = s.Space("accumulate", microbatches=s.parts_of_batch(), plan=s.Space("megatron", zero=s.in_order(1, 3)))
    points = [*space.points(s.Setting(8, 8, 4))]
    assert len({point.family for point in points}) == 1
    first, last = points[0], points[-1]
    assert last.is_behind(first)
    assert not first.is_behind(last)
    assert last.holds_less(first)
    assert not first.holds_less(last)
    few, many = (point for point in points if point.numbers["plan.zero"] == 3 and point.numbers["microbatches"] in (1, 4))
    assert many.is_behind(few)
    assert not points[0].is_behind(few)
    schedules = s.Space("pipeline", stages=2, microbatches=4, schedule=s.in_order("1f1b", "zb_h1", saves=False))
    plain, zero_bubble = schedules.points(EIGHT)
    assert zero_bubble.is_behind(plain)
    assert not zero_bubble.holds_less(plain)


def test_points_of_several_chains_are_of_several_families() -> None:
    spaces = [s.Space("megatron", zero=0), s.Space("megatron", zero=1), s.Space("megatron", zero=s.in_order(1, 2))]
    assert len({point.family for space in spaces for point in space.points(EIGHT)}) == 3


def test_a_policy_of_ones_own_has_arguments_with_domains() -> None:
    seen: list[Any] = []

    def mine(graph: Any, devices: Any, parts: int, again: bool) -> None:
        seen.append((graph, devices, parts, again))

    space = s.Space(
        mine, parts=s.divisors_of_devices(least=4), again=[False, True], where=lambda n: n["parts"] > 4 or n["again"]
    )
    points = [*space.points(EIGHT)]
    assert [point.text for point in points] == [
        "mine(4, True)", "mine(8, False)", "mine(8, True)",
    ]  # fmt: skip
    points[1].make()("graph", "devices")
    assert seen == [("graph", "devices", 8, False)]


def test_a_policy_with_holes_has_a_point_for_each_mesh() -> None:
    space = s.OpenSpace(s.alpa, mesh=s.meshes(axes=3), microbatches=[1])
    points = [*space.points(EIGHT)]
    assert [point.opening.mesh for point in points if point.opening is not None] == [
        (8,), (4, 2), (2, 2, 2), (2, 4),
    ]  # fmt: skip
    assert not [*space.unlimited()]


def test_a_limit_can_be_taken_away() -> None:
    space = s.Space("co_shard", parts=s.in_order(2, 4), plan=s.Space("megatron", tp=s.divisors_of_devices(most=2)))
    ((text, wider),) = space.unlimited()
    assert text == "tp=divisors_of_devices(most=2)"
    assert {*texts(wider)} - {*texts(space)} == {f"co_shard({n}, plan=megatron(tp={tp}))" for n in (2, 4) for tp in (4, 8)}


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: s.Space("megatorn"), UnknownNameError, "megatron"),
        (lambda: s.Space("megatron", pt=2), UnknownNameError, "argument named 'pt'"),
        (lambda: s.Space(3), PlanError, "not 3"),
        (lambda: s.one_of(), PlanError, "one or more"),
        (lambda: texts(s.Space("megatron", tp=[])), PlanError, "no values"),
        (lambda: texts(s.Space("megatron", dp=s.rest_of_devices("tp"))), PlanError, "give 'tp' in front of it"),
        (lambda: s.in_each_stage(), PlanError, "one or more"),
        (
            lambda: texts(s.Space("pipeline", plan=s.in_each_stage(s.Space("zero1")))),
            PlanError,
            "'stages' is not chosen yet",
        ),
        (lambda: s.divisors_of_devices(most=2, least=3), PlanError, "most"),
        (lambda: s.as_spaces("alpaca"), UnknownNameError, "space named 'alpaca'"),
        (lambda: s.as_spaces(7), PlanError, "not 7"),
        (lambda: s.as_spaces([]), PlanError, "no space is given"),
    ],
)
def test_what_is_no_space_is_refused(make: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        make()
