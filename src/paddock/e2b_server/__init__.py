"""A server that E2B's SDK accepts: E2B's two APIs over sandboxes of this machine.

`server` is the HTTP server behind `paddock e2b up`. `control_api` creates and kills sandboxes (`registry`).
`envd_api` does what E2B's daemon does in one of them (`services`, `file_transfer`). A `served_sandbox` is one sandbox
as E2B's clients see it; `guest_requests` runs in it.
"""

from __future__ import annotations

from paddock.e2b_server.server import E2bServerSettings, serve_e2b

__all__ = ["E2bServerSettings", "serve_e2b"]
