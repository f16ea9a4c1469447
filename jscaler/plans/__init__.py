"""Ready plan policies. Each is a function that returns a policy; a policy may also be written by hand."""

from collections.abc import Callable
from typing import Any

from jscaler.errors import UnknownNameError
from jscaler.plans.data_parallel import data_parallel
from jscaler.plans.single import single

PLANS: dict[str, Callable[..., Callable[..., None]]] = {"single": single, "data_parallel": data_parallel}


def by_name(name: str) -> Callable[..., Any]:
    """The built-in policy called ``name``, with its defaults; raises UnknownNameError with the near one."""
    if name not in PLANS:
        raise UnknownNameError("plan", name, PLANS)
    return PLANS[name]()


__all__ = ["PLANS", "by_name", "data_parallel", "single"]
