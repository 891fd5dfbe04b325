"""GRPO on a toy task, with an inference engine in the same job: torchrun --standalone --nproc-per-node 2 examples/grpo.py"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

import zeroshard
from zeroshard.launch import local_device

STEPS, GROUP, LENGTH, END, LIKED, DEVICE = 20, 32, 12, 1, 7, local_device()
CONFIG = LlamaConfig(vocab_size=32, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)


class Engine:
    """Stands for vLLM or SGLang. Each rank has one, with whole weights of its own."""

    def __init__(self) -> None:
        self.model: Any = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
        self.model.to(DEVICE).eval()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            self.model.get_parameter(name).data.copy_(tensor)

    def update(self, changes: Iterable[tuple[str, Tensor, Tensor]]) -> None:
        for name, index, value in changes:
            self.model.get_parameter(name).data.view(-1)[index.to(DEVICE)] = value.to(DEVICE)

    def generate(self, prompts: Tensor) -> Any:
        options = {"do_sample": True, "max_new_tokens": LENGTH, "eos_token_id": END, "pad_token_id": 0}
        return self.model.generate(prompts, attention_mask=torch.ones_like(prompts), **options)


def log_probabilities(model: Any, tokens: Tensor) -> Any:
    """Return the log probability of each token but the first."""
    return model(tokens).logits[:, :-1].float().log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)


torch.manual_seed(0)
model: Any = AutoModelForCausalLM.from_config(CONFIG)  # type: ignore[no-untyped-call]
model.to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
sharded = zeroshard.shard(model, optimizer, 3, precision=zeroshard.Precision(torch.bfloat16))
engine = Engine()
engine.load_weights(sharded.named_weights())  # all weights, once
version = sharded.weights_version()
torch.manual_seed(1 + sharded.rank)  # other samples on each rank

for step in range(STEPS):
    sharded.offload_states()  # to CPU memory, so that the engine may use the accelerator's
    tokens = engine.generate(torch.full((GROUP, 1), 2 + sharded.rank, device=DEVICE))
    sharded.reload_states()
    mask = (tokens[:, 1:] != 0).float()
    rewards = (tokens[:, 1:] == LIKED).float().sum(1) / LENGTH
    advantages = ((rewards - rewards.mean()) / (rewards.std() + 1e-4))[:, None]
    with torch.no_grad():
        before = log_probabilities(model, tokens)
    for _ in range(2):
        ratio = (log_probabilities(model, tokens) - before).exp()
        gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        (-(gain * mask).sum() / mask.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    own = [(name, index.int().cpu(), value.cpu()) for name, index, value in sharded.changed_since(version)]
    everyone: list[Any] = [None] * sharded.world_size
    dist.all_gather_object(everyone, own)
    for changes in everyone:
        engine.update(changes)
    reward = float(sharded.sum_over_ranks(rewards.mean()[None])) / sharded.world_size
    if sharded.rank == 0:
        print(f"step {step:2}  reward {reward:.3f}", flush=True)

assert all(torch.equal(engine.model.get_parameter(name), tensor) for name, tensor in sharded.named_weights())
