"""Bad input raises a sentence that names the problem and the remedy."""

from __future__ import annotations

import ast
import random
import re
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Stack, sgd, tokens, workload
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from twin import build, refusal

import zeroshard
from zeroshard import ConfigError, Place, Policy, PolicyError, Precision, Residency, Units
from zeroshard.core.transport.grouped import GroupedTransfer
from zeroshard.core.transport.shared_memory import VARIABLE, Neighbours
from zeroshard.engine.config.load import load_config
from zeroshard.testing import RankError, run_ranks, train

REMEDIES = (
    "accept|add|adapt|allow|ask|assign|attach|begin|build|call|cast|change|check|choose|clone|convert|copy|correct|cut|"
    "declare|detach|divide|enable|evaluate|export|free|freeze|give|go "
    "on|hand|import|install|iterate|keep|leave|let|list|"
    "load|look|lower|make|materialise|measure|move|name|pack|pad|pass|pip "
    "install|plan|put|raise|read|register|reinstall|remove|"
    "report|resume|return|run|save|set|shard|share|sort|start|step|store|switch|take|train|try|turn|unfreeze|unset|"
    "use|wait|write|disable|end"
)
"""What a message asks its reader to do, after a stop or `or`."""

SGD = {"train_micro_batch_size_per_gpu": 3, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}


def test_a_wait_with_a_timeout_of_months() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    neighbours, other = Neighbours({1: ours}, 60 * 86400.0), Neighbours({0: theirs}, 60 * 86400.0)
    late = threading.Timer(1.5, other.send, (0, 5, b"late"))  # after the notice that the first one is stuck
    late.start()
    assert neighbours.receive(1, 5, "a message") == b"late"
    late.join()
    neighbours.close()
    other.close()


@pytest.mark.full
def test_a_hung_rank_fails_with_every_stack() -> None:
    def sleeper(rank: int) -> None:
        time.sleep(100)

    with pytest.raises(RankError, match=r"(?s)rank 0 hung.*in sleeper.*rank 1 hung.*in sleeper"):
        run_ranks(sleeper, 2, timeout=4, initialise=False)


DIFFERENT: dict[str, Callable[[int], dict[str, Any]]] = {
    "param_dtype": lambda rank: {"precision": Precision(param_dtype=torch.bfloat16 if rank else torch.float32)},
    "buckets of 100": lambda rank: {"bucket_numel": 1000 + rank},
    "sharded: ": lambda rank: {"policy": Policy.stage(1 + rank)},
    "reshard_after_forward=": lambda rank: {"policy": Policy.stage(3, reshard_after_forward=rank == 0)},
    "gradients=": lambda rank: {"policy": Policy.stage(2).offloaded(optimizer=Place.CPU) if rank else 2},
    "unit ": lambda rank: {"policy": 3, "units": Units(min_numel=100 * rank)},
    "whole_parameters=": lambda rank: {"elementwise": rank == 0},
    "overlap=": lambda rank: {"overlap": rank == 0},
    "within=": lambda rank: {"policy": Policy.stage(2, within=1 if rank else None)},
}
"""By the beginning of the setting in the message, the arguments of each rank."""


@pytest.mark.ranks(2)
@pytest.mark.parametrize("what", DIFFERENT)
def test_ranks_with_different_settings_are_refused(rank: int, what: str) -> None:
    layers = {"policy": 1, "make_model": lambda: nn.Sequential(nn.ModuleList([nn.Linear(3, 3)]))}
    text = refusal(lambda: build(**layers | DIFFERENT[what](rank)))
    assert "ranks [1] differ from rank 0" in text
    assert what in text


@pytest.mark.ranks(2)
def test_different_models_are_refused(rank: int) -> None:
    text = refusal(lambda: build(1, make_model=lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 4 + rank))))
    assert "the ranks built different models" in text
    assert "1.weight" in text


@pytest.mark.ranks(2)
def test_groups_that_are_none_of_this_ranks(rank: int) -> None:
    group: Any = torch.distributed.new_group([0])
    if rank == 1:
        assert "this rank is not in the group" in refusal(lambda: build(2, group=group))
        assert "group= is a list" in refusal(lambda: build(2, group=[0, 1]))
        make = zeroshard.ZeroRedundancyOptimizer
        assert "not in the group" in refusal(lambda: make(Stack().parameters(), torch.optim.SGD, group, lr=0.1))
    torch.distributed.barrier()


def test_models_and_optimizers_that_cannot_be_sharded() -> None:
    model, frozen = Stack(), Stack().requires_grad_(False)
    with torch.device("meta"):
        meta = Stack()
    own, others, of_meta, of_frozen = (sgd(one.parameters()) for one in (model, Stack(), meta, frozen))
    in_use = Stack()
    stepped = torch.optim.AdamW(in_use.parameters())
    in_use(*tokens(0, 0)).backward()
    stepped.step()
    cases: list[tuple[str, Any, Any, Any]] = [
        ("no parameters", nn.ReLU(), own, 1),
        ("not parameters of the model", model, others, 1),
        ("optimizer is a Policy", model, Policy.stage(2), None),
        ("a Policy, or the number of a ZeRO stage", model, own, "2"),
        ("the model is an AdamW, not a torch.nn.Module", stepped, model, 1),
        ("0, 1, 2 or 3", model, own, 4),
        ("DataParallel", nn.DataParallel(model), own, 1),
        ("elementwise=True", model, torch.optim.Optimizer(model.parameters(), {}), 1),
        ("meta device", meta, of_meta, 1),
        ("nothing to train", frozen, of_frozen, 1),
        ("stepped already", in_use, stepped, 1),
        ("already has a gradient", in_use, sgd(in_use.parameters()), 1),
    ]
    for text, *of_shard in cases:
        assert text in refusal(partial(zeroshard.shard, *of_shard))
    _, sharded = build(3, make_model=lambda: model)
    assert sharded.policy == Policy.stage(3)
    assert "sharded already" in refusal(lambda: build(3, make_model=lambda: model))
    again = {"params": [model.embedding.weight]}
    assert "were in another group when zeroshard took" in refusal(lambda: sharded.optimizer.add_param_group(again))


@pytest.mark.ranks(2)
def test_models_in_the_hands_of_torchs_wrappers_are_refused(rank: int) -> None:
    ddp = nn.parallel.DistributedDataParallel(Stack())
    fsdp = nn.Sequential(nn.Linear(4, 4))
    fully_shard(fsdp[0])
    cut = nn.Linear(4, 4)
    parallelize_module(cut, init_device_mesh("cpu", (2,)), ColwiseParallel())
    for model, text in (
        (ddp, "DistributedDataParallel"),
        (fsdp, "0 is managed by FSDPModule"),
        (cut, "parameter weight is a DTensor over ranks [0, 1]"),
    ):
        assert text in refusal(lambda model=model: build(1, make_model=lambda: model))  # type: ignore[misc]


def test_policies_without_meaning() -> None:
    on, off = Residency(True), Residency(False)
    assert "Shard the gradients too" in refusal(lambda: Policy(on, off, off))
    assert "Shard the optimizer too" in refusal(lambda: Policy(off, on, off))
    assert "0, 1, 2 or 3" in refusal(lambda: Policy.stage(4))
    disk = Residency(True, Place.DISK)
    assert "no folder is named" in refusal(lambda: Policy(off, off, disk))
    assert "not sharded" in refusal(lambda: Policy.stage(0).offloaded(optimizer=Place.CPU))
    assert "the optimizer is not sharded" in refusal(lambda: Policy.stage(0).offloaded(parameters=Place.CPU))
    assert "summed on the accelerator" in refusal(lambda: Policy(off, Residency(False, Place.CPU), on))
    assert "Policy.stage(3)" in refusal(lambda: Policy.stage(2).offloaded(parameters=Place.DISK, path="."))
    assert "multiple of 4096" in refusal(lambda: zeroshard.Offload(block_nbytes=1000))
    assert "between 0 and 1" in refusal(lambda: zeroshard.Offload(ratio=1.5))
    assert "at least 1" in refusal(lambda: zeroshard.Offload(buffer_count=0))
    assert issubclass(PolicyError, ValueError)
    by_name = Policy.stage(3).offloaded(optimizer="cpu", parameters="cpu")  # type: ignore[arg-type]
    assert by_name == Policy.stage(3).offloaded(optimizer=Place.CPU, parameters=Place.CPU)
    assert by_name.optimizer.place is Place.CPU, "code compares places by identity"
    text = refusal(lambda: Policy.stage(3).offloaded(optimizer="gpu"))  # type: ignore[arg-type]
    assert 'the place \'gpu\'. Pass a Place, or one of "accelerator", "cpu", "disk".' in text


def test_calls_out_of_order() -> None:
    """Those of a plain loop are in test_states.py, except for one."""
    model, sharded = build(1)
    with sharded.accumulate():
        model(*tokens(0, 0)).backward()
    assert "not declared the last microbatch" in refusal(sharded.optimizer.step)
    engine, *_ = zeroshard.initialize(model=Stack(), config=SGD)
    assert "scalar loss" in refusal(lambda: engine.backward(torch.zeros(3)))
    with torch.no_grad():
        loss = engine(*tokens(0, 0))
    assert "no_grad" in refusal(lambda: engine.backward(loss))
    with engine.no_sync():
        assert "inside engine.no_sync()" in refusal(engine.step)
    assert "multiple of" in refusal(lambda: engine.set_train_batch_size(0))
    with pytest.raises(AttributeError, match="neither the engine nor the model has an attribute 'tensor_para"):
        _ = engine.tensor_parallel_size
    engine, *_ = zeroshard.initialize(model=Stack(), config={})
    assert "for evaluation only" in refusal(lambda: engine.backward(engine(*tokens(0, 0))))
    assert "for evaluation only" in refusal(engine.optimizer.step)
    assert "needs a config" in refusal(lambda: zeroshard.initialize(model=Stack()))
    assert "torch.nn.Module" in refusal(lambda: zeroshard.initialize(model=3, config=SGD))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"zero_optimization": {"stge": 2}}, "did you mean 'stage'?"),
        ({"zero_optimization": {"zero_quantized_gradients": "fp8"}}, "zero_optimization.zero_quantized_gradients"),
        (
            {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme"}}},
            "offload_optimizer.nvme_path",
        ),
        ({"zero_optimization": {"reduce_bucket_size": -1}}, "reduce_bucket_size"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16 and bf16 are both enabled"),
        ({"fp16": {"enabled": True}, "bfloat16": {"enabled": True}}, "fp16 and bf16 are both enabled"),
        ({"fp16": {"fp16_master_weights_and_grads": True}}, "fp16.fp16_master_weights_and_grads"),
        ({"bf16": {"enabled": 3}}, "bf16.enabled"),
        ({"flops_profiler": {"enabled": True}}, "torch.utils.flop_counter"),
        ({"gradient_accumulation_steps": True}, "gradient_accumulation_steps"),
        ({"optimizer": {"type": "Adam", "params": {"lr": "auto"}}}, "auto={'lr': ...}"),
        ({"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto"}, "train_micro_batch_size_per_gpu"),
        ({"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2}, "7 != 2 * 1 * 2"),
        ({"gradient_clipping": "much"}, "gradient_clipping"),
        ("/nowhere/config.json", "no config file"),
        (3, "a path or a mapping"),
    ],
)
def test_configs_that_cannot_be_honoured(config: object, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(config, world_size=2)  # type: ignore[arg-type]
    assert expected in str(caught.value)


@pytest.mark.parametrize("stage", range(4))
def test_a_collective_that_comes_late_over_gloo_changes_no_bits(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Races are provoked: every wait is delayed at random, on each rank differently."""
    monkeypatch.setenv(VARIABLE, "0")

    def body(rank: int) -> int:
        work = workload("untied", steps=5)
        calm = train(rank, work, Policy.stage(stage))
        noise = random.Random(rank)
        original = GroupedTransfer.wait
        delays = []

        def late(self: GroupedTransfer) -> None:
            delays.append(noise.random() * 0.004)
            time.sleep(delays[-1])
            original(self)

        GroupedTransfer.wait = late  # type: ignore[method-assign]
        assert train(rank, work, Policy.stage(stage)).equals(calm)
        return len(delays)

    assert min(run_ranks(body, 2)) > 20


def _message(node: ast.expr) -> str:
    """Return a message with braces in the place of what a run fills in."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join("{}" if isinstance(part, ast.FormattedValue) else _message(part) for part in node.values)
    return "{}"


def test_every_message_ends_with_what_to_do() -> None:
    """Where it ends with another error's sentence, that one's remedy counts."""
    found, lacking = 0, []
    remedy = re.compile(rf"(^|[.:;,?)(}}\n] ?|\bor |\band |\bthen |\binstead )({REMEDIES})\b", re.IGNORECASE)
    classes = {name for name in zeroshard.__all__ if name.endswith("Error")}
    for path in Path(zeroshard.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in classes and node.args:
                message = _message(node.args[0])
                found += 1
                if not message.endswith("{}") and not remedy.search(message):
                    lacking.append(f"{path.name}: {message}")
    assert found > 500
    assert not lacking, "\n".join(lacking)
