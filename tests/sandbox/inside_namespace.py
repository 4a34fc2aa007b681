"""What the tests of user namespaces call inside of them.

A module of its own, because importing the tests starts programs, and a thread that waits for one forbids a process to
enter a user namespace.
"""

import os
import time
from pathlib import Path


def report_owner(folder: str) -> None:
    os.chdir(int(folder))
    Path("file").touch()
    os.chown("file", 33, 34)
    print(os.getuid(), os.getgid(), os.stat("file").st_uid, os.stat("file").st_gid)


def wait_long() -> None:
    time.sleep(60)
