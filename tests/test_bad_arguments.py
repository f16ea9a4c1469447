"""Arguments of wrong kinds: of the decorator, of steps and what they return, of what stands beside them."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_bad_inputs import BATCH, PARAMS, lowered, pattern, step

import jscaler
from jscaler import Plan, plans
from jscaler.commands.job_file import checked_job, told_job
from jscaler.errors import (
    CaptureError,
    DataError,
    DeletedArgumentError,
    DeviceError,
    GradientError,
    JobError,
    JscalerError,
    OutputError,
    PlanError,
    PlanFileError,
    UnknownNameError,
)

FIVE: Any = 5
FOUR: Any = np.float32(4)
NAME: Any = "q"
NAN, INF = float("nan"), float("inf")
NONE: Any = None

# -- what the decorator is given, and what stands around it

HERE = jax.devices()[:2]
OPTIONS: dict[str, tuple[Callable[[], Any], type[JscalerError], str]] = {
    "a set of devices": (lambda: lowered("single", devices=set(HERE)), DeviceError, "a number or a list of jax.Device, no"),
    "one device": (lambda: lowered("single", devices=HERE[0]), DeviceError, "a number or a list of jax.Device, not CpuDev"),
    "devices that end": (lambda: lowered("single", devices=iter(HERE)), DeviceError, "or a list of jax.Device, not <list_"),
    "devices' names": (lambda: lowered("single", devices=["cpu:0"]), DeviceError, "or a list of jax.Device, not ['cpu:0']"),
    "a mesh": (
        lambda: lowered("single", devices=jax.sharding.Mesh(np.array(HERE), ("x",))),
        DeviceError,
        "devices are a number or a list of jax.Device, not Mesh",
    ),
    "a grid of devices": (
        lambda: lowered("single", devices=np.array(HERE).reshape(1, 2)),
        DeviceError,
        "devices are a number or a list of jax.Device, not array([[CpuDevice(id=0), CpuDevice(id=1)]]",
    ),
    "donated in words": (lambda: lowered("single", donate_argnums="0"), CaptureError, "donate_argnums is an argument's nu"),
    "nothing among them": (lambda: lowered("single", donate_argnums=[None]), CaptureError, "of these, and holds None"),
    "a number for a name": (lambda: lowered("single", donate_argnames=[0]), CaptureError, "donate_argnames is an argument"),
    "a truth donated": (lambda: lowered("single", donate_argnums=True), CaptureError, "or several of these, and holds Tru"),
    "an array that is static": (lambda: lowered("single", static_argnames="batch"), CaptureError, "'batch' is a …, which"),
    "strict in words": (lambda: lowered("single", strict="no"), PlanError, "strict is True or False, not 'no'"),
    "a pass's number": (lambda: lowered("single", without_passes=[5]), PlanError, "without_passes is a pass's name, or se"),
    "a class of plans": (lambda: lowered(Plan), PlanError, "'Plan' has decided nothing and returned Plan"),
    "a built-in function": (lambda: jscaler.parallelize("single")(max), CaptureError, "does not say which arguments it ta"),
    "no function": (lambda: jscaler.parallelize("single")(5), CaptureError, "parallelize decorates a step function, a Fla"),
    "twice": (
        lambda: jscaler.parallelize("single")(jscaler.parallelize("single")(step)),
        CaptureError,
        "'step' is parallelized already; its step under another plan is step.under(plan)",
    ),
    "in jax.jit": (lambda: jax.jit(single)(PARAMS, BATCH), CaptureError, "argument 'params' is being traced: a paralleliz"),
    "in jax.vmap": (lambda: jax.vmap(single, (None, 0))(PARAMS, BATCH[None]), CaptureError, "'batch' is being traced: a p"),
    "of a tracer around": (
        lambda: jax.jit(lambda x: jscaler.parallelize("single", devices=1)(lambda b: b + x)(BATCH))(1.0),
        CaptureError,
        "the step reads a value of shape () that another trace has made, which has no numbers",
    ),
    "another plan's text": (lambda: lowered("megatron(2)(4)"), PlanError, "cannot read the plan 'megatron(2)(4)': write i"),
    "a plan in a number": (lambda: lowered("megatron(dp=zero3(), tp=2)"), PlanError, "its argument 'dp' takes no plan, su"),
    "a plan of stages in one": (lambda: lowered("recompute_layers(5)"), PlanError, "recompute_layers"),
    "an unknown inner plan": (lambda: lowered("pipeline(2, 4, plan='zero4')"), UnknownNameError, "no plan named 'zero4'"),
    "too many stages": (lambda: lowered("pipeline(8, 4)"), PlanError, "too few for 8 stages with work in each"),
    "a plan of stages by a number": (lambda: plans.pipeline(2, 4, plan=FIVE), PlanError, "plan is a plan, or a list"),
    "a plan in words": (lambda: plans.accumulate(2, NAME), PlanError, "argument 'plan' is a plan or None, not 'q'"),
    "micro-batches of none": (lambda: plans.pipeline(2, NONE), PlanError, "argument 'microbatches' is int, not None"),
    "axes in words": (lambda: plans.dap(axes={"batch": NAME}), PlanError, "argument 'axes' is Mapping[str, int | Sequence"),
    "modules as a number": (lambda: plans.co_shard(2, on=FIVE), PlanError, "plan 'co_shard': its argument 'on' is "),
    "stages at a number": (lambda: plans.pipeline(2, 4, at=FIVE), PlanError, "plan 'pipeline': its argument 'at' is Seq"),
    "keeping nothing": (lambda: plans.recompute_layers(keep=NONE), PlanError, "'recompute_layers': its argument 'keep' is"),
    "a plan named by a number": (lambda: plans.by_name(FIVE), PlanError, "by_name takes the name of a plan, such as 'dat"),
    "a schedule of none": (lambda: plans.with_schedule("pipeline(2, 4)", NONE), PlanError, "schedule is the text of a pl"),
    "a passing plan": (lambda: lowered(plans.pipeline), PlanError, "plans.pipeline makes a policy of its arguments: call"),
}  # fmt: skip
single = jscaler.parallelize("single", devices=1)(step)


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str) -> None:
    make, kind, sentence = OPTIONS[name]
    with pytest.raises(kind, match=pattern(sentence)) as raised:
        make()
    assert "\n" not in str(raised.value)


# -- what a step is given, does and returns


async def later(params: Any, batch: jax.Array) -> Any:
    return params


LEAKED: list[jax.Array] = []
jscaler.parallelize("single", devices=1)(lambda params: LEAKED.append(params["a"] * 2) or params).lower(PARAMS)
Step = Callable[[Any, Any], Any]
STEPS: dict[str, tuple[Step, tuple[Any, ...], type[JscalerError], str]] = {
    "words in an array": (step, (PARAMS, np.array(["a"])), CaptureError, "argument 'batch' holds what no array of JAX can"),
    "objects in an array": (step, (PARAMS, np.array([object()])), CaptureError, "argument 'batch' holds what no array of"),
    "days": (step, (PARAMS, np.array(["2020-01-01"], "datetime64[D]")), CaptureError, "argument 'batch' holds what no arr"),
    "a large number": (step, (PARAMS, 10**30), CaptureError, "Python int 1000000000000000000000000000000 too large"),
    "a function": (step, (PARAMS, step), CaptureError, "argument 'batch' is a function, not an array"),
    "keys of two types": (step, ({1: BATCH, "b": BATCH}, BATCH), CaptureError, "argument 'params' has keys that cannot be"),
    "a tracer": (step, (PARAMS, LEAKED[0]), CaptureError, "argument 'batch' is being traced: a parallelized step cannot r"),
    "a tracer kept": (lambda p, b: step(p, b @ LEAKED[0] @ p["b"]), (PARAMS, BATCH), CaptureError, "kept from an earlier"),
    "a tracer in the loss": (
        lambda p, b: jscaler.value_and_grad(lambda q: (LEAKED[0] * q["a"]).sum())(p),
        (PARAMS, BATCH),
        CaptureError,
        "the step reads a value of shape (8, 16) that another trace has made",
    ),
    "nothing returned": (lambda p, b: None, (PARAMS, BATCH), CaptureError, "returns no array and changes nothing: return"),
    "words returned": (lambda p, b: (p, {"x": "done"}), (PARAMS, BATCH), CaptureError, "the step returns a str at '1/x':"),
    "a set": (lambda p, b: {1, 2}, (PARAMS, BATCH), CaptureError, "the step returns a set at 'result': return arrays and"),
    "no number for a loss": (
        lambda p, b: jscaler.value_and_grad(lambda q: q["a"])(p),
        (PARAMS, BATCH),
        GradientError,
        "value_and_grad needs a real scalar from the loss function; it returned float32[8,16]",
    ),
    "a complex loss": (
        lambda p, b: jscaler.value_and_grad(lambda q: q["a"].sum() * 1j)(p),
        (PARAMS, BATCH),
        GradientError,
        "needs a real scalar from the loss function; it returned complex64[]",
    ),
    "a gradient of whole numbers": (
        lambda p, b: jscaler.value_and_grad(lambda q: q.sum() * 1.0)(p),
        (jnp.arange(8), BATCH),
        GradientError,
        "args[0] is int32: gradients are taken of real floating-point leaves only",
    ),
    "a third argument": (
        lambda p, b: jscaler.value_and_grad(lambda q: q["a"].sum(), argnums=2)(p),
        (PARAMS, BATCH),
        GradientError,
        "argnums [2] with 1 positional arguments; legal: 0 to 0",
    ),
    "an argument's name": (
        lambda p, b: jscaler.value_and_grad(lambda q: q["a"].sum(), argnums=NAME)(p),
        (PARAMS, BATCH),
        GradientError,
        "value_and_grad takes a function and the numbers of its arguments, not <function",
    ),
    "a gradient of a number": (lambda p, b: jscaler.grad(FIVE)(p), (PARAMS, BATCH), GradientError, "takes a function and"),
}  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
def test_steps(name: str) -> None:
    fun, args, kind, sentence = STEPS[name]
    with pytest.raises(kind, match=pattern(sentence)):
        jscaler.parallelize("data_parallel", devices=8)(fun).lower(*args)


def test_a_step_that_waits() -> None:
    with (
        pytest.warns(RuntimeWarning, match="'later' was never awaited"),
        pytest.raises(CaptureError, match="the step returns a coroutine at 'result': return arrays and numbers"),
    ):
        jscaler.parallelize("single", devices=1)(later).lower(PARAMS, BATCH)


def test_numbers_of_64_bits() -> None:
    """A step compiled for 32 bits is not run on 64."""
    compiled = single.lower(PARAMS, BATCH).compile()
    with (
        jax.enable_x64(True),
        pytest.raises(CaptureError, match=r"'batch' is float64\[16, 8\] instead of float32\[16, 8\]"),
    ):
        compiled(PARAMS, np.asarray(BATCH, np.float64))


# -- what stands beside a step: batches that are filled up, comparisons, states, what follows, targets


def shapes() -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), PARAMS)


def deleted() -> jax.Array:
    gone = jnp.ones((16, 8))
    gone.delete()
    return gone


def planned() -> Any:
    return single.lower(PARAMS, BATCH)


def followed(fun: Step, **options: Any) -> Any:
    single.lower(PARAMS, BATCH)
    return single.follow(fun, **options).lower(PARAMS, BATCH)


BESIDE: dict[str, tuple[Callable[[], Any], type[JscalerError], str]] = {
    "rows of two counts": (
        lambda: jscaler.pad_batch({"x": np.ones(3), "y": np.ones(4)}, 4),
        DataError,
        "arrays with one number of rows in dim 0, and at least one row; batch['x'] has 3, batch['y'] has 4",
    ),
    "no rows": (lambda: jscaler.pad_batch(np.ones((0, 3)), 4), DataError, "and at least one row; batch has 0"),
    "numbers alone": (lambda: jscaler.pad_batch([1, 2, 3], 4), DataError, "no leaf is an array with rows"),
    "half a multiple": (lambda: jscaler.pad_batch(BATCH, FOUR), PlanError, "is a positive whole number, not np.float32(4."),
    "a huge multiple": (lambda: jscaler.pad_batch(BATCH, 10**15), DataError, "16 rows and a multiple of 1000000000000000"),
    "a batch of shapes": (lambda: jscaler.pad_batch(shapes(), 4), DataError, "pad_batch: batch['a'] is a shape alone; giv"),
    "a batch that is gone": (lambda: jscaler.pad_batch([deleted()], 3), DeletedArgumentError, "has been deleted: 'batch[0"),
    "no steps": (lambda: jscaler.compare(single, PARAMS, BATCH, steps=0), PlanError, "steps is a positive whole number, n"),
    "rounds in words": (
        lambda: jscaler.compare(single, PARAMS, BATCH, rounds=NAME),
        PlanError,
        "compare: rounds is a positive whole number, not 'q'",
    ),
    "comparing shapes": (
        lambda: jscaler.compare(single, shapes(), BATCH),
        CaptureError,
        "'params/a', 'params/b': shapes alone, which can be lowered, not run; give arrays",
    ),
    "comparing what is gone": (
        lambda: jscaler.compare(single, PARAMS, deleted()),
        DeletedArgumentError,
        "1 argument has been deleted: 'batch'",
    ),
    "comparing what is lowered": (
        lambda: jscaler.compare(NAME, PARAMS, BATCH),
        CaptureError,
        "compare takes a step that jscaler.parallelize has made, and its arguments, not a str",
    ),
    "simulating a number": (
        lambda: jscaler.simulate(FIVE, "4xH100-80GB"),
        PlanError,
        "simulate takes a lowered step, train_step.lower(state, batch), or its plan, not 5",
    ),
    "simulating a step": (lambda: jscaler.simulate(single), PlanError, "simulate takes a lowered step, train_step.lower(s"),
    "seconds of no block": (lambda: jscaler.simulate(planned(), seconds=FIVE), PlanError, "seconds= has the seconds of ea"),
    "seconds in words": (lambda: jscaler.simulate(planned(), seconds=[NAME]), PlanError, "of the step's 1 blocks, not ['"),
    "seconds below zero": (lambda: jscaler.simulate(planned(), seconds=[-1]), PlanError, "numbers from 0 on, not -1"),
    "seconds that are none": (lambda: jscaler.simulate(planned(), seconds=[NAN]), PlanError, "numbers from 0 on, not nan"),
    "seconds without end": (lambda: jscaler.simulate(planned(), seconds=[INF]), PlanError, "numbers from 0 on, not inf"),
    "seconds of two blocks": (lambda: jscaler.simulate(planned(), seconds=[1, 2]), PlanError, "has 2 entries, and the ste"),
    "hops of a number": (
        lambda: jscaler.simulate(planned(), seconds=[1], hops=FIVE),
        PlanError,
        "hops= has the seconds of each of the step's 0 transfers, not 5",
    ),
    "sends of a number": (
        lambda: jscaler.simulate(planned(), seconds=[1], sends=FIVE),
        PlanError,
        "sends are 'asynchronous' or 'rendezvous', not 5",
    ),
    "the cost of a step that is planned": (
        lambda: jscaler.cost(planned(), "single", "H100-80GB"),
        PlanError,
        "the step is planned by 'single' already; give its graph",
    ),
    "a cost without a cluster": (lambda: jscaler.cost(planned()), PlanError, "cost is asked of a cluster: jscaler.cost(g"),
    "a cost without a plan": (
        lambda: jscaler.cost(single.graph(PARAMS, BATCH), None, "H100-80GB"),
        PlanError,
        "a graph costs nothing without a plan",
    ),
    "the cost of a number": (
        lambda: jscaler.cost(FIVE, "single", "H100-80GB"),
        PlanError,
        "cost takes a step's graph, train_step.graph(state, batch), or a lowered step…not 5",
    ),
    "the cost of a number for a plan": (
        lambda: jscaler.cost(single.graph(PARAMS, BATCH), FIVE, "H100-80GB"),
        PlanError,
        "a plan is a policy, a plan's name or a Plan, not 5",
    ),
    "fitting nothing": (lambda: jscaler.fit(NONE, "V100-32GB"), PlanError, "fit takes a train step's graph, train_step.gr"),
    "fitting one plan": (
        lambda: jscaler.fit(single.graph(PARAMS, BATCH), "V100-32GB", "single"),
        PlanError,
        "fit: plans are names in a list, such as ['single', 'zero3()'], not 'single'",
    ),
    "verifying a number": (lambda: jscaler.verify(FIVE), PlanError, "verify takes a lowered step, train_step.lower(state,"),
    "verifying no rule": (lambda: jscaler.verify_rule(FIVE), CaptureError, "verify_rule takes a function or a primitive,"),
    "a rule of nothing": (lambda: jscaler.verify_rule(jnp.tanh, None), CaptureError, "argument 0 is an array or a number"),
    "a trace of a number": (lambda: jscaler.write_trace("x.json", FIVE), PlanError, "write_trace takes a timeline, as jsc"),
    "a trace to a number": (lambda: jscaler.write_trace(FIVE, FIVE), OutputError, "the trace is written to a path, as te"),
    "a picture of nothing": (lambda: jscaler.draw_timelines("x.svg", NONE), PlanError, "takes timelines in a list, not N"),
    "a picture of a number": (lambda: jscaler.draw_timelines("x.svg", [FIVE]), PlanError, "draw_timelines takes a timelin"),
    "a picture to a number": (lambda: jscaler.draw_timelines(FIVE, []), OutputError, "the picture is written to a path, "),
    "a plan from a number": (lambda: Plan.load(FIVE), PlanFileError, "a plan's file is named by its path, as text or a pa"),
    "a plan of no text": (lambda: Plan.from_json(NONE), PlanFileError, "a plan is read from text, as plan.to_json() has g"),
    "a plan to a number": (lambda: Plan("p", 8).save(FIVE), PlanFileError, "a plan's file is named by its path, as text o"),
    "a module's gradient of a number": (
        lambda: jscaler.nnx.grad(FIVE),
        GradientError,
        "a gradient is taken of a function of nnx modules and arrays, not of 5",
    ),
    "a module's gradient by nothing": (
        lambda: jscaler.nnx.value_and_grad(step, argnums=None),
        GradientError,
        "argnums are the numbers of arguments, or nnx.DiffState objects, not None",
    ),
    "no such block": (lambda: single.lower(PARAMS, BATCH).as_text(5), PlanError, "the step has 1 blocks, 0 to 0, and no 5"),
    "no such pass": (lambda: single.lower(PARAMS, BATCH).passes.after("nope"), UnknownNameError, "no pass named 'nope'; k"),
    "a target of a number": (
        lambda: single.lower(PARAMS, BATCH).compile(FIVE),
        DeviceError,
        "a cluster is a Cluster, a built-in one's name or a .toml file, not 5",
    ),
    "a target without a kind": (
        lambda: single.lower(PARAMS, BATCH).compile("cpu"),
        DeviceError,
        "cluster 'cpu' does not say what its devices are; give one that does, such as 8xH100-80GB",
    ),
    "another target": (
        lambda: single.lower(PARAMS, BATCH).compile("8xH100-80GB"),
        DeviceError,
        "is for 1 devices and the target '8xH100-80GB' has 8",
    ),
    "a state that was made": (lambda: single.init(FIVE, batch=BATCH), CaptureError, "make_state is a function…not a int"),
    "a state without its key": (
        lambda: single.init(lambda key: PARAMS, batch=BATCH),
        CaptureError,
        "make_state takes (key), and was given 0 arguments: missing a required argument: 'key'; they follow it: init(",
    ),
    "a state of words": (lambda: single.init(lambda: "x", batch=BATCH), CaptureError, "make_state makes 'params' a str, w"),
    "a misspelt batch": (lambda: single.init(lambda: PARAMS, bacth=BATCH), UnknownNameError, "did you mean 'batch'? known"),
    "all given": (
        lambda: single.init(lambda: PARAMS, params=PARAMS, batch=BATCH),
        CaptureError,
        "make_state makes the arguments of the step that are not given, and all are: params, batch",
    ),
    "following with a number": (lambda: single.follow(FIVE), CaptureError, "follow takes a step function, not a int"),
    "following an unknown argument": (
        lambda: followed(lambda p, batch: batch, paths={"q": "params"}),
        UnknownNameError,
        "no argument named 'q' (of the step that follows); known: p, batch",
    ),
    "following a number": (
        lambda: followed(lambda p, batch: batch, paths={"p": 3}),
        CaptureError,
        "paths says which argument is what, as in {'params': 'state/params'}, and is {'p': 3}",
    ),
    "following another state": (
        lambda: followed(lambda params, batch: batch, paths={"batch": "params/a"}),
        CaptureError,
        "this is not the state of 'step': 'batch' is float32[16, 8], and 'params/a' is float32[8, 16]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BESIDE)
def test_beside(name: str) -> None:
    make, kind, sentence = BESIDE[name]
    with pytest.raises(kind, match=pattern(sentence)):
        make()


def test_none_is_no_argument() -> None:
    """As for ``jax.jit``."""
    keeping = jscaler.parallelize(
        "single", devices=1, donate_argnames=None, donate_argnums=None, static_argnames=None, static_argnums=None
    )(step)
    keeping(PARAMS, BATCH)
    assert keeping.lower(PARAMS, BATCH).executable.donated == ()


def test_donated_arrays_are_gone() -> None:
    donating = jscaler.parallelize("single", devices=1, donate_argnames="params")(step)
    state = jax.tree.map(jnp.copy, PARAMS)
    donating(state, BATCH)
    with pytest.raises(DeletedArgumentError, match="2 arguments have been deleted: 'params/a', 'params/b'"):
        donating(state, BATCH)
    with pytest.raises(
        DeletedArgumentError, match=r"2 arguments have been deleted.*give the state that the step has returned"
    ):
        donating.lower(PARAMS, BATCH).compile()(state, BATCH)


# -- jobs, by what their function returns


def make_state(key: jax.Array) -> Any:
    return PARAMS


Make = Callable[[], Any]
JOBS: dict[str, tuple[Any, str]] = {
    "nothing": (None, "has returned a NoneType: return (make_state, train_step, batches), or a jscaler.Job"),
    "two": ((make_state, step), "has returned a tuple of 2: return (make_state"),
    "a dict": ({"make_state": make_state}, "has returned a dict"),
    "in another order": ((step, make_state, [BATCH]), "is called as make_state(key), and takes (params: Any, batch"),
    "a state": ((PARAMS, step, [BATCH]), "make_state of job 'my.py:job' is a dict, and no function"),
    "no step": ((make_state, None, [BATCH]), "train_step of job 'my.py:job' is a NoneType, and no function"),
    "a step of one argument": ((make_state, make_state, [BATCH]), "is called as train_step(state, batch), and takes (key"),
    "no batches": ((make_state, step, 5), "batches of job 'my.py:job' is a int, and no iterable of batches"),
    "batches of an argument": ((make_state, step, make_state), "is called as batches(), and takes (key"),
    "a name of a number": ((make_state, step, [BATCH], 5), "the name of job 'my.py:job' is 5: reports print it, so give t"),
}  # fmt: skip


@pytest.mark.parametrize("name", JOBS)
def test_jobs(name: str) -> None:
    made, sentence = JOBS[name]
    with pytest.raises(JobError, match=pattern(sentence)):
        checked_job(made, "my.py:job")


@pytest.mark.parametrize("role", ["make_state", "train_step", "batches"])
def test_jobs_that_raise(role: str) -> None:
    def fails(*_: Any) -> Any:
        raise ValueError("no")

    told = told_job(jscaler.Job(fails, fails, fails), f"{__file__}:job(3)")
    with pytest.raises(JobError, match=rf"{role} of job '.*:job\(3\)' has raised ValueError: no \(line \d+ of .*\)"):
        next(iter(told.batches())) if role == "batches" else getattr(told, role)(1)  # type: ignore[operator]


def test_batches_that_raise_later() -> None:
    def batches() -> Iterator[Any]:
        yield BATCH
        raise ValueError("gone")

    every = told_job(jscaler.Job(make_state, step, batches), f"{__file__}:job").batches
    assert callable(every)
    found = iter(every())
    assert next(found) is BATCH
    with pytest.raises(JobError, match=r"batches of job .* has raised ValueError: gone"):
        next(found)
