"""Running verifiers: the routes, the bundles that clients send, and the stored answers.

Each request id runs a verifier once: a client that lost the response gets the answer of the first run. The code runs
in child processes (`paddock.fleet.instance.verifier`), never here. A bundle is a zip; only its `verifier.py` is read,
in memory, and requirements are not installed.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import io
import time
import uuid
import zipfile
import zlib
from typing import TYPE_CHECKING, Any

import orjson
from starlette.routing import Route

from paddock.errors import VerifierError
from paddock.fleet.instance.verifier.runner import VerifierRequest
from paddock.fleet.plane import instance_records, tasks
from paddock.fleet.plane.database import now_text
from paddock.fleet.plane.http import HttpError, RequestFields, json_response, printable, read_object, read_request_id
from paddock.fleet.plane.tasks import MAX_CODE_CHARS

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Awaitable, Callable

    from starlette.requests import Request
    from starlette.responses import Response

    from paddock.fleet.plane.database import PlaneDatabase
    from paddock.fleet.plane.plane import Plane

    Work = Callable[[], Awaitable[dict[str, Any]]]

DEFAULT_SECONDS = 30
MAX_SECONDS = 300
MAX_ARGUMENTS_CHARS = 8 * 1024 * 1024
MAX_BUNDLE_BYTES = 4 * 1024 * 1024
MAX_ENCODED_CHARS = 2 * MAX_BUNDLE_BYTES


class VerifierRoutes:
    def __init__(self, plane: Plane) -> None:
        self.plane = plane

    def routes(self) -> list[Route]:
        return [
            Route("/v1/verifiers/check", self.check, methods=["GET"]),
            Route("/v1/verifiers/execute", self.execute, methods=["POST"]),
            Route("/v1/judge/grade", self.judge, methods=["POST"]),
        ]

    async def check(self, request: Request) -> Response:
        digest = request.query_params.get("sha256", "").lower()
        if not digest:
            raise HttpError(400, "'sha256' is missing. Send the digest of the bundle.")
        verifier = await self.plane.database.run(tasks.verifier_by_content, digest)
        return json_response({"success": verifier is not None, **_describe(verifier)})

    async def execute(self, request: Request) -> Response:
        """Run a verifier, once per request id. 404 only if its code is neither sent nor known."""
        fields = await read_object(request)
        function_name = fields.text("function_name") or "verify"
        if not function_name.isidentifier():
            raise HttpError(400, f"'function_name' is '{printable(function_name)}'. Send the name of a function.")
        seconds = fields.integer("timeout", 1, MAX_SECONDS) or DEFAULT_SECONDS
        args = fields.text("args", MAX_ARGUMENTS_CHARS)
        array = fields.items("args_array")
        verifier, is_cached = await self._find_or_store(fields)
        instance_id = _instance_id(array)

        async def work() -> dict[str, Any]:
            description = {
                "bundle_cache_hit": is_cached,
                **_describe(verifier),
                "verifier_id": verifier["verifier_id"],
            }
            instance = (
                await self.plane.database.run(instance_records.find, instance_id) if instance_id is not None else None
            )
            if instance_id is not None and (instance is None or instance.status != "running"):
                return {**failure(_not_running(instance_id, instance)), **description}
            verifier_request = VerifierRequest(
                code=verifier["code"],
                function_name=function_name,
                args=args,
                args_array=array,
                timeout=float(seconds),
                instance_id=instance_id,
                env_key=None if instance is None else instance.env_key,
                folder=None if instance_id is None else self.plane.instances.folder_of(instance_id),
            )
            return {**(await self.plane.verify(verifier_request)), **description}

        identity = [verifier["sha256"], function_name, seconds, args, array]
        fingerprint = hashlib.sha256(orjson.dumps(identity)).hexdigest()
        try:
            return json_response(await self.plane.executions.run(read_request_id(request), fingerprint, work))
        except VerifierError as error:
            raise HttpError(503, f"The verifier could not be run, temporarily: {error}", retry_after=1) from None

    async def judge(self, request: Request) -> Response:
        raise HttpError(400, "The judge is not configured: this plane has no model to grade with. Use a verifier.")

    async def _find_or_store(self, fields: RequestFields) -> tuple[dict[str, Any], bool]:
        """The verifier of a request, and whether it was stored before."""
        digest = (fields.text("sha256") or "").lower()
        bundle = fields.text("bundle", MAX_ENCODED_CHARS)
        database = self.plane.database
        verifier = await database.run(tasks.verifier_by_content, digest) if digest else None
        if verifier is not None:
            return verifier, True
        if not bundle:
            if not digest:
                raise HttpError(
                    400, "'sha256' and 'bundle' are missing. Send the bundle, or the digest of a known one."
                )
            raise HttpError(404, f"bundle not found: {printable(digest)}")
        digest, code = await asyncio.to_thread(read_bundle, bundle, digest or None)
        key = fields.label("key") or "verifier"
        await database.run(tasks.put_bundle, digest, key, code, fields.text("comment"))
        stored = await database.run(tasks.verifier_by_content, digest)
        assert stored is not None
        return stored, False


def _describe(verifier: dict[str, Any] | None) -> dict[str, Any]:
    verifier = verifier or {}
    fields = {name: verifier.get(name) for name in ("key", "version", "created_at", "comment")}
    return {**fields, "display_src": verifier.get("code")}


def _instance_id(args_array: list[Any] | None) -> str | None:
    """The last positional argument names the instance."""
    last = args_array[-1] if args_array else None
    instance_id = last.get("env") if isinstance(last, dict) else None
    return instance_id if isinstance(instance_id, str) else None


def _not_running(instance_id: str, instance: instance_records.InstanceRecord | None) -> dict[str, Any]:
    state = "unknown" if instance is None else f"{instance.status} ({instance.reason})"
    message = f"Instance '{printable(instance_id)}' is not running: it is {state}."
    return {"type": "InstanceNotRunning", "message": message, "traceback": ""}


RESTARTED = {"type": "PlaneRestarted", "message": "The plane was restarted while the verifier ran.", "traceback": ""}


class VerifierExecutions:
    """The verifier runs of a plane, at most `parallel` at a time."""

    def __init__(self, database: PlaneDatabase, parallel: int) -> None:
        self._database = database
        self._slots = asyncio.Semaphore(parallel)
        self._running: dict[str, tuple[str, asyncio.Task[dict[str, Any]]]] = {}

    async def close(self) -> None:
        tasks = [task for _, task in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def run(self, request_id: str | None, fingerprint: str, work: Work) -> dict[str, Any]:
        """The answer of `work`, or of the run that this request id started before. Raises HttpError."""
        name = request_id or uuid.uuid4().hex
        if name not in self._running:
            # The run belongs to the plane: a client that disconnects gets the answer when it asks again.
            task = asyncio.create_task(self._execute(name, fingerprint, work))
            self._running[name] = fingerprint, task
            task.add_done_callback(lambda _: self._running.pop(name, None))
        running_fingerprint, task = self._running[name]
        if running_fingerprint != fingerprint:
            raise _id_reused()
        return await asyncio.shield(task)

    async def _execute(self, name: str, fingerprint: str, work: Work) -> dict[str, Any]:
        execution_id = f"exec_{uuid.uuid4().hex}"
        row = await self._database.run(_insert, execution_id, name, fingerprint)
        if row is not None:
            if row["fingerprint"] != fingerprint:
                raise _id_reused()
            stored: dict[str, Any] = orjson.loads(row["answer"])
            return stored
        try:
            async with self._slots:
                began = time.monotonic()
                answer = await work()
            answer["execution_id"] = execution_id
            answer.setdefault("execution_time_ms", round(1000 * (time.monotonic() - began)))
            await self._database.run(_store, execution_id, orjson.dumps(answer).decode())
        except Exception:
            # There is no answer, so the same request id may run it again.
            await self._database.run(_delete, execution_id)
            raise
        return answer


def _id_reused() -> HttpError:
    return HttpError(400, "X-Request-ID was used for another verifier call. Send a new id for a new call.")


def failure(error: dict[str, Any]) -> dict[str, Any]:
    """An answer without a grade, with the reason."""
    return {"success": False, "result": None, "error": error, "stdout": "", "execution_time_ms": 0}


def end_unfinished(connection: sqlite3.Connection) -> None:
    """Store a failure for the runs that an earlier plane did not finish."""
    rows = connection.execute("SELECT execution_id FROM executions WHERE answer IS NULL").fetchall()
    for row in rows:
        answer = {**failure(RESTARTED), "execution_id": row["execution_id"]}
        _store(connection, row["execution_id"], orjson.dumps(answer).decode())


def find_execution(connection: sqlite3.Connection, execution_id: str) -> dict[str, Any] | None:
    """The answer of a finished run."""
    row = connection.execute("SELECT answer FROM executions WHERE execution_id = ?", (execution_id,)).fetchone()
    if row is None or row["answer"] is None:
        return None
    answer: dict[str, Any] = orjson.loads(row["answer"])
    return answer


def _insert(
    connection: sqlite3.Connection, execution_id: str, request_id: str, fingerprint: str
) -> sqlite3.Row | None:
    """Store a new run; or the row of the run that the request id started before."""
    row: sqlite3.Row | None = connection.execute(
        "SELECT * FROM executions WHERE request_id = ?", (request_id,)
    ).fetchone()
    if row is None:
        connection.execute(
            "INSERT INTO executions (execution_id, request_id, fingerprint, created_at) VALUES (?, ?, ?, ?)",
            (execution_id, request_id, fingerprint, now_text()),
        )
    return row


def _store(connection: sqlite3.Connection, execution_id: str, answer: str) -> None:
    connection.execute("UPDATE executions SET answer = ? WHERE execution_id = ?", (answer, execution_id))


def _delete(connection: sqlite3.Connection, execution_id: str) -> None:
    connection.execute("DELETE FROM executions WHERE execution_id = ?", (execution_id,))


SOURCE_FILE = "verifier.py"
MAX_BUNDLE_FILES = 256
_COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_ZIP_ERRORS = (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, NotImplementedError, RuntimeError)


def read_bundle(encoded: str, sha256: str | None) -> tuple[str, str]:
    """The digest of a bundle in base64, and the source of the verifier in it. Raises HttpError."""
    if len(encoded) > MAX_BUNDLE_BYTES * 4 // 3 + 4:
        raise HttpError(400, f"'bundle' is larger than {MAX_BUNDLE_BYTES // 2**20} MiB. Send the source alone.")
    try:
        data = base64.b64decode(encoded, validate=True)
    except binascii.Error as error:
        raise HttpError(400, f"'bundle' is not base64 ({error}).") from None
    digest = hashlib.sha256(data).hexdigest()
    if sha256 is not None and sha256.lower() != digest:
        raise HttpError(400, f"'sha256' is {printable(sha256)}, but the bundle has {digest}. Send the bundle's own.")
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as files:
            return digest, _source(files)
    except _ZIP_ERRORS as error:
        raise HttpError(400, f"'bundle' is not a readable zip file ({error}).") from None


def _source(files: zipfile.ZipFile) -> str:
    if len(files.infolist()) > MAX_BUNDLE_FILES:
        raise HttpError(400, f"'bundle' has more than {MAX_BUNDLE_FILES} files. Send {SOURCE_FILE} alone.")
    try:
        entry = files.getinfo(SOURCE_FILE)
    except KeyError:
        raise HttpError(400, f"'bundle' has no {SOURCE_FILE}. Put the verifier's source there.") from None
    if entry.compress_type not in _COMPRESSIONS or entry.flag_bits & 1:
        raise HttpError(
            400, f"{SOURCE_FILE} in 'bundle' is encrypted or packed in an unusual way. Deflate or store it."
        )
    with files.open(entry) as source:
        # The sizes in the zip's header may be wrong, so the read itself is limited.
        content = source.read(MAX_CODE_CHARS + 1)
    if len(content) > MAX_CODE_CHARS:
        raise HttpError(
            400, f"{SOURCE_FILE} in 'bundle' is larger than {MAX_CODE_CHARS // 1024} KiB. Send a shorter verifier."
        )
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise HttpError(400, f"{SOURCE_FILE} in 'bundle' is not UTF-8 text.") from None
