"""Every schedule of the literature through `pipeline`: one device's numbers, a proof, and blocks in the table's order."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from of_the_day import of_the_day
from step_numbers import assert_trees_close

import jscaler
from bench.schedules import out_of_order
from jscaler import plans
from jscaler.errors import PlanError, PlanWarning
from jscaler.lower.instructions import Run
from jscaler.primitives import OnDevices, Planner
from jscaler.tables import SCHEDULES, Published, Table, schedule_named

WIDTH, ROWS = 4, 16
TX = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2))
V_PLACEMENTS = ("zb_v", "dualpipe_v")
INNER = ["tensor_parallel(columns=['*/up'])", "zero1('x')", "zero3('x')", "data_parallel('x')"]  # on two devices of a stage


@dataclasses.dataclass(frozen=True)
class Model:
    """Dense layers with dropout, in a row or stacked; which go over their own output, with no gradient in between."""

    layers: int = 4
    stacked: bool = False
    passes: int = 1
    remat: bool = False

    def params(self) -> Any:
        keys = iter(jax.random.split(jax.random.key(0), 2 * self.layers))
        shapes = {"up": (WIDTH, 8), "down": (8, WIDTH)}
        made = [{k: 0.5 * jax.random.normal(next(keys), s, float) for k, s in shapes.items()} for _ in range(self.layers)]
        if self.stacked:
            return {"layers": jax.tree.map(lambda *parts: jnp.stack(parts), *made)}
        return {f"layer_{i}": own for i, own in enumerate(made)}

    def loss(self, params: Any, x: jax.Array, key: jax.Array) -> jax.Array:
        h = x
        for number in range(self.passes):
            h = self._once(params, h if number == 0 else x + jax.lax.stop_gradient(h), jax.random.fold_in(key, number))
        return jnp.mean(h**2)

    def _once(self, params: Any, h: jax.Array, key: jax.Array) -> jax.Array:
        def layer(h: jax.Array, own: Any) -> tuple[jax.Array, None]:
            params, key = own
            kept = jax.random.bernoulli(key, 0.9, h.shape)
            return h + jnp.where(kept, jnp.tanh(h @ params["up"]) @ params["down"], 0), None

        layer = jax.checkpoint(layer) if self.remat else layer
        keys = jax.random.split(key, self.layers)
        if self.stacked:
            return jax.lax.scan(layer, h, (params["layers"], keys))[0]
        for i in range(self.layers):
            with jax.named_scope(f"layer_{i}"):
                h, _ = layer(h, (params[f"layer_{i}"], keys[i]))
        return h

    def step(self, state: Any, x: jax.Array, value_and_grad: Any = jscaler.value_and_grad) -> Any:
        params, moments, key = state
        loss, grads = value_and_grad(lambda p: self.loss(p, x, key))(params)
        updates, moments = TX.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments, jax.random.fold_in(key, 1)), loss

    def evaluate(self, state: Any, x: jax.Array) -> Any:
        return self.loss(state[0], x, state[2])


@dataclasses.dataclass(frozen=True)
class Case:
    """A schedule on so many groups with so many chunks, around an inner plan on two devices each, if there is one."""

    schedule: str
    model: Model
    groups: int = 2
    inner: str = ""
    chunks: int | None = None

    def __str__(self) -> str:
        model = f"{'stack' if self.model.stacked else 'row'} of {self.model.layers}"
        chunks = f", {self.chunks} chunks" if self.chunks else ""
        return f"{self.schedule} on {self.groups}, {model}{chunks}{', ' + self.inner if self.inner else ''}"

    @property
    def at(self) -> list[str] | None:
        """Between a first and a last layer on all devices, stages as equal as can be; else it is left open."""
        if not schedule_of(self.schedule).everywhere:
            return None
        own = self.model.layers - 2
        return [f"layer_{1 + own * group // self.groups}" for group in range(self.groups)] + [f"layer_{own + 1}"]


def schedule_of(name: str) -> Published:
    found = schedule_named(name)
    assert found is not None
    return found


def cases() -> Iterator[Case]:
    """A row of layers on two groups and on four, and around some inner plan; a stack around another. Each in turn."""
    for number, (name, known) in enumerate(SCHEDULES.items()):
        passes = known.chunks_of(None) if known.passes else 1
        yield Case(name, Model(passes=passes))
        yield Case(name, Model(8, passes=passes), 4)
        gradients = name != "forward_only"  # which ZeRO is for
        for inner in INNER if known.everywhere else [INNER[number % 4] if gradients else INNER[0]]:
            yield Case(name, Model(passes=passes), 2, inner)
        if not known.everywhere:
            yield Case(name, Model(stacked=True, passes=passes), 2, INNER[(number + 1) % 4] if gradients else "")
    yield Case("zb_v", Model(stacked=True))
    yield Case("interleaved", Model(8), 2, "", 4)
    yield Case("breadth_first", Model(8, stacked=True), 2, "", 4)
    yield Case("3f1b", Model(passes=2), 2, "", 2)
    for number, (name, known) in enumerate(SCHEDULES.items()):  # with what stages compute again in blocks of its own
        model = Model(stacked=number % 2 == 0 and not known.everywhere, passes=known.chunks_of(None) if known.passes else 1)
        if name != "forward_only":
            yield Case(f"{name}+R", model, 2, INNER[number % 4] if number % 3 else "")
    yield from (Case(name, Model(stacked=True), 2, "recompute_layers()") for name in V_PLACEMENTS)
    yield Case("zb_v", Model(remat=True))
    yield Case("1f1b+R", Model(8), 4)
    yield Case("interlaced+R", Model(8), 4)


def trained(model: Model, steps: Callable[..., Any], state: Any) -> Any:
    """The state after two steps, and their losses."""
    losses = []
    for number in range(2):
        state, loss = steps(state, batch(number))
        losses.append(loss)
    return jax.device_get((state[:2], losses))


def batch(number: int) -> jax.Array:
    return jax.random.normal(jax.random.key(5 + number), (ROWS, WIDTH), float)


def start(model: Model) -> Any:
    params = model.params()
    return params, TX.init(params), jax.random.key(7)


@functools.cache
def one_device(model: Model) -> Any:
    return trained(model, jax.jit(functools.partial(model.step, value_and_grad=jax.value_and_grad)), start(model))


@pytest.mark.one_day_in(3)
@pytest.mark.parametrize("case", of_the_day(cases(), 4), ids=str)
def test_steps_are_those_of_one_device_in_the_table_s_order(case: Case) -> None:
    microbatches, model = 2 * case.groups, case.model
    inner = plans.by_name(case.inner) if case.inner else None
    policy = plans.pipeline(case.groups, microbatches, case.schedule, inner, case.at, batch="x", chunks=case.chunks)
    forward = case.schedule == "forward_only"
    with jax.enable_x64(True):
        run = jscaler.parallelize(policy, devices=case.groups * (2 if case.inner else 1))(
            (lambda state, x: model.evaluate(state, x)) if forward else (lambda state, x: model.step(state, x))
        )
        lowered = run.lower(start(model), batch(0))
        jscaler.verify(lowered)
        compiled = lowered.compile()
        if forward:
            assert_trees_close(compiled(start(model), batch(0)), jax.jit(model.evaluate)(start(model), batch(0)))
        else:
            assert_trees_close(trained(model, compiled, start(model)), one_device(model))
    table = lowered.plan.instructions.table
    assert table is not None
    wanted = schedule_of(case.schedule).table(case.groups, microbatches, case.chunks)
    assert table == of_stages_that_compute_again(wanted, {c.stage for c in table.cells() if c.kind == "R"})
    assert out_of_order(lowered.plan) == []


@pytest.mark.parametrize("name", V_PLACEMENTS)
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("inner", ["", "recompute_layers()", "co_shard(2, plan=recompute_layers())"])
def test_stages_side_by_side_on_a_group_compute_again_what_is_theirs(name: str, stacked: bool, inner: str) -> None:
    """By the plan, or by the model's own checkpoint: the fence of a stage's layers is of that stage."""
    model = Model(stacked=stacked, remat=not inner)
    policy = plans.pipeline(2, 4, name, plans.by_name(inner) if inner else None, batch="x")
    with jax.enable_x64(True):
        lowered = jscaler.parallelize(policy, devices=2)(lambda s, x: model.step(s, x)).lower(start(model), batch(0))
    assert lowered.plan.instructions.table == schedule_of(name).table(2, 4)
    fences = [op for op in lowered.plan.graph.ops if op.anywhere == "fence"]
    assert {lowered.plan.completed.homes[op.path].stage for op in fences} == {0, 1, 2, 3}


def of_stages_that_compute_again(table: Table, stages: set[int]) -> Table:
    """Some do: those with a layer behind the first, which reads the batch, and keeps that and what its backward reads."""
    assert bool(stages) == any(cell.kind == "R" for cell in table.cells())
    kept = (tuple(e for e in row if any(c.kind != "R" or c.stage in stages for c in e.cells)) for row in table.rows)
    return Table(tuple(kept))


TABLES = {
    "1F0 1F1 1B0 1B1\n0F0 0F1 0B0 0B1": r"begin with the stages \[1, 0\]; rows stand in the order of their first stages",
    "0F0 0F1 0B0 0B1\n0F0 1F0 1F1 1B0 1B1": "stage 0 stands in several rows of the table",
    "0F0 0F1 0B0 0B1": r"the table has 1 rows and the stages \[0\]; there are 2 groups, a row for each",
    "0F0 0F1 0B0 0B1\n2F0 2F1 2B0 2B1": r"has 2 rows and the stages \[0, 2\]; there are 2 groups, a row for each",
}


@pytest.mark.parametrize("text", TABLES)
def test_tables_of_one_s_own_say_where_stages_lie(text: str) -> None:
    with pytest.raises(PlanError, match=TABLES[text]):
        plans.pipeline(2, 2, text)


def test_a_schedule_that_does_not_go_with_the_step_is_said() -> None:
    """The order of which is another one then."""

    def policy(graph: Planner, devices: Any) -> None:
        plans.pipeline(2, 4, batch="x")(graph, devices)
        graph.schedule("zb_v")  # for two stages on each group

    with jax.enable_x64(True):
        train = jscaler.parallelize(policy, devices=2)(lambda s, x: Model().step(s, x))
        with pytest.warns(PlanWarning, match=r"'zb_v' does not go with this step.* 2 of the model's chunks"):
            lowered = train.lower(start(Model()), batch(0))
    assert {cell.stage for cell in lowered.plan.instructions.table.cells()} == {0, 1}


def test_stages_are_placed_in_any_order() -> None:
    """The last one first: a decision says which stage it is."""
    model = Model()

    def policy(graph: Planner, devices: Any) -> None:
        def inner(graph: Planner, devices: Any) -> None:
            for stage, layers in ((1, (2, 3)), (0, (0, 1))):
                ops = [op for i in layers for op in graph.select(f"*layer_{i}/*")]
                graph.on_devices(
                    [*ops, *(graph.select("loss/*") if stage else [])], devices[stage : stage + 1], stage=stage
                )
            graph.schedule("1f1b")

        plans.accumulate(4, inner, "x")(graph, devices)

    with jax.enable_x64(True):
        lowered = jscaler.parallelize(policy, devices=2)(lambda s, x: model.step(s, x)).lower(start(model), batch(0))
        assert_trees_close(trained(model, lowered.compile(), start(model)), one_device(model))
    table = schedule_of("1f1b").table(2, 4)
    assert sorted(map(str, lowered.plan.instructions.table.rows)) == sorted(map(str, table.rows))


def test_a_model_that_goes_over_its_own_output_is_cut_where_it_is_said() -> None:
    """Each pass has its stages on the same groups."""
    model = Model(passes=2)

    def stages(at: list[str] | None) -> list[set[str]]:
        policy = plans.pipeline(2, 4, "3f1b", at=at, batch="x", chunks=2)
        with jax.enable_x64(True):
            lowered = jscaler.parallelize(policy, devices=2)(lambda s, x: model.step(s, x)).lower(start(model), batch(0))
        on = [d for d in lowered.plan.plan.decisions if isinstance(d, OnDevices)]
        return [{part for op in one.ops for part in op.split("/") if part.startswith("layer_")} for one in on]

    assert stages(None) == [{"layer_0", "layer_1"}, {"layer_2", "layer_3"}] * 2
    assert stages(["layer_1"]) == [{"layer_0"}, {"layer_1", "layer_2", "layer_3"}] * 2


@pytest.mark.one_day_in(2)
def test_ends_on_all_devices_split_the_vocabulary_over_all() -> None:
    """Megatron's ends have a part of the first and the last kernel on each of four devices, a stage's layers on two."""
    model = Model()
    policy = plans.megatron(
        tp=2, pp=2, microbatches=4, schedule="interlaced", batch="x", columns=["*/up"], vocab={"*/layer_[03]/up": 1},
        at=["layer_1", "layer_2", "layer_3"],
    )  # fmt: skip
    with jax.enable_x64(True):
        train = jscaler.parallelize(policy, devices=4)(lambda s, x: model.step(s, x))
        compiled = train.lower(start(model), batch(0)).compile()
        assert_trees_close(trained(model, compiled, start(model)), one_device(model))
        (params, *_), _ = compiled(start(model), batch(0))
    parts = {name: own["up"].sharding.shard_shape(own["up"].shape)[1] for name, own in params.items()}
    assert parts == {"layer_0": 2, "layer_1": 4, "layer_2": 4, "layer_3": 2}


def test_the_order_of_blocks_is_seen() -> None:
    """Two runs of a group exchanged are not the table's order."""
    with jax.enable_x64(True):
        train = jscaler.parallelize(plans.pipeline(2, 4, "zb_h1", batch="x"), devices=2)(lambda s, x: Model().step(s, x))
        plan = train.lower(start(Model()), batch(0)).plan
    steps = list(plan.instructions.steps)
    of_cell = {str(c): i for i, one in enumerate(steps) if isinstance(one, Run) for c in plan.instructions.cells(one)}
    first, second = of_cell["0F2"], of_cell["0F3"]
    steps[first], steps[second] = steps[second], steps[first]
    mixed = dataclasses.replace(plan, instructions=dataclasses.replace(plan.instructions, steps=tuple(steps)))
    assert (out_of_order(plan), out_of_order(mixed)) == ([], ["0F0"])
