"""Owns what an engine saves beside model states: counters, scheduler, loss scaler, loader, client state. Called by engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zeroshard.optim.loss_scaler import DynamicLossScaler, LossScaler

COUNTERS = ("global_steps", "global_samples", "skipped_steps")


@dataclass(frozen=True)
class Resumable:
    """What has a position of its own and goes on there after a load; None, and what has no `state_dict`, is left out."""

    lr_scheduler: Any
    loss_scaler: LossScaler
    loader: Any

    def values(self, counters: Mapping[str, int], client_state: Mapping[str, Any] | None) -> dict[str, Any]:
        """What is saved."""
        scheduler, loader = self.lr_scheduler, self.loader
        return {
            "engine": dict(counters),
            "lr_scheduler": scheduler.state_dict() if hasattr(scheduler, "state_dict") else None,
            "loss_scaler": dict(vars(self.loss_scaler)),
            "data": loader.state_dict() if hasattr(loader, "state_dict") else None,
            "client_state": dict(client_state or {}),
        }

    def load(self, values: Mapping[str, Any], *, lr_scheduler: bool, loss_scaler: bool) -> None:
        """Go on where `values` were saved."""
        if lr_scheduler and values.get("lr_scheduler") and self.lr_scheduler is not None:
            self.lr_scheduler.load_state_dict(values["lr_scheduler"])
        if loss_scaler and isinstance(self.loss_scaler, DynamicLossScaler):
            self.loss_scaler.load(values.get("loss_scaler", {}))
        if values.get("data") and hasattr(self.loader, "load_state_dict"):
            self.loader.load_state_dict(values["data"])
