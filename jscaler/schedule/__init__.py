"""Order and time: which ops run when, and which run part by part."""

from jscaler.schedule.alone import with_alone
from jscaler.schedule.order import ordered_ops
from jscaler.schedule.timed import timed

__all__ = ["ordered_ops", "timed", "with_alone"]
