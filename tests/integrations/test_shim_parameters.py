"""The functions for parameters in the package named deepspeed."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import subprocess
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed_checkpoints import FOLDER, make_model
from ranks import on_ranks
from torch import Tensor, nn
from twin import microbatch, same, same_on_all_ranks, whole

import zeroshard
from zeroshard.integrations.shim_path import put_on_path, shim_path

STAGES = pytest.mark.parametrize("stage", range(4))


class Net(nn.Module):
    """Parameters of the root, of a list of blocks, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 6)) for _ in range(2)])
        self.frozen = nn.Parameter(torch.rand(5), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x.to(next(block.parameters()).dtype))
        return (x * self.scale + self.frozen.sum()).float().square().mean()


def deepspeed_of_ours() -> Any:
    """Import it, in a rank: the path is that process's own."""
    put_on_path()
    import deepspeed

    return deepspeed


def config(stage: int, bf16: bool = False, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": bf16},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
        **more,
    }


def batch(rank: int, step: int = 0) -> Tensor:
    return torch.randn(2, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def engine_of(deepspeed: Any, given: dict[str, Any], make: Callable[[], nn.Module] = Net) -> Any:
    torch.manual_seed(0)
    model = make()
    return deepspeed.initialize(model=model, model_parameters=trained(model), config=given)[0]


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def train(engine: Any, *batches: Tensor) -> list[float]:
    return [float(microbatch(engine, engine(one))) for one in batches]


# ---------------------------------------------------------------------- tensor fragments


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 1])
def test_a_gradient_that_nothing_has_reduced_is_this_ranks(rank: int, stage: int) -> None:
    deepspeed = deepspeed_of_ours()
    from deepspeed import utils

    engine = engine_of(deepspeed, config(stage))
    plain = copy.deepcopy(engine.module)
    ours = trained(engine.module)
    with engine.no_sync():
        for step in range(2):
            engine.backward(engine(batch(rank, step)))
            plain(batch(rank, step)).backward()
            for own, other in zip(ours, trained(plain), strict=True):
                assert torch.equal(utils.safe_get_full_grad(own), other.grad)
    engine.backward(engine(batch(rank, 2)))
    parts = [torch.empty_like(ours[0]) for _ in range(2)]
    plain(batch(rank, 2)).backward()
    dist.all_gather(parts, plain.scale.grad)
    assert torch.allclose(utils.safe_get_full_grad(ours[0]), sum(parts) / 2), "now the mean"
    assert zeroshard.parameter_states(ours[0]).own_gradient() is None
    engine.step()
    engine.destroy()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("bf16", [False, True])
@STAGES
def test_gradients_and_states_are_read_and_set_whole_and_in_parts(rank: int, stage: int, bf16: bool) -> None:
    """A frozen parameter has neither, and one that no engine trains has the gradient that torch gave it."""
    deepspeed = deepspeed_of_ours()
    from deepspeed import utils
    from deepspeed.utils.tensor_fragment import safe_update_full_grad_vectorized

    engine = engine_of(deepspeed, config(stage, bf16))
    scale, weight, *others = trained(engine.module)
    assert utils.safe_get_full_optimizer_state(scale, "exp_avg") is None
    engine.backward(engine(batch(rank)))
    before = utils.safe_get_full_grad(weight)
    assert (before.shape, before.dtype, bool(before.any())) == ((9, 6), torch.float32, True)
    utils.safe_set_full_grad(scale, torch.full((6,), 2.0))
    assert torch.equal(utils.safe_get_full_grad(scale), torch.full((6,), 2.0))
    utils.safe_set_local_grad(weight, utils.safe_get_local_grad(weight) * 3)
    assert torch.equal(utils.safe_get_full_grad(weight), (before * 3).to(weight.dtype).float())
    safe_update_full_grad_vectorized(others, lambda gradient, parameter: torch.zeros(parameter.shape))
    assert not any(bool(utils.safe_get_full_grad(parameter).any()) for parameter in others)
    assert torch.equal(utils.safe_get_full_fp32_param(scale), torch.ones(6))
    engine.step()
    assert bool((utils.safe_get_full_fp32_param(scale) < 1).all())
    assert torch.equal(utils.safe_get_full_optimizer_state(scale, "exp_avg"), torch.full((6,), 2.0) * (1 - 0.9))
    for number, parameter in enumerate(trained(engine.module)):
        new = torch.full(parameter.shape, 0.5 + number)
        for state in ("exp_avg", "exp_avg_sq"):
            utils.safe_set_full_optimizer_state(parameter, new, state)
            assert torch.equal(utils.safe_get_full_optimizer_state(parameter, state), new)
            mine = utils.safe_get_local_optimizer_state(parameter, state)
            utils.safe_set_local_optimizer_state(parameter, mine + 1, state)
            assert torch.equal(utils.safe_get_full_optimizer_state(parameter, state), new + 1)
        utils.safe_set_full_fp32_param(parameter, new)
        assert torch.equal(utils.safe_get_full_fp32_param(parameter), new)
        mine = utils.safe_get_local_fp32_param(parameter)
        assert mine.ndim == 1
        utils.safe_set_local_fp32_param(parameter, mine * 2)
        assert torch.equal(utils.safe_get_full_fp32_param(parameter), new * 2)
    with pytest.raises(TypeError, match="optim_state_key"):
        utils.safe_set_full_optimizer_state(scale, torch.ones(6))
    with deepspeed.zero.GatheredParameters(engine.module.parameters()):
        for number, parameter in enumerate(trained(engine.module)):
            assert bool((parameter == 1 + 2 * number).all())
    frozen, stranger = engine.module.frozen, nn.Parameter(torch.ones(2))
    stranger.grad = torch.ones(2)
    assert utils.safe_get_full_fp32_param(frozen) is utils.safe_get_full_fp32_param(stranger) is None
    assert utils.safe_get_full_grad(frozen) is None
    assert torch.equal(utils.safe_get_full_grad(stranger), torch.ones(2))


# ---------------------------------------------------------------------- ds_ attributes, zero.Init, GatheredParameters


@pytest.mark.ranks(2)
@STAGES
def test_parameters_say_what_deepspeeds_do_at_stage_3_alone(rank: int, stage: int) -> None:
    deepspeed = deepspeed_of_ours()
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
    from deepspeed.runtime.zero.utils import is_zero_param

    engine = engine_of(deepspeed, config(stage))
    model, names = engine.module, ("ds_id", "ds_shape", "ds_numel", "ds_status", "ds_tensor", "ds_persist")
    assert all(hasattr(p, name) is (stage == 3) for p in model.parameters() for name in names)
    assert all(is_zero_param(p) is (stage == 3) for p in model.parameters())
    if stage < 3:
        return
    weight = model.blocks[0][0].weight
    assert (weight.ds_shape, weight.ds_numel, weight.ds_persist) == ((9, 6), 54, False)
    assert weight.ds_status is ZeroParamStatus.NOT_AVAILABLE
    weight.ds_active_sub_modules.clear()
    parts: list[Any] = [None, None]
    dist.all_gather_object(parts, (weight.ds_tensor, [p.ds_id for p in model.parameters()]))
    (first, numbers), (second, others) = parts
    assert numbers == others and len(set(numbers)) == len(numbers)
    with deepspeed.zero.GatheredParameters(weight):
        assert weight.ds_status is ZeroParamStatus.AVAILABLE
        assert isinstance(weight, nn.Parameter)
        assert torch.equal(torch.cat([first, second]), weight.detach().view(-1))
    engine.backward(engine(batch(rank)))
    assert weight.ds_status is ZeroParamStatus.NOT_AVAILABLE
    engine.step()
    assert not hasattr(copy.deepcopy(model).scale, "ds_id")
    engine.destroy(alone=False)
    assert all(type(p) is nn.Parameter and not hasattr(p, "ds_id") for p in model.parameters())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("offload", [False, True])
@STAGES
def test_one_rank_may_destroy_its_engine_before_the_others(rank: int, stage: int, offload: bool) -> None:
    """Like transformers' hyperparameter search: rank 0 destroys an engine, and meets the others only then."""
    given = config(stage)
    if offload and stage:
        given["zero_optimization"].update({key: {"device": "cpu"} for key in ("offload_optimizer", "offload_param")})
    deepspeed = deepspeed_of_ours()
    engine = engine_of(deepspeed, given)
    model = engine.module
    train(engine, batch(rank))
    before = whole(model)
    if rank == 0:
        engine.destroy()
    dist.barrier()
    if rank == 1:
        engine.destroy()
    with pytest.raises(zeroshard.UsageError, match="the engine was destroyed"):
        engine(batch(rank))
    again = engine_of(deepspeed, given, lambda: model)
    assert same(whole(model), before)
    train(again, batch(rank))


AUTO = {"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 3, "offload_param": "auto"}}
INITS: dict[str, tuple[dict[str, Any], torch.dtype]] = {
    "a dict": ({"config_dict_or_path": config(3, bf16=True)}, torch.bfloat16),
    "a path": ({"config_dict_or_path": "zero.json"}, torch.bfloat16),
    "a dict with auto": ({"config_dict_or_path": AUTO}, torch.float32),
    "a dtype": ({"dtype": torch.bfloat16}, torch.bfloat16),
    "nothing": ({}, torch.float32),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("how", INITS)
def test_init_builds_with_rank_0s_values_in_the_configs_dtype(rank: int, how: str, tmp_path: Path) -> None:
    given, wanted = INITS[how]
    if how == "a path":
        path = tmp_path / f"{rank}.json"
        path.write_text(json.dumps(config(3, bf16=True)))
        given = {"config_dict_or_path": str(path)}
    deepspeed = deepspeed_of_ours()
    torch.manual_seed(rank)
    with deepspeed.zero.Init(**given):
        model = Net()
    assert all(p.ds_status.name == "NOT_AVAILABLE" and p.dtype is wanted for p in model.parameters())
    assert torch.get_default_dtype() is torch.float32
    with deepspeed.zero.GatheredParameters(model.parameters()):
        assert same_on_all_ranks(dict(model.named_parameters()))
    with deepspeed.zero.Init(enabled=False, **given):
        assert not hasattr(Net().scale, "ds_id")
    plain = nn.Linear(4, 4)
    kept = plain.weight.detach().clone()
    deepspeed.zero.Init(module=plain)
    assert plain.weight.ds_numel == 16
    with deepspeed.zero.GatheredParameters(plain.weight):
        assert rank == 1 or torch.equal(plain.weight, kept)


@pytest.mark.ranks(2)
@pytest.mark.full
def test_a_load_of_transformers_records_the_conversions_that_the_file_needed(rank: int) -> None:
    """A save reverts what is recorded: it would write the names of an older format."""

    class Enabled:
        config: dict[str, Any] = config(3)

        def is_zero3(self) -> bool:
            return True

    deepspeed = deepspeed_of_ours()
    from transformers import Wav2Vec2Config, Wav2Vec2Model
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.integrations import deepspeed as theirs
    from transformers.modeling_utils import LoadStateDictConfig

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    convolutions = {"conv_dim": (8,), "conv_stride": (5,), "conv_kernel": (10,), "num_conv_pos_embedding_groups": 2}
    plain = Wav2Vec2Model(Wav2Vec2Config(**sizes, **convolutions, num_feat_extract_layers=1))
    names = set(plain.state_dict())
    of_old = {"parametrizations.weight.original0": "weight_g", "parametrizations.weight.original1": "weight_v"}
    old = set(names)
    for new, former in of_old.items():
        old = {name.replace(new, former) for name in old}
    kept = Enabled()
    theirs.set_hf_deepspeed_config(kept)
    try:
        for file in (names, old):
            model = copy.deepcopy(plain)
            deepspeed.zero.Init(module=model)
            values = dict(zip(sorted(file), (plain.state_dict()[name] for name in sorted(names)), strict=True))
            mapping = get_model_conversion_mapping(model)
            theirs._load_state_dict_into_zero3_model(model, values, LoadStateDictConfig(weight_mapping=mapping))
            saved = revert_weight_conversion(model, dict.fromkeys(names, torch.empty(1)))
            assert saved.keys() == file
    finally:
        theirs.unset_hf_deepspeed_config()


@pytest.mark.ranks(2)
def test_what_nothing_initialises_is_nan_and_named(rank: int) -> None:
    """transformers skips torch's initialisers while it builds a model under ZeRO-3, and some models' own leave layers out."""
    deepspeed = deepspeed_of_ours()
    from transformers import initialization

    torch.rand(100_000).add_(1)  # freed memory with values
    with initialization.no_init_weights(), deepspeed.zero.Init(config_dict_or_path=config(3)):
        model = Net()
    assert not torch.are_deterministic_algorithms_enabled()
    with deepspeed.zero.GatheredParameters(model.blocks.parameters(), modifier_rank=0):
        model.blocks[0][0].weight.data.fill_(1)
    with deepspeed.zero.GatheredParameters(model.parameters()):
        without = {name for name, one in model.named_parameters() if one.isnan().all()}
    assert without == {name for name, _ in model.named_parameters() if "blocks" in name} - {"blocks.0.0.weight"}
    context = pytest.warns(UserWarning, match=r"blocks.0.0.bias and 6 more are NaN.*modifier_rank")
    with context if rank == 0 else contextlib.nullcontext():
        deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config(3))


@pytest.mark.ranks(1)
@pytest.mark.parametrize("place", ["cpu", "nvme"])
def test_init_builds_off_the_accelerator_where_the_config_offloads_parameters(
    rank: int, place: str, tmp_path: Path
) -> None:
    zero = {"stage": 3, "offload_param": {"device": place, "nvme_path": str(tmp_path)}}
    deepspeed = deepspeed_of_ours()
    accelerator = deepspeed.accelerator.get_accelerator()
    accelerator.current_device_name = lambda: "meta"  # as if there was another device
    with deepspeed.zero.Init(config_dict_or_path={"zero_optimization": zero}):
        model = Net()
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["born", "engine"])
def test_only_writes_of_the_modifier_rank_count(rank: int, kind: str) -> None:
    deepspeed = deepspeed_of_ours()
    gathered = deepspeed.zero.GatheredParameters
    if kind == "born":
        with deepspeed.zero.Init():
            model = Net()
    else:
        model = engine_of(deepspeed, config(3)).module
    weights = [block[0].weight for block in model.blocks]
    with gathered(iter([*weights, None, nn.Parameter(torch.ones(1)), weights[0]]), modifier_rank=0):
        if rank == 0:
            for number, weight in enumerate(weights):
                nn.init.constant_(weight, 1.0 + number)
    with gathered(weights[0]), torch.no_grad():
        assert bool((weights[0] == 1).all())
        weights[0].data += 1.0  # as PEFT merges an adapter for a while
    with pytest.raises(zeroshard.UsageError, match="modifier_rank"), gathered(weights[0]), torch.no_grad():
        weights[0].add_(rank + 1)
    with gathered([]), gathered(weights, enabled=False), gathered(nn.Linear(1, 1).weight, modifier_rank=0):
        assert weights[0].ds_status.name == "NOT_AVAILABLE"
    with gathered(weights):
        assert [float(weight.mean()) for weight in weights] == [1, 2]


class Crossed(nn.Module):
    """The forward hands the first block's weight to the second."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.blocks, self.way = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)]), way

    def forward(self, x: Tensor) -> Tensor:
        x, lender = self.blocks[0](x), self.blocks[0]
        if self.way == "gathered":
            import deepspeed

            with deepspeed.zero.GatheredParameters(lender.weight, fwd_module=self):
                x = x.matmul(lender.weight)
        else:
            x = x.matmul(lender.weight)
        return self.blocks[1](x).square().mean()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", ["gathered", "registered"])
def test_external_parameters(rank: int, way: str) -> None:
    deepspeed = deepspeed_of_ours()

    def run(stage: int) -> list[float]:
        torch.manual_seed(0)
        model = Crossed(way)
        if way == "registered":
            for _ in range(2):
                deepspeed.zero.register_external_parameter(model, model.blocks[0].weight)
        losses = train(engine_of(deepspeed, config(stage), lambda: model), *(batch(rank, step) for step in range(3)))
        if way == "registered":
            deepspeed.zero.unregister_external_parameter(model, model.blocks[0].weight)
            with pytest.raises(RuntimeError, match="not registered"):
                deepspeed.zero.unregister_external_parameter(model, model.blocks[0].weight)
        return losses

    assert run(3) == run(0)


@pytest.mark.ranks(2)
def test_trainers_may_gather_an_engine_to_generate(rank: int) -> None:
    """The sequence of TRL's `unwrap_model_for_generation`."""
    deepspeed = deepspeed_of_ours()
    engine = engine_of(deepspeed, config(3))
    train(engine, batch(rank))
    with deepspeed.zero.GatheredParameters(engine.parameters()):
        offload = engine.optimizer.parameter_offload
        for _, parameter in [*offload.module.named_parameters(), *offload.module.ds_external_parameters()]:
            parameter.ds_active_sub_modules.clear()
        for hook in [*offload.forward_hooks, *offload.backward_hooks]:
            hook.remove()
        offload.forward_hooks = offload.backward_hooks = []
        with torch.no_grad():
            for _ in range(1 + 2 * rank):  # each rank as often as it likes
                engine.module(batch(rank))
        if not offload.param_coordinator.is_invalid_trace():
            offload.param_coordinator._invalidate_trace()
        offload._register_deepspeed_module(offload.module)
    train(engine, batch(rank, 1))
    with deepspeed.zero.unwrap_model_for_generation(engine) as model, torch.no_grad():
        model.module(batch(rank))


# ---------------------------------------------------------------------- leaf modules


@pytest.mark.ranks(1)
def test_leaf_modules(rank: int) -> None:
    deepspeed_of_ours()
    from deepspeed import utils

    model = Net()
    assert utils.get_z3_leaf_modules(model) == []
    assert set(utils.set_z3_leaf_modules(model, [nn.Sequential])) == set(model.blocks)
    assert all(utils.z3_leaf_module(block) for block in model.blocks)
    assert all(block._z3_leaf for block in model.blocks), "the attribute that accelerate's users ask for"
    assert utils.z3_leaf_parameter(model.blocks[0][0].weight)
    assert not utils.z3_leaf_parameter(model.scale)
    assert len(utils.unset_z3_leaf_modules(model, ["Sequential"])) == 2
    assert utils.get_z3_leaf_modules(model) == []
    assert len(utils.set_z3_leaf_modules(model, ["torch.nn.modules.linear.Linear"])) == 4
    utils.unset_z3_leaf_modules(model, [nn.Linear])
    found, missing = utils.set_z3_leaf_modules_by_name(model, ["blocks.1", "no"], raise_if_not_found=False)
    assert (found, missing) == ([model.blocks[1]], ["no"])
    found, missing = utils.set_z3_leaf_modules_by_suffix(model, ["0.2", "1.2"])
    assert (found, missing) == ([model.blocks[0][2], model.blocks[1][2]], [])
    for call in (
        lambda: utils.set_z3_leaf_modules(model, [nn.Conv1d]),
        lambda: utils.set_z3_leaf_modules_by_name(model, ["no"]),
        lambda: utils.set_z3_leaf_modules_by_suffix(model, ["no"]),
    ):
        with pytest.raises(ValueError, match="No modules"):
            call()
    with pytest.raises(AssertionError, match="types or names"):
        utils.set_z3_leaf_modules(model, [3])


class Choosing(nn.Module):
    """Runs one of its experts, by its input: by itself each would be a unit, which the other rank does not bring together."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(6, 6) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        return self.experts[int(x[0, 0] > 0)](x)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("how", ["mark", "config"])
def test_a_marked_module_is_one_unit(rank: int, how: str) -> None:
    deepspeed = deepspeed_of_ours()
    batches = [batch(rank, step) for step in range(3)]
    for step, x in enumerate(batches):
        x[0, 0] = 1.0 - 2 * ((rank + step) % 2)  # the ranks choose differently

    def make() -> nn.Module:
        model = nn.Sequential(OrderedDict(choosing=Choosing(), head=nn.Linear(6, 1)))
        model.register_forward_hook(lambda *given: given[2].square().mean())
        if how == "mark":
            deepspeed.utils.set_z3_leaf_modules(model, [Choosing])
        return model

    def run(stage: int) -> list[float]:
        given = config(stage)
        if how == "config":
            given["zero_optimization"]["leaf_module"] = {"classes": ["Choosing", "NobodysClass"]}
        engine = engine_of(deepspeed, given, make)
        assert deepspeed.utils.get_z3_leaf_modules(engine.module) == [engine.module.choosing]
        return train(engine, *batches)

    assert run(3) == run(0)


# ---------------------------------------------------------------------- whole state dicts, estimates


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, Tensor]]]:
    folder = tmp_path_factory.mktemp("saved")

    def body(rank: int) -> dict[str, Tensor]:
        engine = engine_of(deepspeed_of_ours(), config(3))
        train(engine, batch(rank))
        engine.save_checkpoint(folder)
        return whole(engine.module)

    yield folder, on_ranks(body, 2)[0]


@pytest.mark.ranks(1)
def test_state_dicts_out_of_our_checkpoints(rank: int, saved: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    folder, values = saved
    deepspeed_of_ours()
    from deepspeed.utils import zero_to_fp32

    got = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder)
    assert same(values, got)
    without = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder, exclude_frozen_parameters=True)
    assert values.keys() - without.keys() == {"frozen"}
    model = zero_to_fp32.load_state_dict_from_zero_checkpoint(Net(), folder, tag="global_step1")
    assert same(model.state_dict(), values)
    zero_to_fp32.convert_zero_checkpoint_to_state_dict(folder, tmp_path / "bf16", "bfloat16", None)
    got = torch.load(tmp_path / "bf16" / "pytorch_model.bin")
    assert all(torch.equal(got[fqn], value.bfloat16()) for fqn, value in values.items())
    with pytest.raises(zeroshard.CheckpointError, match="no folder"):
        zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder, tag="none")


@pytest.mark.full
@pytest.mark.parametrize("safe", [True, pytest.param(False, marks=pytest.mark.full)])
def test_the_script_writes_files(saved: tuple[Path, dict[str, Tensor]], tmp_path: Path, safe: bool) -> None:
    folder, values = saved
    script = shim_path() / "deepspeed" / "utils" / "zero_to_fp32.py"
    command = [sys.executable, script, folder, tmp_path, "--max_shard_size", "500", *(["--safe_serialization"] * safe)]
    subprocess.run(command, check=True, env={"PYTHONPATH": str(shim_path().parents[1])})
    stem = "model.safetensors" if safe else "pytorch_model.bin"
    index = json.loads((tmp_path / f"{stem}.index.json").read_text())["weight_map"]
    assert index.keys() == values.keys()
    assert len(set(index.values())) > 1
    from safetensors.torch import load_file

    for name, file in index.items():
        read = load_file(tmp_path / file) if safe else torch.load(tmp_path / file)
        assert torch.equal(read[name], values[name])


def test_the_tensors_of_one_file_at_a_time_are_in_memory(
    saved: tuple[Path, dict[str, Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from zeroshard.checkpoint.consolidated import open_any, write_files

    written: list[weakref.ref[Tensor]] = []
    save = torch.save

    def counted(state: dict[str, Tensor], file: Any) -> None:
        assert not [one for one in written if one() is not None]
        written.extend(weakref.ref(value) for value in state.values())
        save(state, file)

    monkeypatch.setattr(torch, "save", counted)
    with open_any(saved[0]) as reader:
        paths = write_files(reader, tmp_path, max_shard_nbytes=500)
    assert len(paths) > 2
    assert len(written) == len(saved[1])


@pytest.mark.parametrize("name", ["stage2", "stage3"])
def test_state_dicts_out_of_deepspeeds_checkpoints(name: str, tmp_path: Path) -> None:
    from zeroshard.checkpoint.consolidated import state_dict_of
    from zeroshard.checkpoint.deepspeed import import_deepspeed

    got = state_dict_of(FOLDER / name)
    model = make_model()
    assert got.keys() == model.state_dict().keys()
    model.load_state_dict(got)
    import_deepspeed(FOLDER / name, tmp_path)
    assert same(state_dict_of(tmp_path), got)
    assert not [path for path in (FOLDER / name).iterdir() if path.name.startswith("import-")]


@pytest.mark.ranks(1)
def test_estimates(rank: int) -> None:
    deepspeed_of_ours()
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs_all_cold as three
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs_all_live as three_live
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs as two_figures
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs_all_cold as two

    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        three(total_params=7.5e9, largest_layer_params=1e8, num_gpus_per_node=8, num_nodes=2)
        two(total_params=7.5e9, num_gpus_per_node=8, num_nodes=2)
        three_live(Net())
    _, accelerator = two_figures(7.5e9, 64, 1, cpu_offload=False)
    assert 16.6e9 <= accelerator <= 17e9, "the ZeRO paper's figure for 7.5 B parameters on 64 ranks"
    text = said.getvalue()
    assert "HW: Setup with 2 nodes, 8 GPUs per node." in text
    assert "SW: Model with 7500M total params, 100M largest layer params." in text
    assert text.count("  per CPU  |  per GPU |   Options") == 3
    assert text.count("offload_param=cpu , offload_optimizer=cpu , zero_init=1") == 2


# ---------------------------------------------------------------------- transformers

SCRIPT = """
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import deepspeed
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, initialization
from transformers.integrations import HfDeepSpeedConfig
from transformers.integrations.deepspeed import initialize_weights_zero3
from zeroshard.model.born import BornSharded

folder, dtype = sys.argv[1], getattr(torch, sys.argv[2])
deepspeed.init_distributed()
rank = dist.get_rank()
plain = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
with initialization.no_init_weights():
    of_config = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype)
torch.manual_seed(5)
with torch.no_grad():  # what transformers does under stage 3 draws its numbers in this order
    for parameter in of_config.parameters():
        parameter.zero_()
rank_0, deepspeed.comm.get_rank = deepspeed.comm.get_rank, lambda: 0
initialize_weights_zero3(of_config)
deepspeed.comm.get_rank = rank_0
of_config.tie_weights()

said = {
    "zero_optimization": {"stage": 3},
    "bf16": {"enabled": dtype is torch.bfloat16},
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
}
kept = HfDeepSpeedConfig(said)


def check(model, wanted):
    names = dict(model.named_parameters())
    assert all(isinstance(p, BornSharded) for p in names.values()), "in parts, at once"
    held = sum(p.ds_tensor.numel() for p in names.values())
    assert held <= sum(p.numel() for p in names.values()) / 2 + len(names)
    for name, value in wanted.named_parameters():
        parameter = names.pop(name)
        assert parameter.dtype is dtype and parameter.ds_shape == value.shape
        with deepspeed.zero.GatheredParameters([parameter]):
            assert torch.equal(parameter, value), name
    assert not names
    for name, value in wanted.named_buffers():
        assert torch.equal(model.get_buffer(name), value), name


torch.manual_seed(rank)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
check(model, plain)
tied = plain.config.tie_word_embeddings
assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) is tied
if rank == 0:
    torch.manual_seed(5)
check(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype), of_config)

# A head that the files lack is initialised, on every rank alike; what they have is loaded.
headed = AutoModelForSequenceClassification.from_pretrained(folder, dtype=dtype, num_labels=3, pad_token_id=0)
with deepspeed.zero.GatheredParameters(headed.parameters()):
    told = [None, None]
    dist.all_gather_object(told, headed.score.weight.float().tolist())
    assert told[0] == told[1]
    assert 0.005 < float(headed.score.weight.float().std()) < 0.08
    base = dict(plain.base_model.named_parameters())
    assert all(torch.equal(p, base[name]) for name, p in headed.base_model.named_parameters())

# More tokens: the old rows stay.
model.resize_token_embeddings(80, mean_resizing=False)
assert model.get_input_embeddings().weight.shape[0] == 80
engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=said)[0]
with deepspeed.zero.GatheredParameters(model.parameters()):
    rows = plain.get_input_embeddings().weight
    assert torch.equal(model.get_input_embeddings().weight[: len(rows)], rows)
tokens = torch.arange(8).view(1, -1) + rank
loss = engine(input_ids=tokens, labels=tokens).loss
engine.backward(loss)
engine.step()
assert engine(input_ids=tokens, labels=tokens).loss < loss
Path(folder, f"done.{rank}").touch()
"""


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.full)])
@pytest.mark.parametrize("name", ["Llama", pytest.param("GPT-2", marks=pytest.mark.full)])
def test_transformers_from_pretrained_under_stage_3(name: str, dtype: str, tmp_path: Path) -> None:
    from families import FAMILIES

    FAMILIES[name][0]().save_pretrained(tmp_path)
    (tmp_path / "script.py").write_text(SCRIPT)
    launcher = [sys.executable, "-m", "zeroshard", "run", "--nproc-per-node", "2"]
    command = [*launcher, tmp_path / "script.py", tmp_path, dtype]
    where = {**os.environ, "PYTHONPATH": str(shim_path().parents[1])}
    done = subprocess.run(command, cwd=tmp_path, env=where, check=False, capture_output=True, text=True, timeout=300)
    said = done.stdout[-2000:] + done.stderr[-4000:]
    assert (tmp_path / "done.0").exists() and (tmp_path / "done.1").exists(), said
