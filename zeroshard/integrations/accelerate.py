"""Owns corrections of accelerate's backend and batch size, and errors for invalid uses with tensor parallelism.

On a CPU, accelerate has no backend for DeepSpeed. It lets `deepspeed.comm.init_distributed(None)` join the ranks, and
then treats "no backend" as "one process" (accelerate/state.py, `PartialState.__init__`). Without this module, every
rank would load all data and write all files.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch.distributed as dist
from torch import nn

from zeroshard.core.module_hooks import Hook, untraced
from zeroshard.engine.config.load import read, tensor_parallel_ranks
from zeroshard.errors import UsageError

_GATHERED = (
    "accelerate gathers the results of an evaluation from all ranks, the {ranks} ranks of each model included: every sample is in "
    "them {ranks} times, and a last batch that is not full is cut at the wrong place. Evaluate a number of samples that full "
    "batches on all data-parallel ranks divide: then means are right."
)


def tell_backend() -> None:
    """Set the backend of the joined ranks in accelerate's state, if it has none. Do nothing without accelerate.

    All instances of `PartialState` share one state, which the first instance fills when it joins the ranks.
    """
    state = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
    if state is None or not dist.is_initialized():
        return
    attributes = state._shared_state
    is_being_made = "backend" in attributes and "num_processes" not in attributes
    if is_being_made and attributes["backend"] is None:
        state().backend = dist.get_backend()


def count_samples_once(config: Any, mpu: Any) -> Any:
    """Return a config with accelerate's `train_batch_size` corrected: the engine counts over all ranks, each sample once.

    Args:
        config: a dict, or the path of a file.
        mpu: an object with accelerate's groups of ranks, or None.
    """
    size = getattr(mpu, "get_sequence_parallel_world_size", lambda: 1)()
    is_divided = tensor_parallel_ranks(config) > 1
    if size == 1 and not is_divided:
        return config
    found = dict(read(config))
    if isinstance(found.get("train_batch_size"), int):
        found["train_batch_size"] *= size  # accelerate counts the ranks of a sequence as one
    micro = found.get("train_micro_batch_size_per_gpu")
    accumulation = found.get("gradient_accumulation_steps")
    if isinstance(micro, int) and isinstance(accumulation, int):
        ranks = size  # accelerate counts the groups of ranks only if the user names a data-parallel size
        if is_divided:
            ranks = dist.get_world_size()  # accelerate counts the same samples once for each rank
        if found.get("train_batch_size") == ranks * micro * accumulation:
            del found["train_batch_size"]
    return found


def refuse_tensor_parallel() -> None:
    """Raise if accelerate got `ParallelismConfig(tp_size=...)`. Do nothing without accelerate."""
    size = _tensor_parallel_size()
    if size > 1:
        raise UsageError(
            f'ParallelismConfig(tp_size={size}) is not supported: leave it out, and set "tensor_parallel": '
            f'{{"autotp_size": {size}}} in the DeepSpeed config instead (docs: Composing).'
        )


def refuse_divided_by_transformers() -> None:
    """Raise if transformers loaded a Trainer's model with a `tp_plan`: the Trainer would train it without an engine."""
    size = _tensor_parallel_size()
    state = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
    kind = None if state is None else state._shared_state.get("distributed_type")
    if size > 1 and getattr(kind, "name", "") == "DEEPSPEED":
        raise UsageError(
            f"the Trainer's model is divided over {size} ranks already (tp_plan, DistributedConfig, or "
            "ParallelismConfig(tp_size=...)), and the Trainer does not pass such a model to an engine. Load it without these, "
            f'and set "tensor_parallel": {{"autotp_size": {size}}} in the config instead.'
        )


def watch_loaders(model: nn.Module, ranks: int) -> None:
    """Make a model's forward raise if accelerate's active loader dispatches batches, and some ranks get wrong batches.

    In evaluation, warn that accelerate gathers results from all ranks, including all ranks of one model.

    A dispatching loader reads on rank 0 and sends each rank a part of a batch, or all ranks the same batch. The loader
    takes account of the ranks that divide one model, but not of other data-parallel ranks. Its length counts several
    batches for each step.

    Args:
        model: the divided model.
        ranks: the number of ranks that divide it.
    """
    hook = untraced(Hook)(_watch_loader, ranks)
    model.register_forward_pre_hook(hook, prepend=True)


def _watch_loader(ranks: int, model: nn.Module, *_: Any) -> None:
    state = getattr(sys.modules.get("accelerate.state"), "GradientState", None)
    if state is None:
        return
    loader = state().active_dataloader
    if loader is not None and not model.training and dist.get_rank() == 0:
        warnings.warn(_GATHERED.format(ranks=ranks), stacklevel=1)  # once, by default
    if type(loader).__name__ != "DataLoaderDispatcher":
        return
    is_same_for_all = loader.submesh_tp is not None and not loader.split_batches
    if is_same_for_all and dist.get_world_size() == ranks and not hasattr(loader.dataset, "__len__"):
        return
    raise UsageError(
        f"accelerate dispatches this loader's batches from rank 0 over all {dist.get_world_size()} ranks. Each group of {ranks} "
        "ranks divides one model and needs the same batches; other groups need different ones. Let each rank read: "
        'TrainingArguments(accelerator_config={"dispatch_batches": False}), or DataLoaderConfiguration(dispatch_batches=False).'
    )


def _tensor_parallel_size() -> int:
    """Return accelerate's `tp_size`. A Trainer sets it for models that transformers divided."""
    state = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
    config = None if state is None else state._shared_state.get("parallelism_config")
    return getattr(config, "tp_size", None) or 1
