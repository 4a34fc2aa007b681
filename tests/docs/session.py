"""A page as a reader works through it: its blocks in their order, in one shell and one folder.

The text of a block is changed in four ways. Ports become free ones. A URL that ends with /v1 becomes that of a
scripted model. Words in capitals such as ID become what a reader writes there. A command that serves goes on in the
background, in place of an earlier one on that port, and the next line begins once it listens.
"""

import os
import random
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from scripts.docs import REPOSITORY
from scripts.docs.blocks import FILE, RUN, Block

HERE = Path(__file__).parent
RUN_PYTHON = HERE / "run_python.py"
SETUPS = HERE / "setups"
SECONDS = 480.0
"""For all blocks of a page, on a machine with other work to do."""
TIMED_OUT = 124

SHELL = """set -eE -o pipefail
declare -A SERVERS
trap 'echo "the block at $BLOCK failed" >&2' ERR
serve() {
    local port=$1; shift
    if [ -n "${SERVERS[$port]-}" ]; then
        kill "${SERVERS[$port]}" 2>/dev/null || true
        wait "${SERVERS[$port]}" || true
    fi
    : > "$HOME/server-$port"
    "$@" >> "$HOME/server-$port" 2>&1 &
    SERVERS[$port]=$!
    until grep -q "http://" "$HOME/server-$port"; do
        if ! kill -0 "${SERVERS[$port]}"; then cat "$HOME/server-$port"; return 1; fi
        sleep 0.1
    done
}
"""
END = """
if [ -n "$(jobs -p)" ]; then kill $(jobs -p) || true; fi
wait
"""

MODEL_URL = re.compile(r"http://(?:127\.0\.0\.1|localhost|model):\d+/v1\b")
LOCAL_PORT = re.compile(r"(?<=\b127\.0\.0\.1:)\d+|(?<=\blocalhost:)\d+|(?<=--port )\d+")
PLACEHOLDERS = (
    (re.compile(r"(?<=--model )URL\b"), "{model_url}"),
    (re.compile(r"(?<= )TASK\b"), "fix-test"),
    (re.compile(r"(?<= )ID\b"), "latest"),
    (re.compile(r"(?<= )SET\b"), "shipped"),
    (re.compile(r"(?<= )BATCH\b"), "{batch}"),
)
"""Words in capitals that a reader replaces."""
FLEET_PORT = 8700
DEFAULT_PORTS = {"serve": 8000, "fleet up": FLEET_PORT, "e2b up": 3717, "view": None, "trace view": None}
"""Of the commands that serve. The page of rollouts takes any free port."""
SERVES = re.compile(rf"((?:\w+=\S+ +)*)paddock ({'|'.join(DEFAULT_PORTS)})\b(.*?)(?: &)? *(?:#.*)?")


@dataclass
class Session:
    folder: Path
    model_url: str
    """Of a model that plays the shipped script."""
    batch: str = ""
    """A batch in the store."""
    variables: dict[str, str] = field(default_factory=dict)
    ports: dict[int, int] = field(default_factory=dict)
    """The ports that pages name, and those that are used."""

    def run(self, blocks: Iterable[Block]) -> subprocess.CompletedProcess[str]:
        """Run blocks of one page. Everything that they started has ended afterwards."""
        script = self.folder / "page.sh"
        script.write_text(SHELL + "".join(self.commands(list(blocks))) + END)
        work = self.folder / "work"
        work.mkdir()
        log = self.folder / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["bash", script], cwd=work, env=self.environment(), start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            )  # fmt: skip
            try:
                code = process.wait(SECONDS)
            except subprocess.TimeoutExpired:
                code = TIMED_OUT
            finally:
                end_group(process.pid)
        return subprocess.CompletedProcess(process.args, code, log.read_text(errors="replace"))

    def commands(self, blocks: list[Block]) -> Iterable[str]:
        before = ""
        for block in blocks:
            text = self.replace(block)
            if block.use == FILE:
                assert block.file is not None
                yield f"mkdir -p {Path(block.file).parent} && cp {self.save(block, text)} {block.file}\n"
            elif block.use == RUN:
                yield f"\nBLOCK={block}\n"
                if block.language == "python":
                    before = before + text if block.continues else text
                    setup = SETUPS / f"{block.setup}.py" if block.setup else ""
                    yield f"python {RUN_PYTHON} {self.save(block, before)} {self.save_setup(setup)}\n"
                else:
                    yield text

    def save(self, block: Block, text: str) -> Path:
        return self._write(f"{block.page.stem}_{block.line}.py", text)

    def save_setup(self, setup: Path | str) -> Path | str:
        return self._write(Path(setup).name, self.replace_urls(Path(setup).read_text())) if setup else ""

    def _write(self, name: str, text: str) -> Path:
        path = self.folder / "blocks" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    # -- the text of a block --------------------------------------------------------------------------

    def replace(self, block: Block) -> str:
        text = self.replace_urls(block.text)
        if block.language != "sh" or block.use == FILE:
            return text
        for pattern, value in PLACEHOLDERS:
            text = pattern.sub(value.format(model_url=self.model_url, batch=self.batch), text)
        return "".join(self.replace_server(line) + "\n" for line in text.splitlines())

    def replace_urls(self, text: str) -> str:
        text = MODEL_URL.sub(self.model_url, text)
        return LOCAL_PORT.sub(lambda match: str(self.port(int(match[0]))), text)

    def replace_server(self, line: str) -> str:
        match = SERVES.fullmatch(line)
        if match is None or "--help" in line:
            return line
        variables, command, arguments = match.groups()
        named, default = re.search(r"--port (\d+)", arguments), DEFAULT_PORTS[command]
        if default is None:
            arguments = arguments.replace(" --no-open", "") + " --no-open"
            return f"{variables}serve view paddock {command}{arguments}"
        port = int(named[1]) if named else self.port(default)
        more = "" if named else f" --port {port}"
        return f"{variables}serve {port} paddock {command}{arguments}{more}"

    def port(self, named: int) -> int:
        if named not in self.ports:
            # The scripted model's port is in the text already.
            self.ports[named] = named if f":{named}/" in self.model_url else free_port()
        return self.ports[named]

    def environment(self) -> dict[str, str]:
        """Nothing of the user's: state is kept in the folder of the session."""
        home = self.folder / "home"
        home.mkdir()
        kept = {name: value for name, value in os.environ.items() if not is_foreign(name)}
        return {
            **kept,
            "PATH": f"{Path(sys.executable).parent}:{kept['PATH']}",
            "HOME": str(home),
            "PYTHONPATH": str(REPOSITORY),
            "NO_COLOR": "1",
            "FILES": str(HERE / "files"),
            "PADDOCK_STORE": str(self.folder / "store"),
            "FLEET_BASE_URL": f"http://127.0.0.1:{self.port(FLEET_PORT)}",
            **self.variables,
        }


def is_foreign(name: str) -> bool:
    return name.lower().endswith("_proxy") or name.startswith(("PADDOCK_", "FLEET_", "XDG_", "E2B_", "COV_"))


def free_port() -> int:
    """Not one of those that outgoing connections get, which could take it before the server does."""
    while True:
        port = random.randrange(10_000, 32_000)
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


def end_group(pid: int) -> None:
    """End what a block left running in the background."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
