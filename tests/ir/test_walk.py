"""Walks through random graphs, against what is slow and obvious."""

import itertools
import random
from graphlib import CycleError

import pytest

from jscaler.ir.walk import Sets, between, closure, dependents, grouped, in_order, operands_first

SEEDS = range(40)
Edges = dict[int, list[int]]


def edges(seed: int, acyclic: bool) -> Edges:
    rng = random.Random(seed)
    count = rng.randrange(1, 12)
    return {i: [j for j in range(i if acyclic else count) if rng.random() < 0.3] for i in range(count)}


def test_values_are_grouped_in_the_order_of_the_first_of_each() -> None:
    found = grouped((n % 3, n) for n in (5, 1, 3, 2, 5, 4))
    assert list(found.items()) == [(2, [5, 2, 5]), (1, [1, 4]), (0, [3])]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_closure_is_all_that_paths_lead_to_by_distance(seed: int) -> None:
    graph = edges(seed, acyclic=False)
    distance = {0: 0}
    for step in range(len(graph)):
        for i in [i for i, d in distance.items() if d == step]:
            for j in graph[i]:
                distance.setdefault(j, step + 1)
    found = list(closure([0, 0], graph.__getitem__))
    assert sorted(found) == sorted(distance)
    assert [distance[i] for i in found] == sorted(distance.values())


def test_the_closure_asks_no_further_than_it_is_read() -> None:
    assert list(itertools.islice(closure([0], lambda i: [i + 1]), 3)) == [0, 1, 2]


@pytest.mark.parametrize("seed", SEEDS)
def test_each_comes_behind_those_before_it_and_else_by_key(seed: int) -> None:
    before = edges(seed, acyclic=True)
    left, slow = dict(before), list[int]()
    while left:
        slow.append(max(i for i, sources in left.items() if left.keys().isdisjoint(sources)))
        del left[slow[-1]]
    assert list(in_order(before, key=lambda i: -i)) == slow


@pytest.mark.parametrize("seed", SEEDS)
def test_a_cycle_is_named_each_before_the_next(seed: int) -> None:
    before = edges(seed, acyclic=False)
    cyclic = any(i in closure(sources, before.__getitem__) for i, sources in before.items())
    if not cyclic:
        assert sorted(in_order(before, key=int)) == sorted(before)
        return
    with pytest.raises(CycleError) as error:
        list(in_order(before, key=int))
    cycle = error.value.args[1]
    assert cycle[0] == cycle[-1]
    assert all(a in before[b] for a, b in itertools.pairwise(cycle))


@pytest.mark.parametrize("seed", SEEDS)
def test_operands_come_first_and_what_is_known_is_left_out(seed: int) -> None:
    operands = edges(seed, acyclic=True)
    root, known = len(operands) - 1, {len(operands) // 2}
    found = list(operands_first([root], operands.__getitem__, known))
    wanted = closure({root} - known, lambda i: [j for j in operands[i] if j not in known])
    assert sorted(found) == sorted(wanted)
    assert all(j in known or found.index(j) < found.index(i) for i in found for j in operands[i])


def test_operands_come_in_the_order_in_which_they_are_given() -> None:
    assert list(operands_first([4, 3], {4: [2, 1], 3: [0], 2: [0], 1: [], 0: []}.__getitem__)) == [0, 2, 1, 4, 3]


@pytest.mark.parametrize("seed", SEEDS)
def test_dependents_and_what_lies_between_are_those_on_paths(seed: int) -> None:
    reads = edges(seed, acyclic=True)  # each item makes its own number
    own = {i for i in reads if random.Random(seed + i).random() < 0.3}
    needs = {i: set(closure([i], reads.__getitem__)) for i in reads}
    below = [i for i in reads if needs[i] & own]
    assert dependents(reads, own, reads.__getitem__, lambda i: [i]) == below
    expected = [i for i in below if i not in own and any(i in needs[j] for j in own)]
    assert between(reads, own, reads.__getitem__, lambda i: [i]) == expected


@pytest.mark.parametrize("seed", SEEDS)
def test_sets_are_what_hangs_together(seed: int) -> None:
    graph = edges(seed, acyclic=False)
    sets, groups = Sets[int](), [{i} for i in graph]
    for a, others in graph.items():
        for b in others:
            one, two = (next(g for g in groups if i in g) for i in (a, b))
            assert sets.join(a, b) == (one is not two)
            groups = [g for g in groups if g is not one and g is not two] + [one | two]
    assert sorted(sets.among(graph)) == sorted(sorted(g) for g in groups)
    assert all(sets.root(i) == sets.root(g[0]) for g in sets.among(graph) for i in g)
