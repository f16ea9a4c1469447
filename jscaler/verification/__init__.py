"""An opt-in proof of the emitted program: each consumer gets each element of its mask once, each summand once."""

from jscaler.verification.check import Report, verify, verify_exchange

__all__ = ["Report", "verify", "verify_exchange"]
