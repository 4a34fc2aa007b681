"""How a guest reaches its owner: a Unix socket in a local sandbox, two byte streams in one elsewhere.

A frame is its length and the number of its stream (32 bits each, big-endian), then that many bytes. On the socket
each packet is a frame, and can carry descriptors (SCM_RIGHTS). Knows nothing of what frames contain.
"""

from __future__ import annotations

import _socket
import binascii
import os
import sys

CHUNK_BYTES = 65536
LONGEST_PACKET = 1 << 20
MOST_DESCRIPTORS = 3
HEADER_BYTES = 8
LONGEST_FRAME = 64 << 20


def encode_frame(number: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "big") + number.to_bytes(4, "big") + payload


class FrameBuffer:
    """Splits received bytes into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def add(self, data: bytes) -> list[tuple[int, bytes]]:
        """The number and payload of each frame that is complete now. Raises ValueError for one that is too long."""
        buffer, frames, start = self._buffer, [], 0
        buffer += data
        while len(buffer) - start >= HEADER_BYTES:
            length = int.from_bytes(buffer[start : start + 4], "big")
            if length > LONGEST_FRAME:
                raise ValueError(f"a frame of {length} bytes is too long")
            end = start + HEADER_BYTES + length
            if len(buffer) < end:
                break
            number = int.from_bytes(buffer[start + 4 : start + HEADER_BYTES], "big")
            frames.append((number, bytes(buffer[start + HEADER_BYTES : end])))
            start = end
        del buffer[:start]
        return frames


class SocketTransport:
    """A Unix socket that keeps packets apart (SOCK_SEQPACKET). Sending blocks."""

    passes_descriptors = True
    unsent_bytes = 0

    def __init__(self, connection: _socket.socket) -> None:
        self._connection = connection
        self.incoming = self.outgoing = connection.fileno()

    def receive(self) -> tuple[bytes, list[int]]:
        """The next bytes, none at the end, and the descriptors that came with them. Raises BlockingIOError."""
        return receive_descriptors(self._connection, LONGEST_PACKET, MOST_DESCRIPTORS)

    def send(self, data: bytes, descriptors: list[int]) -> bool:
        """False if the owner is gone."""
        packed = b"".join(descriptor.to_bytes(4, sys.byteorder) for descriptor in descriptors)
        ancillary = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, packed)] if packed else []
        try:
            self._connection.sendmsg([data], ancillary)
        except ConnectionError:
            return False
        return True

    def flush(self) -> bool:
        return True


class PipeTransport:
    """Two byte streams. With `text`, each frame is sent as a line of base64, for channels that carry only text."""

    passes_descriptors = False

    def __init__(self, incoming: int, outgoing: int, *, text: bool) -> None:
        self.incoming, self.outgoing, self._text = incoming, outgoing, text
        self._unsent: list[memoryview] = []
        self.unsent_bytes = 0
        os.set_blocking(incoming, False)
        os.set_blocking(outgoing, False)

    def receive(self) -> tuple[bytes, list[int]]:
        try:
            return os.read(self.incoming, 4 * CHUNK_BYTES), []
        except BlockingIOError:
            raise
        except OSError:
            return b"", []

    def send(self, data: bytes, descriptors: list[int]) -> bool:
        if self._text:
            data = binascii.b2a_base64(data)
        self._unsent.append(memoryview(data))
        self.unsent_bytes += len(data)
        return self.unsent_bytes <= CHUNK_BYTES or self.flush()

    def flush(self) -> bool:
        """Send as much as the pipe takes. False if the owner is gone."""
        sent = 0
        try:
            for position, data in enumerate(self._unsent):
                written = os.write(self.outgoing, data)
                self.unsent_bytes -= written
                if written < len(data):
                    self._unsent[position] = data[written:]
                    break
                sent += 1
        except BlockingIOError:
            pass
        except OSError:
            return False
        del self._unsent[:sent]
        return True


def receive_descriptors(connection: _socket.socket, length: int, count: int) -> tuple[bytes, list[int]]:
    """A packet and its descriptors, which are closed on exec. No bytes when the other end is closed."""
    try:
        data, ancillary, _, _ = connection.recvmsg(length, _socket.CMSG_SPACE(count * 4), _socket.MSG_CMSG_CLOEXEC)
    except BlockingIOError:
        raise
    except OSError:
        return b"", []
    descriptors = [
        int.from_bytes(content[start : start + 4], sys.byteorder)
        for _, _, content in ancillary
        for start in range(0, len(content) - 3, 4)
    ]
    return data, descriptors


def close_descriptors(descriptors: list[int] | tuple[int, ...]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
