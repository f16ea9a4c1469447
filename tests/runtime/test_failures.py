"""Steps that fail: the error says where, the state that is lost is named, and the process goes on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jscaler
from jscaler import plans
from jscaler.runtime.compiled import Compiled
from jscaler.runtime.failures import failure
from jscaler.runtime.out_of_memory import told_of_memory

MICROBATCHES = 4


def loss_fn(params, x):
    for i, w in enumerate(params["layers"]):
        with jax.named_scope(f"layer_{i}"):
            x = jnp.tanh(x @ w)
    with jax.named_scope("root"):
        return jnp.mean(jnp.sqrt(x * params["scale"]))


def train_step(params, x):
    loss, grads = jscaler.value_and_grad(lambda p: loss_fn(p, x))(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def make_params():
    return {"layers": [jnp.full((8, 8), 0.05 + 0.01 * i) for i in range(3)], "scale": jnp.ones(())}


X = jnp.linspace(0.1, 1, 64).reshape(8, 8)
BAD = X.at[6, 0].set(-100.0)  # a row of micro-batch 2 on the second device: the square root of less than nothing


def pipelined(stages=2, donate="params"):
    plan = plans.pipeline(stages, MICROBATCHES, plan=plans.data_parallel("x"), batch="x")
    return jscaler.parallelize(plan, devices=2 * stages, donate_argnames=donate)(train_step)


@pytest.mark.one_day_in(2)
def test_debug_nans_names_op_stage_and_microbatch():
    step = pipelined()
    with jax.debug_nans(True), pytest.raises(jscaler.NotFiniteError) as caught:
        step(make_params(), BAD)
    said = str(caught.value)
    for part in ("op 'root/", "test_failures.py:", "by sqrt"):
        assert part in said
    assert "block of stage 1 (devices 2 3), micro-batch 2 of 4" in said, said
    assert isinstance(caught.value, FloatingPointError)


def test_debug_nans_names_the_backward_op():
    zero = X.at[6].set(0.0)  # the square root has no slope there: 0 × ∞
    with jax.debug_nans(True), pytest.raises(jscaler.NotFiniteError, match=r"@backward' .*first NaN.*micro-batch 2 of 4"):
        pipelined()(make_params(), zero)


def test_debug_infs_names_the_op():
    step = jscaler.parallelize("single", devices=1)(lambda x: jnp.exp(jnp.sin(x) + x))
    assert jnp.isinf(step(jnp.array([1.0, 90.0]))[1])
    with (
        jax.debug_infs(True),
        pytest.raises(jscaler.NotFiniteError, match="first infinity, by exp, in the step on device 0"),
    ):
        step(jnp.array([1.0, 90.0]))


@pytest.mark.one_day_in(2)
@pytest.mark.parametrize("at_first", [False, True])
def test_debug_nans_may_be_set_at_any_time_and_nothing_is_lost(at_first):
    """Behind a first run that donates, and again behind the error; then donated arguments are given away again."""
    step, params = pipelined(), make_params()
    if not at_first:
        params, _ = step(params, X / 100)
    with jax.debug_nans(True):
        for _ in range(2):
            with pytest.raises(jscaler.NotFiniteError, match=r"by sqrt, in the forward.* block .*micro-batch 2 of 4"):
                step(params, BAD)
        new, _ = step(params, X)
    expected, _ = jax.jit(train_step)(jax.device_get(params), X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), new, expected)
    step(new, X)
    assert all(x.is_deleted() for x in jax.tree.leaves(new))


@pytest.mark.parametrize("at_first", [False, True])
def test_debug_infs_loses_nothing_that_is_donated(at_first):
    step = jscaler.parallelize("single", devices=1, donate_argnames="w")(lambda w, x: (w + 1, jnp.exp(w * x)))
    w = jnp.ones(())
    if not at_first:
        w, _ = step(w, 1.0)
    with jax.debug_infs(True), pytest.raises(jscaler.NotFiniteError, match="makes the first infinity, by exp"):
        step(w, 100.0)
    assert not w.is_deleted()


@pytest.mark.one_day_in(2)
@pytest.mark.parametrize("schedule", ["1f1b", "chimera"])
def test_debug_nans_names_what_holds_one_and_not_what_moves_it(schedule):
    """The slices of a stack that lies in parts, and what stages get from others or from the batch."""

    def stacked(ws, x):
        loss_of = jscaler.value_and_grad(lambda ws: jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0]))
        loss, gradients = loss_of(ws)
        return ws - gradients, loss

    ws, x = jnp.stack([jnp.eye(4)] * 4), jnp.ones((8, 4))
    bad_ws, bad_x = ws.at[3].set(jnp.nan), x * jnp.nan
    step = jscaler.parallelize(plans.pipeline(2, 2, schedule, batch="x"), devices=2)(stacked)
    with jax.debug_nans(True):
        with pytest.raises(jscaler.NotFiniteError, match=r"'ws.*' holds a NaN already"):
            step(bad_ws, x)
        with pytest.raises(jscaler.NotFiniteError, match=r"'x' holds a NaN already, in .*block"):
            step(ws, bad_x)


def test_debug_nans_on_one_group_and_of_what_is_given():
    step = jscaler.parallelize(plans.data_parallel("x"), devices=2)(train_step)
    holds = X.at[0, 0].set(jnp.nan)
    with jax.debug_nans(True):
        with pytest.raises(jscaler.NotFiniteError, match=r"op 'root/.*by sqrt, in the step on devices 0 1"):
            step(make_params(), BAD)
        with pytest.raises(jscaler.NotFiniteError, match="'x' holds a NaN already, in the step on device 0"):
            jscaler.parallelize("single", devices=1)(train_step)(make_params(), holds)


@pytest.mark.parametrize("reverse", [False, True])
def test_debug_nans_names_the_iteration_of_a_stack_of_layers(reverse):
    def stacked(ws, x):
        return jax.lax.scan(lambda x, w: (jnp.log1p(x @ w), None), x, ws, reverse=reverse)[0]

    ws = jnp.stack([jnp.eye(4)] * 5).at[3].set(-20 * jnp.eye(4))
    step = jscaler.parallelize("single", devices=1)(stacked)
    order = 1 if reverse else 3
    with jax.debug_nans(True), pytest.raises(jscaler.NotFiniteError, match=f"by log1p, in iteration {order} of its loop"):
        step(ws, jnp.ones((2, 4)))


def test_what_is_finite_raises_nothing_under_debug_nans():
    expected = jax.jit(train_step)(make_params(), X)
    with jax.debug_nans(True):
        found = pipelined()(make_params(), X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, expected)


class FailsAt:
    """Executables of which the call number ``at`` raises ``error``."""

    def __init__(self, segments, at, error):
        self.left, self.error = at, error
        self.segments = tuple(map(self.wrap, segments))

    def wrap(self, segment):
        def run(*args):
            self.left -= 1
            if self.left == -1:
                raise self.error
            return segment(*args)

        return run


@pytest.fixture(scope="module")
def compiled():
    return pipelined().lower(make_params(), X).compile()


def calls(compiled):
    executable = compiled.lowered.executable
    return sum(hop is None and block >= 0 for block, hop, *_ in executable.steps)


def test_an_error_names_block_and_ops_and_what_is_lost(compiled):
    total = calls(compiled)
    kinds = set()
    for at in range(total):
        broken = Compiled(compiled.lowered, FailsAt(compiled.segments, at, ValueError("out of memory")).segments)
        params = jax.tree.map(jnp.copy, make_params())
        placed = compiled.place([*jax.tree.leaves(params), X])
        with pytest.raises((jscaler.BlockError, jscaler.StateLostError)) as caught:
            broken.result(placed)
        error = caught.value
        gone = {name for name, leaf in zip(
            (t.name for t in compiled.graph.inputs), placed, strict=True) if leaf.is_deleted()}  # fmt: skip
        kinds.add(type(error))
        if isinstance(error, jscaler.StateLostError):
            assert gone
            assert all(f"'{name}'" in str(error) for name in gone)
            assert "checkpoint" in str(error)
            error = error.__cause__
        else:
            assert not gone
        assert "ValueError: out of memory" in str(error)
        if "of stage" in str(error):
            assert "test_failures.py:" in str(error)
            kinds.add(str(error).split(" (")[0])
            assert "micro-batch" in str(error)
            assert "devices" in str(error)
    assert {jscaler.BlockError, jscaler.StateLostError} <= kinds
    assert {"the forward block of stage 0", "the backward block of stage 0"} <= kinds


def test_a_step_goes_on_behind_an_interrupt_anywhere(compiled):
    expected = jax.jit(train_step)(make_params(), X)
    for at in range(calls(compiled)):
        interrupted = Compiled(compiled.lowered, FailsAt(compiled.segments, at, KeyboardInterrupt()).segments)
        state = compiled.place([*jax.tree.leaves(make_params()), X])
        with pytest.raises(KeyboardInterrupt) as caught:
            interrupted.result(list(state))
        lost = any(leaf.is_deleted() for leaf in state)
        assert lost == any("leaves are lost" in note for note in getattr(caught.value, "__notes__", ()))
        again = compiled(make_params(), X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), again, expected)


@pytest.mark.one_day_in(2)
def test_deleted_arguments_are_named_before_anything_runs():
    step = pipelined()
    params = make_params()
    first, _ = step(params, X)
    second, _ = step(first, X)
    with pytest.raises(jscaler.DeletedArgumentError, match="arguments have been deleted: 'params/layers/0'"):
        step(first, X)
    second["layers"][1].delete()
    with pytest.raises(jscaler.DeletedArgumentError, match="1 argument has been deleted: 'params/layers/1'"):
        step(second, X)
    assert not second["scale"].is_deleted()
    batch = jnp.array(X)
    third, _ = step(make_params(), batch)
    batch.delete()
    with pytest.raises(jscaler.DeletedArgumentError, match="'x'"):
        step(third, batch)
    step(third, X)


def test_another_number_of_microbatches_is_another_table_cached():
    made = []

    def policy(graph, devices):
        made.append(graph.inputs[-1].shape[0] // 2)
        plans.pipeline(2, made[-1], batch="x")(graph, devices)

    step = jscaler.parallelize(policy, devices=2)(train_step)
    for rows in (8, 4, 8, 4):
        expected = jax.jit(train_step)(make_params(), X[:rows])
        found = step(make_params(), X[:rows])
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, expected)
    assert made == [4, 2]


def test_memory_that_is_full_says_what_is_in_it_and_what_to_try():
    """A virtual device refuses what the machine could never have: tables of 64 TiB."""
    size = 1 << 22

    def step(w, x):
        def loss_fn(w):
            table = jnp.tanh(w[:, None] * w[None, :])
            table = table @ table
            return table.max() * x.mean()

        loss, grads = jscaler.value_and_grad(loss_fn)(w)
        return w - grads, loss

    job = jscaler.Job(lambda key: jnp.ones(size), step, [jnp.ones((4, 2))])
    with pytest.raises(jscaler.OutOfMemoryError) as caught:
        jscaler.train(job, "zero1", 1, devices=2)
    said = str(caught.value)
    assert isinstance(caught.value, MemoryError)
    for part in (
        "the step is out of memory: Out of memory allocating",
        "(zero1) holds",
        "holds 262144.0 GiB",
        "loss/reduce_max'",
        "fit tries plans for the fastest",
    ):
        assert part in said, said
    assert "among them data_parallel" in said, said
    assert "pipeline(2, 4, plan=" in said  # from the first of the space to its last

    planned = jscaler.parallelize("zero1", devices=2)(step).lower(jnp.ones(size), jnp.ones((4, 2))).plan
    raised = failure(planned, jax.devices(), caught.value.__cause__, 0, (), ())  # where the call itself sees it, as on GPUs
    assert isinstance(raised, jscaler.OutOfMemoryError)
    assert str(raised).startswith("the step on devices 0 1 is out of memory")
    with (
        pytest.raises(jscaler.OutOfMemoryError, match="making the state is out of memory"),
        told_of_memory(planned, "making the state"),
    ):
        raise caught.value.__cause__
