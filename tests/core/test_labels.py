"""The ranges that torch's profiler shows: each gather, reduction, wait and step of ours, with the unit's name."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
from torch import nn
from torch.profiler import profile
from twin import LARGE_BUCKETS, build, step

from zeroshard import torch_private


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("stage", "text", "count"), [(2, "all-gather of updated {}", 1), (3, "all-gather of {}", 2)])
def test_a_profile_names_what_units_do(rank: int, stage: int, text: str, count: int) -> None:
    model, sharded = build(stage, bucket_numel=LARGE_BUCKETS)
    for number in range(3):
        with profile() as found:
            clip = partial(nn.utils.clip_grad_norm_, model.parameters(), 1.0)
            step(model, sharded, rank, number, clip=clip)
    labels = Counter({event.key: event.count for event in found.key_averages()})
    for bucket in ("blocks.0 [bucket 1]", "blocks.1 [bucket 2]"):
        named = [label for label in labels if bucket in label]
        assert labels[text.format(bucket)] in (count, count - 1), named  # the last unit may stay for its backward
        assert labels[f"reduce-scatter of gradients of {bucket}"] == 1, named
        assert labels[f"wait for reduce-scatter of gradients of {bucket}"] == 1, named
        assert labels[f"wait for all-gather of {bucket}"] >= 1, named
    assert labels["update of the shards"] == 1
    assert labels["exchange of gradient norms"] == 1
    assert labels["exchange of the gradient norm and the flags of used parameters"] == 1


def test_without_a_profiler_a_label_is_one_shared_object() -> None:
    assert torch_private.labelled("one") is torch_private.labelled("other")
    with profile():
        assert torch_private.labelled("one") is not torch_private.labelled("one")
