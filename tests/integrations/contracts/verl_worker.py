"""verl's own training worker, run by test_verl: `verl_worker.py CASES.json OUT.json`.

verl has no platform for CPUs: one is registered here, as verl's plugins do. verl 0.9.1 patches a class of TRL that the newest
TRL lacks, so TRL is hidden from it.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from cases import llama, run_all

find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "trl" else find_spec(name, *rest)
os.environ |= {"VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda"}  # verl's FSDP is registered for accelerators only

sys.path.append(str(Path(sys.prefix, "verl")))

from verl.plugin.platform import PlatformRegistry  # noqa: E402
from verl.plugin.platform.platform_cuda import PlatformCUDA  # noqa: E402

FP32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
NOTHING = dict.fromkeys(
    ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"), lambda: 0
)


@PlatformRegistry.register("cpu")
class PlatformCPU(PlatformCUDA):
    """CPU ranks over gloo."""

    device_name = vendor_name = "cpu"
    device_module = SimpleNamespace(
        **NOTHING, mem_get_info=lambda: (0, 1), empty_cache=lambda: None, is_available=lambda: False,
        get_device_name=lambda *_: "cpu", synchronize=lambda *_: None,
    )  # fmt: skip

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return torch.device("cpu")

    def communication_backend_name(self) -> str:
        return "gloo"


# verl chooses the platform when these are imported.
from tensordict.tensorclass import NonTensorData  # noqa: E402
from verl.trainer.config import CheckpointConfig  # noqa: E402
from verl.utils import tensordict_utils as tu  # noqa: E402
from verl.workers.config import (  # noqa: E402
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    TrainingWorkerConfig,
)
from verl.workers.engine_workers import TrainingWorker  # noqa: E402
from verl.workers.utils.losses import sft_loss  # noqa: E402

from zeroshard.errors import UsageError  # noqa: E402
from zeroshard.integrations.verl import ZeroshardEngineConfig  # noqa: E402


def batch(step: int) -> Any:
    """Four sequences of unequal lengths, others on each rank."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(10 * step + rank)
    lengths = [5 + (step + number + rank) % 4 for number in range(4)]

    def nested(rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    tensors = {
        "input_ids": nested([torch.randint(0, 64, (length,), generator=generator) for length in lengths]),
        "position_ids": nested([torch.arange(length) for length in lengths]),
        "loss_mask": nested([torch.ones(length, dtype=torch.int64) for length in lengths]),
    }
    others = {
        "use_remove_padding": False, "use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2, "temperature": 1.0,
        "global_batch_size": 8, "pad_mode": "no_padding", "pad_token_id": 0,
    }  # fmt: skip
    data = tu.get_tensordict(tensor_dict=tensors, non_tensor_dict=others)
    tu.assign_non_tensor(data, update_lr_scheduler=True, global_token_num=NonTensorData(lengths))
    return data


def worker(case: dict[str, Any], model: Path) -> Any:
    """A worker of verl's FSDP2 engine if there is no stage, and of zeroshard's otherwise."""
    engine: Any = FSDPEngineConfig if case["stage"] is None else ZeroshardEngineConfig
    chosen = {"strategy": "fsdp2"} if case["stage"] is None else {"stage": case["stage"]}
    made = TrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=HFModelConfig(
                path=str(model), load_tokenizer=False, use_remove_padding=False, enable_gradient_checkpointing=False,
                override_config={"attn_implementation": "sdpa"},
            ),
            engine_config=engine(
                mixed_precision=case.get("precision", FP32), use_torch_compile=False, use_dynamic_bsz=False,
                micro_batch_size_per_gpu=2, **chosen, **case.get("engine", {}),
            ),
            optimizer_config=FSDPOptimizerConfig(
                lr=1e-2, total_training_steps=10, lr_scheduler_type="cosine", lr_warmup_steps=2
            ),
            checkpoint_config=CheckpointConfig(save_contents=["model", "optimizer", "extra", *case.get("also", ())]),
        )
    )  # fmt: skip
    made.set_loss_fn(partial(sft_loss, config=None))
    made.reset()
    return made


def run(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train four steps, or the last two after a resume; return each step's figures and the weights handed over."""
    model = folder.parent / "model"
    if not dist.is_initialized():
        dist.init_process_group("gloo")
        if dist.get_rank() == 0:
            llama().save_pretrained(model)
        dist.barrier()
    try:
        made = worker(case, model)
    except UsageError as error:
        return {"error": str(error)}
    first = 0
    if "resume" in case:
        made.load_checkpoint(str(case["resume"]), None, False)
        first = 2
    found: dict[str, Any] = {"loss": [], "grad_norm": [], "lr": []}
    for step in range(first, 4):
        metrics = tu.get(made.train_batch(data=batch(step)), "metrics")
        for name, values in found.items():
            values.append(metrics[name])
        if step == 1:
            made.save_checkpoint(str(folder / "step2"), None, 2, 1)
    weights, _ = made.engine.get_per_tensor_param()
    found["weights"] = {name: one.double().sum().item() for name, one in weights}
    found["files"] = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return found


if __name__ == "__main__":
    run_all(run)
