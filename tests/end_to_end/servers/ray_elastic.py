"""The counter on one to two hosts of one slot each, which shrink soon. Usage: ray_elastic.py RAY_ADDRESS"""

import json
import sys

from paddock.config import Limits, ServerConfig
from paddock.scale.autoscale import Scale
from paddock.scale.supervisor import ServePlan, serve_on_ray

plan = ServePlan(
    "counter",
    "counter",
    ServerConfig(Limits(max_sessions=2, drain_grace=1.0)),
    Scale(1, 2, grow_after=0.2, shrink_after=0.5),
    port=0,
    mode="redirect",
    ray_address=sys.argv[1],
)
serve_on_ray(plan, lambda url: print(json.dumps({"url": url}), flush=True))
