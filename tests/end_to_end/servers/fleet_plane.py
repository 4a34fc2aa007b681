"""A plane with notes and echo: `fleet_plane.py PORT FOLDER KEY [gate]`."""

import sys
from pathlib import Path

from paddock.fleet.plane import HostedEnvironment, PlaneSettings, serve_plane

if __name__ == "__main__":
    port, folder, key, *gate = sys.argv[1:]
    serve_plane(
        PlaneSettings(
            state=Path(folder),
            environments=(HostedEnvironment("notes", "notes", ("v1", "v2"), "v1"), HostedEnvironment("echo", "echo")),
            port=int(port),
            api_key=key,
            instance_limit=6,
            gate=bool(gate),
            faults=True,
        )
    )
