"""Which buffers a block may reuse: of arguments whose next version it leaves, and of sums that it takes and adds to."""

from collections.abc import Set

from jscaler.lower.segment import PlacedBlock
from jscaler.lower.step_plan import StepPlan


def donated_inputs(step: StepPlan, number: int, donate: Set[int]) -> set[int]:
    """The step's inputs, of those that it may reuse, whose buffers block ``number`` gives to its results.

    Not those that a later block or a later micro-batch reads; of what has a next version, where the block leaves that.
    """
    block = step.blocks[number]
    if step.spanning is not None and block.phase in step.spanning.phases:
        return set()
    versions, last = step.graph.next_version, step.last_taken
    renewed = {versions[i] for i in block.results if i in versions}
    own = (i for i in step.taken[number] if i in donate and last[i] == number)
    return {i for i in own if i in renewed or i not in step.renewed}


def donated_imports(step: StepPlan, block: PlacedBlock) -> list[int]:
    """The places of imports that a block takes, adds to, and leaves, and that nobody else reads: sums of gradients."""
    carries = step.spanning.carries if step.spanning is not None else ()
    exports = set(block.exports)
    sums = {c.inside: c.out for c in carries if c.is_sum and c.out in exports}
    sent = {transfer.source for transfer in step.transfers}
    own = {
        v for v, out in sums.items() if v not in sent and all(out in other.exports for other in step.importing.get(v, ()))
    }
    return [place for place, value in enumerate(block.imports) if value in own]
