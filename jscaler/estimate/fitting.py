"""``jscaler.fit``: which plans fit into a device's memory, and what each costs beside computing the step once.

Nothing is compiled: peaks are those of ``jscaler.cost``, within about 15 % of XLA's (17 % with grouped queries).
"""

import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from jscaler.clusters import Cluster, find_cluster
from jscaler.errors import DeviceError, JscalerError, PlanError, PlanWarning, UnknownNameError, check_flag, shown
from jscaler.estimate.cost import Cost
from jscaler.estimate.fit_result import Fit, Tried
from jscaler.estimate.prices import Price, Prices
from jscaler.estimate.query import cost
from jscaler.ir import Graph
from jscaler.lower.step_plan import graph_of
from jscaler.plans import by_name
from jscaler.plans.batch import BATCH, batch_leaves
from jscaler.plans.ladder import ladder

SURELY = 2.0  # of a device's memory: what fits has no higher price by tables (bench.prices: at most 1.8 times its peak)


def fit(
    graph: Any,
    cluster: Cluster | str | os.PathLike[str],
    plans: Iterable[str] | None = None,
    *,
    every: bool = False,
    donated: bool = True,
) -> Fit:
    """Try plans from the cheapest to the most drastic until one fits into the memory of ``cluster``'s devices.

    Args:
        graph: a train step's, ``train_step.graph(state, batch)``; or a step that is lowered, or compiled, or its ``.plan``,
            whose own plan does not count.
        cluster: a `Cluster`, a name (``"V100-32GB"``, ``"8xH100-80GB"``) or a .toml file.
        plans: what to try, in this order; by default the ladder of `jscaler.plans.ladder`.
        every: whether to try all of them.
        donated: whether the step updates its state in place.

    Returns:
        What was tried. Plans that are not legal for the step say why. Of the ladder, behind a first rung that is far too
        large, those that tables price as far too large are not worked out (`SURELY`), unless all are to be tried.

    Raises:
        DeviceError: the cluster does not say how much memory its devices have.
        UnknownNameError: no cluster or plan has the name.
        PlanError: a plan's arguments are not those that it takes; or ``graph`` is none.

    Example:
        >>> found = jscaler.fit(train_step.graph(state, batch), "V100-32GB")
        >>> found.chosen.plan, found.chosen.headroom > 30e9  # bytes to spare
        ('single', True)
    """
    graph = graph_of("fit", graph)
    if plans is not None and (isinstance(plans, str) or not isinstance(plans, Iterable)):
        raise PlanError(f"fit: plans are names in a list, such as ['single', 'zero3()'], not {shown(plans)}")
    check_flag("fit: every", every)
    on = with_memory(cluster if isinstance(cluster, Cluster) else find_cluster(cluster))
    rungs = ladder(on.num_devices, batch_size(graph)) if plans is None else list(plans)
    found: dict[str, Tried] = {}
    for tried in climb(graph, on, rungs, donated=donated, skim=plans is None and not every):
        found[tried.plan] = tried
        if tried.fits and not every:
            break
    return Fit(on, tuple(found.values()))


def with_memory(cluster: Cluster) -> Cluster:
    """``cluster``; raises DeviceError if it does not say how much memory a device has."""
    if not cluster.memory:
        raise DeviceError(
            f"cluster '{cluster.name}' does not say how much memory its devices have; give one that does, such as "
            "V100-32GB or 8xH100-80GB"
        )
    return cluster


def batch_size(graph: Graph, batch: str = BATCH) -> int:
    """How many sequences a step takes: the size of dim 0 of its batch; 1 where nothing says what that is.

    Raises:
        UnknownNameError: no input is called as ``batch`` says.
    """
    try:
        return math.gcd(*(t.shape[0] for t in batch_leaves(graph, batch)))
    except UnknownNameError:
        if batch != BATCH:
            raise
        return 1


def climb(
    graph: Graph,
    cluster: Cluster,
    plans: Sequence[str],
    *,
    donated: bool = True,
    skim: bool = False,
    progress: Callable[[str], Any] = lambda stage: None,
) -> Iterator[Tried]:
    """Each plan tried when the next is asked for.

    Args:
        skim: whether plans whose price by tables is far too large are not tried. If nothing else fits, the least of them
            comes once more at the end, tried after all.
        progress: is told each stage before it begins.

    Raises:
        UnknownNameError, PlanError: one is no plan; nothing has been tried then.
    """
    for plan in plans:
        by_name(plan)
    progress("estimating one device")
    base = cost(graph, "single", cluster.alone(), donated=donated)
    skim = skim and len(cluster.kinds) == 1  # tables know one kind of devices
    tables: Prices | None = None
    skipped: list[Tried] = []
    least, fits = math.inf, False
    for plan in plans:
        progress(f"estimating {plan}")
        guess = _price(tables, plan) if tables is not None else None
        if guess is not None and guess.peak > SURELY * cluster.memory:
            skipped.append(Tried(plan, None, guess=guess))
            yield skipped[-1]
            continue
        alone = cluster.num_devices == 1 and plan == "single"
        found = Tried(plan, base) if alone else _tried(graph, plan, cluster, base, donated)
        if found.cost is not None:
            least, fits = min(least, found.peak), fits or found.fits
            if skim and tables is None and cluster.device is not None and found.peak > SURELY * cluster.memory:
                tables = Prices(graph, cluster)
        yield found
    guesses = [(one.guess.peak, one.plan) for one in skipped if one.guess is not None]
    if guesses and not fits and min(guesses)[0] < least:
        yield _tried(graph, min(guesses)[1], cluster, base, donated)


def _price(tables: Prices, plan: str) -> Price | None:
    """By tables; None where these have none, or the plan is not legal."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PlanWarning)
        try:
            return tables.of(plan)
        except JscalerError:
            return None


def _tried(graph: Graph, plan: str, cluster: Cluster, base: Cost, donated: bool) -> Tried:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PlanWarning)
        try:
            found = cost(graph, plan, cluster, donated=donated)
        except JscalerError as error:
            return Tried(plan, None, f"{type(error).__name__}: {error}")
    for other in (w for w in caught if not issubclass(w.category, PlanWarning)):
        warnings.warn_explicit(other.message, other.category, other.filename, other.lineno)
    said = "; ".join(dict.fromkeys(str(w.message) for w in caught if issubclass(w.category, PlanWarning)))
    ratio = found.total_flops / base.flops if base.flops else 1.0
    return Tried(plan, found, said, ratio)
