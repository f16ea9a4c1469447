"""From a traced step to a ``Graph``: fragments become ops, gradient calls become backward handles."""

import dataclasses
from collections.abc import Mapping, Sequence

from jax.extend import core

from jscaler.capture.autodiff import Differentiator
from jscaler.capture.bodies import BodyTable
from jscaler.capture.fragments import Fragment, fragments
from jscaler.capture.jaxprs import Atom, live_equations, make_jaxpr
from jscaler.capture.module_scopes import with_module_scopes
from jscaler.capture.names import PathNames, common_root, function_name
from jscaler.capture.residuals import default_residuals
from jscaler.capture.trace import Trace
from jscaler.ir import GradientCall, Graph, Op, PTensor
from jscaler.ir.graph import RuleSource
from jscaler.ir.op import OpKind


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
    builder = _Builder(with_module_scopes(step, input_names), input_names, bodies)
    builder.run()
    outputs = tuple(builder.result(v, name) for v, name in zip(step.outvars, output_names, strict=True))
    inputs = tuple(builder.tensors[v] for v in step.invars)
    constants = tuple((builder.tensors[v], value) for v, value in step.constants)
    calls = tuple(builder.calls[i] for i in sorted(builder.calls))
    return Graph(
        tuple(builder.ops), inputs, constants, outputs, tuple(output_names), next_version, calls, rules,
        step.opaque_gradients,
    )  # fmt: skip


class _Builder:
    def __init__(self, step: Trace, input_names: Sequence[str], bodies: BodyTable):
        self.step = step
        self.bodies = bodies
        self.ops: list[Op] = []
        self.calls: dict[int, GradientCall] = {}
        self.names = PathNames()
        self.tensors = {v: PTensor(n, v.aval, "input") for v, n in zip(step.invars, input_names, strict=True)}
        for i, (var, _) in enumerate(step.constants):
            self.tensors[var] = PTensor(f"constant:{i}", var.aval, "constant")
        self.fragments, self.generated = fragments(step)
        self.root = common_root(f.scope for f in self.fragments if f.call is not None)
        self.read_outside = self._readers_outside()

    def run(self) -> None:
        last = {f.call: i for i, f in enumerate(self.fragments) if f.call is not None}
        for i, fragment in enumerate(self.fragments):
            self._differentiate_before(fragment)
            self.ops.append(self._op(fragment))
            if fragment.call is not None and last[fragment.call] == i:
                self._differentiate(fragment.call)
        for call in range(len(self.step.calls)):
            if call not in self.calls:
                self._differentiate(call)

    def _differentiate_before(self, fragment: Fragment) -> None:
        """A loss that computes nothing has no last fragment: its call is differentiated when a gradient is read."""
        reads = {v for _, e in fragment.eqns for v in e.invars if isinstance(v, core.Var)}
        for index, call in enumerate(self.step.calls):
            if index not in self.calls and reads & set(call.gradients):
                self._differentiate(index)

    def result(self, atom: Atom, name: str) -> PTensor:
        """The PTensor of an output atom; a constant result gets an op that makes it."""
        if isinstance(atom, core.Var) and atom in self.tensors:
            return self.tensors[atom]
        tensor = PTensor(f"output/{name}", atom.aval)
        eqns = self._with_generated([], [atom])
        body = self.bodies.intern(make_jaxpr(eqns, [], [atom], self.step.source))
        self.ops.append(Op(self.names.unique(f"output/{name}/constant"), self._kind(None), (), (tensor,), body))
        return tensor

    def _readers_outside(self) -> set[core.Var]:
        """Variables that a fragment must hand out: read by another fragment, by the caller, or by autodiff."""
        home = {v: f for f in self.fragments for _, e in f.eqns for v in e.outvars}
        outside = {v for v in self.step.outvars if isinstance(v, core.Var)}
        outside |= {v for c in self.step.calls for v in (c.loss, *c.wrt) if isinstance(v, core.Var)}
        for fragment in self.fragments:
            for _, eqn in fragment.eqns:
                outside |= {v for v in eqn.invars if isinstance(v, core.Var) and home.get(v) is not fragment}
        return outside

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
        return dataclasses.replace(op, residuals=default_residuals(op))

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

    def _path(self, fragment: Fragment, eqns: Sequence[core.JaxprEqn], inputs: Sequence[PTensor]) -> str:
        function = function_name(eqns)
        scope = fragment.scope
        if self.root and (scope == self.root or scope.startswith(self.root + "/")):
            scope = scope[len(self.root) :].strip("/")
        if fragment.call is None and self.step.calls:
            leaf = next((t.name for t in inputs if t.role == "input" and t.shape), "")
            return "/".join(p for p in ("update", scope, leaf, function) if p)
        return "/".join(p for p in (scope or ("loss" if not fragment.scope else ""), function) if p)

    def _differentiate(self, index: int) -> None:
        call = self.step.calls[index]
        forward = [op for op in self.ops if op.call == index and op.kind == "forward"]
        loss = self._loss_tensor(call.loss)
        differentiator = Differentiator(self.bodies, index)
        wrt = tuple(self.tensors[v] for v in call.wrt)
        gradients = differentiator.run(forward, loss, wrt)
        self.calls[index] = GradientCall(loss, wrt, tuple(gradients))
        handles = differentiator.handles
        self.ops = [dataclasses.replace(o, backward=handles.get(o.path)) if o.call == index else o for o in self.ops]
        self.ops += differentiator.ops
        self.tensors.update(zip(call.gradients, gradients, strict=True))

    def _loss_tensor(self, atom: Atom) -> PTensor:
        return self.tensors[atom] if isinstance(atom, core.Var) and atom in self.tensors else self.result(atom, "loss")
