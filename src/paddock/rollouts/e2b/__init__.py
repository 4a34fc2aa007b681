"""E2B's control API and sandbox API over our own sandboxes, so that programs written for E2B run on this machine.

`serve_front` is the server behind `paddock e2b up`. A guest is one sandbox as E2B's clients see it. `inner` runs
inside it and does what E2B's own daemon does there; the routes translate.
"""

from __future__ import annotations

from paddock.rollouts.e2b.server import FrontSettings, serve_front

__all__ = ["FrontSettings", "serve_front"]
