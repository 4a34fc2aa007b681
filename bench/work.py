"""The work that a step of the slow environments does, the same for every server."""

import os
import time

SLEEP_SECONDS = 0.005
BURN_SECONDS = 0.0002
ROUNDS_VARIABLE = "BENCH_BURN_ROUNDS"

_rounds = int(os.environ.get(ROUNDS_VARIABLE, "5000"))


def sleep() -> None:
    """Block the calling thread without computing, as a step waiting for a disk or a peer does."""
    time.sleep(SLEEP_SECONDS)


def burn() -> int:
    """Compute, as a step that simulates something does.

    A fixed amount of work, not a fixed time: a clock would also run while another thread
    holds the interpreter.
    """
    return _compute(_rounds)


def calibrate() -> None:
    """Make `burn` last about `BURN_SECONDS` on this machine, in the servers started from now on."""
    trial = 1000
    trial_seconds = min(_time(trial) for _ in range(200))
    os.environ[ROUNDS_VARIABLE] = str(round(trial * BURN_SECONDS / trial_seconds))


def _compute(rounds: int) -> int:
    checksum = 0
    for number in range(rounds):
        checksum ^= number * 31
    return checksum


def _time(rounds: int) -> float:
    began = time.perf_counter()
    _compute(rounds)
    return time.perf_counter() - began
