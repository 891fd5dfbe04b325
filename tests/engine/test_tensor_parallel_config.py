"""`tensor_parallel.autotp_size` divides a transformers model by its own plan, and it trains as in one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import divided
import pytest
import torch
import transformers
from divided import expect_near
from insides import sharded_of
from ranks import on_ranks
from test_tensor_parallel import STEPS, divide_layers, llama, loss_of_labels, meshed, refusal
from torch import nn
from torch.distributed.tensor import DTensor

import zeroshard
from zeroshard import ConfigError
from zeroshard.engine.config.load import load_config


def causal(name: str, layers: int, **more: Any) -> Any:
    """Return a small causal model of transformers."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16}
    config = getattr(transformers, f"{name}Config")(**(sizes | heads | more))
    return getattr(transformers, f"{name}ForCausalLM")(config)


MODELS: dict[str, Callable[[], Any]] = {
    "Llama": llama,
    # Queries and keys are normalised head by head: each rank's heads give a part of the gradient of one weight.
    "Qwen3": lambda: causal("Qwen3", 2, vocab_size=30, head_dim=8, tie_word_embeddings=True),
    # Its embedding has a buffer, which torch makes a DTensor.
    "Gemma": lambda: causal("Gemma", 1, head_dim=8),
    # Its fused matrices are gathered, and cut again.
    "Phi3": lambda: causal("Phi3", 1, pad_token_id=3),
}


def settings(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}, "gradient_clipping": 0.5,
        "tensor_parallel": {"autotp_size": 2}, **more,
    }  # fmt: skip


ADAMW = {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}}


in_one_process = partial(divided.in_one_process, loss=loss_of_labels, steps=STEPS)


def trained(engine: Any, data_rank: int) -> divided.Run:
    return divided.train_engine(engine, loss_of_labels, data_rank, range(STEPS))


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Gemma", pytest.param("Phi3", marks=pytest.mark.full)])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_config_divides_a_model(ranks: int, name: str, tmp_path: Path) -> None:
    build = MODELS[name]

    def body(rank: int) -> list[dict[str, Any]]:
        runs = []
        for stage in (0, 3) if ranks == 2 else (2,):
            torch.manual_seed(rank)
            engine, *_ = zeroshard.initialize(model=build(), config=settings(stage, optimizer=ADAMW))
            assert any(isinstance(one, DTensor) for one in engine.module.parameters())
            assert (engine.dp_world_size, engine.mp_world_size) == (ranks // 2, 2)
            assert engine.train_batch_size() == ranks
            runs.append(trained(engine, rank // 2))
            if stage == 3:
                engine.save_checkpoint(tmp_path)
                engine.export(tmp_path / "exported")
            engine.destroy()
        return runs

    everyone = on_ranks(body, ranks)
    for runs in everyone:
        for run in runs:
            assert run["norms"] == everyone[0][0]["norms"]
            expect_near(run, in_one_process(build(), ranks=ranks // 2))
    if ranks == 2:
        values = everyone[0][0]["values"]
        exported = type(build()).from_pretrained(tmp_path / "exported")
        for fqn, value in exported.named_parameters():
            assert torch.equal(value, values[fqn]), fqn
        ordinary = {key: value for key, value in settings(1, optimizer=ADAMW).items() if key != "tensor_parallel"}
        engine, *_ = zeroshard.initialize(model=build(), config=ordinary)
        engine.load_checkpoint(tmp_path)
        assert engine.global_steps == STEPS
        for fqn, value in values.items():
            assert torch.equal(sharded_of(engine).states.get(fqn), value), fqn
        engine.destroy()


@pytest.mark.full
@pytest.mark.ranks(4)
@pytest.mark.parametrize("how", ["a generator", "a group", "divided before"])
def test_each_way_to_name_parameters_is_one_process(rank: int, how: str) -> None:
    model = llama()
    config = settings(1, optimizer=ADAMW)
    given: dict[str, Any] = {}
    if how == "divided before":  # the data-parallel ranks are found from the model, and no key is needed
        divide_layers(model, meshed(2, 2)["tp"])
        del config["tensor_parallel"]
    elif how == "a group":
        given["model_parameters"] = [{"params": list(model.parameters()), "lr": 1e-3}]
    else:
        given["model_parameters"] = model.parameters()
    engine, *_ = zeroshard.initialize(model=model, config=config, **given)
    expect_near(trained(engine, rank // 2), in_one_process(llama(), ranks=2))


@pytest.mark.ranks(2)
def test_bf16_leaves_buffers_as_they_are(rank: int) -> None:
    """Rotary frequencies, say; and parameters are converted before they are divided."""
    engine, *_ = zeroshard.initialize(model=llama(), config=settings(2, optimizer=ADAMW, bf16={"enabled": True}))
    assert {one.dtype for one in engine.module.parameters()} == {torch.bfloat16}
    assert engine.module.model.rotary_emb.inv_freq.dtype == torch.float32
    assert sharded_of(engine).states.get("lm_head.weight").dtype == torch.float32
    norms = trained(engine, 0)["norms"]
    assert norms == pytest.approx(in_one_process(llama(), ranks=1)["norms"], rel=0.05)
    state = engine.module_state_dict()
    assert not any(isinstance(one, DTensor) for one in state.values())
    assert state["lm_head.weight"].shape == (32, 32)
    engine.destroy()


def test_loaders_give_the_ranks_of_one_model_the_same_samples() -> None:
    def body(rank: int) -> list[int]:
        data = [{"input_ids": torch.tensor([number])} for number in range(8)]
        config = settings(1, optimizer=ADAMW)
        engine, _, loader, _ = zeroshard.initialize(model=llama(), config=config, training_data=data)
        found = [int(number) for batch in loader for number in batch["input_ids"]]
        engine.destroy()
        return found

    found = on_ranks(body, 4)
    assert found[0] == found[1] and found[2] == found[3]
    assert sorted(found[0] + found[2]) == list(range(8))


def tied(model: Any) -> None:
    model.lm_head.weight = model.model.embed_tokens.weight
    model.tp_plan.pop("model.embed_tokens", None)  # older releases of transformers have none


CHANGES: dict[str, Callable[[Any], object]] = {
    "tensor parallelism of a PEFT model": lambda model: setattr(model, "peft_config", {}),
    "num_key_value_heads = 1, which 2 tensor-parallel ranks": lambda model: setattr(
        model.config, "num_key_value_heads", 1
    ),
    "mlp.up_proj has out_features = 47, which 2": lambda model: setattr(
        model.model.layers[0].mlp, "up_proj", nn.Linear(32, 47)
    ),
    'as "packed_colwise", which is not supported': lambda model: model.tp_plan.update(
        {"model.layers.*.mlp.up_proj": "packed_colwise"}
    ),
    "is tied to a parameter that the plan of LlamaForCausalLM divides in another way": tied,
}
"""By what is told, changes of a Llama that make it indivisible."""


@pytest.mark.ranks(2)
def test_what_cannot_be_divided_is_refused_by_name(rank: int) -> None:
    def told(model: nn.Module, size: int = 2, **more: Any) -> str:
        config = settings(1, optimizer=ADAMW, tensor_parallel={"autotp_size": size})
        return refusal(lambda: zeroshard.initialize(model=model, config=config, **more))

    for sentence, change in CHANGES.items():
        model = llama()
        change(model)
        assert sentence in told(model)
    assert "has no plan for tensor parallelism" in told(nn.Linear(4, 4))
    assert "3 tensor-parallel ranks do not divide the 2 ranks" in told(llama(), 3)
    assert "leave group= (mpu, sp_size) out" in told(llama(), group=meshed(1, 2)["dp"].get_group())
    model = llama()
    divide_layers(model, meshed(2, 1)["tp"])
    assert "autotp_size is 4, but the model is already divided over 2 ranks" in told(model, 4)
    with zeroshard.sharded_init():
        born = llama()
    assert "was born sharded" in told(born)


@pytest.mark.ranks(4)
def test_ranks_that_name_different_numbers_are_refused(rank: int) -> None:
    four = settings(1, optimizer=ADAMW, tensor_parallel={"autotp_size": 4 if rank == 3 else 2})
    model = llama()
    model.config.num_key_value_heads = 4
    assert "different numbers of tensor-parallel ranks, [2, 2, 2, 4]" in refusal(
        lambda: zeroshard.initialize(model=model, config=four)
    )


def test_keys_of_the_block() -> None:
    sizes = {"train_micro_batch_size_per_gpu": 1}
    for block in (None, {}, {"autotp_size": 1}, {"autotp_size": 2, "tp_overlap_comm": True}):
        assert load_config({**sizes, "tensor_parallel": block}, 1).stage == 0
    with pytest.raises(ConfigError, match=r"partition_config.*parallelize_module"):
        load_config({**sizes, "tensor_parallel": {"autotp_size": 2, "partition_config": {"layers": []}}}, 1)
    with pytest.raises(ConfigError, match=r"tensor_parallel.autotp_sise: unknown key; did you mean 'autotp_size'"):
        zeroshard.initialize(model=nn.Linear(1, 1), config={**sizes, "tensor_parallel": {"autotp_sise": 2}})


def test_doors_that_divide_nothing_refuse_the_key(tmp_path: Path) -> None:
    from zeroshard.integrations.transformers import ZeroTrainer

    arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], per_device_train_batch_size=2)
    with pytest.raises(ConfigError, match=r"autotp_size = 2 is not supported by ZeroTrainer"):
        ZeroTrainer(llama(), arguments, zero=settings(1), train_dataset=[{"input_ids": [1], "labels": [1]}]).train()
