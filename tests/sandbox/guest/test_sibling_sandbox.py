"""`paddock-run`: a command in a sandbox of its own, with input, output, exit code and signals passed through."""

import asyncio
import time

import pytest

from paddock.limits import MEBIBYTE, SandboxLimits
from paddock.sandbox import Command, Completed, SandboxSpec
from sandbox.places import needs_bwrap, opened

pytestmark = needs_bwrap

FOLDER_AS_INPUT = """
import os, socket
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.connect(chr(0) + "paddock-run")
socket.send_fds(server, [os.getcwd().encode() + bytes(1) + b"ls"], [os.open("/tests", 0), 1, 2])
print(server.recv(99).decode())
"""
LIMITS = SandboxLimits(disk_bytes=32 * MEBIBYTE)


def run(script: str, *, limits: SandboxLimits = LIMITS, backend: str = "bwrap", stdin: bytes = b"") -> Completed:
    async def act() -> Completed:
        spec = SandboxSpec(limits, readonly_tests={"test.sh": b"true", "secret": b"42"}, env={"FROM_SPEC": "yes"})
        async with await opened(backend, spec) as sandbox:
            done: Completed = await sandbox.exec(Command(["bash", "-c", script], stdin=stdin), timeout=20)
            return done

    return asyncio.run(act())


def output(script: str, **options: bytes) -> str:
    done = run(script, **options)  # type: ignore[arg-type]
    return (done.stdout + done.stderr).decode()


def test_input_outputs_and_exit_code_are_those_of_the_command() -> None:
    done = run("paddock-run bash -c 'cat; echo err >&2; exit 7'", stdin=b"\0\xff in")
    assert (done.exit_code, done.stdout, done.stderr) == (7, b"\0\xff in", b"err\n")


def test_arguments_arrive_as_they_are() -> None:
    assert output(r"paddock-run printf '<%s>' 'a b' '' $'\n' '*' -- --x $'\xff' | od -c | head -1").startswith(
        "0000000"
    )
    assert output("paddock-run printf '<%s>' 'a b' '' '*' --x") == "<a b><><*><--x>"


@pytest.mark.parametrize(
    ("command", "code"),
    [("/no/such", 127), ("./plain", 126), ("sh -c 'kill -9 $$'", 137), ("sh -c 'kill $$'", 143), ("true", 0)],
)
def test_exit_codes_are_those_of_a_shell(command: str, code: int) -> None:
    assert run(f"touch plain; paddock-run {command}").exit_code == code


def test_the_work_folder_is_shared_and_nothing_else() -> None:
    seen = output("mkdir sub; echo a > sub/a; cd sub; paddock-run sh -c 'cat a; echo b > b; pwd'; cat b")
    assert seen == "a\n/home/user/workdir/sub\nb\n"
    assert output("paddock-run ls -A /home /home/user /tests /tmp/ /dev/shm").split() == [
        *["/dev/shm:", "/home:", "shm", "tmp", "user", "/home/user:", "workdir", "/tests:", "/tmp/:"],
    ]
    assert (
        output("paddock-run cat /logs/verifier/reward.txt /home/user/logs/x /tests/secret; ls /tests").count(
            "No such"
        )
        == 3
    )


def test_the_environment_is_clean() -> None:
    seen = output("SECRET=1 paddock-run env")
    assert "SECRET" not in seen
    assert "HOME=/home/user\n" in seen
    assert "FROM_SPEC=yes" in seen
    assert "X=1" in output("paddock-run env X=1 env")


def test_its_processes_are_alone() -> None:
    assert output("sleep 9 & paddock-run sh -c 'ls -d /proc/[0-9]*'; kill $!").split() == [
        "/proc/1",
        "/proc/2",
    ]
    assert output("paddock-run grep -E 'CapEff|CapBnd|NoNewPrivs' /proc/self/status").split() == [
        *("CapEff:", "0" * 16, "CapBnd:", "0" * 16, "NoNewPrivs:", "1")
    ]


def test_what_it_leaves_in_the_background_ends_with_it() -> None:
    script = "paddock-run sh -c 'setsid sleep 77 & (sleep 77 &); echo done'; pgrep -x sleep || echo none"
    began = time.monotonic()
    assert output(script) == "done\nnone\n"
    assert time.monotonic() - began < 10


def test_signals_reach_the_command() -> None:
    trap = "paddock-run sh -c 'trap \"echo got; exit 5\" TERM; echo up; while :; do sleep 0.05; done' > out & "
    assert output(f"{trap} until grep -qs up out; do sleep 0.01; done; kill -TERM $!; wait $!; echo $?; cat out") == (
        "5\nup\ngot\n"
    )


def test_it_ends_with_its_caller() -> None:
    script = "paddock-run sh -c 'touch up; sleep 88' & until [ -e up ]; do sleep 0.01; done; kill -9 $!; wait $!; "
    assert output(f"{script} sleep 0.3; pgrep -fx 'sleep 88' || echo gone").startswith("gone\n")
    assert run("timeout -s KILL 0.5 paddock-run sleep 60").exit_code == 137
    assert run("timeout 0.5 paddock-run sleep 60").exit_code == 124


def test_several_run_at_once() -> None:
    began = time.monotonic()
    script = 'for i in 1 2 3 4 5 6; do paddock-run sh -c "sleep 1; echo $i" & done; wait'
    assert sorted(output(script).split()) == list("123456")
    assert time.monotonic() - began < 5


def test_a_server_that_it_runs_is_reached_by_the_tests() -> None:
    script = """
    echo hello > page
    paddock-run python3 -m http.server 8123 > log 2>&1 & S=$!
    for i in $(seq 200); do python3 -c "import urllib.request as r
print(r.urlopen('http://127.0.0.1:8123/page').read().decode())" 2> /dev/null && break; sleep 0.05; done
    kill $S; wait $S; echo ended"""
    assert output(script).split() == ["hello", "ended"]


def test_its_output_can_be_bounded() -> None:
    done = run("paddock-run --max-output 1000 yes")
    assert (done.exit_code, len(done.stdout)) == (137, 1000)
    assert "ended after 1000 bytes" in done.stderr.decode()
    done = run("paddock-run --max-output 1000 sh -c 'echo out; echo err >&2; exit 3'")
    assert (done.exit_code, done.stdout, done.stderr) == (3, b"out\n", b"err\n")


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("paddock-run", "usage"),
        ("paddock-run --what ls", "usage"),
        ("cd /tmp; paddock-run ls", "sees only /home/user/workdir"),
        ("paddock-run paddock-run ls", "only the tests can use it"),
    ],
)
def test_what_it_cannot_run_it_does_not_run(script: str, reason: str) -> None:
    done = run(script)
    assert (done.exit_code, done.stdout) == (125, b"")
    assert reason in done.stderr.decode()


def test_a_folder_of_the_tests_is_not_handed_over() -> None:
    assert output(f"python3 -c '{FOLDER_AS_INPUT}'") == "refused a folder cannot be its input or output\n"


def test_the_limits_of_the_sandbox_hold() -> None:
    most = SandboxLimits(disk_bytes=32 * MEBIBYTE, memory_bytes=200 * MEBIBYTE, processes=40)
    big = "paddock-run python3 -c 'import time; x = bytearray(400 << 20); time.sleep(9)'"
    assert run(big, limits=most).killed_for == "memory"
    for place in (".", "~", "/tmp", "/dev/shm"):
        assert "No space left" in output(f"paddock-run sh -c 'head -c 64M /dev/zero > {place}/big'")
    forks = run("paddock-run sh -c 'for i in $(seq 100); do sleep 5 & done; wait'", limits=most)
    assert forks.killed_for == "processes" or b"fork" in forks.stderr


def test_what_it_wrote_outside_of_the_work_folder_is_given_back() -> None:
    fill = "paddock-run sh -c 'mkdir -p /tmp/a/b; head -c 8M /dev/zero > /tmp/a/b/big; chmod 0 /tmp/a'"
    assert output(f"for i in 1 2 3 4 5 6 7 8; do {fill} || echo full; sleep 0.1; done; ls /home/.siblings") == ""


@pytest.mark.parametrize("backend", ["process"])
def test_a_backend_without_it_says_so(backend: str) -> None:
    done = run("paddock-run echo hello", backend=backend)
    assert (done.exit_code, done.stdout) == (125, b"")
    assert "--sandbox bwrap" in done.stderr.decode()


def test_a_command_ends_when_its_output_is_closed() -> None:
    for option in ("", "--max-output 999999999"):
        assert run(f"paddock-run {option} yes | head -1; exit ${{PIPESTATUS[0]}}").exit_code == 141


def test_outputs_that_are_one_keep_their_order() -> None:
    lines = "for i in 1 2 3 4 5 6 7 8; do echo $i; echo $i >&2; done"
    seen = output(f"paddock-run bash -c '{lines}' > all 2>&1; cat all")
    assert seen.split() == [digit for digit in "12345678" for _ in range(2)]


def test_a_file_as_input_arrives_whole_and_can_be_searched() -> None:
    assert run("head -c 3000000 /dev/urandom > big; paddock-run cat < big | cmp - big").exit_code == 0
    assert output("echo abc > f; paddock-run python3 -c 'import os; print(os.lseek(0, 0, 2))' < f") == "4\n"


def test_a_closed_input_or_output_is_an_empty_one() -> None:
    done = run("paddock-run sh -c 'cat; readlink /proc/self/fd/0; echo x >&2' <&- 2>&-")
    assert (done.exit_code, done.stdout) == (0, b"/dev/null\n")
    assert run("paddock-run sh -c 'echo x' >&-").exit_code == 0
