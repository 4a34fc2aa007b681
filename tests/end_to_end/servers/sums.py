"""A taskset of verifiers: sums, a calculator as its tool, and a reward for the right answer."""

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf

__all__ = ["Sums"]


class Numbers(vf.TaskData):
    total: int


class Kept(vf.State):
    asked: int = 0


class CalculatorConfig(vf.ToolsetConfig):
    pass


class Calculator(vf.Toolset[CalculatorConfig, Kept]):
    @vf.tool
    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        self.state.asked += 1
        return a + b


class Sum(vf.Task[Numbers, Kept]):
    @vf.reward
    async def right(self, task: Numbers, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == str(task.total))

    @vf.metric
    async def calls(self, trace: vf.Trace) -> float:
        return float(trace.state.asked)

    @classmethod
    def toolsets(cls, config: Any) -> list[vf.Toolset]:
        return [Calculator(CalculatorConfig())]


class Sums(vf.Taskset[Sum]):
    def load(self) -> Iterator[Sum]:
        for number in range(3):
            yield Sum(Numbers(prompt=f"What is {number} + 2?", system_prompt="Add.", total=number + 2))
