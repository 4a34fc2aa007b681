"""An inference engine whose tokens a trainer samples."""

import asyncio
import io
import json

import aiohttp

from paddock.train.policy_server import PolicyServer


def test_a_long_prompt_reaches_the_trainer_and_its_tokens_come_back() -> None:
    async def work() -> None:
        async with PolicyServer("policy") as server, aiohttp.ClientSession() as session:
            rollout, prompt = server.add(), [100_000] * 200_000
            body = io.BytesIO(json.dumps({"prompt": prompt, "stop_token_ids": [7]}).encode())
            sending = asyncio.create_task(session.post(f"{rollout.endpoint.url}/completions", data=body))
            call = await asyncio.wait_for(rollout.calls.get(), 10)
            assert (call.prompt, call.stop_ids) == (prompt, [7])
            call.reply([1, 2, 7], "stop")
            document = await (await sending).json()
            assert document["choices"][0]["token_ids"] == [1, 2, 7]
            assert document["usage"] == {"prompt_tokens": 200_000, "completion_tokens": 3}

    asyncio.run(work())
