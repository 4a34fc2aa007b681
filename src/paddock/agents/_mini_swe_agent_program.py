"""Runs mini-swe-agent in a sandbox: the assignment on standard input, one message of the conversation per line on
standard output.

A separate program: it knows mini-swe-agent, whose folder is its argument, and nothing of Paddock.
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

PRINTED_EXTRA = ("exit_status", "returncode")


class ProxyModel(OpenRouterModel):
    """Any URL with chat completions."""

    def __init__(self, job_input, **settings):
        super().__init__(model_name=job_input["model"], **settings)
        self._input = job_input

    def _query(self, messages, **_):
        job_input = self._input
        body = {
            "model": job_input["model"],
            "messages": messages,
            "tools": [BASH_TOOL],
            "max_tokens": job_input["max_tokens"],
        }
        headers = {"Authorization": f"Bearer {job_input['key']}"}
        response = requests.post(job_input["url"], json=body, headers=headers, timeout=job_input["timeout"])
        if response.status_code != 200:
            raise RuntimeError(f"the model answered with {response.status_code}: {response.text[:500]}")
        return response.json()


class PrintingAgent(DefaultAgent):
    def add_messages(self, *messages):
        for message in messages:
            extra = message.get("extra") or {}
            printed = {key: value for key, value in message.items() if key != "extra"}
            print(json.dumps(printed | {key: extra[key] for key in PRINTED_EXTRA if key in extra}), flush=True)
        return super().add_messages(*messages)


def main():
    job_input = json.load(sys.stdin)
    config = yaml.safe_load((builtin_config_dir / "mini.yaml").read_text(encoding="utf-8"))
    config["model"]["model_kwargs"] = {}
    agent = PrintingAgent(
        ProxyModel(job_input, **config["model"]), LocalEnvironment(**config["environment"]), **config["agent"]
    )
    agent.run(job_input["instruction"])


if __name__ == "__main__":
    main()
