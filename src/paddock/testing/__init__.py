"""Conformance suites for environments, servers, sandboxes, agents, dialects and tasks, and a fake clock."""

from paddock.testing.checks import Check, CheckOutcome, Doubtful, Result, Skipped, Suite, Wrong
from paddock.testing.clock import FakeClock
from paddock.testing.conformance import check_environment, check_server, failed

__all__ = [
    "Check",
    "CheckOutcome",
    "Doubtful",
    "FakeClock",
    "Result",
    "Skipped",
    "Suite",
    "Wrong",
    "check_environment",
    "check_server",
    "failed",
]
