"""Owns an engine's calls to save, load and export, with DeepSpeed's signatures."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Set
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from zeroshard.checkpoint.consolidated import written
from zeroshard.checkpoint.live_model import adapter_parameters, describe
from zeroshard.checkpoint.manifest import LATEST
from zeroshard.core.named_parameter import name_of, named_parameters
from zeroshard.engine.loader import StatefulLoader
from zeroshard.engine.microbatches import Microbatches
from zeroshard.engine.progress import Progress
from zeroshard.engine.readers import Readers
from zeroshard.errors import CheckpointError, UsageError
from zeroshard.model.unsharded import unsharded
from zeroshard.model.weight_shards import WeightShard, WeightsVersion
from zeroshard.optim.loss_scaler import DynamicLossScaler
from zeroshard.optim.lr_schedules import load_schedule
from zeroshard.torch_private import is_distributed

_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
"""The counters that a checkpoint holds."""


class Saving(Readers):
    """The methods of an engine that write and read files, or gather their contents."""

    module: nn.Module
    lr_scheduler: Any
    training_dataloader: Any
    global_steps: int
    micro_steps: int
    global_samples: int
    _microbatches: Microbatches
    _progress: Progress
    _whole_adapters: ExitStack

    def save_checkpoint(
        self, save_dir: str | os.PathLike[str], tag: str | None = None, client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True, exclude_frozen_parameters: bool = False, *, asynchronous: bool = False,
        keep_last: int | None = None,
    ) -> bool:  # fmt: skip
        """Save all states that a resumed run needs; see `Sharded.save`. Every rank must call it.

        The checkpoint has the model states, buffers, every rank's random state, the scheduler, the loss scaler, counters, the
        position of `training_dataloader`, and `client_state`. If you save between the microbatches of a step, a load
        restarts that step. The result is always True.

        Args:
            save_dir: the folder of all checkpoints.
            tag: default: `global_step` and the number of steps. If ranks name different tags, the config's
                `checkpoint.tag_validation` applies.
            client_state: JSON values and tensors, by name. Rank 0 saves its own.
            exclude_frozen_parameters: leave out parameters that are not trained.
            save_latest, asynchronous, keep_last: see `Sharded.save`. The first `step` after an asynchronous save has
                failed raises the save's error.
        """
        self._whole_adapters.close()
        if tag is None:
            tag = f"global_step{self.global_steps}"
        with self._sharded.checkpoints.operation(f'save_checkpoint "{tag}"'):
            self._save_checkpoint(
                save_dir, tag, client_state, save_latest=save_latest, exclude_frozen=exclude_frozen_parameters,
                asynchronous=asynchronous, keep_last=keep_last,
            )  # fmt: skip
        return True

    def _save_checkpoint(
        self, save_dir: str | os.PathLike[str], tag: str, client_state: Mapping[str, Any] | None, **options: Any
    ) -> None:
        tags = self._sharded.exchange_json(str(tag), "the tag of a checkpoint")
        other = next((rank for rank, one in enumerate(tags) if one != tags[0]), None)
        validation = self._schema.checkpoint.tag_validation
        if other is not None and validation != "Ignore":
            what = f'the ranks name different tags: rank 0 "{tags[0]}", rank {other} "{tags[other]}"'
            if validation == "Fail":
                raise CheckpointError(f"{what}. Name one tag on every rank (checkpoint.tag_validation is Fail).")
            if self._sharded.rank == 0:
                warnings.warn(f"{what}: rank 0's tag is used. Name the same tag on every rank.", stacklevel=2)
        if client_state is not None and not isinstance(client_state, Mapping):
            raise UsageError(
                f"client_state is a {type(client_state).__name__}: pass a dict, with your values under names."
            )
        values: dict[str, Any] = {
            "engine": {name: getattr(self, name) for name in _COUNTERS},
            "lr_scheduler": None,
            "loss_scaler": self.loss_scaler.state_dict(),
            "data": None,
            "client_state": dict(client_state or {}),
        }
        if hasattr(self.lr_scheduler, "state_dict"):
            values["lr_scheduler"] = self.lr_scheduler.state_dict()
        if self._microbatches.count and isinstance(self.training_dataloader, StatefulLoader):
            values["data"] = self.training_dataloader.state_of_step  # a load restarts this step
        elif hasattr(self.training_dataloader, "state_dict"):
            values["data"] = self.training_dataloader.state_dict()
        self._sharded.save(
            save_dir, tags[0], values, within_step=True, node_local=self._schema.checkpoint.use_node_local_storage, **options
        )  # fmt: skip

    def load_checkpoint(
        self, load_dir: str | os.PathLike[str], tag: str | None = None, load_module_strict: bool = True,
        load_optimizer_states: bool = True, load_lr_scheduler_states: bool = True, load_module_only: bool = False, *,
        fall_back: bool = False,
    ) -> tuple[str | None, dict[str, Any] | None]:  # fmt: skip
        """Load a checkpoint and resume from it; see `Sharded.load`. Every rank must call it.

        Args:
            load_dir, tag, fall_back: see `Sharded.load`.
            load_module_strict: raise an error for parameters that the checkpoint or the model lacks.
            load_optimizer_states: load the optimizer's states, and the loss scaler.
            load_lr_scheduler_states: load the scheduler.
            load_module_only: load only parameters and buffers.

        Returns:
            (the checkpoint's folder, client_state). If no tag is given and the folder has no file `latest`, as in a job's
            first run: (None, None), with a warning, even with `fall_back`.
        """
        self._whole_adapters.close()
        states = load_optimizer_states and not load_module_only
        loaded = self._sharded.load(
            load_dir, None if tag is None else str(tag), strict=load_module_strict, optimizer_states=states,
            random=not load_module_only, fall_back=fall_back, node_local=self._schema.checkpoint.use_node_local_storage,
            missing_ok=tag is None,
        )  # fmt: skip
        if loaded is None:
            folder = Path(load_dir).absolute()
            warnings.warn(f"no checkpoint was loaded: {folder} has no file `{LATEST}`.", stacklevel=2)
            return None, None
        self._microbatches.start_step()
        values = loaded.values
        client_state = values.get("client_state", {})
        if load_module_only:
            return str(loaded.path), client_state
        for name in _COUNTERS:
            setattr(self, name, int(values.get("engine", {}).get(name, getattr(self, name))))
        self.micro_steps = self.global_steps * self.resolved.batch.accumulation
        if load_lr_scheduler_states and values.get("lr_scheduler") and self.lr_scheduler is not None:
            load_schedule(self.lr_scheduler, values["lr_scheduler"])
        if load_optimizer_states and isinstance(self.loss_scaler, DynamicLossScaler):
            self.loss_scaler.load(values.get("loss_scaler", {}))
            self._sharded.sharded_step.loss_scale = self.loss_scaler.scale
        if values.get("data") and hasattr(self.training_dataloader, "load_state_dict"):
            self.training_dataloader.load_state_dict(values["data"])
        self._progress.start_at(self.global_samples)
        return str(loaded.path), client_state

    def export(self, out: str | os.PathLike[str], dtype: torch.dtype | None = None) -> None:
        """Write the model in transformers' format: safetensors, with tied parameters once.

        Every rank must call it. Each writes its own part. For a PEFT model, this writes only the adapters.

        Args:
            out: the folder, for `from_pretrained` or `load_pretrained`.
            dtype: the dtype of all floating-point tensors. By default, trained parameters have the dtype of the master
                weights (fp32), and frozen parameters and buffers keep their dtypes.

        Raises:
            CheckpointError, UsageError: the folder cannot be written, the model cannot be exported, or a step was aborted.
        """
        self._sharded.export(out, dtype)

    @overload
    def named_weights(
        self, to: int | None = None, *, merge_adapters: bool = False, names: str = "checkpoint",
        shards: Literal[False] = False,
    ) -> Iterator[tuple[str, Tensor]]: ...  # fmt: skip

    @overload
    def named_weights(
        self,
        to: None = None,
        *,
        merge_adapters: Literal[False] = False,
        names: str = "checkpoint",
        shards: Literal[True],
    ) -> Iterator[tuple[str, WeightShard]]: ...

    def named_weights(
        self, to: int | None = None, *, merge_adapters: bool = False, names: str = "checkpoint", shards: bool = False
    ) -> Iterator[tuple[str, Tensor]] | Iterator[tuple[str, WeightShard]]:
        """Yield the weights of an export without files, one unit at a time; see `Sharded.named_weights`."""
        sharded: Any = self._sharded
        found: Iterator[Any] = sharded.named_weights(to, merge_adapters=merge_adapters, names=names, shards=shards)
        return found

    def weights_version(self, names: str = "checkpoint") -> WeightsVersion:
        """Keep a copy of the weights that this rank holds; see `Sharded.weights_version`."""
        return self._sharded.weights_version(names)

    def changed_since(self, version: WeightsVersion) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield the elements whose bits changed since a version; see `Sharded.changed_since`."""
        return self._sharded.changed_since(version)

    def save_16bit_model(
        self, save_dir: str | os.PathLike[str], save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:  # fmt: skip
        """Write the model's state dict with `torch.save`, in its training dtypes. Every rank must call it.

        Rank 0 needs memory for the full model. `export` does not, and writes safetensors.

        Returns:
            Whether the file was written. False if parameters are sharded and the config forbids gathering them.

        Raises:
            UsageError: the name ends in .safetensors, a format that `torch.save` does not write.
            CheckpointError: rank 0 cannot write the file. Every rank raises it.
        """
        path = Path(save_dir) / save_filename
        if path.suffix == ".safetensors":
            raise UsageError(
                f"save_16bit_model writes as torch.save does, but {path.name} is a name for safetensors. Name a .bin file, or "
                f"call engine.export({str(save_dir)!r}, dtype=...), which writes safetensors."
            )
        if not self.zero_gather_16bit_weights_on_model_save():
            return False
        state = self.consolidated_state_dict(exclude_frozen_parameters)
        with self._sharded.checkpoints.together(f'saving "{path}"'):
            if state is not None:
                with written(path, {name_of(name): value for name, value in state.items()}):
                    pass
        return True

    save_fp16_model = save_16bit_model

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Return whether a save may gather the weights in one rank's memory. False if the config forbids it at stage 3."""
        zero = self._zero
        keys = (zero.stage3_gather_16bit_weights_on_model_save, zero.stage3_gather_fp16_weights_on_model_save)
        return not self._sharded.policy.parameters.sharded or False not in keys or True in keys

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor]:
        """Return a copy of the model's complete state dict on every rank. Every rank must call it."""
        copies: dict[Any, Tensor] = {}  # tied parameters share one
        state: dict[str, Any] = self.module.state_dict()
        for name, value in state.items():
            if isinstance(value, Tensor) and is_distributed(value):
                state[name] = value.full_tensor()  # type: ignore[attr-defined]
            elif isinstance(value, Tensor):  # not an extra state
                key: Any = (value.data_ptr(), value.shape, value.stride(), value.dtype)
                if not value.numel():
                    key = name  # empty tensors share an address
                state[name] = copies.setdefault(key, value.clone())
        return self._without_frozen(state) if exclude_frozen_parameters else state

    def consolidated_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
        """Return the complete state dict in CPU memory on rank 0, and None on the others. Every rank must call it."""
        state = self._sharded.consolidated_state_dict()
        if state is not None and exclude_frozen_parameters:
            return self._without_frozen(state)
        return state

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor]:
        """Return `consolidated_state_dict`, under the name that trainers use.

        Ranks other than 0 get an empty dict, which cannot be saved. Scripts call transformers'
        `save_pretrained(state_dict=...)` on every rank. With None, `save_pretrained` would call `model.state_dict()`,
        which gathers the weights. Ranks other than 0 would then wait for rank 0.

        Frozen parameters that an adapter's file holds, such as resized embeddings, are never left out.

        A PEFT model's adapters stay whole until the next use of the engine, since PEFT reads them while it saves on
        rank 0 only.
        """
        self._whole_adapters.close()
        kept: set[str] = set()
        if exclude_frozen_parameters:
            live = self._sharded.checkpoints.live
            in_files = {fqn for names in (describe(live).adapters or {}).values() for fqn in names.values()}
            kept = {name for unit in live.units for entry in unit.named if entry.fqn in in_files for name in entry.fqns}
        if self._sharded.policy.parameters.sharded:
            with torch.no_grad():  # without a graph, no hooks on saved tensors stay behind
                self._whole_adapters.enter_context(unsharded(adapter_parameters(self.module)))
        state = self._sharded.consolidated_state_dict()
        if state is None:
            return _OnRank0()
        return self._without_frozen(state, kept) if exclude_frozen_parameters else state

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict  # its name under tensor parallelism

    def load_module_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Load a complete state dict into the model and its master weights. Every rank must call it."""
        self.module.load_state_dict(state_dict, strict=strict)

    def __reduce_ex__(self, _: Any) -> Any:
        raise UsageError(
            "an engine cannot be copied or pickled: it holds process groups and shards. On every rank, call "
            "engine.save_checkpoint to resume later, engine.consolidated_state_dict or engine.export for the weights, or "
            "copy engine.module inside zeroshard.unsharded."
        )

    __deepcopy__ = __reduce_ex__  # otherwise `__getattr__` would find the model's method

    def _without_frozen(self, state: dict[str, Tensor], kept: Set[str] = frozenset()) -> dict[str, Tensor]:
        frozen = {name for name, p in named_parameters(self.module, all_names=True) if not p.requires_grad}
        return {name: value for name, value in state.items() if name in kept or name_of(name) not in frozen}


class _OnRank0(dict[str, Tensor]):
    """An empty state dict, for ranks other than 0. It cannot be pickled, since only rank 0 has the complete state dict."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError("this rank's state dict is empty: rank 0 has all of it. Save it on that rank only.")
