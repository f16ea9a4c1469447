"""Scopes for programs that have none: nnx modules leave no name in a jaxpr, so parameters tell where an equation belongs.

    up/kernel ─┐                        ┌─ down/kernel
    x ─► [mlp/up: dot] ─► [mlp: gelu] ─► [mlp/down: dot] ─► …

An equation that reads parameters (or what is made of parameters alone, as a cast) belongs to their module. Any other
lies between the last module above it and the first one below, and belongs to what these two have in common; but the
statistics of a norm, which only its module reads, are that module's, and so is what makes its next state alone. What no
module follows is the loss, and so are slices of data (``tokens[:, :-1]``): a module that looks them up could not be split.
A scope names and groups ops; no number depends on it.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence, Set

import jax.numpy as jnp
from jax.extend import core, source_info_util

from jscaler.capture.fragments import scope_of
from jscaler.capture.jaxprs import Atom, dtype, shape
from jscaler.capture.trace import TaggedEquation, Trace
from jscaler.ir.walk import closure, grouped
from jscaler.lax_primitives import known
from jscaler.lax_primitives.primitive import Role

LATER = re.compile(r"\.\d+$")  # a later use of a module
HOLDERS = ("rngs",)  # below a module, and no module of the user's


def with_module_scopes(step: Trace, input_names: Sequence[str], next_version: Mapping[int, int] = {}) -> Trace:
    """``step`` with a scope for every equation of those gradient calls in which no equation has one.

    So has a step without any gradient call.

    Args:
        next_version: number of a result -> number of the input that it succeeds.
    """
    named = {t.call for t in step.equations if scope_of(t.eqn)}
    names = dict(zip(step.invars, input_names, strict=True))
    equations = list(step.equations)
    # a step without a gradient is named as a loss is: what it is given are modules, and a batch
    given = {None: [v for v in step.invars if names[v].split("/")[0] != "batch"]} if not step.calls else {}
    for index, held in (given or {i: call.wrt for i, call in enumerate(step.calls)}).items():
        roots = {names[v].split("/")[0] for v in held if v in names and names[v].count("/") > 1}
        if index in named or not roots:
            continue
        modules = {v: module_of(name) for v, name in names.items() if name.split("/")[0] in roots}
        modules |= _state_of_modules(names, held, {step.invars[i] for i in next_version.values()})
        members = [i for i, t in enumerate(equations) if t.call == index]
        scopes = _scopes([equations[i].eqn for i in members], modules)
        state = {step.outvars[o]: modules.get(step.invars[i], "") for o, i in next_version.items()}
        scopes = _with_next_state([equations[i].eqn for i in members], scopes, step, state)
        for i, scope in zip(members, scopes, strict=True):
            equations[i] = _scoped(equations[i], scope)
    return dataclasses.replace(step, equations=tuple(equations))


def module_of(name: str) -> str:
    """``model/blocks/0/attn/query`` for the leaf ``…/query/kernel`` of it, or ``…/query/kernel/value``."""
    parts = name.removesuffix("/value").split("/")[:-1]
    return "/".join(parts[:-1] if parts[-1:] and parts[-1] in HOLDERS else parts)


def _state_of_modules(names: Mapping[core.Var, str], held: Sequence[core.Var], state: Set[core.Var]) -> dict[core.Var, str]:
    """The modules of what a model that is split in two has beside its parameters: the statistics of a norm.

        params/norm/scale   rest/norm/mean        state/0/norm/scale   state/1/norm/mean

    The two paths differ in one word. A copy of the parameters (a teacher) has the same leaves, and modules of its own.
    """
    trained = {v: names[v].split("/") for v in held if v in names}
    base = common_path([module_of(names[v]) for v in trained]).split("/")
    by_path = {module_of("/".join(words[len(base) :])): module_of(names[v]) for v, words in trained.items()}
    leaves = {tuple(words[len(base) :]) for words in trained.values()}
    found = {}
    for v in state - trained.keys():
        words = names[v].split("/")
        front, path = words[: len(base)], words[len(base) :]
        differ = sum(word != other for word, other in zip(front, base, strict=False))
        if path and differ == 1 and tuple(path) not in leaves and (module := by_path.get(module_of("/".join(path)))):
            found[v] = module
    return found


def _scopes(eqns: Sequence[core.JaxprEqn], modules: Mapping[core.Var, str]) -> list[str]:
    """The scope of each equation; empty where no module follows, or none is near."""
    own = _own(eqns, modules)
    above: list[int | None] = []  # the last equation of a module upstream
    last_at: dict[core.Var, int] = {}
    for i, eqn in enumerate(eqns):
        above.append(max((last_at[v] for v in _variables(eqn.invars) if v in last_at), default=None))
        if (last := i if own[i] else above[i]) is not None:
            last_at.update(dict.fromkeys(eqn.outvars, last))
    own = _with_statistics(eqns, own, {name for v, name in modules.items() if _is_weight(v)})
    scopes = list(own)
    first_at: dict[core.Var, int] = {}  # the first equation of a module downstream
    for i in reversed(range(len(eqns))):
        first = min((first_at[v] for v in eqns[i].outvars if v in first_at), default=None)
        if above[i] is None and eqns[i].primitive.name == "slice":
            first = None
        if not own[i] and first is not None:
            last = above[i]
            scopes[i] = common_path([own[first if last is None else last], own[first]])
        if (first := i if own[i] else first) is not None:
            for v in _variables(eqns[i].invars):
                first_at[v] = min(first, first_at.get(v, first))
    return scopes


def _own(eqns: Sequence[core.JaxprEqn], modules: Mapping[core.Var, str]) -> list[str]:
    """The module whose parameters each equation reads; empty where it reads none. A later use is ``module.1``."""
    home = dict(modules)  # what is made of parameters alone
    free: set[core.Var] = set()  # what is made of nothing: constants, positions
    uses = _Uses()
    own = []
    for eqn in eqns:
        reads = [v for v in _variables(eqn.invars) if v not in free]
        held = [home[v] for v in reads if v in home]
        if not reads:
            free.update(eqn.outvars)
        elif len(held) == len(reads):
            home.update(dict.fromkeys(eqn.outvars, common_path(held)))
        own.append(uses.name(common_path(held)) if held else "")
    return own


def _with_next_state(
    eqns: Sequence[core.JaxprEqn], scopes: Sequence[str], step: Trace, state: Mapping[Atom, str]
) -> list[str]:
    """``scopes``, and those of modules for equations that make nothing but their next ``state``: statistics, no counts."""
    found = list(scopes)
    readers = grouped((v, t.eqn) for t in step.equations for v in _variables(t.eqn.invars))
    results = {v for v in step.outvars if isinstance(v, core.Var)}
    made_for: dict[core.Var, str] = {v: m for v, m in state.items() if isinstance(v, core.Var) and m and _is_weight(v)}
    for i, eqn in reversed(list(enumerate(eqns))):
        uses = [(v, reader) for v in eqn.outvars for reader in readers.get(v, ())]
        ends = {made_for.get(v, "") for v in eqn.outvars if v in results}
        ends |= {made_for.get(v, "") for _, reader in uses for v in reader.outvars}
        if len(ends) == 1 and (module := ends.pop()) and not scopes[i]:
            found[i] = module
            made_for.update(dict.fromkeys(eqn.outvars, module))
    return found


def _is_weight(variable: core.Var) -> bool:
    """Whether it is an array of floating-point numbers, and no key or count of a dropout's."""
    return bool(shape(variable)) and jnp.issubdtype(dtype(variable), jnp.floating)


def _with_statistics(eqns: Sequence[core.JaxprEqn], own: Sequence[str], weighted: Set[str]) -> list[str]:
    """``own``, and as a module's what is made for its elementwise arithmetic alone, if some of that reduces.

    Args:
        weighted: modules with weights.
    """
    found = list(own)
    made = {v: i for i, eqn in enumerate(eqns) for v in eqn.outvars}
    readers: dict[int, set[int]] = {}
    members: dict[str, set[int]] = {}
    for i, eqn in enumerate(eqns):
        members.setdefault(own[i], set()).add(i)
        for v in _variables(eqn.invars):
            if v in made:
                readers.setdefault(made[v], set()).add(i)

    def sources(i: int) -> list[int]:
        return [made[v] for v in _variables(eqns[i].invars) if v in made and not own[made[v]]]

    def some_are(numbers: Iterable[int], role: Role) -> bool:
        return any(known(eqns[i].primitive).role == role for i in numbers)

    for module, inside in members.items():
        if LATER.sub("", module) not in weighted or some_are(inside, "contracts"):
            continue
        taken: set[int] = set()
        for i in sorted(closure(sorted(inside), sources), reverse=True):  # readers first
            if i not in inside and readers.get(i, set()) <= inside | taken:
                taken.add(i)
        if some_are(taken, "reduces"):
            for i in taken:
                found[i] = module
    return found


class _Uses:
    """Tells the uses of a module apart: a tied embedding looks up first, and makes logits behind all other modules."""

    def __init__(self) -> None:
        self.open: set[str] = set()
        self.counts: dict[str, int] = {}

    def name(self, module: str) -> str:
        if module not in self.open:
            self.counts[module] = self.counts.get(module, -1) + 1
        self.open = {m for m in self.open if (m + "/").startswith(module + "/") or (module + "/").startswith(m + "/")}
        self.open.add(module)
        return f"{module}.{self.counts[module]}" if self.counts[module] else module


def _variables(atoms: Sequence[Atom]) -> list[core.Var]:
    return [v for v in atoms if isinstance(v, core.Var)]


def common_path(scopes: Sequence[str]) -> str:
    """The path that all ``scopes`` share."""
    shared = []
    for parts in zip(*(s.split("/") for s in scopes), strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return "/".join(shared)


def _scoped(tagged: TaggedEquation, scope: str) -> TaggedEquation:
    if not scope:
        return tagged
    info = tagged.eqn.source_info
    stack = source_info_util.new_name_stack(scope) + info.name_stack
    return dataclasses.replace(tagged, eqn=tagged.eqn.replace(source_info=info.replace(name_stack=stack)))
