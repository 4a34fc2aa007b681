"""Files: read, written, listed and packed from outside, and never over a link."""

from __future__ import annotations

import os
import tarfile

from paddock.errors import SandboxError
from paddock.limits import MEBIBYTE
from paddock.sandbox.guest.entry import Entry
from paddock.testing.checks import Wrong, require
from paddock.testing.sandbox.commands import it_runs_a_command
from paddock.testing.sandbox.subject import (
    SandboxSubject,
    archive_of,
    check,
    names_in,
    refuses,
)


@check("read and write bytes as they are", needs=[it_runs_a_command])
async def files_are_exchanged(subject: SandboxSubject) -> None:
    data = os.urandom(300_000)
    await subject.shared.write("/home/user/new/folder/data.bin", data, mode=0o755)
    require(await subject.shared.read("/home/user/new/folder/data.bin") == data, "other bytes came back")
    done = await subject.run("cd /home/user/new/folder && [ -x data.bin ] && touch more && wc -c < data.bin")
    require(done.stdout.strip() == b"300000", f"inside it looks different: {done}")


@check("/logs is the folder logs of the home; logs/verifier is there from the start", needs=[files_are_exchanged])
async def the_logs_are_in_one_place(subject: SandboxSubject) -> None:
    require((await subject.run("echo 1 > /logs/verifier/reward.txt")).exit_code == 0, "/logs/verifier is missing")
    for path in ("/logs/verifier/reward.txt", "/home/user/logs/verifier/reward.txt"):
        require(await subject.shared.read(path) == b"1\n", f"{path} is another file")


@check("spec.readonly_tests are below /tests, test.sh can be run", needs=[it_runs_a_command])
async def the_tests_are_there(subject: SandboxSubject) -> None:
    done = await subject.run("/tests/test.sh && cat /home/user/tests/data/expected.txt")
    require(done.stdout == b"tested\n42", f"got {done}")


@check("FileNotFoundError for what is missing, SandboxError for what is too big or not a file")
async def unreadable_files_are_refused(subject: SandboxSubject) -> None:
    await subject.run("mkfifo pipe; head -c 1000 /dev/zero > thousand")
    try:
        await subject.shared.read("/home/user/workdir/missing")
    except FileNotFoundError:
        pass
    else:
        raise Wrong("a missing file could be read")
    await refuses(subject.shared.read("/home/user/workdir/pipe"), "a pipe was read")
    await refuses(subject.shared.read("/home/user/workdir/thousand", limit=999), "a file above the limit was read")
    await refuses(subject.shared.read("/home/user/workdir"), "a folder was read")
    require(len(await subject.shared.read("/home/user/workdir/thousand", limit=1000)) == 1000, "not read in full")


@check("take every step of a path by itself, with O_NOFOLLOW", needs=[files_are_exchanged])
async def links_are_never_followed(subject: SandboxSubject) -> None:
    await subject.run("mkdir -p real && echo x > real/file && ln -s real/file link && ln -s real linked")
    await subject.run("ln -s /etc/passwd absolute && ln -s / root && ln -s new.txt dangling")
    for path in ("link", "linked/file", "absolute", "root/etc/passwd"):
        full = f"/home/user/workdir/{path}"
        await refuses(subject.shared.read(full), f"{path} was read")
        await refuses(subject.shared.write(full, b"y"), f"{path} was written")
    await refuses(subject.shared.write("/home/user/workdir/dangling", b"y"), "a dangling link was written through")
    for folder in ("linked", "root"):
        await refuses(subject.shared.list(f"/home/user/workdir/{folder}"), f"{folder} was listed")
        await refuses(subject.shared.pack(f"/home/user/workdir/{folder}", limit=MEBIBYTE), f"{folder} was packed")
    for outside in ("/home/user/../../etc/passwd", "../../../etc/passwd", "/etc/passwd"):
        await refuses(subject.shared.read(outside), f"{outside} was read")
    require(await subject.shared.read("/home/user/workdir/real/file") == b"x\n", "the real file was changed")


@check("list everything below, links as links", needs=[files_are_exchanged])
async def folders_are_listed(subject: SandboxSubject) -> None:
    await subject.run("mkdir -p /home/user/listed/sub && cd /home/user/listed && echo 123 > sub/f && ln -s sub l")
    entries = await subject.shared.list("/home/user/listed")
    require(
        [(entry.path, entry.kind) for entry in entries] == [("l", "link"), ("sub", "folder"), ("sub/f", "file")],
        entries,
    )
    require(entries[2] == Entry("sub/f", "file", 4, 0o644), f"got {entries[2]}")
    await refuses(subject.shared.list("/home/user/listed", limit=2), "more entries than the limit came")


@check("equal folders give equal archives, and unpack restores them", needs=[folders_are_listed])
async def folders_are_packed_and_unpacked(subject: SandboxSubject) -> None:
    make = "mkdir -p sub/empty && echo 1 > b && echo 2 > sub/a && chmod 755 b && ln -s ../b sub/l && mkfifo p"
    await subject.run(f"mkdir /home/user/one && cd /home/user/one && {make}")
    first = await subject.shared.pack("/home/user/one", limit=MEBIBYTE)
    await subject.shared.unpack("/home/user/two", first)
    require(await subject.shared.pack("/home/user/two", limit=MEBIBYTE) == first, "not the same after unpacking")
    done = await subject.run(
        "cd /home/user/two && cat sub/l && [ -x b ] && [ -d sub/empty ] && [ ! -e p ] && echo ok"
    )
    require(done.stdout == b"1\nok\n", f"got {done}")
    try:
        await subject.shared.pack("/home/user/one", limit=1000)
    except SandboxError as error:
        require(error.data.get("limit") is not None, "the error does not say that the limit was exceeded")
    else:
        raise Wrong("an archive above the limit was made")
    small = await subject.shared.pack("/home/user/one", limit=MEBIBYTE, exclude=["sub", "absent"])
    require(names_in(small) == ["b"], f"with sub left out it holds {names_in(small)}")
    file = await subject.shared.pack("/home/user/one/b", limit=MEBIBYTE)
    require(names_in(file) == ["."], f"the archive of a file holds {names_in(file)}")


@check("refuse archives that lead outside", needs=[folders_are_packed_and_unpacked])
async def archives_cannot_lead_outside(subject: SandboxSubject) -> None:
    await subject.run("mkdir /home/user/trap /home/user/outside && ln -s ../outside /home/user/trap/link")
    hard = tarfile.TarInfo("hard")
    hard.type, hard.linkname = tarfile.LNKTYPE, "../outside"
    members = [tarfile.TarInfo(name) for name in ("../up", "/absolute", "link/through")]
    for member in (*members, hard):
        await refuses(subject.shared.unpack("/home/user/trap", archive_of(member)), f"{member.name} was unpacked")
    require(await subject.shared.list("/home/user/outside") == [], "something got out")
