"""Owns the functions and classes that accelerate uses for `ParallelismConfig(sp_backend="deepspeed")`.

Groups of ranks share sequences. accelerate finds these names in the package named deepspeed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from zeroshard.errors import UsageError
from zeroshard.sequence import Sequences

sequence_groups: list[Any] = []
"""The groups of `SequenceAttention.register_with_transformers`, if any. accelerate reads this list."""


def get_sequence_parallel_group() -> Any:
    """Return the group of ranks that share this rank's sequences."""
    if not sequence_groups:
        raise UsageError(
            'there are no groups of sequence-parallel ranks: set ParallelismConfig(sp_size=..., sp_backend="deepspeed").'
        )
    return sequence_groups[0].get_sequence_parallel_group()


def get_sequence_parallel_world_size() -> int:
    """Return the number of ranks that share a sequence; 1 if sequences are not shared."""
    return sequence_groups[0].get_sequence_parallel_world_size() if sequence_groups else 1


def get_sequence_parallel_rank() -> int:
    """Return this rank's position among the ranks that share its sequences; 0 if no ranks share sequences."""
    return sequence_groups[0].get_sequence_parallel_rank() if sequence_groups else 0


class SequenceGroups:
    """Groups of adjacent ranks, each of which shares sequences. accelerate uses this object as an `mpu`."""

    def __init__(self, size: int) -> None:
        world = dist.get_world_size()
        if world % size:
            raise UsageError(
                f"sp_size={size} does not divide the {world} ranks: each sequence needs {size} of them. Choose "
                "a divisor."
            )
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        device = "cpu" if accelerator is None else accelerator.type
        self._mesh = init_device_mesh(device, (world // size, size), mesh_dim_names=("dp", "sp"))["sp"]
        self.sequences = Sequences(self._mesh)

    def get_sequence_parallel_group(self) -> Any:
        return self._mesh.get_group()

    def get_sequence_parallel_world_size(self) -> int:
        return self.sequences.size

    def get_sequence_parallel_rank(self) -> int:
        return self.sequences.rank

    def get_data_parallel_group(self) -> Any:
        """Return all ranks, since gradients are averaged over the ranks of a sequence too."""
        return dist.group.WORLD

    def get_model_parallel_world_size(self) -> int:
        """Return 1, since each rank has the whole model."""
        return 1


class SequenceAttention:
    """The attention that exchanges heads for positions. Call only `register_with_transformers` and do not create instances."""

    @classmethod
    def register_with_transformers(
        cls, model_name_or_path: Any, core_attn_implementation: str | None = None, sequence_parallel_size: int = 1,
        *_: Any, **__: Any,
    ) -> SequenceGroups | None:  # fmt: skip
        """Attach a model to `Sequences` and return its groups; None for a size of 1. Arguments after the third have no effect."""
        if sequence_parallel_size == 1:
            return None
        if not isinstance(model_name_or_path, nn.Module):
            raise UsageError(
                "register_with_transformers(model_name_or_path=...) needs the model itself, not its name. Pass the model."
            )
        model: Any = model_name_or_path
        if core_attn_implementation not in (None, model.config._attn_implementation):
            model.set_attn_implementation(core_attn_implementation)
        made = SequenceGroups(sequence_parallel_size)
        made.sequences.attach(model)
        sequence_groups[:] = [made]
        return made


class SequenceLoader:
    """A loader that cuts each rank's batch, in turn, over all ranks of a sequence."""

    def __init__(self, dl: Any, sp_rank: int, sp_group: Any, sp_world_size: int, device: Any) -> None:
        self.dl = dl
        self._sequences = Sequences(sp_group)
        self._device = device

    def __len__(self) -> int:
        return len(self.dl) * self._sequences.size

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self._sequences.cut(self.dl, in_turn=True):
            if "shift_labels" not in batch:
                raise UsageError(
                    f"a batch without labels ({', '.join(sorted(batch))}) cannot be split across ranks here, since its trainer's "
                    "loss (DPO, KTO) needs whole sequences. Train without sp_size, or use Sequences.log_probabilities "
                    "and Sequences.sum in your own loop."
                )
            yield {name: value.to(self._device) if torch.is_tensor(value) else value for name, value in batch.items()}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.dl, name)
