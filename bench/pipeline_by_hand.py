"""A 1F1B pipeline written by hand, as lean as public JAX allows: what a runtime of ours is measured against.

4 stages of one dense layer (relu between), mean squared error, plain SGD, 8 micro-batches, one virtual CPU device a stage.
The last stage's forward and backward are one call; sums of gradients are donated; transfers are `jax.device_put`.
"""

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

STAGES, MICROBATCHES, RATE = 4, 8, 1e-2


def one_f_one_b(stages, microbatches):
    """Device -> its blocks in order."""
    table = []
    for stage in range(stages):
        ahead = min(stages - 1 - stage, microbatches)
        row = [("F", m) for m in range(ahead)]
        for m in range(microbatches):
            if ahead + m < microbatches:
                row.append(("F", ahead + m))
            row.append(("B", m))
        table.append(row)
    return table


def in_one_order(table):
    """All blocks in an order that data allows: round by round, what is ready on every device."""
    at, done, order = [0] * len(table), set(), []
    while any(at[s] < len(row) for s, row in enumerate(table)):
        ready = []
        for s, row in enumerate(table):
            if at[s] == len(row):
                continue
            kind, m = row[at[s]]
            before = [("F", m, s - 1)] if kind == "F" and s else []
            if kind == "B":
                before = [("F", m, s)] + ([("B", m, s + 1)] if s + 1 < len(table) else [])
            if all(b in done for b in before):
                ready.append((kind, m, s))
        assert ready, "circular wait"
        for kind, m, s in ready:
            order.append((kind, m, s))
            at[s] += 1
        done |= set(ready)
    return order


def pipeline(width, rows, devices):
    last, batch = STAGES - 1, MICROBATCHES * rows

    @jax.jit
    def forward(w, b, x):
        z = x @ w + b
        return jnp.maximum(z, 0), z

    def backward_of(stage):
        def backward(w, x, z, dy, sum_w, sum_b):
            dz = jnp.where(z > 0, dy, 0.0)
            sums = sum_w + x.T @ dz, sum_b + dz.sum(0)
            return (dz @ w.T, *sums) if stage else sums

        return jax.jit(backward, donate_argnums=(4, 5))

    def end(w, b, x, y, loss, sum_w, sum_b):
        off = x @ w + b - y
        dz = 2 * off / (batch * width)
        return dz @ w.T, loss + jnp.sum(off * off) / (batch * width), sum_w + x.T @ dz, sum_b + dz.sum(0)

    end = jax.jit(end, donate_argnums=(4, 5, 6))
    backwards = [backward_of(s) for s in range(last)]
    on = [SingleDeviceSharding(d) for d in devices]
    zeros = [jax.jit(lambda: (jnp.zeros((width, width)), jnp.zeros(width), jnp.zeros(())), out_shardings=s) for s in on]
    update = jax.jit(lambda w, b, dw, db: (w - RATE * dw, b - RATE * db))
    order = [(k, m, s) for k, m, s in in_one_order(one_f_one_b(STAGES, MICROBATCHES)) if (k, s) != ("B", last)]

    def step(ws, bs, xs, ys):
        fresh = [z() for z in zeros]
        sums, loss = [[dw, db] for dw, db, _ in fresh], fresh[last][2]
        arrived, cotangents, saved = {}, {}, {}
        for kind, m, s in order:
            if kind == "F":
                x = arrived.pop((s, m)) if s else xs[m]
                if s == last:
                    dx, loss, *sums[s] = end(ws[s], bs[s], x, ys[m], loss, *sums[s])
                    cotangents[s - 1, m] = jax.device_put(dx, devices[s - 1])
                else:
                    y, z = forward(ws[s], bs[s], x)
                    saved[s, m] = x, z
                    arrived[s + 1, m] = jax.device_put(y, devices[s + 1])
            else:
                x, z = saved.pop((s, m))
                made = backwards[s](ws[s], x, z, cotangents.pop((s, m)), *sums[s])
                *dx, sums[s][0], sums[s][1] = made
                if s:
                    cotangents[s - 1, m] = jax.device_put(dx[0], devices[s - 1])
        new = [update(ws[s], bs[s], *sums[s]) for s in range(STAGES)]
        return [w for w, _ in new], [b for _, b in new], loss

    return step
