"""From a jaxpr to a running parallel step, in small steps. Run it: python docs/tutorial.py

Shapes: b batch, d in, h hidden, o out.
"""

# 1. A train step is an ordinary function, written for one device. `jscaler.value_and_grad` is `jax.value_and_grad`,
#    except that it keeps the loss function's program in one piece, for a plan to work on.

import jax
import jax.numpy as jnp
import numpy as np

import jscaler
from jscaler import Split

jax.config.update("jax_num_cpu_devices", 4)


def train_step(params: dict, batch: dict) -> tuple[dict, jax.Array]:
    def loss(p: dict) -> jax.Array:
        hidden = jnp.tanh(batch["x"] @ p["w1"])  # b d, d h -> b h
        return ((hidden @ p["w2"] - batch["y"]) ** 2).mean()  # b h, h o -> b o

    value, grads = jscaler.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


params = {"w1": jax.random.normal(jax.random.key(0), (6, 8)), "w2": jax.random.normal(jax.random.key(1), (8, 2))}
batch = {"x": jax.random.normal(jax.random.key(2), (16, 6)), "y": jnp.ones((16, 2))}

# 2. Capture: the step is traced once, and its equations are grouped into ops. Every op has factors, the independent
#    indices of its loops, like the letters of an einsum: `a b, b c -> a c` is a matrix product.

graph = jscaler.parallelize("single", devices=1)(train_step).graph(params, batch)
print(graph, end="\n\n")

dot = graph["loss/dot"]
assert str(graph.rule(dot)) == "a b, b c -> a c"
assert graph.rule(dot).factors["a"].kind == "parallel"  # splitting it splits the output
assert graph.rule(dot).factors["b"].kind == "reduction"  # splitting it leaves partial sums ("value shares")

# 3. Where does the batch go? `factor_of` follows a dim of an input through the dataflow.

batch_factors = graph.factor_of("batch/x", 0)
print({op.path: factor for op, factor in batch_factors.items() if op.kind == "forward"}, end="\n\n")

# 4. Transform: a policy calls the three primitives. This one splits the batch two ways and the hidden units two ways,
#    on a 2 x 2 grid of devices.


def two_by_two(graph, devices: np.ndarray) -> None:
    grid = devices.reshape(2, 2)  # rows: parts of the batch; columns: parts of the hidden units
    batch = graph.factor_of("batch/x", 0)
    first, second = graph["loss/dot"], graph["loss/dot.1"]
    for op, hidden in ((first, ("w1", 1)), (second, ("w2", 0))):
        cells = graph.op_trans(op, Split(batch[op], 2), Split(hidden, 2))
        graph.op_assign(cells, grid)


# 5. Materialize: each op's grid says how its operands must lie. Where a tensor lies otherwise, the cheapest path of
#    collectives is searched. `explain` shows the plan completed: what was filled in, and what is sent.

lowered = jscaler.parallelize(two_by_two, devices=4)(train_step).lower(params, batch)
print(lowered.plan.explain(), end="\n\n")

for adapter in lowered.plan.program.adapters:
    print(f"{adapter.tensor.name}:  {adapter.adapter.source}  ->  {adapter.adapter.target}  by {adapter.adapter}")

# What one device sees of an op is a view of each tensor: a box, and perhaps one of several summands.

reads, writes = lowered.plan.vtensors("loss/dot.1", device=3)
print("\ndevice 3 reads", *map(str, reads), "and writes", *map(str, writes))
assert str(writes[0]) == "loss/dot.1:0[8:16, 0:2] share 1/2 add"

# 6. Run: one executable on all devices, with one device's numbers.

compiled = lowered.compile()
ours, theirs = (params, jnp.inf), (params, jnp.inf)
for _ in range(5):
    ours = compiled(ours[0], batch)
    theirs = jax.jit(train_step)(theirs[0], batch)
for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
print("\nfive steps on four devices give the same numbers as one:", float(ours[1]))

# 7. What is asked for and cannot be is said at once, with the numbers and the remedy.

try:
    jscaler.parallelize(lambda g, d: g.op_trans(g["loss/dot"], Split(("w1", 1), 3)), devices=4)(train_step)(params, batch)
except jscaler.SplitError as error:
    print(error)
