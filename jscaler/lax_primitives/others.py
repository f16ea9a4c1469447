"""What few models use: batched matrix functions, approximate top-k; and what orders or copies whole tensors."""

from collections.abc import Callable

from jax.extend import core

from jscaler.ir.equations import shape
from jscaler.lax_primitives.primitive import Primitive
from jscaler.lax_primitives.spec import Spec, SpecFunction, dims, seen_whole

MATRICES = "cholesky eigh lu qr svd triangular_solve"
RARE = "eig hessenberg householder_product schur tridiagonal tridiagonal_solve"


def matrices(minor: Callable[[core.JaxprEqn], int], why: str) -> SpecFunction:
    """Leading dims are a batch; the last ``minor`` of every operand and result are seen whole."""
    return lambda eqn: seen_whole(eqn, why, len(shape(eqn.invars[0])) - minor(eqn))


def approx_top_k(eqn: core.JaxprEqn) -> Spec:
    """All dims pass but the one whose largest are taken."""
    sizes = shape(eqn.invars[0])
    axis = eqn.params["reduction_dimension"] % len(sizes)
    operand = dims(sizes, range(len(sizes)))
    made = dims((shape(eqn.outvars[0])[axis],), ["made"])[0]
    result = (*operand[:axis], made, *operand[axis + 1 :])
    why = "its largest are taken, which needs all of it"
    return Spec((operand,), (result,) * len(eqn.outvars), blocked=dict.fromkeys((*operand[axis], *made), why))


def pairwise(eqn: core.JaxprEqn) -> Spec:
    """Each result is its operand."""
    each = tuple(dims(shape(v), [(i, d) for d in range(len(shape(v)))]) for i, v in enumerate(eqn.invars))
    return Spec(each, each, pairwise=True)


RECORDS = (
    *(Primitive(name, matrices(lambda eqn: 2, "a matrix is seen whole")) for name in MATRICES.split()),
    Primitive("fft", matrices(lambda eqn: len(eqn.params["fft_lengths"]), "its transform needs all of it")),
    Primitive("approx_top_k", approx_top_k),
    *(Primitive(name, why="rare") for name in RARE.split()),
    Primitive("device_put", pairwise),
    Primitive("optimization_barrier", pairwise, hands_on=True, counts=True, fence=True, cost="alias", seen="same"),
    *(Primitive(name, seen="same") for name in ("copy_p", "pcast", "pvary")),
    Primitive("sharding_constraint", why="a plan decides how tensors lie", asks_shardy=False, seen="same"),
)
