"""Frozen weights of bitsandbytes under adapters (QLoRA): the losses of the unsharded model, and bytes that are sharded."""

from __future__ import annotations

import copy
import io
import json
import os
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from insides import units as units_of
from ranks import on_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from twin import CPU, DISK, LARGE_BUCKETS, build, plain_torch, refusal, update

import zeroshard
from zeroshard import CheckpointError, Offload, Policy, Precision, UsageError
from zeroshard.core.quantised import scales_of

bnb = pytest.importorskip("bitsandbytes")
peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")

WIDTH = 64
STORAGES = {"uint8": torch.uint8, "bf16": torch.bfloat16, "fp32": torch.float32}


class Adapted(nn.Module):
    def __init__(self, base: nn.Module, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = nn.Linear(inputs, 4, bias=False), nn.Linear(4, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


class Adapters(nn.Module):
    def __init__(self, make: Callable[..., nn.Module], recomputes: bool = False) -> None:
        super().__init__()

        def block() -> nn.Module:
            up, down = (Adapted(make(*s), *s) for s in ((WIDTH, 2 * WIDTH), (2 * WIDTH, WIDTH)))
            return nn.Sequential(OrderedDict(up=up, relu=nn.ReLU(), down=down))

        self.recomputes = recomputes
        self.enter, self.leave = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 2)
        self.blocks = nn.ModuleList(block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x))
        return self.leave(x)


def four_bit(storage: torch.dtype = torch.uint8, nested: bool = True) -> Callable[..., nn.Module]:
    how = {"quant_type": "nf4", "quant_storage": storage, "compress_statistics": nested, "compute_dtype": torch.float32}
    return partial(bnb.nn.Linear4bit, **how)


eight_bit = partial(bnb.nn.Linear8bitLt, has_fp16_weights=False)


def adapters(make: Callable[..., nn.Module], recomputes: bool = False) -> Adapters:
    model = Adapters(make, recomputes)
    for module in model.modules():
        if isinstance(module, bnb.nn.Linear4bit):  # in eval mode, the unsharded model repacks its bytes otherwise
            module.support_avx512bf16_for_cpu = False
    return model.to("cpu")  # which quantises


ADAMW = partial(torch.optim.AdamW, lr=1e-2, foreach=False)
made = partial(build, make_optimizer=ADAMW, bucket_numel=LARGE_BUCKETS)
"""Shards a model of `make_model` under a policy."""


def losses(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[float]:
    """Train on batches that are the same on every rank, so that the mean gradient is each rank's own; then evaluate."""
    found = [update(model(batch(number)).pow(2).mean(), optimizer).item() for number in range(steps)]
    model.eval()
    with torch.no_grad():
        found.append(model(batch(99)).sum().item())
    model.train()
    return found


def batch(number: int) -> Tensor:
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(number))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("recomputes", [False, True])
def test_losses_are_those_of_the_unsharded_model(
    rank: int, storage: str, nested: bool, recomputes: bool, tmp_path: Path
) -> None:
    make_model, how = partial(adapters, four_bit(STORAGES[storage], nested), recomputes), Offload(str(tmp_path))
    expected = losses(*plain_torch(ADAMW, make_model))
    policies = [Policy.stage(stage) for stage in range(4)]
    policies += [Policy.stage(stage).offloaded(parameters=CPU) for stage in (2, 3)]
    policies += [Policy.stage(3).offloaded(parameters=DISK, optimizer=DISK, offload=how)]
    for policy in policies:
        # Other values on rank 1: all start from rank 0's.
        model, sharded = made(policy, make_model=make_model, seed=rank)
        if policy == Policy.stage(3):
            sharded.offload_states(place=DISK, offload=how)
            sharded.reload_states()
        assert losses(model, sharded.optimizer) == expected, policy


@pytest.mark.ranks(2)
@pytest.mark.parametrize("param_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("storage", STORAGES)
def test_no_dtype_of_the_run_converts_the_bytes(rank: int, storage: str, param_dtype: torch.dtype) -> None:
    make_model = partial(adapters, four_bit(STORAGES[storage]))
    torch.manual_seed(0)
    before = {fqn: p.detach() for fqn, p in make_model().named_parameters() if isinstance(p, bnb.nn.Params4bit)}
    for stage in (1, 3):
        precision = Precision(param_dtype, keep_in_fp32=("enter", "leave"))
        model, sharded = made(stage, make_model=make_model, precision=precision)
        with zeroshard.unsharded(model):
            for fqn, p in model.named_parameters():
                if fqn in before:
                    assert torch.equal(p.detach().view(torch.uint8), before[fqn].view(torch.uint8))
        value = sharded.states.get("blocks.1.up.base.weight")
        assert torch.equal(value.view(torch.uint8), before["blocks.1.up.base.weight"].view(torch.uint8))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("recomputes", [False, True])
def test_bytes_are_sharded_and_freed_after_each_block(rank: int, recomputes: bool) -> None:
    model, sharded = made(3, make_model=partial(adapters, four_bit(), recomputes))
    numel = sum(p.numel() for p in model.parameters() if isinstance(p, bnb.nn.Params4bit))
    units = [unit for unit in units_of(sharded) if unit.group.is_quantised]
    at_rest = sum(one.numel() for unit in units for bucket in unit.buckets for one in bucket.tensors("parameters"))
    assert at_rest == numel // 2  # bytes, on each of two ranks
    assert sum(unit.flat.nbytes for unit in units) == 0
    live = []
    for block in model.blocks:
        block.register_forward_hook(lambda *_: live.append(sum(unit.flat.nbytes > 0 for unit in units)))
        block.register_full_backward_hook(lambda *_: live.append(sum(unit.flat.nbytes > 0 for unit in units)))
    losses(model, sharded.optimizer, steps=1)
    assert len(live) >= 9
    assert max(live) <= 2  # the block that runs, and the one that is gathered ahead of its use
    assert not any(unit.flat.kept_count for unit in units)
    assert sum(unit.flat.nbytes for unit in units) == 0


@pytest.mark.ranks(2)
def test_the_parameter_keeps_its_class_and_state(rank: int) -> None:
    found: list[tuple[Any, Any, Tensor]] = []

    def make_model() -> nn.Module:
        model = adapters(four_bit())
        weight: Any = model.blocks[1].up.base.weight
        found.append((weight, weight.quant_state, weight.detach().clone()))
        return model

    model, sharded = made(3, make_model=make_model)
    ((parameter, state, values),) = found
    losses(model, sharded.optimizer, steps=1)
    assert model.blocks[1].up.base.weight is parameter
    assert isinstance(parameter, bnb.nn.Params4bit)
    assert parameter.quant_state is state
    assert type(parameter).__name__ == "Params4bit"  # which PEFT looks at
    assert "sharded at rest, and `clone` needs its values" in refusal(parameter.clone)
    assert "needs its values" in refusal(lambda: bnb.functional.dequantize_4bit(parameter, state))
    with zeroshard.unsharded(model):
        assert type(parameter).__name__ == "Params4bit"
        assert torch.equal(parameter.detach(), values)
    copied = copy.deepcopy(model.blocks[1])
    assert type(copied.up.base.weight) is bnb.nn.Params4bit
    assert copied.up.base.weight.quant_state is not state
    assert torch.equal(copied.up.base.weight.detach(), values)
    with zeroshard.unsharded(model):
        file = io.BytesIO()
        torch.save(parameter, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)  # an nn.Parameter, as without zeroshard, with the attributes
    assert torch.equal(loaded.detach(), values)
    assert torch.equal(loaded.quant_state.absmax, state.absmax)
    sharded.remove()
    assert type(parameter) is bnb.nn.Params4bit
    assert torch.equal(parameter.detach(), values)


@pytest.mark.ranks(2)
def test_eight_bit_weights_stay_whole(rank: int) -> None:
    def make_model(runs: bool = False) -> nn.Module:
        model = adapters(eight_bit)
        if runs:
            with torch.no_grad():
                model(batch(0))
        return model

    expected = losses(*plain_torch(ADAMW, make_model))
    for stage in range(4):
        model, sharded = made(stage, make_model=partial(make_model, runs=stage == 2), seed=rank)
        assert losses(model, sharded.optimizer) == expected, stage
        for module in model.modules():
            if isinstance(module, bnb.nn.Linear8bitLt):  # the alias is of the same memory
                assert module.state.CB.data_ptr() == module.weight.data_ptr()


@pytest.mark.ranks(2)
def test_a_checkpoint_has_bytes_and_scales(rank: int, tmp_path: Path) -> None:
    for kind, make in (("4 bits", four_bit()), ("8 bits", eight_bit)):
        model, sharded = made(3, make_model=partial(adapters, make))
        losses(model, sharded.optimizer)
        sharded.save(tmp_path / kind, "three")
        expected = losses(model, sharded.optimizer)
        other, again = made(1, make_model=partial(adapters, make), seed=7)
        again.load(tmp_path / kind, "three")
        assert losses(other, again.optimizer) == expected
        scales = dict(scales_of(other))
        assert len(scales) == (18 if kind == "4 bits" else 6)
        for name, scale in scales_of(model):
            assert torch.equal(scales[name], scale)
    _, sharded = made(3, make_model=partial(adapters, four_bit(nested=False)))
    with pytest.raises(CheckpointError, match="absmax"):
        sharded.load(tmp_path / "4 bits", "three")


def changed(change: Callable[[Any], object]) -> Callable[[], nn.Module]:
    """Return a function that makes a model and changes its first frozen layer."""

    def make_model() -> nn.Module:
        model = adapters(four_bit(torch.bfloat16))
        change(model.blocks[0].up.base)
        return model

    return make_model


REFUSED: list[tuple[Callable[[], nn.Module], str]] = [
    (changed(lambda base: base.weight.requires_grad_(True)), "0.up.base.weight is a Params4bit and to be trained.*train adapters"),
    (changed(lambda base: setattr(base.weight.quant_state, "packing_format_for_cpu", True)), "packed for inference"),
    (partial(Adapters, four_bit()), "not quantised yet"),  # not moved to its device
    (partial(Adapters, eight_bit), "not quantised yet"),
]  # fmt: skip


@pytest.mark.ranks(1)
def test_what_is_refused(rank: int, tmp_path: Path) -> None:
    for make_model, text in REFUSED:
        with pytest.raises(UsageError, match=text):
            made(3, make_model=make_model)
            raise AssertionError(text)
    model, sharded = made(2, make_model=changed(lambda base: setattr(base, "support_avx512bf16_for_cpu", True)))
    assert not model.blocks[0].up.base.support_avx512bf16_for_cpu  # an evaluation would pack the weights
    model.blocks[0].up.base.weight.requires_grad_(True)
    with pytest.raises(UsageError, match="Params4bit"):
        sharded.update_trainable({"params": [model.blocks[0].up.base.weight]})
    model.blocks[0].up.base.weight.requires_grad_(False)
    text = refusal(lambda: sharded.offload_states(place=DISK, offload=Offload(str(tmp_path))))
    assert "whose readers would see" in text


class Scaled(Tensor):
    """Codes and a scale, as torchao's classes have them."""

    codes: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor) -> Scaled:
        made: Scaled = Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)  # type: ignore[attr-defined]
        made.codes = codes
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes)
        raise NotImplementedError(func)


@pytest.mark.ranks(2)
def test_tensors_that_hold_others_are_refused(rank: int) -> None:
    def make_model(name: str) -> nn.Module:
        values = Scaled(torch.ones(WIDTH, WIDTH, dtype=torch.int8))
        model = nn.Sequential(nn.Linear(4, WIDTH), nn.Linear(WIDTH, WIDTH))
        if name == "codes":
            model.register_buffer("codes", values)
        else:
            model[1].weight = nn.Parameter(values, requires_grad=False)
        return model

    for name, stage in (("codes", 1), *(("1.weight", stage) for stage in range(4))):
        told = f"^{name} is of test_quantised's class Scaled.*Quantise frozen weights with bitsandbytes"
        with pytest.raises(UsageError, match=told):
            made(stage, make_model=partial(make_model, name))
            raise AssertionError(name, stage)


def save_llama(folder: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=64, num_hidden_layers=3, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_transformers_model_with_lora(bits: int, tmp_path: Path) -> None:
    """QLoRA as its users write it; then the adapter's file, and a merge."""
    save_llama(tmp_path / "base")
    how: dict[str, Any] = {"load_in_8bit": True}
    if bits == 4:
        how = {
            "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True,
            "bnb_4bit_compute_dtype": torch.float32, "bnb_4bit_quant_storage": torch.bfloat16,
        }  # fmt: skip

    def make_model() -> Any:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "base", dtype=torch.float32, device_map={"": "cpu"},
            quantization_config=transformers.BitsAndBytesConfig(**how),
        )  # fmt: skip
        model = peft.prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs={"use_reentrant": False})
        torch.manual_seed(1)
        options = {"target_modules": ["q_proj", "up_proj"], "init_lora_weights": "gaussian"}
        return peft.get_peft_model(model, peft.LoraConfig(r=4, task_type="CAUSAL_LM", **options))

    def trained(model: Any, optimizer: torch.optim.Optimizer) -> list[float]:
        found = []
        for number in range(3):
            ids = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(number))
            found.append(update(model(input_ids=ids, labels=ids).loss, optimizer).item())
        return found

    def body(rank: int) -> None:
        expected = trained(*plain_torch(ADAMW, make_model))
        for stage in (0, 2, 3):
            model, sharded = made(stage, make_model=make_model)
            assert trained(model, sharded.optimizer) == expected, stage
            sharded.export(tmp_path / f"adapter {stage}")
        sharded.remove()
        model.eval()
        ids = torch.arange(8)[None]
        with torch.no_grad():
            before = model(ids).logits
            merged = model.merge_and_unload()(ids).logits
        assert (merged - before).abs().max() < 0.1  # PEFT quantises again

    on_ranks(body, 2)
    files = [(tmp_path / f"adapter {stage}" / "adapter_model.safetensors").read_bytes() for stage in (0, 2, 3)]
    assert files[0] == files[1] == files[2]


@pytest.mark.full
def test_a_stock_trainer_with_deepspeeds_config(tmp_path: Path) -> None:
    save_llama(tmp_path / "base")
    script = Path(__file__).parent / "contracts" / "quantised.py"
    found = []
    for stage in (2, 3):
        out = tmp_path / f"stage {stage}"
        out.mkdir()
        command = [sys.executable, "-m", "zeroshard", "run", "--nproc-per-node", "2", str(script), str(stage)]
        command += [str(tmp_path / "base"), str(out)]
        variables = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=variables, check=False)
        assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
        once, resumed = json.loads((out / "losses.json").read_text())
        assert len(once) == 4
        assert resumed == once
        files = [(out / name / "adapter_model.safetensors").read_bytes() for name in ("once", "resumed")]
        assert files[0] == files[1]
        found.append((once, files[0]))
    assert found[0] == found[1]
