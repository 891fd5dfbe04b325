"""Imports go downwards only, and the public names are documented."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

import zeroshard

PACKAGE = Path(zeroshard.__file__).parent
LEVELS = [
    {
        "errors",
        "storage.raw_memory",
        "parameters.metadata",
        "collectives.base",
        "collectives.reduction",
        "collectives.report",
    },
    {
        "policy",
        "layout.layout",
        "config.fields",
        "optim.loss_scaler",
        "optim.lion",
        "optim.muon",
        "observe.timers",
        "formats.safetensors_file",
    },
    {"storage.transfers", "collectives.alone", "collectives.members", "collectives.watch"},
    {
        "parameters.flat_buffer",
        "storage.buffer_pool",
        "collectives.grouped",
        "gradients.norm",
        "config.zero_block",
        "observe.underflow",
    },
    {"storage.base", "collectives.native", "collectives.point_to_point"},
    {"storage.memory_slot", "storage.direct_file", "collectives.choose"},
    {"storage.accelerator", "storage.cpu", "storage.disk"},
    {"storage.storages"},
    {"cli.doctor"},
    {"parameters.bucket", "config.schema", "config.auto", "sharded_init"},
    {"schedule.unit", "config.batch_size", "observe.monitors"},
    {"layout.bucketing", "schedule.schedule", "config.load", "observe.log"},
    {"schedule.probe", "observe.memory", "step.elementwise", "optim.from_config", "optim.lr_schedules"},
    {"step.shard_view"},
    {"step.resident"},
    {"step.sub_groups"},
    {"schedule.hooks", "step.sharded_optimizer", "config.table", "config.document", "zero_redundancy.parameter_bucket"},
    {"zero_redundancy.optimizer_state", "zero_redundancy.uneven_inputs", "step.model_states", "step.parking"},
    {"zero_redundancy.optimizer"},
    {"zero_redundancy.ddp_hooks"},
    {"formats.pretrained", "checkpoint.manifest", "checkpoint.chunks", "checkpoint.values", "checkpoint.random_state"},
    {"checkpoint.saving"},
    {"checkpoint.loading", "formats.deepspeed"},
    {"formats.hugging_face"},
    {"checkpoint.checkpoints", "cli.checkpoints"},
    {"shard"},
    {"recompute.saved_inputs"},
    {"recompute.checkpointer"},
    {"recompute.checkpointing", "engine", "data", "formats.dcp"},
    {"initialize"},
]


def imports(module: str) -> set[str]:
    tree = ast.parse((PACKAGE / (module.replace(".", "/") + ".py")).read_text())
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            is_folder = (PACKAGE.parent / node.module.replace(".", "/")).is_dir() and node.module != "zeroshard"
            names |= {f"{node.module}.{alias.name}" for alias in node.names} if is_folder else {node.module}
    return {name.removeprefix("zeroshard.") for name in names if name.startswith("zeroshard.")}


@pytest.mark.parametrize("level", range(len(LEVELS)))
def test_imports_go_downwards(level: int) -> None:
    below = set().union(*LEVELS[:level])
    for module in LEVELS[level]:
        assert imports(module) <= below, f"{module} imports {imports(module) - below}"


def test_config_imports_none_of_the_run_time() -> None:
    for path in (PACKAGE / "config").glob("*.py"):
        module = f"config.{path.stem}"
        rooms = ("parameters", "gradients", "schedule", "step", "collectives", "optim", "shard", "engine")
        assert not any(name.startswith(rooms) for name in imports(module))


def test_only_collectives_talks_to_other_ranks() -> None:
    """Others may name a group, ask who they are, and open or close torch.distributed as a whole."""
    allowed = {
        "ProcessGroup", "group", "get_rank", "get_world_size", "is_available", "is_initialized", "init_process_group",
        "destroy_process_group", "get_default_backend_for_device", "GradBucket",
    }  # fmt: skip
    seen = 0
    for path in PACKAGE.rglob("*.py"):
        if path.parent.name in ("collectives", "testing"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("dist", "torch.distributed"):
                seen += 1
                assert node.attr in allowed, f"{path}:{node.lineno} uses dist.{node.attr}"
    assert seen > 10


def test_public_names_are_documented() -> None:
    for name in zeroshard.__all__:
        assert inspect.getdoc(getattr(zeroshard, name)), name
