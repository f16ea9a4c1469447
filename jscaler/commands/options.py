"""Options that several commands share, and the choice of JAX's platform."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import jax
import typer

from jscaler import plans
from jscaler.errors import DeviceError

PLAN_HELP = (
    'built-in plan, with arguments if wanted: "megatron(dp=2, tp=4)"; a policy of yours: path.py:function; or a saved '
    "plan: path.json. Built in are " + ", ".join([*plans.PLANS, *plans.ALIASES])
)

MODEL_HELP = (
    "model: gpt, llama, moe (mixture of experts), mbart, swin, evoformer or convnet, with its size if wanted: gpt-1.3b"
)

Model = Annotated[str, typer.Option(help=MODEL_HELP)]
JobFile = Annotated[
    str | None,
    typer.Option(
        "--job",
        help="a model of yours: path.py:function, which returns make_state, train_step and batches",
    ),
]
Size = Annotated[str | None, typer.Option(help="its size: nano, mini, 125m, 1.3b, …; nano by default")]
PlanName = Annotated[str, typer.Option("--plan", help=PLAN_HELP)]
Devices = Annotated[int | None, typer.Option(help="number of devices; by default all, or those of a saved plan")]
Platform = Annotated[str | None, typer.Option(help="'cpu' makes as many virtual CPU devices as are asked for")]
Data = Annotated[Path | None, typer.Option(help="text file or folder; Python's own documentation by default")]
Batch = Annotated[
    int, typer.Option(help="sequences (or images, alignments) per step, over all devices", min=1, max=1 << 20)
]
Sequence = Annotated[
    int | None, typer.Option("--seq", help="tokens per sequence; the model's own by default", min=1, max=1 << 22)
]
Seed = Annotated[int, typer.Option(help="seed of parameters, dropout and data order", min=0, max=2**63 - 1)]
Dtype = Annotated[str | None, typer.Option(help="what the model computes in: bf16, fp16 or f32; parameters stay float32")]
Stacked = Annotated[
    bool | None,
    typer.Option(
        "--stacked/--no-stacked", help="layers as one scan, compiled once; on for plan and compile, if the model can"
    ),
]
Schedule = Annotated[
    str | None, typer.Option(help="the schedule of the plan's stages: a name (zb_h1), or a file with a table: .csv, .txt")
]
Strict = Annotated[bool, typer.Option("--strict", help="refuse a plan that copies ops whose factors it splits")]
Remat = Annotated[bool, typer.Option("--remat", help="compute each layer again in the backward pass")]


def use_platform(platform: str | None, devices: int | None, join: Callable[[], None] = lambda: None) -> None:
    """Choose JAX's platform before it is first used; ``cpu`` makes ``devices`` virtual devices.

    Args:
        join: what joins the processes of a job, of which each has as many devices; it must come before the first use.

    Raises:
        DeviceError: the platform is not known, is not there, or JAX runs already with other devices.
    """
    if platform is None:
        join()
        return
    known = ("cpu", "cuda")
    if platform not in known:
        raise DeviceError(f"no platform '{platform}'; known: {', '.join(known)}")
    jax.config.update("jax_platforms", platform)
    try:
        if platform == "cpu" and devices is not None and devices > 0:
            jax.config.update("jax_num_cpu_devices", devices)
        join()
        jax.devices(platform)
    except RuntimeError as error:
        why = str(error).partition("\n")[0]
        raise DeviceError(f"no devices of the platform '{platform}': {why}; leave it out, or give another") from None
