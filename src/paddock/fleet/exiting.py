"""The last requests of a process: no event loop and no new thread is left, so they are plain and in sequence."""

from __future__ import annotations

import http.client
import json
import logging
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import TYPE_CHECKING

from paddock.fleet.models import ALIVE

if TYPE_CHECKING:
    from paddock.fleet.leases import Lease, Leases
    from paddock.fleet.settings import PlaneAddress

logger = logging.getLogger(__name__)

LAST_TRY_SECONDS = 1.0
"""For what callers have waited for already."""


def end_at_exit(leases: Leases) -> None:
    """Try once to end what is left, and say what could not be. What is not confirmed in time stays on disk."""
    from paddock.fleet.leases import grace_left

    deadline = time.monotonic() + max(grace_left(leases.outstanding()), LAST_TRY_SECONDS)
    for lease in leases.outstanding():
        try:
            if time.monotonic() < deadline and _is_ended(lease, deadline):
                leases.finish(lease)
        except (OSError, ValueError, http.client.HTTPException) as error:
            lease.error = type(error).__name__
    for run_id in {lease.run_id for lease in leases.outstanding()}:
        logger.warning(
            "%d instances of run %s may be left; the next process that uses the plane ends them,"
            " or: paddock fleet rm --run %s",
            len(leases.outstanding(run_id)),
            run_id,
            run_id,
        )


def _is_ended(lease: Lease, deadline: float) -> bool:
    if lease.instance_id is not None:
        return _delete(lease.address, lease.instance_id, deadline)
    query = urllib.parse.urlencode({"run_id": lease.run_id})
    status, body = _send(lease.address, "GET", f"/v1/env/instances?{query}", deadline)
    listed = json.loads(body) if status == 200 else []
    ours = [each for each in listed if each.get("request_id") == lease.request_id]
    orphans = [each for each in listed if each.get("status") in ALIVE] if lease.is_own_run and not ours else []
    is_ended = all([_delete(lease.address, each["instance_id"], deadline) for each in ours or orphans])
    # What the list does not show may still come: the record stays, unless it was our own create that was shown.
    return bool(ours) and is_ended


def _delete(address: PlaneAddress, instance_id: str, deadline: float) -> bool:
    status, _ = _send(address, "DELETE", f"/v1/env/instances/{urllib.parse.quote(instance_id)}", deadline)
    if status in (400, 409):
        status, body = _send(address, "GET", f"/v1/env/instances/{urllib.parse.quote(instance_id)}", deadline)
        return status == 404 or (status == 200 and json.loads(body).get("status") in ("stopped", "error"))
    return status < 300 or status in (404, 410)


def _send(address: PlaneAddress, method: str, path: str, deadline: float) -> tuple[int, bytes]:
    request = urllib.request.Request(f"{address.base_url}{path}", method=method, headers=address.headers)
    try:
        with urllib.request.urlopen(request, timeout=max(deadline - time.monotonic(), 0.1)) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, b""
