"""The list of checks, to which each module of this package adds its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paddock.testing.checks import Suite

if TYPE_CHECKING:
    from paddock.testing.sandbox.subject import SandboxSubject

SANDBOX: Suite[SandboxSubject] = Suite()
check = SANDBOX.check
