"""Stages cut over tables, against all ways to cut them; and the optima that Piper has published for BERT-32."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from bench.piper import OPTIMA, bert
from jscaler.estimate.prices.staged import seconds_of_turns
from jscaler.plan_search.stages.cutter import Chain, Choice
from jscaler.tables import find_schedule
from jscaler.tables.simulator import turns_of
from jscaler.tables.table import one_by_one


def drawn(seed: int, replicas: bool = False) -> Chain:
    """Layers of few kinds, two plans or three for each number of devices, and a memory that may bind."""
    rng = np.random.default_rng(seed)
    layers, devices = int(rng.integers(2, 7)), int(rng.integers(2, 7))
    kinds = rng.integers(0, 2, layers)
    choices = []
    for count in rng.choice(np.arange(1, devices + 1), size=min(3, devices), replace=False):
        for _ in range(int(rng.integers(1, 4))):
            rows = {what: rng.integers(1, 9, 2)[kinds] / count for what in ("seconds", "once", "held", "kept")}
            rows["forward"] = rows["seconds"] * rng.uniform(0.2, 0.6)
            sums = {what: ranges(own) for what, own in rows.items()}
            if rng.random() < 0.3:
                sums["seconds"][0, 1:] = math.inf  # no plan for a first stage
            choices.append(Choice(int(count), **sums, replicas=int(rng.integers(1, count + 1)) if replicas else 1))
    microbatches = int(rng.integers(2, 9))
    under_way = [min(microbatches, n) for n in range(1, devices + 1)]
    memory = None if rng.random() < 0.2 else float(rng.integers(4, 60))
    counts = range(1, devices + 1) if replicas else rng.choice([1, 2, 3, 4], size=3, replace=False)
    hops = {one.devices: rng.integers(0, 3, (2, layers)) / one.devices for one in choices}
    per_host = devices if replicas or rng.random() < 0.5 else int(rng.integers(1, devices + 1))
    return Chain(layers, devices, choices, microbatches, under_way, hops, memory, [*map(int, counts)], per_host)


def ranges(rows: np.ndarray) -> np.ndarray:
    """Sums of all ranges."""
    sums = np.concatenate([[0.0], np.cumsum(rows)])
    return sums[None, :] - sums[:, None]


def on_hosts(chain: Chain, bounds: tuple[int, int]) -> bool:
    """Whether the devices between are of one host, or of whole hosts."""
    hosts = {device // chain.per_host for device in range(*bounds)}
    return len(hosts) == 1 or (bounds[0] % chain.per_host == 0 and bounds[1] - bounds[0] > chain.per_host)


def every_cut(chain: Chain) -> Iterator[tuple[tuple[int, int, int], ...]]:
    """All that fit, on any number of devices."""
    for count in (n for n in chain.counts if n <= chain.layers):
        for cuts in itertools.combinations(range(1, chain.layers), count - 1):
            bounds = [*itertools.pairwise((0, *cuts, chain.layers))]
            for numbers in itertools.product(range(len(chain.choices)), repeat=count):
                stages = tuple((*own, number) for own, number in zip(bounds, numbers, strict=True))
                if sum(chain.choices[n].replicas for n in numbers) > chain.devices:
                    continue
                firsts = [*itertools.accumulate((chain.choices[n].devices for n in numbers), initial=0)]
                if not all(map(functools.partial(on_hosts, chain), itertools.pairwise(firsts))):
                    continue
                legal = all(math.isfinite(chain.choices[n].seconds[i, j]) for i, j, n in stages)
                if legal and (chain.memory is None or max(chain.peaks(stages)) <= chain.memory + 1e-9):
                    yield stages


def ways(chain: Chain, stages: tuple[tuple[int, int, int], ...]) -> tuple[list[float], list[float]]:
    """Seconds of hops behind each stage, and of a micro-batch from each on and back."""
    hops, first = list[float](), 0
    for _, stop, number in stages:
        first += chain.choices[number].devices
        hops.append(
            chain.hops[chain.choices[number].devices][int(first % chain.per_host == 0), stop] if stop < chain.layers else 0
        )
    taken = [chain.choices[n].seconds[i, j] + hop for (i, j, n), hop in zip(stages, hops, strict=True)]
    return hops, [sum(taken[place:]) for place in range(len(stages))]


def seconds_of(chain: Chain, stages: tuple[tuple[int, int, int], ...], lower: bool) -> float:
    """As the cutter's module says, one stage after another."""
    parts, m = list[float](), chain.microbatches - 1
    _, rounds = ways(chain, stages)
    for place, (i, j, number) in enumerate(stages):
        one, under_way = chain.choices[number], chain.under_way[len(stages) - place - 1]
        last = place == len(stages) - 1
        slow = -(0 if last else (under_way - 1) * one.forward[i, j]) if lower else one.once[i, j]
        parts += [m * one.seconds[i, j] + slow, (m // under_way if lower else m / under_way) * rounds[place]]
    return rounds[0] + max(parts)


@pytest.mark.parametrize("lower", [False, True])
@pytest.mark.parametrize("seed", range(60))
def test_no_cut_takes_less(seed: int, lower: bool) -> None:
    chain = dataclasses.replace(drawn(seed), lower=lower)
    every = [s for s in every_cut(chain) if sum(chain.choices[n].devices for *_, n in s) == chain.devices]
    found = chain.cut()
    assert (found is None) == (not every)
    if found is not None:
        assert found.stages in every
        assert found.seconds == pytest.approx(min(seconds_of(chain, one, lower) for one in every), rel=1e-12)


@pytest.mark.parametrize("seed", [86, 143, 146])
def test_it_ends_where_sums_are_rounded_one_way_or_another(seed: int) -> None:
    """Way from stage to stage decides: it is added up from the last, and again for the stages that were found."""
    rng, chain = np.random.default_rng(seed), drawn(seed)
    scaled = [dataclasses.replace(c, seconds=c.seconds * rng.uniform(0.5, 1), once=0 * c.once) for c in chain.choices]
    hops = {devices: rng.uniform(0, 20, own.shape) for devices, own in chain.hops.items()}
    under_way = [min(2, n) for n in range(1, chain.devices + 1)]
    chain = dataclasses.replace(
        chain, choices=scaled, hops=hops, microbatches=2, under_way=under_way, counts=range(1, 7)
    )  # fmt: skip
    every = [s for s in every_cut(chain) if sum(chain.choices[n].devices for *_, n in s) == chain.devices]
    found = chain.cut()
    assert found is not None
    assert found.seconds == pytest.approx(min(seconds_of(chain, one, False) for one in every), rel=1e-12)


@pytest.mark.parametrize("seed", range(60))
def test_no_order_of_a_schedule_takes_less_than_the_lower_bound(seed: int) -> None:
    """And most take about as long as is said otherwise."""
    chain = drawn(seed)
    for stages in itertools.islice((one for one in every_cut(chain) if len(one) > 1), 40):
        hops, _ = ways(chain, stages)
        forward = {place: float(chain.choices[n].forward[i, j]) for place, (i, j, n) in enumerate(stages)}
        blocks = {
            "F": forward,
            "B": {p: float(chain.choices[n].seconds[i, j]) - forward[p] for p, (i, j, n) in enumerate(stages)},
        }
        once = [float(chain.choices[n].once[i, j]) for i, j, n in stages]
        table = find_schedule("1f1b").table(len(stages), chain.microbatches)
        hop = lambda first, second, hops=hops: hops[min(first, second)] / 2  # noqa: E731
        taken = seconds_of_turns(turns_of(one_by_one(table)), blocks, once, hop, 1.0)
        assert seconds_of(chain, stages, lower=True) <= taken * (1 + 1e-12)
        assert taken <= seconds_of(chain, stages, lower=False) + max(once) + 1e-12 or chain.microbatches < 99


@pytest.mark.parametrize("seed", range(30))
def test_no_slowest_stage_takes_less(seed: int) -> None:
    chain = drawn(seed, replicas=True)
    every = [s for s in every_cut(chain) if sum(chain.choices[n].devices for *_, n in s) <= chain.devices]
    found = chain.slowest_stage()
    assert (found is None) == (not every)
    if found is not None:
        assert found.stages in every
        assert found.seconds == pytest.approx(
            min(max(chain.slow(chain.choices[n], 1)[i, j] for i, j, n in s) for s in every), rel=1e-12
        )


@pytest.mark.parametrize("case", [one for one in OPTIMA if one.devices <= 32], ids=str)
def test_pipers_optima(case: Any) -> None:
    found = bert(case).slowest_stage()
    if case.seconds is None:
        assert found is None
        return
    assert found is not None
    assert found.seconds == pytest.approx(case.seconds, abs=1e-6)
    assert len(found.stages) == case.stages
