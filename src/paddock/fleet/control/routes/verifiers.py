"""Verifiers: is a bundle known, run one, and the judge that this plane does not have."""

from __future__ import annotations

import asyncio
import hashlib
from typing import TYPE_CHECKING, Any

import orjson
from starlette.routing import Route

from paddock.errors import VerifierError
from paddock.fleet.control import records, tasks
from paddock.fleet.control.answers import Fields, Refused, answer, read_object, request_id, shown
from paddock.fleet.control.bundles import MOST_BUNDLE, read_bundle
from paddock.fleet.control.executions import failed
from paddock.fleet.control.verifying import VerifierCall

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from paddock.fleet.control.plane import Plane

USUAL_SECONDS = 30
LONGEST_SECONDS = 300
MOST_ARGUMENTS = 8 * 1024 * 1024
MOST_ENCODED = 2 * MOST_BUNDLE


class Verifiers:
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
            raise Refused(400, "'sha256' is missing. Send the digest of the bundle.")
        found = await self.plane.database.run(tasks.verifier_by_content, digest)
        return answer({"success": found is not None, **_about(found)})

    async def execute(self, request: Request) -> Response:
        """Run a verifier, once per request id. 404 only if its code is neither sent nor known."""
        given = await read_object(request)
        function_name = given.text("function_name") or "verify"
        if not function_name.isidentifier():
            raise Refused(400, f"'function_name' is '{shown(function_name)}'. Send the name of a function.")
        seconds = given.whole("timeout", 1, LONGEST_SECONDS) or USUAL_SECONDS
        args = given.text("args", MOST_ARGUMENTS)
        array = given.items("args_array")
        verifier, known_before = await self._verifier(given)
        instance_id = _instance_id(array)

        async def work() -> dict[str, Any]:
            about = {"bundle_cache_hit": known_before, **_about(verifier), "verifier_id": verifier["verifier_id"]}
            instance = await self.plane.database.run(records.find, instance_id) if instance_id is not None else None
            if instance_id is not None and (instance is None or instance.status != "running"):
                return {**failed(_not_running(instance_id, instance)), **about}
            call = VerifierCall(
                code=verifier["code"],
                function_name=function_name,
                args=args,
                args_array=array,
                timeout=float(seconds),
                instance_id=instance_id,
                env_key=None if instance is None else instance.env_key,
                folder=None if instance_id is None else self.plane.hosting.folder_of(instance_id),
            )
            return {**(await self.plane.verify(call)), **about}

        named = [verifier["sha256"], function_name, seconds, args, array]
        fingerprint = hashlib.sha256(orjson.dumps(named)).hexdigest()
        try:
            return answer(await self.plane.executions.run(request_id(request), fingerprint, work))
        except VerifierError as error:
            raise Refused(503, f"The verifier could not be run, temporarily: {error}", retry_after=1) from None

    async def judge(self, request: Request) -> Response:
        raise Refused(400, "The judge is not configured: this plane has no model to grade with. Use a verifier.")

    async def _verifier(self, given: Fields) -> tuple[dict[str, Any], bool]:
        """The verifier that is meant, and whether it was known before this call."""
        digest = (given.text("sha256") or "").lower()
        bundle = given.text("bundle", MOST_ENCODED)
        database = self.plane.database
        found = await database.run(tasks.verifier_by_content, digest) if digest else None
        if found is not None:
            return found, True
        if not bundle:
            if not digest:
                raise Refused(
                    400, "'sha256' and 'bundle' are missing. Send the bundle, or the digest of a known one."
                )
            raise Refused(404, f"bundle not found: {shown(digest)}")
        digest, code = await asyncio.to_thread(read_bundle, bundle, digest or None)
        key = given.label("key") or "verifier"
        await database.run(tasks.put_bundle, digest, key, code, given.text("comment"))
        stored = await database.run(tasks.verifier_by_content, digest)
        assert stored is not None
        return stored, False


def _about(verifier: dict[str, Any] | None) -> dict[str, Any]:
    known = verifier or {}
    about = {name: known.get(name) for name in ("key", "version", "created_at", "comment")}
    return {**about, "display_src": known.get("code")}


def _instance_id(args_array: list[Any] | None) -> str | None:
    """The instance is named by the last positional argument."""
    last = args_array[-1] if args_array else None
    named = last.get("env") if isinstance(last, dict) else None
    return named if isinstance(named, str) else None


def _not_running(instance_id: str, instance: records.Instance | None) -> dict[str, Any]:
    state = "unknown" if instance is None else f"{instance.status} ({instance.reason})"
    message = f"Instance '{shown(instance_id)}' is not running: it is {state}."
    return {"type": "InstanceNotRunning", "message": message, "traceback": ""}
