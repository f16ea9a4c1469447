"""Plans shared out to several processes on this machine: their numbers, their steps' time, and what each compiles.

A row is a plan on so many devices by so many processes. ``right``: float64 parameters after five steps of clipped AdamW are
those of ``jax.jit`` on one device, to 1e-10 of the largest of a leaf (or of the learning rate). ``same bits``: with four
processes they are those with two, to the bit. ``seconds_ratio``: the median step of a model of width 1,024, by that of one
process with as many devices; the processes share the machine's cores. ``gspmd_ratio``: the same of ``jax.jit`` with the
state's and the batch's shardings given (``RIVALS``), which says what the connection between processes takes of either, and
``of_gspmd`` our step by theirs, of two processes.
``blocks``: how many of the step's programs the process compiles that compiles most; ``compile_ratio``: its CPU seconds for
that, by those of one process.
"""

import dataclasses
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from bench.harness import Row, main

TIMES = ("seconds_ratio", "gspmd_ratio", "of_gspmd")
COLUMNS = ("plan", "processes", "devices", "right", "same bits", *TIMES, "blocks", "compile_ratio")
PLANS = {
    "data_parallel": 4,
    "zero3": 4,
    "megatron(dp=1, tp=4)": 4,
    "pipeline(2, 4)": 4,
    "pipeline(4, 8)": 4,
    "pipeline(2, 4, plan=megatron(dp=2, tp=2))": 8,
}
RIVALS = {"data_parallel": "gspmd", "zero3": "gspmd, sharded state"}  # which ``Job.plan`` is XLA's own of a plan
QUICK = ("zero3", "pipeline(2, 4)")
STEPS, TIMED, RATE = 5, 8, 1e-2
BOUND, RATIO = 1e-10, 1.5
LIMIT = 300.0  # seconds of one job


@dataclasses.dataclass(frozen=True)
class Job:
    """A plan, or one of ``RIVALS``, on so many devices, by so many processes.

    Attributes:
        wide: whether the model is that whose steps are timed.
    """

    plan: str
    devices: int
    processes: int
    wide: bool


def rows(quick: bool) -> Iterator[Row]:
    chosen = {plan: devices for plan, devices in PLANS.items() if not quick or plan in QUICK}
    exact = _reference()
    for plan, devices in chosen.items():
        found: dict[int, Any] = {}
        for processes in (1, 2) if quick else (1, 2, 4):
            leaves, told = _run(Job(plan, devices, processes, wide=False))
            found[processes] = leaves
            row: Row = {"plan": plan, "processes": processes, "devices": devices}
            worst = max(map(_distance, leaves, exact))
            row |= {"right": bool(worst <= BOUND), "worst": worst, "blocks": _most(told, "blocks")}
            row["bounds"] = {"worst": BOUND}
            if processes == 4:
                row["same bits"] = all(map(np.array_equal, leaves, found[2]))
            if not quick:
                timed = _run(Job(plan, devices, processes, wide=True))[1]
                if processes == 1:
                    alone = timed
                seconds, compiled = (_most(timed, name) / _most(alone, name) for name in ("seconds", "compiling"))
                row |= {"seconds_ratio": round(seconds, 2), "compile_ratio": round(compiled, 2)}
                if processes == 2:
                    row["bounds"]["seconds_ratio"] = RATIO
                    if plan in RIVALS:
                        one, two = (_most(_run(Job(RIVALS[plan], devices, n, wide=True))[1], "seconds") for n in (1, 2))
                        row |= {"gspmd_ratio": round(two / one, 2), "of_gspmd": round(_most(timed, "seconds") / two, 2)}
            yield row


def _distance(ours: np.ndarray, exact: np.ndarray) -> float:
    return float(np.abs(ours - exact).max() / max(np.abs(exact).max(), RATE))


def _most(told: list[dict[str, Any]], name: str) -> float:
    return max(one[name] for one in told)


def _reference() -> list[np.ndarray]:
    """One device's parameters, by ``jax.jit``."""
    return _run(Job("", 1, 1, wide=False))[0]


def _run(job: Job) -> tuple[list[np.ndarray], list[dict[str, Any]]]:
    """Parameters, and what each process says."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "bench.processes", "--worker", json.dumps(dataclasses.asdict(job)), "--into", folder]
        own = [["--number", str(number), "--port", str(port)] for number in range(job.processes)]
        started = [subprocess.Popen([*words, *more], env=environment) for more in own]
        try:
            codes = [process.wait(LIMIT) for process in started]
        finally:
            for process in started:
                process.kill()
        assert not any(codes), f"{job}: {codes}"
        told = [json.loads((Path(folder) / f"{i}.json").read_text()) for i in range(job.processes)]
        with np.load(Path(folder) / "0.npz") as file:
            return [file[name] for name in file], told


def work(job: Job, number: int, port: int, folder: Path) -> None:
    """What one process does."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", job.devices // job.processes)
    jax.config.update("jax_enable_x64", not job.wide)
    if job.processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"localhost:{port}", job.processes, number)
    import jscaler

    step, make_state, batch = _task(1024 if job.wide else 32, jnp.float32 if job.wide else jnp.float64)
    told: dict[str, Any] = {"blocks": 1, "seconds": 0.0, "compiling": 0.0}
    if not job.plan:
        parallel, state = jax.jit(step), make_state(jax.random.key(0))
    elif job.plan in RIVALS.values():
        parallel, state, batch = _by_gspmd(step, make_state, batch, sharded="sharded" in job.plan)
    else:
        parallel = jscaler.parallelize(job.plan, devices=job.devices)(step)
        state = parallel.init(make_state, jax.random.key(0), batch=batch)
        lowered = parallel.lower(state, batch)
        before = time.process_time()
        compiled = lowered.compile()
        told |= {"compiling": time.process_time() - before, "blocks": sum(s is not None for s in compiled.segments)}
    times = []
    for _ in range(TIMED if job.wide else STEPS):
        began = time.perf_counter()
        state, loss = parallel(state, batch)
        jscaler.fetch(loss)
        times.append(time.perf_counter() - began)
    told["seconds"] = float(np.median(times[2:]))
    (folder / f"{number}.json").write_text(json.dumps(told))
    leaves = jscaler.fetch(jax.tree.leaves(state["params"])) if not job.wide else []
    if number == 0:
        np.savez(folder / "0.npz", *leaves)


def _by_gspmd(step: Any, make_state: Any, batch: Any, sharded: bool) -> tuple[Any, Any, Any]:
    """The step by ``jax.jit``, its state (each leaf's first dim that divides is cut, or none) and its batch (by rows)."""
    mesh = Mesh(np.array(jax.devices()), ("x",))
    copied, by_rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("x"))

    def sharding(leaf: Any) -> NamedSharding:
        dims = [dim for dim, size in enumerate(leaf.shape) if sharded and size % mesh.size == 0]
        return NamedSharding(mesh, P(*[None] * dims[0], "x")) if dims else copied

    places = jax.tree.map(sharding, jax.eval_shape(make_state, jax.random.key(0)))
    state = jax.jit(make_state, out_shardings=places)(jax.random.key(0))
    batch = {name: jax.make_array_from_callback(x.shape, by_rows, x.__getitem__) for name, x in batch.items()}
    parallel = jax.jit(step, in_shardings=(places, by_rows), out_shardings=(places, copied), donate_argnums=0)
    return parallel, state, batch


def _task(width: int, dtype: Any) -> tuple[Any, Any, Any]:
    """A residual network with dropout: a train step, what makes its state, and its batch."""
    import flax.linen as nn
    import optax

    import jscaler

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            for i in range(4):
                y = nn.Dense(4 * width, name=f"up_{i}", dtype=dtype, param_dtype=dtype)(x)
                y = nn.Dropout(0.1, deterministic=False)(nn.gelu(y))
                x = x + nn.Dense(width, name=f"down_{i}", dtype=dtype, param_dtype=dtype)(y)
            return x

    model = Net()
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(RATE))

    def make_state(key: jax.Array) -> Any:
        params = model.init({"params": key, "dropout": key}, jnp.zeros((1, width), dtype))["params"]
        return {"params": params, "moments": optimizer.init(params), "key": jax.random.key(1)}

    def step(state: Any, batch: Any) -> Any:
        key, mask = jax.random.split(state["key"])

        def loss_fn(params: Any) -> Any:
            return ((model.apply({"params": params}, batch["x"], rngs={"dropout": mask}) - batch["y"]) ** 2).mean()

        loss, gradients = jscaler.value_and_grad(loss_fn)(state["params"])
        updates, moments = optimizer.update(gradients, state["moments"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "moments": moments, "key": key}, loss

    rng = np.random.default_rng(0)
    batch = {name: rng.normal(size=(256 if width > 32 else 32, width)).astype(dtype) for name in "xy"}
    return step, make_state, batch


if __name__ == "__main__":
    if "--worker" in sys.argv:
        given = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
        number, port, into = int(given["--number"]), int(given["--port"]), Path(given["--into"])
        work(Job(**json.loads(given["--worker"])), number, port, into)
    else:
        main("processes", __doc__ or "", COLUMNS, rows, devices=1)
