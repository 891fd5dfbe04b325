"""Owns the benchmark of lossy communication: final losses, compared with those of other seeds, and bytes sent.

A small GPT learns the text of examples/train_gpt.py on four ranks of this machine, where two ranks count as a host.
It trains with exact communication and six seeds, then with lossy communication and the first seed. The loss is over
the same held-out windows, in nats per byte. Bytes are those that one rank sends to others in a step, by purpose.

    python benchmarks/lossy_wires.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from figures import MIB, RESULTS, machine, save

import zeroshard
from zeroshard import Policy, Wire
from zeroshard.testing import run_ranks
from zeroshard.testing.gpt import GPT, GPTConfig

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from train_gpt import STDLIB, read_text

RANKS, HOST, BATCH, SEEDS = 4, 2, 4, range(6)
CONFIG = GPTConfig(layers=4, width=128, heads=4, context=64)
WIRES = {
    "exact": Wire(),
    "gradients int8": Wire(gradients="int8"),
    "gradients int4": Wire(gradients="int4"),
}


def train(rank: int, wire: Wire, seed: int, steps: int) -> tuple[float, dict[str, float]]:
    """Return the final loss, and the bytes that this rank sent in a step."""
    text = read_text(STDLIB)
    cut = len(text) - len(text) // 20

    def windows(first: int, low: int, high: int) -> tuple[torch.Tensor, torch.Tensor]:
        found = []
        for number in range(first, first + BATCH):
            random = torch.Generator().manual_seed(number)
            start = int(torch.randint(low, high - CONFIG.context - 1, (), generator=random))
            found.append(text[start : start + CONFIG.context + 1].long())
        data = torch.stack(found)
        return data[:, :-1], data[:, 1:]

    torch.manual_seed(seed)
    model = GPT(CONFIG)
    adamw = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    sharded = zeroshard.shard(model, adamw, Policy.stage(3, within=HOST, wire=wire))
    sharded.comm_report()
    for step in range(steps):
        for group in adamw.param_groups:
            group["lr"] = 2e-3 * min((step + 1) / 20, 2 * (1 - step / steps), 1.0)
        model(*windows((step * RANKS + rank) * BATCH, 0, cut)).backward()
        sharded.clip_grad_norm_(1.0)
        sharded.optimizer.step()
        sharded.optimizer.zero_grad()
    sent = {kind: nbytes / steps for kind, nbytes in sharded.comm_report().items()}
    with torch.no_grad():
        losses = [model(*windows((number * RANKS + rank) * BATCH, cut, len(text))) for number in range(16)]
    loss = float(sharded.sum_over_ranks(torch.stack(losses).double().mean().view(1))) / RANKS
    sharded.remove()
    return loss, sent


def main(steps: Annotated[int, typer.Option(help="the optimizer steps of each run.")] = 100) -> None:
    """Train with each wire and print the results."""
    rows = []
    for name, wire in WIRES.items():
        for seed in SEEDS if name == "exact" else SEEDS[:1]:
            loss, sent = run_ranks(train, RANKS, wire, seed, steps, timeout=3600)[0]
            rows.append({"wire": name, "seed": seed, "loss": loss, "sent": sent})
            told = ", ".join(
                f"{kind} {nbytes / MIB:.3f}" for kind, nbytes in sorted(sent.items()) if "exchange" not in kind
            )
            print(f"{name}, seed {seed}: loss {loss:.4f}; MiB a step: {told}", flush=True)
    save(
        RESULTS / "lossy_wires.json",
        {"machine": machine(), "steps": steps, "ranks": RANKS, "within": HOST, "runs": rows},
    )


if __name__ == "__main__":
    typer.run(main)
