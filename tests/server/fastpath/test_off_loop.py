"""Steps on threads whose answers the threads send themselves: nothing is lost, doubled, mixed or out of order."""

import asyncio
import json
import random
import socket
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress

import pytest

from environments import Adder, Scripted, Watched
from paddock.server.fastpath.batch_writer import MAX_MEDIUM_FRAME_BYTES
from paddock.server.fastpath.off_loop import OffLoopWriter
from running import Running, Serve, wait_until
from wire import PING, PONG, TEXT

STEP = '{{"type":"step","data":{{"amount":{}}}}}'


def burst(choose: random.Random, total: int, size: int) -> tuple[list[str], list[str | int], int]:
    """Requests, what each is to be answered with, and the total after them."""
    requests: list[str] = []
    answers: list[str | int] = []
    for _ in range(size):
        kind = choose.random()
        if kind < 0.8:
            amount = choose.randrange(5)
            total += amount
            requests.append(STEP.format(amount))
            answers.append(total)
        elif kind < 0.9:
            requests.append('{"type":"state"}')
            answers.append(total)
        else:
            requests.append(choose.choice([STEP.format(-1), STEP.format('"x"'), "[]", '{"type":"what"}']))
            answers.append("error")
    return requests, answers, total


def converse(server: Running, seed: int, rounds: int) -> int:
    choose, total, steps = random.Random(seed), 0, 0
    ws = server.socket()
    ws.ask({"type": "reset"})
    for _ in range(rounds):
        requests, expected, total = burst(choose, total, choose.choice([1, 1, 1, 2, 30]))
        for request in requests:
            ws.send(request)
        for answer in expected:
            message = ws.receive(30)
            if answer == "error":
                assert message["type"] == "error", message
            else:
                data = message["data"]
                assert (data if message["type"] == "state" else data["observation"])["total"] == answer
        steps += sum(1 for request in requests if "step" in request)
    return steps


def test_answers_keep_the_order_of_their_requests_on_every_connection(serve: Serve) -> None:
    server = serve(Adder, max_sessions=8)
    with ThreadPoolExecutor(8) as clients:
        assert min(clients.map(lambda seed: converse(server, seed, 60), range(8))) > 60
    assert server.service.manager.statistics().running == 0


def test_the_session_records_an_answer_before_the_next_request(serve_fast: Serve) -> None:
    server = serve_fast(Adder)
    ws = server.socket("/ws", session_resume="new")
    for number in range(1, 30):
        ws.send(STEP.format(0))
        ws.receive()
        if number % 3 == 0:
            assert ws.ask({"type": "state"})["data"]["step_count"] == number
    [session] = server.service.manager.sessions()
    wait_until(lambda: server.service.manager.sessions()[0].steps == 29)
    assert session.attached


def test_a_client_that_reads_late_gets_every_answer_whole(serve_fast: Serve, lives: list[Watched]) -> None:
    """The kernel's buffer fills up on the way, so that threads find room for a part of a frame, or for none."""
    server = serve_fast(Scripted)
    ws = server.raw()
    waiting: deque[str] = deque()
    for number in range(1000, 1300):
        waiting.append(str(number) * 10_000)
        ws.send(json.dumps({"type": "step", "data": {"value": waiting[-1]}}, separators=(",", ":")))
        if not happens(lambda done=number - 999: lives and lives[0].steps >= done):  # type: ignore[misc]
            while waiting:
                assert ws.answer()["data"]["observation"]["value"] == waiting.popleft()
    # Without an end of the buffer this would have shown nothing.
    assert len(waiting) < 300


def happens(condition: Callable[[], object], seconds: float = 0.5) -> bool:
    with suppress(AssertionError):
        wait_until(condition, seconds)
        return True
    return False


def test_pings_are_answered_between_the_answers_of_threads(serve_fast: Serve) -> None:
    ws = serve_fast(Adder).raw()
    for number in range(50):
        ws.send(STEP.format(1))
        ws.send(str(number), PING)
        kinds = dict(ws.receive() for _ in range(2))
        assert kinds[PONG] == str(number).encode()
        assert json.loads(kinds[TEXT])["data"]["observation"]["total"] == number + 1


def test_a_step_that_ends_at_its_deadline_has_one_answer(serve_fast: Serve) -> None:
    server = serve_fast(Scripted, step_timeout=0.1)
    ws, reply = server.socket(), []
    for number in range(12):
        answer = ws.step(sleep=0.1 + number % 3 * 0.005, value=number)
        reply.append(answer["type"])
        wait_until(lambda: server.service.manager.statistics().running == 0)
    with pytest.raises(TimeoutError):
        ws.receive(0.3)
    assert set(reply) <= {"observation", "error"}
    assert server.service.manager.metrics.hung_calls == 0


def test_a_client_that_leaves_in_the_middle_frees_its_session(serve_fast: Serve) -> None:
    server = serve_fast(Scripted, max_sessions=8)
    for _ in range(8):
        ws = server.raw()
        ws.send('{"type":"step","data":{"sleep":0.05}}')
        ws.close()
    wait_until(lambda: server.service.manager.statistics().sessions == 0)


# -- the writer -----------------------------------------------------------------------------------


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[OffLoopWriter, asyncio.Transport, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        theirs = socket.create_connection(listening.getsockname())
        ours, _ = listening.accept()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16384)
    theirs.setblocking(False)
    transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=ours)
    try:
        yield OffLoopWriter(transport), transport, theirs
    finally:
        transport.close()
        theirs.close()


def frames(data: bytes) -> list[bytes]:
    collected = []
    while data:
        assert data[0] == 0x81
        size, start = (data[1], 2) if data[1] < 126 else (int.from_bytes(data[2:4]), 4)
        collected.append(data[start : start + size])
        data = data[start + size :]
    return collected


async def read(theirs: socket.socket, last: bytes) -> bytes:
    """All that comes, up to `last`."""
    result = b""
    async with asyncio.timeout(20):
        while not result.endswith(last):
            result += await asyncio.get_running_loop().sock_recv(theirs, 1 << 20)
    return result


@pytest.mark.anyio
@pytest.mark.parametrize("size", [1, 125, 126, 900, 3000])
async def test_what_was_taken_arrives_whole_and_in_order(size: int) -> None:
    async with connected() as (writer, transport, theirs):
        collected = []
        for number in range(400):
            frame = f"{number:05}".encode().ljust(size, b".")
            if await asyncio.to_thread(writer.send, frame):
                collected.append(frame)
            else:
                break
        last = b"from the loop"
        writer.write(transport.write, bytes((0x81, len(last))) + last)
        assert len(collected) > 0
        assert frames(await read(theirs, last)) == [*collected, last]
        assert writer.send(b"again")


@pytest.mark.anyio
async def test_only_the_loop_writes_while_it_has_something_left_to_write() -> None:
    async with connected() as (writer, transport, theirs):
        writer.write(transport.write, b"." * 200_000 + b"!")
        assert transport.get_write_buffer_size()
        assert not writer.send(b"not now")
        assert len(await read(theirs, b"!")) == 200_001
        assert writer.send(b"now")


@pytest.mark.anyio
async def test_a_frame_that_is_too_large_is_left_to_the_loop() -> None:
    async with connected() as (writer, _, _):
        assert not writer.send(b"." * (MAX_MEDIUM_FRAME_BYTES + 1))


@pytest.mark.anyio
async def test_nothing_is_written_to_a_socket_that_was_given_up() -> None:
    async with connected() as (writer, _, theirs):
        writer.close()
        assert not writer.send(b"to nobody")
        with pytest.raises(BlockingIOError):
            theirs.recv(1)
