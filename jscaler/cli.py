"""The command line: ``jscaler train`` and ``jscaler compare``."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import jax
import typer
from rich.console import Console

from jscaler import plans
from jscaler.api import Parallelized, parallelize, resolve_devices
from jscaler.commands.comm import bench_comm
from jscaler.commands.redistribute import redistribute
from jscaler.errors import DeviceError, JscalerError, UnknownNameError

app = typer.Typer(
    help="Expert-written parallel plans for Flax train steps.", no_args_is_help=True, pretty_exceptions_enable=False
)

PLAN_HELP = (
    'built-in plan, with arguments if wanted: "megatron(dp=2, tp=4)"; or a policy of yours: path.py:function. Built in are '
    + ", ".join(plans.PLANS)
)

Model = Annotated[str, typer.Option(help="model to train: gpt or moe (a mixture of experts)")]
Size = Annotated[str, typer.Option(help="its size: nano, mini, 125m, 1.3b, …")]
PlanName = Annotated[str, typer.Option("--plan", help=PLAN_HELP)]
Devices = Annotated[int | None, typer.Option(help="number of devices; all by default")]
Platform = Annotated[str | None, typer.Option(help="'cpu' makes as many virtual CPU devices as are asked for")]
Data = Annotated[Path | None, typer.Option(help="text file or folder; Python's own documentation by default")]
Batch = Annotated[int, typer.Option(help="sequences per step, over all devices")]
Sequence = Annotated[int | None, typer.Option("--seq", help="tokens per sequence; the model's own by default")]
Seed = Annotated[int, typer.Option(help="seed of parameters, dropout and data order")]


@app.command()
def train(
    model: Model = "gpt",
    size: Size = "nano",
    plan: PlanName = "data_parallel",
    devices: Devices = None,
    platform: Platform = None,
    data: Data = None,
    steps: Annotated[int, typer.Option(help="optimizer steps")] = 100,
    batch: Batch = 16,
    seq: Sequence = None,
    learning_rate: Annotated[float, typer.Option(help="peak learning rate")] = 3e-3,
    log: Annotated[Path | None, typer.Option(help="write one JSON line per step to this file")] = None,
    seed: Seed = 0,
) -> None:
    """Train a model on text under a plan.

    Example: jscaler train --model gpt --size nano --plan "megatron(dp=2, tp=4)" --devices 8 --platform cpu
    """
    from jscaler.train import train as run

    use_platform(platform, devices)
    job = _Job(model, size, plan, devices, data, batch, seq, learning_rate, steps, seed)
    run(job.step, job.state(), job.batch_at, steps, Console(), log)


@app.command()
def compare(
    model: Model = "gpt",
    size: Size = "nano",
    plan: PlanName = "data_parallel",
    devices: Devices = None,
    platform: Platform = None,
    data: Data = None,
    batch: Batch = 16,
    seq: Sequence = None,
    rounds: Annotated[int, typer.Option(help="timed runs of each side")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object instead of a table")] = False,
    seed: Seed = 0,
) -> None:
    """Run a plan beside the same split given to jax.jit (GSPMD), in one process, in turn.

    Example: jscaler compare --size nano --plan data_parallel --devices 8 --platform cpu
    """
    from jscaler.compare import compare as run
    from jscaler.compare import comparison_table

    use_platform(platform, devices)
    job = _Job(model, size, plan, devices, data, batch, seq, 3e-3, 100, seed)
    state = job.state()
    result = run(job.step, lambda i: (state, job.batch_at(i)), rounds=rounds)
    if as_json:
        typer.echo(json.dumps(result.as_json()))
    else:
        Console().print(comparison_table(result))


app.command()(bench_comm)
app.command()(redistribute)


class _Job:
    """A model, its data and its train step under a plan, as the options describe them."""

    def __init__(
        self, model: str, size: str, plan: str, devices: int | None, data: Path | None, batch: int, seq: int | None,
        learning_rate: float, steps: int, seed: int,
    ):  # fmt: skip
        from models import make_model
        from models.text import load_bytes
        from models.training import TEXT_STEPS, make_optimizer

        if model not in TEXT_STEPS:
            raise UnknownNameError("language model", model, TEXT_STEPS)
        self.model, config = make_model(model, size)
        if seq is not None:
            config = dataclasses.replace(config, sequence=seq)
            self.model = type(self.model)(config)
        self.config = config
        self.data = load_bytes(data)
        self.batch, self.seed = batch, seed
        self.optimizer = make_optimizer(learning_rate, steps=steps)
        chosen = resolve_devices(devices)
        self.step: Parallelized = parallelize(plans.by_name(plan), devices=chosen, donate_argnames="state")(
            TEXT_STEPS[model]
        )

    def state(self) -> Any:
        from models.training import make_state

        return make_state(self.model, self.config.sequence, self.optimizer, self.seed)

    def batch_at(self, step: int) -> dict[str, Any]:
        from models.text import batch_at

        return batch_at(self.data, step, self.batch, self.config.sequence, self.seed)


def use_platform(platform: str | None, devices: int | None) -> None:
    """Choose JAX's platform before it is first used; ``cpu`` makes ``devices`` virtual devices.

    Raises:
        DeviceError: the platform is not known.
    """
    if platform is None:
        return
    known = ("cpu", "cuda")
    if platform not in known:
        raise DeviceError(f"no platform '{platform}'; known: {', '.join(known)}")
    jax.config.update("jax_platforms", platform)
    if platform == "cpu" and devices:
        jax.config.update("jax_num_cpu_devices", devices)


def main() -> None:
    """Run the command line; errors of ours are printed without a traceback, exit code 1."""
    try:
        app()
    except JscalerError as error:
        Console(stderr=True).print(f"[bold red]error:[/] {type(error).__name__}: ", end="")
        sys.stderr.write(f"{error}\n")
        sys.exit(1)
