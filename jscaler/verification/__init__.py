"""An opt-in proof of the emitted program: each consumer gets each element of its mask once, each summand once."""

from jscaler.verification.check import Report, verify, verify_exchange
from jscaler.verification.rules import RuleCheck, RuleReport, verify_rule

__all__ = ["Report", "RuleCheck", "RuleReport", "verify", "verify_exchange", "verify_rule"]
