"""The step from a verifier call on the plane to the code that runs verifiers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paddock.fleet.instance.verifying import VerifierRequest, Verifiers

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierCall:
    """One call of a verifier, checked. `folder` is the instance's; None where the call names no instance."""

    code: str
    function_name: str
    args: str | None
    args_array: list[Any] | None
    timeout: float
    instance_id: str | None
    env_key: str | None
    folder: Path | None


Verify = Callable[[VerifierCall], Awaitable[dict[str, Any]]]


class LocalVerifiers:
    """Runs verifiers in child processes of this machine. Whoever makes it must close it."""

    def __init__(self) -> None:
        self._runs = Verifiers()

    async def __call__(self, call: VerifierCall) -> dict[str, Any]:
        """`success`, `result`, `error`, `stdout` and the time it took. Raises VerifierError."""
        request = VerifierRequest(
            code=call.code,
            function_name=call.function_name,
            args=call.args,
            args_array=call.args_array,
            timeout=call.timeout,
            instance_id=call.instance_id or "",
            env_key=call.env_key or "",
            folder=call.folder,
        )
        return await self._runs.execute(request)

    async def close(self) -> None:
        await self._runs.close()
