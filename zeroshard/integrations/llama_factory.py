"""Owns zeroshard's place in LLaMA-Factory v1: as the backend `fsdp2` and as the optimizer `zeroshard`.

    import zeroshard.integrations.llama_factory as entry
    entry.register()     # then llamafactory.v1's run_sft and similar functions

    dist_config: {name: fsdp2, stage: 3}
    optim_config: {name: zeroshard, optimizer: AdamW, lr: 1.0e-5}

LLaMA-Factory's loop saves and loads through a backend's methods only if the backend is named fsdp2 or deepspeed. It saves
any other model on rank 0 alone, where shards are incomplete. zeroshard therefore takes the place of its FSDP2.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zeroshard.engine.config.fields import nearest
from zeroshard.errors import UsageError
from zeroshard.model.shard import shard
from zeroshard.model.sharded import Sharded
from zeroshard.policy import Place, Policy, Precision

BACKEND, OPTIMIZER = "fsdp2", "zeroshard"
_MISSING = "LLaMA-Factory's v1 cannot be imported ({}): pip install llamafactory. For its v0, use `zeroshard run`."
_PLUGINS = "llamafactory.v1.plugins.trainer_plugins."
_STATES = "zeroshard"
"""The folder, in a checkpoint of LLaMA-Factory, that holds the model and the optimizer."""
_KEYS = ("stage", "offload_params")
_SIZES = ("mp_replicate_size", "mp_shard_size", "dp_size", "cp_size")


class _Backend:
    """What is known of a model between its two calls: LLaMA-Factory shards a model before it makes the optimizer.

    The model's hooks keep this object, and `_backends` finds it, so that neither outlives the model.
    """

    def __init__(self, policy: Policy, precision: Precision) -> None:
        self.policy = policy
        self.precision = precision
        self.sharded: Sharded | None = None

    def __deepcopy__(self, _memo: object) -> _Backend:
        """Return itself: a copy of the model, which has whole values, needs nothing of its own here."""
        return self

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Raise if the model runs unsharded: ranks would train apart."""
        if self.sharded is None:
            raise UsageError(
                f"optim_config does not name {OPTIMIZER}, so the model is not sharded and its ranks would train apart. Set "
                f"optim_config: {{name: {OPTIMIZER}, optimizer: AdamW, lr: ...}}."
            )


_backends: weakref.WeakKeyDictionary[nn.Module, weakref.ref[_Backend]] = weakref.WeakKeyDictionary()


def _backend_of(model: nn.Module) -> _Backend | None:
    reference = _backends.get(model)
    return None if reference is None else reference()


def _sharded(model: nn.Module) -> Sharded:
    backend = _backend_of(model)
    if backend is None or backend.sharded is None:
        raise UsageError(
            f"this {type(model).__name__} was not sharded by zeroshard. Set dist_config.name to {BACKEND} and "
            f"optim_config.name to {OPTIMIZER}."
        )
    return backend.sharded


# ---------------------------------------------------------------------- the backend's four methods


def shard_model(model: nn.Module, dist_config: Mapping[str, Any], *, bf16: bool = False, **_: Any) -> nn.Module:
    """Note how to shard the model, and return it. `make_optimizer` shards it.

    Args:
        model: the trainer's model, with values on every rank.
        dist_config: `stage` (0 to 3; default 3), `offload_params` (parameters, at stages 1 to 3, and optimizer states rest in
            CPU memory; default False), and LLaMA-Factory's sizes, which must leave all ranks data-parallel.
        bf16: compute in bf16, with fp32 master weights.

    Raises:
        UsageError: a key is unknown, a size divides the ranks otherwise, or the model has no values.
        PolicyError: the stage is unknown.
    """
    options = {key: value for key, value in dist_config.items() if key not in ("name", "timeout")}
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    for key in _SIZES:
        wanted = ranks if key in ("mp_shard_size", "dp_size") else 1
        if options.pop(key, None) not in (None, wanted):
            raise UsageError(
                f"dist_config: zeroshard shards over all {ranks} ranks, so {key} is {wanted} here. Leave it out."
            )
    unknown = [key for key in options if key not in _KEYS]
    if unknown:
        raise UsageError(f"dist_config: {unknown[0]} has no meaning here{nearest(unknown[0], _KEYS)} Leave it out.")
    mode = getattr(model, "_init_mode", "init_on_default")  # LLaMA-Factory's own note
    if mode != "init_on_default":
        raise UsageError(
            f"init_config: {mode} leaves ranks without values, which zeroshard does not load here. Leave init_config out; for a "
            "model larger than a rank's memory, set dist_config.name to deepspeed, under `zeroshard run`."
        )
    policy = Policy.stage(options.get("stage", 3))
    if options.get("offload_params", False):
        policy = policy.offloaded(optimizer=Place.CPU, parameters=Place.CPU)
    backend = _Backend(policy, Precision(torch.bfloat16) if bf16 else Precision())
    model.register_forward_pre_hook(backend)
    _backends[model] = weakref.ref(backend)
    return model


def save_model(model: nn.Module, output_dir: str, processor: Any) -> None:
    """Write the model for `from_pretrained`, and the processor. Every rank must call it."""
    sharded = _sharded(model)
    sharded.export(output_dir)
    if sharded.rank == 0:
        processor.save_pretrained(output_dir)


def save_checkpoint(
    model: nn.Module, _optimizer: torch.optim.Optimizer, ckpt_dir: str, *, save_ckpt_as_hf: bool = False,
    processor: Any = None, **_: Any,
) -> None:  # fmt: skip
    """Write the model's and the optimizer's states, for any number of ranks and any stage. Every rank must call it.

    Args:
        model: the trainer's model, which was sharded with its optimizer.
        ckpt_dir: the folder of the checkpoint.
        save_ckpt_as_hf: also write the model for `from_pretrained`, into `hf_model`.
        processor: is saved with it.
    """
    sharded = _sharded(model)
    sharded.save(ckpt_dir, _STATES)
    if save_ckpt_as_hf:
        hf_model = Path(ckpt_dir, "hf_model")
        sharded.export(hf_model)
        if sharded.rank == 0 and processor is not None:
            processor.save_pretrained(hf_model)


def load_checkpoint(model: nn.Module, _optimizer: torch.optim.Optimizer, ckpt_dir: str, **_: Any) -> None:
    """Load what `save_checkpoint` wrote. Every rank must call it."""
    _sharded(model).load(ckpt_dir, _STATES)


def clip_grad_norm(model: nn.Module, max_norm: float, **_: Any) -> float:
    """Clip the gradients of all ranks and return their norm before. Every rank must call it."""
    return float(nn.utils.clip_grad_norm_(model.parameters(), max_norm))


# ---------------------------------------------------------------------- the optimizer


def make_optimizer(model: nn.Module, optim_config: Mapping[str, Any], **of_a_backend: Any) -> torch.optim.Optimizer:
    """Create a torch optimizer over the model's trainable parameters, and shard the model with it.

    Args:
        model: the trainer's model, from `shard_model`.
        optim_config: `optimizer` (a class of torch.optim; default AdamW), `elementwise` (see `zeroshard.shard`), and
            arguments of the optimizer.
        of_a_backend: what a backend of this name would get, since 0.9.5 has one registry for both.

    Raises:
        UsageError: the model is not from `shard_model`, torch.optim does not have the optimizer, or `lr` is missing.
    """
    backend = _backend_of(model)
    if backend is None or of_a_backend:
        what = f"dist_config names {OPTIMIZER}" if of_a_backend else "the model's backend is not zeroshard's"
        raise UsageError(
            f"{what}, and zeroshard is an optimizer of that name only, and the backend {BACKEND}. Set dist_config: "
            f"{{name: {BACKEND}, stage: 3}} and optim_config: {{name: {OPTIMIZER}, ...}}."
        )
    options = {key: value for key, value in optim_config.items() if key != "name"}
    kind = options.pop("optimizer", "AdamW")
    elementwise = options.pop("elementwise", None)
    cls = getattr(torch.optim, str(kind), None)
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise UsageError(f"optim_config: torch.optim has no {kind!r}. Name a class of torch.optim.")
    if "lr" not in options:
        raise UsageError("optim_config has no lr. Set it there: LLaMA-Factory passes no learning_rate to a plugin.")
    optimizer = cls((parameter for parameter in model.parameters() if parameter.requires_grad), **options)
    backend.sharded = shard(model, optimizer, backend.policy, precision=backend.precision, elementwise=elementwise)
    return optimizer


# ---------------------------------------------------------------------- the registries


class Distributed:
    """The methods of a backend as one object, which LLaMA-Factory's registry takes after 0.9.5."""

    shard_model = staticmethod(shard_model)
    save_model = staticmethod(save_model)
    save_checkpoint = staticmethod(save_checkpoint)
    load_checkpoint = staticmethod(load_checkpoint)
    clip_grad_norm = staticmethod(clip_grad_norm)


def register() -> None:
    """Take the place of LLaMA-Factory v1's FSDP2, and add the optimizer. Raise a UsageError if v1 cannot be imported (0.9.5)."""
    try:  # later than 0.9.5
        backend = import_module(_PLUGINS + "distributed.interface").DistributedPlugin(BACKEND)
    except ModuleNotFoundError as error:
        if not str(error.name).startswith(_PLUGINS + "distributed"):
            raise UsageError(_MISSING.format(error)) from error
        backend = _load("distributed.hub", "DistributedPlugin")(BACKEND)
        methods: dict[str, Callable[..., Any]] = {
            "__call__": shard_model, "save_model": save_model, "save_checkpoint": save_checkpoint,
            "load_checkpoint": load_checkpoint,
        }  # fmt: skip
        for name, method in methods.items():
            backend.register(name)(method)
    else:
        backend.register()(Distributed)
    try:
        optimizers = import_module(_PLUGINS + "optimizers.optimizer").OptimizerPlugin
    except ModuleNotFoundError:
        optimizers = _load("optimizer", "OptimizerPlugin")
    optimizers(OPTIMIZER).register()(make_optimizer)


def _load(module: str, name: str) -> Any:
    try:
        return getattr(import_module(_PLUGINS + module), name)
    except ModuleNotFoundError as error:
        raise UsageError(_MISSING.format(error)) from error
