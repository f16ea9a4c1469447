"""Bytes, seconds and counts as people read them."""


def counted(number: int, thing: str, things: str = "") -> str:
    """``1 block``, ``2 blocks``; with ``things`` also ``2 leaves``."""
    return f"{number} {thing}" if number == 1 else f"{number} {things or f'{thing}s'}"


def readable_bytes(number: float) -> str:
    """``1.5 MiB`` for 1572864."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(number) < 1024 or unit == "GiB":
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    raise AssertionError


def readable_seconds(seconds: float | None) -> str:
    """``38.9 µs`` for 3.89e-05; ``unknown`` for None."""
    if seconds is None:
        return "unknown"
    scale, unit = (1e6, "µs") if seconds < 1e-3 else (1e3, "ms") if seconds < 1 else (1.0, "s")
    return f"{seconds * scale:.3g} {unit}"


def readable_count(number: float) -> str:
    """``1.5 M`` for 1500000; the unit comes behind: ``1.5 MFLOP``."""
    for unit in ("", "k", "M", "G", "T"):
        if abs(number) < 1000 or unit == "T":
            return f"{number:.0f} {unit}" if unit == "" else f"{number:.1f} {unit}"
        number /= 1000
    raise AssertionError
