"""Checkpoints of earlier releases load: `old_checkpoints` has one of each version, whose values follow a formula."""

from __future__ import annotations

import json
import shutil
from collections import OrderedDict
from functools import partial
from pathlib import Path

import insides
import pytest
import torch
from ranks import on_ranks
from torch import nn
from twin import build, everything, same

from zeroshard.checkpoint.consolidated import state_dict_of
from zeroshard.checkpoint.manifest import MANIFEST, read_manifest

OLD = Path(__file__).parent / "old_checkpoints"
"""Release 0.2.0 wrote them, on two ranks at stage 2 with AdamW. In version 2, tensor parallelism divided the layers.

Parameter n has the values 100 n, 100 n + 1, ...; `exp_avg` has half of these, and `exp_avg_sq` a quarter.
"""


def make_model() -> nn.Module:
    model = nn.Sequential(OrderedDict(up=nn.Linear(6, 8), down=nn.Linear(8, 6)))
    model.register_parameter("fixed", nn.Parameter(torch.zeros(3), requires_grad=False))
    model.register_buffer("seen", torch.full((2,), 9.0))
    return model


make = partial(build, 3, make_model=make_model, make_optimizer=torch.optim.AdamW, bucket_numel=48)


@pytest.mark.quick(4)
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_an_old_checkpoint_loads_and_is_saved_anew(version: int, size: int, tmp_path: Path) -> None:
    def body(rank: int) -> None:
        model, sharded = make()
        loaded = sharded.load(OLD, f"version_{version}")
        if size == 2:  # the ranks' own states, too
            before = torch.get_rng_state()
            torch.manual_seed(7 + rank)
            assert torch.equal(torch.get_rng_state(), before)
        for _ in range(2):
            assert loaded.values["step"] == 3
            assert torch.equal(loaded.values["note"], torch.arange(5))
            assert sharded.optimizer.param_groups[0]["lr"] == 0.25
            for number, (name, parameter) in enumerate(model.named_parameters()):
                expected = torch.arange(sharded.states.get(name).numel()) + 100.0 * number
                assert torch.equal(sharded.states.get(name).reshape(-1), expected)
                if parameter.requires_grad:
                    assert torch.equal(sharded.states.get(name, "exp_avg").reshape(-1), expected / 2)
                    assert torch.equal(sharded.states.get(name, "exp_avg_sq").reshape(-1), expected / 4)
                    assert sharded.states.get(name, "step") == 1
            assert torch.equal(model.seen, torch.full((2,), float(version == 1 and rank == 1)))
            sharded.save(tmp_path, "again", loaded.values)
            loaded = sharded.load(tmp_path)

    on_ranks(body, size)
    assert read_manifest(OLD / f"version_{version}").version == version
    old, new = state_dict_of(OLD / f"version_{version}"), state_dict_of(tmp_path)
    assert old.keys() == new.keys()
    assert all(torch.equal(old[name], new[name]) for name in old)


@pytest.mark.parametrize("version", [1, 2])
def test_an_old_checkpoint_with_the_names_of_wrappers_loads(version: int, tmp_path: Path) -> None:
    """Earlier releases wrote those of checkpoint_wrapper, in parameters, param groups and buffers."""
    folder = tmp_path / "old"
    shutil.copytree(OLD / f"version_{version}", folder)
    path = folder / MANIFEST
    text = path.read_text()
    for name in ("up.weight", "up.bias", "down.weight", "down.bias", "seen"):
        module, _, last = name.rpartition(".")
        text = text.replace(f'"{name}"', '"' + f"{module}._checkpoint_wrapped_module.{last}".lstrip(".") + '"')
    body = json.loads(text)
    body.pop("checksum")
    insides.write_manifest(path, body)
    assert '"up._checkpoint_wrapped_module.weight"' in path.read_text()

    (_, sharded), (_, other) = make(), make()
    sharded.load(tmp_path, "old")
    other.load(OLD, f"version_{version}")
    assert same(everything(sharded), everything(other))
