"""Owns the hints that zeroshard adds to errors of torch, as notes: torch names the event, and not what zeroshard offers for it."""

from __future__ import annotations

_MEMORY = (
    "zeroshard: this rank ran out of memory. sharded.memory_report() shows what its model states take, and `zeroshard plan` what a "
    "run will need. Take a higher stage, offload, activation checkpointing or a smaller microbatch (docs/troubleshooting.md, "
    '"I run out of memory").'
)
_DTYPES = (
    "zeroshard: a config's bf16 or fp16, and shard(precision=...), convert the parameters and not the inputs. Cast the inputs, or "
    "train in torch.autocast (in a config, torch_autocast)."
)
_OF_TEXTS = {
    "can't allocate memory": _MEMORY,
    "not enough memory": _MEMORY,
    "out of memory": _MEMORY,
    "must have the same dtype": _DTYPES,
    "same dtype, but got": _DTYPES,
    "should be the same": _DTYPES,  # Input type (float) and bias type (c10::BFloat16) should be the same
}
"""Parts of torch's messages."""


def add_hint(error: BaseException | None) -> None:
    """Add a note with the remedy to an error of torch that has one, once. Python prints notes below the message."""
    if not isinstance(error, RuntimeError | MemoryError):
        return
    hint = _MEMORY if isinstance(error, MemoryError) else None
    text = str(error)
    hint = hint or next((hint for part, hint in _OF_TEXTS.items() if part in text), None)
    if hint is not None and hint not in getattr(error, "__notes__", ()):
        error.add_note(hint)
