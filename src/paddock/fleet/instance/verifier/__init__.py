"""Running a verifier: a warden process that forks one limited, jailed child for each run.

`paddock.fleet.instance.verifying` is the side of the plane. Nothing in this package runs in the plane's own process.
"""

from __future__ import annotations

import struct

ORDER = struct.Struct("=dQ")
"""A message to the warden: seconds, bytes of memory."""
NOT_RUN = 70
"""The exit code of a child that could not be made ready; the verifier's code was not touched."""
