"""Union-find with refinement: what is unified has the same leaves, sizes multiply out, blocks stay."""

import math

import hypothesis.strategies as st
import pytest
from hypothesis import given

from jscaler.rules.dim_atoms import Atoms


def test_equal_sizes_become_one() -> None:
    atoms = Atoms()
    a, b = atoms.new(6), atoms.new(6)
    atoms.unify([a], [b], "add")
    assert atoms.leaves([a]) == atoms.leaves([b]) == [a]


@pytest.mark.smoke
def test_a_larger_atom_is_refined_from_the_minor_end() -> None:
    atoms = Atoms()
    flat, three, two = atoms.new(6), atoms.new(3), atoms.new(2)
    atoms.unify([flat], [three, two], "reshape")
    assert [atoms.size[leaf] for leaf in atoms.leaves([flat])] == [3, 2]
    assert atoms.leaves([flat]) == atoms.leaves([three, two])


def test_a_refinement_reaches_what_was_unified_before() -> None:
    atoms = Atoms()
    a, b, three, two = (atoms.new(n) for n in (6, 6, 3, 2))
    atoms.unify([a], [b], "add")
    atoms.unify([b], [three, two], "reshape")
    assert atoms.leaves([a]) == atoms.leaves([three, two])


def test_sizes_that_do_not_divide_are_blocked() -> None:
    atoms = Atoms()
    a, b, c, d = (atoms.new(n) for n in (2, 3, 3, 2))
    atoms.unify([a, b], [c, d], "reshape")
    reason = "reshape mixes parts of sizes 3 and 2"
    assert {atoms.reason.get(leaf) for leaf in atoms.leaves([a, b, c, d])} == {reason}


def test_a_block_is_inherited_by_union_and_by_refinement_and_its_first_reason_stays() -> None:
    atoms = Atoms()
    a, b, three, two = (atoms.new(n) for n in (6, 6, 3, 2))
    atoms.block([b], "it is sorted")
    atoms.unify([a], [b], "add")
    atoms.block([a], "later")
    atoms.unify([a], [three, two], "reshape")
    assert [atoms.reason[leaf] for leaf in atoms.leaves([three, two])] == ["it is sorted"] * 2


def test_one_index_on_two_dims() -> None:
    atoms = Atoms()
    rows, columns = atoms.new(4), atoms.new(4)
    atoms.unify([rows], [columns], "dot_general")
    assert atoms.leaves([rows]) == atoms.leaves([columns])


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=4))
def test_refinement_keeps_sizes(reshapes: list[tuple[int, int]]) -> None:
    """However tensors of 24 elements are reshaped into each other, each dim's leaves multiply to its size."""
    atoms = Atoms()
    tensors = [[atoms.new(size) for size in shape] for shape in ((24,), (4, 6), (2, 3, 4), (8, 3))]
    for i, j in reshapes:
        left, right = tensors[i], tensors[j]
        atoms.unify(left, right, "reshape")
        for atom in (a for tensor in tensors for a in tensor):
            leaves = atoms.leaves([atom])
            assert math.prod(atoms.size[leaf] for leaf in leaves) == atoms.size[atom]
        if not any(leaf in atoms.reason for leaf in atoms.leaves(left)):
            assert atoms.leaves(left) == atoms.leaves(right)
