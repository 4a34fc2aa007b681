"""A full disk: a small file system is really filled."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from paddock.errors import StoreError
from paddock.store import Store
from paddock.store.outcome import Outcome
from paddock.store.record import RolloutRecord
from paddock.store.retention import RESERVE_BYTES, Reserve

from .children import start

PREPARED = """
from pathlib import Path
folder = Path(folder)
reserve = folder / "reserve"
store = Store.open(folder)
assert reserve.stat().st_size == 1024 * 1024
def fill(write):
    for number in range(10_000):
        try:
            write(number)
        except StoreError as error:
            assert "no space is left" in error.message and error.hint and error.data["full"], error
            break
    try:
        with open(folder / "filler", "wb", buffering=0) as filler:
            while True:
                filler.write(b"x" * 4096)
    except OSError:
        return number
def noisy(number):
    return Call(f"c{number}", number, request={"messages": [{"c": os.urandom(9000).hex()}]})
"""
FINISH = """
for name in ("r-one", "r-two", "r-big"):
    store.begin(RolloutRecord(name, "task"))
written = fill(lambda number: store.save_call("r-one", noisy(number)))
log = os.urandom(100_000).hex()
assert reserve.exists()
for name in ("r-two", "r-one"):
    assert store.finish(RolloutRecord(name, "task", outcome=Outcome.OK, reward=1.0, agent_log=log))
    assert not reserve.exists()
    assert store.get(name).agent_log == log
assert len(store.calls("r-one")) == written > 100
huge = os.urandom(9_000_000).hex()
assert store.finish(RolloutRecord("r-big", "task", outcome=Outcome.OK, reward=0.5, agent_log=huge))
big = store.get("r-big")
assert (big.reward, big.agent_log, big.metadata) == (0.5, "", {"dropped_for_space": ["agent_log"]})
store.close()
store = Store.open(folder)
assert len(store.calls("r-one")) == written
print("done")
"""
PRUNE = """
def whole(number):
    name = f"r-{number:05}"
    store.begin(RolloutRecord(name, "task"))
    for place in range(5):
        store.save_call(name, noisy(place))
    store.finish(RolloutRecord(name, "task", outcome=Outcome.OK, finished_at=float(number)))
reserve.rename(folder / "kept")
written = fill(whole)
(folder / "kept").rename(reserve)
before = store.size_bytes()
pruned = store.prune(max_bytes=3_000_000)
assert store.size_bytes() <= 3_000_000 < before - 5_000_000, store.size_bytes()
left = [record.rollout_id for record in store.list(finished=True, newest_first=False, limit=1000)]
assert pruned.rollouts and pruned.rollouts[-1] < left[0]
assert len(store.calls(left[0])) == 5
(folder / "filler").unlink()
store.close()
Store.open(folder).close()
assert reserve.exists()
print("done")
"""


def small_disk() -> list[str] | None:
    """A command that runs another with 24 MiB mounted at `/mnt`, if this machine lets us."""
    mount = 'mount -t tmpfs -o size=24m none /mnt && exec "$@"'
    words = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, "sh"]
    if shutil.which("unshare") is None:
        return None
    probe = subprocess.run([*words, "true"], capture_output=True, timeout=10, check=False)
    return words if probe.returncode == 0 else None


@pytest.mark.parametrize("code", [FINISH, PRUNE], ids=["takes the outcome", "can be pruned"])
def test_a_full_disk_still(code: str) -> None:
    words = small_disk()
    if words is None:
        pytest.skip("a small file system cannot be mounted here")
    child = start(PREPARED + code, Path("/mnt/store"), before=words)
    output, _ = child.communicate(timeout=40)
    assert output == "done\n"


def test_a_store_that_may_not_grow_says_so_and_works_on(store: Store) -> None:
    store.begin(RolloutRecord("r-one", "task"))
    with store._database.autocommit() as connection:
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {pages + 2}")
    with pytest.raises(StoreError, match="no space is left") as caught:
        store.put_blob(os.urandom(50_000))
    assert "prune" in str(caught.value.hint)
    big = RolloutRecord("r-one", "task", outcome=Outcome.OK, verifier_stdout=os.urandom(50_000).hex())
    assert store.finish(big)
    stored = store.get("r-one")
    assert stored is not None
    assert stored.metadata == {"dropped_for_space": ["verifier_stdout"]}


def test_the_reserve_is_really_on_the_disk_and_taken_again_when_opened(tmp_path: Path) -> None:
    Store.open(tmp_path).close()
    reserve = Reserve(tmp_path)
    assert reserve.path.stat().st_blocks * 512 >= RESERVE_BYTES
    assert reserve.release()
    assert not reserve.release()
    Store.open(tmp_path).close()
    assert reserve.path.exists()
