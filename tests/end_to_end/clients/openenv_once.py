"""One episode through OpenEnv's own client, and where it led. Usage: openenv_once.py URL"""

import asyncio
import json
import sys

from openenv.core import GenericEnvClient


async def main(url: str) -> None:
    async with GenericEnvClient(base_url=url) as env:
        await env.reset(seed=1, episode_id="mine")
        for amount in (3, 4, 5):
            await env.step({"amount": amount})
        host, port = env._ws.remote_address[:2]
        print(json.dumps({"state": await env.state(), "host": f"{host}:{port}"}))


asyncio.run(main(sys.argv[1]))
