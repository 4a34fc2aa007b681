"""The same loop with TRL as the trainer: python examples/grpo_tiny/with_trl.py.

`GRPOTrainer` asks for rollouts through `rollout_func`. They run as before: the game on a Paddock server, the policy
behind an OpenAI-compatible address, every token through the capture. The policy is a small model of transformers,
and it is the very object that the trainer updates.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import game
import torch
import words
from datasets import Dataset
from endpoint import NAME, served
from episodes import environment
from grpo import HIGHEST, RATE, SLOW_STEPS, UPDATES
from plot import sparkline
from policy import CONTEXT, Sampled
from tokenizers import Tokenizer, models
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer
from warm_start import warm_start

from paddock.models import Endpoint
from paddock.rollouts import Budget, Task
from paddock.rollouts.loop import LoopAgent, LoopLimits
from paddock.train.trl import reward, rollout_func

if TYPE_CHECKING:
    from collections.abc import Callable

MIN_RISE = 0.2


def make_tokenizer() -> Any:
    vocabulary = models.WordLevel({word: number for number, word in enumerate(words.NAMES)}, unk_token="<unknown>")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(vocabulary), eos_token="<end>", pad_token="<pad>")


class Model(LlamaForCausalLM):  # type: ignore[misc]
    """A transformer of about fifty thousand weights, made from nothing."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.version = 0

    def logprobs(self, sequences: list[list[int]]) -> Tensor:
        """The logprob of every token but the first; rows are padded on the right."""
        longest = max(len(ids) for ids in sequences)
        tokens = torch.tensor([ids + [words.PAD] * (longest - len(ids)) for ids in sequences])
        logits = self(tokens[:, :-1], use_cache=False).logits
        token_logprobs: Tensor = F.log_softmax(logits, -1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
        return token_logprobs


def make_model() -> Model:
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"eos_token_id": words.END, "pad_token_id": words.PAD, "bos_token_id": None}
    return Model(LlamaConfig(vocab_size=len(words.NAMES), max_position_embeddings=CONTEXT, **sizes, **ends))


class Sampler:
    """Samples from the model's own distribution. The trainer waits meanwhile, so nobody changes the weights."""

    def __init__(self, model: Model, seed: int) -> None:
        self._model = model
        self._generator = torch.Generator().manual_seed(seed)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def __call__(self, prompts: list[list[int]], limits: list[int]) -> tuple[list[Sampled], int]:
        answers = [Sampled() for _ in prompts]
        while any(answer.finish_reason is None for answer in answers):
            whole = [ids + answer.ids for ids, answer in zip(prompts, answers, strict=True)]
            longest = max(len(ids) for ids in whole)
            tokens = torch.tensor([ids + [words.PAD] * (longest - len(ids)) for ids in whole])
            last = torch.tensor([len(ids) - 1 for ids in whole])
            logits = self._model(tokens, use_cache=False).logits[torch.arange(len(whole)), last]
            logprobs = F.log_softmax(logits, -1)
            chosen = torch.multinomial(logprobs.exp(), 1, generator=self._generator)
            sampled_logprobs = logprobs.gather(-1, chosen)
            for row, answer in enumerate(answers):
                answer.add(int(chosen[row]), float(sampled_logprobs[row]), limits[row])
        return answers, self._model.version


class Servers:
    """The game and the model's address, on a loop in a thread: TRL has the main one. Use it as `with`."""

    def __init__(self, sampler: Callable[..., Any]) -> None:
        self._sampler = sampler
        self._ready, self._done = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self.urls = ("", "")

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        async with environment() as url, served(self._sampler) as (_, model_url):
            self.urls = (url, model_url)
            self._ready.set()
            await self._done.wait()

    def __enter__(self) -> tuple[str, str]:
        self._thread.start()
        if not self._ready.wait(90):
            raise TimeoutError("the servers did not start")
        return self.urls

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._done.set)
        self._thread.join()


def task_of(prompt: str) -> Task:
    """The prompts of the dataset are seeds; the policy is told nothing of them."""
    return Task(game.PROMPT, id=f"seed-{prompt}", metadata={"seed": int(prompt)})


def train(steps: int, n: int, seed: int) -> list[float]:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = make_model()
    print(f"the model knows the words (loss {warm_start(model, seed):.2f})", flush=True)
    dataset = Dataset.from_dict({"prompt": [str(number) for number in range(game.LARGEST)]})
    with Servers(Sampler(model, seed)) as (url, model_url), tempfile.TemporaryDirectory() as folder:
        roll_out = rollout_func(
            Endpoint(model_url, NAME, engine="vllm"),
            environment=url,
            agent=LoopAgent(LoopLimits(steps=game.GUESSES), system=None),
            make_task=task_of,
            store=Path(folder) / "store",
            parallel=n * game.LARGEST,
            silent=0.0,
            budget=Budget(max_tokens_per_call=8),
        )
        options = GRPOConfig(
            output_dir=folder,
            max_steps=steps * UPDATES,
            per_device_train_batch_size=n * game.LARGEST,
            num_generations=n,
            num_iterations=UPDATES,
            learning_rate=RATE / 2,
            adam_beta2=0.99,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=SLOW_STEPS * UPDATES,
            epsilon_high=HIGHEST - 1,
            max_completion_length=CONTEXT,
            beta=0.0,
            seed=seed,
            **{"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": []},
            **{"save_strategy": "no", "logging_steps": UPDATES, "disable_tqdm": True},
        )
        trainer = GRPOTrainer(
            model=model,
            args=options,
            train_dataset=dataset,
            processing_class=make_tokenizer(),
            rollout_func=roll_out,
            reward_funcs=[reward],
        )
        trainer.train()
        roll_out.close()  # type: ignore[attr-defined]
    return [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]


def main() -> int:
    parser = argparse.ArgumentParser(description="A small policy learns to find a number, with TRL.")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("-n", type=int, default=16, help="rollouts in a group")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rewards = train(arguments.steps, arguments.n, arguments.seed)
    window = max(1, len(rewards) // 10)
    rise = sum(rewards[-window:]) / window - sum(rewards[:window]) / window
    print(f"\nreward  {sparkline(rewards)}\n        {rise:+.3f} from the first steps to the last")
    return 0 if rise > MIN_RISE else 1


if __name__ == "__main__":
    sys.exit(main())
