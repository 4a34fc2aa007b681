"""One rollout of the loop in a scene, from its start to exactly one outcome.

    provision → tools → agent → verifier → done

How a rollout is begun, watched, aborted, ended and kept is `Rollout`'s; here are its stages. The scene is closed
whatever happens, and a cancelled rollout ends at once.
"""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING, Any

from paddock.errors import ModelError, RolloutError, VerifierError
from paddock.rollouts.blame import CONTEXT
from paddock.rollouts.judging import Ending, judge_model, judge_stop
from paddock.rollouts.loop.agent import Loop, LoopEnd
from paddock.rollouts.loop.chat import Chat
from paddock.rollouts.outcome import Outcome
from paddock.rollouts.rollout import LOG_BYTES, WORKING, Rollout
from paddock.rollouts.unhurried import unhurried

if TYPE_CHECKING:
    from collections.abc import Callable

    from paddock.rollouts.capture import Capture, Upstream
    from paddock.rollouts.loop.plan import LoopPlan
    from paddock.rollouts.loop.scene import Scene
    from paddock.rollouts.loop.tools import Tools
    from paddock.rollouts.record import RolloutRecord
    from paddock.rollouts.store import Store
    from paddock.rollouts.task import Task

USED_UP = {"steps": "all steps were used up", "context": CONTEXT}


class LoopRollout(Rollout):
    """Run it once. Of the timeouts, `install` is for the provisioning and `setup` for the tools."""

    def __init__(
        self,
        task: Task,
        plan: LoopPlan,
        scene: Scene,
        *,
        store: Store,
        upstream: Upstream,
        record: RolloutRecord | None = None,
        on_change: Callable[[Rollout], None] | None = None,
    ) -> None:
        super().__init__(task, plan, store=store, upstream=upstream, record=record, on_change=on_change)
        self.agent = plan.agent
        self.scene = scene
        self.loop: Loop | None = None

    async def messages(self) -> list[dict[str, Any]]:
        if self.loop is not None and not self.record.finished:
            return list(self.loop.messages)
        return self.record.transcript

    # -- the stages ---------------------------------------------------------------------------------

    def _check_task(self) -> None:
        # The agent works in the scene; only tests would miss what the task needs.
        if self.task.is_scored:
            super()._check_task()

    async def _stages(self) -> None:
        try:
            await self._act()
        finally:
            await unhurried(self._leave())

    async def _act(self) -> None:
        async with self._stage("provision", self._timeouts.install, RolloutError):
            await self.scene.open()
        self._keep_evidence()
        async with self._stage("tools", self._timeouts.setup, RolloutError):
            tools = await self.scene.tools()
            offered = await tools.list_tools()
        self._changed("tools", {"tools": [tool["function"]["name"] for tool in offered]})
        ended = await self._converse(tools, offered)
        outcome, error = self._judge_loop(ended)
        if not outcome.keeps_reward:
            self._end(outcome, error)
            return
        async with self._stage("verifier", self._timeouts.verifier, VerifierError):
            reward = await self.scene.score(self.record.transcript)
        self._take_reward(reward)
        if reward.value is None and outcome is Outcome.OK and self.scene.is_scored:
            outcome, error = Outcome.VERIFIER, self.record.reward_reason
        self._end(outcome, error)

    async def _converse(self, tools: Tools, offered: list[dict[str, Any]]) -> LoopEnd | ModelError:
        """How the loop ended by itself, or how the model failed it."""
        seconds = self._agent_seconds
        self._agent_began = time.monotonic()
        capture = self._make_capture(deadline=self._agent_began + seconds)
        listener = socket.create_server(("127.0.0.1", 0))
        base_url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        await capture.serve(listener)
        try:
            async with self._stage(WORKING, None, RolloutError), Chat(base_url, capture.secret) as chat:
                self.loop = Loop(
                    chat,
                    tools,
                    self.agent.limits,
                    max_tokens=self.plan.budget.max_tokens_per_call,
                    system=self.agent.system,
                    report=self._report,
                )
                try:
                    return await self.loop.run(offered, seconds=seconds)
                except ModelError as error:
                    return error
        finally:
            await unhurried(self._stop_loop(capture))

    async def _stop_loop(self, capture: Capture) -> None:
        await capture.stop()
        if self.loop is not None:
            messages = self.loop.messages
            if capture.exhausted and messages and messages[-1]["role"] == "assistant":
                # These are the capture's words, not the model's.
                messages.pop()
            self.record.transcript = self._mask.value(messages)
            self.record.usage = {**self.record.usage, "steps": self.loop.steps}
        self.record.proxy_log = capture.log_tail(LOG_BYTES)

    async def _leave(self) -> None:
        self._keep_evidence()
        self.record.verifier_stdout = self._mask.text(self.scene.verifier_log)
        await self.scene.close()

    def _keep_evidence(self) -> None:
        self.record.metadata.update(self._mask.value(self.scene.evidence))

    def _judge_loop(self, ended: LoopEnd | ModelError) -> Ending:
        assert self._capture is not None
        timed_out = self._capture.exhausted == "time" or (isinstance(ended, LoopEnd) and ended.reason == "time")
        use = self._model_use(timed_out=timed_out)
        return (
            judge_stop(use, aborted=self._aborted, timed_out=timed_out)
            or judge_model(use)
            or judge_end(ended, use.blame.error)
        )


def judge_end(ended: LoopEnd | ModelError, refusal: str | None) -> Ending:
    """The ending of a loop that neither the endpoint nor a budget ended; `refusal` is what the endpoint refused."""
    if isinstance(ended, ModelError):
        return Ending(Outcome.AGENT, refusal or f"the endpoint refused a request: {ended.message}")
    if ended.reason in USED_UP:
        return Ending(Outcome.BUDGET, USED_UP[ended.reason])
    return Ending(Outcome.OK)
