"""Config blocks that DeepSpeed enables if they are present."""

from __future__ import annotations

from typing import Any

import pytest

from zeroshard import ConfigError
from zeroshard.engine.config.load import load_config


@pytest.mark.parametrize("block", [{}, {"topk_ratio": 0.1}, {"enabled": False}])
def test_zenflow_is_refused_whatever_it_holds(block: dict[str, Any]) -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2, "zenflow": block}}
    with pytest.raises(ConfigError, match=r"zero_optimization\.zenflow = .* is not supported"):
        load_config(config, 1)


def test_zenflow_may_be_null() -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2, "zenflow": None}}
    assert load_config(config, 1).stage == 2
