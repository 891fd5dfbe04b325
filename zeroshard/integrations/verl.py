"""Owns zeroshard's engine in verl's registry: `engine.strategy=zeroshard`.

    python -m verl.trainer.sft_trainer ... \\
        engine._target_=zeroshard.integrations.verl.ZeroshardEngineConfig engine.strategy=zeroshard +engine.stage=3

The name of the config's class imports this module in every process that gets the config. So there is no entry point in the group
`verl.plugins`: verl loads these inside `import verl`, and verl's engines, once imported, choose the platform for good, before
other plugins can register theirs.

The engine is verl's own FSDP engine for language models, with another way to shard, save and hand over weights.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from zeroshard.errors import UsageError
from zeroshard.model.shard import shard
from zeroshard.model.sharded import Sharded
from zeroshard.policy import Place, Policy, Precision

NAME = "zeroshard"
_STATES = "zeroshard"
"""The folder, in a checkpoint of verl, that holds the states."""

_fsdp: Any = import_module("verl.workers.engine.fsdp.transformer_impl")
_registry: Any = import_module("verl.workers.engine.base").EngineRegistry
_EngineConfig: Any = import_module("verl.workers.config").FSDPEngineConfig


@dataclass
class ZeroshardEngineConfig(_EngineConfig):  # type: ignore[misc]
    """verl's config of its FSDP engines, with a stage.

    `model_dtype` is the dtype of the master weights. `mixed_precision` holds `param_dtype` (default bf16), `reduce_dtype` (fp32)
    and `buffer_dtype` (fp32). `param_offload` and `optimizer_offload` move states to CPU memory while the engine does not run;
    `offload_policy` keeps them there. `wrap_policy`, `forward_prefetch` and `use_orig_params` have no effect.

    Attributes:
        stage: the ZeRO stage, 0 to 3.
    """

    strategy: str = NAME
    stage: int = 3

    def __post_init__(self) -> None:
        """Raise UsageError if a key asks for what this engine does not have."""
        for key, without in (("fsdp_size", -1), ("ulysses_sequence_parallel_size", 1)):
            if getattr(self, key) != without:
                raise UsageError(
                    f"engine.{key}={getattr(self, key)}: zeroshard's engine shards over all ranks, which get different "
                    f"sequences. Set engine.{key}={without}."
                )
        if getattr(self.qat, "enable", False):
            raise UsageError("engine.qat.enable: zeroshard's engine does not train quantised weights. Set it to false.")


@_registry.register(model_type="language_model", backend=NAME, device=["cuda", "npu", "cpu"])
class ZeroshardEngine(_fsdp.FSDPEngineWithLMHead):  # type: ignore[misc]
    """verl's engine for language models (actors, references, SFT), on zeroshard."""

    sharded: Sharded
    _is_parked = False

    def initialize(self) -> None:
        """Build the model, the optimizer and the scheduler. Every rank must call it."""
        self._saved: list[str] = []
        self._build_model_optimizer()
        self._park()

    def _build_fsdp_module(self, module: nn.Module) -> nn.Module:
        """Move the module to this rank's device. Ranks other than 0 have no values yet: `shard` sends rank 0's."""
        config, dtypes = self.engine_config, self.engine_config.mixed_precision or {}
        if self.model_config.enable_activation_offload:
            raise UsageError("model.enable_activation_offload needs verl's FSDP engine. Set it to false.")
        to_dtype = import_module("verl.utils.torch_dtypes").PrecisionType.to_dtype
        param = to_dtype(dtypes.get("param_dtype", "bf16"))
        if param is torch.float16:
            raise UsageError(
                "mixed_precision.param_dtype is fp16, which needs a loss scaler of verl's. Use bf16 or fp32."
            )
        self._autocast_dtype = param
        reduce, buffer = (to_dtype(dtypes.get(f"{name}_dtype", "fp32")) for name in ("reduce", "buffer"))
        self._precision = Precision(param, reduce_dtype=reduce, buffer_dtype=buffer)
        self._policy = Policy.stage(config.stage, reshard_after_forward=config.reshard_after_forward)
        if config.offload_policy:
            self._policy = self._policy.offloaded(optimizer=Place.CPU, parameters=Place.CPU)
        device = import_module("verl.utils.device").get_device_id()
        if any(tensor.is_meta for tensor in module.parameters()):
            module.to_empty(device=device)
        module.to(device)
        if config.forward_only:
            self.sharded = shard(module, None, self._policy, precision=self._precision)
        return module

    def _build_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = super()._build_optimizer(module)
        self.sharded = shard(module, optimizer, self._policy, precision=self._precision)
        return optimizer

    def _gradient_sync_context(self, *, is_last_micro_batch: bool) -> AbstractContextManager[None]:
        return self.sharded.accumulate(not is_last_micro_batch)

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Park states in CPU memory if `device` is "cpu", and otherwise bring all of them back.

        States that the config offloads are parked together, since all are brought back together. Gradients have no memory
        outside a step. If the model runs on CPUs, this has no effect.
        """
        self._bring_back()
        if device == "cpu" != import_module("verl.utils.device").get_device_name() and (model or optimizer):
            wanted = {
                "parameters": model or self.is_param_offload_enabled,
                "optimizer": optimizer or self.is_optimizer_offload_enabled,
            }
            self.sharded.offload_states([name for name, is_wanted in wanted.items() if is_wanted])
            self._is_parked = True

    def _bring_back(self) -> None:
        if self._is_parked:
            self.sharded.reload_states()
            self._is_parked = False

    def _park(self) -> None:
        """Park what the config offloads."""
        self.to("cpu", model=self.is_param_offload_enabled, optimizer=self.is_optimizer_offload_enabled)

    # ------------------------------------------------------------------ checkpoints

    def save_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, global_step: int = 0, max_ckpt_to_keep: int | None = None, **_: Any
    ) -> None:  # fmt: skip
        """Save all states and the scheduler's, for any number of ranks and any stage. Every rank must call it.

        If `checkpoint.save_contents` has "hf_model", files for `from_pretrained` are written to `huggingface`, too.
        """
        self._bring_back()
        scheduler = None if self.lr_scheduler is None else self.lr_scheduler.state_dict()
        self.sharded.save(local_path, _STATES, {"scheduler": scheduler})
        if "hf_model" in self.checkpoint_config.save_contents:
            folder = Path(local_path, "huggingface")
            self.sharded.export(folder)
            processor = self.model_config.get_processor()
            if self.rank == 0 and processor is not None:
                processor.save_pretrained(folder)
        self._saved = [*(path for path in self._saved if path != local_path), local_path]
        while max_ckpt_to_keep and len(self._saved) > max_ckpt_to_keep:
            oldest = self._saved.pop(0)
            if self.rank == 0:
                shutil.rmtree(oldest, ignore_errors=True)
        self._park()

    def load_checkpoint(
        self, local_path: str | None, hdfs_path: str | None = None, del_local_after_load: bool = True, **_: Any
    ) -> None:
        """Load what `save_checkpoint` saved, as far as `checkpoint.load_contents` names it. Every rank must call it."""
        if local_path is None:
            return
        self._bring_back()
        contents = self.checkpoint_config.load_contents
        takes_extra = "extra" in contents
        loaded = self.sharded.load(
            local_path, _STATES, optimizer_states="optimizer" in contents and self.sharded.trains, random=takes_extra
        )
        scheduler = loaded.values["scheduler"]
        if takes_extra and None not in (scheduler, self.lr_scheduler):
            self.lr_scheduler.load_state_dict(scheduler)
        self._park()

    # ------------------------------------------------------------------ weights for an inference engine

    def get_per_tensor_param(self, **_: Any) -> tuple[Iterator[tuple[str, Tensor]], None]:
        """Return an iterator over whole weights, under the names of files. Every rank must run it to the end.

        Raises:
            UsageError: adapters would be sent without the base model.
        """
        merges = bool(self.model_config.lora.get("merge", False))
        if self._is_lora and not merges:
            raise UsageError("zeroshard's engine hands over merged weights only. Set model.lora.merge=true.")
        self._bring_back()
        return self.sharded.named_weights(merge_adapters=merges), None

    def get_per_tensor_param_shard(self, **_: Any) -> NoReturn:
        """Raise: verl wants a part of each weight on each rank, and zeroshard's parts are not divided so."""
        raise UsageError(
            "zeroshard's engine hands over whole weights. Choose a checkpoint engine of verl that takes these."
        )

    get_per_tensor_param_delta_shard = get_per_tensor_param_shard
