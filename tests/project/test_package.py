"""The wheel and the sdist contain the right files, and work where nothing else is installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest

import zeroshard

ROOT = Path(__file__).parents[2]


def test_citation_and_changelog_name_this_version() -> None:
    assert f"\nversion: {zeroshard.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    heads = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert heads[0] == "Unreleased" and heads[1] == zeroshard.__version__
    for readme in ("README.md", "README.zh-CN.md"):
        assert f" {zeroshard.__version__}" in (ROOT / readme).read_text(encoding="utf-8")
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", head) for head in heads[1:])


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", str(out)], cwd=ROOT, check=True, capture_output=True
    )
    return out


def wheel_of(folder: Path) -> Path:
    return next(folder.glob("*.whl"))


@pytest.mark.full
def test_what_is_in_the_wheel(built: Path) -> None:
    info = f"zeroshard-{zeroshard.__version__}.dist-info"
    with zipfile.ZipFile(wheel_of(built)) as wheel:
        names = set(wheel.namelist())
        told = HeaderParser().parsestr(wheel.read(f"{info}/METADATA").decode())
    tracked = subprocess.run(["git", "ls-files", "zeroshard"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert set(tracked.stdout.split()) <= names, "a file of the package is missing"
    assert {name.partition("/")[0] for name in names} == {"zeroshard", info}
    assert told["Name"] == "zeroshard" and told["License-Expression"] == "Apache-2.0"
    assert told["Author"] and told["Keywords"] and told["Description-Content-Type"] == "text/markdown"
    text = str(told.get_payload())
    assert "zeroshard.shard(model, optimizer, 2)" in text and "has run on one GPU" in text
    assert not re.findall(r"\]\((?!https?://)|!\[|<!--", text), "they lead nowhere outside of the repository"
    offered = {line.partition(";")[0].split(">=")[0].split("[")[0] for line in told.get_all("Requires-Dist") or ()}
    assert {"trackio", "mlflow", "tensorboard", "wandb", "comet-ml"} <= {name.replace("_", "-") for name in offered}


@pytest.mark.full
def test_an_index_would_take_both(built: Path) -> None:
    files = map(str, built.iterdir())
    done = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", *files], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and done.stdout.count("PASSED") == 2, done.stdout + done.stderr


@pytest.mark.full
def test_the_wheel_works_in_an_empty_folder(built: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel_of(built)) as wheel:
        wheel.extractall(tmp_path / "installed")
    (tmp_path / "empty").mkdir()
    environment = dict(os.environ, PYTHONPATH=str(tmp_path / "installed"), OMP_NUM_THREADS="1")
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "support" / "smoke.py"), str(ROOT)], cwd=tmp_path / "empty", env=environment,
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all is there" in done.stdout


@pytest.mark.full
def test_the_sdist_makes_the_same_wheel(built: Path, tmp_path: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
        sdist.extractall(tmp_path, filter="data")
    pages = {"README.md", "CHANGELOG.md", "CITATION.cff", "SECURITY.md", "LICENSE", "docs/design.md"}
    assert pages | {"tests/support/smoke.py"} <= names
    source = next(tmp_path.iterdir())
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "again")]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    with zipfile.ZipFile(wheel_of(built)) as one, zipfile.ZipFile(wheel_of(tmp_path / "again")) as other:
        assert set(one.namelist()) == set(other.namelist())
