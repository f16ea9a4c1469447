"""How long a sequence does a device hold? GPT-3 1.3B on one GPU that need not be there, by plan, without offload.

24 stacked layers, hidden 2048, 32 heads, vocabulary 51,200; batch 1; float16, from masters, gradients' moments (Adam) and
sums of the softmax in float32; attention written plainly, so that its scores are as long as they are wide.

``max_seq`` is the longest sequence, in steps of 1,024 tokens, whose step XLA reserves no more for than the device has;
``peak_bytes`` what it reserves there: arguments, results that take no argument's place, temporaries. ``flops_ratio`` is
what the products of a step take at one equal sequence, those that are computed again included, over those of ``none``, as
they stand in the compiled programs. ``jit_max_seq`` and ``jit_peak_bytes``: of plain ``jax.jit``, ``recompute`` with
``jax.checkpoint`` around each layer. Goals are ratios to our ``recompute``: 3 at 16 parts, 4 at 32, FLOPs at most 1.4.
``--model llama`` has Llama 1B (nnx) in bfloat16 in its place, beside no ``jax.jit``, up to 8 parts: as many as keys have
heads.

Nothing runs, and no GPU is needed: ``pip install "jscaler[aot]"``. A row takes minutes.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import jscaler
from bench.compiled import jitted, peak_bytes
from bench.dot_flops import dot_flops
from bench.harness import Row, main
from bench.longest import Longest, longest

COLUMNS = (
    "target", "plan", "parts", "max_seq", "peak_bytes", "flops_ratio", "to_recompute", "jit_max_seq", "jit_peak_bytes",
    "compilations",
)  # fmt: skip
STEP = 1024  # tokens
EQUAL = 8  # steps at which FLOPs are compared
SCALE = 1024.0  # of the loss, constant
MOST_OF_LLAMA = 8  # parts: as many as keys have heads


@dataclass(frozen=True)
class Case:
    """A row.

    Attributes:
        name: in the table.
        plan: as on the command line.
        remat: whether the model itself checkpoints its layers.
        guess: about the longest sequence on a V100, in steps; on others a place to begin.
        goal: of the ratio to ``recompute``.
    """

    name: str
    plan: str
    parts: int = 1
    remat: bool = False
    guess: int = 4
    goal: float | None = None


NONE = Case("none", "single", guess=2)
RECOMPUTE = Case("recompute", "single", remat=True, guess=7)
CASES = [
    NONE,
    RECOMPUTE,
    Case("recompute", "recompute_layers", guess=7),
    Case("selective", "selective_recompute", guess=4),
    Case("co-shard", "co_shard(4)", 4, guess=11),
    Case("co-shard", "co_shard(8)", 8, guess=17),
    Case("co-shard", "co_shard(16)", 16, guess=25, goal=3.0),
    Case("co-shard", "co_shard(32)", 32, guess=32, goal=4.0),
]


@dataclass(frozen=True, eq=False)
class Bench:
    """What is compiled, and for what.

    Attributes:
        config: of the GPT or the Llama; its sequence is set.
        unit: tokens of a step of the search.
        equal: tokens at which FLOPs are compared.
        capacity: bytes of the device.
        options: of the compiler.
    """

    target: str
    device: Any
    capacity: float
    config: Any
    unit: int = STEP
    equal: int = EQUAL * STEP
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def row(self, case: Case, recompute: int | None, plain: bool) -> Row:
        """Measure a case; ``recompute`` is that plan's longest sequence, ``plain`` says that ``jax.jit`` has the like."""
        ours = self.longest(case, planned)
        theirs = self.longest(case, plainly) if plain else None
        ratio = self.flops(case) / self.flops(NONE)
        goals = {} if case.goal is None else {"goal": case.goal, "flops_goal": 1.4}
        row = {
            "target": self.target,
            "plan": case.name if case.plan == "single" else case.plan,
            "parts": case.parts,
            "max_seq": ours.steps * self.unit,
            "peak_bytes": ours.peak,
            "flops_ratio": round(ratio, 4),
            "to_recompute": round(ours.steps * self.unit / recompute, 3) if recompute else "",
            "compilations": len(ours.seen) + (len(theirs.seen) if theirs else 0) + 1,
            **goals,
        }
        jit = {} if theirs is None else {"jit_max_seq": theirs.steps * self.unit, "jit_peak_bytes": theirs.peak}
        return {**row, **jit}

    def longest(self, case: Case, side: "Side") -> Longest:
        def peak(steps: int) -> int:
            found = peak_bytes(self.compiled(case, side, steps * self.unit))
            said = f"{case.name} ({side.__name__}): {steps * self.unit} tokens take {found / 1e9:.2f} GB"
            print(said, file=sys.stderr, flush=True)
            return found

        return longest(peak, self.capacity, case.guess)

    def flops(self, case: Case) -> float:
        return dot_flops(self.compiled(case, planned, self.equal).as_text())

    @functools.cache  # noqa: B019 (a bench lives as long as its process)
    def compiled(self, case: Case, side: "Side", sequence: int) -> Any:
        """The executable of a step on ``sequence`` tokens."""
        config = dataclasses.replace(self.config, sequence=sequence, remat=case.remat)
        return side(case, self.device, *step_of(config)).compile(self.options)


def step_of(config: Any) -> tuple[Callable[..., Any], tuple[Any, Any]]:
    """A step in float16 from float32 masters with Adam (a Llama's has no masters), and its arguments as shapes: batch 1."""
    import optax

    from models.gpt import GPT, GPTConfig
    from models.llama import from_config
    from models.master import make_master_state, master_step
    from models.recipes import RECIPES

    tokens = jax.ShapeDtypeStruct((1, config.sequence), jnp.int32)
    if not isinstance(config, GPTConfig):
        recipe, make = RECIPES["llama"], from_config(config)
        state = jax.eval_shape(lambda: recipe.make_state(make, config, optax.adam(1e-4), jax.random.key(0)))
        return recipe.step, (state, {"tokens": tokens, "labels": tokens})
    example = jnp.zeros((1, config.sequence), jnp.int32)
    state = jax.eval_shape(lambda: make_master_state(GPT(config), example, optax.adam(1e-4)))
    return functools.partial(master_step, dtype=jnp.float16, factor=SCALE), (state, {"x": tokens, "labels": tokens})


Side = Callable[[Case, Any, Callable[..., Any], tuple[Any, ...]], Any]


def planned(case: Case, device: Any, step: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Lowered under the case's plan."""
    return jscaler.parallelize(case.plan, devices=[device], donate_argnums=0)(step).lower(*arguments).lowered


def plainly(case: Case, device: Any, step: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Lowered by ``jax.jit``; what is recomputed is the model's own choice."""
    del case
    return jitted(functools.partial(step, value_and_grad=jax.value_and_grad), arguments, device, donate_argnums=0)


def bench_for(target: str, equal: int = EQUAL * STEP, model: str = "gpt") -> Bench:
    """GPT 1.3B, or Llama 1B, on one described GPU, ``V100-32GB``."""
    from jscaler.report.targets import described_devices
    from jscaler.runtime.target import WITHOUT_GPU, find_target
    from models import gpt, llama

    cluster = find_target(f"1x{target}")
    changes = {"stacked": True} | ({"dropout": 0.0} if model == "gpt" else {"dtype": jnp.bfloat16})
    config = dataclasses.replace(gpt.SIZES["1.3b"] if model == "gpt" else llama.SIZES["1b"], **changes)
    return Bench(target, described_devices(cluster)[0], cluster.memory, config, equal=equal, options=dict(WITHOUT_GPU))


def chosen(plan: str | None, model: str = "gpt") -> list[Case]:
    """The cases whose name or plan holds the text; where none does, it is a plan of its own."""
    cases = [dataclasses.replace(c, goal=None) for c in CASES if c.parts <= MOST_OF_LLAMA] if model == "llama" else CASES
    if plan is None:
        return cases
    return [c for c in cases if plan in c.name or plan in c.plan] or [Case(plan, plan)]


def rows(quick: bool, target: str, plan: str | None = None, equal: int = EQUAL * STEP, model: str = "gpt") -> Iterator[Row]:
    bench, recompute = bench_for(target, equal, model), None
    for case in [NONE] if quick else chosen(plan, model):
        row = bench.row(case, recompute, plain=case.plan == "single" and model == "gpt")
        recompute = row["max_seq"] if case == RECOMPUTE else recompute
        yield row


if __name__ == "__main__":
    options: dict[str, Any] = {
        "target": {"metavar": "GPU", "default": "V100-32GB", "help": "one described device, V100-32GB or H100-80GB"},
        "plan": {"metavar": "TEXT", "help": "only rows whose name or plan holds this text; else a plan of one's own"},
        "model": {"choices": ["gpt", "llama"], "default": "gpt", "help": "GPT 1.3B or Llama 1B"},
        "equal": {"metavar": "TOKENS", "type": int, "default": EQUAL * STEP, "help": "where FLOPs are compared"},
    }
    main("coshard", __doc__ or "", COLUMNS, rows, devices=1, options=options)
