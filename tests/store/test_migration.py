"""A store of version 1 is brought up to date where it lies, wholly or not at all; read-only it is read as it is."""

import sqlite3
from pathlib import Path

import pytest
import zstandard

from paddock.capture.trace import Call, sent_temperature
from paddock.store import Store, bulk_read, partial_read, rows, search
from paddock.store.outcome import Outcome
from paddock.store.packing import compress, decode, decompress, encode
from paddock.store.record import RolloutRecord
from paddock.store.schema import SCHEMA
from paddock.store.search import Search

from .children import go, running, start

OLD = Path(__file__).parents[1] / "data" / "store_v1.db.zst"
NAMES = ("r-old-0", "r-old-1", "r-old-2", "r-old-3")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "store.db").write_bytes(zstandard.ZstdDecompressor().decompress(OLD.read_bytes()))
    return tmp_path


def version(folder: Path) -> int:
    connection = sqlite3.connect(folder / "store.db")
    version_number = connection.execute("PRAGMA user_version").fetchone()[0]
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    connection.close()
    assert ("figures" in tables) == (version_number == SCHEMA.version)
    return int(version_number)


def everything(store: Store) -> list[object]:
    records = list(store.list(newest_first=False))
    traces = [(store.calls(each.rollout_id), store.events(each.rollout_id)) for each in records]
    searched = store.query(search.by_task, Search())
    heads = [store.query(partial_read.heads, store.query(rows.find, each.rollout_id)) for each in records]
    return [records, traces, searched, heads]


def test_an_old_store_can_be_read_without_being_touched(folder: Path) -> None:
    before = (folder / "store.db").read_bytes()
    with Store.open(folder, read_only=True) as store:
        assert not store.is_current
        assert [record.rollout_id for record in store.list(newest_first=False)] == [*NAMES]
        call = store.calls("r-old-0")[1]
        assert call.tokens == ["a1", "b1", "end"]
        assert call.top_logprobs[0] == {"a1": -0.1, "x": -2.0}
        assert store.query(search.count, Search(words="broke")) == 2
        head = store.query(partial_read.head, store.query(rows.find, "r-old-0"), "c1")
        assert head is not None
        assert (head.prompt_tokens, head.completion_tokens) == (8, 3)
        assert head.logprob_sum == pytest.approx(sum(call.logprobs))
    assert (folder / "store.db").read_bytes() == before
    assert version(folder) == 1


def test_a_reader_of_an_old_store_sees_what_its_owner_still_writes(folder: Path) -> None:
    with Store.open(folder, read_only=True) as reader:
        assert reader.query(search.count, Search()) == 4
        connection = sqlite3.connect(folder / "store.db")
        connection.execute("DELETE FROM rollouts WHERE rollout_id = 'r-old-0'")
        connection.commit()
        connection.close()
        assert reader.query(search.count, Search()) == 3


def test_migrating_keeps_everything(folder: Path) -> None:
    with Store.open(folder, read_only=True) as old:
        before = everything(old)
    with Store.open(folder) as store:
        assert store.is_current
        assert everything(store) == before
        assert list(store.query(search.page, Search(), sort="reward", limit=9)) == [1, 2, 4, 3]
        [task, other] = store.query(search.by_task, Search())
        assert (task.task_id, task.rewards.scored, task.rewards.total) == ("task-0", 1, 1.0)
        assert other.outcomes == {"timeout": 1, search.RUNNING: 1}
    assert version(folder) == SCHEMA.version


def test_a_migrated_rollout_goes_on(folder: Path) -> None:
    with Store.open(folder) as store:
        record = store.get("r-old-3")
        assert record is not None
        call = store.calls("r-old-3")[2]
        call.id, call.index, call.tokens = "c3", 3, ["new", "ones", "here"]
        store.save_call("r-old-3", call)
        record.outcome, record.reward = Outcome.OK, 0.5
        assert store.finish(record)
        assert [each.tokens[0] for each in store.calls("r-old-3")] == ["a0", "a1", "a2", "new"]
        assert store.query(search.count, Search(outcomes=("ok",))) == 2


def test_a_migration_that_breaks_leaves_the_old_store(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(connection: sqlite3.Connection) -> None:
        connection.execute("DELETE FROM rollouts")
        raise RuntimeError("broke half-way")

    with monkeypatch.context() as patched:
        patched.setattr(search, "rebuild", broken)
        with pytest.raises(RuntimeError):
            Store.open(folder)
    assert version(folder) == 1
    with Store.open(folder) as store:
        assert store.count() == 4


def test_a_migration_that_is_killed_leaves_the_old_store(folder: Path) -> None:
    code = """
from paddock.store import search
rebuild = search.rebuild
def killed(connection):
    rebuild(connection)
    os._exit(9)
search.rebuild = killed
Store.open(folder)
"""
    child = start(code, folder)
    child.communicate(timeout=30)
    assert child.returncode == 9
    assert version(folder) == 1
    with Store.open(folder) as store:
        assert store.query(search.count, Search()) == 4


def test_several_processes_may_migrate_at_once(folder: Path) -> None:
    code = "ready(); s = Store.open(folder); s.begin(RolloutRecord(f'r-{os.getpid()}', 'task')); s.close()"
    with running(code, folder, count=3) as children:
        go(children)
    with Store.open(folder) as store:
        assert store.query(search.count, Search()) == store.count() == 7


def test_calls_of_version_4_are_no_copies(tmp_path: Path) -> None:
    with Store.open(tmp_path) as store:
        store.begin(RolloutRecord("r-four", "task"))
        store.save_call("r-four", Call("c0", 0, prompt_token_ids=[1], completion_token_ids=[2], token_problem="x"))
    connection = sqlite3.connect(tmp_path / "store.db")
    (brief,) = connection.execute("SELECT brief FROM calls").fetchone()
    connection.execute("UPDATE calls SET brief = ?", (encode(decode(brief)[:-2]),))
    connection.execute("PRAGMA user_version = 4")
    connection.commit()
    connection.close()
    with Store.open(tmp_path, read_only=True) as store:
        [(_, [sampled])] = store.query(bulk_read.read, [1])
        assert (sampled.token_problem, sampled.replayed_from, sampled.is_copy) == ("x", None, False)


def test_calls_of_before_have_no_caller_and_the_temperature_that_was_sent(tmp_path: Path) -> None:
    with Store.open(tmp_path) as store:
        store.begin(RolloutRecord("r-two", "task"))
        sent = {"temperature": 0.5}
        store.save_call("r-two", Call("c0", 0, prompt_token_ids=[1], completion_token_ids=[2], forwarded=sent))
    connection = sqlite3.connect(tmp_path / "store.db")
    head, brief = connection.execute("SELECT head, brief FROM calls").fetchone()
    since_3 = ("caller", "caller_reason", "logprobs_kind", "token_problem")
    since_5 = ("replayed_from", "is_copy")
    names = ("temperature", *since_3, *since_5)
    added = len(since_3) + len(since_5)
    values = {name: value for name, value in decode(decompress(head)).items() if name not in names}
    connection.execute(
        "UPDATE calls SET head = ?, brief = ?", (compress(encode(values)), encode(decode(brief)[:-added]))
    )
    connection.execute("PRAGMA user_version = 2")
    connection.commit()
    connection.close()
    with Store.open(tmp_path, read_only=True) as store:
        assert not store.is_current
        [whole] = store.calls("r-two")
        [(_, [sampled])] = store.query(bulk_read.read, [1])
        for call in (whole, sampled):
            assert (call.caller, call.logprobs_kind, sent_temperature(call)) == ("unknown", "unknown", 0.5)
    with Store.open(tmp_path):
        assert version(tmp_path) == SCHEMA.version


def test_figures_follow_every_change(tmp_path: Path) -> None:
    with Store.open(tmp_path) as store:
        record = RolloutRecord("r-one", "task", started_at=5.0)
        store.begin(record)
        begun = store.query(search.latest_change)
        store.update(record)
        key = store.query(rows.find, "r-one")
        assert [changed for changed, _ in store.query(search.changed_since, begun, 10)] == [key]
        record.call_count, record.prompt_tokens = 3, 70
        store.update(record)
        assert store.query(search.count, Search(running=True)) == 1
        record.outcome, record.reward, record.finished_at = Outcome.OK, 1.0, 9.0
        store.finish(record)
        assert store.query(search.count, Search(running=True)) == 0
        [task] = store.query(search.by_task, Search(min_reward=0.5))
        assert (task.prompt_tokens, task.wall_sum, task.rewards.passed) == (70, 4.0, 1)
        store.prune(max_age_seconds=0)
        assert store.query(search.count, Search()) == 0


def test_the_indexes_of_version_3_are_dropped(tmp_path: Path) -> None:
    Store.open(tmp_path).close()
    connection = sqlite3.connect(tmp_path / "store.db")
    connection.execute("CREATE INDEX rollouts_listed ON rollouts (started_at)")
    connection.execute("PRAGMA user_version = 3")
    connection.commit()
    connection.close()
    with Store.open(tmp_path) as store:
        names = store.query(lambda opened: [row[1] for row in opened.execute("PRAGMA index_list(rollouts)")])
    assert "rollouts_listed" not in names
    assert version(tmp_path) == SCHEMA.version


def test_rollouts_of_version_8_get_their_weight_version_and_are_searchable(tmp_path: Path) -> None:
    with Store.open(tmp_path) as store:
        record = RolloutRecord("r-eight", "task", instruction="Find the needle.", started_at=1.0)
        store.begin(record)
        store.save_call("r-eight", Call("c0", 0, prompt_token_ids=[1], completion_token_ids=[2], weight_version="7"))
        record.outcome = Outcome.OK
        store.finish(record)
    connection = sqlite3.connect(tmp_path / "store.db")
    for table in ("tags", "transcripts", "transcript_index"):
        connection.execute(f"DROP TABLE {table}")
    connection.execute("PRAGMA user_version = 8")
    connection.commit()
    connection.close()
    with Store.open(tmp_path, read_only=True) as store:
        assert store.query(search.count, Search(words="r-eight")) == store.count(task_id="task") == 1
        assert store.count(tag="none") == store.query(search.count, Search(words="needle")) == 0
    with Store.open(tmp_path) as store:
        assert store.query(search.count, Search(weights="7")) == 1
        store.index_transcripts()
        assert store.query(search.count, Search(words="needle")) == 1
