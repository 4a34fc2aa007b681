"""What a check needs: read the agent's files, run its program apart, and write the verdict.

The agent's code is never imported by the process that decides. It runs in a process that cannot put a
byte into any file, and all that it started is ended before the verdict is written, as the last act.
"""

import ctypes
import json
import os
import resource
import shutil
import signal
import stat
import subprocess
import threading
import time
from pathlib import Path

LOGS = Path("/logs/verifier")
FILE_LIMIT = 4_000_000
OUTPUT_LIMIT = 1_000_000
RUN_SECONDS = 5.0
ALL_RUNS_SECONDS = 40.0
PR_SET_CHILD_SUBREAPER = 36
spent = []


def read(path):
    """The bytes of a plain file; None for anything else, such as a link or a pipe."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (OSError, ValueError):
        return None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        return None
    with open(descriptor, "rb") as file:
        data = file.read(FILE_LIMIT + 1)
    return data if len(data) <= FILE_LIMIT else None


def run(argv, stdin=b"", timeout=RUN_SECONDS):
    """Exit status (None if it had to be ended), standard output and standard error of a program.

    All runs together have `ALL_RUNS_SECONDS`, so that a program that hangs is wrong, not unknown.
    """
    timeout = min(timeout, ALL_RUNS_SECONDS - sum(spent))
    if timeout <= 0:
        return None, b"", b""
    began = time.monotonic()
    process = subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={"PATH": os.environ.get("PATH", os.defpath), "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"},
        start_new_session=True,
        preexec_fn=_forbid_writing,
    )
    kept = [b"", b""]
    workers = [threading.Thread(target=_feed, args=(process.stdin, stdin), daemon=True)]
    for index, stream in enumerate((process.stdout, process.stderr)):
        workers.append(threading.Thread(target=_keep, args=(process, stream, kept, index), daemon=True))
    for worker in workers:
        worker.start()
    try:
        status = process.wait(timeout)
    except subprocess.TimeoutExpired:
        status = None
        process.kill()
        process.wait()
    end_the_rest()
    for worker in workers:
        worker.join(RUN_SECONDS)
    spent.append(time.monotonic() - began)
    return status, kept[0], kept[1]


def end_the_rest():
    """End every process that was started from here, also one that went into the background."""
    for _ in range(100):
        children = _children()
        if not children:
            return
        for child in children:
            try:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            except (ProcessLookupError, ChildProcessError):
                pass


def conclude(reward, parts):
    """Write the verdict. Nothing may come after it."""
    end_the_rest()
    LOGS.mkdir(parents=True, exist_ok=True)
    verdict = {"reward.json": json.dumps({"reward": reward, "parts": parts}), "reward.txt": str(reward)}
    for name, content in verdict.items():
        path = LOGS / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644), "w") as file:
            file.write(content + "\n")
    print(f"reward {reward}", parts)


def _forbid_writing():
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def _feed(stream, data):
    try:
        stream.write(data)
        stream.close()
    except OSError:
        pass


def _keep(process, stream, kept, index):
    kept[index] = stream.read(OUTPUT_LIMIT)
    if len(kept[index]) == OUTPUT_LIMIT:
        process.kill()
    stream.close()


def _children():
    """Processes whose parent is this one. Orphans below it become its own (see the last line here)."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == os.getpid():
            found.append(int(entry.name))
    return found


ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
