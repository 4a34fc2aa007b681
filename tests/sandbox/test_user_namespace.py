"""Which ids a sandbox on an image has, and how programs of ours act with them."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paddock.errors import SandboxError
from paddock.sandbox import user_namespace
from paddock.sandbox.user_namespace import Identity, IdRange, call_in_namespace, find_identity, run_in_namespace
from sandbox.places import is_gone, needs_bwrap, wait_until

pytestmark = needs_bwrap


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that the tests start find the functions of this module."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))


OWN = (user_namespace.NOBODY,) * 2 if os.geteuid() == 0 else (os.geteuid(), os.getegid())
SINGLE = Identity("single", (IdRange(0, OWN[0], 1),), (IdRange(0, OWN[1], 1),), "chosen by the test")


@pytest.mark.parametrize("identity", [None, SINGLE], ids=["best", "single"])
def test_a_program_is_root_in_its_namespace(identity: Identity | None) -> None:
    assert run_in_namespace(["id", "-u"], identity, timeout=20) == b"0\n"


def test_files_belong_to_the_ids_that_the_identity_names(tmp_path: Path) -> None:
    identity = find_identity()
    if identity.kind == "single":
        pytest.skip(identity.reason)
    owner, group = identity.host_uid(0), identity.host_gid(0)
    assert owner is not None
    assert group is not None
    os.chown(tmp_path, owner, group)
    folder = os.open(tmp_path, os.O_RDONLY)
    output = call_in_namespace("sandbox.inside_namespace:report_owner", [str(folder)], pass_fds=[folder], timeout=20)
    os.close(folder)
    assert output == b"0 0 33 34\n"
    status = (tmp_path / "file").stat()
    assert (status.st_uid, status.st_gid) == (identity.host_uid(33), identity.host_gid(34))


@pytest.mark.parametrize(
    ("inside", "outside"), [(0, 1001), (1, 100000), (65535, 165534), (65536, 165535), (65537, None)]
)
def test_an_ordinary_user_is_root_itself_and_has_the_range_for_the_others(inside: int, outside: int | None) -> None:
    ranges = (IdRange(0, 1001, 1), IdRange(1, 100000, 65536))
    assert Identity("range", ranges, ranges).host_uid(inside) == outside


def test_a_single_id_owns_everything() -> None:
    assert {SINGLE.host_uid(number) for number in (0, 33, 100000)} == {OWN[0]}


def test_a_failure_names_what_failed_and_why() -> None:
    with pytest.raises(SandboxError, match="sh failed in a user namespace: no space left"):
        run_in_namespace(["sh", "-c", "echo no space left >&2; exit 3"], timeout=20)


def test_a_program_that_takes_too_long_is_killed() -> None:
    started = time.monotonic()
    with pytest.raises(SandboxError, match="did not end within 1 s"):
        run_in_namespace(["sleep", "60"], timeout=1)
    assert time.monotonic() - started < 20


def test_a_call_ends_with_the_process_that_started_it() -> None:
    script = (
        "import sys; from paddock.sandbox.user_namespace import start_in_namespace as start;"
        "print(start('sandbox.inside_namespace:wait_long').pid, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        assert not is_gone(pid)
        owner.kill()
    wait_until(lambda: is_gone(pid), 10)
