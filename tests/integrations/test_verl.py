"""verl's training worker on zeroshard's engines: losses are those of verl's own FSDP2 engine, and checkpoints resume."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from test_trainer_contract import run

SCRIPT = "verl_worker.py"
INSTALLED = Path(sys.prefix, "verl")
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not INSTALLED.is_dir(), reason=f"verl is not in {INSTALLED}: `make test-rest` installs it"),
]


def case(name: str, stage: int | None = None, **values: Any) -> dict[str, Any]:
    """One training; its name is a folder. Without a stage, on verl's own FSDP2 engine."""
    return {"name": name, "stage": stage, "throw_away": False, **values}


def test_sft(tmp_path: Path) -> None:
    stages = (1, 2, 3)
    resumed = [case(f"again{stage}", stage, resume=str(tmp_path / f"stage{stage}" / "step2")) for stage in stages]
    cases = [case("fsdp2"), *(case(f"stage{stage}", stage, also=["hf_model"]) for stage in stages), *resumed]
    fsdp2, *found = run(2, SCRIPT, cases, tmp_path)
    for stage, one, again in zip(stages, found[:3], found[3:], strict=True):
        for what in ("loss", "grad_norm", "lr"):
            assert one[what] == pytest.approx(fsdp2[what], abs=1e-6, rel=0), (stage, what)
            assert again[what] == one[what][2:], (stage, what)
        assert one["weights"] == pytest.approx(fsdp2["weights"], abs=1e-5, rel=0), stage
        assert again["weights"] == one["weights"], stage
        assert {"step2/zeroshard/manifest.json", "step2/huggingface/model.safetensors"} < set(one["files"])


def test_bf16_and_refusals(tmp_path: Path) -> None:
    """verl's default: it computes in bf16, with fp32 master weights."""
    cases = [case(str(stage), stage, precision=None) for stage in (None, 2, 3)]
    cases += [case("hybrid", 3, engine={"fsdp_size": 1}), case("fp16", 3, precision={"param_dtype": "fp16"})]
    fsdp2, *found, hybrid, fp16 = run(2, SCRIPT, cases, tmp_path)
    assert "Set engine.fsdp_size=-1" in hybrid["error"] and "Use bf16 or fp32" in fp16["error"]
    for one in found:
        for what in ("loss", "grad_norm"):
            assert one[what] == pytest.approx(fsdp2[what], abs=2e-2), what
