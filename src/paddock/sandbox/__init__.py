"""Sandboxes for agents and verifiers.

Importing this package loads nothing: the programs that work on layers import modules of it for each layer, and what
opens a sandbox takes half a second to import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paddock.lazy import lazy_exports

if TYPE_CHECKING:
    from paddock.sandbox.base import Command as Command
    from paddock.sandbox.base import Completed as Completed
    from paddock.sandbox.base import Job as Job
    from paddock.sandbox.base import Mount as Mount
    from paddock.sandbox.base import Sandbox as Sandbox
    from paddock.sandbox.base import SandboxSpec as SandboxSpec
    from paddock.sandbox.guest.entry import Entry as Entry
    from paddock.sandbox.opening import BACKENDS as BACKENDS
    from paddock.sandbox.opening import available as available
    from paddock.sandbox.opening import choose_backend as choose_backend
    from paddock.sandbox.opening import find_backend as find_backend
    from paddock.sandbox.opening import new_sandbox_id as new_sandbox_id
    from paddock.sandbox.opening import open_sandbox as open_sandbox
    from paddock.sandbox.orphans import end_orphan as end_orphan
    from paddock.sandbox.orphans import end_remote_orphan as end_remote_orphan

_MODULES = {
    "BACKENDS": "paddock.sandbox.opening",
    "Command": "paddock.sandbox.base",
    "Completed": "paddock.sandbox.base",
    "Entry": "paddock.sandbox.guest.entry",
    "Job": "paddock.sandbox.base",
    "Mount": "paddock.sandbox.base",
    "Sandbox": "paddock.sandbox.base",
    "SandboxSpec": "paddock.sandbox.base",
    "available": "paddock.sandbox.opening",
    "choose_backend": "paddock.sandbox.opening",
    "end_orphan": "paddock.sandbox.orphans",
    "end_remote_orphan": "paddock.sandbox.orphans",
    "find_backend": "paddock.sandbox.opening",
    "new_sandbox_id": "paddock.sandbox.opening",
    "open_sandbox": "paddock.sandbox.opening",
}
__all__ = [*_MODULES]
__getattr__, __dir__ = lazy_exports(__name__, _MODULES)
