"""Work on layer folders, as root of a user namespace. `layer_worker` starts a process for each job.

The functions get folders as open descriptors, because the process may not be able to enter their paths. An answer is
one JSON object on standard output. What is imported here is loaded for every layer, so it has to be little.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
from contextlib import suppress
from typing import Any

from paddock.errors import ImageError
from paddock.limits import GIBIBYTE
from paddock.sandbox.images.layer_merge import merge_layers
from paddock.sandbox.images.layer_pack import pack_layer
from paddock.sandbox.images.layer_stream import UnpackLimits
from paddock.sandbox.images.layer_unpack import unpack_layer

with suppress(ImportError):
    # Loaded before the process changes its user: afterwards it may not be able to read modules.
    import zstandard  # noqa: F401

MAX_MEMORY_BYTES = 4 * GIBIBYTE
"""An xz archive can ask for any amount."""
OUTPUT_BYTES = 1 << 20


def unpack(folder: str, max_bytes: str, max_entries: str, max_ratio: str, ratio_from: str, ids: str) -> None:
    limits = UnpackLimits(int(max_bytes), int(max_entries), int(max_ratio), int(ratio_from))
    _answer(lambda: unpack_layer(sys.stdin.buffer, int(folder), limits, id_count=int(ids)).to_json())


def remove(folder: str, name: str) -> None:
    """Remove everything below the folder `name` in the open `folder`, and the folder itself."""

    def remove_tree() -> dict[str, Any]:
        shutil.rmtree(name, dir_fd=int(folder))
        return {}

    _answer(remove_tree)


def measure(folder: str) -> None:
    """The bytes on disk and the number of entries below the open `folder`."""

    def add_up() -> dict[str, Any]:
        disk_bytes = entries = 0
        for _, folders, files, descriptor in os.fwalk(".", dir_fd=int(folder), follow_symlinks=False):
            for name in (*folders, *files):
                disk_bytes += 512 * os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_blocks
                entries += 1
        return {"disk_bytes": disk_bytes, "entries": entries}

    _answer(add_up)


def merge(folder: str, *layers: str) -> None:
    """Put the open `layers`, lowest first, into the open `folder` as one layer."""
    _answer(lambda: merge_layers(int(folder), [int(layer) for layer in layers]))


def pack(folder: str, out: str) -> None:
    """Write the open `folder` to the descriptor `out` as a tar archive."""

    def write() -> dict[str, Any]:
        with os.fdopen(int(out), "wb", buffering=OUTPUT_BYTES) as file:
            pack_layer(int(folder), file)
        return {}

    _answer(write)


def set_rights(folder: str, mode: str, uid: str, gid: str) -> None:
    """Give the open `folder` an owner and a mode."""

    def change() -> dict[str, Any]:
        os.fchown(int(folder), int(uid), int(gid))
        os.fchmod(int(folder), int(mode))
        return {}

    _answer(change)


def _answer(work: Any) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    os.umask(0)
    try:
        answer = work()
    except ImageError as error:
        answer = {"error": error.message, "hint": error.hint}
    except (OSError, MemoryError) as error:
        answer = {"error": f"a layer cannot be worked on: {error}", "hint": "free space on the disk, or memory"}
    print(json.dumps(answer), flush=True)
