"""Owns the gradients of ranks that ran out of inputs before others did. Called by zero_redundancy_optimizer, under Join."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zeroshard.collectives.base import Collectives
from zeroshard.zero_redundancy.parameter_bucket import ParameterBucket, in_storage_order


def share_gradients(
    buckets: Sequence[ParameterBucket], parameters: Sequence[Tensor], collectives: Collectives, *, joined: bool
) -> None:
    """Give ranks that have joined the reduced gradients of the shards that they update. Every rank must call it.

    DDP lets a joined rank take part in its all-reduces and throws the result away; every other rank has it.

    Args:
        joined: this rank has no inputs left; its gradients are overwritten.
    """
    own = bytes([joined, *(parameter.grad is not None for parameter in parameters)])
    everyone = collectives.exchange(own, "which ranks have joined")
    training = [rank for rank, message in enumerate(everyone) if not message[0]]
    source = training[0]
    has_gradient = {id(p): bool(flag) for p, flag in zip(parameters, everyone[source][1:], strict=True)}
    if joined:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter) if has_gradient[id(parameter)] else None
    pending = []
    pieces = [
        (target, bucket.parameters[piece.index], slice(piece.parameter_start, piece.parameter_start + piece.numel))
        for target in sorted({*range(collectives.world_size)} - {*training})
        for bucket in buckets
        for piece in bucket.layout.shard_pieces(target)
    ]
    with collectives.together():
        for target, parameter, part in pieces:
            if not has_gradient[id(parameter)]:
                continue
            gradient = parameter.grad if collectives.rank in (source, target) else parameter
            assert gradient is not None
            if collectives.rank == source and gradient.stride() != parameter.stride():
                gradient = torch.empty_like(parameter).copy_(gradient)
            flat = in_storage_order(gradient)[part]
            pending.append(collectives.transfer(flat, source, target, "gradients for a rank that has joined"))
    for transfer in pending:
        transfer.wait()
