"""What to do about a blocked factor: why it cannot be split, and which cut would free it or serve instead."""

from jscaler.ir import Factor, Rule

# Part of the reason -> what frees the factor; the first that fits is said.
REMEDIES: tuple[tuple[str, str], ...] = (
    ("summed along", "Prefix({name!r}, {parts}) in place of Split cuts it"),
    ("multiplied along", "Prefix({name!r}, {parts}) in place of Split cuts it"),
    ("running m", "Prefix({name!r}, {parts}) in place of Split cuts it"),
    ("two dims of one tensor", "it is free in ops that read only one of the two: put the readers in scopes of their own"),
    ("mixes", "cut the neighbouring factor, or reshape so that both keep a dim of their own"),
    ("there is no rule", "jscaler.register_rule gives the primitive a rule, jscaler.op gives a function one"),
    ("its rule has no word", "name the dim in the op's rule"),
    ("host callback", "put the callback in a scope of its own, so that its op is copied and the others are split"),
    ("side effect", "move the effect (a debug print, a callback) out of what is split"),
    ("it is sorted", "nothing frees it, since every place of a sort depends on all of it"),
    ("its largest are taken", "nothing frees it; take the largest of parts by a reshape to (parts, size), then of those"),
    ("its reduction cannot be joined", "nothing frees it: no collective joins what parts of it give"),
    ("jnp.split", "a reshape to (pieces, size) keeps the pieces' size as a factor of its own"),
)


def blocked(factor: Factor, rule: Rule, parts: int) -> str:
    """The end of an error's sentence: the reason, what frees the factor, and what can be split instead.

    Example:
        >>> blocked(Factor("b", 8, "blocked", "at cumsum it is summed along"), rule, 4)  # doctest: +SKIP
        "it is blocked: at cumsum it is summed along; Prefix('b', 4) in place of Split cuts it; free here: a (16)"
    """
    said = [f"it is blocked: {factor.reason}"]
    remedy = next((text for part, text in REMEDIES if part in factor.reason), "")
    if remedy:
        said.append(remedy.format(name=factor.name, parts=parts))
    free = [f"{f.name} ({f.size})" for f in rule.factors.values() if f.splittable and f.size > 1]
    said.append(f"free here: {', '.join(free)}" if free else "no factor of the op can be split: copy it, by Replicate")
    return "; ".join(said)
