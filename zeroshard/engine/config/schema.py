"""Owns the keys of a DeepSpeed JSON config: their types, defaults and effects in zeroshard.

`python docs/config_pages.py` writes docs/config/ from this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from zeroshard.engine.config.fields import (
    ConfigBlock,
    Count,
    DType,
    Effect,
    HalfDType,
    NonNegative,
    Positive,
    PositiveNumber,
    StateDType,
    no_meaning,
    refused,
    works,
)
from zeroshard.engine.config.zero_block import AioBlock, ZeroBlock


def _one_rank(value: Any) -> Any:
    if isinstance(value, int) and value > 1:
        raise PydanticCustomError(
            "sequences",
            "a config alone cannot cut sequences: use zeroshard.sequence.Sequences in your loop, or pass a Trainer "
            "ParallelismConfig(sp_size=...)",
        )
    return value


def _block_of_null(value: Any) -> Any:
    return {} if value is None else value


def _text(change: Callable[[str], str]) -> BeforeValidator:
    """Return a validator that changes a string before it is checked."""
    return BeforeValidator(lambda value: change(value) if isinstance(value, str) else value)


# A table: one row for each key.
# fmt: off
class OptimizerBlock(ConfigBlock):
    """`optimizer`: the optimizer and its arguments."""

    type: Annotated[str, works(
        "Adam (AdamW's update unless `adam_w_mode` is false), AdamW, SGD, Adagrad, Lion, Muon (for matrices inside the "
        "model's blocks, with AdamW for all other parameters), or another class of torch.optim, except LBFGS and SparseAdam. If "
        "the optimizer needs whole parameters, each parameter is gathered on one rank, which updates it.")]
    params: Annotated[dict[str, Any], works(
        "the optimizer's arguments. Missing arguments have DeepSpeed's defaults. For example, `weight_decay` is 0.0 for Adam and AdamW "
        "(with `\"torch_adam\": true`, torch's default). For Adam, AdamW, SGD, Adagrad and Muon's AdamW, `fused` defaults to "
        "true.")] = {}
    torch_adam: Annotated[bool, no_meaning("set `params.torch_adam` instead.")] = False
    legacy_fusion: Annotated[bool, no_meaning("it configures DeepSpeed's kernels, which zeroshard does not use.")] = False


class SchedulerBlock(ConfigBlock):
    """`scheduler`: the learning-rate schedule."""

    type: Annotated[str, works(
        "WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest, or a class of torch.optim.lr_scheduler whose arguments "
        "are JSON. The scheduler advances after each step that is not skipped.")]
    params: Annotated[dict[str, Any], works("the scheduler's arguments.")] = {}


class BF16Block(ConfigBlock):
    """`bf16`: parameters in bfloat16; master weights, and sums of gradients over microbatches, in fp32.

    The block may also be named `bfloat16`.
    """

    enabled: Annotated[bool, works("train in bfloat16. \"auto\": true if the model's parameters are in bfloat16.")] = False
    check_grad_overflow: Annotated[bool, works("skip a step if its gradients are not finite.")] = True
    immediate_grad_update: Annotated[bool, no_meaning("gradients are always accumulated or reduced in the backward.")] = False
    bf16_master_weights_and_grads: Annotated[bool, refused("master weights are never in 16 bits.")] = False
    bf16_optimizer_states: Annotated[bool, works(
        "optimizer states rest in bfloat16, also if `enabled` is false. Steps compute with them in fp32 and round them stochastically, "
        "with the same random bits over any number of ranks. Master weights stay in fp32. "
        "See [Optimizer states in 16 bits](../small_states.md#optimizer-states-in-16-bits).")] = False


class FP16Block(ConfigBlock):
    """`fp16`: parameters in fp16, with loss scaling; master weights, and sums of gradients over microbatches, in fp32."""

    enabled: Annotated[bool, works("train in fp16. \"auto\": true if the model's parameters are in fp16.")] = False
    auto_cast: Annotated[bool, works("cast the model's floating-point inputs to fp16.")] = False
    loss_scale: Annotated[NonNegative, works("a fixed loss scale. 0 selects a dynamic scale.")] = 0
    initial_scale_power: Annotated[Annotated[Count, Field(le=127)], works("the dynamic scale starts at 2 to this power.")] = 16
    loss_scale_window: Annotated[Positive, works("the number of consecutive steps without overflow after which the scale doubles.")] = 1000
    hysteresis: Annotated[Positive, works(
        "each overflow halves a dynamic scale, except the first `hysteresis` - 1 overflows.")] = 2
    consecutive_hysteresis: Annotated[bool, works(
        "true: any step without overflow resets the count of overflows. false: only `loss_scale_window` consecutive steps without "
        "overflow reset it.")] = False
    min_loss_scale: Annotated[PositiveNumber, works(
        "the smallest dynamic scale. `engine.step` raises an error if an overflow would halve it.")] = 1
    fp16_master_weights_and_grads: Annotated[bool, refused("master weights are never in 16 bits.")] = False


class AutocastBlock(ConfigBlock):
    """`torch_autocast`: parameters keep the model's own dtypes, and torch.autocast picks the dtype of each operation."""

    enabled: Annotated[bool, works("run the model inside torch.autocast.")] = False
    dtype: Annotated[HalfDType, works(
        "the dtype of autocast. With fp16, the `fp16` block sets the loss scale, but its `enabled` must be false.")] = "bfloat16"
    lower_precision_safe_modules: Annotated[list[str] | None, no_meaning(
        "torch.autocast chooses the dtype by operation, not by module.")] = None


class DataTypesBlock(ConfigBlock):
    """`data_types`: the dtypes of gradients, parameters and buffers."""

    grad_accum_dtype: Annotated[DType | None, works(
        "the dtype in which gradients are stored and summed over microbatches. Default: fp32 if a step may have several "
        "microbatches, or if no key (`bf16`, `fp16`, `param_dtype`) sets the parameters' dtype. In all other cases: "
        "`communication_data_type` or, if that is not set, the parameters' dtype.")] = None
    param_dtype: Annotated[DType | None, works("the dtype of the parameters in forward and backward. It overrides `fp16` and `bf16`.")] = None
    buffer_dtype: Annotated[DType | None, works("the dtype of floating-point buffers. Default: each buffer keeps its own dtype.")] = None
    keep_in_fp32_modules: Annotated[list[str] | None, works(
        "parameters whose names contain one of these texts (`*` stands for any text) stay in fp32 if the others have 16 bits. "
        "Those that a transformers model declares (`_keep_in_fp32_modules_strict`) always do; \"auto\" names no more.")] = None
    state_dtype: Annotated[StateDType | None, works(
        "the dtype in which the optimizer's states rest: bf16 (as with `bf16.bf16_optimizer_states`), or uint8 for 8-bit codes with a "
        "scale for each 256 elements. See [Optimizer states in 8 bits](../small_states.md#optimizer-states-in-8-bits). Default: fp32, "
        "unless `bf16_optimizer_states` is true.")] = None
    state_rounding: Annotated[Literal["stochastic", "nearest"], works(
        "how steps round states that rest in bf16 or uint8.")] = "stochastic"


class MonitorBlock(ConfigBlock):
    """`tensorboard`: event files for TensorBoard, written by rank 0."""

    enabled: Annotated[bool, works(
        "writes `lr`, `loss_scale` and `grad_norm` at each step, and `train_loss` if you call `engine.backward`. Also writes the "
        "metrics of `wall_clock_breakdown`, `memory_breakdown` and `comms_logger`, if they are enabled. A metric is named "
        "`Train/Samples/<name>` and recorded against the number of samples.")] = False
    output_path: Annotated[str, works("the output folder. Default: the current folder.")] = ""
    job_name: Annotated[str, works("the subfolder of `output_path`.")] = "DeepSpeedJobName"


class CsvMonitorBlock(MonitorBlock):
    """`csv_monitor`: one CSV file for each metric, written by rank 0.

    Each file, such as `Train_Samples_lr.csv`, has a row (samples, value) for each step.
    """


class JsonMonitorBlock(MonitorBlock):
    """`json_monitor`: a file, written by rank 0, with a JSON line about the run and one for each step.

    [Watching a run](../watching_a_run.md#a-log-of-every-step) lists the keys of a line.
    """

    enabled: Annotated[bool, works(
        "append all metrics of each step to `output_path/job_name/steps.jsonl`. The metric `seconds` is written only with `wall_clock_breakdown`.")] = False


class WandbBlock(ConfigBlock):
    """`wandb`: logs training metrics to Weights & Biases."""

    enabled: Annotated[bool, works("log to `wandb`.")] = False
    group: Annotated[str | None, works("as in `wandb.init`.")] = None
    team: Annotated[str | None, works("the `entity` of `wandb.init`.")] = None
    project: Annotated[str | None, works("as in `wandb.init`.")] = "deepspeed"


class CometBlock(ConfigBlock):
    """`comet`: logs training metrics to Comet."""

    enabled: Annotated[bool, works("log to `comet_ml`.")] = False
    samples_log_interval: Annotated[Positive, works("the minimum number of samples between two logged points.")] = 100
    project: Annotated[str | None, works("as in `comet_ml.start`.")] = None
    workspace: Annotated[str | None, works("as in `comet_ml.start`.")] = None
    api_key: Annotated[str | None, works("as in `comet_ml.start`.")] = None
    experiment_name: Annotated[str | None, works("the experiment's name.")] = None
    experiment_key: Annotated[str | None, works("as in `comet_ml.start`.")] = None
    online: Annotated[bool | None, works("as in `comet_ml.start`.")] = None
    mode: Annotated[str | None, works("as in `comet_ml.start`.")] = None


class TrackioBlock(ConfigBlock):
    """`trackio`: logs training metrics to Trackio, on this machine or in a Space of Hugging Face. Not in DeepSpeed."""

    enabled: Annotated[bool, works("log to `trackio`.")] = False
    project: Annotated[str, works("as in `trackio.init`.")] = "zeroshard"
    name: Annotated[str | None, works("the run's name, as in `trackio.init`.")] = None
    group: Annotated[str | None, works("as in `trackio.init`.")] = None
    space_id: Annotated[str | None, works("as in `trackio.init`.")] = None


class MlflowBlock(ConfigBlock):
    """`mlflow`: logs training metrics to a run of MLflow. Not in DeepSpeed."""

    enabled: Annotated[bool, works("log to `mlflow`.")] = False
    tracking_uri: Annotated[str | None, works("the server or the file. Default: MLflow's own (`MLFLOW_TRACKING_URI`).")] = None
    experiment: Annotated[str, works("the experiment's name. It is created if it does not exist.")] = "zeroshard"
    run_name: Annotated[str | None, works("the run's name. Default: MLflow invents one.")] = None


class CommsLoggerBlock(ConfigBlock):
    """`comms_logger`: logs the bytes that rank 0 sends."""

    enabled: Annotated[bool, works(
        "log the bytes that rank 0 sent, by collective, in the line that `steps_per_print` prints and in the monitors. The "
        "count covers the last step if a monitor is enabled, and otherwise all steps since the previous line.")] = False
    verbose: Annotated[bool, no_meaning("bytes are always counted by collective.")] = False
    prof_all: Annotated[bool, no_meaning("all collectives are always counted.")] = True
    prof_ops: Annotated[list[Any], no_meaning("all collectives are always counted.")] = []
    debug: Annotated[bool, no_meaning("bytes are always counted by collective.")] = False


class ActivationCheckpointingBlock(ConfigBlock):
    """`activation_checkpointing`: recomputation of activations in the backward, and storage of the saved inputs.

    The options apply to the modules that `checkpoint_units` names. They also apply to
    `zeroshard.checkpointing.checkpoint` after `zeroshard.checkpointing.configure(deepspeed_config=...)`. A model's own
    `activation_checkpointing_enable()` (in older releases of transformers, `gradient_checkpointing_enable()`) ignores them.
    """

    checkpoint_units: Annotated[Literal["auto"] | tuple[str, ...] | None, works(
        'checkpoint these modules, without a change to the model. "auto": each unit, such as a transformer layer. A list: full '
        "module names, in which `*` matches anything. Not in DeepSpeed.")] = None
    partition_activations: Annotated[bool, no_meaning(
        "torch's checkpointing keeps each input whole. A warning says so.")] = False
    cpu_checkpointing: Annotated[bool, works(
        "keep saved inputs in pinned CPU memory. It has no effect if the model computes on the CPU.")] = False
    contiguous_memory_optimization: Annotated[bool, no_meaning(
        "saved inputs are in memory of torch's allocator, which reuses it. A warning says so.")] = False
    number_checkpoints: Annotated[Count | None, no_meaning(
        "it belongs to `contiguous_memory_optimization`. A warning says so.")] = None
    synchronize_checkpoint_boundary: Annotated[bool, works(
        "synchronise with the accelerator at the start and end of each checkpoint.")] = False
    profile: Annotated[bool, works(
        "measure the time and bytes of each checkpoint. Read them with `engine.checkpointing.table()` or, after `configure`, "
        "`zeroshard.checkpointing.configured().table()`.")] = False


class CheckpointBlock(ConfigBlock):
    """`checkpoint`: writing and reading of checkpoints. zeroshard has one format."""

    tag_validation: Annotated[Literal["Ignore", "Warn", "Fail"], _text(str.capitalize), works(
        "controls how a save treats different tags on ranks. `Fail` raises an error on all ranks. `Warn` warns and uses rank 0's tag. "
        "`Ignore` uses rank 0's tag without a warning.")] = "Warn"
    load_universal: Annotated[bool, no_meaning("every checkpoint loads at any world size and stage.")] = False
    use_node_local_storage: Annotated[bool, works(
        "the folder of checkpoints is local to each host: on a local disk, or in memory (/dev/shm). Each host's "
        "files are copied to the next host, so no checkpoint is lost if one host fails. During a load, each host copies its missing "
        "files from the other hosts.")] = False
    parallel_write: Annotated[Any, no_meaning("every rank writes its own file.")] = None
    checkpoint_serialization: Annotated[bool, no_meaning("files are safetensors, and nothing is pickled.")] = True
    writer: Annotated[Any, no_meaning("files are written directly from the states' memory.")] = None


class TensorParallelBlock(ConfigBlock):
    """`tensor_parallel`: splits weight matrices across adjacent ranks (tensor parallelism).

    [Tensor parallelism with sharding](../composing.md) lists the supported models and how each call behaves on a divided model.
    """

    autotp_size: Annotated[Count, works(
        "the number of ranks that divide one model and get the same batches. 0 or 1: no division. `initialize` and "
        "`deepspeed.tp_model_init` divide the matrices that the `tp_plan` of a transformers model names, at any stage.")] = 0
    tp_overlap_comm: Annotated[bool, no_meaning("torch waits for each all-reduce when its result is first used.")] = False
    partition_config: Annotated[dict[str, Any] | None, refused(
        "zeroshard uses the model's own plan (transformers' `tp_plan`). For another plan, divide the model with torch's `parallelize_module` first.")] = None
    preset_model: Annotated[str | None, refused("zeroshard uses the model's own plan (transformers' `tp_plan`).")] = None


_OF_MODEL = "zeroshard uses the model's own plan and routing (transformers' `ep_plan`)."
_OF_AUTOEP = "transformers' exchange of tokens, and its kernels for experts, have no such choice."


class ExpertParallelBlock(ConfigBlock):
    """`expert_parallel`: each rank holds a part of the experts, and gets their tokens from the other ranks.

    [Mixtures of experts](../mixtures_of_experts.md) lists what holds, and when it sends less.
    """

    enabled: Annotated[bool, works("divide experts over `autoep_size` ranks.")] = False
    autoep_size: Annotated[Count, works(
        "the number of adjacent ranks that divide the experts of a transformers model with an `ep_plan`. They get different batches. "
        "0 or 1: no division.")] = 1
    expert_tensor_parallel_size: Annotated[Literal[1], works("must be 1: each expert is whole on its rank.")] = 1
    preset_model: Annotated[str | None, no_meaning(_OF_MODEL)] = None
    moe_layer_pattern: Annotated[str | None, no_meaning(_OF_MODEL)] = None
    expert_pattern: Annotated[str | None, no_meaning(_OF_MODEL)] = None
    router_pattern: Annotated[str | None, no_meaning(_OF_MODEL)] = None
    num_experts_attr: Annotated[str | None, no_meaning(_OF_MODEL)] = None
    top_k_attr: Annotated[str | None, no_meaning(_OF_MODEL)] = None
    has_shared_experts: Annotated[bool | None, no_meaning(_OF_MODEL)] = None
    shared_experts_pattern: Annotated[str | None, no_meaning(_OF_MODEL)] = None
    shared_experts_gate_pattern: Annotated[str | None, no_meaning(_OF_MODEL)] = None
    expert_w1: Annotated[str | None, no_meaning(_OF_MODEL)] = None
    expert_w2: Annotated[str | None, no_meaning(_OF_MODEL)] = None
    expert_w3: Annotated[str | None, no_meaning(_OF_MODEL)] = None
    use_grouped_mm: Annotated[bool, no_meaning(_OF_AUTOEP)] = True
    disable_triton_grouped_mm: Annotated[bool, no_meaning(_OF_AUTOEP)] = False
    validate_folding_routing: Annotated[bool, no_meaning(_OF_AUTOEP)] = False
    async_split_plan: Annotated[bool, no_meaning(_OF_AUTOEP)] = False
    combine_impl: Annotated[Any, no_meaning(_OF_AUTOEP)] = None
    row_weighting_impl: Annotated[Any, no_meaning(_OF_AUTOEP)] = None
    gate_up_impl: Annotated[Any, no_meaning(_OF_AUTOEP)] = None
    comm_backend: Annotated[Any, no_meaning(_OF_AUTOEP)] = None
    comm_num_sm: Annotated[Any, no_meaning(_OF_AUTOEP)] = None
    comm_qp_margin: Annotated[Any, no_meaning(_OF_AUTOEP)] = None
    comm_max_tokens_per_rank: Annotated[Any, no_meaning(_OF_AUTOEP)] = None
    score_func: Annotated[Any, refused(_OF_MODEL)] = None
    score_apply: Annotated[Any, refused(_OF_MODEL)] = None
    top_k: Annotated[Any, refused(_OF_MODEL)] = None
    route_norm: Annotated[bool | None, refused(_OF_MODEL)] = None
    route_scale: Annotated[Any, refused(_OF_MODEL)] = None
    routed_scaling_factor: Annotated[Any, refused(_OF_MODEL)] = None
    num_expert_groups: Annotated[Any, refused(_OF_MODEL)] = None
    num_limited_groups: Annotated[Any, refused(_OF_MODEL)] = None
    load_balance_coeff: Annotated[Any, refused(_OF_MODEL)] = None
    expert_activation: Annotated[str | None, refused(_OF_MODEL)] = None

    @property
    def ranks(self) -> int:
        """The number of ranks that divide experts."""
        return max(self.autoep_size, 1) if self.enabled else 1


_OF_DEEPCOMPILE = "it configures DeepCompile, which zeroshard does not support."
_COMPILE_YOURSELF = "zeroshard does not compile the model from the config. Call `model.compile()` in your script, or set transformers' `torch_compile`."


class CompileBlock(ConfigBlock):
    """`compile`: DeepSpeed's compilation options. zeroshard accepts these options, except `deepcompile`, and ignores them."""

    deepcompile: Annotated[bool, refused("DeepCompile runs DeepSpeed's compiler passes. Use `model.compile()` instead.")] = False
    enabled: Annotated[bool, no_meaning(_COMPILE_YOURSELF)] = False
    disable: Annotated[bool, no_meaning(_COMPILE_YOURSELF)] = False
    backend: Annotated[str | None, no_meaning(_COMPILE_YOURSELF)] = None
    kwargs: Annotated[dict[str, Any] | None, no_meaning(_COMPILE_YOURSELF)] = None
    passes: Annotated[list[str] | None, no_meaning(_OF_DEEPCOMPILE)] = None
    free_activation: Annotated[bool, no_meaning(_OF_DEEPCOMPILE)] = False
    free_activation_threshold: Annotated[int, no_meaning(_OF_DEEPCOMPILE)] = 10485760
    offload_activation: Annotated[bool, no_meaning(_OF_DEEPCOMPILE)] = False
    offload_activation_pin_memory: Annotated[bool, no_meaning(_OF_DEEPCOMPILE)] = True
    offload_opt_states: Annotated[bool, no_meaning(_OF_DEEPCOMPILE)] = False
    double_buffer: Annotated[bool, no_meaning(_OF_DEEPCOMPILE)] = True
    symmetric_memory: Annotated[bool, no_meaning(_OF_DEEPCOMPILE)] = False
    debug_log: Annotated[bool, no_meaning(_OF_DEEPCOMPILE)] = False
    offload_parameters: Annotated[bool, no_meaning(_OF_DEEPCOMPILE)] = False
    sync_before_reduce: Annotated[bool, no_meaning(_OF_DEEPCOMPILE)] = False
    sync_after_reduce: Annotated[bool, no_meaning(_OF_DEEPCOMPILE)] = False
    sync_before_allgather: Annotated[bool, no_meaning(_OF_DEEPCOMPILE)] = False
    sync_after_allgather: Annotated[bool, no_meaning(_OF_DEEPCOMPILE)] = False
    keep_int_input_tensors: Annotated[bool, no_meaning(_OF_DEEPCOMPILE)] = True
    keep_all_input_tensors: Annotated[bool, no_meaning(_OF_DEEPCOMPILE)] = False
    autoep_non_moe: Annotated[bool, no_meaning(_OF_DEEPCOMPILE)] = False


class Schema(BaseModel):
    """The top level of a config. Unknown keys are errors, except keys of other programs that `ignored_keys` lists."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    ignored_keys: Annotated[tuple[str, ...], works(
        "top-level keys that belong to other programs. zeroshard raises an error for any other unknown key. Not in DeepSpeed.")] = ()
    train_batch_size: Annotated[Positive | None, works("samples per optimizer step, over all data-parallel ranks and microbatches.")] = None
    train_micro_batch_size_per_gpu: Annotated[Positive | None, works(
        "samples per forward on one rank. A config for training needs this key or `train_batch_size`.")] = None
    gradient_accumulation_steps: Annotated[Positive | None, works("microbatches per optimizer step.")] = None
    managed_gradient_accumulation: Annotated[bool, works(
        "the engine counts microbatches. false: each `engine.step()` is an optimizer step, after any number of backwards.")] = True
    gradient_clipping: Annotated[NonNegative, works(
        "the maximum global L2 norm of the gradients. 0 turns clipping off. Default: 1.0, as in DeepSpeed 0.19.8.")] = 1.0
    zero_optimization: Annotated[ZeroBlock, works("sharding and communication.")] = ZeroBlock()
    optimizer: Annotated[OptimizerBlock | None, works("the optimizer, unless you pass one to `initialize`.")] = None
    scheduler: Annotated[SchedulerBlock | None, works("the scheduler, unless you pass one to `initialize`.")] = None
    min_lr: Annotated[NonNegative, works("a lower bound on a scheduler's learning rates. Not in DeepSpeed.")] = 0.0
    bf16: Annotated[BF16Block, Field(validation_alias=AliasChoices("bf16", "bfloat16")), works(
        "bfloat16 training.")] = BF16Block()
    fp16: Annotated[FP16Block, works("fp16 training.")] = FP16Block()
    torch_autocast: Annotated[AutocastBlock, works("mixed precision by torch.autocast.")] = AutocastBlock()
    data_types: Annotated[DataTypesBlock, works("the dtypes of gradients, parameters and buffers.")] = DataTypesBlock()
    communication_data_type: Annotated[DType | None, works(
        "the dtype in which ranks send gradients. Default: the parameters' dtype, or fp32 if that dtype has 16 bits and the "
        "backend rounds after each addition (NCCL).")] = None
    seq_parallel_communication_data_type: Annotated[Any, no_meaning(
        "sequence parallelism sends queries, keys, values and results in their own dtype.")] = "fp32"
    gradient_predivide_factor: Annotated[PositiveNumber, works(
        "divide gradients by this factor before they are summed over ranks, and by (number of ranks / factor) afterwards.")] = 1.0
    prescale_gradients: Annotated[bool, works(
        "divide gradients by the number of ranks before they are summed, not afterwards. It overrides "
        "`gradient_predivide_factor`.")] = False
    gradient_allreduce_op: Annotated[Literal["mean", "sum"], _text(str.lower), works(
        "average gradients over ranks, or sum them.")] = "mean"
    fp32_allreduce: Annotated[bool, refused('set `"communication_data_type": "fp32"` instead.')] = False
    graph_harvesting: Annotated[bool, no_meaning("zeroshard does not capture graphs.")] = False
    sparse_gradients: Annotated[bool, refused("all gradients are dense.")] = False
    steps_per_print: Annotated[Annotated[float, Field(gt=0, allow_inf_nan=True)] | None, works(
        "the interval in steps at which rank 0 prints step, loss, lr, loss scale, norm, samples/s and memory. "
        "null: a line at every step with `wall_clock_breakdown` or `memory_breakdown`; otherwise none.")] = None
    wall_clock_breakdown: Annotated[bool, works(
        "log rank 0's milliseconds per step for forward, backward, optimizer step, and waits for reductions and gathers, in the line "
        "that `steps_per_print` prints and in the monitors.")] = False
    memory_breakdown: Annotated[bool, works("log rank 0's memory by model state, in the line that `steps_per_print` prints and in the monitors.")] = False
    dump_state: Annotated[bool, works("print the resolved config at the start.")] = False
    tensorboard: Annotated[MonitorBlock, works("logs for TensorBoard. Requires the package `tensorboard`.")] = MonitorBlock()
    csv_monitor: Annotated[CsvMonitorBlock, works("one CSV file per metric.")] = CsvMonitorBlock()
    json_monitor: Annotated[JsonMonitorBlock, works(
        "one JSON line per step, for programs and `zeroshard report`. Not in DeepSpeed.")] = JsonMonitorBlock()
    wandb: Annotated[WandbBlock, works("a log in Weights & Biases. Requires the package `wandb`.")] = WandbBlock()
    comet: Annotated[CometBlock, works("a log in Comet. Requires the package `comet_ml`.")] = CometBlock()
    trackio: Annotated[TrackioBlock, works(
        "a log in Trackio. Requires the package `trackio`. Not in DeepSpeed.")] = TrackioBlock()
    mlflow: Annotated[MlflowBlock, works("a log in MLflow. Requires the package `mlflow`. Not in DeepSpeed.")] = MlflowBlock()
    comms_logger: Annotated[CommsLoggerBlock, works("the bytes that rank 0 sends.")] = CommsLoggerBlock()
    activation_checkpointing: Annotated[ActivationCheckpointingBlock, works(
        "recomputation of activations.")] = ActivationCheckpointingBlock()
    aio: Annotated[AioBlock, works("I/O settings of disk offload.")] = AioBlock()
    checkpoint: Annotated[CheckpointBlock, works("writing and reading of checkpoints.")] = CheckpointBlock()
    dataloader_drop_last: Annotated[bool, works("drop an incomplete last batch of `initialize`'s `training_data`.")] = False
    zero_allow_untested_optimizer: Annotated[bool, works(
        "accept optimizer classes that zeroshard does not recognise. Parameters are not divided between ranks for these classes. "
        "false: zeroshard raises an error for these classes.")] = False
    zero_force_ds_cpu_optimizer: Annotated[bool, no_meaning("with offload, the CPU always runs the optimizer that you choose.")] = True
    disable_allgather: Annotated[bool, no_meaning("parameters are always all-gathered.")] = False
    disable_python_gc: Annotated[bool, refused("call `gc.disable()` in your script.")] = False
    vocabulary_size: Annotated[Any, no_meaning("DeepSpeed uses it only for a warning.")] = None
    log_level: Annotated[Any, no_meaning("set the level of Python's logger `zeroshard` in your script instead.")] = None
    timers: Annotated[dict[str, Any] | None, no_meaning("the line that `steps_per_print` prints always includes the speed.")] = None
    pipeline: Annotated[dict[str, Any] | None, no_meaning("DeepSpeed uses it only for pipeline modules.")] = None
    use_data_before_expert_parallelism: Annotated[bool, no_meaning("adjacent ranks divide experts.")] = False
    flops_profiler: Annotated[dict[str, Any] | None, refused("use `torch.utils.flop_counter.FlopCounterMode`.")] = None
    autotuning: Annotated[dict[str, Any] | None, refused("choose sizes with `zeroshard plan`.")] = None
    compile: Annotated[CompileBlock, works(
        "DeepSpeed's compilation options. zeroshard accepts these options, except `deepcompile`, and ignores them.")] = CompileBlock()
    tensor_parallel: Annotated[TensorParallelBlock, BeforeValidator(_block_of_null), works(
        "division of matrices over ranks.")] = TensorParallelBlock()
    expert_parallel: Annotated[ExpertParallelBlock, BeforeValidator(_block_of_null), works(
        "division of experts over ranks.")] = ExpertParallelBlock()
    sequence_parallel_size: Annotated[Literal[1], BeforeValidator(_one_rank), works(
        "must be 1. To divide sequences over ranks, use `zeroshard.sequence.Sequences`, or accelerate's "
        "`ParallelismConfig(sp_size=...)`.")] = 1
    data_parallel_size: Annotated[Positive | None, no_meaning("the process group determines this size.")] = None
    hybrid_engine: Annotated[dict[str, Any] | None, refused("generate inside `zeroshard.unsharded` instead.")] = None
    data_efficiency: Annotated[dict[str, Any] | None, refused("curricula and random token dropping change the data.")] = None
    curriculum_learning: Annotated[dict[str, Any] | None, refused("curriculum learning changes the training data.")] = None
    progressive_layer_drop: Annotated[dict[str, Any] | None, refused("layer drop changes the model.")] = None
    eigenvalue: Annotated[dict[str, Any] | None, refused("it is part of DeepSpeed's compression.")] = None
    quantize_training: Annotated[dict[str, Any] | None, refused("quantised training changes the result.")] = None
    weight_quantization: Annotated[dict[str, Any] | None, refused("quantised weights change the result.")] = None
    compression_training: Annotated[dict[str, Any] | None, refused("compression changes the result.")] = None
    sparse_attention: Annotated[dict[str, Any] | None, refused("sparse attention changes the model.")] = None
    elasticity: Annotated[dict[str, Any] | None, refused(
        "set the batch sizes in the config. A checkpoint loads on any number of ranks.")] = None
    amp: Annotated[dict[str, Any] | None, refused("it configures Apex. Use `fp16`, `bf16` or `torch_autocast`.")] = None
    datastates_ckpt: Annotated[dict[str, Any] | None, refused("save with `engine.save_checkpoint(folder, asynchronous=True)`.")] = None
    nebula: Annotated[dict[str, Any] | None, refused("save with `engine.save_checkpoint(folder, asynchronous=True)`.")] = None
# fmt: on


MONITORS = ("json_monitor", "csv_monitor", "tensorboard", "wandb", "comet", "trackio", "mlflow")
"""The keys of the monitors' blocks: code of the package reads this list. `docs/watching_a_run.md` and an example name them too."""


def block_of(block: type[BaseModel], key: str) -> type[BaseModel] | None:
    """Return the block that a key holds, or None if it holds a plain value."""
    if key not in block.model_fields:
        return None
    annotation = block.model_fields[key].annotation
    options = [annotation, *getattr(annotation, "__args__", ())]
    return next((option for option in options if isinstance(option, type) and issubclass(option, BaseModel)), None)


def effect_of(block: type[BaseModel], key: str) -> Effect:
    """Return the effect of a key."""
    return next(item for item in block.model_fields[key].metadata if isinstance(item, Effect))


def paths_of(block: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the path of every key below a block."""
    for key in block.model_fields:
        inner = block_of(block, key)
        if inner is None:
            yield f"{prefix}{key}"
        else:
            yield from paths_of(inner, f"{prefix}{key}.")
            if key == "bf16":
                yield from paths_of(inner, "bfloat16.")


def walk(block: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any, bool, Effect]]:
    """Yield the path of every key below a block, its value, whether it was set, and its effect."""
    for key in type(block).model_fields:
        value = getattr(block, key)
        path = f"{prefix}{key}"
        if isinstance(value, BaseModel):
            yield from walk(value, f"{path}.")
        else:
            yield path, value, key in block.model_fields_set, effect_of(type(block), key)


KEYS: dict[str, None] = dict.fromkeys(paths_of(Schema))
"""The path of every key of the schema."""
