"""What is kept of an output, and how it is cut into lines."""

import asyncio
import os

from paddock.sandbox.jobs import MAX_LINE_BYTES, MOST_UNREAD_BYTES, BoundedOutput, LineBuffer, OutputPipe


def test_short_output_is_kept_whole() -> None:
    output = BoundedOutput(10)
    for piece in (b"abc", b"", b"defghij"):
        output.add(piece)
    assert (output.value(), output.truncated) == (b"abcdefghij", False)


def test_the_first_and_the_last_half_are_kept() -> None:
    for size in (1, 3, 7, 1000):
        output = BoundedOutput(10)
        data = bytes(range(256)) * 2
        for start in range(0, len(data), size):
            output.add(data[start : start + size])
        assert output.value() == data[:5] + data[-5:]
        assert output.truncated


def cut(*pieces: bytes) -> list[bytes]:
    async def read() -> list[bytes]:
        lines = LineBuffer()
        for piece in pieces:
            lines.add(piece)
        lines.end()
        lines_read = []
        while (line := await lines.next()) is not None:
            lines_read.append(line)
        return lines_read

    return asyncio.run(read())


def test_lines_are_cut_wherever_the_pieces_end() -> None:
    assert cut(b"one\ntw", b"o\n", b"\nthree") == [b"one", b"two", b"", b"three"]
    assert cut() == []
    assert cut(b"one\n") == [b"one"]


def test_a_long_line_is_cut() -> None:
    assert [len(line) for line in cut(b"x" * (2 * MAX_LINE_BYTES + 5) + b"\ny")] == [
        MAX_LINE_BYTES,
        MAX_LINE_BYTES,
        5,
        1,
    ]
    assert [len(line) for line in cut(b"x" * MAX_LINE_BYTES + b"\ny")] == [MAX_LINE_BYTES, 1]


def test_many_lines_are_cut_quickly() -> None:
    assert len(cut(b"a line\n" * 200_000)) == 200_000


def test_a_slow_reader_makes_the_command_wait() -> None:
    async def scenario() -> None:
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        stream = OutputPipe(reading, 1000, lambda _: None)
        lines = stream.lines()
        os.write(writing, b"first\n")
        assert await anext(lines) == b"first"
        written = 0
        idle = 0
        while idle < 20:
            try:
                written += os.write(writing, b"0123456\n" * 4096)
                idle = 0
            except BlockingIOError:
                idle += 1
            await asyncio.sleep(0)
        assert MOST_UNREAD_BYTES <= written < 2 * MOST_UNREAD_BYTES
        assert stream.is_paused
        os.close(writing)
        assert sum([len(line) + 1 async for line in lines]) == written
        assert stream.finished.is_set()

    asyncio.run(scenario())


def test_without_a_reader_of_lines_nothing_waits() -> None:
    async def scenario() -> None:
        reading, writing = os.pipe()
        stream = OutputPipe(reading, 1000, lambda _: None)
        for _ in range(300):
            os.write(writing, bytes(32768))
            await asyncio.sleep(0)
        os.close(writing)
        await asyncio.wait_for(stream.finished.wait(), 5)
        assert (len(stream.kept.value()), stream.kept.truncated) == (1000, True)

    asyncio.run(scenario())
