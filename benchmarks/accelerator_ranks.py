"""Owns the ranks that share one accelerator over gloo and train every policy in turn. accelerator_parts.py starts them."""

from __future__ import annotations

from stand_ins import stand_in

stand_in()

import math  # noqa: E402
import multiprocessing  # noqa: E402
import tempfile  # noqa: E402
import traceback  # noqa: E402
from datetime import timedelta  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from accelerator_setting import Setting  # noqa: E402
from accelerator_systems import sharded, small_batch, small_model  # noqa: E402

from zeroshard import Place, Policy  # noqa: E402
from zeroshard.model.memory import kept_count  # noqa: E402

STEPS = 4


def be_deterministic() -> None:
    """Use torch's deterministic kernels, since bits are compared.

    cuBLAS also needs CUBLAS_WORKSPACE_CONFIG before the device's first use; accelerator.py sets it.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Filling memory would launch kernels that training does not need.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined, unused-ignore]


def policies(folder: str) -> dict[str, Policy]:
    """Return the policies by name. All are compared with a first run at stage 0; a second one shows the kernels' noise."""
    found = {f"stage {number}": Policy.stage(number) for number in range(4)}
    for number, optimizer, parameters in (
        (1, Place.CPU, None), (2, Place.CPU, None), (3, Place.CPU, None), (2, None, Place.CPU), (3, None, Place.CPU),
        (3, Place.CPU, Place.CPU), (3, Place.DISK, Place.DISK),
    ):  # fmt: skip
        where = [f"optimizer on {optimizer}" if optimizer else "", f"parameters on {parameters}" if parameters else ""]
        name = ", ".join([f"stage {number}", *filter(None, where)])
        found[name] = Policy.stage(number).offloaded(optimizer=optimizer, parameters=parameters, path=folder)
    return found


def train(setting: Setting, policy: Policy, dtype: torch.dtype, rank: int, **options: Any) -> tuple[torch.Tensor, int]:
    """Return all parameters [n] after STEPS steps, in CPU memory, and how often memory could not be freed."""
    model = small_model(setting)
    one = sharded(model, policy, dtype, bucket_numel=1 << 18, **options)
    for number in range(STEPS):
        data = small_batch(setting, 100 * number + rank)
        model(data[:, :-1], data[:, 1:]).backward()
        one.clip_grad_norm_(1.0)
        one.optimizer.step()
        one.optimizer.zero_grad()
    kept = kept_count(one._schedule.units)
    one.remove()
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().float().cpu(), kept


def compare(one: torch.Tensor, reference: torch.Tensor, *, exact: bool) -> str:
    """Return the result of a comparison: "equal", or "close" or "WRONG" with the largest difference."""
    if torch.equal(one, reference):
        return "equal"
    difference = float((one - reference).abs().max())
    is_close = not exact and difference < 1e-2
    return f"{'close' if is_close else 'WRONG'}: differs by {difference:.1e}"


def _rank(rank: int, world: int, store: str, folder: str, rehearse: bool, queue: Any) -> None:
    try:
        be_deterministic()
        setting = Setting.make(Path(), math.inf, rehearse=rehearse)
        gloo = f"cpu:gloo,{setting.device.type}:gloo"
        dist.init_process_group(
            gloo, init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=60)
        )
        for dtype in (torch.float32, torch.bfloat16):
            reference, _ = train(setting, Policy.stage(0), dtype, rank)
            repeats = True
            for name, policy in policies(folder).items():
                trained, _ = train(setting, policy, dtype, rank)
                if name == "stage 0":
                    repeats = torch.equal(trained, reference)
                if rank == 0:
                    exact = repeats and "optimizer on" not in name
                    queue.put((f"{name}, {dtype}", compare(trained, reference, exact=exact)))
        dist.barrier()
        if rank == 0:
            queue.put(None)
    except BaseException:
        queue.put((f"rank {rank}", "WRONG: " + traceback.format_exc().strip().splitlines()[-1]))
        queue.put(None)
        raise


def run(world: int, *, rehearse: bool, tell: Any, limit: float) -> bool:
    """Train every policy on `world` processes and return whether all results were right."""
    context, is_right = multiprocessing.get_context("spawn"), True
    with tempfile.TemporaryDirectory() as folder:
        queue = context.Queue()
        arguments = (world, str(Path(folder) / "store"), folder, rehearse, queue)
        ranks = [context.Process(target=_rank, args=(rank, *arguments), daemon=True) for rank in range(world)]
        for rank in ranks:
            rank.start()
        try:
            while (found := queue.get(timeout=limit)) is not None:
                tell(what=f"{world} processes on one device over gloo: {found[0]}", result=found[1])
                is_right &= not found[1].startswith("WRONG")
        except Exception as error:
            tell(
                what=f"{world} processes on one device over gloo",
                result=f"WRONG: nothing for {limit:.0f} s ({error!r})",
            )
            is_right = False
        for rank in ranks:
            rank.join(5)
            rank.kill()
    return is_right
