"""Rules as text: what is read, what each shape makes of it, and what is said of a rule that does not fit."""

import pytest

from jscaler import OpRule, RuleError, UnknownNameError

PROJECT = OpRule("b s h, h o -> b s o")


def test_one_word_is_one_factor() -> None:
    rule = PROJECT.match([(2, 3, 4), (4, 5)], [(2, 3, 5)])
    assert rule.operands == ((("b",), ("s",), ("h",)), (("h",), ("o",)))
    assert rule.results == ((("b",), ("s",), ("o",)),)
    assert dict(rule.sizes) == {"b": 2, "s": 3, "h": 4, "o": 5}
    assert rule.reduce == (("h", "add"),)
    assert rule.blocked == ()


@pytest.mark.parametrize(
    ("text", "sizes", "shape", "expected"),
    [
        ("n -> n", {}, (6,), {"n": 6}),
        ("n m -> n m", {}, (6, 1), {"n": 6}),  # a dim of size one carries no factor
        ("n 1 -> n 1", {}, (6, 1), {"n": 6}),
        ("(h d) -> (h d)", {"h": 2}, (6,), {"h": 2, "d": 3}),
        ("(h d) -> (h d)", {"h": 2}, (2,), {"h": 2}),
        ("(g h d) -> (g h d)", {"h": 2, "d": 5}, (30,), {"g": 3, "h": 2, "d": 5}),
        ("... n -> ... n", {}, (2, 3, 4), {"n": 4, "...2": 2, "...1": 3}),
        ("b ... -> b ...", {}, (2, 3), {"b": 2, "...1": 3}),
        ("b ... -> b ...", {}, (2,), {"b": 2}),
    ],
)
def test_sizes(text: str, sizes: dict[str, int], shape: tuple[int, ...], expected: dict[str, int]) -> None:
    assert dict(OpRule(text, sizes=sizes).match([shape], [shape]).sizes) == expected


def test_a_composite_dim_learns_from_other_dims() -> None:
    rule = OpRule("b (h d), h o -> b d o").match([(2, 12), (3, 5)], [(2, 4, 5)])
    assert dict(rule.sizes) == {"b": 2, "h": 3, "o": 5, "d": 4}
    assert rule.operands[0] == (("b",), ("h", "d"))


def test_scalars_and_no_operands() -> None:
    assert OpRule("b s, -> b s").match([(2, 3), ()], [(2, 3)]).operands[1] == ()
    assert OpRule("b ->").match([(2,)], [()]).reduce == (("b", "add"),)


def test_a_size_one_dim_broadcasts_beside_a_factor() -> None:
    rule = OpRule("b n, b n -> b n").match([(2, 3), (1, 3)], [(2, 3)])
    assert rule.operands[1] == ((), ("n",))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("b s", "needs one '->'"),
        ("b -> s -> b", "needs one '->'"),
        ("b (h d -> b", "a '\\(' is not closed"),
        ("b () -> b", "holds one or more words"),
        ("b ((h) d) -> b", "holds one or more words"),
        ("b h) -> b", "holds one or more words"),
        ("b (1 d) -> b", "holds one or more words, and not '1'"),
        ("b 3 -> b", "'3' is no word"),
        ("b+s -> b", r"'\+s' is no word"),
        ("... b ... -> b", "has two '...'"),
    ],
)
def test_text_that_cannot_be_read(text: str, why: str) -> None:
    with pytest.raises(RuleError, match=why):
        OpRule(text)


@pytest.mark.parametrize(
    ("keywords", "why"),
    [
        ({"blocked": "b x"}, r"no factor named 'x' in the rule 'b s h, h o -> b s o' \(blocked=\)"),
        ({"blocked": ("b",)}, r"blocked= is a text of words, as in blocked='s t', not \('b',\)"),
        ({"sizes": {"ho": 2}}, "no factor named 'ho'.* known: b, s, h, o"),
        ({"reduce": {"h": "mul"}}, "'mul'}: known are add, max, min"),
        ({"reduce": {"b": "add"}}, "every result carries 'b'"),
        ({"linear": "both"}, "known are add, each, first, move"),
    ],
)
def test_keywords_that_do_not_fit(keywords: dict, why: str) -> None:
    with pytest.raises((RuleError, UnknownNameError), match=why):
        OpRule("b s h, h o -> b s o", **keywords)


@pytest.mark.parametrize(
    ("text", "shapes", "why"),
    [
        ("b s, o -> b s o", [(2, 3), (4, 5)], r"operand 1 has shape \(4, 5\), 2 dims, and the rule names 1 for it"),
        ("b s -> b", [(2, 3), (4,)], "has 2 operands and the rule has 1"),
        ("b s, s o -> b o", [(2, 3), (4, 5)], "factor 's' has size 3 at operand 0, dim 1 and 4 at operand 1, dim 0"),
        ("b 1 -> b", [(2, 3)], "operand 0, dim 1 has size 3, and the rule says 1"),
        ("(h d) -> h d", [(12,)], "nothing tells the sizes of h and d; give all but one: sizes={'d': …}"),
        ("(h d), h -> d", [(12,), (5,)], r"operand 0, dim 0 of size 12 cannot be \(h d\) with h = 5"),
        ("(h d), h, d -> d", [(12,), (3,), (2,)], r"of size 12 cannot be \(h d\) with h = 3, d = 2"),
        ("... b c -> b", [(3,)], r"operand 0 has shape \(3,\), 1 dims, and the rule names 3"),
    ],
)
def test_shapes_that_do_not_fit(text: str, shapes: list, why: str) -> None:
    with pytest.raises(RuleError, match=why):
        OpRule(text).match(shapes)


def test_results_that_do_not_fit() -> None:
    with pytest.raises(RuleError, match="factor 'o' has size 5 at operand 1, dim 1 and 6 at result 0, dim 2"):
        PROJECT.match([(2, 3, 4), (4, 5)], [(2, 3, 6)])
    with pytest.raises(RuleError, match="has 2 results and the rule has 1"):
        PROJECT.match([(2, 3, 4), (4, 5)], [(2, 3, 5), (2,)])


def test_what_is_not_said_to_be_safe_is_blocked() -> None:
    some = OpRule("b h -> b h, b").match([(2, 3)], [(2, 3), (2,)])
    assert dict(some.blocked) == {"h": "result 1 does not carry it, and reduce= does not say how it is joined there"}
    made = OpRule("b -> b n").match([(2,)], [(2, 3)])
    assert "no operand carries it" in dict(made.blocked)["n"]
    other = OpRule("b h n -> b", reduce={"h": "max"}).match([(2, 3, 4)], [(2,)])
    assert dict(other.blocked) == {"n": "the shares of this op are joined by max, and reduce= does not name it"}
    with pytest.raises(RuleError, match="joined in one way"):
        OpRule("b h n -> b", reduce={"h": "max", "n": "add"})
    assert dict(OpRule("b h -> b h, b", reduce={"h": "add"}).match([(2, 3)], [(2, 3), (2,)]).blocked) == {}
