"""``@jscaler.parallelize``: a train step that runs under a plan; otherwise it is used like ``jax.jit``'s."""

import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from jscaler import plans
from jscaler.capture.wishes import no_mesh
from jscaler.clusters import FEW_STEPS, Bytes, Cluster, CostModel, find_cluster
from jscaler.collector import no_full_collections
from jscaler.errors import (
    CaptureError,
    CaptureWarning,
    DeviceError,
    PlanError,
    PlanWarning,
    VerificationError,
    check_flag,
    shown,
    warn,
)
from jscaler.estimate.loops_apart import between, loops_apart
from jscaler.estimate.lost_parallelism import lost_parallelism
from jscaler.estimate.query import price_of
from jscaler.estimate.searched_order import with_searched_schedule
from jscaler.flat_passes.all_passes import flat_passes
from jscaler.ir import Graph
from jscaler.ir.overview import Overview, Shown
from jscaler.lower.step_plan import StepPlan, decisions_of
from jscaler.plan_search.auto import Auto, searched_plan
from jscaler.plans.alone import tried_alone, tried_apart
from jscaler.primitives import Plan
from jscaler.report.explained import ExplainedPlan
from jscaler.report.plan_shardings import CallTrees
from jscaler.report.side_effects import repeated_effects
from jscaler.runtime.arguments import Arguments, BoundCall
from jscaler.runtime.chunked_array import ChunkedSharding, ChunkedStruct
from jscaler.runtime.compiled import Compiled, Lowered
from jscaler.runtime.devices import Devices, devices_at_hand, resolve_devices
from jscaler.runtime.executable import executable, lowered
from jscaler.runtime.follow import Followed, Following
from jscaler.runtime.graph_nodes import is_node
from jscaler.runtime.modules import parallel_module
from jscaler.runtime.out_of_memory import told_of_memory
from jscaler.runtime.step_capture import StepResult, capture_call
from jscaler.runtime.training_state import TracedState, by_position_and_name, missing_arguments, trace_state
from jscaler.stages import Captured, lower, transform
from jscaler.text.units import counted
from jscaler.verification import verify as prove

PlanLike = str | os.PathLike[str] | Plan | StepPlan | Auto | Callable[..., Any]


def parallelize(
    plan: PlanLike,
    *,
    devices: Devices = None,
    cluster: str | os.PathLike[str] | CostModel | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Sequence[str] | None = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    without_passes: str | Sequence[str] = (),
    strict: bool = False,
    verify: bool = True,
) -> Callable[[Any], Any]:
    """Decorate a step function, a method or a Flax module so that it runs on many devices as ``plan`` says.

    A step takes pytrees and nnx objects; what it changes in the latter is set in the caller's own. Of a linen module, a
    class or an instance, ``apply`` runs in parallel; of an nnx module its call. Their arguments lie at ``batch``.

    Args:
        plan: a policy, the name of a built-in one (``"data_parallel"``), a finished `Plan` (or a lowered step's ``.plan``,
            which has one), or the file of a saved one (``"plan.json"``). ``"auto"``, or a `jscaler.Auto`, is the fastest
            plan that fits, searched when the step is first planned; it wants ``cluster``, or devices of a known kind.
        devices: how many of ``jax.devices()``, or which; by default as many as a finished plan is for, and else all of
            them. A step can be planned and lowered for more than there are, not run.
        cluster: whose links price the adapters, in seconds: a `Cluster`, a built-in one's name or a .toml file. By
            default few bytes are sent in few steps, whatever the links.
        donate_argnums, donate_argnames: arguments whose buffers the step may reuse, as in ``jax.jit``.
        static_argnums, static_argnames: hashable arguments that are compile-time constants, as in ``jax.jit``.
        without_passes: passes for XLA's scheduler or code generation to leave out (``"swapped_dots"``,
            ``"products_before_loops"``, ``"pairs_together"``), to see what each is worth; ``lowered.passes`` lists all.
        strict: whether a plan that loses parallelism is refused. Ops that are copied on every device though they carry
            what the plan splits, activations that are gathered though no decision asked for it, and micro-batches that run
            in several loops are a `PlanWarning` otherwise; ``explain()`` lists them.
        verify: whether a plan over several device groups, or with time axes, is proven when it is first lowered, as
            `jscaler.verify` does. ``explain()`` says what was proven, and what was left out for its size.

    Returns:
        A decorator: of a function it makes a `Parallelized`, of a module class a subclass, of a module one like it.

    Raises:
        PlanError: ``plan`` is neither a policy nor a plan, or its arguments are not those it takes.
        UnknownNameError: there is no plan, pass or cluster of that name, or no argument of the step.
        CaptureError: what is decorated is no function and no Flax module.
        VerificationError: at the first call, or ``lower``: the program would compute something else. This is a fault of
            jscaler's own, not of the plan.

    Example:
        >>> @jscaler.parallelize("data_parallel", devices=4, donate_argnames="weights")
        ... def fit_line(weights, batch):
        ...     loss, slope = jscaler.value_and_grad(lambda w: ((batch @ w) ** 2).mean())(weights)
        ...     return weights - 0.1 * slope, loss
        >>> weights, loss = fit_line(jnp.ones((8, 1)), jnp.ones((16, 8)))
        >>> print(loss)
        64.0
    """
    policy = _policy(plan)
    if devices is None and isinstance(policy, Plan):
        devices = policy.num_devices

    cost = _cost_model(cluster)
    check_flag("strict", strict)
    check_flag("verify", verify)
    several = isinstance(without_passes, Iterable) and not isinstance(without_passes, str)
    without: tuple[Any, ...] = tuple(without_passes) if several else (without_passes,)
    if not all(isinstance(name, str) for name in without):
        raise PlanError(f"without_passes is a pass's name, or several, not {shown(without_passes)}")
    flat_passes(without)  # raises here, where the user wrote it

    def decorate(*given: Any, **named: Any) -> Any:
        if len(given) != 1 or named:  # @parallelize took the step for a plan, and this is a call of the step
            name = getattr(plan, "__name__", "step")
            raise CaptureError(
                f"parallelize was given '{name}' as its plan, and no step; it takes a plan first: "
                f"@jscaler.parallelize('data_parallel') above 'def {name}', or jscaler.parallelize('data_parallel')({name})"
            )
        (fun,) = given
        if isinstance(fun, Parallelized):
            raise CaptureError(
                f"'{fun._name}' is parallelized already; its step under another plan is {fun._name}.under(plan)"
            )
        module = parallel_module(fun, step_of_module)
        if module is not None:
            return module
        if isinstance(fun, type) or not callable(fun):
            what = f"the class '{fun.__name__}'" if isinstance(fun, type) else f"a {type(fun).__name__}"
            raise CaptureError(
                f"parallelize decorates a step function, a Flax module class or a Flax module, not {what}; has its library "
                "been imported as flax.linen or flax.nnx?"
            )
        arguments = Arguments.of(fun, donate_argnums, donate_argnames, static_argnums, static_argnames)
        return Parallelized(fun, policy, devices, arguments, cost, without=without, strict=strict, verify=verify)

    def step_of_module(forward: Callable[..., Any]) -> Parallelized:
        if any(x not in (None, (), "") for x in (donate_argnums, donate_argnames, static_argnums, static_argnames)):
            raise CaptureError(
                "donate_* and static_* are for step functions: a module's forward donates nothing, and what of its "
                "arguments is no array is static"
            )
        arguments = Arguments.of(forward, (), (), (), "constants")
        return Parallelized(
            forward, policy, devices, arguments, cost, updates=False, without=without, strict=strict, verify=verify
        )

    return decorate


def _policy(plan: PlanLike) -> Callable[..., Any] | Plan | Auto:
    if isinstance(plan, Auto) or (isinstance(plan, str) and plan == "auto"):
        return plan if isinstance(plan, Auto) else Auto()
    policy = plans.by_name(os.fspath(plan)) if isinstance(plan, (str, os.PathLike)) else plan
    if name := next((name for name, made in plans.PLANS.items() if made is policy), ""):
        raise PlanError(
            f"plans.{name} makes a policy of its arguments: call it, plans.{name}(…), or give its name, '{name}'"
        )
    policy = decisions_of(policy)
    if not isinstance(policy, Plan) and not callable(policy):
        raise PlanError(f"a plan is a policy, a plan's name or a Plan, not {shown(plan)}")
    return policy


def _name_of(policy: Any) -> str:
    return getattr(policy, "name", "") or getattr(policy, "__name__", type(policy).__name__)


def _cost_model(cluster: Any) -> CostModel:
    if cluster is None:
        return FEW_STEPS
    if isinstance(cluster, (str, os.PathLike)):
        return find_cluster(cluster)
    if not isinstance(cluster, (Cluster, Bytes)):
        raise PlanError(f"cluster is a Cluster, a built-in one's name or a .toml file, not {cluster!r}")
    return cluster


class Parallelized(Shown):
    """A step function under a plan. Compiles at the first call of each shape; the undecorated one is ``.fun``.

    Example:
        >>> new, loss = train_step(state, batch)  # planned and compiled at the first call
        >>> train_step.lower(state, batch).plan.report.total["all_reduce"][0]  # planned only
        6
        >>> other = train_step.under("zero3")
        >>> shapes = other.abstract_state(make_state, jax.random.key(0), batch=batch)
        >>> shapes["params"]["up"].sharding.shard_shape((16, 64))
        (4, 64)
        >>> train_step.without_stages() is train_step  # a pipeline would lose its stages
        True
        >>> leaves, graph = train_step.leaves(state, batch), train_step.graph(state, batch)
        >>> [leaf.shape for leaf in leaves] == [tensor.shape for tensor in graph.inputs]
        True
    """

    def __init__(
        self, fun: Callable[..., Any], policy: Any, devices: Devices, arguments: Arguments, cost: CostModel = FEW_STEPS,
        updates: bool = True, following: Following | None = None, without: Sequence[str] = (), strict: bool = False,
        verify: bool = True,
    ):  # fmt: skip
        functools.update_wrapper(self, fun)
        self.fun = fun
        self._name = getattr(fun, "__name__", "step")
        self._policy = policy
        self._devices = devices
        self._arguments = arguments
        self._cost = cost
        self._without = without
        self._strict = strict
        self._verify = verify
        self._method = ""  # what it is called in a class
        self._following = following  # whose layouts the state of this step has
        self._updates = updates  # whether results may be next versions of arguments; a forward updates no state
        self._lowered: dict[Any, Lowered] = {}
        self._searched: dict[Any, Plan] = {}
        self._compiled: dict[Any, Compiled] = {}
        self._last: Compiled | None = None

    @property
    def plan_name(self) -> str:
        """Of its plan, before anything is planned: a policy's, in a word.

        Example:
            >>> train_step.under("zero3").plan_name
            'zero3'
        """
        return _name_of(self._policy)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            warn(f"'{self._name}' runs undecorated, on one device: jax.disable_jit is on", CaptureWarning)
            return self.fun(*args, **kwargs)
        if self._last is not None:
            placed = self._last.known.placed(args, kwargs)
            if placed is not None:
                return self._last.result(placed)
        call = self._arguments.bind(args, kwargs)
        self._last = self.compiled(call)
        return self._last.run_call(call, args, kwargs)

    def overview(self) -> Overview:
        """The step in a few lines; in a notebook the tables of the plan that it was lowered for last."""
        policy, devices = self._policy, self._devices
        plan = "the plan of the step that it follows" if policy is None else f"plan {_name_of(policy)}"
        count = "all" if devices is None else devices if isinstance(devices, int) else len(devices)
        last = [lowered.plan.overview() for lowered in list(self._lowered.values())[-1:]]
        lines = [
            f"{self._name} under {plan}, on {count} devices",
            f"lowered for {counted(len(self._lowered), 'form')} of its arguments, compiled for {len(self._compiled)}",
            *(line for made in last for line in made.lines),
        ]
        more = f"{self._name}.lower(…) plans it for arguments, .graph(…) captures it, .fun is the undecorated one"
        return Overview([*lines, more], last[0].tables if last else tuple)

    def __set_name__(self, owner: type, name: str) -> None:
        self._method = name

    def __get__(self, instance: Any, owner: type | None = None) -> "Parallelized":
        """A method of an object: what it reads of the object is constant, as it is in ``jax.jit(self.method)``.

        Raises:
            CaptureError: the object is an nnx module, whose parameters change; or it has nowhere to keep the step.
        """
        if instance is None or not self._method:
            return self
        if is_node(instance):
            raise CaptureError(
                f"'{self._method}' is a method of an nnx object, whose arrays would be constants of the step: decorate a "
                "function that takes the object as an argument, or a module: jscaler.parallelize(plan)(module)"
            )
        if not hasattr(instance, "__dict__"):
            raise CaptureError(
                f"'{self._method}' is a method of a {type(instance).__name__}, which has __slots__ and so no place for the "
                "compiled step: add '__dict__' to them, or decorate a function"
            )
        bound = Parallelized(
            self.fun.__get__(instance, owner), self._policy, self._devices, self._arguments.of_method, self._cost,
            self._updates, self._following, self._without, self._strict, self._verify,
        )  # fmt: skip
        instance.__dict__[self._method] = bound  # found in place of this descriptor from now on
        return bound

    def bind(self, *args: Any, **kwargs: Any) -> BoundCall:
        """These arguments as flat leaves."""
        return self._arguments.bind(args, kwargs)

    def compiled(self, call: BoundCall) -> Compiled:
        """The executable for calls like this one, compiled where it has not been."""
        if call.key not in self._compiled:
            resolve_devices(self._devices)
            self._compiled[call.key] = self._planned(call).compile()
        return self._compiled[call.key]

    def init(self, make_state: Callable[..., Any], /, *args: Any, **given: Any) -> Any:
        """Make the training state in the plan's layout: every device makes its own parts, and none holds a whole leaf.

        Positional arguments are ``make_state``'s, arguments by name are the step's. What ``make_state`` returns is the
        argument of the step that is not given (a tuple, where several are not: a model and its optimizer).

        Args:
            make_state: a function that makes the state as on one device. It is traced, once.
            args: its arguments. Arrays are traced; anything else (a model, an optimizer, a size) is a constant.
            given: the step's other arguments, as examples: arrays, or ``jax.ShapeDtypeStruct`` objects.

        Returns:
            What ``make_state`` returns, of the same random bits. (Those of other generators than threefry are drawn whole.)

        Raises:
            CaptureError: the state is not what the step lacks, or holds something other than arrays.
            UnknownNameError: the step has no argument of such a name.
            DeviceError: there are fewer devices than the plan is for.
            OutOfMemoryError: the state does not fit into their memory.

        Example:
            >>> state = train_step.init(make_state, jax.random.key(0), batch=batch)
            >>> state["params"]["up"].shape
            (16, 64)
        """
        resolve_devices(self._devices)
        traced, lowered = self._plan_state(make_state, args, given)
        with told_of_memory(lowered.plan, "making the state"):
            return _returned(traced, traced.fill(_leaf_shardings(lowered, traced.names)))

    def abstract_state(self, make_state: Callable[..., Any], /, *args: Any, **given: Any) -> Any:
        """What `init` would make, as ``jax.ShapeDtypeStruct`` objects with the plan's shardings; nothing is computed.

        This is what a checkpoint library restores into: see ``docs/state.md``. No leaf has a weak type, since none will
        when it has been restored.

        Args:
            make_state: as for `init`.
            args: as for `init`.
            given: as for `init`.

        Raises:
            CaptureError, UnknownNameError: as `init`. The devices need not be at hand.
        """
        traced, lowered = self._plan_state(make_state, args, given, weak=False)
        shardings = _leaf_shardings(lowered, traced.names)
        structs = traced.structs(weak=False)
        return _returned(traced, [_struct(struct, there) for struct, there in zip(structs, shardings, strict=True)])

    def _plan_state(
        self, make_state: Callable[..., Any], args: Any, given: dict[str, Any], weak: bool = True
    ) -> tuple[TracedState, Lowered]:
        traced = trace_state(missing_arguments(self._arguments, given), make_state, args)
        values = traced.assemble(traced.structs(weak)) | given
        positional, named = by_position_and_name(self._arguments, values)
        return traced, self._planned(self._arguments.bind(positional, named))

    def _planned(self, call: BoundCall) -> Lowered:
        """The step lowered for calls like this one; kept, so that a state is laid out as the step will want it."""
        if call.key not in self._lowered:
            self._lowered[call.key] = self._lower(call)
        return self._lowered[call.key]

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Capture, plan and lower for these arguments, without compiling.

        The number of devices that was asked for need not be at hand before ``compile()``.

        Args:
            args: the step's arguments by position, arrays or ``jax.ShapeDtypeStruct`` objects.
            kwargs: those by name.

        Raises:
            CaptureError: the step cannot be captured: an argument is no array, or a gradient is taken in a loop.
            PlanError: the plan does not go with the step, or loses parallelism under ``strict=True``.
            UnknownNameError: the plan names an op, a factor or an input that the step does not have.
        """
        call = self._arguments.bind(args, kwargs)
        self._lowered[call.key] = self._lower(call)
        return self._lowered[call.key]

    def follow(
        self,
        fun: Callable[..., Any] | None = None,
        *,
        plan: PlanLike | None = None,
        paths: Mapping[str, str] | None = None,
        static_argnums: int | Sequence[int] = (),
        static_argnames: str | Sequence[str] = (),
    ) -> Any:
        """Parallelize a step that reads this one's state, an evaluation: the state lies as it lies here, and is not moved.

        Args:
            fun: the step. Without it a decorator is returned.
            plan: its policy; by default this step's, and where that does not fit a step without a gradient (or is a
                finished `Plan`), its plan is filled in from the layout of the state.
            paths: which of its arguments are what of this step: ``{"params": "state/params"}``. By default those that are
                called as this step's state is.
            static_argnums, static_argnames: as in `parallelize`.

        Returns:
            A `Parallelized`. It wants this step planned, by `init`, a call or `lower`, before it is called itself.

        Raises:
            CaptureError: ``fun`` is no function, or ``paths`` no mapping; at a call, this step has not been planned, or for
                another state.

        Example:
            >>> @train_step.follow
            ... def eval_step(state, batch):
            ...     return loss_fn(state["params"], batch)
            >>> bool(jnp.isfinite(eval_step(state, batch)))
            True
        """
        if fun is None:
            return functools.partial(
                self.follow, plan=plan, paths=paths, static_argnums=static_argnums, static_argnames=static_argnames
            )
        if not callable(fun):
            raise CaptureError(f"follow takes a step function, not a {type(fun).__name__}")
        if paths is not None and not (isinstance(paths, Mapping) and all(isinstance(p, str) for p in paths.values())):
            raise CaptureError(f"paths says which argument is what, as in {{'params': 'state/params'}}, and is {paths!r}")
        policy = None if plan is None else _policy(plan)
        arguments = Arguments.of(fun, (), (), static_argnums, static_argnames)

        def planned() -> list[Followed]:
            made = self._lowered.values()
            return [Followed.of(m.graph, m.plan.completed.inputs, m.call) for m in made]

        own = None if isinstance(self._policy, Auto) else self._policy  # what is found is for this step's graph alone
        following = Following(self._name, own, planned, paths or {})
        return Parallelized(
            fun, policy, self._devices, arguments, self._cost, following=following, without=self._without,
            strict=self._strict, verify=self._verify,
        )  # fmt: skip

    def under(self, plan: PlanLike) -> "Parallelized":
        """The same step under another plan, on the same devices.

        Args:
            plan: as for `parallelize`.

        Raises:
            PlanError, UnknownNameError: as `parallelize`.
        """
        return Parallelized(
            self.fun, _policy(plan), self._devices, self._arguments, self._cost, self._updates, self._following,
            self._without, self._strict, self._verify,
        )  # fmt: skip

    def without_stages(self) -> "Parallelized":
        """The same step under what its plan does in each stage, on all devices; itself, where the plan has no stages."""
        inner = getattr(self._policy, "without_stages", None)
        return self if inner is None else self.under(inner)

    def graph(self, *args: Any, **kwargs: Any) -> Graph:
        """The captured graph for these arguments, before any plan.

        Args:
            args: the step's arguments by position, arrays or ``jax.ShapeDtypeStruct`` objects.
            kwargs: those by name.

        Raises:
            CaptureError: the step cannot be captured.
        """
        return capture_call(self.fun, self._arguments, self._arguments.bind(args, kwargs), self._updates)[0].graph

    def leaves(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """The flat leaves of these arguments, in the order of the graph's inputs.

        Args:
            args: the step's arguments by position.
            kwargs: those by name.

        Raises:
            CaptureError: an argument is no array and not static.
        """
        return self._arguments.bind(args, kwargs).leaves

    def _plan(self, captured: Captured, call: BoundCall, num_devices: int, policy: Any) -> StepPlan:
        if isinstance(policy, Auto):
            if self._following is not None:
                raise PlanError(
                    f"'{self._name}' follows another step's state: its plan is filled in, and not searched; leave out plan="
                )
            key = call.key, num_devices
            if key not in self._searched:  # a state is laid out by it
                donated = bool(self._arguments.donated)
                self._searched[key] = searched_plan(policy, captured.graph, num_devices, self._cost, donated)
            plan = self._searched[key]
        elif self._following is None:
            price = price_of(captured, num_devices, self._cost)
            plan = transform(captured, policy, num_devices, cost=self._cost, price=price)
        else:
            plan = self._following.plan(captured, policy, call, num_devices, self._name, self._cost)
        return lower(captured, with_searched_schedule(captured, plan, self._cost), self._cost, self._without)

    @no_full_collections()
    def _lower(self, call: BoundCall) -> Lowered:
        count, devices = devices_at_hand(self._devices)
        if isinstance(self._cost, Cluster) and self._cost.num_devices < count:
            raise DeviceError(
                f"the cluster '{self._cost.name}' has {self._cost.num_devices} devices and the plan is for {count}; give a "
                "cluster of as many, or more"
            )
        captured, result = capture_call(self.fun, self._arguments, call, self._updates)
        with no_mesh():
            return self._lowered_for(captured, result, call, count, devices)

    def _lowered_for(
        self, captured: Captured, result: StepResult, call: BoundCall, count: int, devices: tuple[Any, ...]
    ) -> Lowered:
        @no_full_collections()
        def planned(num_devices: int) -> StepPlan:
            def by(policy: Any) -> StepPlan:
                return self._plan(captured, call, num_devices, policy)

            def remedy(paths: Sequence[str]) -> str:
                found = tried_alone(self._policy, paths, lambda policy: between(by(policy)))
                return f"; {found}" if found else ""

            try:
                step = by(self._policy)
            except PlanError as error:
                apart = tried_apart(self._policy, by) if error.apart else ""
                error.args = (f"{error}{f'; {apart}' if apart else ''}{remedy(error.alone)}",)
                raise
            _say_lost(step, self._strict, remedy)
            if repeated := repeated_effects(step):
                warn(f"plan '{step.name}': {repeated}", PlanWarning)
            if num_devices != count and self._verify:
                _proof(step, step)
            return step

        step = planned(count)
        donated = [i for i, name in enumerate(call.owners) if name in self._arguments.donated]
        made = executable(step, devices, donated)
        changed = tuple(call.names[i] for i in (result.changes.changed if result.changes else ()))
        trees = CallTrees(tuple(tree for _, tree in call.trees), result.tree, changed, devices)
        found = Lowered(
            ExplainedPlan.of(step, trees), captured, made, call.without_arrays(), result.tree, lowered(step, made), devices,
            self._cost, result.changes, planned if self._devices is None else None, self,
        )  # fmt: skip
        proof = _proof(step, found) if self._verify else ""
        return dataclasses.replace(found, plan=dataclasses.replace(found.plan, proof=proof)) if proof else found


def _proof(step: StepPlan, lowered: Lowered | StepPlan) -> str:
    """What is proven unasked: of a plan over several device groups, or with time axes; of others nothing.

    Raises:
        VerificationError: the program computes something else than the step.
    """
    if len(step.completed.groups) < 2 and not step.has_time_axes:
        return ""
    try:
        return str(prove(lowered))
    except VerificationError as error:
        raise VerificationError(
            f"plan '{step.name}' would not compute what the step does: {error}. This is a fault of jscaler's own: please "
            "report it, and take another plan; parallelize(..., verify=False) runs this one all the same"
        ) from error


def _say_lost(step: StepPlan, strict: bool, remedy: Callable[[Sequence[str]], str]) -> None:
    """Warn of parallelism that a plan loses, and of loops it takes apart; raises PlanError where that is ``strict``."""
    lost, apart = lost_parallelism(step), loops_apart(step)
    for said in filter(None, (str(lost) if lost.ops else "", apart + remedy(between(step) or ()) if apart else "")):
        if strict:
            raise PlanError(f"plan '{step.name}' is refused, since strict=True: {said}")
        warn(f"plan '{step.name}': {said}", PlanWarning)


def _leaf_shardings(lowered: Lowered, names: Sequence[str]) -> list[Any]:
    """The shardings of the leaves of the step arguments ``names``, in the order of ``names``."""
    owned = list(zip(lowered.call.owners, lowered.executable.in_shardings, strict=True))
    return [sharding for name in names for owner, sharding in owned if owner == name]


def _struct(struct: jax.ShapeDtypeStruct, sharding: Any) -> jax.ShapeDtypeStruct:
    if isinstance(sharding, ChunkedSharding):
        return ChunkedStruct(struct.shape, struct.dtype, sharding)
    return struct.update(sharding=sharding)


def _returned(traced: TracedState, leaves: Sequence[Any]) -> Any:
    values = traced.assemble(leaves)
    return values[traced.names[0]] if len(traced.names) == 1 else tuple(values[name] for name in traced.names)
