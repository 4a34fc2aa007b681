"""A scene whose work is scored by the task's own verifier instead of by the place.

The verifier runs in a sandbox of its own, as every verifier does. Its work folder holds `transcript.json`, the whole
conversation, and `evidence.json`, what the place says about itself: rewards, seed, state.
"""

from __future__ import annotations

import io
import json
import tarfile
from typing import TYPE_CHECKING, Any

from paddock.errors import RolloutError, VerifierError
from paddock.rollouts.ledger import owned_sandbox
from paddock.rollouts.verifier import verify

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from paddock.rollouts.loop.scene import Scene
    from paddock.rollouts.loop.tools import Tools
    from paddock.rollouts.outcome import Reward
    from paddock.rollouts.sandbox.base import Sandbox, SandboxSpec
    from paddock.rollouts.store import Store
    from paddock.rollouts.task import Task

START_SECONDS = 30.0


class VerifiedScene:
    """`inner`, with the task's tests in place of its own score."""

    is_scored = True

    def __init__(self, inner: Scene, task: Task, store: Store, *, sandbox: str, consent: bool) -> None:
        self.kind = inner.kind
        self.verifier_log = ""
        self._inner = inner
        self._task = task
        self._store = store
        self._sandbox = sandbox
        self._consent = consent

    async def open(self) -> None:
        await self._inner.open()

    async def tools(self) -> Tools:
        return await self._inner.tools()

    async def score(self, messages: list[dict[str, Any]]) -> Reward:
        sealed = packed({"transcript.json": messages, "evidence.json": self._inner.evidence})
        try:
            verdict = await verify(
                self._task.tests,
                sealed,
                open_sandbox=self._open_sandbox,
                limits=self._task.sandbox,
                timeout=self._task.timeouts.verifier,
            )
        except RolloutError as error:
            raise VerifierError(error.message, hint=error.hint) from error
        self.verifier_log = f"{verdict.stdout}{verdict.stderr}"
        return verdict.reward

    async def close(self) -> None:
        await self._inner.close()

    @property
    def evidence(self) -> dict[str, Any]:
        return self._inner.evidence

    def _open_sandbox(self, spec: SandboxSpec) -> AbstractAsyncContextManager[Sandbox]:
        options: dict[str, Any] = {"consent": self._consent, "timeout": START_SECONDS}
        return owned_sandbox(self._store, self._sandbox, spec, rollout_id=None, **options)


def packed(documents: dict[str, Any]) -> bytes:
    """An archive of JSON files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, document in documents.items():
            data = json.dumps(document, default=str).encode()
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(data), 0o644
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()
