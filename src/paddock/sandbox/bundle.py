"""Packs the guest into one program that needs no file of Paddock inside the sandbox.

The modules keep their names: a small importer finds them in the bundle when they are imported. A local guest reads
its bundle from a descriptor, with compiled code beside the text: where it runs the same version of Python as its
owner, nothing has to be compiled. A guest elsewhere gets the text alone, as part of its command line.
"""

from __future__ import annotations

import base64
import importlib.util
import marshal
import zlib
from functools import cache
from pathlib import Path

import paddock

MARSHAL_VERSION = 2
"""Read alike by every Python 3."""
SOURCE = Path(paddock.__file__).parent
LOCAL = (
    *("sandbox.guest.transports", "sandbox.guest.multiplexer", "sandbox.guest.usage", "sandbox.guest.commands"),
    *("sandbox.guest.main", "sandbox.guest.verifier_policy", "sandbox.guest.sibling_sandbox", "sandbox.guest.users"),
)
REMOTE = (*LOCAL, "errors", "sandbox.guest.entry", "sandbox.guest.files")
ENTRY = "sandbox.guest.main"

IMPORTER = """
import marshal,os,sys
class Importer:
    def __init__(self,magic,modules):
        self.modules=modules
        self.same=magic==sys.modules["_frozen_importlib_external"].MAGIC_NUMBER
        for name in list(modules):
            while "." in name:
                name=name.rpartition(".")[0]
                modules.setdefault(name,None)
    def find_spec(self,name,path=None,target=None):
        if name in self.modules:
            return sys.modules["_frozen_importlib"].ModuleSpec(name,self,is_package=self.modules[name] is None)
    def create_module(self,spec):
        return None
    def exec_module(self,module):
        if self.modules[module.__name__] is not None:
            text,code=self.modules[module.__name__]
            run=marshal.loads(code) if self.same and code else compile(text,module.__name__,"exec")
            exec(run,module.__dict__)
"""
START = """
sys.meta_path.insert(0,Importer(*marshal.loads(bundle)))
from paddock.{entry} import main
main()
"""
FROM_DESCRIPTOR = """
bundle=os.pread(int(sys.argv.pop(1)),1<<24,0)
"""
FROM_TEXT = """
import base64,zlib
bundle=zlib.decompress(base64.b64decode("{packed}"))
"""


@cache
def local_program() -> tuple[str, bytes]:
    """The text to run with `python3 -c`, and the bundle. Its first argument is a descriptor of the bundle."""
    return f"{IMPORTER}{FROM_DESCRIPTOR}{START.format(entry=ENTRY)}", pack(LOCAL, compiled=True)


@cache
def remote_program(*more: str) -> str:
    """The guest as one text, to run with `python3 -c`. The last module in `more` is its entry, if there is one."""
    packed = base64.b64encode(zlib.compress(pack((*REMOTE, *more), compiled=False), 9)).decode()
    entry = more[-1] if more else ENTRY
    return f"{IMPORTER}{FROM_TEXT.format(packed=packed)}{START.format(entry=entry)}"


def pack(names: tuple[str, ...], *, compiled: bool) -> bytes:
    modules = {}
    for name in names:
        text = module_text(name)
        full_name = f"paddock.{name}"
        code = compile(text, full_name, "exec", dont_inherit=True) if compiled else None
        modules[full_name] = (text, marshal.dumps(code) if code is not None else b"")
    return marshal.dumps((importlib.util.MAGIC_NUMBER, modules), MARSHAL_VERSION)


@cache
def module_text(name: str) -> str:
    return (SOURCE / f"{name.replace('.', '/')}.py").read_text("utf-8")
