"""Owns the values that an engine saves beside model states: counters, scheduler, loss scaler, loader, client state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zeroshard.optim.loss_scaler import DynamicLossScaler, LossScaler

COUNTERS = ("global_steps", "global_samples", "skipped_steps")


@dataclass(frozen=True)
class Resumable:
    """The objects whose state a checkpoint carries. None, and objects without a `state_dict`, are left out."""

    lr_scheduler: Any
    loss_scaler: LossScaler
    loader: Any

    def values(self, counters: Mapping[str, int], client_state: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the values to save."""
        values = {
            "engine": dict(counters),
            "lr_scheduler": None,
            "loss_scaler": dict(vars(self.loss_scaler)),
            "data": None,
        }
        if hasattr(self.lr_scheduler, "state_dict"):
            values["lr_scheduler"] = self.lr_scheduler.state_dict()
        if hasattr(self.loader, "state_dict"):
            values["data"] = self.loader.state_dict()
        return {**values, "client_state": dict(client_state or {})}

    def load(self, values: Mapping[str, Any], *, lr_scheduler: bool, loss_scaler: bool) -> None:
        """Restore the state from `values`."""
        if lr_scheduler and values.get("lr_scheduler") and self.lr_scheduler is not None:
            self.lr_scheduler.load_state_dict(values["lr_scheduler"])
        if loss_scaler and isinstance(self.loss_scaler, DynamicLossScaler):
            self.loss_scaler.load(values.get("loss_scaler", {}))
        if values.get("data") and hasattr(self.loader, "load_state_dict"):
            self.loader.load_state_dict(values["data"])
