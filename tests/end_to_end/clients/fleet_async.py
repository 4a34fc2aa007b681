"""The real Fleet client on a plane, the asynchronous one. Usage: fleet_async.py URL KEY SCENARIO|all"""

import asyncio
from typing import Any

from fleet_parts import VERIFIER, chosen, inject, told, use_tools
from report import report

from fleet import AsyncFleet, Task


async def caught(work: Any) -> list[Any]:
    try:
        return ["no error", str(await work)]
    except Exception as error:
        return told(error)


async def whole_sequence(url: str, key: str) -> Any:
    client = AsyncFleet(api_key=key, base_url=url)
    env = await client.make("notes", run_id="async", ttl_seconds=120, heartbeat_interval=60)
    reset = await env.reset(seed=1)
    tools = await use_tools(env.mcp.url, key)
    await env.instance.load()
    rows = (await env.db("current").query("SELECT title FROM notes ORDER BY id")).rows
    task = Task(key="whole", prompt="p", env_id="notes", verifier_func=VERIFIER, verifier_id="x")
    graded = await task.verify_detailed_async(env, final_answer="done")
    beat = await env.heartbeat()
    closed = await env.close()
    return {
        "reset": reset.success,
        "tools": tools,
        "rows": rows,
        "graded": [graded.success, graded.result, graded.stdout, bool(graded.execution_id)],
        "beat": [beat.success, beat.interval_seconds],
        "closed": closed.status,
        "closed_twice": await caught(env.close()),
    }


async def listing(url: str, key: str) -> Any:
    client = AsyncFleet(api_key=key, base_url=url)
    return {
        "envs": [each.env_key for each in await client.list_envs()],
        "regions": await client.list_regions(),
        "account": (await client.account()).instance_limit,
    }


async def many_at_once(url: str, key: str) -> Any:
    client = AsyncFleet(api_key=key, base_url=url)
    envs = await asyncio.gather(*(client.make("notes", run_id="many") for _ in range(6)))
    refused = await caught(client.make("notes", run_id="many"))
    resets = await asyncio.gather(*(env.reset() for env in envs))
    closed = await asyncio.gather(*(env.close() for env in envs))
    return {
        "origins": len({env.urls.root for env in envs}),
        "resets": {reset.success for reset in resets} == {True},
        "closed": sorted({instance.status for instance in closed}),
        "refused": refused[0],
    }


async def traces(url: str, key: str) -> Any:
    client = AsyncFleet(api_key=key, base_url=url)
    job = await client.trace_job("async")
    session = client.start_session(job_id=job, model="m")
    logged = await session.log([{"role": "user", "content": "hi"}], "hello")
    await session.complete()
    return logged.message_count


async def lost_create(url: str, key: str) -> Any:
    client = AsyncFleet(api_key=key, base_url=url)
    inject(url, key, path="/v1/env/instances$", method="POST", after=True, status=503)
    env = await client.make("notes", run_id="lost-async")
    result = len(await client.instances(run_id="lost-async"))
    await env.close()
    return [env.status, result]


async def apps(url: str, key: str) -> Any:
    client = AsyncFleet(api_key=key, base_url=url)
    env = await client.make("notes")
    answer = (await env.app("crm").reset()).success
    await env.close()
    return answer


report(*chosen(whole_sequence, listing, many_at_once, traces, lost_create, apps))
