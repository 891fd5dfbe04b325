"""Owns the device's registration with torch, through the hooks that torch has for devices of others. Once in a process."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import types
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from simgpu.build import NAME, build

Pace = tuple[bool, int]
"""Whether a stream waits until it is waited for, and microseconds before each kernel."""

AT_ONCE, LATE = (False, 0), (True, 0)
MODES: dict[str, tuple[Pace, list[Pace]]] = {
    "at once": (AT_ONCE, [AT_ONCE]),
    "default late": (LATE, [AT_ONCE]),
    "others late": (AT_ONCE, [LATE]),
    "all late": (LATE, [LATE]),
    "default slow": ((False, 200), [AT_ONCE]),
    "others slow": (AT_ONCE, [(False, 2000)]),
    "odd late": (AT_ONCE, [LATE, AT_ONCE]),
    "even late": (AT_ONCE, [AT_ONCE, LATE]),
}
"""How the default stream is paced, and the others, in turn."""
QUICK_MODES = ("default late", "others late", "all late", "others slow")

_native: Any = None


_used: list[torch.device] = []


def device() -> torch.device:
    """The one that there is."""
    return _used[-1] if _used else torch.device("simgpu", 0)


def use(real: torch.device) -> None:
    """Let the bodies run on a real device from now on."""
    _used.append(real)


def load() -> None:
    """Make the device known to torch. Starts no thread."""
    global _native  # noqa: PLW0603  (as the registration is the process's)
    if _native is not None:
        return
    loader = importlib.machinery.ExtensionFileLoader(NAME, str(build()))
    spec = importlib.util.spec_from_file_location(NAME, loader.path, loader=loader)
    assert spec is not None
    native = importlib.util.module_from_spec(spec)
    loader.exec_module(native)
    torch.utils.rename_privateuse1_backend("simgpu")
    torch._register_device_module("simgpu", _module(native))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    _native = native


def _module(native: Any) -> types.ModuleType:
    """`torch.simgpu`: what torch, FSDP2 among it, asks of a device beyond torch.accelerator."""

    class _Nothing(AbstractContextManager[None]):
        def __init__(self, _device: Any = None) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    module: Any = types.ModuleType("torch.simgpu")
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count, module.current_device, module.set_device = lambda: 1, lambda: 0, lambda _device: None
    module.device = _Nothing
    module.manual_seed = module.manual_seed_all = lambda _seed: None
    module.get_rng_state = lambda _device=None: torch.get_rng_state()
    module.set_rng_state = lambda state, _device=None: torch.set_rng_state(state)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.synchronize = lambda _device=None: native.synchronize()
    module.current_stream = lambda _device=None: torch.accelerator.current_stream()
    module.Stream = lambda _device=None, priority=0: torch.Stream(device())
    module.stream = lambda stream: nullcontext() if stream is None else stream
    module.Event = torch.Event
    for name in ("memory_allocated", "max_memory_allocated", "max_memory_reserved"):
        setattr(module, name, getattr(torch.accelerator, name))
    return module  # type: ignore[no-any-return]


def native() -> Any:
    """The C++ part."""
    assert _native is not None, "simgpu is not loaded"
    return _native


def set_mode(name: str) -> None:
    """One of MODES, for streams that are there and that come."""
    native().set_paces(*MODES[name])


@dataclass
class Counts:
    """Since `reset_counts`, by name: kernels, host synchronisations, copies from and to pageable memory, collectives."""

    launches: Counter[str] = field(default_factory=Counter)
    synchronisations: Counter[str] = field(default_factory=Counter)
    pageable_copies: Counter[str] = field(default_factory=Counter)
    collectives: Counter[str] = field(default_factory=Counter)


collectives: Counter[str] = Counter()
"""How many of each kind simccl launched since `reset_counts`."""
launched: list[tuple[str, torch.dtype]] = []
"""The kind and dtype of each, in the order of their launches."""


def counts() -> Counts:
    """What was done since `reset_counts`."""
    launches, synchronisations, copies = native().counts()
    return Counts(Counter(launches), Counter(synchronisations), Counter(copies), Counter(collectives))


def reset_counts() -> None:
    """Begin anew."""
    native().reset_counts()
    collectives.clear()
    launched.clear()
