"""What tests of environments and servers need: conformance suites, and a clock that can be moved."""

from paddock.testing.checks import Check, Doubtful, Outcome, Result, Skipped, Suite, Wrong
from paddock.testing.clock import FakeClock
from paddock.testing.conformance import check_environment, check_server, failed

__all__ = [
    "Check",
    "Doubtful",
    "FakeClock",
    "Outcome",
    "Result",
    "Skipped",
    "Suite",
    "Wrong",
    "check_environment",
    "check_server",
    "failed",
]
