"""Exports of many rollouts as files to download."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from starlette.responses import Response, StreamingResponse

from paddock.export import FORMS, load_form, stream
from paddock.web.responses import PageConflict

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paddock.export.policy import Policy
    from paddock.store import Store
    from paddock.store.search import Search

BLOCK_BYTES = 1024 * 1024


def list_forms() -> list[dict[str, Any]]:
    return [{"name": name, "summary": load_form(name).summary} for name in FORMS]


def export(store: Store, form: str, condition: Search, policy: Policy) -> Response:
    """Write the file, then send it: what is wrong is known before the first byte is sent."""
    suffix = load_form(form).suffix
    with tempfile.TemporaryDirectory(prefix="paddock-export-") as folder:
        path = Path(folder) / f"rollouts.{suffix}"
        keys = stream.select_keys(store, (), condition)
        report = stream.export(store, form, path, keys=keys, policy=policy)
        if not report.documents:
            reasons = "; ".join(f"{count}: {reason}" for reason, count in report.left_out.items())
            raise PageConflict(
                f"none of these {len(keys)} rollouts can be exported as {form}",
                hint=reasons or "choose other filters",
            )
        # The open file outlives its name, so nothing is left when a client hangs up.
        file = path.open("rb")
    headers = {
        "cache-control": "no-store",
        "content-disposition": f'attachment; filename="{path.name}"',
        "content-length": str(os.fstat(file.fileno()).st_size),
    }
    return StreamingResponse(read_blocks(file), headers=headers, media_type="application/octet-stream")


def read_blocks(file: BinaryIO) -> Iterator[bytes]:
    with file:
        while block := file.read(BLOCK_BYTES):
            yield block
