"""What holds or calls other programs: calls, custom derivatives, loops, kernels, functions of the host.

The first kind of calls is always opened; those with a custom derivative only where no autodiff follows, because it would be
lost (relu'(0) becomes 0.5).
"""

from jax.extend import core

from jscaler.ir.op import user_line
from jscaler.lax_primitives.primitive import Primitive
from jscaler.lax_primitives.spec import Spec, seen_whole

CALLS = "jit pjit closed_call core_call core_closed_call"
WHY = {
    "it holds functions that see whole operands": "custom_linear_solve linear_call",
    "it draws in an order of its own": "random_gamma rng_bit_generator rng_uniform",
    "it names a mesh axis": "psum pmax pmin ppermute all_gather all_to_all axis_index ragged_all_to_all",
    "it changes a reference": "get swap",
    "it orders effects": "create_token after_all",
}


def callback(eqn: core.JaxprEqn) -> Spec:
    """A call of the host sees its operands whole, once."""
    return seen_whole(eqn, f"{called(eqn)} sees it whole")


def called(eqn: core.JaxprEqn) -> str:
    """What has a side effect: a host callback, and where it was written, or a primitive."""
    if not eqn.params.keys() & {"callback", "fmt"}:
        return f"'{eqn.primitive.name}'"
    function = getattr(eqn.params.get("callback"), "callback_func", None)
    name = getattr(function, "__name__", None) or eqn.params.get("fmt")
    return f"the host callback{f' {name!r}' if name else ''} of {user_line(eqn.source_info)}"


RECORDS = (
    *(Primitive(name, opened="call") for name in CALLS.split()),
    Primitive("custom_jvp_call", opened="jvp"),
    Primitive("custom_vjp_call", opened="vjp", role="alone", weight=75),
    Primitive("custom_vjp_call_jaxpr", opened="vjp", role="alone"),
    *(Primitive(name, opened="remat", role="alone") for name in ("checkpoint", "remat2")),
    Primitive("scan", nested=True, role="alone", weight=80),
    Primitive("while", nested=True, role="alone", weight=79),
    Primitive("cond", nested=True, role="alone", weight=78),
    Primitive("jscaler_op", role="alone"),  # its rule is the user's, of each call
    *(Primitive(name, callback) for name in ("debug_callback", "debug_print", "io_callback", "pure_callback")),
    *(Primitive(name, why=why, asks_shardy=False) for why, names in WHY.items() for name in names.split()),
)
