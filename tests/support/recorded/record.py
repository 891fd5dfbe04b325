"""Records DeepSpeed's learning rates, loss scales, and the optimizers that it makes from configs.

They are the references of tests/optim/test_schedules.py, tests/engine/test_fp16.py and tests/optim/test_optimizers.py.

DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed==0.19.8
python tests/support/recorded/record.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

HERE = Path(__file__).parent
STEPS = 2000
SCHEDULES = [
    ("WarmupLR", {"warmup_max_lr": 1e-3, "warmup_num_steps": 100}),
    ("WarmupLR", {"warmup_min_lr": 1e-5, "warmup_num_steps": 700, "warmup_type": "linear"}),
    ("WarmupLR", {"warmup_min_lr": [0.0, 1e-6], "warmup_max_lr": [1e-3, 2e-3], "warmup_num_steps": 1}),
    ("WarmupDecayLR", {"total_num_steps": 1500, "warmup_num_steps": 100}),
    ("WarmupDecayLR", {"total_num_steps": 300, "warmup_min_lr": 1e-4, "warmup_num_steps": 299, "warmup_type": "linear"}),
    ("WarmupDecayLR", {"total_num_steps": 50, "warmup_max_lr": 3e-4, "warmup_num_steps": 200}),
    ("WarmupCosineLR", {"total_num_steps": 1800, "warmup_num_steps": 200}),
    ("WarmupCosineLR", {"total_num_steps": 900, "warmup_min_ratio": 0.1, "warmup_num_steps": 50, "cos_min_ratio": 0.05,
                        "warmup_type": "linear"}),
    ("LRRangeTest", {"lr_range_test_min_lr": 1e-4, "lr_range_test_step_size": 130, "lr_range_test_step_rate": 2.5}),
    ("LRRangeTest", {"lr_range_test_step_size": 77, "lr_range_test_staircase": True}),
    ("OneCycle", {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-2, "cycle_first_step_size": 300, "decay_step_size": 40,
                  "decay_lr_rate": 0.3, "decay_mom_rate": 0.01}),
    ("OneCycle", {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-2, "cycle_first_step_size": 210, "cycle_second_step_size": 90,
                  "cycle_first_stair_count": 7, "cycle_second_stair_count": 3, "decay_step_size": 10}),
    ("OneCycle", {"cycle_min_lr": [1e-4, 2e-4], "cycle_max_lr": [1e-2, 3e-2], "cycle_first_step_size": 700,
                  "cycle_first_stair_count": 5, "cycle_min_mom": 0.85, "cycle_max_mom": 0.99}),
    ("OneCycle", {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-2, "cycle_first_step_size": 500, "cycle_second_step_size": 0,
                  "cycle_momentum": False}),
]  # fmt: skip
SCALERS = [
    {"init_scale": 2.0**16, "scale_window": 7, "delayed_shift": 2, "min_scale": 1.0, "consecutive_hysteresis": False},
    {"init_scale": 2.0**30, "scale_window": 4, "delayed_shift": 3, "min_scale": 0.25, "consecutive_hysteresis": True},
    {"init_scale": 2.0**40, "scale_window": 1, "delayed_shift": 1, "min_scale": 1.0, "consecutive_hysteresis": False},
    {"init_scale": 2.0**60, "scale_window": 3, "delayed_shift": 4, "min_scale": 2.0, "consecutive_hysteresis": False},
]


def two_groups() -> torch.optim.Optimizer:
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    return torch.optim.Adam([{"params": [parameters[0]], "lr": 0.01}, {"params": [parameters[1]], "lr": 0.02}])


def schedules() -> None:
    from deepspeed.runtime import lr_schedules

    recorded = {}
    for number, (name, params) in enumerate(SCHEDULES):
        optimizer = two_groups()
        schedule = getattr(lr_schedules, name)(optimizer, **params)
        rows = []
        for step in range(STEPS + 1):
            if step:
                schedule.step()
            rows.append([value for g in optimizer.param_groups for value in (g["lr"], *g["betas"])])
        recorded[str(number)] = np.array(rows, dtype=np.float64)
    np.savez_compressed(HERE / "schedules.npz", grid=json.dumps(SCHEDULES), **recorded)


def scalers() -> None:
    from unittest import mock

    from deepspeed.runtime.fp16 import loss_scaler

    generator = torch.Generator().manual_seed(0)
    recorded = {}
    for number, options in enumerate(SCALERS):
        for pattern in range(5):
            scaler = loss_scaler.DynamicLossScaler(**options, raise_error_at_min_scale=True, dtype=torch.half)
            # The rates of overflows differ, so that the scale both rises and falls.
            rate = (0.02, 0.1, 0.2, 0.5, 0.9)[pattern]
            overflows = torch.rand(400, generator=generator) < rate
            path = []
            for overflow in overflows.tolist():
                try:
                    with mock.patch.object(loss_scaler.dist, "get_rank", return_value=1):  # it only asks who logs
                        scaler.update_scale(overflow)
                except Exception as error:
                    assert "already at minimum" in str(error)
                    path.append(-1.0)
                    break
                path.append(scaler.cur_scale)
            recorded[f"{number}.{pattern}.overflows"] = overflows[: len(path)].numpy()
            recorded[f"{number}.{pattern}.scales"] = np.array(path)
    np.savez_compressed(HERE / "scalers.npz", grid=json.dumps(SCALERS), **recorded)


OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("Adam", {}),
    ("Adam", {"adam_w_mode": False}),
    ("Adam", {"torch_adam": True}),
    ("Adam", {"torch_adam": True, "adam_w_mode": False}),
    ("AdamW", {}),
    ("AdamW", {"adam_w_mode": False}),
    ("AdamW", {"torch_adam": True}),
    ("AdamW", {"lr": 3e-4, "betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.1}),
    ("Lion", {}),
    ("Lion", {"lr": 1e-4, "weight_decay": 0.1}),
    ("Adagrad", {}),
    ("Muon", {}),
    ("Muon", {"lr": 1e-2}),
    ("Muon", {"muon_lr": 1e-2, "weight_decay": 0.1}),
    ("Muon", {"lr": 1e-2, "adam_lr": 1e-3, "betas": [0.8, 0.9], "eps": 1e-8, "momentum": 0.9}),
    ("Lamb", {}),
    ("SGD", {}),
    ("SGD", {"lr": 0.1, "momentum": 0.9}),
    ("RMSprop", {}),
    ("Adadelta", {}),
    ("Adamax", {}),
    ("NAdam", {}),
    ("RAdam", {}),
    ("ASGD", {}),
    ("Rprop", {}),
    ("Adafactor", {}),
    ("OneBitAdam", {}),
    ("OneBitLamb", {}),
    ("ZeroOneAdam", {}),
]
"""The (type, params) of optimizer blocks."""


def optimizers() -> None:
    """Record an engine's optimizer for each block, on the accelerator and offloaded. Its kernels have no defaults, so skip them."""
    from unittest import mock

    import deepspeed
    from deepspeed.ops import op_builder
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS
    from deepspeed.runtime.engine import DeepSpeedEngine

    builders = [
        value for name, value in vars(op_builder).items() if name.endswith("Builder") and hasattr(value, "load")
    ]
    for builder in builders:
        builder.load = lambda *_, **__: mock.MagicMock()
    recorded = []
    for name, params in OPTIMIZERS:
        for offloaded in (False, True):
            engine = mock.Mock(zenflow=False, has_moe_layers=False)
            engine.optimizer_params.return_value = dict(params)
            engine.optimizer_name.return_value = name.lower() if name.lower() in DEEPSPEED_OPTIMIZERS else name
            engine.zero_use_cpu_optimizer.return_value = offloaded
            engine.bf16_optimizer_states.return_value = False
            engine.get_optimizer_configuration = DeepSpeedEngine.get_optimizer_configuration.__get__(engine)
            engine._muon_param_groups = DeepSpeedEngine._muon_param_groups
            matrix, vector = (torch.nn.Parameter(torch.zeros(shape)) for shape in ((2, 2), (2,)))
            matrix.use_muon, vector.use_muon = True, False
            try:
                made = DeepSpeedEngine._configure_basic_optimizer(engine, [matrix, vector])
            except AttributeError as error:
                assert f"no attribute '{name}'" in str(error)
                recorded.append({"type": name, "params": params, "offloaded": offloaded, "class": None})
                continue
            groups = [
                {
                    key: value
                    for key, value in group.items()
                    if isinstance(value, int | float | list | tuple) and key != "params"
                }
                for group in made.param_groups
            ]
            recorded.append(
                {
                    "type": name, "params": params, "offloaded": offloaded, "class": type(made).__name__,
                    "decays_apart": bool(getattr(made, "adam_w_mode", isinstance(made, torch.optim.AdamW))), "groups": groups,
                }
            )  # fmt: skip
    lines = ",\n".join(json.dumps(record) for record in recorded)
    (HERE / "optimizers.json").write_text(f'{{"deepspeed": "{deepspeed.__version__}", "made": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    schedules()
    scalers()
    optimizers()
