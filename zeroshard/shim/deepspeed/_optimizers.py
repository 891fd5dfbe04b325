"""Optimizers of torch and zeroshard with DeepSpeed's names and arguments, for states in any place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from zeroshard import Lion, UsageError

_KERNELS = ("foreach", "fused", "decoupled_weight_decay")


class FusedAdam(torch.optim.Adam):
    """AdamW, or Adam with L2 regularisation if `adam_w_mode` is false. The weight decay is 0 by default."""

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, bias_correction: bool = True, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8, adam_w_mode: bool = True, weight_decay: float = 0.0, amsgrad: bool = False, set_grad_none: bool = True,
    ) -> None:  # fmt: skip
        _check(type(self).__name__, amsgrad, bias_correction)
        super().__init__(params, lr, betas, eps, weight_decay, fused=True, decoupled_weight_decay=bool(adam_w_mode))


class DeepSpeedCPUAdam(torch.optim.Adam):
    """AdamW, or Adam with L2 regularisation if `adamw_mode` is false. The weight decay is 0 by default."""

    def __init__(
        self, model_params: Iterable[Any], lr: float = 1e-3, bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0, amsgrad: bool = False,
        adamw_mode: bool = True, fp32_optimizer_states: bool = True,
    ) -> None:  # fmt: skip
        _check(type(self).__name__, amsgrad, bias_correction, fp32_optimizer_states)
        groups = list(model_params)
        for number, one in enumerate(groups):
            if isinstance(one, dict):
                # The groups of another Adam, which accelerate passes, have options for their kernel and kind of decay.
                groups[number] = {key: value for key, value in one.items() if key not in _KERNELS}
        super().__init__(groups, lr, betas, eps, weight_decay, fused=True, decoupled_weight_decay=bool(adamw_mode))


class DeepSpeedCPUAdagrad(torch.optim.Adagrad):
    """Adagrad, which adds the weight decay to the gradient."""

    def __init__(
        self, model_params: Iterable[Any], lr: float = 1e-2, eps: float = 1e-10, weight_decay: float = 0.0,
        amsgrad: bool = False, fp32_optimizer_states: bool = True,
    ) -> None:  # fmt: skip
        if amsgrad or not fp32_optimizer_states:
            raise UsageError("DeepSpeedCPUAdagrad has neither amsgrad nor 16-bit states: leave both arguments out.")
        super().__init__(model_params, lr=lr, eps=eps, weight_decay=weight_decay)


class FusedLion(Lion):
    """The Lion optimizer with DeepSpeed's defaults: an lr ten times `Lion`'s, and betas (0.9, 0.999)."""

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(params, lr, betas, weight_decay)


class DeepSpeedCPULion(Lion):
    """The Lion optimizer with DeepSpeed's defaults: an lr ten times `Lion`'s, and betas (0.9, 0.999)."""

    def __init__(
        self, model_params: Iterable[Any], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0, fp32_optimizer_states: bool = True,
    ) -> None:  # fmt: skip
        _check("DeepSpeedCPULion", fp32_states=fp32_optimizer_states)
        super().__init__(model_params, lr, betas, weight_decay)


def _check(name: str, amsgrad: bool = False, bias_correction: bool = True, fp32_states: bool = True) -> None:
    if amsgrad:
        raise UsageError(f"{name} has no amsgrad, like DeepSpeed's class: use torch.optim.AdamW(amsgrad=True).")
    if not bias_correction:
        raise UsageError(
            f"{name}(bias_correction=False) is not supported: torch's Adam always corrects the bias. Leave it out."
        )
    if not fp32_states:
        raise UsageError(
            f"{name}(fp32_optimizer_states=False) is not supported: states have the master weights' dtype. Leave it out."
        )
