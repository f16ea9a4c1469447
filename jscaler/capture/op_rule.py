"""``OpRule``: a rule as text, ``"b s h, h o -> b s o"``, read once and matched against shapes.

One word per dim; the same word is the same factor. ``(h d)`` is a dim of two factors, major first; ``1`` is a dim of size
one, and a dim of size one carries no factor whatever its word; ``...`` are leading or other dims, aligned from the right.
A tensor without dims is an empty text (``"b s, -> b s"``).
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jscaler.errors import RuleError, UnknownNameError
from jscaler.ir.mask import Combiner
from jscaler.lax_primitives.spec import Dims, Label, Spec

Words = tuple[tuple[str, ...], ...]  # per dim its factors, major first
TOKEN = re.compile(r"\s*(\.\.\.|[A-Za-z_]\w*|1\b|[()])")
ELLIPSIS = "..."
COMBINERS = ("add", "max", "min")
LINEAR = ("", "add", "each", "first", "move")


@dataclass(frozen=True)
class Matched:
    """A rule at given shapes: what an equation of ours carries.

    Attributes:
        operands, results: per tensor and dim its factors; none where the size is 1.
        sizes: of every factor.
        blocked: factor -> why it cannot be split.
        reduce: factor -> how the shares of the results that lack it are joined.
        linear: how value shares of operands pass; see `OpRule`.
        text: the rule as it was written.
    """

    operands: tuple[Words, ...]
    results: tuple[Words, ...]
    sizes: tuple[tuple[str, int], ...]
    blocked: tuple[tuple[str, str], ...] = ()
    reduce: tuple[tuple[str, Combiner], ...] = ()
    linear: str = ""
    text: str = ""

    def open(self) -> list[str]:
        """The factors that may be split."""
        return [name for name, _ in self.sizes if name not in dict(self.blocked)]

    def spec(self, operands: Sequence[tuple[int, ...]], results: Sequence[tuple[int, ...]]) -> Spec:
        """The rule as that of an equation with these shapes."""
        sizes = dict(self.sizes)
        blocked: dict[Label, str] = {(name, sizes[name]): why for name, why in self.blocked if name in sizes}

        def tensor(side: str, index: int, words: Words, dims: tuple[int, ...]) -> Dims:
            labels = []
            for d, (names, size) in enumerate(zip(words, dims, strict=True)):
                if size > 1 and not names:
                    blocked[(side, index, d), size] = "its rule has no word for it"
                    labels.append((((side, index, d), size),))
                else:
                    labels.append(tuple((n, sizes[n]) for n in names))
            return tuple(labels)

        combiner: Any = next((c for n, c in self.reduce if n not in dict(self.blocked)), "add")
        ins = tuple(tensor("in", i, w, s) for i, (w, s) in enumerate(zip(self.operands, operands, strict=True)))
        outs = tuple(tensor("out", i, w, s) for i, (w, s) in enumerate(zip(self.results, results, strict=True)))
        return Spec(ins, outs, combiner, blocked, self.linear)


@dataclass(frozen=True)
class OpRule:
    """The factors of an op as text.

    A factor that every result carries is parallel. One that no result carries is a reduction, as in an einsum: each part
    gives a value share, and the shares are added, or joined as ``reduce`` says. One that only some results carry, or no
    operand, is blocked unless ``reduce`` names it.

    Args:
        text: one list of words per operand, ``->``, one per result.
        blocked: factors that must not be split, as words: ``"s t"``.
        reduce: factor -> ``"add"``, ``"max"`` or ``"min"``.
        sizes: factors whose size no dim tells: all but one of each ``(h d)``.
        linear: how value shares of the operands pass without being joined first: ``"each"`` in each operand by itself
            (a product), ``"add"`` in all together (a sum), ``"first"`` in the first, ``"move"`` data is only moved.

    Raises:
        RuleError: the text cannot be read.

    Example:
        >>> OpRule("b t (h d), (h d) o -> b t o", sizes={"h": 4})
        OpRule('b t (h d), (h d) o -> b t o')
        >>> rule = OpRule("b t (h d), (h d) o -> b t o", sizes={"h": 4})
        >>> rule.names
        ['b', 't', 'h', 'd', 'o']
        >>> dict(rule.match([(2, 8, 16), (16, 32)], [(2, 8, 32)]).sizes)["d"]
        4
    """

    text: str
    blocked: str = ""
    reduce: Mapping[str, Combiner] | tuple[tuple[str, Combiner], ...] = ()
    sizes: Mapping[str, int] | tuple[tuple[str, int], ...] = ()
    linear: str = ""
    operands: tuple[Words, ...] = field(init=False, compare=False)
    results: tuple[Words, ...] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("reduce", "sizes"):
            object.__setattr__(self, name, tuple(sorted(dict(getattr(self, name)).items())))
        if not isinstance(self.blocked, str):
            raise RuleError(self.text, f"blocked= is a text of words, as in blocked='s t', not {self.blocked!r}")
        left, arrow, right = self.text.partition("->")
        if not arrow or "->" in right:
            raise RuleError(self.text, "it needs one '->' between operands and results")
        object.__setattr__(self, "operands", self._tensors(left))
        object.__setattr__(self, "results", self._tensors(right))
        self._check()

    def __repr__(self) -> str:
        return f"OpRule({self.text!r})"

    @property
    def names(self) -> list[str]:
        """Every factor, in order of appearance."""
        tensors = (*self.operands, *self.results)
        return list(dict.fromkeys(n for words in tensors for dim in words for n in dim if n not in ("1", ELLIPSIS)))

    def _tensors(self, text: str) -> tuple[Words, ...]:
        return tuple(self._words(one) for one in text.split(",")) if text.strip() else ((),)

    def _words(self, text: str) -> Words:
        dims: list[tuple[str, ...]] = []
        inside: list[str] | None = None
        place, text = 0, text.rstrip()
        while place < len(text):
            found = TOKEN.match(text, place)
            if not found:
                raise RuleError(self.text, f"{text[place:].strip()!r} is no word, '1', '...' or '( )'")
            place, token = found.end(), found[1]
            if token == "(" and inside is None:
                inside = []
            elif token == ")" and inside:
                dims.append(tuple(inside))
                inside = None
            elif token in "()" or (inside is not None and token in ("1", ELLIPSIS)):
                raise RuleError(self.text, f"'( )' holds one or more words, and not '{token}'")
            elif inside is not None:
                inside.append(token)
            else:
                dims.append((token,))
        if inside is not None:
            raise RuleError(self.text, "a '(' is not closed")
        if sum(d == (ELLIPSIS,) for d in dims) > 1:
            raise RuleError(self.text, f"'{text.strip()}' has two '...'")
        return tuple(dims)

    def _check(self) -> None:
        for what, named in (("blocked", self.blocked.split()), ("reduce", dict(self.reduce)), ("sizes", dict(self.sizes))):
            for name in named:
                if name not in self.names:
                    raise UnknownNameError("factor", name, self.names, f" in the rule '{self.text}' ({what}=)")
        for name, combiner in dict(self.reduce).items():
            if combiner not in COMBINERS:
                raise RuleError(self.text, f"reduce={{'{name}': {combiner!r}}}: known are {', '.join(COMBINERS)}")
            if all(_carries(words, name) for words in self.results):
                raise RuleError(self.text, f"every result carries '{name}', so it is not reduced")
        if len(set(dict(self.reduce).values())) > 1:
            raise RuleError(self.text, "the factors of one op are joined in one way: reduce= has several")
        if self.linear not in LINEAR:
            raise RuleError(self.text, f"linear={self.linear!r}: known are {', '.join(filter(None, LINEAR))}")

    def match(
        self, operands: Sequence[tuple[int, ...]], results: Sequence[tuple[int, ...]] | None = None, who: str = "the op"
    ) -> Matched:
        """The rule at these shapes.

        Args:
            operands: the shape of each.
            results: the shape of each; without them, what can be said of the operands.
            who: what a message calls the op.

        Raises:
            RuleError: it does not fit, and where.
        """
        sides = [("operand", self.operands, operands)]
        if results is not None:
            sides.append(("result", self.results, results))
        places: list[tuple[str, tuple[str, ...], int]] = []
        labels: list[list[Words]] = []
        for side, texts, shapes in sides:
            if len(texts) != len(shapes):
                raise RuleError(self.text, f"{who} has {len(shapes)} {side}s and the rule has {len(texts)}")
            labels.append([])
            for i, (words, sizes) in enumerate(zip(texts, shapes, strict=True)):
                full = self._expanded(words, sizes, f"{side} {i}", who)
                labels[-1].append(full)
                places += [(f"{side} {i}, dim {d}", dim, n) for d, (dim, n) in enumerate(zip(full, sizes, strict=True))]
        found = self._solve(places, who)
        kept = [[tuple(tuple(n for n in dim if found.get(n, 1) > 1) for dim in w) for w in side] for side in labels]
        # a dim of size one carries nothing, though its word has a size elsewhere
        kept = [
            [tuple(d if n != 1 else () for d, n in zip(w, s, strict=True)) for w, s in zip(side, shapes, strict=True)]
            for side, (_, _, shapes) in zip(kept, sides, strict=True)
        ]
        ins, outs = tuple(kept[0]), tuple(kept[1]) if len(kept) > 1 else ()
        used = {n for words in (*ins, *outs) for dim in words for n in dim}
        known = tuple((n, s) for n, s in found.items() if n in used)
        combined: dict[str, Any] = dict(self.reduce)
        reduce = tuple((n, combined.get(n, "add")) for n, _ in known if not all(_carries(w, n) for w in outs))
        return Matched(ins, outs, known, tuple(self._reasons(ins, outs, used)), reduce, self.linear, self.text)

    def _expanded(self, words: Words, sizes: tuple[int, ...], where: str, who: str) -> Words:
        rest = len(sizes) - len(words) + 1
        if (ELLIPSIS,) in words and rest >= 0:
            at = words.index((ELLIPSIS,))
            words = (*words[:at], *((f"{ELLIPSIS}{rest - i}",) for i in range(rest)), *words[at + 1 :])
        if len(words) != len(sizes):
            raise RuleError(
                self.text, f"{who}: {where} has shape {sizes}, {len(sizes)} dims, and the rule names {len(words)} for it"
            )
        return words

    def _solve(self, places: Iterable[tuple[str, tuple[str, ...], int]], who: str) -> dict[str, int]:
        """The size of every factor, from the dims that carry it."""
        known: dict[str, tuple[int, str]] = {n: (s, "sizes=") for n, s in dict(self.sizes).items()}
        waiting = []
        for where, dim, size in places:
            if dim == ("1",) and size != 1:
                raise RuleError(self.text, f"{who}: {where} has size {size}, and the rule says 1")
            if size != 1 and len(dim) == 1:
                self._learn(known, dim[0], size, where, who)
            elif size != 1:
                waiting.append((where, dim, size))
        while waiting:
            ready = [p for p in waiting if sum(n not in known for n in p[1]) <= 1]
            if not ready:
                where, dim, size = waiting[0]
                unknown = [n for n in dim if n not in known]
                hint = ", ".join(f"'{n}': …" for n in unknown[1:])
                raise RuleError(
                    self.text, f"{who}: {where} of size {size} is ({' '.join(dim)}), and nothing tells the sizes of "
                    f"{' and '.join(unknown)}; give all but one: sizes={{{hint}}}",
                )  # fmt: skip
            for where, dim, size in ready:
                rest = math.prod(known[n][0] for n in dim if n in known)
                missing = [n for n in dim if n not in known]
                if size % rest or (not missing and size != rest):
                    shown = ", ".join(f"{n} = {known[n][0]}" for n in dim if n in known)
                    raise RuleError(self.text, f"{who}: {where} of size {size} cannot be ({' '.join(dim)}) with {shown}")
                for name in missing:
                    self._learn(known, name, size // rest, where, who)
            waiting = [p for p in waiting if p not in ready]
        return {n: s for n, (s, _) in known.items()}

    def _learn(self, known: dict[str, tuple[int, str]], name: str, size: int, where: str, who: str) -> None:
        before, place = known.setdefault(name, (size, where))
        if before != size:
            raise RuleError(self.text, f"{who}: factor '{name}' has size {before} at {place} and {size} at {where}")

    def _reasons(self, ins: tuple[Words, ...], outs: tuple[Words, ...], used: set[str]) -> Iterable[tuple[str, str]]:
        for name in self.blocked.split():
            yield name, "its rule says that it cannot be split"
        combiner = next(iter(dict(self.reduce).values()), "add")
        for name in sorted(used - set(self.blocked.split())):
            reduced = name not in dict(self.reduce) and outs and not any(_carries(w, name) for w in outs)
            if reduced and combiner != "add":
                yield name, f"the shares of this op are joined by {combiner}, and reduce= does not name it"
            if not any(_carries(w, name) for w in ins):
                yield name, "no operand carries it, so the function cannot tell a part's size"
            without = [i for i, w in enumerate(outs) if not _carries(w, name)]
            if 0 < len(without) < len(outs) and name not in dict(self.reduce):
                yield name, f"result {without[0]} does not carry it, and reduce= does not say how it is joined there"


def _carries(words: Words, name: str) -> bool:
    return any(name in dim for dim in words)


def as_rule(
    rule: "str | OpRule", blocked: str = "", reduce: Mapping[str, Combiner] | None = None,
    sizes: Mapping[str, int] | None = None, linear: str = "",
) -> OpRule:  # fmt: skip
    """``rule`` read, where it is text; a finished one has its own keywords."""
    if isinstance(rule, str):
        return OpRule(rule, blocked, dict(reduce or {}), dict(sizes or {}), linear)
    if not isinstance(rule, OpRule):
        raise RuleError(str(rule), f"a rule is a text or an OpRule, not {type(rule).__name__}")
    if blocked or reduce or sizes or linear:
        raise RuleError(rule.text, "give blocked, reduce, sizes and linear to the OpRule itself")
    return rule
