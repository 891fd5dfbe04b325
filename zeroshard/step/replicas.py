"""The comparison of gradients of replicated parameters over another dimension of a mesh, in the step's small message.

Such parameters start equal, and stay so where their gradients are equal. These differ where such ranks get different
batches, or draw different dropout.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

from torch import Tensor

from zeroshard.collectives.base import Collectives
from zeroshard.errors import UsageError
from zeroshard.gradients.norm import digest_of, digests_as_bytes
from zeroshard.step.mean_gradients import MeanGradients
from zeroshard.step.options import DIGEST_NBYTES
from zeroshard.step.resident import Resident


class Replicas:
    """See the module's docstring.

    Args:
        everyone: the ranks of all dimensions.
    """

    def __init__(self, everyone: Collectives, gradients: MeanGradients) -> None:
        self._everyone = everyone
        self._gradients = gradients

    def digest(self, residents: Sequence[Resident]) -> bytes:
        """Return a digest of this rank's mean gradients of replicated parameters."""
        digest = hashlib.blake2b(digest_size=DIGEST_NBYTES)
        for name, one in self._digests(residents):
            digest.update(name.encode())
            digest.update(one)
        return digest.digest()

    def _digests(self, residents: Sequence[Resident]) -> Iterator[tuple[str, bytes]]:
        names: list[str] = []
        digests: list[Tensor] = []
        for resident in residents:
            for view in resident.views:
                if view.named.placement.is_whole:
                    part = self._gradients.get(resident.shard, view).flatten()
                    names.append(view.named.fqn)
                    digests.append(digest_of(part))
        return zip(names, digests_as_bytes(digests), strict=True)

    def refuse_different(self, digests: Sequence[bytes], residents: Sequence[Resident]) -> None:
        """Raise if two ranks that hold the same shards have different gradients. Every rank must call it, with all digests.

        Raises:
            UsageError: names the first parameter that differs.
        """
        everyone = self._everyone
        first: dict[int, bytes] = {}
        places = [everyone.data_rank(rank) for rank in range(everyone.world_size)]
        if all(digest == first.setdefault(place, digest) for place, digest in zip(places, digests, strict=True)):
            return
        own = [(name, one.hex()) for name, one in self._digests(residents)]
        answers = everyone.exchange_json(own, "the gradients of what is not divided")
        for rank, other in enumerate(answers):
            reference = places.index(places[rank])
            for (name, expected), (_, found) in zip(answers[reference], other, strict=False):
                if expected != found:
                    raise UsageError(
                        f"{name} is whole on the ranks that divide other parameters, and got another gradient on rank "
                        f"{rank} than on rank {reference} of them: it would no longer be the same. Give these ranks "
                        "the same batches, draw dropout from the same seed (outside of divided modules), put no adapters "
                        "(LoRA) on divided matrices, and on accelerators use kernels and sums in a fixed order "
                        "(torch.use_deterministic_algorithms(True))."
                    )
        raise UsageError("ranks that divide one model hold different parameters: build the same model on every rank.")
