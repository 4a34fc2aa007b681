"""Running a verifier: a fork server that forks one restricted child process for each run.

Only `runner` runs in the plane's own process. It hands a run to `fork_server`, which forks; `child` restricts itself
 (`restrictions`), runs the verifier's code with its `env` (`environment`), and writes the answer.
"""

from __future__ import annotations

import struct

RUN_HEADER = struct.Struct("=dQ")
"""A message to the fork server: seconds, bytes of memory."""
EXIT_NOT_RUN = 70
"""The exit code of a child that could not be prepared; the verifier's code did not run."""
