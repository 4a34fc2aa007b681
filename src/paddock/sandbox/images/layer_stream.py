"""The uncompressed bytes of a layer, hashed and counted while they are read.

Knows compressions and digests, not tar.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import lzma
import zlib
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, cast

from paddock.errors import ImageError
from paddock.limits import GIBIBYTE

if TYPE_CHECKING:
    from paddock.sandbox.images.tar_reader import ByteSource

CHUNK_BYTES = 1 << 18
MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"\xfd7zXZ\0": "xz", b"BZh": "bzip2"}
MAGIC_BYTES = 6


@dataclass(frozen=True, slots=True)
class UnpackLimits:
    """What one layer may become. A layer that exceeds a limit is refused while it is unpacked."""

    max_bytes: int = 32 * GIBIBYTE
    max_entries: int = 4_000_000
    max_ratio: int = 200
    """Of uncompressed to compressed size. Ordinary layers have 2 to 10."""
    ratio_from_bytes: int = GIBIBYTE // 4
    """The ratio of a smaller layer does not count."""


class LayerStream:
    """Decompresses `file`. After the end, `digest` and `diff_id` are those of all bytes read and produced."""

    def __init__(self, file: IO[bytes], limits: UnpackLimits) -> None:
        self._input = _HashingFile(file)
        self._limits = limits
        self._hash = hashlib.sha256()
        self._chunk = b""
        self._position = 0
        self._output_bytes = 0
        beginning = self._input.peek(MAGIC_BYTES)
        self._decompressed = decompressed(self._input, beginning)
        self._errors = decompression_errors(beginning)

    def read(self, size: int) -> bytes:
        end = self._position + size
        if end <= len(self._chunk):
            piece = self._chunk[self._position : end]
            self._position = end
            return piece
        pieces = [self._chunk[self._position :]]
        missing = size - len(pieces[0])
        self._chunk, self._position = b"", 0
        while missing and self._fill():
            pieces.append(self._chunk[:missing])
            self._position = len(pieces[-1])
            missing -= self._position
        return b"".join(pieces)

    @property
    def digest(self) -> str:
        """Of the compressed bytes."""
        return f"sha256:{self._input.hash.hexdigest()}"

    @property
    def diff_id(self) -> str:
        """Of the uncompressed bytes."""
        return f"sha256:{self._hash.hexdigest()}"

    def drain(self) -> None:
        """Read what follows the archive, which is part of both digests."""
        while self.read(CHUNK_BYTES):
            pass
        self._input.drain()

    def _fill(self) -> bool:
        try:
            self._chunk = self._decompressed.read(CHUNK_BYTES)
        except self._errors as error:
            raise ImageError(f"the layer cannot be decompressed: {error}", hint="fetch or make it again") from error
        self._position = 0
        self._output_bytes += len(self._chunk)
        self._check_limits()
        self._hash.update(self._chunk)
        return bool(self._chunk)

    def _check_limits(self) -> None:
        limits, size = self._limits, self._output_bytes
        if size > limits.max_bytes:
            raise ImageError(
                f"the layer has more than {limits.max_bytes} bytes", hint="raise PADDOCK_IMAGE_LAYER_LIMIT"
            )
        if size > limits.ratio_from_bytes and size > limits.max_ratio * max(self._input.count, 1):
            raise ImageError(
                f"the layer expands to more than {limits.max_ratio} times its size",
                hint="this is a decompression bomb, or a file of zeros that the image does not need",
            )


class _HashingFile:
    """A file that hashes what is read of it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._ahead = b""
        self.hash = hashlib.sha256()
        self.count = 0

    def peek(self, size: int) -> bytes:
        while len(self._ahead) < size and (chunk := self._file.read(size - len(self._ahead))):
            self._ahead += chunk
        return self._ahead

    def read(self, size: int = -1) -> bytes:
        size = size if size > 0 else CHUNK_BYTES
        if self._ahead:
            chunk, self._ahead = self._ahead[:size], self._ahead[size:]
        else:
            chunk = self._file.read(size)
        self.hash.update(chunk)
        self.count += len(chunk)
        return chunk

    def drain(self) -> None:
        while self.read(CHUNK_BYTES):
            pass


def compression_of(beginning: bytes) -> str:
    """`gzip`, `zstd`, `xz`, `bzip2`, or empty for none of them."""
    return next((name for magic, name in MAGIC.items() if beginning.startswith(magic)), "")


def decompressed(file: ByteSource, beginning: bytes) -> ByteSource:
    """A reader of the uncompressed bytes, which never produces more than it is asked for."""
    source = cast("IO[bytes]", file)
    match compression_of(beginning):
        case "gzip":
            return cast("ByteSource", gzip.GzipFile(fileobj=source))
        case "xz":
            return lzma.LZMAFile(source)
        case "bzip2":
            return bz2.BZ2File(source)
        case "zstd":
            import zstandard

            reader = zstandard.ZstdDecompressor().stream_reader(source, CHUNK_BYTES, read_across_frames=True)
            return cast("ByteSource", reader)
    return file


def decompression_errors(beginning: bytes) -> tuple[type[Exception], ...]:
    """What a reader of damaged bytes raises."""
    errors: tuple[type[Exception], ...] = (OSError, EOFError, zlib.error, lzma.LZMAError)
    if compression_of(beginning) == "zstd":
        from zstandard import ZstdError

        errors = (*errors, ZstdError)
    return errors
