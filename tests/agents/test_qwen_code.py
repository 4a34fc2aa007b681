"""Qwen Code: its configuration and the roles of its calls. Its output is that of `StreamJsonRun`."""

from agents.printed import ASSIGNMENT
from paddock.agents import qwen_code
from paddock.agents.qwen_code import QwenCode
from paddock.capture.trace import Role


def test_it_gets_one_model_and_trusts_no_folder() -> None:
    settings = qwen_code.settings(ASSIGNMENT)
    (model,) = settings["modelProviders"]["openai"]
    assert (model["id"], model["baseUrl"]) == (ASSIGNMENT.model, ASSIGNMENT.base_url)
    assert model["generationConfig"]["maxRetries"] == 0
    assert settings["security"]["folderTrust"]["enabled"] is True
    assert not settings["telemetry"]["enabled"]


def test_a_call_without_tools_is_a_summary() -> None:
    assert QwenCode().classify({"messages": []}, {}) is Role.COMPACTION


def test_its_system_prompt_distinguishes_agent_and_subagent() -> None:
    def role(system: str) -> Role | None:
        body = {"messages": [{"role": "system", "content": system}], "tools": [{}]}
        return QwenCode().classify(body, {})

    assert role("You are Qwen Code, an interactive CLI agent developed by Alibaba Group.") is Role.AGENT
    assert role("You are a general-purpose subagent working for a parent agent.") is Role.SUBAGENT
