"""What `fleet-python` calls on an environment when a task is verified, answered by our handle of the instance.

A trainer that verifies by hand passes `orchestrator._fleet_env` to the SDK's `Task.verify_detailed_async`. The SDK
needs three names of it: `instance_id`, `check_bundle_exists`, `execute_verifier_remote`. A test runs the real SDK.
"""

from __future__ import annotations

import base64
import pickle
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from paddock.fleet.errors import VerifierInvalid
from paddock.fleet.verifiers import REGION, SECONDS

if TYPE_CHECKING:
    from paddock.fleet.plane import Plane

CHECK_SECONDS = 30.0
SPARE_SECONDS = 30.0
"""What a run may take beyond the verifier's own time: the plane has to start it and to answer."""


@dataclass(frozen=True, slots=True)
class VerifierAnswer:
    """What the plane said about a verifier, under the names of the SDK's responses."""

    success: bool
    result: Any = None
    error: dict[str, Any] | None = None
    stdout: str | None = None
    execution_id: str | None = None
    execution_time_ms: int | None = None
    bundle_cache_hit: bool | None = None
    verifier_id: str | None = None
    key: str | None = None
    version: int | None = None
    display_src: str | None = None
    created_at: str | None = None
    comment: str | None = None

    @classmethod
    def read(cls, document: dict[str, Any]) -> VerifierAnswer:
        names = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in document.items() if name in names})


class SdkCalls:
    """The part of an instance's handle that the SDK's verifiers use."""

    plane: Plane
    instance_id: str

    async def check_bundle_exists(self, bundle_hash: str) -> VerifierAnswer:
        """Whether the plane has the bundle of that SHA-256."""
        path = f"/v1/verifiers/check?sha256={bundle_hash}"
        document = await self.plane.get_json(path, seconds=CHECK_SECONDS)
        return VerifierAnswer.read({"success": False, **(document if isinstance(document, dict) else {})})

    async def execute_verifier_remote(
        self,
        bundle_data: bytes,
        bundle_sha: str,
        key: str,
        function_name: str,
        args: tuple[Any, ...],
        args_array: list[Any],
        kwargs: dict[str, Any],
        timeout: int | None = SECONDS,
        needs_upload: bool = True,
        verifier_runtime_version: str | None = None,
    ) -> VerifierAnswer:
        """Run a verifier at the plane. Raises VerifierInvalid if an argument is not plain data."""
        try:
            # The first argument stands for the environment, which the plane puts in its place.
            packed = pickle.dumps({"args": (None, *args), "kwargs": kwargs}, protocol=4)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise VerifierInvalid(f"an argument of the verifier cannot be sent: {error}") from error
        seconds = SECONDS if timeout is None else timeout
        body: dict[str, Any] = {
            "key": key,
            "sha256": bundle_sha,
            "args": base64.b64encode(packed).decode(),
            "args_array": args_array,
            "function_name": function_name,
            "timeout": seconds,
            "region": REGION,
        }
        if needs_upload:
            body["bundle"] = base64.b64encode(bundle_data).decode()
        if verifier_runtime_version:
            body["verifier_runtime_version"] = verifier_runtime_version
        return VerifierAnswer.read(await self.plane.execute_verifier(body, seconds=seconds + SPARE_SECONDS))
