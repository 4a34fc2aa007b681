"""Verifier bundles: a zip that somebody sent, read with care. Nothing is written to disk.

Only `verifier.py` is taken; requirements are not installed.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import zipfile
import zlib

from paddock.fleet.control.answers import Refused, shown
from paddock.fleet.control.tasks import MOST_CODE

SOURCE = "verifier.py"
MOST_BUNDLE = 4 * 1024 * 1024
MOST_FILES = 256
_READABLE = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_BROKEN = (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, NotImplementedError, RuntimeError)


def read_bundle(encoded: str, sha256: str | None) -> tuple[str, str]:
    """The digest of a bundle in base64, and the source of the verifier in it. Raises Refused."""
    if len(encoded) > MOST_BUNDLE * 4 // 3 + 4:
        raise Refused(400, f"'bundle' is larger than {MOST_BUNDLE // 2**20} MiB. Send the source alone.")
    try:
        data = base64.b64decode(encoded, validate=True)
    except binascii.Error as error:
        raise Refused(400, f"'bundle' is not base64 ({error}).") from None
    digest = hashlib.sha256(data).hexdigest()
    if sha256 is not None and sha256.lower() != digest:
        raise Refused(400, f"'sha256' is {shown(sha256)}, but the bundle has {digest}. Send the bundle's own.")
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as files:
            return digest, _source(files)
    except _BROKEN as error:
        raise Refused(400, f"'bundle' is not a readable zip file ({error}).") from None


def _source(files: zipfile.ZipFile) -> str:
    if len(files.infolist()) > MOST_FILES:
        raise Refused(400, f"'bundle' has more than {MOST_FILES} files. Send {SOURCE} alone.")
    try:
        entry = files.getinfo(SOURCE)
    except KeyError:
        raise Refused(400, f"'bundle' has no {SOURCE}. Put the verifier's source there.") from None
    if entry.compress_type not in _READABLE or entry.flag_bits & 1:
        raise Refused(400, f"{SOURCE} in 'bundle' is encrypted or packed in an unusual way. Deflate or store it.")
    with files.open(entry) as source:
        # What the zip says of its sizes is not believed: reading stops by itself.
        content = source.read(MOST_CODE + 1)
    if len(content) > MOST_CODE:
        raise Refused(400, f"{SOURCE} in 'bundle' is larger than {MOST_CODE // 1024} KiB. Send a shorter verifier.")
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise Refused(400, f"{SOURCE} in 'bundle' is not UTF-8 text.") from None
