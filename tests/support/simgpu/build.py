"""Owns the build of the device: one call of the C++ compiler, whose result is kept for this source and this torch."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

import torch

NAME = "_simgpu"
SOURCES = Path(__file__).parent / "csrc"
CACHE = Path(__file__).parents[3] / ".cache" / "simgpu"
FLAGS = ("-O1", "-w", "-fPIC", "-shared", "-std=c++20")
TORCH = Path(torch.__file__).parent


def compiler() -> str | None:
    """Return the path of the C++ compiler, or None."""
    return next((path for path in map(shutil.which, [os.environ.get("CXX") or "g++", "g++", "clang++"]) if path), None)


def why_not() -> str | None:
    """Return the reason why the device cannot be built on this machine, or None."""
    if torch.__version__.startswith("2.11."):
        return (
            "the pretend accelerator needs a later torch: 2.11 frees results of operators with two `out=` tensors twice"
        )
    if compiler() is None:
        return "no C++ compiler (g++ or clang++) to build the pretend accelerator with"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return "no Python.h to build the pretend accelerator with"
    if not (TORCH / "include" / "ATen" / "ATen.h").exists():
        return "torch has no C++ headers to build the pretend accelerator with"
    return None


def build() -> Path:
    """Return the library's path. Build it if it does not exist yet.

    Raises:
        RuntimeError: the device does not compile. The message has the compiler's output.
    """
    sources = sorted(SOURCES.iterdir())
    digest = hashlib.sha256(repr([torch.__version__, sysconfig.get_config_var("SOABI"), FLAGS]).encode())
    for source in sources:
        digest.update(source.read_bytes())
    folder = CACHE / digest.hexdigest()[:16]
    library = folder / f"{NAME}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock, tempfile.TemporaryDirectory(dir=folder) as unfinished:
        fcntl.flock(lock, fcntl.LOCK_EX)  # parallel test processes build only once
        if library.exists():
            return library
        made = Path(unfinished) / library.name
        done = subprocess.run(_command(made), capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"the pretend accelerator does not compile:\n{done.stderr[-4000:]}")
        made.replace(library)
    return library


def _command(library: Path) -> list[str]:
    includes = [TORCH / "include", TORCH / "include/torch/csrc/api/include", Path(sysconfig.get_path("include"))]
    lib = TORCH / "lib"
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    return [
        str(compiler()), *FLAGS, abi, *(f"-I{path}" for path in includes), str(SOURCES / "simgpu.cpp"), "-o", str(library),
        f"-L{lib}", f"-Wl,-rpath,{lib}", "-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python",
    ]  # fmt: skip
