"""Device numbers as text."""

from collections.abc import Sequence


def devices_text(devices: Sequence[int | str]) -> str:
    """``[0 1 2 3]``; of more than 16 the first few and the last."""
    words = list(map(str, devices))
    return f"[{' '.join(words if len(words) <= 16 else [*words[:4], '…', words[-1]])}]"
