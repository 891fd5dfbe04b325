"""Owns the cutting of batches: a rank's slice of each sequence, and of all tensors with its positions."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from zeroshard.core.transport.sequence_ranks import SequenceRanks
from zeroshard.errors import UsageError

IGNORED = -100
"""The label of tokens that losses ignore, as in torch and transformers."""
_PADDING = {"labels": IGNORED, "shift_labels": IGNORED}
_LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""Descriptions of packed documents that are valid only for whole sequences. Positions describe documents too."""


def cut_batch(ranks: SequenceRanks, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return this rank's slice of a batch that all ranks of the sequence hold; see `Sequences.cut`."""
    tokens = _tokens(batch)
    rows, length = tokens.shape[:2]
    whole = dict(batch)
    for name in _LENGTHS:
        if whole.get(name) is not None:
            raise UsageError(
                f"the batch describes packed documents by {name}, which is not valid for a slice: pass position_ids that "
                "begin at 0 in each document instead."
            )
    positions = whole.pop("position_ids", None)
    if positions is None:
        positions = torch.arange(length, device=tokens.device)[None]
    if positions.dim() != 2 or positions.shape[1] != length:
        raise UsageError(
            f"position_ids have the shape {list(positions.shape)}, for {length} tokens: pass one position for each "
            "token, [rows, tokens]."
        )
    positions = positions.expand(rows, length)
    labels = whole.pop("labels", None)
    if isinstance(labels, Tensor) and labels.shape != (rows, length):
        raise UsageError(
            f"labels have the shape {list(labels.shape)}, and the tokens {[rows, length]}: Sequences cuts batches for causal "
            "language models, with a label for each token. Train a classifier without Sequences."
        )
    _refuse_padding(whole.pop("attention_mask", None), rows, length, [labels, whole.get("shift_labels")])
    if labels is not None and "shift_labels" not in whole:
        # Before the cut: the last token of a slice predicts the first of the next.
        whole["shift_labels"] = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    # The positions of padding continue those of the last document, so that no document begins in it.
    missing = -length % ranks.size
    following = positions[:, -1:] + 1 + torch.arange(missing, device=positions.device)
    result = {"position_ids": torch.cat([positions, following], dim=1)}
    for name, value in whole.items():
        if isinstance(value, Tensor) and value.shape[:2] == (rows, length):
            padded = F.pad(value.movedim(1, -1), (0, missing), value=_PADDING.get(name, 0)).movedim(-1, 1)
            result[name] = own_slice(ranks, padded)
        elif isinstance(value, Tensor) and value.dim() > 1 and length > 1 and length in value.shape:
            raise UsageError(
                f"{name} has the shape {list(value.shape)}, and its second dimension is not that of the tokens ({rows} "
                f"rows of {length}), so it is unclear how to cut it: leave it out of the batch."
            )
        else:
            result[name] = value
    return result


def has_values(tensor: Tensor) -> bool:
    """Return whether a tensor has values. Tensors of a dry run have none."""
    return type(tensor).__name__ != "FakeTensor"


def own_slice(ranks: SequenceRanks, tensor: Tensor, dim: int = 1) -> Tensor:
    """Return this rank's slice of a tensor whose dimension `dim` has all positions.

    Raises:
        UsageError: the number of positions is not a multiple of the number of ranks.
    """
    if tensor.shape[dim] % ranks.size:
        raise UsageError(
            f"{tensor.shape[dim]} positions cannot be divided evenly over {ranks.size} ranks: pad them to a multiple."
        )
    return tensor.chunk(ranks.size, dim=dim)[ranks.rank].contiguous()


def cut_loader(ranks: SequenceRanks, loader: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield this rank's slices of batches that are the same on all ranks of a sequence.

    Raises:
        UsageError: the ranks' batches differ, or a rank's batch cannot be cut.
    """
    batches = iter(loader)
    while True:
        batch = next(batches, None)
        digests = _gathered(ranks, _digest, batch, "a comparison of batches")
        if any(digest != digests[0] for digest in digests):
            raise UsageError(
                f"the loaders of ranks {ranks.members}, which hold slices of the same sequences, gave them different "
                "batches: use a sampler with one rank for each group (DistributedSampler(num_replicas=groups, "
                "rank=group)), or cut(loader, in_turn=True)."
            )
        if batch is None:
            return
        yield cut_batch(ranks, batch)


def cut_in_turn(ranks: SequenceRanks, loader: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield this rank's slices of each rank's batch, in turn: one round of loading yields one batch per rank.

    Raises:
        UsageError: a rank's batch cannot be cut.
    """
    batches = iter(loader)
    device = torch.device("cpu")
    while True:
        own = next(batches, None)
        everyone = [batch for batch in _gathered(ranks, _sendable, own, "batches in turn") if batch is not None]
        if own is not None:
            device = _tokens(own).device  # when this loader has ended, the others' batches still come to this device
        if not everyone:
            return
        for batch in everyone:
            yield cut_batch(ranks, _moved(batch, device))


def _gathered(ranks: SequenceRanks, convert: Callable[[Any], Any], batch: Any, label: str) -> list[Any]:
    """Gather each rank's converted batch, or None. If one rank refuses its batch, every rank raises the error."""
    converted = None
    why = None
    try:
        if batch is not None and not isinstance(batch, Mapping):
            raise UsageError(
                f"the loader yields a {type(batch).__name__}, but Sequences.cut needs batches with names: make the dataset or "
                'the collate_fn return a dict, such as {"input_ids": ..., "labels": ...}.'
            )
        if batch is not None:
            converted = convert(batch)
    except UsageError as error:
        why = error.args[0]
    everyone = ranks.gather((converted, why), label)
    for rank, (_, refusal) in zip(ranks.members, everyone, strict=True):
        if refusal is not None:
            raise UsageError(f"on rank {rank}, {refusal}")
    return [converted for converted, _ in everyone]


def _sendable(batch: Mapping[str, Any]) -> dict[str, Any]:
    _tokens(batch)
    return _moved(batch, torch.device("cpu"))


def _moved(batch: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    tensors = {name: value.to(device) for name, value in batch.items() if isinstance(value, Tensor)}
    return {**batch, **tensors}


def _tokens(batch: Mapping[str, Any]) -> Tensor:
    """Return the tensor of a batch that has one entry for each token: [rows, tokens, ...]."""
    for name in ("input_ids", "inputs_embeds"):
        tokens = batch.get(name)
        if isinstance(tokens, Tensor) and tokens.dim() > 1:
            return tokens
    raise UsageError(
        "Sequences.cut needs a batch with input_ids [rows, tokens] or inputs_embeds, but this one has "
        f"{sorted(map(str, batch))}: cut other tensors with Sequences.own."
    )


def _refuse_padding(mask: Any, rows: int, length: int, labels: Sequence[Any]) -> None:
    """Raise unless the mask hides only padding at the end of rows: for that, causal attention needs no mask.

    Without the mask, padding attends to the tokens before it, so the labels of padding must be ignored.
    """
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.shape != (rows, length):
        raise UsageError(
            "the batch has an attention mask that is not [rows, tokens], and masks are made from positions: leave "
            "it out, and pass position_ids that begin at 0 in each document."
        )
    kept = mask != 0
    if bool((kept[:, 1:] & ~kept[:, :-1]).any()):
        raise UsageError(
            "the attention mask has padding on the left or between tokens: pad on the right (tokenizer.padding_side = "
            '"right"), or pack documents with position_ids.'
        )
    for one in labels:
        if isinstance(one, Tensor) and bool((one.masked_fill(kept, IGNORED) != IGNORED).any()):
            raise UsageError(
                f"some labels of padding count in the loss: set them to {IGNORED} where the attention mask is 0."
            )


def _digest(batch: Mapping[str, Any]) -> list[tuple[str, list[int], int]]:
    """Return the names, shapes and checksums of a batch's tensors."""
    found = []
    for name, value in sorted(batch.items()):
        if isinstance(value, Tensor):
            data = value.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
            found.append((name, list(value.shape), zlib.crc32(data.tobytes())))
    return found
