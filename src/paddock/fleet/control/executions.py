"""Verifier runs: each request is carried out once, and its answer kept.

A client repeats a request whose answer it lost; it gets the answer of the first run. What a verifier
does is not known here: `run` is given.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import TYPE_CHECKING, Any

import orjson

from paddock.fleet.control.answers import Refused
from paddock.fleet.control.database import now_text

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Awaitable, Callable

    from paddock.fleet.control.database import Database

    Work = Callable[[], Awaitable[dict[str, Any]]]

RESTARTED = {"type": "PlaneRestarted", "message": "The plane was restarted while the verifier ran.", "traceback": ""}


class Executions:
    """The verifier runs of a plane, at most `parallel` at a time."""

    def __init__(self, database: Database, parallel: int) -> None:
        self._database = database
        self._slots = asyncio.Semaphore(parallel)
        self._running: dict[str, tuple[str, asyncio.Task[dict[str, Any]]]] = {}

    async def close(self) -> None:
        tasks = [task for _, task in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def run(self, request_id: str | None, fingerprint: str, work: Work) -> dict[str, Any]:
        """The answer of `work`, or of the run that this request has started before. Raises Refused."""
        name = request_id or uuid.uuid4().hex
        if name not in self._running:
            # The run belongs to the plane: a client that leaves finds its answer when it asks again.
            task = asyncio.create_task(self._carry_out(name, fingerprint, work))
            self._running[name] = fingerprint, task
            task.add_done_callback(lambda _: self._running.pop(name, None))
        asked, task = self._running[name]
        if asked != fingerprint:
            raise _another_call()
        return await asyncio.shield(task)

    async def _carry_out(self, name: str, fingerprint: str, work: Work) -> dict[str, Any]:
        execution_id = f"exec_{uuid.uuid4().hex}"
        known = await self._database.run(_insert, execution_id, name, fingerprint)
        if known is not None:
            if known["fingerprint"] != fingerprint:
                raise _another_call()
            stored: dict[str, Any] = orjson.loads(known["answer"])
            return stored
        try:
            async with self._slots:
                began = time.monotonic()
                answer = await work()
            answer["execution_id"] = execution_id
            answer.setdefault("execution_time_ms", round(1000 * (time.monotonic() - began)))
            await self._database.run(_store, execution_id, orjson.dumps(answer).decode())
        except Exception:
            # Nothing is known of it: the same request may try again.
            await self._database.run(_forget, execution_id)
            raise
        return answer


def _another_call() -> Refused:
    return Refused(400, "X-Request-ID was used for another verifier call. Send a new id for a new call.")


def failed(error: dict[str, Any]) -> dict[str, Any]:
    """An answer that gives no grade, and says why."""
    return {"success": False, "result": None, "error": error, "stdout": "", "execution_time_ms": 0}


def end_left_over(connection: sqlite3.Connection) -> None:
    """Answer for the runs that a plane which is gone has not finished."""
    rows = connection.execute("SELECT execution_id FROM executions WHERE answer IS NULL").fetchall()
    for row in rows:
        answer = {**failed(RESTARTED), "execution_id": row["execution_id"]}
        _store(connection, row["execution_id"], orjson.dumps(answer).decode())


def find_execution(connection: sqlite3.Connection, execution_id: str) -> dict[str, Any] | None:
    """The answer of a finished run."""
    row = connection.execute("SELECT answer FROM executions WHERE execution_id = ?", (execution_id,)).fetchone()
    if row is None or row["answer"] is None:
        return None
    found: dict[str, Any] = orjson.loads(row["answer"])
    return found


def _insert(
    connection: sqlite3.Connection, execution_id: str, request_id: str, fingerprint: str
) -> sqlite3.Row | None:
    """Note a new run, or find the one that the request has started."""
    known: sqlite3.Row | None = connection.execute(
        "SELECT * FROM executions WHERE request_id = ?", (request_id,)
    ).fetchone()
    if known is None:
        connection.execute(
            "INSERT INTO executions (execution_id, request_id, fingerprint, created_at) VALUES (?, ?, ?, ?)",
            (execution_id, request_id, fingerprint, now_text()),
        )
    return known


def _store(connection: sqlite3.Connection, execution_id: str, answer: str) -> None:
    connection.execute("UPDATE executions SET answer = ? WHERE execution_id = ?", (answer, execution_id))


def _forget(connection: sqlite3.Connection, execution_id: str) -> None:
    connection.execute("DELETE FROM executions WHERE execution_id = ?", (execution_id,))
