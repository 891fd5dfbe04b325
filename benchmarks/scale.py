"""Measures the bookkeeping of Llama 70B with AdamW on thousands of ranks, on one of them: of a step and of a checkpoint.

    python benchmarks/scale.py [64 256 1024 16384]

Rank 0 runs the real code of a step's agreements and of a save, but writes no tensors. Stand-ins give the messages of the other
ranks. Times are of the CPU: of all that rank 0 does in a save, without the network and the disk, and of reading the manifest
(median of 5).
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from math import prod
from pathlib import Path
from unittest import mock

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
import torch
from one_of_many import REPORTS, Model, OneOfMany, Training, llama_70b  # type: ignore[import-not-found]

from zeroshard.checkpoint import saving
from zeroshard.checkpoint.manifest import MANIFEST, FileRecord, read_manifest
from zeroshard.checkpoint.node_local import Hosts
from zeroshard.checkpoint.safetensors_file import Source
from zeroshard.core.users_optimizer import DIGEST_NBYTES


def no_file(path: Path, sources: Mapping[str, Source], *_: object) -> tuple[FileRecord, dict[str, int]]:
    """Return the record of a file that is as large as these tensors, without writing them."""
    offsets = {}
    nbytes = 1 << 12
    for name, source in sources.items():
        offsets[name] = nbytes
        nbytes += prod(source.shape) * source.dtype.itemsize
    path.touch()
    return FileRecord(name=path.name, nbytes=nbytes, checksum=1), offsets


def memory() -> float:
    """Return the largest memory of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def step(model: Model, ranks: int) -> dict[str, float]:
    """Agree as a step does, on the norm and the flags, and as torch's clipping does before it, on all parameters' norms."""
    transport = Training(0, ranks)
    flags = bytes(len(model.shapes))
    transport.sum_values(torch.zeros((), dtype=torch.float64), bytes(DIGEST_NBYTES) + flags, "the norm and the flags")
    plain = transport.calls["sent"], transport.sent["exchange"]
    transport.agree(flags + flags, "the norms", [0.0] * len(flags))
    return {
        "a step's messages": plain[0],
        "a step's messages, kB": round(plain[1] / 1e3, 1),
        "torch's clipping, messages": transport.calls["sent"] - plain[0],
        "torch's clipping, kB": round((transport.sent["exchange"] - plain[1]) / 1e3, 1),
    }


def measure(ranks: int) -> dict[str, float]:
    """Save and read one checkpoint, on rank 0 of so many."""
    model = Model(llama_70b(), ranks)
    own = model.part(0)
    make = model.completed_by(own)
    distances = [1 << power for power in range((ranks - 1).bit_length())]
    messages = {peer: make(peer, REPORTS) for peer in distances}
    control = OneOfMany(0, ranks, lambda peer, label: messages[peer] if label == REPORTS else b"", {})
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(saving, "write_file", no_file),
        mock.patch.object(FileRecord, "has_its_size", lambda *_: True),
    ):
        to = saving.Destination(Path(folder), "step100", Hosts([list(range(ranks))]))
        before, start = memory(), time.process_time()
        saving.write_checkpoint(model.outline, own, to, control)
        save, grown = time.process_time() - start, memory() - before
        reads = []
        for _ in range(5):
            start = time.process_time()
            read_manifest(to.path)
            reads.append(time.process_time() - start)
        return {
            "ranks": ranks,
            **step(model, ranks),
            "manifest, MB": round((to.path / MANIFEST).stat().st_size / 1e6, 2),
            "received by rank 0, messages": control.calls["received"],
            "received by rank 0, MB": round(control.received["transfer"] / 1e6, 2),
            "rank 0's CPU, s": round(save, 2),
            "rank 0's memory, MiB": round(grown),
            "a reader's CPU, s": round(statistics.median(reads), 3),
        }


if __name__ == "__main__":
    if len(sys.argv) == 2:
        print(json.dumps(measure(int(sys.argv[1]))))
    else:
        for number in sys.argv[1:] or [
            "64",
            "256",
            "1024",
            "16384",
        ]:  # each in a process of its own, with its own memory
            subprocess.run([sys.executable, __file__, number], check=True)
