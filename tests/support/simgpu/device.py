"""Owns the device's registration with torch, once in a process, through torch's hooks for external devices."""

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
"""Whether a stream is idle until something waits for it, and the microseconds before each kernel."""

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
"""The pace of the default stream, and the paces of the others, in turn."""

_native: Any = None


_used: list[torch.device] = []


def device() -> torch.device:
    """Return the device on which bodies run."""
    return _used[-1] if _used else torch.device("simgpu", 0)


def use(real: torch.device) -> None:
    """Let the bodies run on a real device from now on."""
    _used.append(real)


def load() -> None:
    """Register the device with torch, without starting a thread."""
    global _native  # noqa: PLW0603  (since a process registers the device once)
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
    """Return `torch.simgpu`, with the functions that torch, including FSDP2, needs in addition to torch.accelerator."""

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
    """Return the C++ module."""
    assert _native is not None, "simgpu is not loaded"
    return _native


def set_mode(name: str) -> None:
    """Apply one of MODES to existing and later streams."""
    native().set_paces(*MODES[name])


@dataclass
class Counts:
    """Counts since `reset_counts`, by name: kernels, host synchronisations, copies from and to pageable memory, collectives."""

    launches: Counter[str] = field(default_factory=Counter)
    synchronisations: Counter[str] = field(default_factory=Counter)
    pageable_copies: Counter[str] = field(default_factory=Counter)
    collectives: Counter[str] = field(default_factory=Counter)


collectives: Counter[str] = Counter()
"""The number of simccl's launches since `reset_counts`, by kind."""
launched: list[tuple[str, torch.dtype]] = []
"""The kind and dtype of each collective, in the order of launches."""


def counts() -> Counts:
    """Return the counts since `reset_counts`."""
    launches, synchronisations, copies = native().counts()
    return Counts(Counter(launches), Counter(synchronisations), Counter(copies), Counter(collectives))


def reset_counts() -> None:
    """Set all counts to zero."""
    native().reset_counts()
    collectives.clear()
    launched.clear()
