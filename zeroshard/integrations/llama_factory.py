"""Owns the "zeroshard" entries in LLaMA-Factory v1's registries: `dist_config.name` and `optim_config.name`.

    import zeroshard.integrations.llama_factory as entry
    entry.register()     # then llamafactory.v1's run_sft, run_dpo, ...

    dist_config: {name: zeroshard}
    optim_config: {name: zeroshard, optimizer: AdamW, lr: 1.0e-5, consolidate_every: 500}     # as save_steps

For registered names, LLaMA-Factory's training loop reads `parameter.grad`, clips with torch's function, and saves only
on rank 0. That works only if gradients and parameters are unsharded (stage 1). For stages 2 and 3, set
`dist_config.name: deepspeed`.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zeroshard.config.fields import nearest
from zeroshard.errors import UsageError
from zeroshard.zero_redundancy.optimizer import ZeroRedundancyOptimizer

NAME = "zeroshard"
_MISSING = "LLaMA-Factory's v1 cannot be imported ({}): pip install llamafactory. For its v0, use `zeroshard run`."
_PLUGINS = "llamafactory.v1.plugins.trainer_plugins."


class ConsolidatingOptimizer(ZeroRedundancyOptimizer):
    """An optimizer that gathers its full state on rank 0 every `consolidate_every` steps, before rank 0 saves."""

    consolidate_every = 0
    _steps = 0

    def step(self, closure: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
        """Step and consolidate the state on rank 0 if `consolidate_every` divides the number of steps."""
        loss = super().step(closure, **kwargs)
        self._steps += 1
        if self.consolidate_every and self._steps % self.consolidate_every == 0:
            self.consolidate_state_dict(0)
        return loss


def wrap_model(model: nn.Module, dist_config: Mapping[str, Any], **_: Any) -> nn.Module:
    """Wrap the model in DistributedDataParallel, if there are other ranks.

    Raises:
        UsageError: `dist_config` names a stage other than 1, or an unknown key.
    """
    stage = dist_config.get("stage", 1)
    if stage != 1:
        raise UsageError(
            f"dist_config: stage {stage} is not supported under the name zeroshard, since the training loop needs whole "
            'gradients on every rank. For stages 0 to 3, set "name: deepspeed" and a config_file, under `zeroshard run`.'
        )
    unknown = [key for key in dist_config if key not in ("name", "stage", "timeout", "dp_size", "mp_replicate_size")]
    if unknown:
        raise UsageError(
            f"dist_config: {unknown[0]} has no meaning here{nearest(unknown[0], ['name', 'stage'])} Leave it out."
        )
    if not (dist.is_initialized() and dist.get_world_size() > 1):
        return model
    device = next(model.parameters()).device
    if device.index is None:
        return nn.parallel.DistributedDataParallel(model)
    return nn.parallel.DistributedDataParallel(model, device_ids=[device.index])


def make_optimizer(model: nn.Module, optim_config: Mapping[str, Any]) -> ConsolidatingOptimizer:
    """Create a torch optimizer over the model's trainable parameters, with its state sharded over the ranks.

    Args:
        model: the trainer's model.
        optim_config: `optimizer` (a class of torch.optim; default AdamW), `consolidate_every` (steps, as `save_steps`),
            and arguments of the optimizer.

    Raises:
        UsageError: torch.optim does not have the optimizer, or `lr` is missing.
    """
    options = {key: value for key, value in optim_config.items() if key != "name"}
    kind = options.pop("optimizer", "AdamW")
    every = options.pop("consolidate_every", 0)
    elementwise = options.pop("elementwise", None)
    cls = getattr(torch.optim, str(kind), None)
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise UsageError(f"optim_config: torch.optim has no {kind!r}. Name a class of torch.optim.")
    if "lr" not in options:
        raise UsageError("optim_config has no lr. Set it there: LLaMA-Factory passes no learning_rate to a plugin.")
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    made = ConsolidatingOptimizer(trainable, cls, elementwise=elementwise, **options)
    made.consolidate_every = int(every)
    return made


def register() -> None:
    """Register "zeroshard" in LLaMA-Factory's two registries. Raise a UsageError if its v1 (0.9.5 or later) cannot be imported."""
    try:  # later than 0.9.5
        distributed = import_module(_PLUGINS + "distributed.interface").DistributedPlugin
    except ModuleNotFoundError as error:
        if not str(error.name).startswith(_PLUGINS + "distributed"):
            raise UsageError(_MISSING.format(error)) from error
        distributed = _load("distributed.hub", "DistributedPlugin")
        distributed(NAME).register()(wrap_model)
    else:
        distributed(NAME).register()(_Distributed)
    try:
        optimizers = import_module(_PLUGINS + "optimizers.optimizer").OptimizerPlugin
    except ModuleNotFoundError:
        optimizers = _load("optimizer", "OptimizerPlugin")
    optimizers(NAME).register()(make_optimizer)


def _load(module: str, name: str) -> Any:
    try:
        return getattr(import_module(_PLUGINS + module), name)
    except ModuleNotFoundError as error:
        raise UsageError(_MISSING.format(error)) from error


class _Distributed:
    """The methods that LLaMA-Factory's registry expects after 0.9.5."""

    shard_model = staticmethod(wrap_model)

    @staticmethod
    def clip_grad_norm(model: nn.Module, max_norm: float, **_: Any) -> float:
        """Clip with torch's function: gradients are whole on every rank."""
        return float(nn.utils.clip_grad_norm_(model.parameters(), max_norm))
