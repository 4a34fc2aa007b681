# mypy: disable-error-code="import-not-found,misc"
"""Any OpenEnv environment on OpenEnv's own server, as its documentation says to.

Runs in OpenEnv's own virtual environment: `python -m bench.openenv_class_app PLACE --port 8000`. The place is
found as Paddock finds it, so both serve the same class; every setting of the server is uvicorn's default.
"""

import argparse
import importlib.util
from pathlib import Path
from typing import Any

import uvicorn
from openenv.core.env_server import create_app

LOADER = Path(__file__).parent.parent / "src" / "paddock" / "adapters" / "openenv" / "hosted.py"


def find_class(place: str) -> Any:
    spec = importlib.util.spec_from_file_location("hosted", LOADER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.load(place)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("place")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--max-sessions", type=int, default=1)
    options = parser.parse_args()
    hosted = find_class(options.place)
    app = create_app(
        hosted.make, hosted.action, hosted.observation, env_name="bench", max_concurrent_envs=options.max_sessions
    )
    uvicorn.run(app, host=options.host, port=options.port)


if __name__ == "__main__":
    main()
