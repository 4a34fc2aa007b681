"""What idle sessions cost a server: resident memory and threads."""

import subprocess
import time
from dataclasses import dataclass

from scripts.peers import REPOSITORY

from bench.processes import group_usage, wait_quiet
from bench.samples import load_command, note
from bench.servers import ServerSpec, running

RELEASE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Footprint:
    """The growth over the server as it was before its first session."""

    session_kibibytes: float
    threads: int
    """All threads of the server, not only those that the sessions added."""


def idle_footprint(spec: ServerSpec, sessions: int) -> Footprint:
    """Start a fresh server, open sessions (connect and reset), and read `/proc` while they idle."""
    with running(spec) as server:
        wait_quiet([server.group])
        before = group_usage(server.group)
        began = time.monotonic()
        holder = subprocess.Popen(
            load_command(server, "idle", sessions=sessions),
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert holder.stdout is not None
            if holder.stdout.readline() != "open\n":
                raise RuntimeError(f"{sessions} sessions could not be opened on {spec}")
            wait_quiet([server.group])
            after = group_usage(server.group)
            holder.communicate("release\n", timeout=RELEASE_SECONDS)
        finally:
            holder.kill()
            holder.wait()
    grown = (after.resident_bytes - before.resident_bytes) / 1024 / sessions
    elapsed = time.monotonic() - began
    note(
        f"idle: {spec.label} {grown:.1f} KiB per session, {after.threads} threads, "
        f"{after.resident_bytes / 2**20:.0f} MiB in all, {elapsed:.0f} s"
    )
    return Footprint(grown, after.threads)
