"""What a task's modality means for its tools, its image and how long it lives."""

from __future__ import annotations

from typing import Any

from paddock.fleet.errors import ToolsUnavailable

COMPUTER = "computer"
SCREENS = frozenset(("computer_use", "browser_use"))
SCREEN_TTL_SECONDS = 1800
TTL_SECONDS = 900
SUBMIT = "submit_final_answer"
SUBMIT_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": SUBMIT,
        "description": "Submit your final answer. This ends the session.",
        "parameters": {
            "type": "object",
            "properties": {"answer": {"type": "string", "description": "The final answer"}},
            "required": ["answer"],
        },
    },
}


class ComputerToolMissing(ToolsUnavailable):
    code = "FLEET_COMPUTER_TOOL_MISSING"


def has_screen(modality: str) -> bool:
    return modality in SCREENS


def time_to_live(modality: str) -> int:
    return SCREEN_TTL_SECONDS if has_screen(modality) else TTL_SECONDS


def is_wanted(modality: str, name: str) -> bool:
    """Tasks with a screen use the computer and nothing else; other tasks use anything else."""
    return (name == COMPUTER) == has_screen(modality)


def fitting(modality: str, prompt: str, tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tools that an agent of this modality is given. Raises ToolsUnavailable when none is left."""
    kept = [tool for tool in tools if is_wanted(modality, tool["function"]["name"])]
    if not kept:
        names = ", ".join(tool["function"]["name"] for tool in tools) or "none"
        if has_screen(modality):
            raise ComputerToolMissing(
                f"{modality} needs the tool {COMPUTER!r}; available: {names}", hint="is this an image with a screen?"
            )
        raise ToolsUnavailable(f"no tools for {modality}; available: {names}")
    if modality == "tool_use" and SUBMIT in prompt:
        kept.append(SUBMIT_TOOL)
    return kept
