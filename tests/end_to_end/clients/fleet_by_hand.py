"""A trainer that verifies by hand: Paddock's orchestrator, the real SDK's task. Usage: fleet_by_hand.py URL KEY"""

import contextlib
import inspect
import sys
from typing import Any

from fleet._async.client import AsyncEnv
from report import report

from fleet import AsyncFleet, Task
from paddock.fleet import FleetEnvClient, FleetTaskEnv
from paddock.fleet.client.instance_handle import InstanceHandle

VERIFIER = """
def verify(env, least=1, final_answer=None):
    print("asked for", final_answer)
    return 1.0 if len(env.db("current").query("SELECT id FROM notes").rows) >= least else 0.0
"""
BROKEN = "def verify(env):\n    raise KeyError('no such note')\n"
SHARED = ("check_bundle_exists", "execute_verifier_remote", "close")


def task(code: str) -> Task:
    return Task(key="by-hand", prompt="p", env_id="notes", verifier_func=code, verifier_id="x")


async def verified(handle: Any, code: str, *arguments: Any, **keywords: Any) -> list[Any]:
    answer = await task(code).verify_detailed_async(handle, *arguments, **keywords)
    return [answer.success, answer.result, answer.stdout, bool(answer.execution_id)]


async def scored(handle: Any) -> float:
    # The SDK prints what the verifier printed; our own stdout is one JSON object.
    with contextlib.redirect_stdout(sys.stderr):
        return float(await task(VERIFIER).verify_async(handle))


async def of_the_task_env(url: str, key: str) -> list[Any]:
    config = {"task_key": "by-hand", "env_key": "notes", "prompt": "p", "verifier_code": VERIFIER}
    async with FleetTaskEnv(config, key, base_url=url) as env:
        await env.reset_async()
        return await verified(env._orch._fleet_env, VERIFIER)


async def by_hand(url: str, key: str) -> dict[str, Any]:
    orchestrator, tools = await FleetEnvClient.from_fleet_async(
        key, "notes", None, None, None, None, 120, None, True, base_url=url
    )
    async with orchestrator:
        handle = orchestrator._fleet_env
        await handle.instance.load()
        answers = {
            "keyword": await verified(handle, VERIFIER, final_answer="milk"),
            "positional": await verified(handle, VERIFIER, 100),
            "broken": (await verified(handle, BROKEN))[:2],
            "score": await scored(handle),
        }
    answers["tools"] = tools
    answers["task_env"] = await of_the_task_env(url, key)
    answers["running"] = len(await AsyncFleet(api_key=key, base_url=url).instances(status="running"))
    return answers | {"unmatched": unmatched()}


def unmatched() -> list[str]:
    """Parameters that the SDK's environment takes and our handle does not, in the SDK's order."""
    missing = []
    for name in SHARED:
        theirs, ours = (inspect.signature(getattr(each, name)).parameters for each in (AsyncEnv, InstanceHandle))
        missing += [f"{name}({parameter})" for parameter in theirs if parameter not in ours]
        shared = [parameter for parameter in ours if parameter in theirs]
        missing += [f"{name}: order"] * (shared != list(theirs))
    return missing


if __name__ == "__main__":
    report(by_hand)
