"""Write docs/plan_zoo.md anew: ``python docs/plan_zoo.py``; with ``--check`` see whether it is right.

Every plan is made for the nano size of a model of the papers, on four devices: what it decides is counted there.
"""

import ast
import functools
import inspect
import re
import sys
import textwrap
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import jax
from gallery import GROUPS, MICROBATCHES, timeline

import jscaler
from jscaler import plans
from jscaler.commands.built_in_job import built_in_job
from jscaler.ir import Graph
from jscaler.primitives import plan as decisions
from jscaler.primitives.make_plan import make_plan
from jscaler.tables import SCHEDULES
from jscaler.tables.picture import picture

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "plan_zoo.md"
DEVICES, ROWS = 4, 16
LONGEST = 80  # lines of a policy
PRIMITIVES = {decisions.Trans: "op_trans", decisions.Assign: "op_assign", decisions.Order: "op_order"}


class Entry(NamedTuple):
    """A published plan.

    Attributes:
        title: what its paper calls it.
        plan: its text, as of ``--plan``.
        source: where it was published.
        elsewhere: which other systems have it.
        test: the file of tests that compares its numbers with those of one device.
        schedule: the name of its order in docs/schedules.md, if it has one.
        model: for which it is made here.
    """

    title: str
    plan: str
    source: str
    elsewhere: str
    test: str
    schedule: str = ""
    model: str = "gpt"


def _staged(title: str, schedule: str, source: str, elsewhere: str) -> Entry:
    groups = "stages=2, microbatches=4"
    return Entry(title, f"pipeline({groups}, schedule='{schedule}')", source, elsewhere, "test_schedules", schedule)


ZOO = [
    Entry("Data parallelism", "data_parallel", "Goyal et al. 2017", "all", "test_data_parallel"),
    Entry("ZeRO-1", "zero1", "Rajbhandari et al. 2020", "DeepSpeed, nnScaler, GSPMD", "test_zero"),
    Entry(
        "ZeRO-2", "accumulate(2, zero2())", "Rajbhandari et al. 2020", "DeepSpeed, Alpa, GSPMD", "test_zero_microbatches"
    ),
    Entry(
        "ZeRO-3, FSDP", "zero3", "Rajbhandari et al. 2020; Zhao et al. 2023", "DeepSpeed, FSDP, Alpa, GSPMD", "test_zero"
    ),
    Entry("Hybrid sharding, HSDP", "zero3(dp=2)", "Zhao et al. 2023; Zhang et al. 2022 (MiCS)", "FSDP, GSPMD", "test_zero"),
    Entry(
        "Tensor parallelism",
        "tensor_parallel",
        "Shoeybi et al. 2019",
        "Megatron-LM, Alpa, nnScaler, GSPMD",
        "test_tensor_parallel",
    ),
    Entry("Vocabulary parallelism", "vocab_parallel", "Shoeybi et al. 2019", "Megatron-LM", "test_vocab_parallel"),
    Entry(
        "Sequence parallelism", "megatron(tp=4, sequence=True)", "Korthikanti et al. 2022", "Megatron-LM", "test_megatron"
    ),
    Entry(
        "3-D parallelism",
        "megatron(tp=2, pp=2, microbatches=2)",
        "Narayanan et al. 2021",
        "Megatron-LM, DeepSpeed, Alpa",
        "test_megatron",
    ),
    Entry("Spatial partitioning", "spatial", "Dryden et al. 2019", "GSPMD", "test_spatial", model="convnet"),
    Entry(
        "Expert parallelism",
        "expert_parallel",
        "GShard: Lepikhin et al. 2021",
        "GSPMD, DeepSpeed-MoE",
        "test_expert_parallel",
        model="moe",
    ),
    Entry("Gradient accumulation", "accumulate(4, data_parallel())", "Goyal et al. 2017", "all", "test_accumulate"),
    Entry("Recomputation", "recompute_layers", "Chen et al. 2016", "all", "test_recompute_layers"),
    Entry(
        "Selective recomputation",
        "selective_recompute",
        "Korthikanti et al. 2022",
        "Megatron-LM",
        "test_selective_recompute",
    ),
    Entry("Co-sharding", "co_shard(2)", "nnScaler: Lin et al. 2024", "nnScaler", "test_co_shard"),
    _staged("GPipe", "gpipe", "Huang et al. 2019", "DeepSpeed, Alpa, nnScaler"),
    _staged(
        "1F1B", "1f1b", "DAPPLE: Fan et al. 2021; Narayanan et al. 2021", "Megatron-LM, DeepSpeed, Alpa, JaxPP, nnScaler"
    ),
    _staged("Eager 1F1B", "eager_1f1b", "Zhuang et al. 2023", "Alpa"),
    _staged("Interleaved 1F1B", "interleaved", "Narayanan et al. 2021", "Megatron-LM, JaxPP, nnScaler"),
    _staged("Looped breadth-first", "breadth_first", "Lamy-Poirier 2023", "its authors'"),
    _staged("ZB-H1", "zb_h1", "Qi et al. 2023", "JaxPP, its authors' Megatron-LM"),
    _staged("ZB-H2", "zb_h2", "Qi et al. 2023", "its authors' Megatron-LM"),
    _staged("ZB-V", "zb_v", "Qi et al. 2024", "its authors' Megatron-LM"),
    _staged("DualPipeV", "dualpipe_v", "Sea AI Lab 2025, after DeepSeek-V3", "its authors'"),
    _staged("Chimera", "chimera", "Li and Hoefler 2021", "its authors'"),
    Entry(
        "Interlaced pipeline",
        "interlaced(stages=2, microbatches=4)",
        "nnScaler: Lin et al. 2024",
        "nnScaler's paper",
        "test_interlaced",
        "interlaced",
        "mbart",
    ),
    Entry(
        "3F1B",
        "three_f_one_b(stages=2, microbatches=4)",
        "nnScaler: Lin et al. 2024",
        "nnScaler's paper",
        "test_three_f_one_b",
        "3f1b",
        "evoformer",
    ),
    Entry(
        "Dynamic axial parallelism",
        "dap",
        "FastFold: Cheng et al. 2022",
        "FastFold, nnScaler",
        "test_dap",
        model="evoformer",
    ),
]

CO_SHARD = "co_shard(2, plan=megatron(dp=2, tp=2))"
# model -> the plans that SuperScaler's evaluation has for it, and on how many devices they are tried
TRAINED = {
    "gpt": {CO_SHARD: 4, f"pipeline(2, 4, plan={CO_SHARD})": 8, "interlaced(2, 4)": 4},
    "swin-mini": {CO_SHARD: 4, f"pipeline(2, 4, plan={CO_SHARD})": 8},
    "mbart": {"interlaced(stages=4, microbatches=8)": 4},
    "evoformer": {"dap(dp=2)": 4, "three_f_one_b(2, 4)": 2, "three_f_one_b(2, 4, plan=dap())": 4},
}


@functools.cache
def graph_of(model: str) -> Graph:
    job = built_in_job(model, None, ROWS)
    state = jax.eval_shape(job.make_state, jax.random.key(0))
    batches = job.batches() if callable(job.batches) else job.batches
    return jscaler.parallelize("single", devices=1)(job.train_step).graph(state, next(iter(batches)))


def lines_of(plan: str) -> int:
    """Lines of the function that makes a policy, without its decorator, signature and docstring, and without comments."""
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(plans.PLANS[plan.partition("(")[0]])))
    (function,) = ast.parse(source).body
    assert isinstance(function, ast.FunctionDef)
    body = function.body[1:] if ast.get_docstring(function) else function.body
    lines = source.splitlines()[body[0].lineno - 1 :]
    return sum(not line.isspace() and bool(line) and not line.lstrip().startswith("#") for line in lines)


def decided(entry: Entry) -> str:
    """How often a plan calls each primitive, and what else it decides."""
    policy = plans.by_name(entry.plan)
    assert not isinstance(policy, decisions.Plan)
    made = make_plan(policy, graph_of(entry.model), DEVICES)
    counts = Counter(PRIMITIVES.get(type(one)) or _called(type(one).__name__) for one in made.decisions)
    in_order = sorted(counts, key=[*PRIMITIVES.values(), *counts].index)
    return ", ".join(f"{counts[name]} `{name}`" for name in in_order)


def _called(kind: str) -> str:
    """``OnDevices`` as the planner's function is called, ``on_devices``."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind).lower()


def row(entry: Entry) -> tuple[str, ...]:
    test = f"tests/plans/{entry.test}.py"
    assert (ROOT / test).exists(), test
    order = f"[{entry.schedule}](#{entry.schedule})" if entry.schedule else "one block"
    lines = lines_of(entry.plan)
    assert lines <= LONGEST, entry.plan
    return (
        f"{entry.title}<br>`{entry.plan}`",
        entry.source,
        str(lines),
        decided(entry),
        f"`{test}`",
        entry.elsewhere,
        order,
    )


def page() -> str:
    header = "plan", "source", "lines", f"decides, for {DEVICES} devices", "numbers", "also in", "order"
    drawn = []
    for name in dict.fromkeys(entry.schedule for entry in ZOO if entry.schedule):
        shown = picture(timeline(SCHEDULES[name], GROUPS, MICROBATCHES), title="in time; F, I and W one unit each")
        drawn.append(f"### {name}\n\n{SCHEDULES[name].source}\n\n```text\n{shown}\n```\n")
    rows = [header, ["---"] * len(header), *map(row, ZOO)]
    table = [f"| {' | '.join(cells)} |" for cells in rows]
    return "\n".join([INTRODUCTION, *table, "", *training(), "## Orders", "", *drawn])


def training() -> list[str]:
    """How to train the models of SuperScaler's evaluation under its plans."""
    flags, commands = f"--batch {ROWS} --steps 20 --platform cpu", list[str]()
    for model, own in TRAINED.items():
        for plan, devices in own.items():
            plans.by_name(plan)  # it can be read
            commands.append(f'jscaler train --model {model} --plan "{plan}" --devices {devices} {flags}')
    return ["## Training", "", TRAINING, "```sh", *commands, "```", ""]


TRAINING = """SuperScaler's plans (Lin et al., 2023) for the models of its evaluation, tried on virtual CPU devices.
"""
INTRODUCTION = """# Plan zoo

The published plans that are built in, drawn up by `python docs/plan_zoo.py`. Each is made for the nano size of a model on
four devices: GPT, or where a plan is for such a model, ConvNet, MoE, mBART or the Evoformer.

*lines*: of the function that makes the policy, without its signature and docstring. *decides*: how often it calls each
primitive, and what else it decides. *numbers*: the tests that compare the plan's numbers with those of one device.
"""

if __name__ == "__main__":
    new = page()
    if "--check" in sys.argv:
        sys.exit(f"{PAGE.name} is not what docs/plan_zoo.py writes" if new != PAGE.read_text() else 0)
    PAGE.write_text(new)
