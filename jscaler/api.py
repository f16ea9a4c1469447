"""``@jscaler.parallelize``: a train step that runs under a plan; otherwise it is used like ``jax.jit``'s."""

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jscaler import plans
from jscaler.capture.names import leaf_names, tree_path
from jscaler.errors import CaptureError, DeviceError, UnknownNameError
from jscaler.ir import Graph
from jscaler.primitives import Plan
from jscaler.stages import Captured, Executable, StepPlan, capture, executable, lower, transform

PlanLike = str | Plan | Callable[..., Any]
Devices = int | Sequence[jax.Device] | None


def parallelize(
    plan: PlanLike,
    *,
    devices: Devices = None,
    donate_argnums: int | Sequence[int] = (),
    donate_argnames: str | Sequence[str] = (),
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
) -> Callable[[Callable[..., Any]], "Parallelized"]:
    """Decorate a step function of pytrees so that it runs on many devices as ``plan`` says.

    Args:
        plan: a policy, the name of a built-in one (``"data_parallel"``), or a finished `Plan`.
        devices: how many of ``jax.devices()``, or which; all of them by default.
        donate_argnums, donate_argnames: arguments whose buffers the step may reuse, as in ``jax.jit``.
        static_argnums, static_argnames: hashable arguments that are compile-time constants, as in ``jax.jit``.

    Example:
        >>> @jscaler.parallelize("data_parallel", devices=8, donate_argnames="state")
        ... def train_step(state, batch): ...
    """
    policy = plans.by_name(plan) if isinstance(plan, str) else plan

    def decorate(fun: Callable[..., Any]) -> Parallelized:
        arguments = _Arguments.of(fun, donate_argnums, donate_argnames, static_argnums, static_argnames)
        return Parallelized(fun, policy, devices, arguments)

    return decorate


class Parallelized:
    """A step function under a plan. Compiles at the first call of each shape; the undecorated one is ``.fun``."""

    def __init__(self, fun: Callable[..., Any], policy: Any, devices: Devices, arguments: "_Arguments"):
        functools.update_wrapper(self, fun)
        self.fun = fun
        self._policy = policy
        self._devices = devices
        self._arguments = arguments
        self._compiled: dict[Any, Compiled] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self._arguments.bind(args, kwargs)
        if call.key not in self._compiled:
            self._compiled[call.key] = self._lower(call).compile()
        return self._compiled[call.key].run(call.leaves)

    def lower(self, *args: Any, **kwargs: Any) -> "Lowered":
        """Capture, plan and lower for these arguments (arrays or ``ShapeDtypeStruct``s), without compiling."""
        return self._lower(self._arguments.bind(args, kwargs))

    def graph(self, *args: Any, **kwargs: Any) -> Graph:
        """The captured graph for these arguments, before any plan."""
        return _capture(self.fun, self._arguments, self._arguments.bind(args, kwargs))[0].graph

    def _lower(self, call: "_Call") -> "Lowered":
        devices = resolve_devices(self._devices)
        captured, result = _capture(self.fun, self._arguments, call)
        step = lower(captured, transform(captured, self._policy, len(devices)))
        donated = [i for i, name in enumerate(call.owners) if name in self._arguments.donated]
        made = executable(step, devices, donated)
        structs = [
            jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s, weak_type=a.weak_type if hasattr(a, "weak_type") else False)
            for a, s in zip(call.avals, made.in_shardings, strict=True)
        ]
        return Lowered(step, made, call, result.tree, made.jitted.lower(*structs), tuple(devices))


@dataclass(frozen=True)
class Lowered:
    """A planned step, lowered to StableHLO. Like ``jax.stages.Lowered``."""

    plan: StepPlan
    executable: Executable
    call: "_Call"
    out_tree: Any
    lowered: Any
    devices: tuple[jax.Device, ...]

    @property
    def graph(self) -> Graph:
        return self.plan.graph

    def compile(self) -> "Compiled":
        return Compiled(self, self.lowered.compile())

    def as_text(self) -> str:
        return self.lowered.as_text()


@dataclass(frozen=True)
class Compiled:
    """A compiled step: call it with arguments of the shapes and tree it was lowered for."""

    lowered: Lowered
    compiled: Any

    @property
    def plan(self) -> StepPlan:
        return self.lowered.plan

    @property
    def graph(self) -> Graph:
        return self.lowered.graph

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self.lowered.call.arguments.bind(args, kwargs)
        if call.key != self.lowered.call.key:
            raise CaptureError(
                "this compiled step was lowered for arguments of another tree, shape, dtype or static value: "
                f"{_difference(self.lowered.call, call)}; call the decorated function, which compiles for each"
            )
        return self.run(call.leaves)

    def run(self, leaves: Sequence[Any]) -> Any:
        """Run on flat leaves, which are moved to the plan's layout where they do not have it."""
        placed = [
            x if isinstance(x, jax.Array) and x.sharding == s else _place(x, s)
            for x, s in zip(leaves, self.lowered.executable.in_shardings, strict=True)
        ]
        return jax.tree.unflatten(self.lowered.out_tree, self.compiled(*placed))

    def as_text(self) -> str:
        return self.compiled.as_text()

    def memory_analysis(self) -> Any:
        return self.compiled.memory_analysis()

    def cost_analysis(self) -> Any:
        return self.compiled.cost_analysis()


def _place(value: Any, sharding: Any) -> Any:
    if isinstance(value, jax.Array) and value.sharding.is_equivalent_to(sharding, value.ndim):
        return value
    return jax.device_put(value, sharding)


def resolve_devices(devices: Devices) -> list[jax.Device]:
    """The devices asked for.

    Raises:
        DeviceError: there are fewer.
    """
    if devices is None:
        return list(jax.devices())
    if isinstance(devices, int):
        at_hand = jax.devices()
        if not 1 <= devices <= len(at_hand):
            raise DeviceError(
                f"{devices} devices are asked for and {len(at_hand)} are at hand ({at_hand[0].platform}); ask for 1 to "
                f"{len(at_hand)}, or make virtual CPU devices with jax.config.update('jax_num_cpu_devices', {devices}) "
                "before JAX is first used (`--platform cpu` on the command line)"
            )
        return list(at_hand[:devices])
    chosen = list(devices)
    if len(set(chosen)) < len(chosen) or not chosen:
        raise DeviceError(f"devices must be distinct and at least one: {chosen}")
    return chosen


@dataclass(frozen=True)
class _Call:
    """One call's arguments: flat dynamic leaves with their owners, and the key that decides about recompilation."""

    arguments: "_Arguments"
    leaves: tuple[Any, ...]
    avals: tuple[Any, ...]
    owners: tuple[str, ...]
    names: tuple[str, ...]
    static: tuple[tuple[str, Any], ...]
    trees: tuple[tuple[str, Any], ...]

    @property
    def key(self) -> Any:
        return self.static, self.trees, self.avals


@dataclass(frozen=True)
class _Arguments:
    """What a step's signature and the decorator say about its arguments."""

    signature: inspect.Signature
    donated: frozenset[str]
    static: frozenset[str]

    @staticmethod
    def of(
        fun: Callable[..., Any],
        donate_argnums: int | Sequence[int],
        donate_argnames: str | Sequence[str],
        static_argnums: int | Sequence[int],
        static_argnames: str | Sequence[str],
    ) -> "_Arguments":
        signature = inspect.signature(fun)
        donated = _named(signature, "donate", donate_argnums, donate_argnames)
        static = _named(signature, "static", static_argnums, static_argnames)
        if both := donated & static:
            raise CaptureError(f"argument '{min(both)}' cannot be both static and donated")
        return _Arguments(signature, donated, static)

    def bind(self, args: Sequence[Any], kwargs: dict[str, Any]) -> _Call:
        """Flatten a call; raises CaptureError for leaves that are no arrays."""
        bound = self.signature.bind(*args, **kwargs)
        leaves, avals, owners, names, static, trees = [], [], [], [], [], []
        for name, value in _expanded(self.signature, bound):
            if name in self.static:
                _check_hashable(name, value)
                static.append((name, value))
                continue
            flat, tree = jax.tree.flatten(value)
            trees.append((name, tree))
            for i, leaf in enumerate(flat):
                avals.append(_aval(leaf, name, value, i))
            leaves += flat
            owners += [name] * len(flat)
        return _Call(self, tuple(leaves), tuple(avals), tuple(owners), tuple(names), tuple(static), tuple(trees))

    def rebuild(self, call: _Call, leaves: Iterable[Any]) -> inspect.BoundArguments:
        """The arguments of ``call`` with other leaves in place."""
        rest = iter(leaves)
        values = dict(call.static)
        for name, tree in call.trees:
            values[name] = jax.tree.unflatten(tree, [next(rest) for _ in range(tree.num_leaves)])
        bound = inspect.BoundArguments(self.signature, {})  # type: ignore[arg-type]
        for parameter in self.signature.parameters.values():
            if parameter.kind is parameter.VAR_POSITIONAL:
                found = [n for n in values if n.startswith(f"{parameter.name}[")]
                bound.arguments[parameter.name] = tuple(values[n] for n in found)
            elif parameter.kind is parameter.VAR_KEYWORD:
                named = self.signature.parameters
                rest_names = [n for n in values if n not in named and "[" not in n]
                bound.arguments[parameter.name] = {n: values[n] for n in rest_names}
            elif parameter.name in values:
                bound.arguments[parameter.name] = values[parameter.name]
        return bound


def _named(signature: inspect.Signature, what: str, nums: Any, names: Any) -> frozenset[str]:
    parameters = list(signature.parameters)
    chosen = {names} if isinstance(names, str) else set(names)
    for name in chosen:
        if name not in parameters:
            raise UnknownNameError("argument", name, parameters, f" ({what}_argnames)")
    for num in (nums,) if isinstance(nums, int) else nums:
        if not -len(parameters) <= num < len(parameters):
            raise CaptureError(f"{what}_argnums={num}, but the step has {len(parameters)} arguments: {parameters}")
        chosen.add(parameters[num])
    return frozenset(chosen)


def _expanded(signature: inspect.Signature, bound: inspect.BoundArguments) -> Iterable[tuple[str, Any]]:
    """Name and value of each argument; ``*args`` and ``**kwargs`` one by one."""
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            yield from ((f"{name}[{i}]", v) for i, v in enumerate(value))
        elif kind is inspect.Parameter.VAR_KEYWORD:
            yield from sorted(value.items())
        else:
            yield name, value


def _check_hashable(name: str, value: Any) -> None:
    try:
        hash(value)
    except TypeError:
        raise CaptureError(f"static argument '{name}' is a {type(value).__name__}, which is not hashable") from None


def _aval(leaf: Any, name: str, tree: Any, index: int) -> Any:
    if isinstance(leaf, jax.core.Tracer):
        raise CaptureError(
            f"argument '{name}' is being traced: a parallelized step cannot run inside jax.jit, grad or vmap; call the "
            "undecorated function (.fun) there"
        )
    if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic, bool, int, float, complex)):
        return jax.typeof(leaf) if not isinstance(leaf, jax.ShapeDtypeStruct) else _struct_aval(leaf)
    path = leaf_names(name, tree)[index]
    raise CaptureError(
        f"argument '{path}' is a {type(leaf).__name__}, not an array: pass an array, or mark '{name}' in static_argnames"
    )


def _struct_aval(struct: jax.ShapeDtypeStruct) -> Any:
    return jax.core.ShapedArray(struct.shape, struct.dtype, weak_type=bool(struct.weak_type))


def _difference(expected: _Call, given: _Call) -> str:
    if expected.static != given.static:
        return f"static {dict(given.static)} instead of {dict(expected.static)}"
    if expected.trees != given.trees:
        return "the argument trees differ"
    for name, want, have in zip(_leaf_names(expected), expected.avals, given.avals, strict=True):
        if want != have:
            return f"'{name}' is {have} instead of {want}"
    return "nothing that can be named"


def _leaf_names(call: _Call) -> list[str]:
    rest = iter(range(len(call.leaves)))
    return [
        n
        for name, tree in call.trees
        for n in leaf_names(name, jax.tree.unflatten(tree, [next(rest) for _ in range(tree.num_leaves)]))
    ]


@dataclass
class _Result:
    """The step's result tree, known once it has been traced."""

    tree: Any = None
    avals: tuple[Any, ...] = ()


def _capture(fun: Callable[..., Any], arguments: _Arguments, call: _Call) -> tuple[Captured, _Result]:
    result = _Result()

    def flat_fun(*leaves: Any) -> list[Any]:
        bound = arguments.rebuild(call, leaves)
        flat, result.tree = jax.tree.flatten(fun(*bound.args, **bound.kwargs))
        result.avals = tuple(jax.typeof(x) for x in flat)
        return flat

    flat_fun.__name__ = getattr(fun, "__name__", "step")

    def output_names() -> list[str]:
        tree = jax.tree.unflatten(result.tree, list(range(result.tree.num_leaves)))
        return [tree_path("", path) or "result" for path, _ in jax.tree_util.tree_leaves_with_path(tree)]

    structs = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=getattr(a, "weak_type", False)) for a in call.avals]
    made = capture(flat_fun, structs, _leaf_names(call), output_names, lambda: _next_versions(arguments, call, result))
    return made, result


def _next_versions(arguments: _Arguments, call: _Call, result: _Result) -> dict[int, int]:
    """Output leaf -> input leaf, for every argument whose tree comes back with the same shapes.

    Without donation, a bare array that comes back is no state: state is a tree.
    """
    parts = (
        result.tree.children() if result.tree.node_data() and result.tree.node_data()[0] in (tuple, list) else [result.tree]
    )
    versions: dict[int, int] = {}
    in_start = 0
    for name, tree in call.trees:
        is_state = name in arguments.donated if arguments.donated else tree.num_nodes > tree.num_leaves
        out_start = 0
        for part in parts:
            ins = range(in_start, in_start + tree.num_leaves)
            outs = range(out_start, out_start + part.num_leaves)
            same = part == tree and all(_alike(call.avals[i], result.avals[o]) for i, o in zip(ins, outs, strict=True))
            if is_state and same and not versions.keys() & set(outs):
                versions.update(zip(outs, ins, strict=True))
                break
            out_start += part.num_leaves
        in_start += tree.num_leaves
    return versions


def _alike(a: Any, b: Any) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype
