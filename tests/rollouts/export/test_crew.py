"""Readers beside the one who writes: the same file, no reader left behind, and a reason when one breaks."""

import io
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from paddock.errors import StoreError
from paddock.rollouts.export import crew, parquet, stream
from paddock.rollouts.export.crew import Crew, is_found, portable, worth
from paddock.rollouts.export.policy import Policy
from paddock.rollouts.export.stream import Report, chosen, export, shape
from paddock.rollouts.record import RolloutRecord
from paddock.rollouts.store import Store
from rollouts.export.rollouts import conversation, forked, record

COUNT = 63
RUN = 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rollouts of several shapes; some are left out."""
    place = tmp_path_factory.mktemp("crew") / "store"
    with Store.open(place) as store:
        for number in range(COUNT):
            about = record(f"r{number:03}", reward=None if number % 9 == 0 else 0.5, started_at=float(number))
            outcome, about.outcome = about.outcome, None
            store.begin(about)
            for call in forked() if number % 4 == 0 else conversation(1 + number % 3):
                store.save_call(about.rollout_id, call)
            about.outcome = outcome
            store.finish(about)
    return place


@pytest.fixture(autouse=True)
def small_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "AT_ONCE", RUN)


def written(folder: Path, form: str, out: Path, readers: int) -> tuple[bytes, Report, int]:
    told: list[None] = []
    with Store.open(folder, read_only=True) as store:
        report = export(store, form, out, progress=lambda: told.append(None), readers=readers)
    return out.read_bytes(), report, len(told)


def children() -> list[int]:
    found = (path.read_text().split() for path in Path("/proc/self/task").glob("*/children"))
    return [int(each) for some in found for each in some]


# -- the same ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["trl", "jsonl", "atif"])
def test_lines_are_the_same_with_readers(folder: Path, tmp_path: Path, form: str) -> None:
    alone = written(folder, form, tmp_path / "alone", 0)
    assert written(folder, form, tmp_path / "beside", 2) == alone
    assert alone[1].seen == alone[2] == COUNT
    assert alone[1].left_out == {"it has no reward: it ended with ok": 7}


def test_parquet_is_the_same_with_readers(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrow = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(parquet, "ROW_GROUP_TOKENS", 500)
    alone = written(folder, "parquet", tmp_path / "alone", 0)
    assert written(folder, "parquet", tmp_path / "beside", 3) == alone
    file = arrow.ParquetFile(tmp_path / "beside")
    assert file.metadata.num_rows == alone[1].documents
    assert 1 < file.metadata.num_row_groups < COUNT // RUN


def test_parts_wait_with_the_readers_when_there_is_no_room(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crew, "AHEAD_BYTES", 0)
    assert written(folder, "trl", tmp_path / "beside", 3) == written(folder, "trl", tmp_path / "alone", 0)


@pytest.mark.parametrize(
    ("form", "place", "name"), [("trl", stream, "PART_BYTES"), ("parquet", parquet, "PART_TOKENS")]
)
def test_large_rollouts_come_in_more_parts(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, place: Any, name: str
) -> None:
    if form == "parquet":
        pytest.importorskip("pyarrow")
    whole = written(folder, form, tmp_path / "whole", 0)
    monkeypatch.setattr(place, name, 60)
    with Store.open(folder, read_only=True) as store:
        assert len(list(shape(store, form, chosen(store)[:RUN], Policy()))) > 1
    parts = written(folder, form, tmp_path / "parts", 0)
    assert parts[1:] == whole[1:]
    if form == "trl":
        assert parts[0] == whole[0]


class Own(Policy):
    def refuses(self, record: RolloutRecord) -> str | None:
        return "nothing is good enough"


def test_readers_are_for_many_rollouts_and_plain_policies(folder: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    with Store.open(folder, read_only=True) as store:
        assert worth(store, crew.MANY - 1, Policy()) == 0
        assert worth(store, crew.MANY, Policy(weights="newest")) == (
            min(cores, crew.MOST_READERS) if cores > 1 else 0
        )
        assert worth(store, crew.MANY, Own()) == 0


def test_a_store_that_others_would_not_find_is_read_alone(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    with Store.open("store", read_only=True) as store:
        assert is_found(store)
        monkeypatch.chdir(tmp_path)
        assert not is_found(store)
        Store.open("store").close()
        assert not is_found(store)


# -- what breaks ------------------------------------------------------------------------------------


@pytest.fixture
def broken(folder: Path, tmp_path: Path) -> Path:
    """A copy whose rollout r025 cannot be read."""
    copy = tmp_path / "broken"
    copy.mkdir()
    with sqlite3.connect(folder / "store.db") as source, sqlite3.connect(copy / "store.db") as target:
        source.backup(target)
        target.execute("UPDATE rollouts SET head = x'00ff' WHERE rollout_id = 'r025'")
    source.close()
    target.close()
    return copy


def test_an_error_in_a_reader_is_raised_as_without_one(broken: Path) -> None:
    raised, lines = [], []
    for readers in (0, 2):
        out = io.BytesIO()
        with Store.open(broken, read_only=True) as store, pytest.raises(Exception) as caught:  # noqa: PT011
            export(store, "trl", out, readers=readers)
        raised.append((caught.type, str(caught.value)))
        lines.append(out.getvalue())
    assert raised[0] == raised[1]
    assert lines[0] == lines[1]
    assert json.loads(lines[0].splitlines()[-1])["rollout_id"] == "r019"


def test_a_store_that_cannot_be_opened_is_said(tmp_path: Path) -> None:
    with (
        Crew(2, tmp_path / "nowhere", "trl", Policy()) as readers,
        pytest.raises(StoreError, match="there is no store"),
    ):
        list(readers.parts([[1], [2]]))


def test_a_reader_that_is_killed_is_said(folder: Path) -> None:
    with Crew(2, folder, "trl", Policy()) as readers:
        readers.readers[1].process.kill()
        with pytest.raises(StoreError, match=r"ended with signal 9") as caught:
            list(readers.parts([[1], [2]]))
    assert caught.value.hint


def test_the_last_words_of_a_reader_are_told(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "orjson.py").write_text("raise RuntimeError('made to break')")
    monkeypatch.syspath_prepend(tmp_path)
    with (
        Crew(1, folder, "trl", Policy()) as readers,
        pytest.raises(StoreError, match="ended with exit code 1: RuntimeError: made to break"),
    ):
        list(readers.parts([[1]]))


def test_a_reader_that_cannot_be_started_is_said(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    with pytest.raises(StoreError, match="could be started"), Crew(2, folder, "trl", Policy()):
        pass


def test_an_error_that_cannot_be_sent_is_told_in_words() -> None:
    class Local(Exception):
        pass

    told = portable(Local("so it is"))
    assert isinstance(told, StoreError)
    assert str(told) == "Local: so it is"


# -- none is left -----------------------------------------------------------------------------------


def test_readers_end_with_an_error_of_the_writer(folder: Path) -> None:
    seen: list[int] = []

    def stop() -> None:
        seen.extend(children())
        raise RuntimeError("enough")

    with Store.open(folder, read_only=True) as store, pytest.raises(RuntimeError, match="enough"):
        export(store, "trl", io.BytesIO(), progress=stop, readers=2)
    assert len(seen) >= 2
    assert not set(seen) & set(children())


SCRIPT = """
import io, os, signal, sys, time
from pathlib import Path
from paddock.rollouts.export.stream import export
from paddock.rollouts.store import Store

# Whoever starts the tests in the background may have left it ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)

def wait():
    print(Path(f"/proc/self/task/{os.getpid()}/children").read_text().strip(), flush=True)
    # Not one long wait: a signal that comes right before it would be over when it begins.
    while True:
        time.sleep(0.05)

with Store.open(sys.argv[1], read_only=True) as store:
    export(store, "trl", io.BytesIO(), progress=wait, readers=2)
"""
"""What a user may write: without a guard against being imported."""


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_readers_end_with_the_process_that_started_them(folder: Path, tmp_path: Path, sent: signal.Signals) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, str(script), str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        readers = [int(each) for each in process.stdout.readline().split()]
        assert len(readers) == 2
        assert all(is_alive(each) for each in readers)
        if sent is signal.SIGINT:
            # As a terminal does: to all of them.
            os.killpg(process.pid, sent)
        else:
            process.send_signal(sent)
        said, errors = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == -sent
    assert said == ""
    assert errors.count("Traceback") == (1 if sent is signal.SIGINT else 0)
    deadline = time.monotonic() + 30
    while sent is signal.SIGKILL and any(map(is_alive, readers)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(is_alive, readers))


def test_an_interrupt_does_not_reach_readers(folder: Path) -> None:
    with Crew(1, folder, "trl", Policy()) as readers:
        readers.readers[0].process.send_signal(signal.SIGINT)
        assert [part.report.seen for part in readers.parts([[1], [2, 3]])] == [1, 2]


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
