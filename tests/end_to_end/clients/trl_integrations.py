"""TRL's own trainers on a small model, through each of our integrations. Gives the address of the guessing game.

The model is made on the spot with random weights. Where TRL samples itself, what it samples is scripted, so that
tools are called; everything else is TRL's.
"""

import logging
import os
import pickle
import random
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"}
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples" / "grpo_tiny"))

import torch
import trl
import with_trl
from datasets import Dataset
from endpoint import NAME, served
from report import report
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import get_json_schema
from trl import GRPOConfig, GRPOTrainer
from trl.experimental.async_grpo import async_grpo_trainer

from paddock.loop_thread import LoopThread
from paddock.models import Endpoint
from paddock.rollouts import Budget
from paddock.rollouts.loop import LoopAgent, LoopLimits
from paddock.train import trl as integrations
from paddock.train.stream_config import StreamConfig

torch.set_num_threads(1)
logging.disable(logging.WARNING)
MEMBERS, STEPS = 8, 2


def settings(folder: str) -> GRPOConfig:
    return GRPOConfig(
        output_dir=folder,
        max_steps=STEPS,
        per_device_train_batch_size=2 * MEMBERS,
        num_generations=MEMBERS,
        max_completion_length=512,
        learning_rate=1e-2,
        beta=0.0,
        **{"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": []},
        **{"save_strategy": "no", "logging_steps": 1, "disable_tqdm": True, "log_level": "error"},
    )


def train(trainer: GRPOTrainer) -> dict[str, Any]:
    """What was logged, and whether the weights moved."""
    before = [each.detach().clone() for each in trainer.model.parameters()]
    trainer.remove_callback(
        next(type(each) for each in trainer.callback_handler.callbacks if "Printer" in repr(each))
    )
    trainer.train()
    renamed = any(bool((a != b).any()) for a, b in zip(before, trainer.model.parameters(), strict=True))
    return {"log": [entry for entry in trainer.state.log_history if "reward" in entry], "moved": renamed}


def letter_tokenizer() -> Any:
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )
    fast.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja").read_text()
    return fast


def scripted(tokenizer: Any, numbers: random.Random) -> Callable[..., Any]:
    """Guesses until the game is over: in place of the sampling of a model that knows nothing."""

    def generate(input_ids: Any, **_: Any) -> Any:
        rows = []
        for row in input_ids:
            last = tokenizer.decode(row).rpartition("<|im_start|>user")[2]
            call = f'{{"name": "guess", "arguments": {{"number": {numbers.randint(1, 7)}}}}}'
            over = "found" in last or "over" in last
            reply = "done" if over else f"<tool_call>\n{call}\n</tool_call>"
            rows.append([*tokenizer.encode(reply), tokenizer.eos_token_id])
        longest = max(map(len, rows))
        message = torch.tensor([row + [tokenizer.pad_token_id] * (longest - len(row)) for row in rows])
        return torch.cat([input_ids, message], dim=1)

    return generate


def environment_factory(url: str) -> dict[str, Any]:
    tokenizer = letter_tokenizer()
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    config = Qwen2Config(
        vocab_size=len(tokenizer), max_position_embeddings=4096, num_key_value_heads=2, **sizes, **ends
    )
    model = Qwen2ForCausalLM(config)
    model.generate = scripted(tokenizer, random.Random(0))
    made = integrations.environment_factory(url)
    rows = {"prompt": [[{"role": "user", "content": "find it"}]] * 4, "seed": [0, 1, 2, 3]}
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=model,
            args=settings(folder),
            train_dataset=Dataset.from_dict(rows),
            processing_class=tokenizer,
            environment_factory=made,
        )
        trained = train(trainer)
    pool = trainer._environment_pool[None]
    again = pickle.loads(pickle.dumps(made))
    return {
        "schema": get_json_schema(pool[0].guess)["function"],
        "pooled": len(pool),
        "again": [again is made, again.__name__, hasattr(again, "guess")],
        **trained,
    }


class Serving:
    """The model of the example behind an address, on a loop of its own."""

    def __init__(self, model: Any) -> None:
        self._thread = LoopThread("endpoint")
        self._served = served(with_trl.Sampler(model, 0))

    def __enter__(self) -> tuple[Any, Endpoint]:
        server, url = self._thread.call(self._served.__aenter__)
        return server, Endpoint(url, NAME, engine="vllm")

    def __exit__(self, *_: object) -> None:
        self._thread.call(self._served.__aexit__, None, None, None)
        self._thread.close()


def options(url: str, folder: str) -> dict[str, Any]:
    return {
        "environment": url,
        "agent": LoopAgent(LoopLimits(steps=3), system=None),
        "make_task": with_trl.task_of,
        "store": f"{folder}/store",
        "silent": 0.0,
        "budget": Budget(max_tokens_per_call=8),
    }


@cache
def warm_model() -> Any:
    torch.manual_seed(0)
    model = with_trl.make_model()
    with_trl.warm_start(model, 0)
    return model


def rollout_func(url: str) -> dict[str, Any]:
    model = deepcopy(warm_model())
    collected: list[dict[str, Any]] = []
    with Serving(model) as (server, endpoint), tempfile.TemporaryDirectory() as folder:
        roll_out = integrations.rollout_func(endpoint, **options(url, folder))

        def watched(prompts: Any, trainer: Any) -> dict[str, Any]:
            collected.append({"prompts": list(prompts), **roll_out(prompts, trainer)})
            return {name: column for name, column in collected[-1].items() if name != "prompts"}

        trainer = GRPOTrainer(
            model=model,
            args=settings(folder),
            train_dataset=Dataset.from_dict({"prompt": [str(seed) for seed in range(4)]}),
            processing_class=with_trl.make_tokenizer(),
            rollout_func=watched,
            reward_funcs=[integrations.reward],
        )
        first = differences(model, trainer, watched)
        collected.clear()
        server.sampled = 0
        trained = train(trainer)
        roll_out.close()
    masked = sum(sum(mask) for batch in collected for mask in batch["env_mask"])
    rewards = [sum(batch["reward"]) / len(batch["reward"]) for batch in collected]
    return {"difference": first, "masked": masked, "sampled": server.sampled, "rewards": rewards, **trained}


def differences(model: Any, trainer: Any, roll_out: Callable[..., dict[str, Any]]) -> float:
    """How far the captured logprobs are from the model's own, at most."""
    batch = roll_out(["0", "1"], trainer)
    worst = 0.0
    columns = (batch[name] for name in ("prompt_ids", "completion_ids", "logprobs", "env_mask"))
    for prompt, completion, captured, mask in zip(*columns, strict=True):
        own = model.logprobs([prompt + completion])[0, len(prompt) - 1 :].tolist()
        worst = max(worst, *(abs(a - b) for a, b, m in zip(own, captured, mask, strict=True) if m))
    return worst


def rollout_worker(url: str) -> dict[str, Any]:
    config = StreamConfig(batch_size=2, max_staleness=1, zero_advantage="keep")
    model = deepcopy(warm_model())
    version = model.version = 3
    with Serving(model) as (_, endpoint), tempfile.TemporaryDirectory() as folder:
        worker = integrations.RolloutWorker(
            ["0", "1"], endpoint, num_generations=MEMBERS, config=config, parallel=16, **options(url, folder)
        )
        needed = [name for name in vars(async_grpo_trainer.RolloutWorkerProtocol) if not name.startswith("_")]
        lacking = [name for name in needed if not hasattr(worker, name)]
        worker.update_model_version(version)
        worker.start()
        dataset = async_grpo_trainer.RolloutQueueDataset(
            worker.rollout_buffer, lambda: version, worker.check_health, 60.0, defaultdict(list), poll_interval_s=0.2
        )
        source = iter(dataset)
        rows = [next(source) for _ in range(2 * MEMBERS)]
        batch = list(zip(range(1), async_grpo_trainer.FixedCountBatcher(iter(rows), 2 * MEMBERS, 1), strict=False))
        for version in (4, 5, 6):
            model.version = version
            worker.update_model_version(version)
            later = [next(source) for _ in range(2 * MEMBERS)]
        acknowledged = worker.stream.statistics().acknowledged
        worker.check_health(60.0)
        worker.stop()
        metrics = worker.metrics_queue.get_nowait()
    try:
        worker.check_health(60.0)
        stopped = "healthy"
    except Exception as error:
        stopped = type(error).__name__
    return {
        "lacking": lacking,
        "groups": [row["group_id"] for row in rows],
        "off": max(abs(row["advantage"] - expected(row, rows)) for row in rows),
        "lengths": [[len(row[name]) for name in ("input_ids", "completion_mask", "old_log_probs")] for row in rows],
        "trained": [int(row["completion_mask"].sum()) for row in rows],
        "given": max(float(abs(row["old_log_probs"][row["completion_mask"] == 0]).max()) for row in rows),
        "batched": len(batch),
        "later": len(later),
        "acknowledged": acknowledged,
        "dropped": sum(dataset.metrics["sample/dropped_stale_total"]),
        "staleness": max(dataset.metrics["sample/staleness_max"]),
        "metrics": sorted(metrics),
        "stopped": stopped,
    }


def expected(row: dict[str, Any], rows: list[dict[str, Any]]) -> float:
    """How much better than the mean of its group a row did, in standard deviations."""
    rewards = [other["metrics"]["reward"] for other in rows if other["group_id"] == row["group_id"]]
    return float((row["metrics"]["reward"] - statistics.fmean(rewards)) / (statistics.pstdev(rewards) + 1e-4))


if __name__ == "__main__":
    report(environment_factory, rollout_func, rollout_worker)
