"""Do random programs under random plans give one device's numbers?

Each case is a small random program (dots, elementwise functions, reductions, reshapes, transposes, look-ups, scatters,
softmax, norms, convolutions, pooling, cumsum, sort, scan, cond, dropout) and its gradient, under a plan that splits most
ops at random: nested, along several factors, on the devices in a random order. Two steps in float64 against ``jax.jit``;
``worst`` is the largest difference in units of 1e-10 of the leaf's largest element. What is sent is proven by
``jscaler.verify``.
``--timed``: the plans also have time axes, one or two, and one to four devices; every third case gives axes of few names
any counts, on forward and on backward ops, which is right or refused.
``--alone``: models with statistics of rows, auxiliary losses and running state, under
``accumulate(…, per_microbatch=…)``, against a loop by hand over the step traced on the part.
``--groups``: plans that place ops on two or three device groups, apart, nested or overlapping, backward ops too; in every
tenth case a loop spans them, whose parts may take turns on them (most that are refused have two such loops).
``--pipelines``: chains and stacks of layers as pipelines, with co-shard, recompute, ZeRO and tensor parallelism inside of
stages, under each schedule; in half of them no layer ends at a residual. Any 110 cases have every pair of both.
A case that takes longer than five minutes hangs: it counts as failed, and so do those behind it in its row, not run then.
"""

import collections
import functools
import multiprocessing
import queue
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from bench.harness import Row, main

COLUMNS = ("cases", "devices", "kinds of steps", "ops split", "refused", "why", "worst", "failed")
CHUNK = 20
LIMIT = 300  # seconds of one case: behind that it hangs
OPTIONS = {
    "cases": {"type": int, "default": 1000, "help": "how many programs"},
    "first": {"type": int, "default": 1000, "help": "the first seed"},
    "workers": {"type": int, "default": 2, "help": "processes"},
    "timed": {"action": "store_true", "help": "plans with time axes"},
    "alone": {"action": "store_true", "help": "models that run on each micro-batch alone"},
    "groups": {"action": "store_true", "help": "plans that place ops on several device groups"},
    "pipelines": {"action": "store_true", "help": "pipelines with other plans inside of stages"},
}


def chunk(seeds: range, timed: bool = False, alone: bool = False, groups: bool = False, pipelines: bool = False) -> Row:
    """Measure some cases; a case that fails or raises is named."""
    import jax

    from tests.part_models import draw_model, measure_model
    from tests.pipelines import measure_pipeline, plan_of
    from tests.programs import devices_of, measure

    if jax.config.jax_num_cpu_devices != 8:  # type: ignore[attr-defined]
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_enable_x64", True)
    warnings.simplefilter("ignore")
    found, failed = [], []

    def case(seed: int) -> Any:
        if pipelines:
            return measure_pipeline(seed)
        counts = seed % (10 if groups else 3) == 0 and (timed or groups)
        return measure_model(seed) if alone else measure(seed, timed=timed, counts=counts, groups=groups)

    for seed in seeds:
        try:
            found.append(within(LIMIT, functools.partial(case, seed)))
        except TimeoutError:
            failed += [
                f"{seed} {_steps(seed, alone, pipelines)}: hangs",
                *(f"{n}: not run" for n in range(seed + 1, seeds.stop)),
            ]
            break
        except Exception as error:
            failed.append(f"{seed} {_steps(seed, alone, pipelines)}: {type(error).__name__}: {str(error)[:300]}")
            continue
        if found[-1].worst > 1:
            failed.append(f"{seed} {found[-1].steps}: {found[-1].where} is {found[-1].worst:.3g} off")
    jax.clear_caches()
    devices = {
        draw_model(seed).devices if alone else plan_of(seed)[1] if pipelines else devices_of(seed, timed) for seed in seeds
    }
    return {
        "cases": len(seeds),
        "devices": " ".join(map(str, sorted(devices))),
        "kinds of steps": len({name for f in found for name in f.steps}),
        "ops split": sum(f.splits for f in found),
        "refused": sum(bool(f.refused) for f in found),
        "why": "; ".join(f"{n}× {why}" for why, n in collections.Counter(map(_reason, found)).items() if why),
        "worst": f"{max((f.worst for f in found), default=0.0):.2g}",
        "failed": "; ".join(failed),
        "value": float(len(failed)),
        "bound": 0.0,
    }


def within(seconds: float, measure: Callable[[], Any]) -> Any:
    """What ``measure`` returns or raises; TimeoutError behind ``seconds``, and its thread is left behind."""
    answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put((measure(), None))
        except BaseException as error:
            answers.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    try:
        answer, error = answers.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError from None
    if error is not None:
        raise error
    return answer


def _reason(found: Any) -> str:
    """Why a case was refused, without the names that are its own; empty for others."""
    return re.sub(r"\d+", "n", re.sub(r"'[^']*'", "'…'", found.refused))[:90]


def _steps(seed: int, alone: bool, pipelines: bool) -> object:
    """What a case that failed is made of, where it can be drawn at all."""
    from tests.part_models import draw_model
    from tests.pipelines import draw_net, plan_of
    from tests.programs import draw_program

    try:
        if pipelines:
            return plan_of(seed)[0], draw_net(seed).steps
        return draw_model(seed).drawn if alone else draw_program(seed).steps
    except Exception as error:
        return f"(not drawn: {error})"


def rows(
    quick: bool, cases: int, first: int, workers: int, timed: bool, alone: bool, groups: bool, pipelines: bool
) -> Iterator[Row]:
    kind = {"timed": timed, "alone": alone, "groups": groups, "pipelines": pipelines}
    if quick:
        yield chunk(range(first, first + 4), **kind)
        yield chunk(range(first, first + 1), pipelines=True)
        return
    seeds = range(first, first + cases)
    chunks = [seeds[i : i + CHUNK] for i in range(0, len(seeds), CHUNK)]
    # fresh processes now and then: XLA keeps what it compiled
    with multiprocessing.get_context("spawn").Pool(workers, maxtasksperchild=5) as pool:
        yield from pool.imap(functools.partial(chunk, **kind), chunks)


if __name__ == "__main__":
    main("programs", __doc__ or "", COLUMNS, rows, options=OPTIONS)
