"""Names are folded so that a person reads one line where a program has many."""

import pytest

from jscaler.text.folding import braced, folded, merged


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("block_0/mlp/up/dot", "block_*/mlp/up/dot"),
        ("state/opt_state/1/0/mu/block_11/kernel", "state/opt_state/*/*/mu/block_*/kernel"),
        ("update/reduce_sum.12:0", "update/reduce_sum.*:0"),
        (
            "d(state/params/block_3/norm1/scale)@block_3/norm1/rsqrt",
            "d(state/params/block_*/norm1/scale)@block_*/norm1/rsqrt",
        ),
        ("block_2/attn/dot.1@backward", "block_*/attn/dot.*@backward"),
        ("conv1x1/dot", "conv1x1/dot"),
    ],
)
def test_layer_numbers_are_folded(name: str, expected: str) -> None:
    assert folded(name) == expected


def test_names_that_differ_in_one_word_are_one() -> None:
    assert braced(["a/key/dot", "a/query/dot", "a/key/dot"]) == "a/{key,query}/dot"
    assert braced(["as a/key reads it", "as a/query reads it"]) == "as a/{key,query} reads it"
    assert braced(["same", "same"]) == "same"
    assert braced(["a/b", "c/d"]) == "a/b, c/d"
    assert braced(["a", "a/b"]) == "a, a/b"


def test_rows_are_merged_word_by_word_where_the_rest_is_equal() -> None:
    rows = [
        (f"{moment}/{layer}/{leaf}", leaf == "bias") for moment in ("mu", "nu") for layer in "kq" for leaf in ("bias", "w")
    ]

    def one(keep_last: bool) -> list[str]:
        found = merged(rows, lambda r: r[0], lambda r: r[1], lambda name, found: (name, found[0][1]), keep_last)
        return [name for name, _ in found]

    assert one(False) == ["{mu,nu}/{k,q}/bias", "{mu,nu}/{k,q}/w"]
    same = [(name, True) for name, _ in rows]
    assert [r[0] for r in merged(same, lambda r: r[0], lambda r: r[1], lambda n, f: (n, f[0][1]))] == [
        "{mu,nu}/{k,q}/{bias,w}"
    ]
    kept = merged(same, lambda r: r[0], lambda r: r[1], lambda n, f: (n, f[0][1]), keep_last=True)
    assert [r[0] for r in kept] == ["{mu,nu}/{k,q}/bias", "{mu,nu}/{k,q}/w"]
    assert merged([], lambda r: r, lambda r: r, lambda n, f: n) == []
