import gzip
import io
import shutil
import tarfile
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from paddock.errors import TaskError
from paddock.retry import Backoff
from paddock.tasks.datasets.packages import archive as archives
from paddock.tasks.datasets.packages import connection
from paddock.tasks.datasets.resolve import SetOptions
from paddock.tasks.taskset import TASK_SET, is_task_set, load_tasks
from tasks.datasets.package_stores import API_KEY, KEY, OK, TOKEN, Files, Store, archive_of, serve_store
from tasks.datasets.repositories import serve

if TYPE_CHECKING:
    from email.message import Message

ONE: Files = {
    "task.toml": '[task]\nname = "acme/one"\n',
    "instruction.md": "Do one.",
    "tests/test.sh": "echo 1 > /logs/verifier/reward.txt",
    "tests/sub/b": "1",
    "tests/sub-a": b"\xff\0",
}
TWO = {"instruction.md": "Do two.", "README.md": "Two.", "environment/Dockerfile": "FROM scratch"}


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    store = Store()
    digests = {"acme/one": store.publish_task("acme/one", ONE), "acme/two": store.publish_task("acme/two", TWO)}
    store.publish_dataset("acme/sums", digests, ("1.0",))
    monkeypatch.setattr(connection, "BACKOFF", Backoff(first_seconds=0.001, attempts=4))
    with serve_store(store) as url:
        monkeypatch.setenv("PADDOCK_PACKAGE_STORE", f"{url}/")
        monkeypatch.setenv("PADDOCK_PACKAGE_STORE_KEY", KEY)
        yield store


def instructions(spec: str, **options: Any) -> list[str]:
    return [task.instruction for task in load_tasks(spec, SetOptions(**options))]


def test_a_dataset_is_fetched_from_the_store(store: Store) -> None:
    assert is_task_set("acme/sums")
    one, two = load_tasks("acme/sums@1.0")
    # A task without a name in its task.toml is called by its folder.
    assert [one.id, two.id] == ["acme/one", "two"]
    assert one.tests["sub-a"] == b"\xff\0"
    dataset, package = store.find("dataset", "acme/sums", "1.0"), store.find("task", "acme/one", "latest")
    assert dataset is not None
    assert package is not None
    origin = one.metadata[TASK_SET]
    assert origin["set"] == "acme/sums@1.0"
    assert origin["digest"] == f"sha256:{dataset['content_hash']}"
    assert origin["package"] == f"acme/one@sha256:{package['content_hash']}"


def test_programs_stay_executable(store: Store) -> None:
    (one, _) = load_tasks("acme/sums")
    assert Path(one.source, "tests/test.sh").stat().st_mode & 0o777 == 0o755
    assert Path(one.source, "instruction.md").stat().st_mode & 0o777 == 0o644


def test_tags_numbers_and_digests_name_a_version(store: Store) -> None:
    first = store.find("dataset", "acme/sums", "1")
    assert first is not None
    digest = store.publish_task("acme/one", {"instruction.md": "Do the new one."})
    store.publish_dataset("acme/sums", {"acme/one": digest}, ("2.0",))
    old, new = ["Do one.", "Do two."], ["Do the new one."]
    for reference in ("1.0", "1", f"sha256:{first['content_hash']}"):
        assert instructions(f"acme/sums@{reference}") == old
    for spec in ("acme/sums", "acme/sums@latest", "acme/sums@2.0", "acme/sums@2"):
        assert instructions(spec) == new


def test_one_task_is_a_set_too(store: Store) -> None:
    assert instructions("acme/two@latest") == ["Do two."]
    assert instructions("acme/two@1") == ["Do two."]


def test_the_cache_needs_no_store_until_it_is_asked_again(store: Store) -> None:
    assert instructions("acme/sums") == ["Do one.", "Do two."]
    count = store.requests.total()
    store.publish_dataset("acme/sums", {"acme/two": store.publish_task("acme/two", {"instruction.md": "New."})})
    assert instructions("acme/sums") == ["Do one.", "Do two."]
    assert store.requests.total() == count
    assert instructions("acme/sums", refresh=True) == ["New."]


def test_many_tasks_are_fetched_once_each(store: Store) -> None:
    tasks = {f"acme/t{n}": store.publish_task(f"acme/t{n}", {"instruction.md": f"Do {n}."}) for n in range(40)}
    store.publish_dataset("acme/many", tasks)
    lines: list[str] = []
    assert sorted(instructions("acme/many", log=lines.append)) == sorted(f"Do {n}." for n in range(40))
    assert {count for path, count in store.requests.items() if path.endswith("dist.tar.gz")} == {1}
    assert lines[0].startswith("fetching 40 of 40 tasks from http://127.0.0.1:")
    assert lines[-1] == "fetched 40 of 40 tasks"


def test_long_datasets_are_read_page_by_page(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    # A store may send fewer rows than it is asked for.
    monkeypatch.setattr(connection, "PAGE_ROWS", 3)
    store.most_rows = 2
    tasks = {f"acme/t{n}": store.publish_task(f"acme/t{n}", {"instruction.md": f"Do {n}."}) for n in range(4)}
    store.publish_dataset("acme/many", tasks)
    assert instructions("acme/many") == [f"Do {n}." for n in range(4)]


def test_requests_that_may_succeed_later_are_repeated(store: Store) -> None:
    # The last one ends within an archive.
    store.failures = [(503, False), (200, True), OK, (503, True), OK, OK, (200, True)]
    assert instructions("acme/one") == ["Do one."]
    assert store.failures == []
    store.failures = [(503, False)] * 9
    with pytest.raises(TaskError, match="answered 503: out of order") as caught:
        instructions("acme/one", refresh=True)
    assert KEY not in str(caught.value)
    assert "\x1b" not in str(caught.value)
    assert len(store.failures) == 5


def test_the_pause_is_what_the_store_asks_for(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float | None] = []

    class Recorded(Backoff):
        def pause(self, attempt: int, retry_after: float | None = None, *, is_startup: bool = False) -> float:
            pauses.append(retry_after)
            return 0.0

    monkeypatch.setattr(connection, "BACKOFF", Recorded())
    store.failures = [(429, False), (503, False)]
    assert instructions("acme/one") == ["Do one."]
    assert pauses == [0.02, None]


def test_a_failure_ends_slow_downloads(store: Store, cache: Path) -> None:
    store.slow = {"acme/one"}
    store.archives[next(path for path in store.archives if "acme/two" in path)] = b"broken"
    began = time.monotonic()
    with pytest.raises(TaskError, match="acme/two"):
        load_tasks("acme/sums")
    # The slow one would take 20 s.
    assert time.monotonic() - began < 10
    assert not list(cache.rglob("*.partial"))


def test_a_proxy_does_not_see_requests_to_this_machine(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert instructions("acme/one") == ["Do one."]


def test_what_was_fetched_before_a_failure_is_kept(store: Store, cache: Path) -> None:
    assert instructions("acme/one") == ["Do one."]
    store.archives[next(path for path in store.archives if "acme/two" in path)] = b"broken"
    with pytest.raises(TaskError, match="acme/two: the archive cannot be decompressed"):
        load_tasks("acme/sums")
    store.publish_task("acme/two", TWO)
    assert instructions("acme/sums") == ["Do one.", "Do two."]
    assert store.requests[next(path for path in store.requests if "acme/one" in path)] == 1
    assert not list(cache.rglob("*.partial")) + list(cache.rglob("*.tar.gz"))


def test_private_packages_need_an_api_key(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.private.add("acme/sums")
    with pytest.raises(TaskError, match="no package acme/sums") as caught:
        load_tasks("acme/sums@1.0")
    assert "HARBOR_API_KEY" in str(caught.value.hint)
    monkeypatch.setenv("HARBOR_API_KEY", "another")
    with pytest.raises(TaskError, match="no token for HARBOR_API_KEY"):
        load_tasks("acme/sums@1.0")
    monkeypatch.setenv("HARBOR_API_KEY", API_KEY)
    assert instructions("acme/sums@1.0") == ["Do one.", "Do two."]


def test_another_token_is_asked_for_when_one_has_expired(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARBOR_API_KEY", API_KEY)
    store.tokens = ["expired", TOKEN]
    assert instructions("acme/sums") == ["Do one.", "Do two."]
    store.tokens = ["expired"]
    with pytest.raises(TaskError, match="answered 401") as caught:
        instructions("acme/sums", refresh=True)
    assert "HARBOR_API_KEY" in str(caught.value.hint)


def test_an_api_key_is_not_sent_without_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PADDOCK_PACKAGE_STORE", "http://store.example")
    monkeypatch.setenv("PADDOCK_PACKAGE_STORE_KEY", KEY)
    monkeypatch.setenv("HARBOR_API_KEY", API_KEY)
    with pytest.raises(TaskError, match=r"HARBOR_API_KEY would be sent to http://store\.example without TLS"):
        load_tasks("acme/sums@1.0")


def test_another_host_gets_neither_the_key_nor_the_token(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARBOR_API_KEY", API_KEY)
    received: list[Message] = []

    class Archives(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            received.append(self.headers)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(store.archives[self.path.removeprefix("/")])

        def log_message(self, *_: Any) -> None:
            pass

    with serve(Archives) as url:
        store.archives_elsewhere = url
        assert instructions("acme/sums") == ["Do one.", "Do two."]
    assert len(received) == 2
    for headers in received:
        assert not {KEY, TOKEN, f"Bearer {TOKEN}"} & set(headers.values())


def test_the_same_host_gets_the_key_after_a_redirect(store: Store) -> None:
    store.archives_elsewhere = "/elsewhere"
    assert instructions("acme/sums") == ["Do one.", "Do two."]


def test_a_redirect_to_another_protocol_is_refused(store: Store) -> None:
    store.archives_elsewhere = "ftp://127.0.0.1:9"
    with pytest.raises(TaskError, match="answered 302"):
        load_tasks("acme/sums")


def test_another_version_than_the_digest_is_refused(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    find = store.find
    monkeypatch.setattr(store, "find", lambda kind, name, reference: find(kind, name, "latest"))
    for name in ("acme/sums", "acme/one"):
        with pytest.raises(TaskError, match=rf"gave sha256:\w+ for {name}@sha256:0000"):
            load_tasks(f"{name}@sha256:{'0' * 64}")


def test_a_file_is_no_package(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "acme").mkdir()
    (tmp_path / "acme/sums").write_text("class Env: ...")
    monkeypatch.chdir(tmp_path)
    assert not is_task_set("acme/sums")
    assert is_task_set("acme/sums@1.0") is True


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("acme/nothing@1.0", "no package acme/nothing"),
        ("acme/sums@9.9", "acme/sums has no version '9.9'"),
        ("acme/one@9.9", "acme/one has no version '9.9'"),
        ("acme/sums@sha256:123", "not a whole digest"),
        (f"acme/sums@sha256:{'0' * 64}", "has no version"),
    ],
)
def test_an_unknown_package_is_an_error_with_a_hint(store: Store, spec: str, says: str) -> None:
    with pytest.raises(TaskError, match=says) as caught:
        load_tasks(spec)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"PADDOCK_PACKAGE_STORE": "store.example"}, "PADDOCK_PACKAGE_STORE is not an address"),
        ({"PADDOCK_PACKAGE_STORE_KEY": ""}, "PADDOCK_PACKAGE_STORE_KEY is not set"),
        ({"PADDOCK_PACKAGE_STORE_KEY": "wrong secret"}, "PADDOCK_PACKAGE_STORE_KEY has characters"),
        ({"PADDOCK_PACKAGE_STORE_KEY": "secret"}, "answered 401: Invalid API key"),
        ({"HARBOR_API_KEY": "secret\n1"}, "HARBOR_API_KEY has characters"),
        ({"PADDOCK_PACKAGE_STORE": "http://me:secret@127.0.0.1:9"}, "PADDOCK_PACKAGE_STORE is not an address"),
        ({"PADDOCK_PACKAGE_STORE": "http://["}, "PADDOCK_PACKAGE_STORE is not an address"),
        ({"PADDOCK_PACKAGE_STORE": "http://127.0.0.1:9"}, "http://127.0.0.1:9 cannot be read: "),
    ],
)
def test_a_wrong_setting_is_named(
    store: Store, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], says: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(TaskError, match=says) as caught:
        load_tasks("acme/sums@1.0")
    message = f"{caught.value} {caught.value.hint}"
    assert next(iter(variables)) in message
    assert "secret" not in message


def test_without_a_store_a_name_of_a_package_says_what_to_set() -> None:
    with pytest.raises(TaskError, match="there is no task 'acme/sums'") as caught:
        load_tasks("acme/sums")
    assert "PADDOCK_PACKAGE_STORE" in str(caught.value.hint)


def test_variables_of_harbor_name_the_store_too(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve_store(store) as url:
        monkeypatch.delenv("PADDOCK_PACKAGE_STORE")
        monkeypatch.delenv("PADDOCK_PACKAGE_STORE_KEY")
        monkeypatch.setenv("HARBOR_SUPABASE_URL", url)
        monkeypatch.setenv("HARBOR_SUPABASE_PUBLISHABLE_KEY", KEY)
        assert instructions("acme/sums") == ["Do one.", "Do two."]


def test_another_registry_can_be_named(store: Store, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here/instruction.md").write_text("Do here.")
    (tmp_path / "registry.json").write_text(
        '[{"name": "acme/sums", "version": "1.0", "tasks": [{"name": "here", "path": "here"}]}]'
    )
    assert instructions("acme/sums@1.0", registry=str(tmp_path / "registry.json")) == ["Do here."]
    assert store.requests.total() == 0


# -- archives ---------------------------------------------------------------------------------------------


def test_an_archive_with_another_content_is_refused(store: Store) -> None:
    store.publish_task("acme/one", ONE, archive=archive_of({**ONE, "tests/test.sh": "echo 1 > reward"}))
    with pytest.raises(
        TaskError, match=r"acme/one: it was published as sha256:\w+, and its archive has sha256:"
    ) as caught:
        load_tasks("acme/sums")
    assert caught.value.hint


def test_files_that_the_hash_does_not_cover_are_left_out(store: Store) -> None:
    extra = {".gitignore": "x", "notes/a.txt": "a", "setup.sh": "false"}
    store.publish_task("acme/one", ONE, archive=archive_of({**ONE, **extra}))
    (one, _) = load_tasks("acme/sums")
    assert sorted(path.name for path in Path(one.source).iterdir()) == ["instruction.md", "task.toml", "tests"]


def member(name: str, data: bytes = b"", **fields: Any) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        entry = tarfile.TarInfo(name)
        entry.size = len(data)
        for key, value in fields.items():
            setattr(entry, key, value)
        archive.addfile(entry, io.BytesIO(data))
    return gzip.compress(buffer.getvalue())


HOSTILE = {
    "parent": (member("../out", b"x"), "has the path '../out'"),
    "absolute": (member("/tmp/out", b"x"), "has the path '/tmp/out'"),
    "parent of a folder": (member("tests/../../out", b"x"), "has the path"),
    "link": (member("tests", type=tarfile.SYMTYPE, linkname="/etc"), "is a link or a device"),
    "hard link": (member("tests/a", type=tarfile.LNKTYPE, linkname="tests/b"), "is a link or a device"),
    "device": (member("tests/a", type=tarfile.CHRTYPE), "is a link or a device"),
    "line": (member("tests/a\nb", b"x"), "has the path"),
    "zero": (member("tests/a", b"x", pax_headers={"path": "tests/a\0b"}), "has the path"),
    "deep": (member("tests/" + "a/" * 100 + "b", b"x"), "has the path"),
    "short": (archive_of(ONE)[:-30], "cannot be decompressed"),
    "text": (b"text", "cannot be decompressed"),
    "no tar": (gzip.compress(b"text" * 200), "a number in a header"),
}


@pytest.mark.parametrize(("archive", "says"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_archive_writes_nothing_elsewhere(store: Store, cache: Path, archive: bytes, says: str) -> None:
    store.publish_task("acme/two", TWO, archive=archive)
    with pytest.raises(TaskError, match=says) as caught:
        load_tasks("acme/sums")
    assert caught.value.hint
    assert not list(cache.parent.rglob("out"))
    assert not list(cache.rglob("*.partial"))


def test_an_archive_that_expands_without_end_is_refused(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "LARGEST_TASK", 1 << 20)
    store.publish_task("acme/two", TWO, archive=member("tests/zeros", bytes(4 << 20)))
    with pytest.raises(TaskError, match="more than 1048576 bytes"):
        load_tasks("acme/sums")


def test_the_entries_of_an_archive_are_limited(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "MOST_ENTRIES", 2)
    store.publish_task("acme/two", TWO, archive=archive_of(TWO))
    with pytest.raises(TaskError, match="more than 2 entries"):
        load_tasks("acme/sums")


def test_an_archive_without_a_task_is_refused(store: Store) -> None:
    files = {"tests/instruction.md": "Do.", "steps/instruction.md": "Do."}
    store.publish_dataset("acme/sums", {"acme/three": store.publish_task("acme/three", files)})
    with pytest.raises(TaskError, match="acme/three: its archive is no task"):
        load_tasks("acme/sums")


def test_a_task_may_be_called_like_an_archive(store: Store) -> None:
    store.publish_task("acme/archive.tar.gz", TWO)
    assert instructions("acme/archive.tar.gz@1") == ["Do two."]


def test_a_file_cannot_be_written_twice(store: Store) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for _ in range(2):
            archive.addfile(tarfile.TarInfo("instruction.md"), io.BytesIO())
    store.publish_task("acme/two", TWO, archive=gzip.compress(buffer.getvalue()))
    with pytest.raises(TaskError, match=r"'instruction\.md' of the archive: File exists"):
        load_tasks("acme/sums")


# -- manifests --------------------------------------------------------------------------------------------


def manifest(folder: Path, **digests: str) -> str:
    rows = [f'[[tasks]]\nname = "acme/{name}"\ndigest = "{digest}"\n' for name, digest in digests.items()]
    (folder / "dataset.toml").write_text('[dataset]\nname = "acme/mine"\nversion = "1.0.0"\n' + "".join(rows))
    return str(folder / "dataset.toml")


def test_a_manifest_has_local_and_published_tasks(store: Store, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/task.toml").write_text('[task]\nname = "acme/mine"\n')
    (tmp_path / "mine/instruction.md").write_text("Do mine.")
    digest = store.publish_task("acme/two", {"instruction.md": "The second version."})
    published = store.find("task", "acme/two", "1")
    assert published is not None
    place = manifest(tmp_path, mine=digest, two=f"sha256:{published['content_hash']}")
    assert is_task_set(place)
    mine, two = load_tasks(place)
    assert [mine.instruction, two.instruction] == ["Do mine.", "Do two."]
    assert "package" not in mine.metadata[TASK_SET]
    assert two.metadata[TASK_SET]["package"] == f"acme/two@sha256:{published['content_hash']}"


def test_a_manifest_of_local_tasks_needs_no_store(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/task.toml").write_text('[task]\nname = "acme/mine"\n')
    (tmp_path / "mine/instruction.md").write_text("Do mine.")
    assert instructions(manifest(tmp_path, mine=f"sha256:{'0' * 64}")) == ["Do mine."]
    with pytest.raises(TaskError, match="no package store is named"):
        load_tasks(manifest(tmp_path, other=f"sha256:{'0' * 64}"))


def test_two_folders_of_one_task_are_an_error(tmp_path: Path) -> None:
    for name in ("a", "b", "broken"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "task.toml").write_text('[task]\nname = "acme/mine"\n' if name != "broken" else "[")
        (tmp_path / name / "instruction.md").write_text("Do it.")
    place = manifest(tmp_path, mine=f"sha256:{'0' * 64}")
    with pytest.raises(TaskError, match="are both 'acme/mine'"):
        load_tasks(place)
    shutil.rmtree(tmp_path / "a")
    assert instructions(place) == ["Do it."]


def test_a_folder_without_tasks_points_to_its_manifest(tmp_path: Path) -> None:
    manifest(tmp_path, one=f"sha256:{'0' * 64}")
    with pytest.raises(TaskError, match="holds no task") as caught:
        load_tasks(tmp_path)
    assert "dataset.toml" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[dataset", "not valid TOML"),
        ("a = " + "[" * 5000, "not valid TOML"),
        ("[dataset]\nname = 1", "dataset.name is 1, not text"),
        ('[dataset]\nname = "a/b"', "lists no task"),
        ('[dataset]\nname = "a/b"\n[[tasks]]\nname = "one"\ndigest = "x"', "'one' has no organization"),
        ('[dataset]\nname = "a/b"\n[[tasks]]\nname = "a/one"\ndigest = "x"', "the digest of a/one is 'x'"),
        ('[dataset]\nname = "a/b"\n[[tasks]]\nname = "a/one"', "digest is missing"),
    ],
)
def test_a_wrong_manifest_is_named(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "dataset.toml").write_text(text)
    with pytest.raises(TaskError, match=says) as caught:
        load_tasks(tmp_path / "dataset.toml")
    assert caught.value.hint


def test_no_thread_is_left_after_a_failure(store: Store) -> None:
    store.archives.clear()
    with pytest.raises(TaskError, match="Object not found"):
        load_tasks("acme/sums")
    assert "fetch a task" not in [thread.name for thread in threading.enumerate()]
