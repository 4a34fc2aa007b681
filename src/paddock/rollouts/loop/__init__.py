"""An agent of our own: a model that is given tools, in this process, with every token captured.

    scene      where a rollout takes place: opened, scored, closed      (`scene`)
    tools      what the model may call there                            (`tools`)
    loop       ask the model, do what it calls for, tell it, again      (`agent`)
    rollout    a loop in a scene, from its start to one outcome         (`rollout`, `batch`)

Nothing here knows where tools come from; `environment` has those of Paddock and OpenEnv servers.
"""

from __future__ import annotations

from paddock.rollouts.loop.agent import Loop, LoopAgent, LoopEnd, LoopLimits
from paddock.rollouts.loop.batch import LoopBatch
from paddock.rollouts.loop.plan import LoopPlan
from paddock.rollouts.loop.rollout import LoopRollout
from paddock.rollouts.loop.scene import Scene
from paddock.rollouts.loop.tools import ToolResult, Tools

__all__ = [
    "Loop",
    "LoopAgent",
    "LoopBatch",
    "LoopEnd",
    "LoopLimits",
    "LoopPlan",
    "LoopRollout",
    "Scene",
    "ToolResult",
    "Tools",
]
