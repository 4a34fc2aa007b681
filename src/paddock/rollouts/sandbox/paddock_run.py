"""Run a command of the agent for the tests, in a sandbox of its own: paddock-run [--max-output BYTES] CMD...

Input, output and exit code are those of the command: 127 if there is no such program, 126 if it cannot be run,
128 + N after signal N. With 125 it was not run at all; the tests then have no reward. The program of the same name
inside a verifier's sandbox is this text, with an interpreter put in front.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found, unused-ignore]
import _socket
import os
import select
import sys

USAGE = "usage: paddock-run [--max-output BYTES] CMD..."
NO_ANSWER = "the sandbox does not answer: only the tests can use it, and only while they run"
NOT_RUN = 125
PASSED_ON = (1, 2, 3, 10, 12, 14, 15, 18)
LONGEST_ANSWER = 4096

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn


def fail(reason: str) -> NoReturn:
    os.write(2, f"paddock-run: {reason}\n".encode("utf-8", "replace"))
    os._exit(NOT_RUN)


def parse(words: list[str]) -> tuple[int | None, list[str]]:
    most = None
    if words[:1] == ["--max-output"]:
        if len(words) < 2 or not words[1].isdigit():
            fail(USAGE)
        most, words = int(words[1]), words[2:]
    if words[:1] == ["--"]:
        words = words[1:]
    if not words or words[0].startswith("--"):
        fail(USAGE)
    return most, words


def request(line: _socket.socket, words: list[str], outputs: tuple[int, int]) -> None:
    descriptors = b"".join(one.to_bytes(4, sys.byteorder) for one in (0, *outputs))
    text = "\0".join((os.getcwd(), *words)).encode("utf-8", "surrogateescape")
    line.sendmsg([text], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, descriptors)])


def relay(line: _socket.socket, sources: dict[int, int], most: int) -> int:
    """Hand output on until all of it has ended, or one has given more than `most` bytes: then the command ends."""
    poll = select.poll()
    poll.register(line.fileno(), select.POLLIN)
    left = dict.fromkeys(sources, most)
    for source in sources:
        poll.register(source, select.POLLIN)
    code: int | None = None
    while left or code is None:
        for descriptor, _ in poll.poll():
            if descriptor == line.fileno():
                code = ended(line)
                poll.unregister(line.fileno())
                continue
            data = os.read(descriptor, 65536)
            kept = data[: left[descriptor]]
            while kept:
                kept = kept[os.write(sources[descriptor], kept) :]
            left[descriptor] -= len(data)
            if left[descriptor] < 0:
                os.write(2, f"paddock-run: ended after {most} bytes of output\n".encode())
                return 128 + int(_signal.SIGKILL)
            if not data:
                poll.unregister(descriptor)
                del left[descriptor]
    return code


def ended(line: _socket.socket) -> int:
    """The exit code of the command."""
    kind, _, words = line.recv(LONGEST_ANSWER).decode("utf-8", "replace").partition(" ")
    if kind == "refused":
        fail(words)
    if kind != "exit":
        fail(NO_ANSWER)
    return int(words)


def main() -> None:
    most, words = parse(sys.argv[1:])
    line = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    for number in PASSED_ON:
        if _signal.getsignal(number) != _signal.SIG_IGN:
            _signal.signal(number, lambda number, _: line.send(str(number).encode()))
    sources: dict[int, int] = {}
    outputs = (1, 2)
    if most is not None:
        (out, out_inside), (err, err_inside) = os.pipe(), os.pipe()
        sources, outputs = {out: 1, err: 2}, (out_inside, err_inside)
    try:
        line.connect("\0paddock-run")
        request(line, words, outputs)
    except ConnectionError:
        fail(NO_ANSWER)
    except OSError as error:
        fail(f"the command cannot be run in a sandbox of its own: {error.strerror}")
    for inside in outputs if sources else ():
        os.close(inside)
    try:
        code = relay(line, sources, most or 0)
    except ConnectionError:
        fail(NO_ANSWER)
    os._exit(code)


if __name__ == "__main__":
    main()
