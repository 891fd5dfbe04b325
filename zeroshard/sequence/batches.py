"""Owns the cut of a batch: a rank's positions of a sequence, and the tensors that belong to them."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from zeroshard.collectives.sequence_ranks import SequenceRanks
from zeroshard.errors import UsageError

IGNORED = -100
"""The label of a token that no loss counts, as in torch and transformers."""
_PADDING = {"labels": IGNORED, "shift_labels": IGNORED}
_LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""Descriptions of packed documents that are valid for whole sequences only; positions describe documents too."""


def cut_batch(ranks: SequenceRanks, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return this rank's slice of a batch that all ranks of the sequence hold; see `Sequences.cut`."""
    tokens = _tokens(batch)
    rows, length = tokens.shape[:2]
    whole = dict(batch)
    for name in _LENGTHS:
        if whole.get(name) is not None:
            raise UsageError(
                f"the batch describes packed documents by {name}, which a slice of it cannot: give position_ids that "
                "begin at 0 with each document instead."
            )
    positions = whole.pop("position_ids", None)
    if positions is None:
        positions = torch.arange(length, device=tokens.device)[None]
    if positions.dim() != 2 or positions.shape[1] != length:
        raise UsageError(
            f"position_ids of the shape {list(positions.shape)} for {length} tokens: give one position for each "
            "token, [rows, tokens]."
        )
    positions = positions.expand(rows, length)
    labels = whole.pop("labels", None)
    _refuse_padding(whole.pop("attention_mask", None), rows, length, [labels, whole.get("shift_labels")])
    if labels is not None and "shift_labels" not in whole:
        # Before the cut: the last token of a slice predicts the first of the next.
        whole["shift_labels"] = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    missing = -length % ranks.size
    following = positions[:, -1:] + 1 + torch.arange(missing, device=positions.device)
    result = {"position_ids": torch.cat([positions, following], dim=1)}
    for name, value in whole.items():
        if isinstance(value, Tensor) and value.shape[:2] == (rows, length):
            padded = F.pad(value.movedim(1, -1), (0, missing), value=_PADDING.get(name, 0)).movedim(-1, 1)
            result[name] = own_slice(ranks, padded)
        elif isinstance(value, Tensor) and value.dim() > 1 and length > 1 and length in value.shape:
            raise UsageError(
                f"{name} of the shape {list(value.shape)} does not have the tokens in its second dimension ({rows} "
                f"rows of {length} tokens), so it is unclear how to cut it: leave it out of the batch."
            )
        else:
            result[name] = value
    return result


def has_values(tensor: Tensor) -> bool:
    """Return whether a tensor has values: those of a dry run have none."""
    return type(tensor).__name__ != "FakeTensor"


def own_slice(ranks: SequenceRanks, tensor: Tensor, dim: int = 1) -> Tensor:
    """Return this rank's slice of a tensor that has all positions in `dim`.

    Raises:
        UsageError: the ranks do not divide the number of positions.
    """
    if tensor.shape[dim] % ranks.size:
        raise UsageError(
            f"{tensor.shape[dim]} positions cannot be divided over {ranks.size} ranks: pad them to a multiple."
        )
    return tensor.chunk(ranks.size, dim=dim)[ranks.rank].contiguous()


def cut_loader(ranks: SequenceRanks, loader: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield slices of batches that the loaders of all ranks of a sequence yield alike."""
    batches = iter(loader)
    while True:
        batch = next(batches, None)
        digests = ranks.gather(None if batch is None else _digest(batch), "a comparison of batches")
        if any(digest != digests[0] for digest in digests):
            raise UsageError(
                f"the loaders of ranks {ranks.members}, which hold slices of the same sequences, gave them different "
                "batches: give their sampler one rank for each group (DistributedSampler(num_replicas=groups, "
                "rank=group)), or cut(loader, in_turn=True)."
            )
        if batch is None:
            return
        yield cut_batch(ranks, batch)


def cut_in_turn(ranks: SequenceRanks, loader: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield slices of each rank's own batches, in turn: each round of loading gives as many batches as there are ranks."""
    batches = iter(loader)
    while True:
        own = next(batches, None)
        device = torch.device("cpu")
        sent = None
        if own is not None:
            sent = _moved(own, device)
            device = _tokens(own).device
        everyone = [batch for batch in ranks.gather(sent, "batches in turn") if batch is not None]
        if not everyone:
            return
        for batch in everyone:
            yield cut_batch(ranks, _moved(batch, device))


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
        "a batch to be cut needs input_ids [rows, tokens], or inputs_embeds, and this one has "
        f"{sorted(map(str, batch))}: cut other tensors with Sequences.own."
    )


def _refuse_padding(mask: Any, rows: int, length: int, labels: Sequence[Any]) -> None:
    """Raise unless the mask hides only padding at the end of rows: causal attention does not need such a mask.

    Padding itself attends to tokens that a mask would hide. So labels of padding must be ignored.
    """
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.shape != (rows, length):
        raise UsageError(
            "the batch has an attention mask of its own shape, and masks are made from positions: leave it out, and "
            "give position_ids that begin at 0 with each document."
        )
    kept = mask != 0
    if bool((kept[:, 1:] & ~kept[:, :-1]).any()):
        raise UsageError(
            "the attention mask has padding before tokens (on the left, or between): pad on the right (tokenizer.padding_side = "
            '"right"), or pack documents with position_ids.'
        )
    for one in labels:
        if isinstance(one, Tensor) and bool((one.masked_fill(kept, IGNORED) != IGNORED).any()):
            raise UsageError(f"labels of padding count: set them to {IGNORED} where the attention mask is 0.")


def _digest(batch: Mapping[str, Any]) -> list[tuple[str, list[int], int]]:
    """Return names, shapes and checksums of a batch's tensors."""
    found = []
    for name, value in sorted(batch.items()):
        if isinstance(value, Tensor):
            data = value.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
            found.append((name, list(value.shape), zlib.crc32(data.tobytes())))
    return found
