"""Owns one dry run: the real engine takes two steps as one rank of many, on tensors without values.

It does not need weights, an accelerator or other processes. torch's FakeTensorMode replaces the tensors,
`SimulatedRanks` the other ranks, and `SimulatedStorages` memory and disk. `Ledger` counts the bytes. The engine's code
does not change.
"""

from __future__ import annotations

import gc
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from zeroshard.core.named_parameter import named_modules, refuse_distributed
from zeroshard.core.storage.transfers import CPU
from zeroshard.engine.config.load import Config, expert_parallel_ranks, load_config, read, tensor_parallel_ranks
from zeroshard.engine.config.schema import MONITORS
from zeroshard.engine.engine import Engine
from zeroshard.engine.initialize import make_engine
from zeroshard.errors import UsageError, ZeroshardError
from zeroshard.model.shard import Backend
from zeroshard.optim.several import optimizers_of
from zeroshard.policy import Place
from zeroshard.tools.planning import experts
from zeroshard.tools.planning.fakes import Repeats
from zeroshard.tools.planning.ledger import (
    ACTIVATIONS,
    GRADIENTS,
    INPUTS,
    OPTIMIZER,
    PARAMETERS,
    TEMPORARIES,
    Ledger,
    Peak,
)
from zeroshard.tools.planning.machine import Machine
from zeroshard.tools.planning.simulated import SimulatedHosts, SimulatedRanks, SimulatedStorages, SimulatedTwoLevel
from zeroshard.torch_private import FakeTensor, FakeTensorMode, outside_of_modes, tree_leaves, tree_map_only

STEPS = 2
"""The number of steps. The first fixes the order of units, creates the optimizer's states and fills the pool of
buffers. The second is like all later ones."""
MOST_MICROBATCHES = 3
"""The maximum number of a step's microbatches that are run: the first, the last, and one for all between them."""
_SILENT = (
    "steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "comms_logger", *MONITORS,
)  # fmt: skip
"""The keys of a config that enable printed lines and logs. A dry run ignores them."""
_ROOT = "the root module"
_Sent = dict[str, Counter[str]]
"""The communication of a step so far: bytes sent and calls by collective."""


@dataclass(frozen=True)
class Job:
    """A training run to plan. The attributes that are not listed here correspond to arguments of `plan`.

    Attributes:
        hosts: the number of hosts, over which the ranks are spread evenly.
        born_sharded: whether the model is built inside `sharded_init`.
    """

    factory: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    ranks: int
    hosts: int
    machine: Machine
    loss: Callable[[Any], Tensor] | None
    optimizer: Callable[..., Any] | None
    born_sharded: bool

    @property
    def ranks_per_host(self) -> int:
        """The maximum number of ranks on one host."""
        return -(-self.ranks // self.hosts)


@dataclass(frozen=True)
class Figures:
    """The results of one rank's dry run, in bytes.

    Attributes:
        peak, host_peak: the peaks of live bytes in training, on the device and in the host's CPU memory.
        peak_together: the peak of the sum of both, for a machine whose device and host share one memory.
        reserved: bytes that the device's allocator took from the driver, start-up included; 0 on a CPU.
        peaks: the peaks on the device, by phase.
        start: the peak on the device before the first step.
        rest: live bytes on the device between steps, by category.
        states: live bytes on the device when the optimizer begins its step, with all gradients, by category.
        disk: bytes on disk.
        sent, calls: bytes that this rank sends and the number of its calls in one step, by collective.
        numel, trained: the number of elements of all parameters, and of trained ones.
        model_nbytes: bytes of all parameters as the factory created them.
    """

    config: Config
    peak: Peak
    host_peak: Peak
    peak_together: int
    peaks: dict[str, int]
    start: Peak
    rest: dict[str, int]
    states: dict[str, int]
    disk: int
    sent: dict[str, int]
    calls: dict[str, int]
    numel: int
    trained: int
    model_nbytes: int
    reserved: int


def dry_run(job: Job, config: Any, auto: Mapping[str, Any] | None = None, repeats: Repeats | None = None) -> Figures:
    """Run two steps as one rank of a training run and return the results.

    Args:
        config, auto: a config and the values of its "auto" keys, as passed to `initialize`.
        repeats: the memory of operations of earlier dry runs.

    Raises:
        ConfigError, UsageError: as in the real run, or if the model or the config cannot be planned.
    """
    repeats = repeats or Repeats()
    raw = read(config)
    run = _in_own_thread if expert_parallel_ranks(raw) > 1 else _without_values
    figures, has_dropout = run(job, raw, auto, repeats, as_accelerator=False)
    if has_dropout and not job.machine.computes_on_cpu:
        figures, _ = run(job, raw, auto, repeats, as_accelerator=True)
    return figures


def _in_own_thread(*args: Any, **kwargs: Any) -> tuple[Figures, bool]:
    """Run `_without_values` in a thread of its own.

    For each thread, torch keeps what operations on DTensors return, with their mesh. A later mesh of real ranks equals that of
    the fake ones, and would get its process groups, which are gone.
    """
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(_without_values, *args, **kwargs).result()


def _without_values(
    job: Job, raw: dict[str, Any], auto: Mapping[str, Any] | None, repeats: Repeats, *, as_accelerator: bool
) -> tuple[Figures, bool]:
    """Return the figures of a dry run, and whether the model has dropout.

    Args:
        as_accelerator: whether dropout takes as much memory as on an accelerator. This slows each operation down, so a model
            runs first without.
    """
    mode = _Mode(allow_non_fake_inputs=True)
    repeats.begin(mode)
    ledger = Ledger(repeats, in_segments=not job.machine.computes_on_cpu)
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(mode)
        stack.enter_context(ledger)
        stack.callback(gc.collect)  # frees the engine's reference cycles, which would take memory in the next dry run
        size = expert_parallel_ranks(raw)
        if size > 1:
            stack.enter_context(experts.fake_ranks(job.ranks))
        return _run(job, raw, auto, ledger, size, as_accelerator=as_accelerator), ledger.has_dropout


class _Mode(FakeTensorMode):  # type: ignore[misc]
    """The mode of a dry run. A deep copy of a tensor stays in this mode (nn.TransformerEncoder copies its first layer)."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Mode:
        return self


def _run(
    job: Job, raw: dict[str, Any], auto: Mapping[str, Any] | None, ledger: Ledger, ranks_of_experts: int, *,
    as_accelerator: bool,
) -> Figures:  # fmt: skip
    if tensor_parallel_ranks(raw) > 1:
        raise UsageError(
            "a plan does not count tensor parallelism (tensor_parallel.autotp_size). Plan the config without it, on as many "
            "ranks: parameters, gradients and activations then take more memory than on ranks that divide the model."
        )
    model = _build(job, ledger)
    model_nbytes = sum(parameter.nbytes for parameter in model.parameters())
    config = load_config(raw, job.ranks, model, auto)
    if not config.names_batch_size:
        raise UsageError(
            "neither the config nor the caller names a batch size. Pass the number of samples of one call of the model."
        )
    hosts = SimulatedHosts(job.ranks, job.hosts, ledger, job.machine.transport == "native")
    collectives = hosts.collectives(config.policy)
    ledger.name(model.buffers(), INPUTS)
    ledger.enter("start", TEMPORARIES)
    make_storages = partial(SimulatedStorages, ledger=ledger, machine=job.machine)
    group = None
    if ranks_of_experts > 1:
        group = experts.divide(model, config, ranks_of_experts, collectives)
    create = partial(hosts.part_of, collectives, config.policy)
    backend = Backend(create, make_storages, lambda _: None, FakeTensor)
    optimizer = job.optimizer
    if optimizer is None and config.schema.optimizer is None:
        optimizer = partial(torch.optim.AdamW, fused=True)
    run_config = load_config(_shortened(raw, config), job.ranks, model, auto)
    engine = make_engine(run_config, model, CPU, optimizer, group=group, backend=backend)
    storages = engine._sharded._context.storages
    assert isinstance(storages, SimulatedStorages)
    if engine.checkpointing is not None and not job.machine.computes_on_cpu:
        engine.checkpointing.host_copies = storages.host_copies
    if not job.machine.computes_on_cpu and config.policy.optimizer.place is Place.ACCELERATOR:
        take_foreach(engine)
    _name_states(engine, ledger)
    start = ledger.peak
    ledger.forget_peaks()
    states = dict[str, int]()
    engine.optimizer.register_step_pre_hook(lambda *_: states.update(ledger.parts()))
    stateful: list[nn.Module] = []
    if engine.checkpointing is not None and job.machine.computes_on_cpu:
        stateful = engine.checkpointing.modules
    with ExitStack() as stack:
        stack.enter_context(_untraced())  # it changes the model's library, which the factory has imported by now
        stack.enter_context(_located(model, ledger))
        stack.enter_context(_random_states(stateful))
        if as_accelerator:
            stack.enter_context(_AcceleratorsDropout())
        for _ in range(STEPS):
            sent = _step(job, engine, ledger, collectives)
        rest = ledger.parts()
    of_step = _of_step(sent, config.batch.accumulation - run_config.batch.accumulation)
    return Figures(
        config=config,
        peak=ledger.peak,
        host_peak=ledger.host_peak,
        peak_together=ledger.peak_together,
        peaks=dict(ledger.peak_by_phase),
        start=start,
        rest=rest,
        states=states,
        disk=storages.nbytes()["disk"],
        **of_step,
        numel=sum(parameter.numel() for parameter in model.parameters()),
        trained=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        model_nbytes=model_nbytes,
        reserved=ledger.reserved,
    )


# ---------------------------------------------------------------------- the model


def _build(job: Job, ledger: Ledger) -> nn.Module:
    ledger.enter("building the model", PARAMETERS)
    try:
        model = _born(job)
        if isinstance(model, nn.Module):
            refuse_distributed(model.named_parameters(), "plan()")
    except ZeroshardError:
        raise
    except Exception as error:
        raise UsageError(
            f"the model could not be built without values: {type(error).__name__}: {_first_line(error)} A plan builds the model "
            "from its configuration: do not read weights there (use from_config instead of from_pretrained)."
        ) from error
    if not isinstance(model, nn.Module):
        raise UsageError(f"the factory made {type(model).__name__}, not a torch.nn.Module. Return a module.")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise UsageError(
            "the factory returned a model on the meta device. Leave the device out: a plan makes tensors without values "
            "itself."
        )
    if any(not isinstance(parameter, FakeTensor) for parameter in model.parameters()):
        raise UsageError(
            "the factory returned a model that has values already. Build it inside the factory, so that the plan needs no "
            "memory."
        )
    model.train()
    return model


def _born(job: Job) -> nn.Module:
    try:
        return job.factory()
    except RuntimeError as error:
        # torch cannot move a module of tensors without values, and PEFT moves its adapters while it builds them.
        if "Couldn't swap" not in str(error):
            raise
        traceback.clear_frames(error.__traceback__)  # the frames hold parts of the model
    gc.collect()
    # A model on the meta device can be moved. Build it there, then replace its tensors with CPU tensors without values.
    with outside_of_modes(), torch.device("meta"):
        model = job.factory()
    made: dict[Tensor, Tensor] = {}
    if not isinstance(model, nn.Module):
        return model
    for module in model.modules():
        own = [*module.named_parameters("", False, False), *module.named_buffers("", False, False)]
        for name, value in own:
            if value.device.type == "meta":
                if value not in made:
                    empty = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=CPU)
                    if isinstance(value, nn.Parameter):
                        empty = nn.Parameter(empty, requires_grad=value.requires_grad)
                    made[value] = empty
                setattr(module, name, made[value])
    return model


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") + "." if lines else ""


# ---------------------------------------------------------------------- a step


def _of_step(sent: list[_Sent], left_out: int) -> dict[str, dict[str, int]]:
    """Return the communication of a whole step. Its `left_out` microbatches that were not run each send as much as the second."""
    first, second, *_ = [*sent, sent[-1]]  # if a step has one microbatch, none is left out
    return {
        kind: {name: total + left_out * (second[kind][name] - first[kind][name]) for name, total in counts.items()}
        for kind, counts in sent[-1].items()
    }


def _shortened(raw: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """Return the same config with at most MOST_MICROBATCHES microbatches, and without printed lines and logs."""
    made = {key: value for key, value in raw.items() if key not in _SILENT}
    if config.batch.accumulation > MOST_MICROBATCHES:
        made["train_micro_batch_size_per_gpu"] = config.batch.micro
        made["gradient_accumulation_steps"] = MOST_MICROBATCHES
        made.pop("train_batch_size", None)
    return made


def _step(job: Job, engine: Engine, ledger: Ledger, ranks: SimulatedRanks | SimulatedTwoLevel) -> list[_Sent]:
    """Run one step and return the communication from its start to the end of each microbatch."""
    sent = []
    ranks.sent.clear()
    ranks.calls.clear()
    try:
        microbatches = engine.gradient_accumulation_steps()
        for number in range(microbatches):
            ledger.enter("forward", INPUTS)
            batch = tree_map_only(Tensor, _as_fake, job.batch(engine.train_micro_batch_size_per_gpu()))
            ledger.born = ACTIVATIONS
            if isinstance(batch, Mapping):
                output = engine(**batch)
            elif isinstance(batch, tuple | list):
                output = engine(*batch)
            else:
                output = engine(batch)
            loss = _loss(job, output)
            del output
            ledger.enter("backward", TEMPORARIES)
            engine.backward(loss)
            ledger.enter("step", TEMPORARIES)
            ledger.module = ""
            if number == microbatches - 1 or engine.managed_gradient_accumulation():
                engine.step()
            sent.append({"sent": Counter(ranks.sent), "calls": Counter(ranks.calls)})
            del loss, batch
    except ZeroshardError:
        raise
    except Exception as error:
        raise UsageError(
            f"the model could not be run without values: {type(error).__name__}: {_first_line(error)} Shapes that "
            "depend on values, and operations that torch cannot run without them, cannot be planned: leave them "
            "out of the model that the plan builds."
        ) from error
    ledger.enter("between steps", TEMPORARIES)
    _name_states(engine, ledger)
    return sent


def _loss(job: Job, output: Any) -> Tensor:
    if job.loss is not None:
        found = job.loss(output)
    else:
        found = getattr(output, "loss", output)
    if isinstance(found, tuple | list) and found:
        found = found[0]
    if not isinstance(found, Tensor) or found.numel() != 1:
        raise UsageError(
            f"the model returned {type(output).__name__}, which has no loss: return a scalar, or an object with "
            "`loss`, or pass loss=FUNCTION, which takes what the model returns."
        )
    return found


def _as_fake(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape and dtype, without values: the user may have created this one before the mode began."""
    if isinstance(tensor, FakeTensor):
        return tensor
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)


def take_foreach(engine: Engine) -> None:
    """Set `foreach` for optimizers that choose no implementation, as torch does on an accelerator.

    Such an optimizer updates all tensors at once, with temporaries for all. On the CPU, where the tensors of a dry run
    are, torch would update one tensor after another.
    """
    for group in chain.from_iterable(one.param_groups for one in optimizers_of(engine._sharded.sharded_step.inner)):
        if group.get("foreach", False) is None and group.get("fused") is None:
            group["foreach"] = True


def _name_states(engine: Engine, ledger: Ledger) -> None:
    """Assign the memory of model states to categories. Optimizer states exist after the first step."""
    for unit in engine._sharded._schedule.units:
        ledger.name([unit.flat.tensor], PARAMETERS)
        for bucket in unit.buckets:
            ledger.name(bucket.tensors("master"), OPTIMIZER)
            ledger.name(bucket.tensors("parameters"), PARAMETERS)
        for gradients in unit.gradients:
            ledger.name(gradients.tensors(), GRADIENTS)
    kept = [value for state in engine.optimizer.state.values() for value in state.values()]
    ledger.name([value for value in kept if isinstance(value, Tensor)], OPTIMIZER)


# ---------------------------------------------------------------------- hooks and changes around the model


@contextmanager
def _untraced() -> Iterator[None]:
    """Make transformers build the same masks inside the block as in a real run.

    Otherwise transformers treats tensors without values as if torch.compile traced them: it does not read values and
    creates a full mask, [batch, 1, length, length]. In a dry run, `Ledger` answers reads of values.
    """
    masks: Any = sys.modules.get("transformers.masking_utils")
    if masks is None or not hasattr(masks, "is_tracing"):
        yield
        return
    before = masks.is_tracing
    masks.is_tracing = lambda *_: False
    try:
        yield
    finally:
        masks.is_tracing = before


class _AcceleratorsDropout(TorchFunctionMode):
    """A mode in which dropout takes as much memory as on an accelerator; the CPU's kernels would take more.

    Accelerators' fused attention accepts dropout; other dropout keeps one byte for each element.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if func in _DROPOUT_PLACE:
            place = _DROPOUT_PLACE[func]
            if len(args) > place:
                args = (*args[:place], 0.0, *args[place + 1 :])
            else:
                options["dropout_p"] = 0.0
        elif func is F.dropout:
            return _dropout(*args, **options)
        return func(*args, **options)


_DROPOUT_PLACE = {F.scaled_dot_product_attention: 4, F.multi_head_attention_forward: 10}
"""The place of the argument `dropout_p` of attention functions."""


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if training and not inplace and 0 < p < 1:
        return torch.native_dropout(input, p, True)[0]
    return F.dropout(input, p, training, inplace)


@contextmanager
def _located(model: nn.Module, ledger: Ledger) -> Iterator[None]:
    """Record the running module in the ledger. A backward records the module whose output gradient was computed last."""

    def enter(name: str, *_: Any) -> None:
        ledger.module = name

    def leave(name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
        ledger.module = name.rpartition(".")[0] or _ROOT
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(partial(enter, name))

    with ExitStack() as stack:
        for fqn, module in named_modules(model):
            name = fqn or _ROOT
            stack.callback(module.register_forward_pre_hook(partial(enter, name)).remove)
            stack.callback(module.register_forward_hook(partial(leave, name)).remove)
        yield


@contextmanager
def _random_states(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Count the memory of one random state for each forward of these modules, until its backward ends.

    On a CPU, torch's checkpointing keeps such a state for each call, and the ledger does not see an operation that
    allocates it. If the input does not require a gradient, the state stays until the module's next forward.
    """
    kept: dict[nn.Module, Tensor] = {}

    def forget(module: nn.Module, _gradient: Tensor) -> None:
        kept.pop(module, None)

    def keep(module: nn.Module, args: Any, kwargs: Any) -> None:
        kept[module] = torch.empty(torch.get_rng_state().nbytes, dtype=torch.uint8)
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and leaf.requires_grad and not leaf.is_leaf:
                leaf.register_hook(partial(forget, module))
                return

    with ExitStack() as stack:
        for module in modules:
            stack.callback(module.register_forward_pre_hook(keep, with_kwargs=True).remove)
        yield
