"""The process of a local model: it loads weights with llama.cpp, prints its URL, and ends with its parent.

    python -m paddock.models.local_server --weights FILE --parent PID

It answers llama.cpp's routes on a free port of the loopback: `/v1/chat/completions`, `/apply-template`,
`/tokenize`, `/props`.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1
PROMPT_CACHE_MEBIBYTES = 512


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--context", type=int, default=8192)
    options = parser.parse_args()
    end_with_parent(options.parent)
    server = load(options.weights, threads=options.threads, context=options.context)
    print(server.listening_address, flush=True)
    # Nobody reads our output from here on.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    threading.Event().wait()


def end_with_parent(parent: int) -> None:
    """End this process when the parent closes our input, and when it is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
    threading.Thread(target=_exit_at_end_of_input, daemon=True).start()


def load(weights: Path, *, threads: int, context: int) -> Any:
    """A llama.cpp server that listens. Loading blocks; it answers when this returns."""
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(weights)
    parameters.model_alias = {weights.stem}
    parameters.n_ctx = context
    parameters.n_parallel = 1
    parameters.cpuparams.n_threads = threads
    parameters.cpuparams_batch.n_threads = threads
    parameters.cache_ram_mib = PROMPT_CACHE_MEBIBYTES
    parameters.port = 0
    parameters.ui = False
    parameters.endpoint_slots = False
    parameters.verbosity = 0
    return xllamacpp.Server(parameters)


def _exit_at_end_of_input() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    main()
