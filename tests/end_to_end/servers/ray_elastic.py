"""The counter on one to two hosts of one slot each, which shrink soon. Usage: ray_elastic.py RAY_ADDRESS"""

import json
import sys

from paddock.config import Limits, ServerConfig
from paddock.scale.autoscale import ScalingPolicy
from paddock.scale.cluster_service import ClusterConfig, serve_on_ray

settings = ClusterConfig(
    "counter",
    "counter",
    ServerConfig(Limits(max_sessions=2, drain_grace=1.0)),
    ScalingPolicy(1, 2, grow_after=0.2, shrink_after=0.5),
    port=0,
    mode="redirect",
    ray_address=sys.argv[1],
)
serve_on_ray(settings, lambda url: print(json.dumps({"url": url}), flush=True))
