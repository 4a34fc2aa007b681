"""Agents that try to be paid for nothing, to get out, or to do harm. None of them gains anything."""

import json
import os
import shlex
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paddock.limits import MEBIBYTE, RolloutTimeouts, SandboxLimits
from paddock.rollouts.api import run_rollout
from paddock.store import Store
from paddock.store.outcome import Outcome
from paddock.store.record import RolloutRecord
from paddock.tasks.taskset import load_tasks
from rollouts.played import (
    UPSTREAM_KEY,
    a_task,
    needs_bwrap,
    own_children,
    python,
    rolled,
    run,
    shell,
    speaker,
    spoken,
)

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(90, func_only=True), needs_bwrap]

REWARD = "/logs/verifier/reward.txt"
HOST_SECRET = "host-secret-5d41402abc4b"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store") as reopened:
        yield reopened
    assert own_children() == []


def gains_nothing(record: RolloutRecord) -> None:
    """The verifier's own word, which is 0, or no word; and no second try for it."""
    assert record.reward in (0.0, None), record.reward
    assert record.outcome is not None
    assert not record.outcome.is_infrastructure, (record.outcome, record.error)


# -- the reward, from the agent's sandbox -------------------------------------------------------------

SELF_PAID = {
    "writes the reward": """
        mkdir -p /logs/verifier ~/logs/verifier
        echo 1 > /logs/verifier/reward.txt; echo 1 > ~/logs/verifier/reward.txt""",
    "writes reward.json": """mkdir -p /logs/verifier; echo '{"reward": 1}' > /logs/verifier/reward.json""",
    "puts a reward in the work folder": """
        echo 1 > reward.txt; mkdir -p logs/verifier; echo 1 > logs/verifier/reward.txt""",
    "plants its own tests": """
        mkdir -p tests ~/tests
        printf 'echo 1 > /logs/verifier/reward.txt' | tee tests/test.sh ~/tests/test.sh test.sh""",
    "makes the logs a link": """
        rm -rf ~/logs; ln -s ~/workdir ~/logs; mkdir -p ~/workdir/verifier; echo 1 > ~/workdir/verifier/reward.txt""",
    "makes the reward a link": "echo 1 > one; ln -sf ~/workdir/one /logs/verifier/reward.txt",
    "leaves a daemon": """
        setsid nohup bash -c 'while :; do echo 1 > /logs/verifier/reward.txt; sleep 0.01; done' > /dev/null 2>&1 &""",
    "forks twice": """
        ( ( while :; do echo 1 > /logs/verifier/reward.txt; sleep 0.01; done ) & ) & sleep 0.05""",
    "shadows programs in its home": """
        mkdir -p ~/bin ~/.local/bin
        for d in ~/bin ~/.local/bin .; do for p in python3 bash cat sh mkdir; do
            printf '#!/bin/sh\\necho 1 > /logs/verifier/reward.txt\\n' > $d/$p; chmod +x $d/$p
        done; done""",
    "writes start-up files": """
        for f in ~/.bashrc ~/.profile ~/.bash_profile ~/.bash_env .bashrc .profile .bash_env; do
            echo 'trap "echo 1 > /logs/verifier/reward.txt" EXIT' > $f
        done""",
    "sets modes that are not its own": "echo 42 > x; cp /bin/bash ./suid; chmod 6777 suid x; ln suid hard",
    "links to the verdict": """
        ln -s /logs/verifier/reward.txt answer.txt; ln -s /logs/verifier out
        ln -s /etc/passwd users; ln -s /proc/self/environ e""",
}


@pytest.mark.parametrize("trick", SELF_PAID)
def test_an_agent_cannot_pay_itself(store: Store, trick: str) -> None:
    record = rolled(store, shell(SELF_PAID[trick]))
    gains_nothing(record)
    assert (record.outcome, record.reward) == (Outcome.OK, 0.0)


def test_programs_of_the_work_folder_do_not_replace_those_of_the_verifier(store: Store) -> None:
    """Whatever Python looks for beside a script, the verifier's interpreter does not look for it there."""
    files = {
        "sitecustomize.py": f"open('{REWARD}', 'w').write('1')",
        "usercustomize.py": f"open('{REWARD}', 'w').write('1')",
        "json.py": f"open('{REWARD}', 'w').write('1')\nraise SystemExit",
        "os.py": f"open('{REWARD}', 'w').write('1')\nraise SystemExit",
        "x.pth": f"import os; open('{REWARD}', 'w').write('1')",
        "pyvenv.cfg": "home = /home/user/workdir",
    }
    write = "".join(f"open({name!r}, 'w').write({text!r})\n" for name, text in files.items())
    home = f"import shutil\nfor f in {list(files)}:\n    shutil.copy(f, os.path.expanduser('~/' + f))\n"
    test = "exec python3 /tests/check.py"
    check = f"import json, os\nopen('{REWARD}', 'w').write(str(float(os.path.exists('answer.txt'))))"
    task = a_task(test, tests={"check.py": check.encode()})
    record = rolled(store, python(f"import os\n{write}{home}"), task=task)
    assert (record.outcome, record.reward) == (Outcome.OK, 0.0)


# -- the reward, from the program that the tests run --------------------------------------------------

# One that trusts more than it should, as many do. What is still running when it ends, ends with it.
RUNS_IT = f"mkdir -p /logs/verifier; python3 prog.py; [ -f answer.txt ] && echo 1 > {REWARD} || echo 0 > {REWARD}"
PAY = f"open('{REWARD}', 'w').write('1.0')"
FROM_THE_TESTS = {
    "writes the reward": PAY,
    "kills the tests": f"import os\n{PAY}\nos.kill(os.getppid(), 9)",
    "asks the tests to end": f"import os\n{PAY}\nos.kill(os.getppid(), 15)",
    "kills everybody": f"import os\n{PAY}\nos.kill(-1, 9)",
    "stops the tests": f"import os\n{PAY}\nos.kill(os.getppid(), 19)",
    "waits with the output open": f"""
import os, time
if os.fork() == 0:
    os.setsid()
    time.sleep(0.3)
    while True:
        {PAY}
        time.sleep(0.01)
""",
    "waits without the output": f"""
import os, time
if os.fork() == 0:
    os.setsid()
    for number in (0, 1, 2):
        os.close(number)
    time.sleep(0.3)
    while True:
        {PAY}
        time.sleep(0.01)
""",
    "makes the verdict a link": """
import os, shutil
shutil.rmtree('/logs/verifier')
os.mkdir('verdict')
open('verdict/reward.txt', 'w').write('1.0')
os.chmod('verdict', 0o555)
os.chmod('verdict/reward.txt', 0o444)
os.symlink(os.path.abspath('verdict'), '/logs/verifier')
""",
    "replaces the tests": """
import os
for folder in ('/tests', '/home/user/tests'):
    for act in (lambda: open(folder + '/test.sh', 'w').write('x'), lambda: os.rename(folder, folder + '2')):
        try:
            act()
        except OSError:
            pass
""",
    "hangs": "import time\ntime.sleep(60)",
    "bombs": "import os\nwhile 1: os.fork()",
}


@pytest.mark.parametrize("trick", FROM_THE_TESTS)
def test_a_program_that_the_tests_run_cannot_pay_the_agent(store: Store, trick: str) -> None:
    task = a_task(RUNS_IT, timeouts=RolloutTimeouts(verifier=1.5))
    record = rolled(store, python(f"open('prog.py', 'w').write({FROM_THE_TESTS[trick]!r})"), task=task)
    gains_nothing(record)


@pytest.mark.parametrize("trick", ["kills the tests", "waits with the output open", "waits without the output"])
def test_the_shipped_tasks_do_not_fall_for_it(store: Store, trick: str) -> None:
    (task,) = load_tasks("fix-test")
    cheat = f"{FROM_THE_TESTS[trick]}\ndef merge(*_): return []\ngaps = merge"
    record = rolled(store, python(f"open('intervals.py', 'w').write({cheat!r})"), task=task)
    gains_nothing(record)


# -- work folders that are hard to keep ---------------------------------------------------------------

UNRULY = {
    "is a link": "cd /; rm -rf ~/workdir; ln -s /etc ~/workdir",
    "is a link to the logs": f"cd /; rm -rf ~/workdir; echo 1 > {REWARD}; ln -s /logs/verifier ~/workdir",
    "is gone": "cd /; rm -rf ~/workdir",
    "is a file": "cd /; rm -rf ~/workdir; echo x > ~/workdir",
    "cannot be read": "mkdir x; echo 1 > x/y; chmod 0 x/y x .",
    "has a hidden file": "echo 1 > x; chmod 0 x",
    "is deep": "python3 -c \"import os\nfor _ in range(400): os.mkdir('d'); os.chdir('d')\"",
    "has long paths": "python3 -c \"import os\nfor _ in range(40): os.mkdir('d' * 250); os.chdir('d' * 250)\"",
    "has a sparse file of the disk's size": "truncate -s 63M big",
    "has a sparse file above it": "truncate -s 900M big; truncate -s 64M big2",
    "has strange names": """python3 -c "
import os
os.mkdir(b'a\\nb')
for name in (b'\\xff\\xfe', b'a\\nb/\\xc3', b'-rf', b' '): open(name, 'w').close()
" """,
    "has pipes and sockets": """
        mkfifo f; python3 -c "import socket; socket.socket(socket.AF_UNIX).bind('s')"
        ln -s f g; ln -s /dev/zero z; ln -s . loop""",
    "is full": "head -c 100M /dev/zero > big; echo 1 > late",
    "is full of hard links": "head -c 20M /dev/zero > big; for n in $(seq 60); do ln big b$n; done",
}


@pytest.mark.parametrize("folder", UNRULY)
def test_a_strange_work_folder_buys_no_second_try(store: Store, folder: str) -> None:
    record = rolled(store, shell(UNRULY[folder]))
    gains_nothing(record)
    assert record.outcome in (Outcome.OK, Outcome.AGENT, Outcome.BUDGET), (record.outcome, record.error)


def test_many_files_are_kept_or_refused_soon(store: Store) -> None:
    """Fifteen thousand empty files in one folder."""
    record = rolled(store, python("for n in range(15_000): open(str(n), 'w').close()"), agent_timeout=15)
    gains_nothing(record)


# -- more than its share ------------------------------------------------------------------------------

SMALL = SandboxLimits(memory_bytes=200 * MEBIBYTE, disk_bytes=32 * MEBIBYTE, processes=64, cpu_seconds=3)
GREEDY = {
    "processes": ":(){ :|:& };:; sleep 20",
    "memory": 'python3 -c "a = []\nwhile 1: a.append(bytearray(1 << 20))"; sleep 20',
    "memory in many processes": """
        for n in $(seq 8); do python3 -c "a = bytearray(60 << 20); import time; time.sleep(20)" & done; wait""",
    "cpu": "for n in 1 2 3 4; do while :; do :; done & done; wait",
    "disk": "cat /dev/zero > big; cat /dev/zero > /tmp/big; cat /dev/zero > /dev/shm/big; sleep 0.1",
    "output": "yes | head -c 200M; yes | head -c 100M >&2",
    "descriptors": "python3 -c \"import os\nwhile 1: os.open('/dev/null', 0)\"",
}


@pytest.mark.parametrize("what", GREEDY)
def test_greed_ends_the_sandbox_and_nothing_else(store: Store, what: str) -> None:
    record = rolled(store, shell(GREEDY[what]), task=a_task(sandbox=SMALL), agent_timeout=4)
    gains_nothing(record)
    assert record.outcome in (Outcome.OK, Outcome.BUDGET, Outcome.TIMEOUT)
    assert len(record.agent_log) <= 16 * 1024


# -- out of the sandbox -------------------------------------------------------------------------------


@pytest.fixture
def listener() -> Iterator[tuple[int, str, list[str]]]:
    """Something on the host's loopback, and on an abstract socket, that must never hear of a sandbox."""
    requests: list[str] = []
    name = f"\0paddock-test-{os.getpid()}"
    tcp = socket.create_server(("127.0.0.1", 0))
    local = socket.socket(socket.AF_UNIX)
    local.bind(name)
    local.listen()

    def listen(server: socket.socket, kind: str) -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            requests.append(kind)
            connection.close()

    threads = [threading.Thread(target=listen, args=pair) for pair in ((tcp, "tcp"), (local, "unix"))]
    for thread in threads:
        thread.start()
    yield tcp.getsockname()[1], name[1:], requests
    for server in (tcp, local):
        server.shutdown(socket.SHUT_RDWR)
        server.close()
    for thread in threads:
        thread.join()


def test_nothing_but_the_model_can_be_reached(store: Store, listener: tuple[int, str, list[str]]) -> None:
    port, name, requests = listener
    reach = f"""
import os, socket
def attempt(what, act):
    try: act(); print("REACHED", what)
    except OSError as error: print("no", what, error)
for host in ("127.0.0.1", "0.0.0.0", "10.0.0.1", "1.1.1.1", "169.254.169.254"):
    attempt(host, lambda: socket.create_connection((host, {port}), 1))
attempt("abstract", lambda: socket.socket(socket.AF_UNIX).connect("\\0{name}"))
attempt("dns", lambda: socket.getaddrinfo("example.com", 443))
attempt("raw", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1))
attempt("packet", lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW))
attempt("udp", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("1.1.1.1", 53)))
print(open("/proc/net/dev").read().count(":"), "interfaces")
"""
    record = rolled(store, python(reach))
    assert "REACHED" not in record.agent_log
    assert "1 interfaces" in record.agent_log, record.agent_log
    assert requests == []


def test_the_host_cannot_be_seen_or_changed(store: Store, tmp_path: Path) -> None:
    hidden = tmp_path / "hidden"
    hidden.write_text(HOST_SECRET)
    core = Path("/proc/sys/kernel/core_pattern").read_text()
    os.environ["PADDOCK_TEST_SECRET"] = HOST_SECRET
    look = f"""
cat {shlex.quote(str(Path.home()))}/*
cat /etc/shadow {shlex.quote(str(hidden))} {shlex.quote(str(store.path))}/* /proc/1/root{tmp_path}/hidden 2>&1
cat /proc/*/environ /proc/1/mem /proc/1/maps /proc/kcore 2>/dev/null | tr '\\0' '\\n' | grep -a {HOST_SECRET}
find / -path /proc -prune -o -path /sys -prune -o -path /usr -prune -o -name 'store.db*' -print 2>/dev/null
echo '|/bin/sh -c x' > /proc/sys/kernel/core_pattern; echo b > /proc/sysrq-trigger; echo 1 > /proc/sys/vm/drop_caches
echo x > /usr/x; echo x > /etc/x; echo x > /opt/x; echo x > /dev/x; mkdir /new
mount -t tmpfs none /mnt; mount --bind /home /usr; umount /proc
unshare -r true && echo UNSHARED; chroot / true && echo CHROOTED
mknod disk b 8 0 && echo NODE; ls /dev/sd* /dev/vd* /dev/nvme* /dev/kvm /dev/mem 2>/dev/null
kill -9 1; kill -15 1; kill -11 1; kill -2 1
python3 -c "
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
print('PTRACED' if libc.ptrace(16, 1, 0, 0) == 0 else 'no ptrace')
print('NEW USERS' if libc.unshare(0x10000000) == 0 else 'no namespaces')
print('KEYRING' if libc.syscall(250, 0, -3, 1) > 0 else 'no keyring')
print('BPF' if libc.syscall(321, 0, 0, 0) >= 0 else 'no bpf')"
grep -E 'CapEff|CapBnd|NoNewPrivs|Seccomp:' /proc/self/status; id; ls /proc | grep -c '^[0-9]'
echo alive
"""
    try:
        record = rolled(store, shell(look), timeouts=RolloutTimeouts(agent=60))
    finally:
        del os.environ["PADDOCK_TEST_SECRET"]
    reply = record.agent_log
    assert "alive" in reply, reply
    signs = (
        "UNSHARED",
        "CHROOTED",
        "NODE",
        "PTRACED",
        "NEW USERS",
        "BPF",
        "root:$",
        "/dev/sd",
        "/dev/vd",
        "store.db",
        HOST_SECRET,
    )
    for sign in signs:
        assert sign not in reply, reply
    assert "CapEff:\t0000000000000000" in reply
    assert "NoNewPrivs:\t1" in reply
    assert "Seccomp:\t2" in reply
    assert Path("/proc/sys/kernel/core_pattern").read_text() == core
    assert not Path("/new").exists()
    gains_nothing(record)


def test_the_model_port_serves_this_rollout_only(store: Store) -> None:
    """Other keys, other ways, and what an honest call may carry."""
    knock = """
import http.client
def code(method, path, headers, body=None):
    connection = http.client.HTTPConnection(place.hostname, place.port, timeout=10)
    connection.request(method, path, body, headers)
    return connection.getresponse().status
own = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
body = json.dumps({"messages": [{"role": "user", "content": "x"}], "model": "policy"})
ways = [("GET", "/metrics"), ("POST", "/v1/weights"), ("POST", "/../admin"), ("GET", "/v1/models"),
        ("POST", "/v1/chat/completions/../../health"), ("PUT", "/v1/chat/completions"), ("CONNECT", "127.0.0.1:22")]
for method, path in ways:
    print(method, path, code(method, path, own))
secret = os.environ["OPENAI_API_KEY"]
for key in ({}, {"Authorization": "Bearer "}, {"Authorization": "Bearer sk-other"}, {"Authorization": "Basic eDp5"},
            {"X-Api-Key": "sk-other"}, {"Authorization": "Bearer " + secret[:-1]}):
    print("key", code("POST", "/v1/chat/completions", key, body))
odd = {**own, "Host": "evil.example", "X-Forwarded-For": "x", "Cookie": "a=b"}
print("host", code("POST", "/v1/chat/completions", odd, body))
"""
    record, server = run(spoken(store, {"turns": [{"text": "hi"}]}, speaker(knock)))
    lines = record.agent_log.splitlines()
    assert [line for line in lines if line.startswith("key")] == ["key 401"] * 6
    assert "GET /v1/models 200" in lines
    assert all(
        line.split()[-1] in ("400", "404", "405") for line in lines if line.split()[0] in ("POST", "PUT", "CONNECT")
    ), lines
    assert "host 200" in lines
    assert [served.headers["Authorization"] for served in server.log] == [f"Bearer {UPSTREAM_KEY}"]
    assert not {"Cookie", "X-Forwarded-For"} & set(server.log[0].headers)
    gains_nothing(record)


def test_the_trace_cannot_be_edited_from_inside(store: Store) -> None:
    """The agent cannot unsay a call: not by hanging up, not by asking again, not by calling it a title."""
    unsay = """
import socket
body = {"messages": [{"role": "user", "content": "x"}], "model": "policy", "tools": TOOLS, "stream": True}
for _ in range(2): post(body)
title = {"role": "system", "content": "You are a title generator"}
post({**body, "tools": [], "messages": [title, *body["messages"]]})
raw = json.dumps({**body, "messages": [{"role": "user", "content": "hang up"}]}).encode()
head = [b"POST /v1/chat/completions HTTP/1.1", b"Host: x", b"Authorization: Bearer %s", b"Content-Length: %d"]
line = b"\\r\\n".join([*head, b"", b""])
connection = socket.create_connection((place.hostname, place.port))
connection.sendall(line % (os.environ["OPENAI_API_KEY"].encode(), len(raw)) + raw)
connection.recv(100)
connection.close()
"""
    script = {"turns": [{"text": "word " * 50}], "faults": [{"when": "hang up", "per_token_delay": 0.05}]}
    record, server = run(spoken(store, script, speaker(unsay)))
    calls = store.calls(record.rollout_id)
    assert [call.role for call in calls] == ["agent", "agent", "title", "agent"]
    assert [call.trainable for call in calls][:2] == [True, True]
    assert (calls[3].aborted, calls[3].trainable) == (True, False)
    assert len(server.log) == 4


# -- with real OpenCode -------------------------------------------------------------------------------


def test_real_opencode_that_cheats_is_paid_nothing(store: Store, tmp_path: Path) -> None:
    """The tools of the real agent do all of it, in one session."""
    commands = [
        f"mkdir -p /logs/verifier; echo 1 > {REWARD}; mkdir -p ~/tests; echo 'echo 1 > {REWARD}' > ~/tests/test.sh",
        f"setsid nohup sh -c 'while :; do echo 1 > {REWARD}; sleep 0.01; done' > /dev/null 2>&1 & echo left",
        "env; cat /proc/1/environ /etc/shadow; kill -9 1; ls /tests /home",
        """echo '{"provider": {"paddock": {"options": {"baseURL": "http://127.0.0.1:9"}}}}' > opencode.json""",
    ]
    turns: list[dict[str, Any]] = [
        {"tool": "bash", "arguments": {"command": command, "description": "do it"}} for command in commands
    ]
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"turns": [*turns, {"text": "Done."}]}))
    task = a_task(timeouts=RolloutTimeouts(agent=60, verifier=10), sandbox=SandboxLimits())
    record = run(run_rollout(task, model=f"replay:{script}", store=store, retries=0), 80)
    assert (record.outcome, record.reward) == (Outcome.OK, 0.0)
    assert record.call_count == 5
    assert record.trainable_calls == 5
