"""Does bad input ever meet with anything but jscaler's own errors? Plan files, cluster files, commands, and arguments of
plans, policies, `parallelize` and its steps, mutated by seed.

A case passes if it works, or raises a ``JscalerError`` (or a command's exit code for a mistake in usage), in one
sentence and within `SECONDS`. Nothing is compiled. ``--seed N --seconds 0`` runs one case again.
"""

import dataclasses
import json
import random
import shlex
import signal
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.harness import Row, main

COLUMNS = ("case", "cases", "worked", "refused", "value", "seed", "error", "longest")
SECONDS = 20  # more is a hang
LONGEST = 1500  # characters of a sentence: it names what is known, but nobody reads more
WORDS = (
    "", "0", "-1", "1", "2", "3", "2.5", "1e9", "nan", "99999999999999999999", "x", "gpt", "gpt-nano", "moe", "é∂",
    "llama-nano", "\x00", "(", ")", "None", "true", "[]", "{}", "a" * 300, "nano", "f32", "zero3", "fsdp", "megatron(2, 1)",
    "pipeline(2, 2)", "single(", "zero3(zero3)", "accumulate(0)", "accumulate(2, zero3())",
    "recompute_layers(zero1())", "co_shard(-1)", "2xH100-80GB", "x8xH100", "..", "/dev/null", "R1 V1 D(2,1)",
    "R2 V1 D(1,1) on any", "8,8", "1,3·8",
)  # fmt: skip
VALUES = (
    "None", "True", "-1", "0", "1", "2", "3", "2.5", "''", "'x'", "'batch'", "'params/a'", "[]", "[1]", "{}",
    "(2, 2)", "zero3()", "fsdp", "data_parallel()", "{'params/a': 0}", "{'params/a': 'x'}", "['params/a', 3]",
    "{'params/*': 7}", "{3: 1}", "float('x')", "1j", "b'x'", "...",
)  # fmt: skip
COMMANDS = (
    'plan --size nano --seq 8 --batch 4 --devices 2 --plan "data_parallel"',
    'plan --size nano --seq 8 --batch 4 --target 2xH100-80GB --plan "megatron(dp=1, tp=2)"',
    "plan --model moe --size nano --seq 8 --batch 4 --devices 2 --dtype f32 --plan \"zero3(batch='batch')\"",
    "plan --size nano --seq 8 --batch 4 --devices 2 --plan \"pipeline(2, 2, 'gpipe', plan=data_parallel())\"",
    'plan --model llama --seq 8 --batch 4 --target 4xH100-80GB --stacked --plan "megatron(dp=1, tp=4)"',
    'redistribute --shape 8,8 --from "R1 V4 D(2,1)" --to "R8 V1 D(1,1)" --cluster h100',
    'redistribute --shape 8,8 --from "R2 V1 D(1,1) on 0-1" --to "R1 V1 D(2,1) on 2-3" --dtype float16',
)


class Hang(Exception):
    """A case has taken longer than `SECONDS`."""


def mutated(data: Any, rng: random.Random) -> Any:
    """JSON-like ``data`` with one place of it changed, dropped, doubled or wrapped."""
    if isinstance(data, (dict, list)) and data and rng.random() < 0.9:
        keys = list(data) if isinstance(data, dict) else range(len(data))
        key = rng.choice(keys)
        copy = dict(data) if isinstance(data, dict) else list(data)
        action = rng.random()
        if action < 0.1:
            del copy[key]
        elif action < 0.2 and isinstance(copy, list):
            copy.append(copy[key])
        elif action < 0.25 and isinstance(copy, dict):
            copy[rng.choice(WORDS)[:40]] = copy.pop(key)
        else:
            copy[key] = mutated(copy[key], rng)
        return copy
    values = (
        None,
        True,
        -1,
        0,
        1,
        2,
        7,
        2.5,
        float("nan"),
        float("inf"),
        10**30,
        10**400,
        "",
        "x",
        [],
        {},
        [data],
        {"x": data},
    )
    return rng.choice(values)


def scrambled(text: str, rng: random.Random) -> str:
    """``text`` with a piece cut, doubled, or another character in it."""
    here = rng.randrange(len(text) + 1)
    until = min(len(text), here + rng.choice((0, 1, 1, 2, 5, 40)))
    return text[:here] + rng.choice(("", text[here:until] * 2, *'"[]{}=,.-0 9x\n#')) + text[until:]


def plan_case(texts: dict[str, str], rng: random.Random, folder: Path) -> Callable[[], Any]:
    """A plan file, read and held against the graph that it was made for."""
    import jscaler

    data = json.loads(texts["plan"])
    if rng.random() < 0.7:
        data.pop("digest")  # else every change is found at once
    for _ in range(rng.choice((1, 1, 2, 4))):
        data = mutated(data, rng)
    text = json.dumps(data)
    path = folder / "plan.json"
    path.write_text(text if rng.random() < 0.8 else scrambled(text, rng))
    step, arguments = _step()
    return lambda: jscaler.parallelize(jscaler.Plan.load(path), devices=4)(step).lower(*arguments)


def cluster_case(texts: dict[str, str], rng: random.Random, folder: Path) -> Callable[[], Any]:
    """A cluster file."""
    from jscaler.clusters import find_cluster

    text = texts[rng.choice(("cluster", "device"))]
    for _ in range(rng.choice((1, 1, 2, 4))):
        lines = text.splitlines() or [""]
        number = rng.randrange(len(lines))
        if rng.random() < 0.5 and "=" in lines[number]:
            name = lines[number].partition("=")[0]
            values = (
                "0",
                "-1",
                "nan",
                "inf",
                "1e400",
                "9" * 400,
                "true",
                '""',
                '"x"',
                "[]",
                "{}",
                "2.5",
                "1979-05-27",
                '"H100"',
            )
            lines[number] = f"{name}= {rng.choice(values)}"
            text = "\n".join(lines)
        else:
            text = scrambled(text, rng)
    path = folder / "cluster.toml"
    path.write_text(text)
    return lambda: find_cluster(str(path))


def command_case(texts: dict[str, str], rng: random.Random, folder: Path) -> Callable[[], Any]:
    """A command with other words in some places."""
    from typer.testing import CliRunner

    from jscaler.cli import app

    words = shlex.split(rng.choice(COMMANDS))
    for _ in range(rng.choice((1, 1, 2))):
        place = rng.randrange(1, len(words))
        words[place] = rng.choice(WORDS) if rng.random() < 0.6 else scrambled(words[place], rng)

    def invoke() -> None:
        found = CliRunner().invoke(app, words)
        if found.exception is not None and not isinstance(found.exception, SystemExit):
            raise found.exception
        if found.exit_code not in (0, 2, 3):
            raise AssertionError(f"exit code {found.exit_code}")

    return invoke


def call_case(texts: dict[str, str], rng: random.Random, folder: Path) -> Callable[[], Any]:
    """A built-in plan, as a person types it, with arguments of any kind, on any number of devices."""
    import inspect

    import jscaler
    from jscaler import plans

    name = rng.choice(list(plans.PLANS))
    names = list(inspect.signature(plans.PLANS[name]).parameters) or ["x"]
    given = {rng.choice(names): rng.choice(VALUES) for _ in range(rng.choice((0, 1, 1, 2, 3)))}
    text = f"{name}({', '.join(f'{key}={value}' for key, value in given.items())})"
    devices: Any = rng.choice((1, 2, 4, 4, 4, 8, 0, -1, None, "2", 2.5, 10**9, [], [0]))
    step, arguments = _step()
    return lambda: jscaler.parallelize(text, devices=devices)(step).lower(*arguments)


def things(rng: random.Random) -> Any:
    """What a policy or an option may be given for anything: often what fits somewhere, seldom here."""
    import jax
    import numpy as np

    from jscaler import Chunk, Prefix, Replicate, Split, TimeSplit
    from jscaler.ir import Place

    one: Any
    two: Any
    one, two = (rng.choice((None, "a", "b", "c", "z", ("params/a", 0), ("b", 7), 0, 1.5)) for _ in range(2))
    parts: Any = rng.choice((1, 2, 2, 4, 4, 3, 0, -1, 2.5, "2", None, True, np.int64(2), np.float32(2), 10**30))
    sizes: Any = rng.choice((None, None, None, (8, 8), [9, 7], (16, 0), 5, "88", (4.0, 12)))
    splits = (Split(one, parts), Split(two, parts, sizes), Split(one, sizes=sizes), TimeSplit(one, parts, sizes=sizes))
    others = (Replicate(parts), Chunk(two, parts), Prefix(one, parts), TimeSplit(two, parts, "microbatch"), Split)
    numbers = (0, 1, -1, 7, 8, 2.5, True, float("nan"), 10**30, np.int64(1), np.float32(1), [], [0, 0], [[0], [1, 2]])
    arrays = (np.arange(8), np.arange(4).reshape(2, 2), np.arange(8.0), np.array(["0"]), [Place(0), Place(9)], Place(0.5))  # type: ignore[arg-type]
    names = ("loss/dot", "loss/dot.1", "loss/reduce_sum", "loss/*", "*", "params/a", "params/b", "batch", "x", "", "1f1b")
    names += ("0F0 0B0", "saved", "bfloat16", "int8", "update/params/a/sub", "loss/dot@backward", "single", "cpu", "params")
    rest = (None, {}, {"loss/dot": 0}, {"loss/dot", "x"}, ("loss/dot", 0), ("loss/dot.1", "0"), ["loss/dot", "loss/dot.1"])
    odd = (b"x", 1j, object, things, ..., jax.devices()[:2], jax.devices()[0], iter([1]), "a" * 300, np.zeros((2, 0)))
    return rng.choice(rng.choice((splits, others, numbers, arrays, names, names, rest, odd)))


SAYS = (
    "op_trans", "op_trans", "op_trans", "op_assign", "op_assign", "op_order", "fuse", "ranges", "on_devices", "schedule",
    "reduce_dtype", "accumulation", "per_microbatch", "shard", "residuals", "recompute", "select", "input",
    "select_inputs", "factor_of", "of_kind", "__getitem__",
)  # fmt: skip


def policy_case(texts: dict[str, str], rng: random.Random, folder: Path) -> Callable[[], Any]:
    """A policy that says a few things of ops that are there, with arguments of which some fit."""
    import jscaler

    def policy(graph: Any, devices: Any) -> Any:
        grids = [graph["loss/dot"]]
        for _ in range(rng.choice((1, 1, 2, 3, 5))):
            say = getattr(graph, rng.choice(SAYS))
            needed, most = _counts(say)
            given = [things(rng) for _ in range(rng.randint(needed, most))]
            if given and rng.random() < 0.6:
                given[0] = rng.choice((*grids, "loss/dot", "loss/dot.1", "loss/reduce_sum", "params/a"))
            found = say(*given)
            grids += [found] if say.__name__ == "op_trans" else []
        if rng.random() < 0.7:
            for grid in grids[1:]:
                graph.op_assign(grid, devices[: rng.choice((1, 2, 4))])
        return rng.choice((None, None, None, 3, grids))

    step, arguments = _step()
    return lambda: jscaler.parallelize(policy, devices=rng.choice((1, 2, 4)))(step).lower(*arguments)


def _counts(function: Callable[..., Any]) -> tuple[int, int]:
    """How many arguments a function takes by position: at least, and at most (three of any number)."""
    import inspect

    known = [p for p in inspect.signature(function).parameters.values() if p.kind is not p.KEYWORD_ONLY]
    several = [p for p in known if p.kind is p.VAR_POSITIONAL]
    needed = sum(p.default is p.empty for p in known) - len(several)
    return needed, len(known) + 2 * len(several)


OPTIONS = (
    "devices", "cluster", "donate_argnums", "donate_argnames", "static_argnums", "static_argnames", "without_passes",
    "strict",
)  # fmt: skip


def option_case(texts: dict[str, str], rng: random.Random, folder: Path) -> Callable[[], Any]:
    """`parallelize` itself, with options of any kind, and its step with arguments of any kind."""
    import jax

    import jscaler

    given = {rng.choice(OPTIONS): things(rng) for _ in range(rng.choice((0, 1, 1, 2)))}
    plan = rng.choice(("data_parallel", "single", "megatron(1, 2)", things(rng)))
    step, arguments = _step()
    values: list[Any] = list(arguments)
    if rng.random() < 0.4:
        values[rng.randrange(2)] = things(rng)
    if rng.random() < 0.1:
        values = values[: rng.randrange(3)] + [things(rng)] * rng.randrange(2)

    def called(params: Any, batch: Any) -> Any:
        fits = isinstance(params, dict) and params.keys() == {"a", "b"}
        fits = fits and isinstance(batch, jax.Array) and batch.shape == (16, 8)
        return step(params, batch) if fits else (params, batch)  # what a step does with what does not fit is its own

    return lambda: jscaler.parallelize(plan, **{"devices": 2, **given})(called).lower(*values)


CASES = {
    "plan file": plan_case,
    "cluster file": cluster_case,
    "command": command_case,
    "arguments": call_case,
    "policy": policy_case,
    "options": option_case,
}


def _step() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    import jax
    import jax.numpy as jnp

    import jscaler

    def step(params: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            return jnp.mean((jnp.tanh(batch @ params["a"]) @ params["b"]) ** 2)

        value, grads = jscaler.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    shape = jax.ShapeDtypeStruct
    return step, ({"a": shape((8, 16), "float32"), "b": shape((16, 8), "float32")}, shape((16, 8), "float32"))


@contextmanager
def limit(seconds: int) -> Iterator[None]:
    """Raises `Hang` within, after so many seconds; in the main thread alone."""

    def ring(*_: Any) -> None:
        raise Hang(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def failure(case: Callable[[], Any]) -> tuple[str, str]:
    """``worked`` or ``refused``, or ``failed`` and why."""
    from jscaler.errors import JscalerError

    try:
        with limit(SECONDS), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            case()
    except JscalerError as error:
        text = str(error)
        return (
            ("refused", "") if 0 < len(text) < LONGEST else ("failed", f"a sentence of {len(text)} characters: {text[:80]}")
        )
    except Exception as error:
        return "failed", f"{type(error).__name__}: {str(error)[:160]}"
    return "worked", ""


def texts() -> dict[str, str]:
    """What is mutated: a plan file and a cluster file, as jscaler writes them."""
    import jscaler
    from jscaler.clusters import cluster_toml, find_cluster

    step, arguments = _step()
    plan = jscaler.parallelize("megatron(2, 2, zero=1)", devices=4)(step).lower(*arguments).plan
    with tempfile.TemporaryDirectory() as folder:
        plan.save(Path(folder) / "plan.json")
        text = (Path(folder) / "plan.json").read_text()
    lab = find_cluster("4x8xA100-40GB")
    assert lab.device is not None
    own = dataclasses.replace(lab, device=dataclasses.replace(lab.device, name="A100-own"))
    return {"plan": text, "cluster": cluster_toml(lab), "device": cluster_toml(own)}


def rows(quick: bool, seed: int, seconds: float) -> Iterator[Row]:
    """A row for each kind of case, and one for each that fails."""
    made, counts = texts(), {name: Counter[str]() for name in CASES}
    longest = dict.fromkeys(CASES, 0.0)
    ends = time.monotonic() + (min(seconds, 40) if quick else seconds)
    with tempfile.TemporaryDirectory() as folder:
        while True:
            rng = random.Random(seed)
            name = rng.choice(list(CASES))
            began = time.monotonic()
            outcome, why = failure(CASES[name](made, rng, Path(folder)))
            longest[name] = max(longest[name], time.monotonic() - began)
            counts[name][outcome] += 1
            if outcome == "failed":
                yield {"case": name, "value": 1, "bound": 0, "seed": seed, "error": why}
            seed += 1
            if time.monotonic() > ends:
                break
    for name, found in counts.items():
        known = {"worked": found["worked"], "refused": found["refused"], "value": found["failed"], "bound": 0}
        yield {"case": name, "cases": found.total(), **known, "longest": longest[name]}


if __name__ == "__main__":
    more = {
        "seed": {"type": int, "default": 0, "help": "of the first case; each further one has the next"},
        "seconds": {"type": float, "default": 600, "help": "for how long"},
    }
    main("fuzz", __doc__ or "", COLUMNS, rows, devices=8, options=more)
