"""From a traced step to a ``Graph``: fragments become ops, gradient calls become backward handles."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend import core

from jscaler.capture.autodiff import Differentiator
from jscaler.capture.batch_rows import BatchRows, data_rows
from jscaler.capture.bodies import BodyTable
from jscaler.capture.counting_scans import with_counts_apart
from jscaler.capture.fragments import Fragment, fragments, scope_of
from jscaler.capture.inner_jaxprs import scan_parts
from jscaler.capture.jaxprs import Atom, Inliner, fresh, inner_jaxpr, live_equations, make_jaxpr
from jscaler.capture.live_scan import live_scan
from jscaler.capture.module_scopes import common_path, module_of, with_module_scopes
from jscaler.capture.names import PathNames, common_root, function_name
from jscaler.capture.opening import hoist_numbers, opens
from jscaler.capture.residuals import default_residuals
from jscaler.capture.saveable import Policy, saved_values, saves_all
from jscaler.capture.trace import TaggedEquation, Trace
from jscaler.ir import Carry, GradientCall, Graph, Loop, Op, PTensor, Stacked
from jscaler.ir.graph import RuleSource
from jscaler.ir.op import OpKind, RecomputeRegion


def build_graph(
    step: Trace,
    input_names: Sequence[str],
    output_names: Sequence[str],
    next_version: Mapping[int, int],
    bodies: BodyTable,
    rules: RuleSource,
) -> Graph:
    """The graph of a traced step.

    Args:
        step: its flat equations.
        input_names, output_names: one path per leaf.
        next_version: output index -> input index of the state leaf it succeeds.
        bodies: interns op bodies.
        rules: derives the ops' rules.
    """
    rows = data_rows(step, next_version.values())
    step = with_module_scopes(with_counts_apart(step, rows), input_names, next_version)
    builder = _Builder(step, input_names, bodies, rows)
    builder.run()
    outputs = tuple(builder.result(v, name) for v, name in zip(step.outvars, output_names, strict=True))
    inputs = tuple(builder.tensors[v] for v in step.invars)
    constants = tuple((builder.tensors[v], value) for v, value in builder.constants)
    calls = tuple(builder.calls[i] for i in sorted(builder.calls))
    return Graph(
        tuple(builder.ops), inputs, constants, outputs, tuple(output_names), next_version, calls, rules,
        builder.loops,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where an op stands: in which loop, in which checkpointed regions; the outermost's ``policy`` says what it saves."""

    loop: str | None = None
    remat: tuple[RecomputeRegion, ...] = ()
    policy: Policy | None = None


class _Builder:
    def __init__(self, step: Trace, input_names: Sequence[str], bodies: BodyTable, rows: BatchRows):
        self.step, self.rows = step, rows
        self.bodies = bodies
        self.ops: list[Op] = []
        self.calls: dict[int, GradientCall] = {}
        self.loops: dict[str, Loop] = {}
        self.names = PathNames()
        self.tensors = {v: PTensor(n, v.aval, "input") for v, n in zip(step.invars, input_names, strict=True)}
        # an update is named by the parameter that it reads, or else by what it reads first
        self.trained = {self.tensors[v] for call in step.calls for v in call.wrt if v in self.tensors}
        self.constants: list[tuple[core.Var, Any]] = []
        self._add_constants(step.constants)
        # a step without a gradient names its ops as a loss does, so that one policy fits both
        self.root = common_root(scope_of(t.eqn) for t in step.equations if t.call is not None or not step.calls)
        modules = [module_of(name) for v, name in zip(step.invars, input_names, strict=True) if v in rows.learned]
        self.outermost = {self.root, common_path(modules)}
        self.fragments, self.generated = fragments(step, rows=rows, outermost=self.outermost)
        results = {v for v in step.outvars if isinstance(v, core.Var)}
        results |= {v for c in step.calls for v in (c.loss, *c.wrt) if isinstance(v, core.Var)}
        self.read_outside = _readers_outside(self.fragments, results)
        self.place = _Place()
        self.kept: set[core.Var] = set()  # what checkpoint policies save

    def run(self) -> None:
        last = {f.call: i for i, f in enumerate(self.fragments) if f.call is not None}
        for i, fragment in enumerate(self.fragments):
            self._differentiate_before(fragment)
            self._add(fragment)
            if fragment.call is not None and last[fragment.call] == i:
                self._differentiate(fragment.call)
        for call in range(len(self.step.calls)):
            if call not in self.calls:
                self._differentiate(call)

    def _add(self, fragment: Fragment) -> None:
        """The op of a fragment, or the ops of what it opens."""
        eqn = fragment.eqns[0][1]
        if len(fragment.eqns) > 1 or not opens(eqn):
            self.ops.append(self._op(fragment))
        elif eqn.primitive.name == "scan":
            self._open_scan(fragment, eqn)
        else:
            self._open_remat(fragment, eqn)

    def _open_scan(self, fragment: Fragment, eqn: core.JaxprEqn) -> None:
        parts = live_scan(scan_parts(eqn), {i for i, v in enumerate(eqn.outvars) if v in self.read_outside})
        name = self._name(fragment, eqn)
        inits = [self._made(a, f"{name}/init{i}", fragment.call) for i, a in enumerate(parts.inits)]
        stacks = [self._made(a, f"{name}/stack{i}", fragment.call) for i, a in enumerate(parts.stacks)]
        first = len(parts.consts)
        variables = [fresh(v) for v in parts.body.invars[first:]]
        inside, slices = variables[: len(inits)], variables[len(inits) :]
        for i, var in enumerate(inside):
            self.tensors[var] = PTensor(f"{name}:carry{i}", var.aval)
        for var, stack in zip(slices, stacks, strict=True):
            self.tensors[var] = PTensor(self.names.unique(f"{stack.name}@{name}"), var.aval)
        self.rows.enter(parts, variables)
        outer, self.place = self.place, dataclasses.replace(self.place, loop=name)
        args, before = [*parts.consts, *variables], len(self.ops)
        returned = self._block(parts.body, parts.body_consts, args, eqn, fragment.call, f"{name}/out")
        if returned and len(self.ops) == before:  # a loop has at least one op to stand in the graph by
            returned[0] = self._copied(returned[0], name, fragment.call)
        self.place = outer
        if len(self.ops) == before:
            return
        outs, written = returned[: len(inits)], returned[len(inits) :]
        for i, var in enumerate((*parts.finals, *parts.stacked)):
            self.tensors[var] = PTensor(f"{name}:{i}", var.aval)
        self.loops[name] = Loop(
            name,
            eqn.params["length"],
            eqn.params["reverse"],
            tuple(
                Carry(init, self.tensors[var], out, self.tensors[final])
                for init, var, out, final in zip(inits, inside, outs, parts.finals, strict=True)
            ),
            tuple(Stacked(stack, self.tensors[var]) for stack, var in zip(stacks, slices, strict=True)),
            tuple(
                Stacked(self.tensors[var], tensor)
                for var, tensor in zip(parts.stacked, written, strict=True)
                if var in self.read_outside
            ),
            outer.loop,
            eqn.params.get("unroll", 1),
        )

    def _open_remat(self, fragment: Fragment, eqn: core.JaxprEqn) -> None:
        inner, consts = inner_jaxpr(eqn)
        name = self.names.unique("/".join(p for p in (self._scope(fragment), "remat") if p))
        outer, policy = self.place, eqn.params.get("policy")
        if not saves_all(policy, inner.eqns):
            remat = (*outer.remat, RecomputeRegion(name, outer.loop))
            self.place = dataclasses.replace(outer, remat=remat, policy=outer.policy if outer.remat else policy)
        results = self._block(inner, consts, list(eqn.invars), eqn, fragment.call, f"{name}/out")
        self.place = outer
        self.tensors.update(zip(eqn.outvars, results, strict=True))

    def _block(
        self,
        body: core.Jaxpr,
        consts: Sequence[Any],
        args: Sequence[Atom],
        eqn: core.JaxprEqn,
        call: int | None,
        label: str,
    ) -> list[PTensor]:
        """The ops of a body applied to ``args``, in the current place; returns the tensors of its results."""
        inliner = Inliner()
        outs = inliner.run(body, consts, args, eqn.source_info.name_stack)
        constants = list(inliner.constants)
        equations = hoist_numbers(live_equations(inliner.eqns, outs), constants)
        self._add_constants(constants)
        tagged = tuple(TaggedEquation(e, call) for e in equations)
        saved = saved_values(self.place.policy, equations)
        self.kept |= saved.kept
        found, self.generated = fragments(
            Trace((), (), tagged, (), tuple(outs), body), self.generated, saved.ends, self.rows, self.outermost
        )
        self.read_outside |= _readers_outside(found, {v for v in (*outs, *saved.ends) if isinstance(v, core.Var)})
        for fragment in found:
            self._add(fragment)
        return [self._made(atom, f"{label}{i}", call) for i, atom in enumerate(outs)]

    def _made(self, atom: Atom, name: str, call: int | None, tensor: str = "") -> PTensor:
        """The tensor of an atom; a literal, or what needs no input, gets an op that makes it here.

        Args:
            tensor: its name then; by default it is called after the op.
        """
        if isinstance(atom, core.Var) and atom in self.tensors:
            return self.tensors[atom]
        path = self.names.unique(f"{name}/constant")
        made = PTensor(tensor or f"{path}:0", atom.aval)
        body = self.bodies.intern(make_jaxpr(self._with_generated([], [atom]), [], [atom], self.step.source))
        self.ops.append(self._placed(Op(path, self._kind(call), (), (made,), body, call=call)))
        return made

    def _copied(self, tensor: PTensor, name: str, call: int | None) -> PTensor:
        """A copy made here of ``tensor``."""
        path = self.names.unique(f"{name}/copy")
        copy = PTensor(f"{path}:0", tensor.aval)
        body = self.bodies.traced(lambda x: [jnp.copy(x)], [tensor.aval], key="copy")
        self.ops.append(self._placed(Op(path, self._kind(call), (tensor,), (copy,), body, call=call)))
        return copy

    def _placed(self, op: Op) -> Op:
        return dataclasses.replace(op, loop=self.place.loop, remat=self.place.remat)

    def _name(self, fragment: Fragment, eqn: core.JaxprEqn) -> str:
        reads = [v for v in eqn.invars if isinstance(v, core.Var)]
        return self.names.unique(self._path(fragment, [eqn], [self.tensors[v] for v in reads if v in self.tensors]))

    def _add_constants(self, constants: Sequence[tuple[core.Var, Any]]) -> None:
        for var, value in constants:
            self.tensors[var] = PTensor(f"constant:{len(self.constants)}", var.aval, "constant")
            self.constants.append((var, value))

    def _differentiate_before(self, fragment: Fragment) -> None:
        """A loss that computes nothing has no last fragment: its call is differentiated when a gradient is read."""
        reads = {v for _, e in fragment.eqns for v in e.invars if isinstance(v, core.Var)}
        for index, call in enumerate(self.step.calls):
            if index not in self.calls and reads & set(call.gradients):
                self._differentiate(index)

    def result(self, atom: Atom, name: str) -> PTensor:
        """The PTensor of an output atom; a constant result gets an op that makes it."""
        return self._made(atom, f"output/{name}", None, f"output/{name}")

    def _op(self, fragment: Fragment) -> Op:
        eqns = [e for _, e in fragment.eqns]
        produced = [v for e in eqns for v in e.outvars]
        outvars = [v for v in produced if v in self.read_outside]
        full = self._with_generated(eqns, outvars)
        defined = {v for e in full for v in e.outvars}
        reads = [v for e in full for v in e.invars if isinstance(v, core.Var) and v not in defined]
        invars = list(dict.fromkeys(reads))
        inputs = tuple(self.tensors[v] for v in invars)
        path = self.names.unique(self._path(fragment, eqns, inputs))
        for i, var in enumerate(outvars):
            self.tensors[var] = PTensor(f"{path}:{i}", var.aval)
        body = self.bodies.intern(make_jaxpr(full, invars, outvars, self.step.source))
        outputs = tuple(self.tensors[v] for v in outvars)
        op = Op(path, self._kind(fragment.call), inputs, outputs, body, eqns[0].source_info, fragment.call)
        named = self.rows.names([*invars, *outvars])
        op = dataclasses.replace(op, named=named)
        kept = tuple(self.tensors[v] for v in outvars if v in self.kept)
        return self._placed(dataclasses.replace(op, residuals=default_residuals(op), kept=kept))

    def _with_generated(self, eqns: Sequence[core.JaxprEqn], outvars: Sequence[Atom]) -> list[core.JaxprEqn]:
        """``eqns`` behind copies of the input-free equations that they or ``outvars`` read, dead ones dropped."""
        needed: dict[core.Var, core.JaxprEqn] = {}

        def need(atoms: Sequence[Atom]) -> None:
            for atom in atoms:
                if isinstance(atom, core.Var) and atom in self.generated and atom not in needed:
                    eqn = self.generated[atom]
                    need(eqn.invars)
                    needed.update(dict.fromkeys(eqn.outvars, eqn))

        for eqn in eqns:
            need(eqn.invars)
        need(outvars)
        copies = {id(e): e for e in needed.values()}.values()
        return live_equations([*copies, *eqns], outvars)

    def _kind(self, call: int | None) -> OpKind:
        return "forward" if call is not None or not self.step.calls else "update"

    def _scope(self, fragment: Fragment) -> str:
        """The module path below the top module."""
        scope = fragment.scope
        inside = self.root and (scope == self.root or scope.startswith(self.root + "/"))
        return scope[len(self.root) :].strip("/") if inside else scope

    def _path(self, fragment: Fragment, eqns: Sequence[core.JaxprEqn], inputs: Sequence[PTensor]) -> str:
        function, scope = function_name(eqns), self._scope(fragment)
        if fragment.call is None and self.step.calls:
            leaves = [t for t in inputs if t.role == "input" and t.shape]
            leaf = next((t.name for t in leaves if t in self.trained), leaves[0].name if leaves else "")
            return "/".join(p for p in ("update", scope, leaf, function) if p)
        return "/".join(p for p in (scope or ("loss" if not fragment.scope else ""), function) if p)

    def _differentiate(self, index: int) -> None:
        call = self.step.calls[index]
        forward = [op for op in self.ops if op.call == index and op.kind == "forward"]
        loss = self.result(call.loss, "loss")
        differentiator = Differentiator(self.bodies, index, self.loops)
        wrt = tuple(self.tensors[v] for v in call.wrt)
        gradients = differentiator.run(forward, loss, wrt)
        self.calls[index] = GradientCall(loss, wrt, tuple(gradients))
        handles = differentiator.handles
        self.ops = [dataclasses.replace(o, backward=handles.get(o.path)) if o.call == index else o for o in self.ops]
        self.ops += differentiator.ops
        self.loops.update(differentiator.made)
        self.tensors.update(zip(call.gradients, gradients, strict=True))


def _readers_outside(found: Sequence[Fragment], results: set[core.Var]) -> set[core.Var]:
    """Variables that a fragment must hand out: read by another fragment, by the caller, or by autodiff."""
    home = {v: f for f in found for _, e in f.eqns for v in e.outvars}
    outside = set(results)
    for fragment in found:
        for _, eqn in fragment.eqns:
            outside |= {v for v in eqn.invars if isinstance(v, core.Var) and home.get(v) is not fragment}
    return outside
