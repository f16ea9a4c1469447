"""Which primitive has which spec. What is not here replicates, with one warning that names it."""

from jscaler.rules import indexing, pieces
from jscaler.rules import others as o
from jscaler.rules import table as t
from jscaler.rules import windows as w
from jscaler.rules.reshapes import reshape

ELEMENTWISE = """
    abs acos acosh and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz cos cosh
    digamma eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac integer_pow is_finite le
    le_to lgamma
    log log1p log2 logistic lt lt_to max min mulhi ne nextafter not one_minus_square or polygamma population_count pow
    reduce_precision regularized_incomplete_beta rem round rsqrt shift_left shift_right_arithmetic shift_right_logical
    sign sin sinh sqrt square tan tanh threefry2x32 xor zeta
"""

MATRICES = "cholesky eigh lu qr svd triangular_solve"
# Equations that hold programs: see nested.
NESTED = frozenset({"scan", "while", "cond"})

TABLE: dict[str, t.SpecFunction] = {
    **{name: t.elementwise() for name in ELEMENTWISE.split()},
    # linear in all operands together, in each alone, in the first alone; plain movements of data
    **{name: t.elementwise("add") for name in ("add", "sub", "add_any")},
    "mul": t.elementwise("each"),
    "neg": t.elementwise("add"),
    "conj": t.elementwise("add"),
    "complex": t.elementwise("add"),
    "real": t.elementwise("add"),
    "imag": t.elementwise("add"),
    "div": t.divide,
    "copy": t.elementwise("move"),
    "stop_gradient": t.elementwise("move"),
    "select_n": t.elementwise("select"),
    "convert_element_type": t.convert,
    "broadcast_in_dim": t.broadcast_in_dim,
    "bitcast_convert_type": t.bitcast,
    "reshape": reshape,
    "transpose": t.transpose,
    "squeeze": t.squeeze,
    "expand_dims": t.expand_dims,
    "optimization_barrier": t.optimization_barrier,
    # reductions
    "reduce_sum": t.reduce("add", "add"),
    "reduce_max": t.reduce("max"),
    "reduce_min": t.reduce("min"),
    "reduce_prod": t.reduce(None),
    "reduce_or": t.reduce_logical("max"),
    "reduce_and": t.reduce_logical("min"),
    "reduce_xor": t.reduce(None),
    "argmax": t.reduce(None),
    "argmin": t.reduce(None),
    # contractions
    "dot_general": t.dot_general,
    "conv_general_dilated": w.convolution,
    # windows
    "reduce_window_sum": w.reduce_window("add"),
    "reduce_window_max": w.reduce_window(),
    "reduce_window_min": w.reduce_window(),
    "select_and_scatter_add": w.select_and_scatter_add,
    "select_and_gather_add": w.reduce_window("first"),
    # one dim is walked in order
    "cumsum": t.along("axis", "first", "it is summed along"),
    "cumlogsumexp": t.along("axis", "", "it is summed along"),
    "cumprod": t.along("axis", "", "it is multiplied along"),
    "cummax": t.along("axis", "", "its running maximum is taken"),
    "cummin": t.along("axis", "", "its running minimum is taken"),
    "sort": t.along("dimension", "", "it is sorted"),
    "top_k": t.along("axis", "", "its largest are taken"),
    "rev": t.along("dimensions", "move", "it is reversed"),
    # parts of tensors
    "slice": pieces.slice_,
    "pad": pieces.pad,
    "concatenate": pieces.concatenate,
    "split": pieces.split,
    "stack": pieces.stack,
    "unstack": pieces.unstack,
    # looked up by index
    "dynamic_slice": indexing.dynamic_slice,
    "dynamic_update_slice": indexing.dynamic_update_slice,
    "gather": indexing.gather,
    "scatter": indexing.scatter(None, "unique"),
    "scatter-add": indexing.scatter("add", "outer", based=True),
    "scatter-sub": indexing.scatter("add", "outer", based=True),
    "scatter-mul": indexing.scatter(None),
    "scatter-min": indexing.scatter("min"),
    "scatter-max": indexing.scatter("max"),
    # matrices in a batch, and others that few models use
    **{name: o.matrices(lambda eqn: 2, "a matrix is seen whole") for name in MATRICES.split()},
    "fft": o.matrices(lambda eqn: len(eqn.params["fft_lengths"]), "its transform needs all of it"),
    "approx_top_k": o.approx_top_k,
    "ragged_dot_general": o.ragged_dot_general,
    **dict.fromkeys(o.CALLBACKS, o.callback),
    "device_put": o.pairwise,
    "name": t.elementwise("move"),
    # made from nothing, or from a key
    "iota": t.iota,
    "empty": t.iota,
    "empty2": t.iota,
    "random_bits": t.random_bits,
    "random_clone": t.elementwise(),
    "random_seed": t.elementwise(),
    "random_fold_in": t.random_fold_in,
    "random_split": t.random_split,
    "random_wrap": t.trailing(),
    "random_unwrap": t.trailing(),
}
