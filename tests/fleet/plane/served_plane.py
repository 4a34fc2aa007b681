"""A plane in a process of its own, to be killed: `python -m fleet.plane.served_plane FOLDER`. Prints its port."""

import sys
from pathlib import Path

from paddock.fleet.plane import serve_plane

from .running_plane import plane_settings

if __name__ == "__main__":
    serve_plane(
        plane_settings(Path(sys.argv[1]), warm=1),
        announce=lambda url, api_key: print(url.rpartition(":")[2], flush=True),
    )
