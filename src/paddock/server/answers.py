"""What all conversations over WebSockets share: close codes, refusals, and the frames of answers."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from pydantic_core import from_json

from paddock.errors import PaddockError, SessionError
from paddock.protocol import jsonrpc, messages
from paddock.protocol.codec import not_json
from paddock.protocol.episode import GetState, Reset, Step
from paddock.protocol.resume import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable

    from paddock.sessions.session import Session
    from paddock.sessions.work import Work

logger = logging.getLogger("paddock.server")
NORMAL, GOING_AWAY, INVALID_TEXT, POLICY = 1000, 1001, 1007, 1008
INTERNAL_ERROR, RESTART, TRY_LATER = 1011, 1012, 1013
CLOSE_CODES = {"CAPACITY_REACHED": TRY_LATER, "SERVER_DRAINING": RESTART}


def refusal(error: Exception) -> PaddockError:
    """The error for a client that gets no session."""
    if isinstance(error, PaddockError):
        return error
    logger.error("a session could not be opened", exc_info=error)
    return SessionError("the session could not be opened", hint="the server's log says why")


def request_in(message: Any) -> Step | Reset | GetState | None:
    """What a message asks of the environment; None if it asks nothing of it."""
    kind = message.type
    if kind == "step":
        return Step(message.data)
    if kind == "reset":
        return Reset(message.data.sent_arguments())
    return GetState() if kind == "state" else None


def number_in(raw: bytes | str) -> int | None:
    """The number of a request that is otherwise wrong, so that its error can carry it."""
    try:
        number = from_json(raw).get("id")
    except (ValueError, AttributeError):
        return None
    return number if isinstance(number, int) and not isinstance(number, bool) else None


def admit(
    session: Session, number: int, ack: int | None, send: Callable[[bytes], None], key: str | None = None
) -> bool:
    """True if a numbered request has to be carried out; else it is answered here, from the reply cache."""
    try:
        verdict = session.reply_cache.admit(number, ack)
    except PaddockError as error:
        send(messages.write_error(error, number, key))
        return False
    if isinstance(verdict, bytes):
        send(verdict)
        return False
    return verdict is Verdict.EXECUTE


def write_step(answer: Any, number: int | None = None, key: str | None = None) -> bytes:
    """The frame for the answer to a step: an observation, or what went wrong."""
    try:
        if isinstance(answer, PaddockError):
            return messages.write_error(answer, number, key)
        return messages.write_observation(answer, number, key)
    except Exception as error:
        return _write_unwritten(error, number, key)


def write_answer(work: Work, answer: Any, key: str | None = None) -> bytes:
    """The frame for an answer: an observation, a state or an error. `key` names the sub-session of a vector."""
    if type(work.request) is not GetState or isinstance(answer, PaddockError):
        return write_step(answer, work.number, key)
    try:
        return messages.write_state(answer, work.number, key)
    except Exception as error:
        return _write_unwritten(error, work.number, key)


def _write_unwritten(error: Exception, number: int | None, key: str | None) -> bytes:
    """The frame in place of one that could not be written: values of an author's own may fail at anything."""
    return messages.write_error(error if isinstance(error, PaddockError) else not_json(error), number, key)


def write_mcp(response: dict[str, Any], number: int | None) -> bytes:
    """The frame for a JSON-RPC response; an error if the response cannot be written as JSON."""
    try:
        return messages.write_mcp(response, number)
    except PaddockError as error:
        return messages.write_mcp(jsonrpc.failure(error, response.get("id")), number)


def is_utf8(raw: bytes | str) -> bool:
    """Whether a frame is valid text."""
    if isinstance(raw, str):
        return True
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True
