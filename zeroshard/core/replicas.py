"""The comparison of inputs and of replicated parameters' gradients over another mesh dimension, in the step's small message.

Such parameters start equal, and stay equal if their gradients are equal. Gradients differ if the ranks have different dropout
masks or batches. If the first module is divided, different batches give equal gradients, which are wrong: so the tensors that
enter the model are compared too.
"""

from __future__ import annotations

import hashlib
import struct
from collections import deque
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zeroshard.core.module_hooks import Hook, untraced
from zeroshard.core.norm import sum_of_squares
from zeroshard.core.resident import MeanGradients, Resident
from zeroshard.core.transport.base import Collectives
from zeroshard.core.users_optimizer import DIGEST_NBYTES
from zeroshard.errors import UsageError
from zeroshard.torch_private import is_distributed, tree_leaves

_INPUTS = ""
"""The name of the model's inputs among the digests. No parameter has it."""
_MOST_INPUTS = 4096
"""The maximum number of tensors that are remembered: more come only from calls that no step follows."""
PLACED_NUMEL = 1 << 20
"""The number of a gradient's elements that are weighted at once: each needs three fp64 temporaries."""


class Replicas:
    """The comparison of replicated parameters' gradients (see the module's docstring).

    Args:
        everyone: the ranks of all dimensions.
    """

    def __init__(self, everyone: Collectives, gradients: MeanGradients) -> None:
        self._everyone = everyone
        self._gradients = gradients
        self._own: list[tuple[str, bytes]] = []
        self._entered: deque[Tensor] = deque(maxlen=_MOST_INPUTS)
        """Digests of the tensors that entered the model since the last message."""
        self._hook: RemovableHandle | None = None

    def watch(self, model: nn.Module) -> None:
        """Register a hook that adds the tensors that enter a model, while gradients are enabled, to the comparison."""
        hook = untraced(Hook)(self._take_inputs)
        self._hook = model.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)

    def release(self) -> None:
        """Remove the hook from the model."""
        if self._hook is not None:
            self._hook.remove()

    def _take_inputs(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled():
            return
        for one in tree_leaves((args, kwargs)):
            # Ranks may hold different parts of a DTensor: see its placements.
            if isinstance(one, Tensor) and not is_distributed(one) and not one.is_complex():
                self._entered.append(digest_of(one.detach().flatten().double()))

    def differ(self, residents: Sequence[Resident], others: Collectives) -> bool:
        """Compare the mean gradients of replicated parameters, and the inputs since the last call, over ranks with the same shards.

        Forwards that no step follows count too: the ranks that divide a model run all of them together.

        Args:
            others: the ranks of the mesh's other dimension, which have the same shards.
        """
        names = [_INPUTS] * len(self._entered)
        digests = list(self._entered)
        self._entered.clear()
        for resident in residents:
            for view in resident.views:
                if view.named.placement.is_whole:
                    names.append(view.named.fqn)
                    digests.append(digest_of(self._gradients.get(view).flatten()))
        self._own = list(zip(names, digests_as_bytes(digests), strict=True))
        digest = hashlib.blake2b(digest_size=DIGEST_NBYTES)
        for name, one in self._own:
            digest.update(name.encode())
            digest.update(one)
        return not others.agree(digest.digest(), "the inputs, and the gradients of what is not divided").are_equal

    def refuse_different(self) -> NoReturn:
        """Raise, since ranks with the same shards have different gradients or inputs. Every rank must call it.

        Raises:
            UsageError: always; the message names the first such parameter, or the inputs.
        """
        everyone = self._everyone
        places = [everyone.data_rank(rank) for rank in range(everyone.world_size)]
        own = [(name, one.hex()) for name, one in self._own]
        answers = everyone.exchange_json(own, "the inputs, and the gradients of what is not divided")
        for rank, other in enumerate(answers):
            reference = places.index(places[rank])
            for (name, expected), (other_name, found) in zip(answers[reference], other, strict=False):
                if (name, expected) == (other_name, found):
                    continue
                if _INPUTS in (name, other_name):
                    raise UsageError(
                        f"the model got different inputs on ranks {reference} and {rank}, which divide it: give these "
                        "ranks the same batches (a sampler of the data-parallel rank), and pass tensors that are to differ as "
                        "DTensors."
                    )
                raise UsageError(
                    f"{name} is whole on tensor-parallel ranks, but its gradient differs on ranks "
                    f"{reference} and {rank}: its values would drift apart. Give these ranks "
                    "the same batches, draw dropout from the same seed (outside of divided modules), put no adapters "
                    "(LoRA) on divided matrices, and on accelerators use kernels and sums in a fixed order "
                    "(torch.use_deterministic_algorithms(True))."
                )
        raise UsageError("ranks that divide one model hold different parameters: build the same model on every rank.")


def digest_of(flat: Tensor) -> Tensor:
    """Return 3 numbers, fp64 [3], which equal gradients share: the sum, the sum of squares, and the sum weighted by place.

    The third differs if the same values are in different places.
    """
    by_place = torch.zeros((), dtype=torch.float64, device=flat.device)
    for low in range(0, flat.numel(), PLACED_NUMEL):
        part = flat[low : low + PLACED_NUMEL].double()
        place = torch.arange(low, low + part.numel(), dtype=torch.float64, device=flat.device)
        by_place += (part * place).sum()
    return torch.stack([flat.sum(dtype=torch.float64), sum_of_squares(flat).double(), by_place])


def digests_as_bytes(digests: Sequence[Tensor]) -> list[bytes]:
    """Return the 24 bytes of each digest. The host waits for an accelerator once."""
    if not digests:
        return []
    device = digests[0].device
    rows = torch.stack([digest.to(device) for digest in digests]).tolist()
    return [struct.pack("<ddd", *row) for row in rows]
