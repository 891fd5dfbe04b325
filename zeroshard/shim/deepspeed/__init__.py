"""zeroshard under the name `deepspeed`, for scripts and trainers that import DeepSpeed.

Only `zeroshard run` and `import zeroshard.as_deepspeed` put it on the path. Most of its names refer to functions and
classes of zeroshard or torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from deepspeed._finder import fill  # first: it finds the modules of the table
from deepspeed.accelerator import get_accelerator
from deepspeed.comm import init_distributed
from deepspeed.git_version_info import git_branch, git_hash, version
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.partition_parameters import DeepSpeedParameter
from deepspeed.utils.logging import log_dist
from deepspeed.utils.z3_leaf_module import with_leaf_modules
from zeroshard import Precision, UsageError
from zeroshard import __version__ as _zeroshard_version
from zeroshard import initialize as _initialize
from zeroshard.core.named_parameter import divides_experts
from zeroshard.engine.config.load import read
from zeroshard.integrations.accelerate import count_samples_once, refuse_tensor_parallel, watch_loaders
from zeroshard.integrations.transformers_loading import warn_of_missing_values
from zeroshard.model.meshes import mesh_of
from zeroshard.model.tensor_parallel import divide, tensor_mesh

__version_major__, __version_minor__, __version_patch__ = (int(part) for part in version.split("."))
__implementation__ = f"zeroshard {_zeroshard_version}"
HAS_TRITON = False


def initialize(
    args: Any = None, model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None, training_data: Any = None, lr_scheduler: Any = None,
    distributed_port: int = 29500, mpu: Any = None, dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None, config: str | Mapping[str, Any] | None = None, mesh_param: Any = None,
    config_params: str | Mapping[str, Any] | None = None,
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """Call `zeroshard.initialize` with DeepSpeed's arguments.

    A process without a launcher becomes a group of one rank, as trainers expect. `mesh_param` must be None.

    Returns:
        (engine, optimizer, loader or None, scheduler or None).
    """
    if mesh_param is not None:
        raise UsageError(
            "initialize(mesh_param=...) is not supported. Set ParallelismConfig(sp_size=...), or use zeroshard.sequence."
        )
    refuse_tensor_parallel()
    init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    log_dist(
        f"DeepSpeed info: version={version}, git-hash={git_hash}, git-branch={git_branch}, "
        f"implementation={__implementation__}",
        ranks=[0],
    )
    given = config if config is not None else config_params
    for name in ("deepscale_config", "deepspeed_config"):
        of_args = getattr(args, name, None)
        if of_args is not None:
            if given is not None:
                raise UsageError(f"initialize got two configs, args.{name} and config. Leave one of them out.")
            given = of_args
    auto = {}
    if given is not None:
        given = count_samples_once(given, mpu)
        if not {"train_batch_size", "train_micro_batch_size_per_gpu"} & read(given).keys():
            log_dist("the config sets no batch size: a microbatch counts as one sample.", ranks=[0])
            auto["train_micro_batch_size_per_gpu"] = 1  # for trainers that count batches themselves
        if isinstance(model, nn.Module):
            given = with_leaf_modules(model, given)
    if isinstance(model, nn.Module):
        warn_of_missing_values(model)
    made = _initialize(
        model=model, optimizer=optimizer, model_parameters=model_parameters, training_data=training_data,
        lr_scheduler=lr_scheduler, dist_init_required=dist_init_required, collate_fn=collate_fn, config=given,
        auto=auto, group=_data_parallel_group(mpu), attributes=DeepSpeedParameter,
    )  # fmt: skip
    divided = mesh_of(made[0].module)
    if divided is not None and divided.size() > 1 and not divides_experts(divided):
        watch_loaders(made[0].module, divided.size())
    made[1].parameter_offload = DeepSpeedZeRoOffload()  # type: ignore[attr-defined]
    made[0].destroy = partial(made[0].destroy, alone=True)  # type: ignore[method-assign]  # trainers call it on one rank
    return made


def _data_parallel_group(mpu: Any) -> Any:
    if mpu is None:
        return None
    size = getattr(mpu, "get_model_parallel_world_size", lambda: 1)()
    if size > 1:
        raise UsageError(
            f"initialize(mpu=...) has {size} model-parallel ranks, but zeroshard supports only data-parallel ranks: leave mpu out."
        )
    return mpu.get_data_parallel_group()


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument(
        "--deepspeed", default=False, action="store_true", help="An option for scripts, without an effect here."
    )
    group.add_argument("--deepspeed_config", default=None, type=str, help="The JSON configuration file.")
    group.add_argument("--deepscale", default=False, action="store_true", help=argparse.SUPPRESS)
    group.add_argument("--deepscale_config", default=None, type=str, help=argparse.SUPPRESS)
    return parser


def init_inference(*args: Any, **kwargs: Any) -> NoReturn:
    raise NotImplementedError(
        "zeroshard has no deepspeed.init_inference. Serve the files that engine.export() writes with transformers, "
        "vLLM or SGLang."
    )


def tp_model_init(
    model: nn.Module, tp_size: int, dtype: torch.dtype | None = None, config: Any = None, **kwargs: Any
) -> nn.Module:
    """Divide a transformers model over `tp_size` adjacent ranks, in place, by its `tp_plan`, and return it.

    Every rank must call it. `dtype` is the parameters' new dtype; None keeps the old. `config` has no effect.
    """
    if any(value is not None for value in kwargs.values()):
        raise UsageError(
            f"tp_model_init({', '.join(kwargs)}=...) is not supported: neighbouring ranks divide a model. Leave it out."
        )
    mesh = mesh_of(model)
    if mesh is not None and mesh.size() != tp_size:
        raise UsageError(
            f"tp_model_init(tp_size={tp_size}): the model is already divided over {mesh.size()} ranks. Pass that number, or "
            "load the model again."
        )
    if tp_size == 1 or mesh is not None:
        return model
    init_distributed()
    device = torch.device(get_accelerator().current_device_name())
    mesh = tensor_mesh(tp_size, device.type)
    divide(model.to(device), mesh, Precision(dtype))
    return model


fill(sys.modules[__name__])
