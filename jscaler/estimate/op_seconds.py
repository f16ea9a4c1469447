"""What each op takes of a step's seconds, on the devices that have most to do: its kernels, and what is sent for it."""

from collections.abc import Iterable, Mapping, Sequence

from jax.extend import core

from jscaler.capture.jaxprs import Atom
from jscaler.estimate.cost import Cost
from jscaler.estimate.traffic import traffic_by_exchange
from jscaler.ir import Graph, PTensor
from jscaler.lower.flat_program import Exchange, FlatLoop, FlatProgram, Item, reads, results

Taken = tuple[float, float]  # seconds of computing, and of sending


def seconds_by_op(cost: Cost) -> dict[str, Taken]:
    """Op path -> its seconds of a step, those of all runs of its block; ``""`` for what is of no op.

    An exchange is its reader's. The sums are ``cost.seconds.compute``, and ``cost.seconds.communication`` with what of it
    hides behind arithmetic.
    """
    device = cost.busiest.devices[0]
    computing: dict[str, float] = {}
    sending: dict[str, float] = {}
    for one in cost.blocks:
        if device not in one.block.group.devices:
            continue
        for kernel, seconds in zip(one.work.kernels, one.priced.seconds, strict=True):
            computing[kernel.op] = computing.get(kernel.op, 0.0) + one.runs * kernel.times * seconds
        first = first_readers(one.block.flat)
        for exchange, sent in traffic_by_exchange(one.block.flat.items, cost.cluster):
            path = first.get(exchange.output) or _of_tensor(cost.step.graph, exchange.adapt.tensor)
            sending[path] = sending.get(path, 0.0) + one.runs * sent.seconds
    return {path: (computing.get(path, 0.0), sending.get(path, 0.0)) for path in {**computing, **sending}}


def _of_tensor(graph: Graph, tensor: PTensor) -> str:
    """The op that reads it, in another block; or of a result that which makes it."""
    found = [*graph.consumers.get(tensor, ()), *filter(None, [graph.producer.get(tensor)])]
    return found[0].path if found else ""


def first_readers(flat: FlatProgram) -> dict[core.Var, str]:
    """Variable -> the op that reads it first, through exchanges and through loops; those that none reads are left out."""
    found: dict[core.Var, str] = {}
    _readers(flat.items, flat.origins.op, found)
    return found


def _readers(items: Sequence[Item], op_of: Mapping[core.Var, str], found: dict[core.Var, str]) -> None:
    """From the last item to the first, so that the first reader is the last that is written down."""
    for item in reversed(items):
        if isinstance(item, FlatLoop):
            _hand_on(found, ((out, final) for _, _, out, final in item.carries))
            _hand_on(found, [*item.ys, *((piece, total) for _, piece, total in item.sums)])
            _readers(item.items, op_of, found)
            back = [(out, inside) for _, inside, out, _ in item.carries if inside in found]
            if back:  # what an iteration leaves is read by the next
                _hand_on(found, back)
                _readers(item.items, op_of, found)
            _hand_on(found, [*((init, inside) for init, inside, _, _ in item.carries), *item.xs])
            _hand_on(found, ((init, total) for init, _, total in item.sums))
            continue
        own = (op_of.get(v, "") for v in results(item))
        path = found.get(item.output, "") if isinstance(item, Exchange) else next(filter(None, own), "")
        found.update(dict.fromkeys(reads(item), path) if path else {})


def _hand_on(found: dict[core.Var, str], pairs: Iterable[tuple[Atom, Atom]]) -> None:
    """Who reads the second of a pair reads the first."""
    for given, taken in pairs:
        if isinstance(given, core.Var) and taken in found:
            found[given] = found[taken]  # type: ignore[index]
