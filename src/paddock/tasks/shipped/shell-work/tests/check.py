"""Look at what lies in the work folder now. Nothing of the agent's is run."""

import hashlib
import json
import os
import stat
from pathlib import Path

MOST_BYTES = 4_000_000
SORTED = {
    "sorted/2024-03/billing eu_20240315.log": "112466d4a2da35d3",
    "sorted/2024-03/db_20240301.log": "d6175ae48bd9e9b4",
    "sorted/2024-03/web_20240301.log": "8c15b6e63b0724b6",
    "sorted/2024-03/web_20240302.log": "8eff797c0a22f711",
    "sorted/2024-04/billing eu_20240415.log": "3325a2ea0ab5748f",
    "sorted/2024-04/cache-eu_20240401.log": "4e89c310294682e8",
    "sorted/2024-04/cache-us_20240401.log": "db03ced41745d38a",
    "sorted/2024-04/db_20240403.log": "28bab4f49f914eee",
    "sorted/2024-04/mail_20240402.log": "6225d151c17e20e6",
    "sorted/2024-04/web_20240401.log": "eb7f5169d56b419c",
}
LEFT = {"inbox/notes.txt": "8f4ad23c495e9fad", "inbox/web-2024-03-01.log.bak": "251e5302c2f56651"}
REMOVED = ["billing eu-2024-03-16.log", "db-2024-03-02.log", "mail-2024-03-30.log"]
REPORT = ["4 billing eu", "3 db", "3 web", "1 cache-eu", "1 cache-us", "0 mail"]


def read(path):
    """The bytes of a plain file of reasonable size; None for anything else, such as a link or a pipe."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (OSError, ValueError):
        return None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > MOST_BYTES:
            return None
        return os.read(descriptor, MOST_BYTES)
    finally:
        os.close(descriptor)


def tree(root):
    """The start of the digest of every file below a folder; None for what is not a plain file."""
    if os.path.islink(root):
        return {}
    digests = {}
    for folder, folders, files in os.walk(root):
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        for name in [*files, *links]:
            path = os.path.join(folder, name)
            data = read(path)
            digests[path] = None if data is None else hashlib.sha256(data).hexdigest()[:16]
    return digests


def lines(path):
    data = read(path)
    return None if data is None else data.decode(errors="replace").removesuffix("\n").split("\n")


sorted_files = tree("sorted")
right = sum(sorted_files.get(path) == digest for path, digest in SORTED.items())
extra = len(sorted_files.keys() - SORTED.keys())
parts = {
    "sorted": max(0, right - extra) / len(SORTED),
    "inbox": float(tree("inbox") == LEFT),
    "removed": float(lines("removed.txt") == REMOVED),
    "report": float(lines("report.txt") == REPORT),
}
reward = round(sum(parts.values()) / len(parts), 4)
Path("/logs/verifier/reward.json").write_text(json.dumps({"reward": reward, "parts": parts}))
print("reward", reward, parts)
