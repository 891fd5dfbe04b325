"""Owns `Sequences`, the public object for sequences that are cut over ranks.

mesh = init_device_mesh("cuda", (groups, 4), mesh_dim_names=("dp", "sp"))
sequences = Sequences(mesh["sp"])
sequences.attach(model)
zeroshard.shard(model, optimizer, 3)          # over all ranks
for batch in sequences.cut(loader):
    sequences.loss(model, batch, tiles=32).backward()
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, overload

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from zeroshard.core.modules import Forwards
from zeroshard.core.named_parameter import refuse_distributed
from zeroshard.core.transport.grouped import Grouped
from zeroshard.core.transport.sequence_ranks import SequenceRanks
from zeroshard.errors import UsageError, counted
from zeroshard.model.unsharded import home_of
from zeroshard.sequence.attention import CutAttention
from zeroshard.sequence.batches import IGNORED, cut_batch, cut_in_turn, cut_loader, own_slice
from zeroshard.sequence.exchange import heads_for_positions, positions_for_heads
from zeroshard.sequence.loss import Sum, Transform, head_log_probabilities, token_mean


class Sequences:
    """The sequences of which each rank of a group holds a slice (Ulysses sequence parallelism, arXiv:2309.14509).

    Of P ranks, rank r holds positions r S/P to (r+1) S/P of each sequence of S positions. All layers except attention
    work on this slice. For attention, the ranks exchange positions for heads. `shard` still shards model states over
    all ranks.

    Args:
        mesh: the ranks of one sequence: a dimension of a device mesh (`mesh["sp"]`), or a process group.
        group: the ranks over which gradients are averaged, as passed to `shard`; default: all ranks.

    Raises:
        UsageError: `group` does not contain all ranks of the sequence.
    """

    def __init__(
        self,
        mesh: DeviceMesh | dist.ProcessGroup | SequenceRanks,
        *,
        group: dist.ProcessGroup | DeviceMesh | None = None,
    ) -> None:
        self._ranks = mesh if isinstance(mesh, SequenceRanks) else SequenceRanks(mesh)
        self._group = group
        self._averaged = SequenceRanks(group)
        outside = set(self._ranks.members) - set(self._averaged.members)
        if outside and type(self._ranks) is SequenceRanks:
            raise UsageError(
                f"ranks {sorted(outside)} hold slices of this rank's sequences, but are not in the group over "
                "which gradients are averaged: shard over a group with every rank of a sequence."
            )
        self._attached: dict[nn.Module, CutAttention] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Sequences:
        return self

    @property
    def size(self) -> int:
        """The number of ranks that hold one sequence."""
        return self._ranks.size

    @property
    def rank(self) -> int:
        """The number of this rank's slice."""
        return self._ranks.rank

    @property
    def messages(self) -> int:
        """The number of this rank's exchanges so far: a layer needs two in the forward and two in the backward."""
        return self._ranks.messages

    @property
    def sent_nbytes(self) -> int:
        """The number of bytes that this rank has sent to other ranks in exchanges."""
        return self._ranks.sent_nbytes

    # ------------------------------------------------------------------ models

    def attach(self, model: nn.Module) -> Sequences:
        """Prepare a transformers model for cut batches.

        Every rank must call it, before or after `shard`. Outside of training, batches that are not cut (evaluation,
        generation) run as before, on each rank separately. In training, the model raises UsageError for them.

        Args:
            model: a causal model that finds its attention in transformers' registry. It may be inside a PEFT model.

        Returns:
            This object.

        Raises:
            UsageError: this model's sequences cannot be cut. The message has the reason.
        """
        refuse_distributed(
            model.named_parameters(), "Sequences.attach()", "Attach the model before you divide it over ranks."
        )
        if self.size > 1:
            self._attached[model] = CutAttention(self._ranks, model)
        return self

    def detach(self, model: nn.Module) -> None:
        """Restore a model's own attention.

        Raises:
            UsageError: the model is not attached.
        """
        if self.size == 1:
            return
        if model not in self._attached:
            raise UsageError("detach() got a model that is not attached: pass the same object as to attach().")
        self._attached.pop(model).remove()

    def attend(
        self, attention: Callable[[Tensor, Tensor, Tensor], Tensor], query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """Run an attention function over whole sequences, inside a model of your own. The call takes two exchanges.

        Every rank of the sequence must call it.

        Args:
            attention: a function of query [B, H/P, S, D], key and value [B, max(K/P, 1), S, D], which returns
                [B, H/P, S, D']. It gets all positions of some heads, and its masks are for whole sequences.
            query: [B, H, S/P, D], this rank's positions.
            key, value: [B, K, S/P, D]. K may be smaller than H and smaller than P.

        Returns:
            [B, H, S/P, D'].

        Raises:
            UsageError: the heads cannot be divided over the ranks, or query, key and value differ in positions or dtype.
        """
        if self.size == 1:
            return attention(query, key, value)
        return positions_for_heads(self._ranks, attention(*heads_for_positions(self._ranks, query, key, value)))

    # ------------------------------------------------------------------ batches

    @overload
    def cut(self, batches: Mapping[str, Any]) -> dict[str, Any]: ...

    @overload
    def cut(self, batches: Iterable[Mapping[str, Any]], *, in_turn: bool = ...) -> Iterator[dict[str, Any]]: ...

    def cut(self, batches: Any, *, in_turn: bool = False) -> Any:
        """Return this rank's slice of a batch, or an iterator over slices of a loader's batches.

        `labels` are shifted before the cut and become `shift_labels`. `position_ids` [B, S] are not cut; they are added
        if they are missing. A document begins where positions are not consecutive. An `attention_mask` of padding on
        the right is removed, since causal attention does not need it. Other tensors [B, S, ...] are cut too. Sequences
        whose length is not a multiple of the number of ranks are padded.

        Args:
            batches: a batch with `input_ids` [B, S] or `inputs_embeds`, the same on all ranks of the sequence; or a
                loader of such batches, which every rank of the sequence must read.
            in_turn: for a loader: accept different batches on the ranks and cut each rank's batch in turn. Each round
                of loading then yields one batch per rank.

        Raises:
            UsageError: a batch is not a dict with tokens, or has padding on the left, padding whose labels are not
                ignored, packed lengths (cu_seq_lens), or a tensor whose shape does not fit the tokens; or a loader's
                batches differ between ranks. (A single batch is not compared.)
        """
        if isinstance(batches, Mapping):
            return cut_batch(self._ranks, batches)
        if in_turn:
            return cut_in_turn(self._ranks, batches)
        return cut_loader(self._ranks, batches)

    def own(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's slice of a tensor whose dimension `dim` has all positions, such as `position_ids`.

        Raises:
            UsageError: the number of positions is not a multiple of `size`, the number of ranks that share a sequence.
        """
        return own_slice(self._ranks, tensor, dim)

    # ------------------------------------------------------------------ losses

    def loss(
        self, model: nn.Module, batch: Mapping[str, Any], *, tiles: int = 1, tokens: Tensor | int | None = None,
        transform: Transform = None,
    ) -> Tensor:  # fmt: skip
        """Compute a causal language model's mean cross-entropy over all ranks' tokens, without materializing the full logits.

        Every rank of the group must call it.

        Args:
            model: a transformers model, or an engine or wrapper whose `.module` is one.
            batch: a cut batch, with `shift_labels`.
            tiles: see `head_loss`.
            tokens: the number of labels that are not ignored, over all ranks and microbatches of the step; default:
                those of this batch on all ranks.
            transform: the function that the model applies to its logits after the head; see `head_loss`.

        Returns:
            The mean in nats, [], the same on every rank. The average of its gradients over all ranks is the gradient of
            the mean.

        Raises:
            UsageError: the batch has no `shift_labels`, the model's head is not an `nn.Linear`, the model changes its
                logits after the head, or `shard` averages gradients over other ranks.
        """
        found = self.log_probabilities(model, batch, tiles=tiles, transform=transform)
        return token_mean(-found, batch["shift_labels"] != IGNORED, group=self._group, tokens=tokens)

    def log_probabilities(
        self, model: nn.Module, batch: Mapping[str, Any], *, tiles: int = 1, transform: Transform = None
    ) -> Tensor:
        """Compute the log-probability of each label of this rank's slice: [B, S/P], fp32, 0 where the label is -100.

        Every rank of the sequence must call it. If `found` is the result, the log-probability of each whole sequence,
        [B], is `sequences.sum(found.sum(1))`, as in DPO and KTO. Arguments and errors are the same as those of `loss`.
        """
        inputs = dict(batch)
        labels = inputs.pop("shift_labels", None)
        if not isinstance(labels, Tensor):
            raise UsageError(
                "the batch has no shift_labels: cut a batch that has labels with Sequences.cut, and pass the result."
            )
        head = _head_of(model)
        refuse_distributed(
            head.named_parameters(),
            "a loss in tiles",
            "Leave the head out of the plan of parallelize_module, and let its inputs be whole.",
        )
        if type(self._ranks) is SequenceRanks:
            _refuse_another_group(model, self._averaged.members)
        made: list[Tensor] = []

        def run(hidden: Tensor) -> Tensor:
            found = head_log_probabilities(
                hidden, head.weight, labels, bias=head.bias, tiles=tiles, transform=transform
            )
            made.append(found)
            return found

        # Run it in the call of the head: if parameters are sharded, its weight has values only there.
        forwards = Forwards()
        forwards.replace(head, run)
        try:
            output = model(**inputs)
        finally:
            forwards.restore()
        logits = getattr(output, "logits", None)
        if len(made) != 1 or (logits is not made[0] and transform is None):
            raise UsageError(
                f"{type(model).__name__} changes its logits after its head (softcapping, a scale), which "
                "log-probabilities in tiles would omit: pass this function as transform=, or use head_log_probabilities "
                "inside the model."
            )
        return made[0]

    def sum(self, values: Tensor) -> Tensor:
        """Return the differentiable sum of a tensor over the ranks of a sequence. Every rank of the sequence must call it."""
        result: Tensor = Sum.apply(values, self._ranks)  # type: ignore[no-untyped-call]
        return result


def _refuse_another_group(model: nn.Module, members: Sequence[int]) -> None:
    """Raise if `shard` averages gradients over ranks other than those whose tokens are counted."""
    homes = (home_of(parameter) for parameter in model.parameters() if parameter.requires_grad)
    unit = next((home.unit() for home in homes if home is not None), None)
    if unit is None:
        return
    are_others = unit.collectives.world_size != len(members)
    averaged = counted(unit.collectives.world_size, "rank")
    if isinstance(unit.collectives, Grouped):
        ranks = unit.collectives.members.ranks
        are_others |= set(ranks) != set(members)
        averaged = f"ranks {list(ranks)}"
    if are_others:
        raise UsageError(
            f"shard() averages gradients over {averaged}, but these Sequences average losses over ranks {list(members)}: pass "
            "both the same group, with every rank of a sequence (default: all ranks)."
        )


def _head_of(model: nn.Module) -> nn.Linear:
    inner: Any = getattr(model, "module", model)
    find = getattr(inner, "get_output_embeddings", None)
    if find is None and hasattr(inner, "get_base_model"):
        find = inner.get_base_model().get_output_embeddings
    head = None if find is None else find()
    if type(head) is not nn.Linear:
        found = f"a {type(head).__module__}.{type(head).__qualname__}"
        if head is None:
            found = "missing"
        raise UsageError(
            f"the head of {type(inner).__name__} is {found}, but the loss needs a plain nn.Linear, which it runs in tiles. Compute "
            "each token's loss from the model's logits, and pass them to token_mean."
        )
    return head
