# mypy: ignore-errors
"""Loader for child processes under an interpreter that has verifiers: a taskset as an environment of tools.

`reset` begins a task and returns its prompt. The tools are those of the toolsets; `submit_answer` ends the episode
with the reward of the task's own functions. There is no runtime of verifiers (a container and its files) here: tasks
that need one are refused. Imports nothing of Paddock.
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

MAX_TASKS = 100_000
SUBMIT = "submit_answer"
SUBMIT_TOOL = {
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


class UnsupportedTaskset(ValueError):
    hint = "only tasks without a container of their own can be served"


def load(target):
    name = target
    if os.path.isfile(target):
        sys.path.insert(0, os.path.dirname(os.path.abspath(target)))
        name = os.path.splitext(os.path.basename(target))[0]
    return LoadedTaskset(name)


class LoadedTaskset:
    def __init__(self, name):
        self.name = name
        taskset = load_taskset(taskset_config_type(name)(id=name))
        self.tasks = list(itertools.islice(iter(taskset), MAX_TASKS))
        if not self.tasks:
            raise UnsupportedTaskset(f"the taskset {name} has no tasks")
        if any(type(task).NEEDS_CONTAINER for task in self.tasks):
            raise UnsupportedTaskset(f"the tasks of {name} need a container")
        self.taskset = taskset

    def describe(self):
        session = TasksetSession(self)
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
        return TasksetSession(self)


class TasksetSession:
    """One episode at a time, on a loop of its own."""

    def __init__(self, loaded):
        self.loaded = loaded
        self.runner = asyncio.Runner()
        self.task = self.trace = self.server = None
        self.done = False
        self.steps = 0
        self.episode = None

    def handle(self, kind, data):
        arguments = json.loads(data)
        if kind == b"reset":
            return to_json(self.reset(**arguments))
        if kind == b"step":
            return to_json(self.step(arguments), fallback=str)
        if kind == b"state":
            index = self.task.data.idx if self.task is not None else None
            return to_json({"episode_id": self.episode, "step_count": self.steps, "index": index})
        return to_json(getattr(self, arguments[0])(*arguments[1:]), fallback=str)

    def reset(self, seed=None, episode_id=None, index=None, **_):
        count = len(self.loaded.tasks)
        if index is None:
            index = random.Random(seed).randrange(count) if seed is not None else random.randrange(count)
        if not isinstance(index, int) or not 0 <= index < count:
            raise Refused([{"type": "value_error", "loc": ["index"], "msg": f"0 to {count - 1}", "input": index}])
        self.begin(index)
        self.episode, self.steps, self.done = episode_id, 0, False
        messages = [node.message.model_dump(mode="json", exclude_none=True) for node in self.trace.nodes]
        return {"done": False, "reward": None, "metadata": {}, "index": index, "messages": messages}

    def begin(self, index):
        """Begin a task. Returns its tools in MCP's form."""
        task = self.task = self.loaded.tasks[index]
        about = TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        self.trace = vf.Trace(task=about, agent=AgentInfo(config=AgentConfig()), state=state_of(task))
        if task.data.system_prompt:
            self.add_message(vf.SystemMessage(content=task.data.system_prompt))
        prompt = task.data.prompt
        for message in [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else prompt or []:
            self.add_message(message)
        self.server = MCPServer(self.loaded.name)
        taskset = self.loaded.taskset
        for toolset in (*type(taskset).toolsets(taskset.config), *type(task).toolsets(task.config)):
            share_state(toolset, self.trace)
            toolset.register(self.server)
            self.runner.run(set_up(toolset, task))
        listed = self.runner.run(self.server.list_tools())
        return [json.loads(to_json(tool, by_alias=True)) for tool in listed] + [SUBMIT_TOOL]

    def add_message(self, message, sampled=False):
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
        self.add_message(vf.AssistantMessage(content="", tool_calls=[called]), sampled=True)
        result = error = None
        try:
            result = json.loads(
                to_json(self.runner.run(self.server.call_tool(name, arguments)), by_alias=True, fallback=str)
            )
            content = json.dumps(result)
        except Exception as failure:
            content = str(failure)
            error = {"error_type": "execution_error", "message": content}
        self.add_message(vf.ToolMessage(tool_call_id=number, content=content))
        return {"tool_name": name, "result": result, "error": error, "done": False, "reward": None, "metadata": {}}

    def submit(self, answer):
        self.add_message(vf.AssistantMessage(content=answer), sampled=True)
        self.trace.is_completed = self.trace.ok = True
        self.runner.run(self.task.score(self.trace))
        self.done = True
        rewards = {key: reward.value for key, reward in self.trace.rewards.items() if reward is not None}
        reward = self.trace.reward if rewards else None
        scores = {"rewards": rewards, "metrics": self.trace.metrics}
        return {
            "tool_name": SUBMIT,
            "result": scores,
            "error": None,
            "done": True,
            "reward": reward,
            "metadata": scores,
        }

    def list_splits(self):
        return [{"name": "train", "type": "train"}]

    def list_tasks(self, split=None):
        return [task_fields(task) for task in self.loaded.tasks]

    def num_tasks(self, split=None):
        return len(self.loaded.tasks)

    def get_task(self, split=None, index=0):
        return task_fields(self.loaded.tasks[index])

    def get_task_range(self, split=None, start=None, stop=None):
        return [task_fields(task) for task in self.loaded.tasks[start:stop]]

    def close(self):
        self.runner.close()


async def set_up(toolset, task):
    await toolset.setup()
    await toolset.setup_task(task)


def state_of(task):
    from verifiers.v1.state import state_cls

    return state_cls(type(task))()


def share_state(toolset, trace):
    """Let toolsets and rewards use one state object; between processes verifiers would send copies."""

    async def pull():
        return trace.state

    async def push(before):
        return None

    toolset._pull_state, toolset._push_state = pull, push


def task_fields(task):
    data = task.data
    return {"index": data.idx, "id": data.id, "name": data.name, "prompt": data.prompt_text}
