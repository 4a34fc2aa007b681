"""A few processes that read a store and shape its rollouts side by side. What a part is they do not know.

Each opens the store by itself, and only to read it. It gets runs of keys over a socket and sends back their parts;
when the socket ends it ends too, so none outlives the process that started it, however that went.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import traceback
from collections import deque
from contextlib import ExitStack, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

from paddock.errors import PaddockError, StoreError
from paddock.rollouts.export.policy import Policy
from paddock.rollouts.export.stream import Part, Report, shape
from paddock.rollouts.store import Store

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MANY = 1000
"""Rollouts from which on a crew is worth its start."""
MOST_READERS = 4
"""More than these shape faster than one process can write."""
RUNS_AHEAD = 2
"""Runs of keys that a reader has at a time, so that it need not wait for the next."""
AHEAD_BYTES = 32_000_000
"""Parts that are held before their turn. Beyond this, readers wait with theirs."""
ENDING_SECONDS = 5.0
OBJECTS = 200_000
"""Objects that a reader makes before Python's collector looks at them: many, but few outlive one run."""


def worth(store: Store, rollouts: int, policy: Policy) -> int:
    """How many readers pay for so many rollouts; 0 if they do not, or could not do the same."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if rollouts < MANY or cores < 2 or not sys.executable:
        return 0
    # A class of someone else's cannot be sent to a process that does not import it.
    return min(cores, MOST_READERS) if type(policy) is Policy and is_found(store) else 0


def is_found(store: Store) -> bool:
    """Would a new process find the same store? Not if its folder was named relative to one that has been left."""
    file = store.ask(lambda connection: connection.execute("PRAGMA database_list").fetchone()[2])
    try:
        return (store.path / "store.db").samefile(file)
    except OSError:
        return False


class Reader:
    """One of the processes, seen from the one that started it."""

    def __init__(self, folder: Path, errors: IO[bytes]) -> None:
        self._folder = folder
        self._errors = errors
        self.held: deque[Part | Exception | None] = deque()
        """What it sent, in order; None ends a run, and after an error it sends nothing more."""
        self.line, theirs = Pipe()
        # It can import what can be imported here, and nothing else that happens to lie in the current folder.
        places = os.pathsep.join(str(Path(place).absolute()) for place in sys.path)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(theirs.fileno())],
                env={**os.environ, "PYTHONPATH": places},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                pass_fds=[theirs.fileno()],
            )

    @property
    def is_open(self) -> bool:
        return not (self.held and isinstance(self.held[-1], Exception))

    @property
    def held_bytes(self) -> int:
        return sum(len(each.data) for each in self.held if isinstance(each, Part))

    def ask(self, question: object) -> None:
        # One that has ended is noticed where its answer is waited for.
        with suppress(ConnectionError):
            self.line.send(question)

    def take(self) -> None:
        """One thing that it has sent. Raises StoreError if it has ended instead."""
        try:
            told = self.line.recv()
            self.held.append(Part(self.line.recv_bytes(), told) if isinstance(told, Report) else told)
        except (EOFError, OSError) as error:
            raise self._ended() from error

    def _ended(self) -> StoreError:
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(ENDING_SECONDS)
        code = self.process.returncode
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip().rpartition("\n")[2]
        return StoreError(
            f"a process that read the store {self._folder} ended with {how}" + (f": {said}" if said else ""),
            hint="see whether memory ran out, then try again",
        )

    def end(self) -> None:
        """At once. It only reads, so nothing is lost."""
        self.line.close()
        self.process.kill()
        self.process.wait()


class Crew:
    """Readers of one store, from `with` to the end of it."""

    def __init__(self, size: int, folder: Path, form: str, policy: Policy) -> None:
        self._size = size
        self._folder = folder
        self._about = (folder, form, policy)
        self._stack = ExitStack()
        self.readers: list[Reader] = []

    def __enter__(self) -> Crew:
        try:
            self._start()
        except OSError as error:
            self._stack.close()
            raise StoreError(
                f"no process to read the store {self._folder} could be started: {error}",
                hint="see whether processes, memory or open files ran out",
            ) from error
        except BaseException:
            self._stack.close()
            raise
        return self

    def _start(self) -> None:
        # An interrupt waits until all are known here. Held back for them from the start, it never reaches them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for _ in range(self._size):
                errors = self._stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - the stack closes it
                reader = Reader(self._folder, errors)
                self._stack.callback(reader.end)
                self.readers.append(reader)
                reader.ask(self._about)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def parts(self, runs: Sequence[Sequence[int]]) -> Iterator[Part]:
        """The parts of each run of keys, in order. An error comes where its part would have come."""
        for number, run in enumerate(runs[: RUNS_AHEAD * self._size]):
            self._reader(number).ask(run)
        for number in range(len(runs)):
            reader = self._reader(number)
            while (part := self._next(reader)) is not None:
                yield part
            following = number + RUNS_AHEAD * self._size
            if following < len(runs):
                reader.ask(runs[following])

    def _reader(self, number: int) -> Reader:
        return self.readers[number % self._size]

    def _next(self, reader: Reader) -> Part | None:
        while not reader.held:
            self._receive(reader)
        found = reader.held.popleft()
        if isinstance(found, Exception):
            raise found
        return found

    def _receive(self, wanted: Reader) -> None:
        """Wait for something from `wanted`, and take what others have while there is room for it."""
        room = sum(reader.held_bytes for reader in self.readers) < AHEAD_BYTES
        heard = [reader for reader in self.readers if reader.is_open] if room else [wanted]
        ready = wait([reader.line for reader in heard])
        for reader in heard:
            if reader.line in ready:
                reader.take()


# -- in each of the processes -----------------------------------------------------------------------


def main(descriptor: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.set_threshold(OBJECTS)
    with Connection(descriptor) as line, suppress(EOFError, ConnectionError):
        try:
            serve(line)
        except (EOFError, ConnectionError):
            raise
        except Exception as error:
            line.send(portable(error))


def serve(line: Connection) -> None:
    """Answer until there are no more questions, which is an EOFError."""
    folder, form, policy = cast("tuple[Path, str, Policy]", line.recv())
    with Store.open(folder, read_only=True) as store:
        while True:
            for part in shape(store, form, line.recv(), policy):
                line.send(part.report)
                line.send_bytes(part.data)
            line.send(None)


def portable(error: Exception) -> Exception:
    """The error, or one of ours that says the same if it cannot be sent."""
    if not isinstance(error, PaddockError):
        error.add_note("".join(traceback.format_exception(error)))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return StoreError(f"{type(error).__name__}: {error}")
    return error


if __name__ == "__main__":
    main(int(sys.argv[1]))
