"""An agent of our own: a model that is offered tools, in this process, with every token captured.

    session    where the loop works: opened, scored, closed             (`session`)
    tools      what the model may call there                            (`tools`)
    loop       ask the model, carry out its calls, report, again        (`agent`)
    scene      the loop in a session, as a rollout runs it              (`scene`)

Nothing here knows where tools come from; `environment` has those of Paddock and OpenEnv servers.
"""

from __future__ import annotations

from paddock.rollouts.loop.agent import LoopAgent, LoopEnd, LoopLimits, ToolLoop
from paddock.rollouts.loop.session import ToolResult, Tools, ToolSession, ToolSessions

__all__ = ["LoopAgent", "LoopEnd", "LoopLimits", "ToolLoop", "ToolResult", "ToolSession", "ToolSessions", "Tools"]
