"""Do tables price plans as ``jscaler.cost`` does? Seconds and peaks by `jscaler.estimate.prices` against it, plan by plan.

Of each model plans are drawn from the space ``memory`` and from pipelines, by a seed: 40, half of them within 1.5 times of
the fastest, as ``jscaler.cost`` has it. ``rho`` are rank correlations, of seconds over all and over the faster half, and
of peaks; ``error`` is the mean of |tables / cost - 1|, and ``most`` the largest. Seconds of one process: ``set_up`` of what
all plans share; of a price in the mean, with what is ``new`` in a plan, and ``again``; and of ``jscaler.cost``, also in the
mean, for a plan whose layouts are known then. ``no_price`` counts plans that tables have none for.
"""

import functools
import random
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import jscaler
from bench.harness import Row, main
from jscaler import spaces as s
from jscaler.clusters import find_cluster
from jscaler.errors import JscalerError
from jscaler.estimate.prices import NoPriceError, Price, Prices
from jscaler.plans import by_name
from jscaler.stages import transform

COLUMNS = (
    "model", "plans", "rho_half", "rho", "error", "most", "rho_peaks", "peak_error", "set_up", "new", "again", "cost",
    "ratio", "no_price",
)  # fmt: skip
CLUSTER = "8xA100-80GB"
NEAR = 1.5  # times the fastest
PLANS, DRAWN = 40, 90
STAGED = (
    "pipeline(2, 8, plan=data_parallel())", "pipeline(4, 8, plan=data_parallel())", "pipeline(2, 16, plan=zero1())",
    "pipeline(4, 16, plan=recompute_layers(data_parallel()))", "pipeline(2, 8, plan=recompute_layers(zero1()))",
    "pipeline(2, 8, schedule='gpipe', plan=data_parallel())", "pipeline(4, 8, schedule='zb_h1', plan=data_parallel())",
    "pipeline(2, 4, schedule='interleaved', chunks=2, plan=data_parallel())",
    "pipeline(8, 16, plan=recompute_layers())", "megatron(dp=2, tp=2, pp=2, microbatches=8)",
    "megatron(dp=1, tp=2, pp=4, microbatches=16)", "megatron(dp=2, tp=2, pp=2, microbatches=16, sequence=True)",
    "megatron(dp=1, tp=4, pp=2, microbatches=16)",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A model, and a graph of its step."""

    shown: str
    graph: Callable[[], Any]
    quick: bool = False


def paper(name: str, size: str, batch: int, **changes: Any) -> Any:
    from bench.paper_models import Model

    return Model(name, size, batch, tuple(sorted(changes.items()))).graph


def experts() -> Any:
    from bench.predicted import moe

    step, args = moe(64)
    return jscaler.parallelize("single", devices=1, donate_argnums=0)(step).graph(*args)


CASES = (
    Case("gpt-1.3b, stacked", functools.partial(paper, "gpt", "1.3b", 64), quick=True),
    Case("gpt-1.3b, a Python loop", functools.partial(paper, "gpt", "1.3b", 64, stacked=False)),
    Case("llama-1b, stacked", functools.partial(paper, "llama", "1b", 64, sequence=2048)),
    Case("mbart-3.9b", functools.partial(paper, "mbart", "3.9b", 64)),
    Case("swin-1.8b", functools.partial(paper, "swin", "1.8b", 64)),
    Case("moe, 4 layers of 8 experts", experts, quick=True),
    Case("evoformer-87m", functools.partial(paper, "evoformer", "87m", 32)),
)


@dataclass(frozen=True)
class Priced:
    """One plan: by tables, and by ``jscaler.cost``; seconds that each took."""

    plan: str
    price: Price
    seconds: float
    peak: int
    new: float
    again: float
    cost: float

    def __str__(self) -> str:
        seconds = f"{self.price.seconds:.4g} {self.seconds:.4g} ({self.price.seconds / self.seconds:.3f})"
        peaks = f"{self.price.peak / 1e9:.2f} {self.peak / 1e9:.2f} GB ({self.price.peak / self.peak:.3f})"
        return f"  {self.plan}: {seconds} s, {peaks}; {self.new:.3f} {self.again:.4f} {self.cost:.3f} s"


def rows(quick: bool, model: str, seed: int, every: bool) -> Iterator[Row]:
    for case in CASES:
        if model in case.shown and (case.quick or not quick):
            yield measure(case, seed, every, *((10, 16) if quick else (PLANS, DRAWN)))


def measure(case: Case, seed: int, every: bool, plans: int, drawn: int) -> Row:
    graph, cluster = case.graph(), find_cluster(CLUSTER)
    texts = [
        *(point.text for space in s.memory() for point in space.points(s.Setting(cluster.num_devices, 8, 64))),
        *STAGED,
    ]
    texts.sort(key=lambda text: random.Random(f"{seed}: {text}").random())  # others do not change a plan's place
    found: list[Priced] = []
    without: list[str] = []
    started = time.perf_counter()
    prices = Prices(graph, cluster)
    prices.of("data_parallel")
    set_up = time.perf_counter() - started
    for text in texts:
        if len(found) == drawn:
            break
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                plan = transform(prices.captured, by_name(text), cluster.num_devices, cost=cluster)
                started = time.perf_counter()
                price = prices.of(plan)
                new = time.perf_counter() - started
                prices.of(plan)
                again = time.perf_counter() - started - new
            except NoPriceError:
                without.append(text)
                continue
            except JscalerError:
                continue  # not legal for the model
            started = time.perf_counter()
            cost = jscaler.cost(graph, plan, cluster)
            peak, seconds = cost.memory.peak, cost.seconds.total
            assert seconds is not None
            found.append(Priced(text, price, seconds, peak, new, again, time.perf_counter() - started))
            if every:
                print(found[-1], flush=True)
    chosen = _chosen(found, plans, seed)
    return _row(case, chosen, set_up, without)


def _chosen(found: Sequence[Priced], plans: int, seed: int) -> list[Priced]:
    """So many plans, half of them near the fastest where there are enough of either."""
    best = min(one.seconds for one in found)
    draws = random.Random(seed)
    near, far = ([one for one in found if (one.seconds <= NEAR * best) is own] for own in (True, False))
    half = min(plans // 2, len(near))
    chosen = draws.sample(near, half) + draws.sample(far, min(len(far), plans - half))
    return chosen + draws.sample([one for one in near if one not in chosen], min(plans - len(chosen), len(near) - half))


def _row(case: Case, chosen: Sequence[Priced], set_up: float, without: Sequence[str]) -> Row:
    best = min(one.seconds for one in chosen)
    near = [one for one in chosen if one.seconds <= NEAR * best]
    errors = [abs(one.price.seconds / one.seconds - 1) for one in chosen]
    new, again, cost = (statistics.fmean(getattr(one, name) for one in chosen) for name in ("new", "again", "cost"))
    apart = 0.02 if len(chosen) == PLANS else 0.1  # of few plans two that are near decide
    rho_half, rho_peaks = _rho([(o.price.seconds, o.seconds) for o in near]), _rho([(o.price.peak, o.peak) for o in chosen])
    return {
        "model": case.shown, "plans": f"{len(near)} + {len(chosen) - len(near)}", "rho_half": rho_half,
        "rho": _rho([(one.price.seconds, one.seconds) for one in chosen]), "error": statistics.fmean(errors),
        "most": max(errors), "rho_peaks": rho_peaks,
        "peak_error": statistics.fmean(abs(one.price.peak / one.peak - 1) for one in chosen), "set_up": set_up, "new": new,
        "again": again, "cost": cost, "ratio": cost / again, "no_price": len(without), "apart_half": 1 - rho_half,
        "apart_peaks": 1 - rho_peaks, "bounds": {"error": 0.05, "apart_half": 0.05, "apart_peaks": apart},
    }  # fmt: skip


def _rho(pairs: Sequence[tuple[float, float]]) -> float:
    """Spearman's rank correlation: how alike two orders are; 1 where they are one."""
    places = np.argsort(np.argsort(np.array(pairs), axis=0), axis=0)
    apart = float(np.sum((places[:, 0] - places[:, 1]) ** 2))
    return 1 - 6 * apart / (len(pairs) ** 3 - len(pairs))


if __name__ == "__main__":
    options = {
        "model": {"default": "", "metavar": "TEXT", "help": "only models whose description holds this text"},
        "seed": {"default": 7, "type": int, "help": "of the draw"},
        "every": {
            "action": "store_true",
            "help": "print every plan as it is priced: by tables, by cost, seconds",
        },
    }
    main("prices", __doc__ or "", COLUMNS, rows, options=options)
