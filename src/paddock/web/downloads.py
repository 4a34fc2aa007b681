"""Exports of many rollouts as files to download."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.background import BackgroundTask
from starlette.responses import FileResponse, Response

from paddock.export import FORMS, load_form, stream
from paddock.web.responses import PageConflict

if TYPE_CHECKING:
    from paddock.export.policy import Policy
    from paddock.store import Store
    from paddock.store.search import Search


def list_forms() -> list[dict[str, Any]]:
    return [{"name": name, "summary": load_form(name).summary} for name in FORMS]


def export(store: Store, form: str, condition: Search, policy: Policy) -> Response:
    """Write the file, then send it: what is wrong is known before the first byte is sent."""
    suffix = load_form(form).suffix
    with tempfile.NamedTemporaryFile(prefix="paddock-export-", suffix=f".{suffix}", delete=False) as file:
        path = Path(file.name)
    try:
        keys = stream.select_keys(store, (), condition)
        report = stream.export(store, form, path, keys=keys, policy=policy)
        if not report.documents:
            reasons = "; ".join(f"{count}: {reason}" for reason, count in report.left_out.items())
            raise PageConflict(
                f"none of these {len(keys)} rollouts can be exported as {form}",
                hint=reasons or "choose other filters",
            )
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    headers = {"cache-control": "no-store"}
    return FileResponse(
        path, headers=headers, filename=f"rollouts.{suffix}", background=BackgroundTask(path.unlink, missing_ok=True)
    )
