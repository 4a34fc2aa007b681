"""Archives in parts: what is in them is stored once for all."""

import io
import os
import tarfile

import pytest

from paddock.errors import StoreError
from paddock.store import Store, archives, blobs
from paddock.store.outcome import Outcome
from paddock.store.record import RolloutRecord

LARGE = {"a/big": os.urandom(archives.SPLIT_BYTES), "other": os.urandom(archives.PART_BYTES)}


def pack(files: dict[str, bytes], time: float = 0) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as packed:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mtime = len(content), time
            packed.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


@pytest.mark.parametrize(
    "data",
    [
        pack({**LARGE, "small": b"x"}),
        pack({"one": LARGE["other"], "two": LARGE["other"], **LARGE}),
        pack(LARGE)[: -archives.SPLIT_BYTES // 2],
        pack({f"{number}": b"x" * 1000 for number in range(500)}),
        os.urandom(archives.SPLIT_BYTES),
        b"",
    ],
)
def test_data_is_read_as_it_was_stored(store: Store, data: bytes) -> None:
    digest = store.put_blob(data)
    assert store.put_blob(data) == digest
    assert store.get_blob(digest) == data


def test_archives_share_their_large_files(store: Store) -> None:
    def stored() -> int:
        return int(store.query(lambda each: each.execute("SELECT sum(length(data)) FROM blobs").fetchone()[0]))

    first = store.put_blob(pack(LARGE))
    before = stored()
    second = store.put_blob(pack({**LARGE, "more": b"x"}, time=1e9))
    assert first != second
    assert stored() - before < 2000
    assert store.query(blobs.stored_bytes, second) > archives.SPLIT_BYTES


def keep(store: Store, name: str, archive: bytes) -> None:
    record = RolloutRecord(name, "task", task_blob=store.put_blob(pack(LARGE, time=5)))
    store.begin(record)
    record.workdir_blob, record.outcome = store.put_blob(archive), Outcome.OK
    store.finish(record)


def test_a_part_stays_as_long_as_an_archive_needs_it(store: Store) -> None:
    archive = pack({**LARGE, "more": b"x"})
    keep(store, "one", pack(LARGE))
    keep(store, "two", archive)
    store.delete(["one"])
    record = store.get("two")
    assert record is not None
    assert record.workdir_blob is not None
    assert store.get_blob(record.workdir_blob) == archive
    store.delete(["two"])
    with pytest.raises(StoreError, match="no blob"):
        store.get_blob(record.workdir_blob)
    assert store.query(lambda each: each.execute("SELECT count(*) FROM blobs").fetchone()[0]) == 0
