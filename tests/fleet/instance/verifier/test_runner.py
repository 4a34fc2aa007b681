"""VerifierRunner in their children: what they can do, what they cannot, and what becomes of them."""

import asyncio
import base64
import os
import pickle
import sqlite3
import textwrap
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from paddock.errors import VerifierError
from paddock.fleet.instance.verifier.runner import VerifierRequest, VerifierRunner

SECRET = "the-secret-of-the-plane"


class Running:
    """A verifier runner on a loop of its own, for plain test functions."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        self.verifiers = self.runner.run(self._make())

    async def _make(self) -> VerifierRunner:
        return VerifierRunner()

    def __call__(self, body: str, folder: Path | None = None, **changes: Any) -> dict[str, Any]:
        """The answer to a verifier whose function has this body."""
        head = "def verify(env, *args, **kwargs):\n"
        return self.source(head + textwrap.indent(textwrap.dedent(body).strip(), "    "), folder, **changes)

    def source(self, code: str, folder: Path | None = None, **changes: Any) -> dict[str, Any]:
        request = VerifierRequest(code, **{"function_name": "verify", "folder": folder, **changes})
        return self.runner.run(self.verifiers.run(request))


@pytest.fixture(scope="module")
def run() -> Iterator[Running]:
    os.environ["PLANE_SECRET"] = SECRET
    running = Running()
    yield running
    del os.environ["PLANE_SECRET"]
    running.runner.run(running.verifiers.close())
    running.runner.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The two databases of an instance where one note was added."""
    for name in ("seed", "current"):
        with closing(sqlite3.connect(tmp_path / f"{name}.sqlite")) as connection, connection:
            connection.execute("CREATE TABLE notes (id INTEGER PRIMARY KEY, title TEXT NOT NULL, body TEXT)")
            connection.execute("INSERT INTO notes (title) VALUES ('welcome')")
            if name == "current":
                connection.execute("INSERT INTO notes (title) VALUES ('mine')")
    return tmp_path


def blob(*arguments: Any, **keywords: Any) -> str:
    values = {"args": (None, *arguments, {"env": "i-1"}), "kwargs": keywords}
    return base64.b64encode(pickle.dumps(values)).decode()


# -- answers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("returned", "result"),
    [
        ("1.0", 1.0),
        ("0", 0),
        ("True", True),
        ("None", None),
        ("{'score': 0.5, 'why': ('a', 'b')}", {"score": 0.5, "why": ["a", "b"]}),
        ("TASK_SUCCESSFUL_SCORE", 1),
        ("float('nan')", None),
        ("{1: {2}}", {"1": [2]}),
        ("type('R', (), {'score': 0.25})()", {"score": 0.25}),
        ("2 ** 63", 2**63),
        ("2 ** 80", 2.0**80),
        ("chr(0xd800)", "?"),
    ],
)
def test_results_are_json_values(run: Running, returned: str, result: Any) -> None:
    answer = run(f"return {returned}")
    assert (answer["success"], answer["error"]) == (True, None)
    assert answer["result"] == result
    assert type(answer["result"]) is type(result)


def test_an_answer_has_all_its_parts(run: Running) -> None:
    answer = run("print('hello'); return 1")
    assert answer.keys() == {
        "success", "result", "error", "stdout", "execution_id", "execution_time_ms",
    }  # fmt: skip
    assert answer["stdout"] == "hello\n"
    assert answer["execution_id"] != run("return 1")["execution_id"]
    assert isinstance(answer["execution_time_ms"], int)


def test_an_exception_is_an_answer_with_its_place(run: Running) -> None:
    answer = run.source(
        "def check(x):\n    raise ValueError(f'no {x}')\n\ndef verify(env):\n    print('before')\n    check(3)\n"
    )
    assert not answer["success"]
    assert (answer["error"]["type"], answer["error"]["message"]) == ("ValueError", "no 3")
    assert 'File "verifier.py", line 2, in check' in answer["error"]["traceback"]
    assert "raise ValueError" in answer["error"]["traceback"]
    assert "paddock" not in answer["error"]["traceback"]
    assert answer["stdout"] == "before\n"


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("def verify(env:", "SyntaxError"),
        ("x = 1", "NameError"),
        ("import nothing_of_this_name\ndef verify(env): return 1", "ModuleNotFoundError"),
        ("def verify(env): return object()", "TypeError"),
        ("def verify(env): return verify(env)", "RecursionError"),
        ("def verify(env): raise SystemExit(3)", "SystemExit"),
        ("def verify(env): return 'x' * 20_000_000", "ValueError"),
        ("def verify(env):\n x = []\n x.append(x)\n return x", "ValueError"),
        ("def verify(env, more): return 1", "TypeError"),
    ],
)
def test_an_invalid_result_is_an_error_answer(run: Running, code: str, kind: str) -> None:
    answer = run.source(code)
    assert (answer["success"], answer["error"]["type"]) == (False, kind)


def test_the_named_function_is_called_and_no_other(run: Running) -> None:
    code = "def helper(env): return 0.25\n\ndef verify(env): return 1.0\n"
    assert run.source(code)["result"] == 1.0
    assert run.source(code, function_name="helper")["result"] == 0.25


def test_each_run_begins_anew(run: Running) -> None:
    body = "import sys\nseen = hasattr(sys, 'mark')\nsys.mark = 1\nreturn seen"
    assert [run(body)["result"] for _ in range(2)] == [False, False]


# -- arguments ------------------------------------------------------------------------------------


def test_arguments_come_without_the_places_of_env(run: Running) -> None:
    assert run("return [args, kwargs]", args=blob(1, "x", final_answer="yes"))["result"] == [
        [1, "x"],
        {"final_answer": "yes"},
    ]
    assert run("return list(args)", args_array=[{"a": 1}, {"env": "i-1"}])["result"] == [{"a": 1}]
    assert run("return list(args)", args=blob({"env": "mine"}))["result"] == [{"env": "mine"}]


def test_a_pickle_that_names_code_is_refused_and_does_nothing(run: Running, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "evil"),)

    answer = run("return 1", args=blob(Evil()))
    assert answer["error"]["type"] == "UnpicklingError"
    assert "plain data" in answer["error"]["message"]
    assert not (tmp_path / "evil").exists()
    assert not run("return 1", args="!")["success"]
    assert not run("return 1", args=base64.b64encode(pickle.dumps([1])).decode())["success"]


# -- what a verifier finds ------------------------------------------------------------------------


def test_the_databases_can_be_read(run: Running, folder: Path) -> None:
    body = """
        env.instance.load()
        rows = env.db().query("SELECT title FROM notes WHERE id > ?", [1]).rows
        return [rows, env.db("seed").table("notes").count(), env.db("current").describe().tables[0].name, env.env_key]
    """
    assert run(body, folder, env_key="notes")["result"] == [[["mine"]], 1, "notes", "notes"]


def test_large_sorts_need_no_file(run: Running, folder: Path) -> None:
    body = """
        numbers = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 30000)"
        found = env.db().query(numbers + " SELECT printf('%0200d', i * 7919 % 30000) FROM n ORDER BY 1")
        return [found.error, len(found.rows)]
    """
    assert run(body, folder)["result"] == [None, 30000]


def test_an_unknown_database_is_a_key_error(run: Running) -> None:
    assert run("env.db('current')")["error"]["type"] == "KeyError"
    assert "is not there for a verifier" in run("env.judge")["error"]["message"]


def test_imports_and_decorators_of_the_sdk_work(run: Running, folder: Path) -> None:
    code = """
import fleet
from fleet import Environment as Env, verifier as check
from fleet.verifiers.db import IgnoreConfig, DatabaseSnapshot
from fleet.verifiers.code import TASK_SUCCESSFUL_SCORE

@check(key="a",
       extra_requirements=["x(1)"])
def verify(env: Env, final_answer: Optional[str] = None) -> float:
    env.db("seed").diff(env.db("current"), IgnoreConfig()).expect_only(
        [{"table": "notes", "pk": 2, "field": None, "after": "__added__"}])
    assert normalized_contains("Hello, World", "hello world!") and contains_number("1,200 items", "1200")
    return TASK_SUCCESSFUL_SCORE
"""
    assert run.source(code, folder)["result"] == 1


def test_async_verifiers_are_awaited_with_or_without_awaiting(run: Running, folder: Path) -> None:
    code = """
import asyncio

async def verify(env):
    await asyncio.sleep(0)
    await env.instance.load()
    awaited = (await env.db().query("SELECT COUNT(*) FROM notes")).rows[0][0]
    plain = env.db().query("SELECT COUNT(*) FROM notes").rows[0][0]
    assert await env.db().table("notes").eq("title", "none").first() is None
    assert (await env.db().table("notes").first())["title"] == "welcome"
    return [awaited, plain, await env.db().table("notes").count(), len(env.db().table("notes").all())]
"""
    assert run.source(code, folder)["result"] == [2, 2, 2, 2]


def test_the_standard_library_is_there(run: Running) -> None:
    body = """
        import csv, datetime, decimal, hashlib, html.parser, statistics, zoneinfo
        return float(decimal.Decimal("1.5")) + statistics.mean([1, 2])
    """
    assert run(body)["result"] == 3.0


def test_threads_may_be_used(run: Running) -> None:
    body = """
        import asyncio
        from concurrent.futures import ThreadPoolExecutor
        with ThreadPoolExecutor(4) as pool:
            return sum(pool.map(lambda n: n, range(10)))
    """
    assert run(body)["result"] == 45


# -- limits ---------------------------------------------------------------------------------------


def test_an_endless_loop_ends_in_time_and_its_output_is_kept(run: Running) -> None:
    began = time.monotonic()
    answer = run("print('on my way')\nwhile True: pass", timeout=1)
    assert answer["error"]["type"] == "TimeoutError"
    assert answer["stdout"] == "on my way\n"
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    "body",
    [
        "import os\nwhile True: os.fork()",
        "import subprocess\nsubprocess.run(['true'])",
        "import multiprocessing\nmultiprocessing.get_context('fork').Process(target=print).start()",
        "import socket\nsocket.socket().connect(('127.0.0.1', 1))",
        "import os\nos.kill(os.getppid(), 9)",
        "import os\nos.execv('/bin/true', ['true'])",
        "import resource, os\nresource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1))",
    ],
    ids=["fork bomb", "subprocess", "multiprocessing", "network", "kill", "exec", "limits of others"],
)
def test_no_process_no_network_no_signal(run: Running, body: str) -> None:
    assert run(body, timeout=5)["error"]["type"] == "PermissionError"


def test_memory_is_limited(run: Running) -> None:
    answer = run("kept = []\nwhile True: kept.append(bytearray(10_000_000))", memory_bytes=64 * 1024 * 1024)
    assert answer["error"]["type"] == "MemoryError"


def test_output_is_cut_but_the_result_counts(run: Running) -> None:
    answer = run("for _ in range(200): print('x' * 100_000)\nreturn 1")
    assert answer["result"] == 1
    assert 1_000_000 < len(answer["stdout"]) < 1_100_000
    assert answer["stdout"].endswith("cut off")


def test_output_past_the_limit_is_dropped(run: Running) -> None:
    answer = run("import os\nwhile True: os.write(1, b'x' * 100_000)", timeout=1)
    assert answer["error"]["type"] == "TimeoutError"
    assert len(answer["stdout"]) < 1_100_000


@pytest.mark.parametrize(
    ("body", "how"),
    [
        ("import os\nos._exit(3)", "code 3"),
        ("import os\nos._exit(0)", "code 0"),
        ("import ctypes\nctypes.string_at(0)", "SIGSEGV"),
        ("import os\nos.write(3, b'nonsense'); os._exit(0)", "code 0"),
    ],
)
def test_a_process_that_ends_early_is_an_answer(run: Running, body: str, how: str) -> None:
    answer = run(body)
    assert answer["error"]["type"] == "VerifierCrashed"
    assert how in answer["error"]["message"]


def test_the_databases_cannot_be_changed(run: Running, folder: Path) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert "readonly" in run("return env.db().exec('DELETE FROM notes').error", folder)["result"]
    file = str(folder / "current.sqlite")
    for body in (
        f"open({file!r}, 'w')",
        f"import os\nos.unlink({file!r})",
        f"import os\nos.truncate({file!r}, 0)",
        f"import os\nos.rename({file!r}, {file!r} + 'x')",
        f"import os\nos.chmod({file!r}, 0)",
        f"import sqlite3\nsqlite3.connect({file!r}).execute('DELETE FROM notes')",
        "open('/tmp/made-by-a-verifier', 'w')",
    ):
        assert run(body, folder)["error"]["type"] in ("PermissionError", "OperationalError")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_secrets_of_the_plane_are_out_of_reach(run: Running) -> None:
    assert SECRET not in str(run("import os\nreturn dict(os.environ)")["result"])
    answer = run(f"return open('/proc/{os.getpid()}/environ').read()")
    assert (answer["success"], answer["error"]["type"]) == (False, "PermissionError")
    assert not run("return open('/etc/passwd').read()")["success"]


# -- the fork server ------------------------------------------------------------------------------


def test_runs_are_quick_and_do_not_wait_for_each_other(run: Running, folder: Path) -> None:
    request = VerifierRequest("def verify(env): return env.db().table('notes').count()", "verify", folder=folder)
    sleeper = VerifierRequest("import time\ndef verify(env): time.sleep(9)", "verify")

    async def many() -> float:
        slow = asyncio.ensure_future(run.verifiers.run(sleeper))
        await run.verifiers.run(request)
        began = time.monotonic()
        answers = await asyncio.gather(*(run.verifiers.run(request) for _ in range(20)))
        took = time.monotonic() - began
        assert [answer["result"] for answer in answers] == [2] * 20
        assert not slow.done()
        slow.cancel()
        await asyncio.gather(slow, return_exceptions=True)
        return took

    assert run.runner.run(many()) < 2


def test_a_cancelled_caller_ends_its_run(run: Running) -> None:
    endless = VerifierRequest("def verify(env):\n while True: pass", "verify")

    async def until(there: bool) -> None:
        async with asyncio.timeout(5):
            while bool(_children(run)) is not there:
                await asyncio.sleep(0.01)

    async def leave() -> None:
        await until(there=False)
        task = asyncio.ensure_future(run.verifiers.run(endless))
        await until(there=True)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(there=False)

    run.runner.run(leave())


def _children(run: Running) -> list[str]:
    run.verifiers.start()
    assert run.verifiers._server is not None
    pid = run.verifiers._server.pid
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def test_a_killed_fork_server_is_replaced(run: Running) -> None:
    assert run("return 1")["result"] == 1
    assert run.verifiers._server is not None
    run.verifiers._server.kill()
    assert run("return 2")["result"] == 2


def test_an_unreadable_database_gives_no_grade(run: Running, tmp_path: Path) -> None:
    (tmp_path / "current.sqlite").write_bytes(b"not a database, but long enough to be looked at" * 100)
    with pytest.raises(VerifierError, match="not a database"):
        run("return 1", tmp_path)


def test_nothing_runs_after_close() -> None:
    async def use() -> None:
        verifiers = VerifierRunner()
        assert (await verifiers.run(VerifierRequest("def verify(env): return 1", "verify")))["result"] == 1
        server = verifiers._server
        await verifiers.close()
        assert server is not None
        assert server.returncode == 0
        with pytest.raises(VerifierError, match="closed"):
            await verifiers.run(VerifierRequest("def verify(env): return 1", "verify"))

    asyncio.run(use())
