"""The status of the server and of the plane, from the same snapshots as /health and /metrics."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Any

import orjson

import paddock
from paddock.telemetry.metrics import BUCKET_SECONDS
from paddock.web.responses import event

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from paddock.fleet.plane.plane import Plane
    from paddock.server.service import Service

WORKER_PATH = "/web/api/server"
SUMMED = ("sessions", "waiting", "running", "hung", "threads")
INTERVAL_SECONDS = 1.0
MAX_INSTANCES = 1000
START_SECONDS_BOUNDS = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


async def server(service: Service, *, alone: bool = False) -> dict[str, Any]:
    """The status of the server with all its workers, or of this process `alone`."""
    own = await _own_status(service)
    others_here = service.siblings or service.peers
    if others_here is None or alone:
        return own
    token = service.config.access.token
    headers = {"host": "127.0.0.1", **({"authorization": f"Bearer {token}"} if token else {})}
    others = [orjson.loads(answer) for answer in await others_here.gather(WORKER_PATH, headers)]
    status = merge_workers([own, *(each for each in others if "sessions" in each)])
    if service.peers is not None:
        status["health"]["capacity"] = sum(each["health"]["capacity"] for each in [own, *others])
        status["queue"] = service.peers.waiting
    return status


def merge_workers(statuses: list[dict[str, Any]]) -> dict[str, Any]:
    """The statuses of several workers as one. Each already reports the capacity of all."""
    first = statuses[0]
    health = {**first["health"], **{name: sum(each["health"][name] for each in statuses) for name in SUMMED}}
    latency: dict[str, Any] = {}
    for name, own in ((name, own) for each in statuses for name, own in each["latency"].items()):
        total = latency.setdefault(
            name, {"buckets": [[bound, 0] for bound, _ in own["buckets"]], "sum": 0, "count": 0}
        )
        total["sum"], total["count"] = total["sum"] + own["sum"], total["count"] + own["count"]
        total["buckets"] = [
            [bound, number + more]
            for (bound, number), (_, more) in zip(total["buckets"], own["buckets"], strict=True)
        ]
    counters: dict[str, Counter[str]] = {name: Counter() for name in ("errors", "closed")}
    for each in statuses:
        for name, counter in counters.items():
            counter.update(each[name])
    return {
        **first,
        "health": health,
        "sessions": [session for each in statuses for session in each["sessions"]],
        "latency": latency,
        **{name: dict(counter) for name, counter in counters.items()},
        **{name: sum(each[name] for each in statuses) for name in ("steps", "queue", "opened", "refused", "resumed")},
        "workers": len(statuses),
    }


async def _own_status(service: Service) -> dict[str, Any]:
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
            "environment": service.spec.name,
            "version": paddock.__version__,
        },
        "sessions": sessions,
        "latency": {
            name: {
                "buckets": cumulative(BUCKET_SECONDS, histogram.buckets),
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


async def server_events(service: Service, is_stopping: Callable[[], bool]) -> AsyncIterator[bytes]:
    while not is_stopping():
        yield event("server", await server(service))
        await asyncio.sleep(INTERVAL_SECONDS)


async def fleet(plane: Plane) -> dict[str, Any]:
    from paddock.fleet.plane import instance_records

    instances = await plane.database.run(instance_records.select)
    statistics = await plane.statistics()
    seconds = list(plane.instances.start_seconds)
    return {
        "instances": [_instance(each) for each in instances[:MAX_INSTANCES]],
        "total": len(instances),
        "counts": statistics["instances"],
        "limit": statistics["instance_limit"],
        "starting": statistics["starting"],
        "warm": statistics["warm"],
        "since_start": statistics["since_start"],
        "environments": statistics["environments"],
        "uptime_s": statistics["uptime_seconds"],
        "provisioning": {
            "buckets": [[bound, sum(each <= bound for each in seconds)] for bound in START_SECONDS_BOUNDS]
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


async def fleet_events(plane: Plane, is_stopping: Callable[[], bool]) -> AsyncIterator[bytes]:
    while not is_stopping():
        yield event("fleet", await fleet(plane))
        await asyncio.sleep(INTERVAL_SECONDS)


def cumulative(bounds: tuple[float, ...], counts: list[int]) -> list[list[float | int | None]]:
    """Counts up to each bound; the last bucket has no bound."""
    total_count = 0
    buckets: list[list[float | int | None]] = []
    for bound, number in zip((*bounds, None), counts, strict=True):
        total_count += number
        buckets.append([bound, total_count])
    return buckets
