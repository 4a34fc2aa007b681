"""The arguments of the tools: their types, and what an agent reads about each."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

LONGEST_POLL = 300.0

Instruction = Annotated[str, Field(description="What the agent has to do.")]
ModelKey = Annotated[
    str | None,
    Field(
        description="vllm://repo (with vllm_url), hf-router://repo:provider (with hf_token), replay:FILE, local, "
        "a URL, or the name of a model at vllm_url. Empty: the first model at vllm_url."
    ),
]
TestScript = Annotated[
    str | None,
    Field(
        description="Shell that scores the work: it writes a number to /logs/verifier/reward.txt. Empty: no reward."
    ),
]
VllmUrl = Annotated[str | None, Field(description="The URL of an OpenAI-compatible server such as vLLM.")]
HfToken = Annotated[str | None, Field(description="Token for hf-router. It is kept nowhere.")]
Thinking = Annotated[
    bool | None, Field(description="Whether the model may think before it answers, where it can be told.")
]
TaskId = Annotated[
    str | None, Field(description="The task's name in the result. Empty: made from the task's content.")
]
SetupShell = Annotated[str | None, Field(description="Shell that is run in the sandbox before the agent starts.")]
UploadFiles = Annotated[
    dict[str, str] | None,
    Field(description="Texts by path, relative to the work folder or absolute below /home/user/workdir."),
]
Mode = Annotated[
    Literal["transparent_proxy", "black_box"] | None,
    Field(description="transparent_proxy captures tokens and logprobs; black_box hands calls through as they are."),
]
MaxTokensCap = Annotated[int, Field(description="The most tokens that one model call may sample.")]
AgentTimeout = Annotated[float, Field(description="Seconds that the agent may work.")]
IdempotencyKey = Annotated[str | None, Field(description="The same key gives the same rollout, never a second one.")]

RolloutId = Annotated[str, Field(description="As start_rollout gave it.")]
EndWait = Annotated[
    float | None,
    Field(
        ge=0, description="Seconds to wait for its end; an error if it is still running then. Empty: until it ends."
    ),
]
After = Annotated[int, Field(ge=0, description="The next of the page before; 0 begins with the first event.")]
EventWait = Annotated[float, Field(ge=0, le=LONGEST_POLL, description="Seconds to wait while there is nothing new.")]
