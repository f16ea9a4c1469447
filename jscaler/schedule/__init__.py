"""What runs first."""

from jscaler.schedule.order import ordered_ops

__all__ = ["ordered_ops"]
