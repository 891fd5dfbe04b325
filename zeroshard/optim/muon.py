"""Owns Muon for a model's matrices, with AdamW for the other parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from zeroshard.errors import UsageError

_MUON = ("momentum", "nesterov", "ns_coefficients", "ns_steps", "adjust_lr_fn")
_ADAMW = ("betas", "eps", "fused")


class MuonWithAdamW(torch.optim.Optimizer):
    """An optimizer that updates matrices with torch.optim.Muon and all other parameters with torch.optim.AdamW.

    Args:
        params: parameters or param groups. `"use_muon": True` or `False` in a group chooses the update for the group.
            Otherwise Muon updates parameters with 2 dimensions. Put embeddings and output heads into a group with
            `"use_muon": False`, since AdamW trains them better.
        lr, weight_decay: the learning rate and the weight decay of both updates.
        muon_lr, adam_lr: the lr of Muon's or AdamW's update, instead of `lr`.
        momentum, nesterov, ns_steps, adjust_lr_fn: as in torch.optim.Muon. `adjust_lr_fn` defaults to
            "match_rms_adamw", so that one lr suits both updates (Liu et al., arXiv:2502.16982, section 2.2).
        betas, eps, fused: as in torch.optim.AdamW, but betas defaults to (0.9, 0.95), and fused to True.

    Raises:
        ValueError: a group with `"use_muon": True` contains a parameter that is not two-dimensional.
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, weight_decay: float = 0.1, *, muon_lr: float | None = None,
        adam_lr: float | None = None, momentum: float = 0.95, nesterov: bool = True, ns_steps: int = 5,
        adjust_lr_fn: str | None = "match_rms_adamw", betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8,
        fused: bool = True,
    ) -> None:  # fmt: skip
        defaults = {
            "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn, "betas": tuple(betas), "fused": fused,
        }  # fmt: skip
        rates = {True: muon_lr, False: adam_lr}
        # torch's Muon has a different default for eps.
        own_options: dict[bool, dict[str, Any]] = {True: {}, False: {"eps": eps}}
        groups: dict[tuple[int, bool], dict[str, Any]] = {}
        for number, item in enumerate(params):
            if isinstance(item, Tensor):
                item = {"params": [item]}  # noqa: PLW2901
            options = {key: value for key, value in item.items() if key not in ("params", "use_muon")}
            members = item["params"]
            members = [members] if isinstance(members, Tensor) else list(members)
            if not options and len(members) == 1:
                number = -1  # noqa: PLW2901  parameters that are not in a group share one group
            for parameter in members:
                use_muon = bool(item.get("use_muon", parameter.ndim == 2))
                start = {"params": [], "use_muon": use_muon, "lr": lr, **own_options[use_muon], **options}
                if rates[use_muon] is not None and "lr" not in options:
                    start["lr"] = rates[use_muon]
                groups.setdefault((number, use_muon), start)["params"].append(parameter)
        super().__init__(list(groups.values()), {**defaults, "lr": lr})
        self._inner: list[torch.optim.Optimizer] = []
        for use_muon, cls, names in ((True, torch.optim.Muon, _MUON), (False, torch.optim.AdamW, _ADAMW)):
            own = [group for group in self.param_groups if group["use_muon"] is use_muon]
            known = {name: value for name, value in (defaults | own_options[use_muon]).items() if name in names}
            if own:
                self._inner.append(cls(own, lr=lr, weight_decay=weight_decay, **known))  # type: ignore[arg-type]
        self._connect()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise UsageError, except in the constructor, which takes all groups and calls this for each."""
        if "_inner" in vars(self):
            raise UsageError(
                "MuonWithAdamW takes no param groups after it is made: they would not be updated. Pass all groups to its "
                "constructor."
            )
        super().add_param_group(param_group)

    def _connect(self) -> None:
        """Share this optimizer's groups and states with the inner optimizers."""
        for inner in self._inner:
            inner.state = self.state
            use_muon = isinstance(inner, torch.optim.Muon)
            inner.param_groups = [group for group in self.param_groups if group["use_muon"] is use_muon]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state that `state_dict` returned, as torch's optimizers do."""
        super().load_state_dict(state_dict)
        self._connect()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update the parameters that have a gradient.

        Args:
            closure: a function that recomputes the loss and the gradients before the update.

        Returns:
            The closure's loss; None without a closure.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for inner in self._inner:
            inner.step()
        return loss
