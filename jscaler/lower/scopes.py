"""Name scopes of the compiled program, by which an HLO instruction says what it belongs to: an op, or a tensor on its way.

``@`` ends a name in XLA, so that a scope has ``~`` in its place.
"""

from jscaler.ir import Op, PTensor


def op_scope(op: Op) -> str:
    """The scope of an op's equations: ``block_0/mlp/up/dot~backward``."""
    return path_scope(op.path)


def path_scope(path: str) -> str:
    """The scope of the equations of the op at ``path``."""
    return path.replace("@", "~")


def adapter_scope(tensor: PTensor) -> str:
    """The scope of what brings ``tensor`` from one layout to another: ``block_0/mlp/down/dot:0~adapter``."""
    return f"{tensor.name.replace('@', '~')}~adapter"
