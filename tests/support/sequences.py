"""Owns models and training runs with sequences that are cut over ranks, and the same runs on one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from families import SIZES, gpt2, llama, mixtral
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import zeroshard
from zeroshard import Policy, Precision
from zeroshard.sequence import Sequences, tile

LENGTH = 22
"""A length that neither 4 nor 8 divides, so that slices are padded."""
ROWS = 2


def mistral() -> nn.Module:
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=5))


def gemma() -> nn.Module:
    """Return a model of layers with and without a window."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    return Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=6, layer_types=kinds))


def llama4(**options: Any) -> nn.Module:
    """Return a model of layers with chunked attention and rotary positions, and one layer with neither."""
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    sizes = {"head_dim": 8, "intermediate_size_mlp": 64, "num_local_experts": 2, "attention_chunk_size": 5}
    return Llama4ForCausalLM(Llama4TextConfig(**SIZES, **sizes, no_rope_layers=[1, 0, 1], **options))


def untuned() -> nn.Module:
    return llama4(attn_temperature_tuning=False)


def eager() -> nn.Module:
    model: Any = llama()
    model.set_attn_implementation("eager")
    return model  # type: ignore[no-any-return]


def lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "v_proj", "up_proj"]
    model: Any = get_peft_model(llama(), LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=targets))  # type: ignore[arg-type]
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": llama, "eager": eager, "window": mistral, "two kinds of layers": gemma, "learned positions": gpt2, "experts": mixtral,
    "lora": lora, "chunks": untuned,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A training run."""

    model: str = "llama"
    packed: bool = False
    """Whether each row has several documents."""
    tiles: int = 1
    mlp_tokens: int = 0
    """Positions in a tile of each MLP and norm; 0: no tiles."""
    accumulation: int = 1
    checkpointing: bool = False
    steps: int = 2


@dataclass
class Outcome:
    """A run's results: the losses and norms of steps, the first step's gradients, parameters, and an evaluation's loss."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    evaluation: float = 0.0
    messages: int = 0


def make(case: Case) -> nn.Module:
    torch.manual_seed(0)
    model: Any = MODELS[case.model]()
    model.config.attention_dropout = model.config.attn_pdrop = model.config.resid_pdrop = model.config.embd_pdrop = 0.0
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if case.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    return model  # type: ignore[no-any-return]


def batch(case: Case, step: int, group: int) -> dict[str, Tensor]:
    """Return a batch whose rows have different numbers of labels that count."""
    generator = torch.Generator().manual_seed(100 * step + group)
    tokens = torch.randint(2, 64, (ROWS, LENGTH), generator=generator)
    labels = tokens.clone()
    labels[0, : 5 + 9 * group + step] = -100
    made = {"input_ids": tokens, "labels": labels}
    if case.packed:
        lengths = ((9, 13), (3, 12, 7))
        made["position_ids"] = torch.stack([torch.cat([torch.arange(one) for one in row]) for row in lengths])
    return made


def counted(one: dict[str, Tensor]) -> int:
    return int((one["labels"][:, 1:] != -100).sum())


def alone(case: Case, groups: int) -> Outcome:
    """Train on one process, with plain PyTorch and whole logits."""
    model: Any = make(case)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-2, eps=1e-3)
    out = Outcome()
    for step in range(case.steps):
        many = [
            batch(case, step * case.accumulation + n, group)
            for n in range(case.accumulation)
            for group in range(groups)
        ]
        tokens = sum(counted(one) for one in many)
        losses = [_sum_of(model, one) / tokens for one in many]
        sum(losses).backward()  # type: ignore[union-attr]
        if step == 0:
            out.gradients = {name: p.grad.clone() for name, p in parameters.items()}  # type: ignore[union-attr]
        out.losses.append(sum(float(one.detach()) for one in losses))
        out.norms.append(float(nn.utils.clip_grad_norm_(parameters.values(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    out.parameters = {name: p.detach().clone() for name, p in parameters.items()}
    model.eval()
    one = batch(case, 99, 0)
    with torch.no_grad():
        out.evaluation = float(_sum_of(model, one)) / counted(one)
    return out


def _sum_of(model: nn.Module, one: dict[str, Tensor]) -> Tensor:
    inputs = {name: value for name, value in one.items() if name != "labels"}
    logits = model(**inputs, use_cache=False).logits[:, :-1].float()
    return F.cross_entropy(logits.flatten(0, 1), one["labels"][:, 1:].flatten(), reduction="sum")


def train(
    rank: int, case: Case, size: int, policy: int | Policy, overlap: bool = True, dtype: torch.dtype = torch.float32
) -> Outcome:
    """Train with sequences that are cut over `size` ranks."""
    world = torch.distributed.get_world_size()
    shape = (world,) if size == world else (world // size, size)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("sp",) if size == world else ("dp", "sp"))
    group = rank // size
    model: Any = make(case)
    sequences = Sequences(mesh["sp"]).attach(model)
    if case.mlp_tokens:
        norms = "*.ln_*" if case.model == "learned positions" else "*norm"
        tile(model, ["*.mlp", norms], tokens=case.mlp_tokens)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-2, eps=1e-3)
    precision = None if dtype is torch.float32 else Precision(dtype)
    sharded = zeroshard.shard(model, optimizer, policy, precision=precision, overlap=overlap)
    out = Outcome()
    for step in range(case.steps):
        numbers = range(step * case.accumulation, (step + 1) * case.accumulation)
        tokens = sum(counted(batch(case, n, one)) for n in numbers for one in range(world // size))
        loss = 0.0
        for one in sequences.cut(batch(case, n, group) for n in numbers):
            part = sequences.loss(model, one, tiles=case.tiles, tokens=tokens)
            part.backward()
            loss += float(part.detach())
        if step == 0:
            out.messages = sequences.messages
            gradients = {name: zeroshard.parameter_states(p).get("gradients") for name, p in parameters.items()}
            out.gradients = {name: one for name, one in gradients.items() if one is not None}
        out.losses.append(loss)
        out.norms.append(float(sharded.clip_grad_norm_(0.5)))
        sharded.optimizer.step()
        sharded.optimizer.zero_grad()
    model.eval()
    one = batch(case, 99, 0)
    with torch.no_grad():
        out.evaluation = float(sequences.loss(model, sequences.cut(one), tiles=case.tiles))
        # Each rank runs whole sequences separately. At stage 3, ranks still gather units together.
        whole = float(_sum_of(model, one)) / counted(one)
    assert abs(out.evaluation - whole) < (1e-5 if precision is None else 1e-2), (out.evaluation, whole)
    with zeroshard.unsharded(model):
        out.parameters = {name: p.detach().clone() for name, p in parameters.items()}
    return out


def expect_close(found: Outcome, twin: Outcome) -> None:
    """Assert that results are close. One process computes sums in a different order."""
    for name in ("losses", "norms"):
        torch.testing.assert_close(
            torch.tensor(getattr(found, name)), torch.tensor(getattr(twin, name)), rtol=3e-6, atol=1e-6
        )
    assert abs(found.losses[0] - twin.losses[0]) <= 1e-6 * twin.losses[0]
    assert abs(found.evaluation - twin.evaluation) <= 1e-5 * twin.evaluation
    assert found.gradients.keys() == twin.gradients.keys()
    total = torch.stack([one.norm() for one in twin.gradients.values()]).norm()
    for name, gradient in twin.gradients.items():
        off = (found.gradients[name] - gradient).norm()
        # The gradient of a key's bias is zero except for rounding.
        assert off <= 1e-5 * gradient.norm() or off <= 1e-7 * total, f"{name}: {off / gradient.norm():.1e}"


def same_bits(one: Outcome, other: Outcome) -> bool:
    """Return whether two training runs are equal to the last bit."""
    return (one.losses, one.norms, one.evaluation) == (other.losses, other.norms, other.evaluation) and all(
        torch.equal(value, mine[name])
        for theirs, mine in ((one.parameters, other.parameters), (one.gradients, other.gradients))
        for name, value in theirs.items()
    )
