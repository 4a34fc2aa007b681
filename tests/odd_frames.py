"""What clients of an adder may send, and how they may leave: the odd with the plain."""

import struct
import time
from collections.abc import Callable
from typing import Any

from wire import BINARY, CLOSE, CONTINUATION, RawSocket

STEP = '{{"type":"step","data":{{"amount":{}}}}}'


def total(answer: Any) -> int:
    result: int = answer["data"]["observation"]["total"]
    return result


def frame(text: str) -> bytes:
    data = text.encode()
    head = bytes([0x81, 0x80 | len(data)]) if len(data) < 126 else struct.pack("!BBH", 0x81, 0xFE, len(data))
    return head + bytes(4) + data


def in_pieces(ws: RawSocket, data: bytes, size: int) -> None:
    for begins in range(0, len(data), size):
        ws.tcp.sendall(data[begins : begins + size])
        time.sleep(0.002)


def in_fragments(ws: RawSocket) -> None:
    ws.send('{"type":"step",', final=False)
    ws.send('"data":{"amount":2}}', CONTINUATION)


ODD: dict[str, tuple[str, Callable[[RawSocket], None]]] = {
    "a state": ("state", lambda ws: ws.send('{"type":"state"}')),
    "a deadline": ("observation", lambda ws: ws.send('{"type":"step","data":{"amount":2},"timeout_s":5}')),
    "a wrong action": ("error", lambda ws: ws.send(STEP.format(-1))),
    "no JSON": ("error", lambda ws: ws.send("what?")),
    "an empty message": ("error", lambda ws: ws.send("")),
    "binary": ("error", lambda ws: ws.send(b"\x00\x01", BINARY)),
    "a large step": ("observation", lambda ws: ws.send(STEP.format("2" + " " * 32768))),
    "fragments": ("observation", in_fragments),
    "half a frame": ("observation", lambda ws: in_pieces(ws, frame(STEP.format(2)), 11)),
    "byte by byte": ("observation", lambda ws: in_pieces(ws, frame(STEP.format(2)), 1)),
    "half a head": ("observation", lambda ws: in_pieces(ws, frame(STEP.format("2" + " " * 200)), 3)),
}
"""The kind of the answer, and how to send it. A step of theirs adds two."""

ENDS: dict[str, Callable[[RawSocket], None]] = {
    "a close frame": lambda ws: ws.send(struct.pack("!H", 1000), CLOSE),
    "a close message": lambda ws: ws.send('{"type":"close"}'),
    "a dropped connection": lambda ws: ws.close(),
    "a reset connection": lambda ws: ws.reset(),
    "half a frame, then nothing": lambda ws: (ws.tcp.sendall(frame(STEP.format(1))[:9]), ws.close())[1],
}
