"""Owns `zeroshard run` and `zeroshard shim-path`, which let stock training scripts import zeroshard as DeepSpeed.

`run` is torchrun with the shim on the path. It reports a failed rank in one line, where torchrun prints 40.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from zeroshard.errors import UsageError
from zeroshard.integrations.shim_path import PYTHONPATH, python_path, real_deepspeed, shim_path

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
_MARK = "ZEROSHARD_RUN_MARK"  # a copy of the name in launch.py, whose import would load torch
_CONFIG_OPTIONS = ("--deepspeed", "--deepspeed_config", "--deepspeed-config")
_TRUE = ("true", "1", "yes", "y", "on", "t")
_CPU_ADVICE = 'leave it out. Without an accelerator, training uses the CPU; CUDA_VISIBLE_DEVICES="" hides accelerators.'
_CPU_OPTIONS = ("--use_cpu", "--use-cpu", "--no_cuda", "--no-cuda")


def print_shim_path() -> None:
    """Print the folder with zeroshard's package `deepspeed`, for PYTHONPATH."""
    print(shim_path())


def run(context: typer.Context) -> None:
    """Start a training script on several ranks, with zeroshard instead of DeepSpeed.

    zeroshard run [--nproc-per-node 2] train.py ARGUMENTS...

    zeroshard run [--nproc-per-node 2] -m package.module ARGUMENTS...

    Options before the script go to torchrun, such as --nnodes, --node-rank or --master-addr; `torchrun --help` lists
    them. Without --nproc-per-node, one process starts for each accelerator of this machine, or one process if it has
    none.
    """
    if not context.args:
        raise UsageError("there is no script to run. Call zeroshard run [--nproc-per-node 2] train.py ARGUMENTS...")
    options = _options(context.args)
    _check_script(options)
    _check_meeting_point(options)
    _check_arguments(options.training_script_args, has_accelerator=options.accelerators > 0)
    if options.nproc_per_node == "1" and options.is_one_by_default:
        _say("starts one process. --nproc-per-node 2 starts two.")
    os.environ[PYTHONPATH] = python_path(os.environ)
    if int(options.nproc_per_node) > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun does so too, but prints five lines about it
    if options.max_restarts or len(set(options.nnodes.split(":"))) > 1:  # a host that joins restarts the ranks, too
        # Restarted ranks get a separate store. `launch.trap_of_restarts` explains why.
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
        if options.nnodes in ("1", "1:1") and options.rdzv_backend == "static":
            options.standalone = True
    beside = real_deepspeed()
    if beside is not None:
        _say(f"DeepSpeed is installed ({beside}); this run imports zeroshard in its place.")
    with tempfile.TemporaryDirectory(prefix="zeroshard-run-") as folder:
        mark = Path(folder, "used")
        os.environ[_MARK] = str(mark)
        _launch(options)
        if not mark.exists():
            _say(
                "warning: the script ended without using zeroshard. Check that it passes a config "
                "to its trainer (deepspeed=...). Accelerator(cpu=True) turns DeepSpeed off; it is not needed on a CPU."
            )


# ---------------------------------------------------------------------- options


def _options(arguments: Sequence[str]) -> Any:
    """Parse torchrun's options and resolve the number of processes."""
    import torch
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    parser.allow_abbrev = False  # else argparse also takes the script's own --log for one of torchrun's options
    setattr(parser, "error", _refuse)  # noqa: B010  argparse would print two screens of usage first
    if "PET_NPROC_PER_NODE" not in os.environ:
        parser.set_defaults(nproc_per_node=None)
    options = parser.parse_args(list(arguments))
    options.is_one_by_default = options.nproc_per_node is None
    options.accelerators = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    options.nproc_per_node = str(_processes(options.nproc_per_node, options.accelerators))
    return options


def _refuse(message: str) -> NoReturn:
    raise UsageError(f"zeroshard run: {message.replace('training_script', 'the script')} (call zeroshard run --help)")


def _processes(given: str | None, count: int) -> int:
    if given is None:
        return max(count, 1)
    if given in ("gpu", "xpu") and not count:
        raise UsageError(f"--nproc-per-node {given}: torch sees no accelerator here. Pass a number of processes.")
    if given in ("auto", "gpu", "xpu") and count:
        return count
    if given in ("auto", "cpu"):
        return os.cpu_count() or 1
    if not re.fullmatch("[0-9]{1,9}", given) or int(given) < 1:
        raise UsageError(
            f"--nproc-per-node: pass a number of processes of at least 1, or auto, gpu or cpu, not {given!r}."
        )
    if count and int(given) > count:
        raise UsageError(
            f"--nproc-per-node {given}: this machine has {count} accelerator(s), and each process needs its own. "
            "Pass a smaller number."
        )
    return int(given)


def _check_script(options: argparse.Namespace) -> None:
    script = options.training_script
    if options.module or options.no_python or options.run_path:
        return
    if not Path(script).is_file():
        what = "no file"
        if Path(script).is_dir():
            what = "a folder"
        raise UsageError(f"there is {what} at {script}: pass the path of a script, or -m and a module.")


def _check_meeting_point(options: argparse.Namespace) -> None:
    if not re.fullmatch("[1-9][0-9]{0,5}(:[1-9][0-9]{0,5})?", options.nnodes):
        raise UsageError(f"--nnodes: pass a number of machines, or MIN:MAX for a range, not {options.nnodes!r}.")
    least, _, most = options.nnodes.partition(":")
    is_met = options.standalone or (options.rdzv_backend != "static" and options.rdzv_endpoint)
    if most not in ("", least) and not is_met:
        raise UsageError(
            f"--nnodes {options.nnodes}: a changing number of machines needs a rendezvous address. "
            "Pass --rdzv-backend c10d --rdzv-endpoint FIRST_HOST:29400 on each machine."
        )


def _check_arguments(arguments: Sequence[str], *, has_accelerator: bool) -> None:
    """Raise an error for a missing config, and for settings that ask for the CPU: the script might report neither."""
    pairs = list(_pairs(arguments))
    configs = [value for name, value in pairs if name in _CONFIG_OPTIONS and value and value.endswith(".json")]
    for config in configs:
        path = Path(config)
        if not path.is_file():
            raise UsageError(f"there is no config at {config}. Check the path.")
        try:
            json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            _say(
                f"{path} is not strict JSON. zeroshard reads comments and trailing commas, but transformers and accelerate "
                "do not."
            )
    if os.environ.get("ACCELERATE_USE_CPU", "").lower() in _TRUE:
        raise UsageError("ACCELERATE_USE_CPU is set, which turns DeepSpeed off in accelerate: " + _CPU_ADVICE)
    for name, value in pairs:
        if has_accelerator and configs and name in _CPU_OPTIONS and (value or "true").lower() in _TRUE:
            raise UsageError(
                f"{name} on a machine with accelerators would leave the data on the CPU, and the model on an accelerator: "
                + _CPU_ADVICE
            )


def _pairs(arguments: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Yield (--name, value) of each option; the value is None if the option has none."""
    for number, word in enumerate(arguments):
        if not word.startswith("--"):
            continue
        name, is_joined, value = word.partition("=")
        following = arguments[number + 1 : number + 2]
        if is_joined:
            yield name, value
        elif following and not following[0].startswith("--"):
            yield name, following[0]
        else:
            yield name, None


# ---------------------------------------------------------------------- the ranks


def _launch(options: argparse.Namespace) -> None:
    """Run the ranks until all have ended. Raise `UsageError` if they cannot start, and `typer.Exit` if one failed."""
    from torch.distributed import DistNetworkError
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    if "LOGLEVEL" not in os.environ and "TORCH_LOGS" not in os.environ:
        for name in ("", ".agent.server.api", ".multiprocessing.api"):  # some of these have their own level
            logging.getLogger(f"torch.distributed.elastic{name}").setLevel(logging.CRITICAL)
    try:
        torchrun.run(options)
    except ChildFailedError as error:
        raise typer.Exit(_print_failure(error, int(options.nproc_per_node))) from None
    except SignalException as error:
        _say(f"stopped by {error.sigval.name}, with all ranks.")
        raise typer.Exit(128 + error.sigval) from None
    except (ValueError, AssertionError, RendezvousError, DistNetworkError) as error:
        remedy = ""
        if "EADDRINUSE" in str(error):
            remedy = ". Another job uses this port: pass --standalone, or --master-port with a free one."
        raise UsageError(
            f"the ranks could not be started: {' '.join(str(error).split()) or type(error).__name__}{remedy}"
        ) from error


def _print_failure(error: ChildFailedError, processes: int) -> int:
    """Print the rank that failed first, with the cause. Return the exit status."""
    # torchrun ends the other ranks with SIGTERM and records times only to the second.
    failures = sorted(error.failures.items(), key=lambda one: (one[1].exitcode == -signal.SIGTERM, one[1].timestamp))
    rank, failure = failures[0]
    others = sum(one.exitcode != -signal.SIGTERM for _, one in failures[1:])
    after = ""
    if others:
        after = f"; {others} more failed"
    elif processes > 1:
        after = "; the others were stopped"
    if failure.exitcode >= 0:
        _say(f"error: rank {rank} ended with exit status {failure.exitcode}{after}. Its output is above.")
        return failure.exitcode or 1
    name = signal.Signals(-failure.exitcode).name
    hint = " (perhaps because the host ran out of memory)" * (name == "SIGKILL")
    _say(f"error: rank {rank} was ended by {name}{hint}{after}.")
    return 128 - failure.exitcode


def _say(sentence: str) -> None:
    print(f"zeroshard run: {sentence}", file=sys.stderr, flush=True)
