import asyncio as asyncio

from paddock.models.weight_version import Weights as Weights
from paddock.rollouts import RunConfig as RunConfig
from paddock.rollouts import load_tasks
from paddock.rollouts import run_batch as run_batch

url = "http://127.0.0.1:8000/v1"
tasks = load_tasks("fix-test")


async def update_weights():
    pass
