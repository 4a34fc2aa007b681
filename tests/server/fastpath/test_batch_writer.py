"""Answers that the loop has written leave together, in order, and before anything that ends the connection."""

import asyncio
import json
import struct
from typing import Any

import pytest

from environments import InlineAdder
from paddock.server.fastpath import batch_writer as module
from paddock.server.fastpath.batch_writer import MAX_MEDIUM_FRAME_BYTES, BatchWriter, frame_header, frame_with
from paddock.server.fastpath.threads import MAX_BATCH_ANSWERS, MAX_HELD_SECONDS
from running import Serve
from wire import CLOSE, PING, PONG, TEXT, RawSocket

STEP = '{"type":"step","data":{"amount":1}}'


class Wire:
    """Takes frames as a transport does."""

    def __init__(self, *, broken: bool = False) -> None:
        self.sent: list[bytes] = []
        self.broken = broken

    def send(self, _: Any, frame: bytes) -> None:
        if self.broken:
            raise ConnectionError("gone")
        self.sent.append(frame)


@pytest.fixture
async def writer() -> BatchWriter:
    return BatchWriter(["one", "another"])


@pytest.mark.anyio
async def test_a_single_connection_is_not_batched() -> None:
    wire, writer = Wire(), BatchWriter(["one"])
    writer.put(wire, b"1")  # type: ignore[arg-type]
    assert wire.sent == [b"1"]


@pytest.mark.anyio
async def test_the_answers_of_a_turn_leave_at_its_end(writer: BatchWriter) -> None:
    first, second = Wire(), Wire()
    for wire, frame in ((first, b"1"), (second, b"2"), (first, b"3")):
        writer.put(wire, frame)  # type: ignore[arg-type]
    assert first.sent == second.sent == []
    await asyncio.sleep(0)
    assert (first.sent, second.sent) == ([b"1", b"3"], [b"2"])


@pytest.mark.anyio
async def test_many_answers_do_not_wait_for_the_end_of_the_turn(writer: BatchWriter) -> None:
    wire = Wire()
    for number in range(2 * MAX_BATCH_ANSWERS + 1):
        writer.put(wire, b"%d" % number)  # type: ignore[arg-type]
    assert len(wire.sent) == 2 * MAX_BATCH_ANSWERS
    await asyncio.sleep(0)
    assert wire.sent == [b"%d" % number for number in range(2 * MAX_BATCH_ANSWERS + 1)]


@pytest.mark.anyio
async def test_an_answer_does_not_wait_long(writer: BatchWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    wire, now = Wire(), 5.0
    monkeypatch.setattr(module, "monotonic", lambda: now)
    writer.put(wire, b"1")  # type: ignore[arg-type]
    now += MAX_HELD_SECONDS / 2
    writer.put(wire, b"2")  # type: ignore[arg-type]
    assert wire.sent == []
    now += MAX_HELD_SECONDS
    writer.put(wire, b"3")  # type: ignore[arg-type]
    assert wire.sent == [b"1", b"2", b"3"]


@pytest.mark.anyio
async def test_a_connection_that_is_gone_costs_the_others_nothing(writer: BatchWriter) -> None:
    wires = [Wire(), Wire(broken=True), Wire()]
    for wire in wires:
        writer.put(wire, b"!")  # type: ignore[arg-type]
    writer.flush()
    assert [wire.sent for wire in wires] == [[b"!"], [], [b"!"]]


def at_once(ws: RawSocket, *frames: tuple[bytes, int]) -> None:
    """Send frames so that the server reads them in one turn."""
    ws.tcp.sendall(b"".join(bytes([0x80 | kind, 0x80 | len(data)]) + bytes(4) + data for data, kind in frames))


@pytest.mark.parametrize(
    "goodbye", [(b'{"type":"close"}', TEXT), (struct.pack("!H", 1000), CLOSE)], ids=["message", "frame"]
)
def test_answers_come_before_the_end_of_the_connection(serve_fast: Serve, goodbye: tuple[bytes, int]) -> None:
    ws = serve_fast(InlineAdder).raw()
    ws.send(STEP)
    ws.answer()
    at_once(ws, (STEP.encode(), TEXT), (STEP.encode(), TEXT), goodbye)
    assert [ws.answer()["data"]["observation"]["total"] for _ in range(2)] == [2, 3]
    assert ws.close_code() == 1000


def test_a_ping_between_steps_is_answered(serve_fast: Serve) -> None:
    ws = serve_fast(InlineAdder).raw()
    ws.send(STEP)
    ws.answer()
    at_once(ws, (STEP.encode(), TEXT), (b"hi", PING), (STEP.encode(), TEXT))
    kinds = [ws.receive() for _ in range(3)]
    assert (PONG, b"hi") in kinds
    totals = [json.loads(data)["data"]["observation"]["total"] for kind, data in kinds if kind == TEXT]
    assert totals == [2, 3]


@pytest.mark.parametrize("size", [0, 1, 125, 126, 127, 5000, MAX_MEDIUM_FRAME_BYTES])
def test_a_written_frame_says_its_length(size: int) -> None:
    text = b"x" * size
    head = bytes([0x81, size]) if size < 126 else struct.pack("!BBH", 0x81, 126, size)
    assert frame_with(text) == head + text


def test_a_long_frame_says_its_length_in_eight_bytes() -> None:
    assert frame_header(MAX_MEDIUM_FRAME_BYTES + 1) == struct.pack("!BBQ", 0x81, 127, MAX_MEDIUM_FRAME_BYTES + 1)
