"""The conformance suites as two calls: one for an environment class, one for a server.

Both return every result and raise only when there is nothing to examine. `failed(results)` is what
a test asserts to be empty.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paddock.testing.environment import ENVIRONMENT
from paddock.testing.environment_subject import EnvironmentSubject
from paddock.testing.server import SERVER
from paddock.testing.server_subject import ServerSubject

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from paddock.testing.checks import Announce, Result

CHECK_SECONDS = 60.0
ANSWER_SECONDS = 30.0


async def check_environment(
    make: Callable[[], Any], *, timeout: float = ANSWER_SECONDS, announce: Announce | None = None
) -> list[Result]:
    """Examine an environment class, or a function that makes instances.

    It is built several times, reset and stepped with actions made up from its schema. One call may
    take `timeout` seconds.
    """
    subject = EnvironmentSubject(make, timeout)
    return await ENVIRONMENT.run(subject, timeout=max(CHECK_SECONDS, 2 * timeout), announce=announce)


async def check_server(
    url: str,
    *,
    token: str | None = None,
    timeout: float = ANSWER_SECONDS,
    announce: Announce | None = None,
) -> list[Result]:
    """Examine a server, Paddock's or another that speaks the OpenEnv wire.

    Takes one session at a time, and frees it. One answer may take `timeout` seconds. Raises
    ConnectFailed if nobody answers at `url`, or if the server wants a token that was not given.
    """
    subject = ServerSubject(url, token=token, timeout=timeout)
    await subject.greet()
    return await SERVER.run(subject, timeout=max(CHECK_SECONDS, 2 * timeout), announce=announce)


def failed(results: Iterable[Result]) -> list[Result]:
    """The results of the checks that failed."""
    return [result for result in results if result.outcome == "failed"]
