"""E2B's own SDK on `paddock e2b up`, without an event loop. Usage: e2b_sync.py, with E2B's variables set."""

import http.client
import io
import json
import os
import time
import urllib.request
from collections.abc import Callable
from typing import Any

from e2b import CommandExitException, PtySize, Sandbox, SandboxQuery

BIG = 20_000_000


def caught(act: Callable[[], Any]) -> list[str]:
    try:
        return ["no error", str(act())]
    except Exception as error:
        return [type(error).__name__, str(error)]


def commands(sandbox: Sandbox) -> Any:
    run = sandbox.commands.run
    done = run("echo $FOO; pwd; whoami; echo wrong >&2")
    try:
        run("echo out; exit 3")
    except CommandExitException as error:
        failed = [error.exit_code, error.stdout]
    received: list[str] = []
    run("echo one; echo two", on_stdout=received.append)
    began = time.monotonic()
    late = caught(lambda: run("echo $$ > late; exec sleep 30", timeout=0.5))
    still = run("until ! kill -0 $(cat late) 2>/dev/null; do sleep 0.02; done; echo gone", timeout=5).stdout
    return {
        "done": [done.stdout, done.stderr, done.exit_code],
        "failed": failed,
        "heard": "".join(received),
        "late": [late[0], time.monotonic() - began < 5, still],
        "env": run("echo $A $PWD", envs={"A": "b"}, cwd="/tmp").stdout.split()[0],
        "no_cwd": caught(lambda: run("true", cwd="/not/there"))[0],
        "unicode": run("echo 'grüße 🐎'; printf '\\xff'").stdout,
        "user": [run("whoami", user="user").stdout, *caught(lambda: run("whoami", user="root"))],
        "much": len(run("head -c 3000000 /dev/zero | tr '\\0' x").stdout),
    }


def background(sandbox: Sandbox) -> Any:
    run, commands = sandbox.commands.run, sandbox.commands
    streamed = [out for out, _, _ in run("echo a; sleep 0.2; echo b", background=True) if out]
    fed = run("cat", background=True, stdin=True)
    commands.send_stdin(fed.pid, "hello ")
    commands.stream_input(fed.pid, iter(["one ", b"two"]))
    commands.close_stdin(fed.pid)
    killed = run("sleep 100", background=True)
    listed = [each.args[-1] for each in commands.list() if each.pid == killed.pid]
    ended = killed.kill()
    after = caught(killed.wait)
    joined = run("sleep 0.3; echo late; exit 4", background=True)
    return {
        "streamed": streamed,
        "fed": fed.wait().stdout,
        "killed": [listed, ended, after[0], commands.kill(killed.pid)],
        "joined": caught(commands.connect(joined.pid).wait)[0],
        "no_stdin": caught(lambda: commands.send_stdin(run("sleep 1", background=True).pid, "x"))[0],
        "nobody": caught(lambda: commands.connect(99999))[0],
    }


def terminal(sandbox: Sandbox) -> Any:
    pty = sandbox.pty.create(PtySize(rows=24, cols=80))
    sandbox.pty.resize(pty.pid, PtySize(rows=40, cols=100))
    sandbox.pty.send_stdin(pty.pid, b"stty size; test -t 0 && echo tty-$((1+1)); exit\n")
    seen = b"".join(data for _, _, data in pty if data)
    return {"size": b"40 100" in seen, "tty": b"tty-2" in seen}


def files(sandbox: Sandbox) -> Any:
    files, run = sandbox.files, sandbox.commands.run
    written = files.write("new/ü n.txt", "hällo")
    run("ln -s new linked; ln -s nowhere dangling; chmod 600 'new/ü n.txt'; mkdir -p deep/er")
    info = files.get_info("new/ü n.txt")
    renamed = files.rename("new/ü n.txt", "other/moved.txt")
    files.write_files([{"path": "m/1", "data": "1"}, {"path": "/tmp/2", "data": b"\xff"}])
    data = os.urandom(BIG)
    files.write("big", data)
    files.write("streamed", io.BytesIO(data[:5_000_000]))
    files.write("packed", data[:100_000], gzip=True)
    made = [files.make_dir("x/y"), files.make_dir("x/y")]
    files.remove("x")
    return {
        "written": [written.path, written.name],
        "info": [info.size, info.permissions, info.owner, info.type.value],
        "links": [files.get_info(name).type.value for name in ("linked", "dangling")],
        "target": files.get_info("linked").symlink_target,
        "moved": [renamed.path, files.read("/home/user/other/moved.txt"), files.exists("new/ü n.txt")],
        "listed": [entry.path for entry in files.list("/home/user/deep", depth=1)],
        "deeper": [entry.path for entry in files.list("deep", depth=2)],
        "several": [files.read("~/m/1"), bytes(files.read("/tmp/2", format="bytes"))[0]],
        "big": bytes(files.read("big", format="bytes")) == data,
        "streamed": b"".join(files.read("streamed", format="stream")) == data[:5_000_000],
        "packed": bytes(files.read("packed", format="bytes", gzip=True)) == data[:100_000],
        "made": [*made, files.exists("x")],
        "metadata": files.write("marked", "x", metadata={"Kind": "v"}) and files.get_info("marked").metadata,
        "missing": caught(lambda: files.read("nothing"))[0],
        "a_folder": caught(lambda: files.read("/home/user"))[0],
        "not_a_folder": caught(lambda: files.list("/home/user/marked"))[0],
        "forbidden": caught(lambda: files.write("/proc/paddock", "y"))[0],
        "no_root": caught(lambda: files.write("/etc/x", "y", user="root")),
    }


def watched(sandbox: Sandbox) -> Any:
    sandbox.files.make_dir("w")
    watch = sandbox.files.watch_dir("w", recursive=True, include_entry=True)
    sandbox.files.write("w/a", "x")
    sandbox.commands.run("mkdir w/sub; sleep 0.1; echo > w/sub/b; chmod 600 w/a; mv w/a w/c; rm w/c")
    events = [(event.name, event.type.value) for event in watch.get_new_events()]
    watch.stop()
    return {"events": events, "stopped": caught(watch.get_new_events)[0]}


def ports(sandbox: Sandbox) -> Any:
    sandbox.files.write("site/page", "served")
    sandbox.commands.run("cd site && exec python3 -m http.server 8000 --bind 127.0.0.1", background=True)
    sandbox.commands.run("until (echo > /dev/tcp/127.0.0.1/8000) 2>/dev/null; do sleep 0.02; done")
    return {"page": fetch(sandbox.get_host(8000), "/page"), "closed": fetch(sandbox.get_host(9), "/")}


def fetch(host: str, path: str) -> list[Any]:
    # The name is one of localhost, which not every resolver knows.
    connection = http.client.HTTPConnection("127.0.0.1", int(host.rpartition(":")[2]), timeout=10)
    connection.request("GET", path, headers={"Host": host})
    answer = connection.getresponse()
    return [answer.status, answer.read().decode()]


def signed(sandbox: Sandbox) -> Any:
    sandbox.files.write("signed", "by its token")
    good = sandbox.download_url("signed", use_signature_expiration=60)
    with urllib.request.urlopen(good, timeout=10) as answer:
        content = answer.read().decode()
    return {
        "good": content,
        "bad": caught(lambda: urllib.request.urlopen(good.replace("v1_", "v1_x"), timeout=10))[0],
    }


def lives(sandbox: Sandbox) -> Any:
    same = Sandbox.connect(sandbox.sandbox_id)
    wanted = SandboxQuery(metadata={"of": "grüße & mehr"})
    short = Sandbox.create(timeout=1)
    began = time.monotonic()
    while short.is_running() and time.monotonic() - began < 10:
        time.sleep(0.05)
    before = sandbox.get_info().end_at
    sandbox.set_timeout(500)
    return {
        "connected": same.commands.run("echo $FOO").stdout,
        "found": [each.sandbox_id == sandbox.sandbox_id for each in Sandbox.list(query=wanted).next_items()],
        "info": [sandbox.get_info().metadata, sandbox.get_info().state.value, sandbox.get_info().template_id],
        "later": sandbox.get_info().end_at > before,
        "ended": [short.is_running(), 0.5 < time.monotonic() - began < 8],
        "after": caught(lambda: short.commands.run("true"))[0],
        "metrics": sandbox.get_metrics()[0].mem_total > 0,
        "pause": caught(sandbox.pause),
        "bad_key": caught(lambda: Sandbox.create(api_key="e2b_" + "0" * 40))[0],
        "no_such": caught(lambda: Sandbox.connect("sb-nothing"))[0],
        "too_long": caught(lambda: sandbox.set_timeout(10**7))[0],
        "killed": [sandbox.kill(), sandbox.is_running(), sandbox.kill()],
    }


def interpreter() -> Any:
    """Its sandbox is made; its kernel is a server of E2B's template, which is not here."""
    from e2b_code_interpreter import Sandbox as Interpreter

    with Interpreter.create(timeout=30) as sandbox:
        return [sandbox.commands.run("echo made").stdout, caught(lambda: sandbox.run_code("1+1"))[0] != "no error"]


def main() -> None:
    sandbox = Sandbox.create(timeout=120, metadata={"of": "grüße & mehr"}, envs={"FOO": "bar"})
    reply = {part.__name__: part(sandbox) for part in (commands, background, terminal, files, watched, ports, signed)}
    print(json.dumps({**reply, "interpreter": interpreter(), "lives": lives(sandbox)}))


if __name__ == "__main__":
    main()
