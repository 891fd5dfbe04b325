"""torch's private names: only one module uses them, they behave as it expects, and each feature says which one it lacks."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from models import Normed, floats
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from twin import build, step

import zeroshard
from zeroshard import UsageError, ZeroshardError, torch_private
from zeroshard.core import norm
from zeroshard.engine.recompute.checkpointer import Checkpointer
from zeroshard.sequence.tiles import tile
from zeroshard.testing import run_ranks

PACKAGE = Path(zeroshard.__file__).parent
HOME = Path(torch_private.__file__)
PRIVATE = re.compile(
    r"\btorch(?:\.\w+)*\._\w+|\bfrom torch(?:\.\w+)*\._\w+|\b_C\._\w+|\._execution_engine\b|\._version\b|\._parameters\b"
    r"|\._cdata\b|\._local_tensor\b|\._spec\b|(?<!self)\._buffers\b|\._non_persistent_buffers_set\b|\._forward_(?:pre_)?hooks\b|\._compiled_call_impl\b|\._post_accumulate_grad_hooks\b|\._optimizer_step_(?:pre|post)_hooks\b"
)
NAMES = sorted(
    {
        node.value
        for node in ast.walk(ast.parse(HOME.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"torch\.[\w.]+", node.value)
    }
    - {"torch.nn.Module", "torch.optim.Optimizer", "torch.distributed.tensor"}
)
"""Those that the module looks up."""
LATE = {
    *(full_name for full_name, _ in torch_private._AT_FIRST_USE.values()),
    "torch.distributed.tensor.DTensor._local_tensor", "torch.distributed.tensor.DTensor._spec",
}  # fmt: skip
"""Those that it looks up at their first use."""
for public in zeroshard.__all__:  # import all modules, so that `used` reaches them
    getattr(zeroshard, public)


def test_no_other_module_uses_private_names() -> None:
    assert PRIVATE.search(HOME.read_text(encoding="utf-8"))
    for path in PACKAGE.rglob("*.py"):
        if path != HOME and not path.is_relative_to(PACKAGE / "shim"):
            assert not PRIVATE.findall(path.read_text(encoding="utf-8")), path


# ---------------------------------------------------------------------- a torch that lacks a name


class Absent:
    """In the place of an attribute of a class, where instances have one of their own too."""

    def __get__(self, *_: object) -> Any:
        raise AttributeError

    def __set__(self, *_: object) -> None:
        pass


def remove(name: str, patch: pytest.MonkeyPatch) -> None:
    """Take a name away; or its holder, where that is written in C."""
    path, _, last = name.rpartition(".")
    holder: Any = torch
    for part in path.split(".")[1:]:
        holder = getattr(holder, part)
    if isinstance(holder, type) and last not in vars(holder):
        patch.setattr(holder, last, Absent(), raising=False)
    elif isinstance(holder, type | ModuleType):
        patch.delattr(holder, last)
    else:
        outer, _, attribute = path.rpartition(".")
        patch.setattr(f"{outer}.{attribute}", object())


def import_anew() -> ModuleType:
    """Run the module once more, beside the one in use."""
    spec = importlib.util.spec_from_file_location("torch_private_anew", HOME)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def used(module: ModuleType) -> Iterator[None]:
    """Replace in all of zeroshard's modules what they imported from the module in use."""
    with pytest.MonkeyPatch.context() as patch:
        for user in [one for name, one in sys.modules.items() if name.startswith("zeroshard.")]:
            for name, value in list(vars(user).items()):
                own = vars(torch_private).get(name)
                if user is not torch_private and own is not None and value is own and name in vars(module):
                    patch.setattr(user, name, getattr(module, name))
        yield


def train(stage: int, kind: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW) -> zeroshard.Sharded:
    model, sharded = build(stage, make_model=Normed, make_optimizer=partial(kind, lr=0.01))
    first, second = (step(model, sharded, 0, 0, floats) for _ in range(2))
    assert second < first
    return sharded


def measure_and_scale(_: Path) -> None:
    """As on an accelerator."""
    gradients = [torch.ones(3, device="meta")]
    norm.sums_of_squares(gradients)
    norm.scale_(gradients, 0.5)


def load_with_hooks(_: Path) -> None:
    optimizer = zeroshard.ZeroRedundancyOptimizer(Normed().parameters(), torch.optim.SGD, lr=0.1)
    optimizer.load_state_dict(optimizer.state_dict())


def convert_inputs(_: Path) -> None:
    config = {"train_batch_size": 2, "fp16": {"enabled": True, "auto_cast": True}, "optimizer": {"type": "Adam"}}
    engine, *_ = zeroshard.initialize(model=nn.Linear(4, 4), config=config)
    engine(torch.ones(2, 4))
    engine.destroy()


def checkpoint_activations(_: Path) -> None:
    """As on an accelerator, where inputs may be kept in CPU memory."""
    checkpointer = Checkpointer()
    checkpointer._hooks = lambda _: nullcontext()  # type: ignore[method-assign]
    checkpointer.checkpoint(Normed(), torch.ones(2, 5, requires_grad=True) * 2)


def run_in_tiles(_: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    tile(model, "0", 2)
    model(torch.ones(1, 4, 4))


USES: dict[str, Callable[[Path], object]] = {
    "SHARDING": lambda _: train(0),
    "STAGE_3": lambda _: train(3),
    "GRADIENT_NORMS": measure_and_scale,
    "LION": lambda _: train(2, zeroshard.Lion),
    "LOAD_HOOKS": load_with_hooks,
    "SAVED_BUFFERS": lambda folder: train(2).save(folder, "a"),
    "DISTRIBUTED_STATE": lambda _: zeroshard.DistributedState(train(2)).state_dict(),
    "CONVERTED_INPUTS": convert_inputs,
    "ACTIVATION_CHECKPOINTING": checkpoint_activations,
    "SEQUENCE_TILES": run_in_tiles,
    "PLAN": lambda _: zeroshard.plan(
        Normed, {"train_batch_size": 4}, world_size=1, batch=floats(0, 0), loss=lambda out: out
    ),
}
"""A use of each feature, by its name; the use of DTensors is below."""


def test_every_feature_works_on_this_torch(tmp_path: Path) -> None:
    assert set(USES) == {feature.name for feature in torch_private.Feature} - {"TENSOR_PARALLELISM"}
    assert not torch_private._lacking
    for use in USES.values():
        use(tmp_path)


@pytest.mark.quick(99)
@pytest.mark.parametrize("name", sorted({*NAMES} - LATE))
def test_without_a_name_a_feature_is_refused_and_the_others_work(name: str, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        remove(name, patch)
        module = import_anew()
    lacking = [feature.name for feature in module._lacking]
    assert set(module._lacking.values()) == {name}
    with used(module):
        for feature in lacking:
            with pytest.raises(ZeroshardError, match=f"{re.escape(name)} is missing in torch .* cannot work") as raised:
                USES[feature](tmp_path)
            assert f"and {module.Feature[lacking[0]]} cannot" in str(raised.value)
            assert f"torch {', '.join(torch_private.SEEN_TO_WORK)}: install one of these" in str(raised.value)
        for stage in (2, 3):
            if "SHARDING" not in lacking and f"STAGE_{stage}" not in lacking:
                train(stage)


@pytest.mark.quick(99)
@pytest.mark.parametrize("name", sorted(LATE))
def test_names_that_are_looked_up_at_their_first_use(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = Tensor._make_wrapper_subclass(DTensor, torch.Size((2,)))
    remove(name, monkeypatch)
    module = import_anew()
    assert not module._lacking
    short = next((short for short, (full_name, _) in module._AT_FIRST_USE.items() if full_name == name), None)
    with pytest.raises(UsageError, match=f"^{re.escape(name)} is missing"):
        module.is_distributed(parts) if short is None else getattr(module, short)
    if "_dynamo" in name:
        with pytest.raises(UsageError, match=f"^{re.escape(name)} is missing.* and zeroshard cannot"):
            module.at_border(print, "a reason")
    elif "DTensor" not in name and "_make_subclass" not in name:  # torch makes its own parameters with the latter
        with used(module):
            train(3)


def test_without_the_compilers_wrapper_nothing_is_sharded(monkeypatch: pytest.MonkeyPatch) -> None:
    module = import_anew()
    monkeypatch.setattr(module, "COMPILED_CALL", "another_name")
    with used(module), pytest.raises(UsageError, match=r"^another_name of _dynamo/eval_frame.py is missing"):
        train(2)


LACKING = f"""
from __future__ import annotations
import sys
from types import ModuleType
from typing import Any
import torch
from pytest import MonkeyPatch
{inspect.getsource(Absent)}
{inspect.getsource(remove)}
with MonkeyPatch.context() as patch:
    for name in sys.argv[1:]:
        remove(name, patch)
    from zeroshard import torch_private  # alone: torch's other modules need some of the names, too
import zeroshard
model = torch.nn.Linear(2, 2)
try:
    zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), 0)
except zeroshard.UsageError as error:
    print(error.args[0].splitlines()[0])
"""


def test_zeroshard_is_imported_without_any_of_the_names() -> None:
    command = [sys.executable, "-c", LACKING, *sorted({*NAMES} - LATE)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    assert "zeroshard cannot work without it" in done.stdout


# ---------------------------------------------------------------------- the module itself


def import_everywhere(rank: int) -> int:
    module, sizes = import_anew(), list[int]()
    with torch.inference_mode(), torch.device("meta"), module.FakeTensorMode():
        import_anew()
    leaf = nn.Parameter(torch.zeros(2))
    leaf.register_post_accumulate_grad_hook(lambda _: sizes.append(len(vars(import_anew()))))
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        leaf.square().sum().backward()
    torch.func.vmap(lambda x: [import_anew(), x][1])(torch.zeros(2))
    return len(sizes)


def test_it_may_be_imported_anywhere() -> None:
    """Under modes and transforms, in a backward, and inside of hooks; and processes may be forked after."""
    import_anew()
    assert run_ranks(import_everywhere, 1, initialise=False) == [1]


# ---------------------------------------------------------------------- names behave as the module expects


def test_orders_of_hooks() -> None:
    module = nn.Module()
    first = module.register_forward_pre_hook(lambda *_: None)
    last = module.register_forward_hook(lambda *_: None)
    module.register_forward_pre_hook(lambda *_: None, prepend=True)
    module.register_forward_hook(lambda *_: None)
    before, after = torch_private.forward_hooks_of(module)
    torch_private.keep_first(before, first)
    torch_private.keep_last(after, last)
    assert next(iter(module._forward_pre_hooks)) == first.id and next(reversed(module._forward_hooks)) == last.id
    parameter: Any = nn.Parameter(torch.empty(0))
    assert not torch_private.has_tensor_hooks(parameter)
    parameter.register_hook(lambda gradient: gradient)
    assert torch_private.has_tensor_hooks(parameter)
    first = parameter.register_post_accumulate_grad_hook(lambda _: None)
    parameter.register_post_accumulate_grad_hook(lambda _: None)
    torch_private.keep_last(torch_private.gradient_hooks_of(parameter), first)
    assert next(reversed(parameter._post_accumulate_grad_hooks)) == first.id


def test_readers_of_what_is_in_force() -> None:
    def pack(tensor: Tensor) -> Tensor:
        return tensor

    assert torch_private.saved_tensors_hooks_in_force() is None
    with torch.autograd.graph.saved_tensors_hooks(pack, pack):
        assert torch_private.saved_tensors_hooks_in_force() == (pack, pack)
    assert not torch_private.refuses_saved_tensors_hooks()
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        assert torch_private.refuses_saved_tensors_hooks()
    seen = [torch_private.in_transform(), bool(torch_private.is_traced())]
    torch.func.vmap(lambda x: [seen.append(torch_private.in_transform()), x][1])(torch.zeros(2))
    assert seen == [False, False, True]


def test_the_tested_releases_are_named_everywhere() -> None:
    root = PACKAGE.parent

    def pins(name: str) -> dict[str, str]:
        lines = (root / "requirements" / name).read_text(encoding="utf-8").splitlines()
        return dict(line.split("==") for line in lines if "==" in line)

    oldest, newest = pins("oldest.txt"), pins("newest.txt")
    assert oldest["torch"].startswith(torch_private.SEEN_TO_WORK[0] + ".")
    assert newest["torch"].startswith(torch_private.SEEN_TO_WORK[-1] + ".")
    for readme in ("README.md", "README.zh-CN.md"):
        tested = f"(tested: {', '.join(torch_private.SEEN_TO_WORK)})"
        assert tested in (root / readme).read_text(encoding="utf-8")
    section = (root / "docs" / "trainers.md").read_text(encoding="utf-8").partition("## Tested releases")[2]
    rows = [line for line in section.splitlines() if "." in line and line.startswith("|")]
    assert rows == [f"| {name} | {oldest[name]} | {release} |" for name, release in newest.items()]
