"""The bench of temporaries on tiny layers and a CPU, which accounts for memory in the same way."""

import jax

from bench import temporaries
from bench.temporaries import Case
from models.gpt import GPTConfig
from models.llama import LlamaConfig
from models.swin import SwinConfig

TINY = GPTConfig(hidden=16, layers=1, heads=2, sequence=8, dropout=0.0, dtype="float32")
OPTIONS = {"xla_backend_optimization_level": 0}  # nothing runs


def test_a_plan_stands_beside_its_rival() -> None:
    row = temporaries.row(Case("single", prototype=1, remat=True), TINY, jax.devices()[0], OPTIONS)
    assert row["case"] == "jax.checkpoint"
    assert row["temporaries"] == 0  # less than a MiB
    assert row["bounds"] == {"temporaries": 1}
    assert row["rival"] == 0


def test_swin_s_third_stage() -> None:
    config = SwinConfig(hidden=2, heads=1, depths=(), window=4, image=128, dtype="float32")
    row = temporaries.row(Case("single", model="swin"), config, jax.devices()[0], OPTIONS, rival_only=True)
    assert row["case"] == "save all"
    _, x = temporaries.arguments(Case("single", model="swin"), temporaries.full_size("swin"))
    assert x.shape == (1, 96, 96, 2048)


def test_llama_s_layers() -> None:
    config = LlamaConfig(hidden=16, layers=1, heads=4, groups=2, units=24, sequence=8, dtype="float32")
    row = temporaries.row(Case("co_shard(2)", 2, model="llama"), config, jax.devices()[0], OPTIONS)
    assert (row["case"], row["temporaries"], row["rival"]) == ("co-shard 2", 0, 0)
    _, x = temporaries.arguments(Case("single", model="llama"), temporaries.full_size("llama"))
    assert x.shape == (1, 4096, 2048)


def test_rivals_alone() -> None:
    row = temporaries.row(Case("single", 2, stacked=True), TINY, jax.devices()[0], OPTIONS, rival_only=True)
    assert "temporaries" not in row
    assert row["case"] == "co-shard 2"
