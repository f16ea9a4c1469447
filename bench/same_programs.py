"""Does every plan still lower to the same program? Hashes of the StableHLO of some hundred pairs of a model and a plan.

For changes that must not change what any plan lowers to: the pairs of `bench.parity_cases`, Swin, and random programs under
random plans in space and in time. Locations are no part of the text; private functions are numbered in the order in which
they stand. The hashes that are kept, in ``bench/same_programs/``, one file for each version of JAX, say what the last
change meant to lower: ``--write`` keeps those of now. Nothing is compiled but with ``--figures``, which gives FLOPs, bytes
sent and the peak of a device on 8 H100, as XLA has them (no GPU is needed): for pairs that had to change, before and after.
"""

import functools
import hashlib
import json
import multiprocessing
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

import jscaler
from bench.harness import Row, main
from bench.parity_cases import CASES, Case, Run

COLUMNS = ("model", "plan", "devices", "program", "kept", "flops", "sent", "peak_bytes")
KEPT = Path(__file__).parent / "same_programs"
SWIN = [
    Run("single", 1), Run("data_parallel", 2), Run("tensor_parallel", 2), Run("zero1", 2), Run("zero3", 2),
    Run("megatron(dp=2, tp=2)", 4), Run("co_shard(2, plan=tensor_parallel())", 2), Run("accumulate(2, data_parallel())", 2),
]  # fmt: skip
MORE = {"conv + BatchNorm": [Run("accumulate(2, data_parallel(), per_microbatch='norm')", 2)], "Swin": SWIN}
RANDOM = range(1000, 1008)  # seeds


@dataclass(frozen=True)
class Pair:
    """A model under a plan; a random program is named by its seed."""

    model: str
    run: Run

    @property
    def key(self) -> str:
        return f"{self.model} | {self.run.name} | {self.run.devices}"


def pairs() -> list[Pair]:
    """All pairs, in order."""
    found = [Pair(model, run) for model, (_, runs) in CASES.items() for run in runs]
    found += [Pair(model, run) for model, runs in MORE.items() for run in runs]
    return found + [Pair(f"random {seed}", Run(how, 0)) for seed in RANDOM for how in ("in space", "in time")]


def lowered(pair: Pair) -> Any:
    """The pair's step, lowered in float32."""
    if pair.model.startswith("random"):
        return _random(int(pair.model.split()[1]), timed=pair.run.name == "in time")
    step, arguments = _swin() if pair.model == "Swin" else _step(CASES[pair.model][0](jax.numpy.float32))
    decorated = jscaler.parallelize(pair.run.plan, devices=pair.run.devices, donate_argnames="state")(step)
    return decorated.lower(*arguments)


def _step(case: Case) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    import optax

    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    return case.train_step(optimizer), (case.state(optimizer), case.batches[0], jax.random.key(0))


def _swin() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    import optax

    from models.swin import Swin, SwinConfig
    from models.training import image_train_step, make_image_state

    sizes = {"hidden": 8, "heads": 4, "depths": (2,), "window": 2, "image": 4, "patch": 1, "classes": 4}
    state = make_image_state(Swin(SwinConfig(**sizes)), (4, 4, 3), optax.sgd(0.1, momentum=0.9))
    images = jax.numpy.ones((4, 4, 4, 3))
    return image_train_step, (state, {"images": images, "labels": jax.numpy.arange(4)})


def _random(seed: int, timed: bool) -> Any:
    from tests.programs import lowered_case

    with jax.enable_x64(True):
        return lowered_case(seed, timed)[1]


def text_hash(text: str) -> str:
    """A short hash of StableHLO ``text``, whatever its module and its private functions are called."""
    text = re.sub(r"^module @[\w.-]+", "module", text)
    names: dict[str, str] = {}
    for name in re.findall(r"func\.func private @([\w.-]+|\"[^\"]+\")", text):
        names.setdefault(name, f"f{len(names)}")
    text = re.sub(r"@([\w.-]+|\"[^\"]+\")", lambda m: "@" + names.get(m[1], m[1]), text)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def measured(key: str, figures: bool) -> Row:
    """The row of one pair, without what was kept."""
    warnings.simplefilter("ignore")
    if jax.config.jax_num_cpu_devices != 8:  # type: ignore[attr-defined]
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 8)
    pair = next(p for p in pairs() if p.key == key)
    made = lowered(pair)
    row: Row = {"model": pair.model, "plan": pair.run.name, "devices": made.plan.plan.num_devices}
    row["program"] = text_hash(made.as_text())
    if figures:
        from bench.targets import figures as figures_of
        from jscaler.runtime.target import WITHOUT_GPU

        compiled = made.lowered.compile(WITHOUT_GPU)
        found = figures_of(compiled)
        row |= {"flops": compiled.cost_analysis()["flops"], "sent": round(found.sent), "peak_bytes": found.peak}
    jax.clear_caches()
    return row


def kept_file() -> Path:
    """The file of this version of JAX."""
    return KEPT / f"jax-{jax.__version__}.json"


def rows(quick: bool, only: str, write: bool, figures: bool, workers: int) -> Iterator[Row]:
    """A row for each pair; ``value`` counts the ones that differ from what was kept."""
    file = kept_file()
    kept: dict[str, str] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    if not kept and not write:
        print(f"nothing is kept for jax {jax.__version__}; --write keeps what is lowered now", file=sys.stderr)
        return
    chosen = [p.key for p in pairs() if only in p.key and (p.run.quick or not quick)]
    file.parent.mkdir(exist_ok=True)
    for key, row in zip(chosen, _each(chosen, figures, 1 if quick else workers), strict=True):
        if write:  # at once, so that a run that is stopped loses nothing
            kept[key] = row["program"]
            file.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        known = kept.get(key, "")
        yield {
            **row,
            "kept": "" if known == row["program"] else known or "none",
            "value": known != row["program"],
            "bound": 0,
        }


def _each(keys: Sequence[str], figures: bool, workers: int) -> Iterator[Row]:
    measure = functools.partial(measured, figures=figures)
    if workers == 1:
        yield from map(measure, keys)
        return
    with multiprocessing.get_context("spawn").Pool(workers, maxtasksperchild=20) as pool:
        yield from pool.imap(measure, keys)


OPTIONS: dict[str, dict[str, Any]] = {
    "only": {"default": "", "metavar": "TEXT", "help": "only pairs whose 'model | plan | devices' holds this"},
    "write": {"action": "store_true", "help": "keep what is lowered now"},
    "figures": {"action": "store_true", "help": "compile for 8 H100, and show FLOPs, bytes sent and peak"},
    "workers": {"type": int, "default": 2, "help": "processes"},
}

if __name__ == "__main__":
    main("same_programs", __doc__ or "", COLUMNS, rows, options=OPTIONS)
