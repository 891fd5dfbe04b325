"""Any config is resolved, or raises an error that names the key. "auto" is resolved, and no key is ignored silently."""

from __future__ import annotations

import copy
import difflib
import importlib.util
import json
import re
import runpy
import warnings
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import Stack
from torch import nn
from twin import build_engine, engine_steps, same, whole
from typer.testing import CliRunner

import zeroshard
from zeroshard import ConfigError
from zeroshard.engine.config.document import listing, summary
from zeroshard.engine.config.fields import Kind
from zeroshard.engine.config.load import Birth, load_birth, load_config, tensor_parallel_ranks
from zeroshard.engine.config.schema import KEYS
from zeroshard.policy import Place
from zeroshard.tools.main import app

ZERO2 = {  # as users of transformers have it, key for key
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2,
             "min_loss_scale": 1},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupDecayLR", "params": {
        "last_batch_iteration": -1, "total_num_steps": "auto", "warmup_min_lr": "auto", "warmup_max_lr": "auto",
        "warmup_num_steps": "auto"}},
    "zero_optimization": {
        "stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True}, "allgather_partitions": True, "allgather_bucket_size": 5e8,
        "overlap_comm": True, "reduce_scatter": True, "reduce_bucket_size": 5e8, "contiguous_gradients": True},
    "activation_checkpointing": {
        "partition_activations": False, "cpu_checkpointing": False, "contiguous_memory_optimization": False,
        "number_checkpoints": None, "synchronize_checkpoint_boundary": False, "profile": False},
    "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "steps_per_print": 2000, "train_batch_size": "auto",
    "min_lr": 5e-7, "train_micro_batch_size_per_gpu": "auto", "wall_clock_breakdown": False,
}  # fmt: skip
DOCS = Path(__file__).parents[2] / "docs"
PAGES = runpy.run_path(str(DOCS / "config_pages.py"))["pages"]()
KNOWN = {"lr": 3e-4, "total_num_steps": 1000, "train_micro_batch_size_per_gpu": 3, "warmup_num_steps": 10}


def sized(dtype: torch.dtype = torch.float32, **config: Any) -> nn.Module:
    """Return a model that says its size as models of transformers do."""
    model: Any = nn.Linear(2, 1, dtype=dtype)
    model.config = SimpleNamespace(**config)
    return model  # type: ignore[no-any-return]


def test_auto_is_resolved_from_what_is_known() -> None:
    config = load_config(ZERO2, 4, Stack(), KNOWN)
    assert (config.batch.train, config.batch.micro, config.batch.accumulation) == (12, 3, 1)
    assert config.schema.gradient_clipping == 1.0
    assert config.schema.optimizer is not None
    assert config.schema.optimizer.params == {"lr": 3e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    assert config.schema.scheduler is not None
    assert config.schema.scheduler.params == {
        "last_batch_iteration": -1, "total_num_steps": 1000, "warmup_min_lr": 0.0, "warmup_max_lr": 3e-4,
        "warmup_num_steps": 10,
    }  # fmt: skip
    assert not config.schema.fp16.enabled
    assert config.policy.optimizer.place is Place.CPU
    assert config.policy.parameters.place is Place.CPU
    origins = {entry.path: entry.origin for entry in config.entries()}
    assert origins["optimizer.params.lr"] == origins["train_batch_size"] == origins["fp16.enabled"] == '"auto"'
    assert origins["min_lr"] == "file"
    assert origins["bf16.enabled"] == "default"


def test_offloaded_parameters_have_no_effect_at_stage_0() -> None:
    """TRL makes such a config for a reference model."""
    given = copy.deepcopy(ZERO2)
    del given["zero_optimization"]["offload_optimizer"]
    given["zero_optimization"]["stage"] = 0
    assert load_config(given, 2, Stack(), KNOWN).policy.parameters.place is Place.ACCELERATOR
    given["zero_optimization"]["stage"] = 2
    assert load_config(given, 2, Stack(), KNOWN).policy.parameters.place is Place.CPU


@pytest.mark.parametrize(
    ("model", "size"),
    [
        (sized(hidden_size=64), 64),
        (sized(hidden_sizes=[16, 48]), 48),
        (sized(text_config=SimpleNamespace(hidden_size=32)), 32),
        (sized(), None),
    ],
)
def test_bucket_sizes_follow_the_hidden_size(model: nn.Module, size: int | None) -> None:
    keys = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    zero = load_config({"zero_optimization": dict.fromkeys(keys, "auto")}, 1, model).schema.zero_optimization
    got = tuple(getattr(zero, key) for key in keys)
    assert got == ((size**2, int(0.9 * size**2), 10 * size) if size else (500_000_000, None, 0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_precision_follows_the_model_or_the_user(dtype: torch.dtype) -> None:
    auto = {"fp16": {"enabled": "auto"}, "bfloat16": {"enabled": "auto"}}
    schema = load_config(auto, 1, sized(dtype)).schema
    assert (schema.fp16.enabled, schema.bf16.enabled) == (dtype is torch.float16, dtype is torch.bfloat16)
    assert load_config(auto, 1, sized(torch.float32), {"fp16": True}).schema.fp16.enabled
    assert load_config(auto, 1, sized(torch.float32), {"bfloat16.enabled": True}).schema.bf16.enabled


def test_what_only_the_user_knows_is_one_error() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(ZERO2, 1, Stack())
    for name in (
        "train_micro_batch_size_per_gpu",
        "optimizer.params.lr",
        "scheduler.params.total_num_steps",
        "'lr': ...",
        "--auto lr=...",
    ):
        assert name in str(caught.value)
    assert "warmup_min_lr" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"auto\['total_steps'\].*total_num_steps"):
        load_config(ZERO2, 1, Stack(), {**KNOWN, "total_steps": 3})


@pytest.mark.ranks(2)
def test_users_config_trains_unchanged_and_its_floor_holds(rank: int) -> None:
    engine, *_ = zeroshard.initialize(model=Stack(), config=ZERO2, auto=KNOWN)
    assert engine.get_lr() == [5e-7]
    engine_steps(engine, rank, range(3))
    assert (engine.global_steps, engine.skipped_steps) == (3, 0)
    assert engine.get_lr()[0] > 5e-7


@pytest.mark.parametrize(
    ("given", "train", "micro", "accumulation"),
    [
        ((24, 3, 2), 24, 3, 2), ((24, 3, None), 24, 3, 2), ((24, None, 2), 24, 3, 2), ((None, 3, 2), 24, 3, 2),
        ((24, None, None), 24, 6, 1), ((None, 3, None), 12, 3, 1), ((None, None, None), 4, 1, 1),
        (("auto", 3, "auto"), 12, 3, 1), ((24, "auto", "auto"), 24, 6, 1), ((24, 3, "auto"), 24, 3, 2),
        ((24, "auto", 2), 24, 3, 2), (("auto", 3, 2), 24, 3, 2), ((24, "auto", None), 24, 6, 1),
    ],
)  # fmt: skip
def test_batch_sizes(given: tuple[int | None, ...], train: int, micro: int, accumulation: int) -> None:
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    config = {key: value for key, value in zip(keys, given, strict=True) if value is not None}
    batch = load_config(config, world_size=4).batch
    assert (batch.train, batch.micro, batch.accumulation) == (train, micro, accumulation)


def test_precision_of_gradients() -> None:
    def dtypes(**config: Any) -> tuple[torch.dtype, ...]:
        resolved = load_config({"bf16": {"enabled": True}, **config}, 1).precision.resolve(torch.float32)
        return resolved.param, resolved.reduce, resolved.accumulate, resolved.master

    bf16, fp32 = torch.bfloat16, torch.float32
    assert dtypes(gradient_accumulation_steps=1) == (bf16, bf16, bf16, fp32)
    assert dtypes(gradient_accumulation_steps=2) == (bf16, bf16, fp32, fp32)
    assert dtypes(data_types={"grad_accum_dtype": "fp32"}) == (bf16, bf16, fp32, fp32)
    assert dtypes(gradient_accumulation_steps=2, data_types={"grad_accum_dtype": "bf16"}) == (bf16, bf16, bf16, fp32)
    assert dtypes(communication_data_type="fp32", gradient_accumulation_steps=2) == (bf16, fp32, fp32, fp32)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("division", [{"prescale_gradients": True}, {"gradient_predivide_factor": 4}])
@pytest.mark.parametrize("stage", range(4))
def test_dividing_before_or_after_the_sum_is_the_same(rank: int, stage: int, division: dict[str, Any]) -> None:
    """By powers of two, to the bit."""

    def run(**division: Any) -> dict[str, torch.Tensor]:
        engine = build_engine(stage, optimizer={"type": "SGD", "params": {"lr": 0.1}}, **division)
        engine_steps(engine, rank, range(3))
        return whole(engine.module)

    assert same(run(), run(**division))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    | st.sampled_from(["auto", "5e8", "-1", "1e999", "nan", "cpu", "fp16", 10**400, "9" * 500]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """Known keys with values of any kind, known blocks with unknown keys, and unknown keys."""
    config: dict[str, Any] = draw(st.dictionaries(st.text(max_size=8), json_values, max_size=1))
    for path in draw(
        st.lists(st.sampled_from([*KEYS, "optimizer.params.lr", "scheduler.params.warmup_max_lr"]), max_size=5)
    ):
        *blocks, last = path.split(".")
        node = config
        for block in blocks:
            inner = node.setdefault(block, {})
            if not isinstance(inner, dict):
                break
            node = inner
        node[last] = draw(json_values)
        if draw(st.integers(0, 9)) == 0:
            node[draw(st.text(max_size=5))] = draw(json_values)
    if draw(st.booleans()):
        config.setdefault(draw(st.sampled_from(["fp16", "zero_optimization", "optimizer"])), draw(json_values))
    return config


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(config=configs(), ranks=st.integers(1, 64), auto=st.none() | st.just(KNOWN))
def test_any_json_is_resolved_or_refused(config: dict[str, Any], ranks: int, auto: dict[str, Any] | None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            resolved = load_config(config, ranks, Stack(), auto)
        except ConfigError as error:
            message = str(error)
            assert any(str(key) in message for key in [*config, "batch sizes"]), message
            return
        assert resolved.batch.train == resolved.batch.micro * resolved.batch.accumulation * ranks
        assert resolved.policy is not None
        assert resolved.precision is not None
        assert len(listing(resolved, 80).plain.splitlines()) > 200
        assert len(summary(resolved, 80).plain.splitlines()) <= 36


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=40) | st.just("[" * 5000) | st.just('{"a": 1, "a": 2}') | json_values.map(json.dumps))
def test_any_file_is_read_or_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            load_config(path, 1)
        except ConfigError:
            return


@pytest.mark.parametrize("block", [None, "zero_optimization", "comms_logger"])
def test_a_large_file_of_unknown_keys_is_a_short_error(
    block: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took minutes: each key was compared with all known ones, by a parser in plain Python before."""
    compared = Mock(wraps=difflib.get_close_matches)
    monkeypatch.setattr(difflib, "get_close_matches", compared)
    monkeypatch.setattr("json5.loads", lambda *args, **more: pytest.fail("plain JSON went to the slow parser"))
    unknown: dict[str, Any] = {f"unknown_key_number_{number}": number for number in range(20_000)}
    if block is not None:
        unknown = {block: unknown}
    (tmp_path / "zero.json").write_text(json.dumps({"train_micro_batch_size_per_gpu": 1, **unknown}))
    with pytest.raises(ConfigError, match=r"and 199\d\d more") as refusal:
        load_config(tmp_path / "zero.json", 1)
    assert compared.call_count <= 20
    assert len(str(refusal.value)) < 5000


def test_the_pages_of_the_docs_are_the_schemas() -> None:
    assert {path.name for path in (DOCS / "config").iterdir()} == set(PAGES)
    for name, page in PAGES.items():
        assert (DOCS / "config" / name).read_text(encoding="utf-8") == page, "run `python docs/config_pages.py`"


def test_a_key_of_the_docs_is_one_line_with_a_link() -> None:
    """The keys that most configs set come first, and those that change nothing are folded away."""
    for entry in load_config({}, 1).entries():
        anchor = f'<a id="{entry.path}"></a>'
        ((name, line),) = [(name, line) for name, page in PAGES.items() for line in page.splitlines() if anchor in line]
        works = entry.effect.kind is Kind.WORKS
        assert "." in entry.path or name == ("README.md" if works else "other_keys.md")
        assert entry.effect.text.endswith("."), entry.path
        assert line.startswith(f"| {anchor}") and entry.effect.text[1:].replace("|", r"\|") in line  # a capital
        before = PAGES[name].partition(line)[0]
        folded = before.count("<details") > before.count("</details>")
        assert folded is (not works and name != "other_keys.md"), entry.path
    first, _, rest = PAGES["README.md"].partition("## Top level")
    links = re.findall(r"^\| \[`[\w.]+`\]\(([\w.]*)#([\w.]+)\) \|", first, re.MULTILINE)
    assert len(links) == 10
    for page, key in links:
        assert f'<a id="{key}"></a>' in (PAGES[page] if page else rest)


def check(path: Path, *options: str) -> Any:
    return CliRunner().invoke(app, ["config", "check", str(path), *options], env={"COLUMNS": "200"})


def test_check_prints_each_key_and_asks_for_missing_values_as_options(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(ZERO2))
    options = re.findall(r"--auto (\w+)=\.\.\.", str(check(path).exception))
    assert "lr" in options
    known = [part for name in options for part in ("--auto", f"{name}={KNOWN.get(name, 1)}")]
    shown = check(path, *known)
    assert shown.exit_code == 0, shown.output
    assert "for 1 rank:" in shown.output and 'lr 0.0003 ("auto")' in shown.output
    line = next(line for line in shown.output.splitlines() if "contiguous_gradients" in line)
    assert "without meaning here" in line
    assert "bf16.enabled" not in shown.output
    assert "bf16.enabled" in check(path, "--all", *known).output


def test_tensor_parallel_ranks_that_do_not_divide_the_ranks_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"train_micro_batch_size_per_gpu": 3, "tensor_parallel": {"autotp_size": 2}}))
    assert "2 tensor-parallel ranks do not divide the 3 ranks" in str(check(path, "--ranks", "3").exception)
    assert "batch 3 " in check(path).output
    assert "batch 6 " in check(path, "--ranks", "4").output


def test_spellings_that_deepspeed_takes() -> None:
    blocks = {
        "train_batch_size": 1,
        "torch_autocast": {"enabled": True, "dtype": "torch.bfloat16"},
        "gradient_allreduce_op": "SUM",
        "communication_data_type": "torch.float32",
        "optimizer": {"type": "Adam", "torch_adam": True, "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 2, "zenflow": None, "reduce_bucket_size": "5e7", "allgather_bucket_size": 2e8},
    }
    config = load_config(blocks, 1)
    assert config.autocast_dtype is torch.bfloat16
    assert config.schema.gradient_allreduce_op == "sum"
    assert config.precision.reduce_dtype is torch.float32
    assert (config.stage, config.bucket_numel) == (2, 50_000_000)


FILES = {
    "comments.json": '// as DeepSpeed users write it\n{"zero_optimization": {"stage": 2,},}',
    "words.hjson": "{zero_optimization: {stage: 2}}",
    "twice.json": '{"gradient_clipping": 1, "gradient_clipping": 2}',
}


@pytest.mark.quick(99)
@pytest.mark.parametrize("name", [*FILES, "dict", "mapping"])
def test_a_config_is_a_file_or_a_mapping(name: str, tmp_path: Path) -> None:
    values = {"zero_optimization": {"stage": 2}}
    given: Any = {"dict": values, "mapping": MappingProxyType(values)}.get(name, tmp_path / name)
    refused = {"twice.json": "gradient_clipping"}
    if importlib.util.find_spec("hjson") is None:
        refused["words.hjson"] = "pip install hjson"
    if name in FILES:
        given.write_text(FILES[name])
    if name in refused:
        with pytest.raises(ConfigError, match=refused[name]):
            load_config(given, 2)
        return
    config = load_config(given, 2, auto={"train_micro_batch_size_per_gpu": 3})
    assert (config.stage, config.batch.train) == (2, 6)


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ({"zero_optimization": {"stage": 2, "zenflow": {}}}, r"zero_optimization\.zenflow = .* is not supported"),
        ({"zero_optimization": {"zenflow": {"enabled": False}}}, r"zero_optimization\.zenflow = .* is not supported"),
        ({"compile": {"deepcompile": True}}, r"compile\.deepcompile"),
        ({"compile": {"backnd": "inductor"}}, r"compile\.backnd: unknown key.*backend"),
    ],
)
def test_blocks_that_cannot_be_honoured(block: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        load_config({"train_micro_batch_size_per_gpu": 1, **block}, 1)


def test_paths_at_the_top_level_are_the_keys_of_their_blocks() -> None:
    """TRL writes its bucket sizes so, as floats."""
    size = {"train_batch_size": 1}
    paths = {"zero_optimization.stage3_prefetch_bucket_size": 0.9 * 37 * 37, "fp16.loss_scale": 0.5}
    config = load_config({**size, **paths, "fp16": {"enabled": True}, "zero_optimization": None}, 1)
    assert config.schema.zero_optimization.stage3_prefetch_bucket_size == 1232
    assert config.schema.fp16.loss_scale == 0.5
    with pytest.raises(ConfigError, match=r"zero_optimization: True is not a block of keys\. Write"):
        load_config({**size, **paths, "zero_optimization": True}, 1)
    assert tensor_parallel_ranks({"tensor_parallel.autotp_size": 2}) == 2
    assert load_birth({"bf16.enabled": True}).dtype == torch.bfloat16


def test_a_model_is_built_as_the_config_resolves() -> None:
    """Old and loose values count as in `load_config`."""
    config = {
        "train_batch_size": 1,
        "bf16": {"enabled": 1},
        "zero_optimization": {"stage": 3, "cpu_offload_param": True},
    }
    assert load_birth(config) == Birth(torch.bfloat16, "cpu")
    assert load_birth({"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}) == Birth()


# ---------------------------------------------------------------------- axolotl's configs, with the values of its Trainer

AUTO = {
    "lr": 1e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0, "train_micro_batch_size_per_gpu": 2,
    "train_batch_size": 8, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5, "fp16": False, "bf16": True,
}  # fmt: skip
BATCH: dict[str, Any] = dict.fromkeys(
    ("gradient_accumulation_steps", "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_clipping"), "auto"
) | {"wall_clock_breakdown": False}
STAGE_3 = {
    "stage": 3, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 0, "reduce_bucket_size": "auto",
}  # fmt: skip
SIZES = {
    "prefetch_bucket_size": "auto", "param_persistence_threshold": "auto", "max_live_parameters": 0, "max_reuse_distance": 0,
    "gather_16bit_weights_on_model_save": True,
}  # fmt: skip
CPU = {"device": "cpu", "pin_memory": True}
CONFIGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "zero1_torch_compile": (
        {
            "bf16": {"enabled": "auto"}, "compile": {"disable": False, "backend": "inductor"},
            "fp16": {
                "enabled": "auto", "auto_cast": False, "loss_scale": 0, "initial_scale_power": 32, "loss_scale_window": 1000,
                "hysteresis": 2, "min_loss_scale": 1,
            },
            "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
        },
        {"stage": 1, "overlap_comm": True},
    ),
    "zero2": (
        {"bf16": {"enabled": "auto"}},
        {"stage": 2, "offload_optimizer": {"device": "cpu"}, "contiguous_gradients": True, "overlap_comm": True},
    ),
    "zero3": ({"bf16": {"enabled": "auto"}}, {**STAGE_3, **{f"stage3_{key}": value for key, value in SIZES.items()}}),
    "zero3_bf16_cpuoffload_all": (
        {"bf16": {"enabled": True}, "zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True},
        {**STAGE_3, **SIZES, "offload_optimizer": CPU, "offload_param": CPU},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_axolotls_configs_are_read_unchanged(name: str) -> None:
    top, zero = CONFIGS[name]
    config = load_config({**BATCH, **top, "zero_optimization": zero}, 2, None, AUTO)
    assert config.stage == int(name[4])
    assert config.schema.bf16.enabled
    assert not config.schema.fp16.enabled
    assert (config.batch.micro, config.batch.accumulation, config.schema.gradient_clipping) == (2, 2, 0.5)
    policy = config.policy
    assert (policy.optimizer.place is Place.CPU) == ("offload_optimizer" in zero)
    assert (policy.parameters.place is Place.CPU) == ("offload_param" in zero)
    if config.stage == 3:
        assert (policy.max_live_numel, policy.max_reuse_numel) == (0, 0)
        assert policy.offload_optimizer.sub_group_numel == (1 if "offload_optimizer" in zero else 1_000_000_000)
