# mypy: ignore-errors
"""Runs in the other interpreter, beside verifiers: a taskset as an environment of tools.

`reset` takes up a task and shows its prompt. The toolsets' tools are there to be called; `submit_answer` ends the
episode with the reward that the task's own functions give. Signals that need a runtime of verifiers (a container, its
files) cannot be had here: tasks that cannot do without one are refused. Knows nothing of Paddock.
"""

import asyncio
import itertools
import json
import os
import random
import sys

import verifiers.v1 as vf
from mcp.server.mcpserver import MCPServer
from pydantic_core import to_json
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.graph import MessageNode
from verifiers.v1.trace import AgentInfo, TraceTask
from verifiers.v1.utils.loaders import load_taskset, taskset_config_type

MOST_TASKS = 100_000
SUBMIT = "submit_answer"
ANSWER = {
    "name": SUBMIT,
    "description": "Give the final answer. This ends the task.",
    "inputSchema": {
        "type": "object",
        "properties": {"answer": {"type": "string"}},
        "required": ["answer"],
        "additionalProperties": False,
    },
}


class Refused(ValueError):
    """The request was wrong; nothing was done."""


class Unfit(ValueError):
    hint = "only tasks without a container of their own can be served"


def load(place):
    name = place
    if os.path.isfile(place):
        sys.path.insert(0, os.path.dirname(os.path.abspath(place)))
        name = os.path.splitext(os.path.basename(place))[0]
    return Hosted(name)


class Hosted:
    def __init__(self, name):
        self.name = name
        taskset = load_taskset(taskset_config_type(name)(id=name))
        self.tasks = list(itertools.islice(iter(taskset), MOST_TASKS))
        if not self.tasks:
            raise Unfit(f"the taskset {name} has no tasks")
        if any(type(task).NEEDS_CONTAINER for task in self.tasks):
            raise Unfit(f"the tasks of {name} need a container")
        self.taskset = taskset

    def describe(self):
        session = Session(self)
        try:
            tools = session.begin(0)
        finally:
            session.close()
        return {
            "name": "VerifiersEnvironment",
            "concurrent": True,
            "methods": ["list_splits", "list_tasks", "num_tasks", "get_task", "get_task_range"],
            "metadata": {
                "name": self.name,
                "description": f"The verifiers taskset {self.name}: {len(self.tasks)} tasks",
            },
            "tools": tools,
        }

    def open(self):
        return Session(self)


class Session:
    """One episode at a time, on a loop of its own."""

    def __init__(self, hosted):
        self.hosted = hosted
        self.runner = asyncio.Runner()
        self.task = self.trace = self.server = None
        self.done = False
        self.steps = 0
        self.episode = None

    def ask(self, kind, data):
        given = json.loads(data)
        if kind == b"reset":
            return to_json(self.reset(**given))
        if kind == b"step":
            return to_json(self.step(given), fallback=str)
        if kind == b"state":
            index = self.task.data.idx if self.task is not None else None
            return to_json({"episode_id": self.episode, "step_count": self.steps, "index": index})
        return to_json(getattr(self, given[0])(*given[1:]), fallback=str)

    def reset(self, seed=None, episode_id=None, index=None, **_):
        count = len(self.hosted.tasks)
        if index is None:
            index = random.Random(seed).randrange(count) if seed is not None else random.randrange(count)
        if not isinstance(index, int) or not 0 <= index < count:
            raise Refused([{"type": "value_error", "loc": ["index"], "msg": f"0 to {count - 1}", "input": index}])
        self.begin(index)
        self.episode, self.steps, self.done = episode_id, 0, False
        shown = [node.message.model_dump(mode="json", exclude_none=True) for node in self.trace.nodes]
        return {"done": False, "reward": None, "metadata": {}, "index": index, "messages": shown}

    def begin(self, index):
        """Take up a task; its tools, in MCP's form."""
        task = self.task = self.hosted.tasks[index]
        about = TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        self.trace = vf.Trace(task=about, agent=AgentInfo(config=AgentConfig()), state=state_of(task))
        if task.data.system_prompt:
            self.say(vf.SystemMessage(content=task.data.system_prompt))
        prompt = task.data.prompt
        for message in [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else prompt or []:
            self.say(message)
        self.server = MCPServer(self.hosted.name)
        taskset = self.hosted.taskset
        for toolset in (*type(taskset).toolsets(taskset.config), *type(task).toolsets(task.config)):
            share_state(toolset, self.trace)
            toolset.register(self.server)
            self.runner.run(prepared(toolset, task))
        listed = self.runner.run(self.server.list_tools())
        return [json.loads(to_json(tool, by_alias=True)) for tool in listed] + [ANSWER]

    def say(self, message, sampled=False):
        nodes = self.trace.nodes
        nodes.append(MessageNode(parent=len(nodes) - 1 if nodes else None, message=message, sampled=sampled))

    def step(self, action):
        name, arguments = action.get("tool_name"), action.get("arguments") or {}
        if self.trace is None or self.done:
            raise RuntimeError("the episode is over" if self.done else "reset begins an episode")
        self.steps += 1
        if name == SUBMIT:
            return self.submit(str(arguments.get("answer", "")))
        number = f"call_{self.steps}"
        called = vf.ToolCall(id=number, name=name, arguments=json.dumps(arguments))
        self.say(vf.AssistantMessage(content="", tool_calls=[called]), sampled=True)
        result = error = None
        try:
            result = json.loads(
                to_json(self.runner.run(self.server.call_tool(name, arguments)), by_alias=True, fallback=str)
            )
            told = json.dumps(result)
        except Exception as failure:
            told = str(failure)
            error = {"error_type": "execution_error", "message": told}
        self.say(vf.ToolMessage(tool_call_id=number, content=told))
        return {"tool_name": name, "result": result, "error": error, "done": False, "reward": None, "metadata": {}}

    def submit(self, answer):
        self.say(vf.AssistantMessage(content=answer), sampled=True)
        self.trace.is_completed = self.trace.ok = True
        self.runner.run(self.task.score(self.trace))
        self.done = True
        given = {key: reward.value for key, reward in self.trace.rewards.items() if reward is not None}
        reward = self.trace.reward if given else None
        told = {"rewards": given, "metrics": self.trace.metrics}
        return {"tool_name": SUBMIT, "result": told, "error": None, "done": True, "reward": reward, "metadata": told}

    def list_splits(self):
        return [{"name": "train", "type": "train"}]

    def list_tasks(self, split=None):
        return [shown(task) for task in self.hosted.tasks]

    def num_tasks(self, split=None):
        return len(self.hosted.tasks)

    def get_task(self, split=None, index=0):
        return shown(self.hosted.tasks[index])

    def get_task_range(self, split=None, start=None, stop=None):
        return [shown(task) for task in self.hosted.tasks[start:stop]]

    def close(self):
        self.runner.close()


async def prepared(toolset, task):
    await toolset.setup()
    await toolset.setup_task(task)


def state_of(task):
    from verifiers.v1.state import state_cls

    return state_cls(type(task))()


def share_state(toolset, trace):
    """Toolsets and rewards see one state; between processes verifiers sends it around for that."""

    async def pull():
        return trace.state

    async def push(before):
        return None

    toolset._pull_state, toolset._push_state = pull, push


def shown(task):
    data = task.data
    return {"index": data.idx, "id": data.id, "name": data.name, "prompt": data.prompt_text}
