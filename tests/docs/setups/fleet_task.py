import json
import os
from pathlib import Path

os.environ["FLEET_API_KEY"] = Path("~/.local/share/paddock/fleet/api_key").expanduser().read_text()
task = json.loads(Path("tasks.json").read_text())[0]
