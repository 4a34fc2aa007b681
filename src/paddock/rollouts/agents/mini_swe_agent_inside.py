"""Runs mini-swe-agent in a sandbox: the assignment on standard input, a message of the conversation a line on output.

A program of its own: it knows mini-swe-agent, whose folder is its argument, and nothing of Paddock.
"""
# mypy: ignore-errors

import json
import sys

sys.path.insert(0, sys.argv[1])

import requests
import yaml
from minisweagent.agents.default import DefaultAgent
from minisweagent.config import builtin_config_dir
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.openrouter_model import OpenRouterModel
from minisweagent.models.utils.actions_toolcall import BASH_TOOL

PATIENCE = 900
TOLD = ("exit_status", "returncode")


class Policy(OpenRouterModel):
    """Any address that speaks chat completions."""

    def __init__(self, given, **settings):
        super().__init__(model_name=given["model"], **settings)
        self._given = given

    def _query(self, messages, **_):
        given = self._given
        body = {
            "model": given["model"],
            "messages": messages,
            "tools": [BASH_TOOL],
            "max_tokens": given["max_tokens"],
        }
        headers = {"Authorization": f"Bearer {given['key']}"}
        response = requests.post(given["url"], json=body, headers=headers, timeout=PATIENCE)
        if response.status_code != 200:
            raise RuntimeError(f"the model answered with {response.status_code}: {response.text[:500]}")
        return response.json()


class Agent(DefaultAgent):
    def add_messages(self, *messages):
        for message in messages:
            extra = message.get("extra") or {}
            told = {key: value for key, value in message.items() if key != "extra"}
            print(json.dumps(told | {key: extra[key] for key in TOLD if key in extra}), flush=True)
        return super().add_messages(*messages)


def main():
    given = json.load(sys.stdin)
    config = yaml.safe_load((builtin_config_dir / "mini.yaml").read_text(encoding="utf-8"))
    config["model"]["model_kwargs"] = {}
    agent = Agent(Policy(given, **config["model"]), LocalEnvironment(**config["environment"]), **config["agent"])
    agent.run(given["instruction"])


if __name__ == "__main__":
    main()
