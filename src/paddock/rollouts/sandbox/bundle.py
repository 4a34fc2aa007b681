"""Packs programs that run inside a sandbox without Paddock around them into one text.

What they import from Paddock is taken along as it is, so that a rule has one home: the same lines that keep to
it on the host keep to it inside. All of it needs the standard library only (Python 3.10 or later).
"""

from __future__ import annotations

import base64
import json
import zlib
from functools import cache
from pathlib import Path

import paddock

SOURCE = Path(paddock.__file__).parent
SANDBOX = "rollouts.sandbox"
TAKEN = (
    "errors",
    *(f"{SANDBOX}.{name}" for name in ("base", "guard", "files", "supervisor", "switchboard", "steward")),
)
BEGIN = """
import base64,json,sys,types,zlib
def begin(taken):
    for name,text in taken:
        above,_,last=name.rpartition(".")
        parts=above.split(".")
        for count in range(1,len(parts)+1):
            package=".".join(parts[:count])
            if package not in sys.modules:
                sys.modules[package]=types.ModuleType(package)
                sys.modules[package].__path__=[]
        module=sys.modules[name]=types.ModuleType(name)
        setattr(sys.modules[above],last,module)
        exec(compile(text,name,"exec"),module.__dict__)
    module.main()
begin(json.loads(zlib.decompress(base64.b64decode("%s"))))
"""


@cache
def program(*more: str) -> str:
    """The text of the steward, or of the last module in `more`, which builds on it. Run it with `python3 -c`."""
    names = (*TAKEN, *more)
    taken = [(f"paddock.{name}", (SOURCE / f"{name.replace('.', '/')}.py").read_text("utf-8")) for name in names]
    packed = base64.b64encode(zlib.compress(json.dumps(taken).encode(), 9)).decode()
    return BEGIN.strip() % packed
