"""The server and the plane as the page shows them, from the same snapshots as /health and /metrics."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Any

import orjson

import paddock
from paddock.telemetry.metrics import BOUNDS
from paddock.web.streams import event

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from paddock.fleet.control.plane import Plane
    from paddock.server.service import Service

PATH = "/web/api/server"
ADDED = ("sessions", "waiting", "running", "hung", "threads")
TELL_EVERY = 1.0
MOST_INSTANCES = 1000
START_BOUNDS = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


async def server(service: Service, *, alone: bool = False) -> dict[str, Any]:
    """The server with all its workers, or this process `alone`."""
    own = await _server(service)
    others_here = service.colleagues or service.peers
    if others_here is None or alone:
        return own
    token = service.config.access.token
    known = {"host": "127.0.0.1", **({"authorization": f"Bearer {token}"} if token else {})}
    others = [orjson.loads(answer) for answer in await others_here.gather(PATH, known)]
    whole = merged([own, *(each for each in others if "sessions" in each)])
    if service.peers is not None:
        whole["health"]["capacity"] = sum(each["health"]["capacity"] for each in [own, *others])
        whole["queue"] = service.peers.waiting
    return whole


def merged(found: list[dict[str, Any]]) -> dict[str, Any]:
    """What several workers say, as one. The capacity is theirs together already."""
    first = found[0]
    health = {**first["health"], **{name: sum(each["health"][name] for each in found) for name in ADDED}}
    latency: dict[str, Any] = {}
    for name, own in ((name, own) for each in found for name, own in each["latency"].items()):
        known = latency.setdefault(
            name, {"buckets": [[bound, 0] for bound, _ in own["buckets"]], "sum": 0, "count": 0}
        )
        known["sum"], known["count"] = known["sum"] + own["sum"], known["count"] + own["count"]
        known["buckets"] = [
            [bound, number + more]
            for (bound, number), (_, more) in zip(known["buckets"], own["buckets"], strict=True)
        ]
    counted: dict[str, Counter[str]] = {name: Counter() for name in ("errors", "closed")}
    for each in found:
        for name, counter in counted.items():
            counter.update(each[name])
    return {
        **first,
        "health": health,
        "sessions": [session for each in found for session in each["sessions"]],
        "latency": latency,
        **{name: dict(counter) for name, counter in counted.items()},
        **{name: sum(each[name] for each in found) for name in ("steps", "queue", "opened", "refused", "resumed")},
        "workers": len(found),
    }


async def _server(service: Service) -> dict[str, Any]:
    manager = service.manager
    statistics, metrics = manager.statistics(), manager.metrics
    builds = await service.can_build()
    status = {None: "starting", True: "healthy", False: "unhealthy"}[builds]
    sessions = [asdict(info) for info in manager.sessions()]
    step = metrics.calls.get("step")
    return {
        "health": {
            "status": "draining" if statistics.draining else status,
            **asdict(statistics),
            "environment": service.blueprint.name,
            "version": paddock.__version__,
        },
        "sessions": sessions,
        "latency": {
            name: {
                "buckets": cumulative(BOUNDS, histogram.buckets),
                "sum": histogram.total,
                "count": histogram.count,
            }
            for name, histogram in metrics.calls.items()
        },
        "errors": dict(metrics.errors),
        "steps": 0 if step is None else step.count,
        "queue": statistics.waiting,
        "opened": metrics.sessions_opened,
        "refused": metrics.sessions_refused,
        "resumed": metrics.sessions_resumed,
        "closed": dict(metrics.sessions_closed),
        "workers": 1,
        "now": time.time(),
    }


async def server_events(service: Service, stopped: Callable[[], bool]) -> AsyncIterator[bytes]:
    while not stopped():
        yield event("server", await server(service))
        await asyncio.sleep(TELL_EVERY)


async def fleet(plane: Plane) -> dict[str, Any]:
    from paddock.fleet.control import records

    instances = await plane.database.run(records.select)
    statistics = await plane.statistics()
    seconds = list(plane.hosting.start_seconds)
    return {
        "instances": [_instance(each) for each in instances[:MOST_INSTANCES]],
        "total": len(instances),
        "counts": statistics["instances"],
        "limit": statistics["instance_limit"],
        "starting": statistics["starting"],
        "warm": statistics["warm"],
        "since_start": statistics["since_start"],
        "environments": statistics["environments"],
        "uptime_s": statistics["uptime_seconds"],
        "provisioning": {
            "buckets": [[bound, sum(each <= bound for each in seconds)] for bound in START_BOUNDS]
            + [[None, len(seconds)]],
            "sum": sum(seconds),
            "count": len(seconds),
        },
        "now": time.time(),
    }


def _instance(instance: Any) -> dict[str, Any]:
    now = time.time()
    created, ran, ended = (
        None if text is None else datetime.fromisoformat(text).timestamp()
        for text in (instance.created_at, instance.running_at, instance.terminated_at)
    )
    return {
        "instance_id": instance.instance_id,
        "env_key": instance.env_key,
        "version": instance.version,
        "state": instance.status,
        "age_s": None if created is None else (ended or now) - created,
        "ttl_left_s": max(0.0, instance.expires_at - now) if instance.is_alive else None,
        "provisioning_s": None if ran is None or created is None else ran - created,
        "outcome": instance.reason,
        "run_id": instance.run_id,
        "region": instance.region,
    }


async def fleet_events(plane: Plane, stopped: Callable[[], bool]) -> AsyncIterator[bytes]:
    while not stopped():
        yield event("fleet", await fleet(plane))
        await asyncio.sleep(TELL_EVERY)


def cumulative(bounds: tuple[float, ...], counts: list[int]) -> list[list[float | int | None]]:
    """Counts up to each bound; the last has none."""
    reached = 0
    buckets: list[list[float | int | None]] = []
    for bound, number in zip((*bounds, None), counts, strict=True):
        reached += number
        buckets.append([bound, reached])
    return buckets
