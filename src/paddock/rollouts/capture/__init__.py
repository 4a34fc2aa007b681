"""The proxy on the host between a coding agent and a model endpoint: it keeps every call, token by token.

`Capture` answers one rollout's agent; `Upstream` is the way to the endpoints, shared by all rollouts;
`probe` tells what an endpoint gives back before anything is run on it.
"""

from __future__ import annotations

from paddock.rollouts.capture.probe import ProbeReport, probe
from paddock.rollouts.capture.proxy import Capture
from paddock.rollouts.capture.settings import CaptureSettings
from paddock.rollouts.capture.upstream import Upstream

__all__ = ["Capture", "CaptureSettings", "ProbeReport", "Upstream", "probe"]
