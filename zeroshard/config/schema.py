"""Owns the keys of a DeepSpeed JSON config: their types, defaults, and what each does here; and the walk over them.

docs/config/ is written from this file by `zeroshard config document`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from zeroshard.config.fields import (
    Block,
    Count,
    DType,
    Effect,
    HalfDType,
    NonNegative,
    Positive,
    PositiveNumber,
    no_meaning,
    refused,
    works,
)
from zeroshard.config.zero_block import AioBlock, ZeroBlock


def _one_rank(value: Any) -> Any:
    if isinstance(value, int) and value > 1:
        raise PydanticCustomError(
            "sequences",
            "a config alone cannot cut sequences: call zeroshard.sequence.Sequences in your loop, or give a Trainer "
            "ParallelismConfig(sp_size=...)",
        )
    return value


def _divided(value: Any) -> Any:
    """Return a block of tensor parallelism; None where it is over one rank."""
    return None if isinstance(value, dict) and value.get("autotp_size") == 1 else value


def _in_small_letters(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


# A table: one row for each key.
# fmt: off
class OptimizerBlock(Block):
    """`optimizer`: which one, and its arguments."""

    type: Annotated[str, works(
        "Adam (AdamW's mathematics unless `adam_w_mode` is false), AdamW, SGD, Adagrad, Lion, Muon (matrices inside the blocks; "
        "AdamW for the rest), or any class of torch.optim. One that looks at whole parameters gets them whole.")]
    params: Annotated[dict[str, Any], works(
        "arguments of the optimizer; Adam, AdamW, SGD and Adagrad are fused unless `fused` is false.")] = {}
    torch_adam: Annotated[bool, no_meaning("it counts among the params.")] = False
    legacy_fusion: Annotated[bool, no_meaning("a switch of DeepSpeed's own kernels.")] = False


class SchedulerBlock(Block):
    """`scheduler`: the learning rate over the steps."""

    type: Annotated[str, works(
        "WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest, or any class of torch.optim.lr_scheduler. It "
        "moves after every step that was applied.")]
    params: Annotated[dict[str, Any], works("arguments of the scheduler.")] = {}


class BF16Block(Block):
    """`bf16`: parameters and gradients in bfloat16, master weights in fp32. The old name `bfloat16` is read too."""

    enabled: Annotated[bool, works('train in bfloat16; "auto" takes the dtype that the model has.')] = False
    check_grad_overflow: Annotated[bool, works("a step whose gradients are not finite is skipped.")] = True
    immediate_grad_update: Annotated[bool, no_meaning("gradients are taken as they are made.")] = False
    bf16_master_weights_and_grads: Annotated[bool, refused("master weights are fp32.")] = False
    bf16_optimizer_states: Annotated[bool, refused("optimizer states are fp32.")] = False


class FP16Block(Block):
    """`fp16`: parameters and gradients in half precision, master weights in fp32, and a loss scale."""

    enabled: Annotated[bool, works('train in fp16; "auto" takes the dtype that the model has.')] = False
    auto_cast: Annotated[bool, works("cast floating-point inputs of the model to fp16.")] = False
    loss_scale: Annotated[NonNegative, works("a fixed loss scale; 0 is a dynamic one.")] = 0
    initial_scale_power: Annotated[Annotated[Count, Field(le=127)], works("a dynamic scale starts at 2 to this power.")] = 16
    loss_scale_window: Annotated[Positive, works("clean steps after which a dynamic scale doubles.")] = 1000
    hysteresis: Annotated[Positive, works(
        "overflows before the scale halves; all but the last leave it unchanged.")] = 2
    consecutive_hysteresis: Annotated[bool, works(
        "one clean step resets the count of tolerated overflows, not only a clean window.")] = False
    min_loss_scale: Annotated[PositiveNumber, works("the scale never goes below it; an overflow there is an error.")] = 1
    fp16_master_weights_and_grads: Annotated[bool, refused("master weights are fp32.")] = False


class AutocastBlock(Block):
    """`torch_autocast`: parameters stay in fp32, and torch.autocast picks the dtype of each operation."""

    enabled: Annotated[bool, works("run the model inside torch.autocast.")] = False
    dtype: Annotated[HalfDType, works(
        "autocast's dtype; with fp16 the loss is scaled as the fp16 block says.")] = "bfloat16"
    lower_precision_safe_modules: Annotated[list[str] | None, no_meaning(
        "torch.autocast decides by operation; parameters travel as they are kept.")] = None


class DataTypesBlock(Block):
    """`data_types`: dtypes that differ from the model's."""

    grad_accum_dtype: Annotated[DType | None, works(
        "dtype in which gradients are kept and summed over microbatches. Left out: fp32; with one microbatch, the model's.")] = None
    param_dtype: Annotated[DType | None, works("dtype of the forward, in place of what fp16 and bf16 say.")] = None
    buffer_dtype: Annotated[DType | None, works("dtype of floating-point buffers. Left out: each keeps its own.")] = None
    keep_in_fp32_modules: Annotated[list[str] | None, refused(
        "a unit has one dtype; keep such a module out of the model's half precision yourself.")] = None


class MonitorBlock(Block):
    """`tensorboard`, `csv_monitor`, `json_monitor`: files of what `engine.step()` sees, written by rank 0."""

    enabled: Annotated[bool, works(
        "write Train/Samples/train_loss, lr, loss_scale and grad_norm at each step; with wall_clock_breakdown, memory_breakdown "
        "and comms_logger their figures too. json_monitor: all that is known, in steps.jsonl.")] = False
    output_path: Annotated[str, works("the folder; left out, the present one.")] = ""
    job_name: Annotated[str, works("the folder below it.")] = "DeepSpeedJobName"


class WandbBlock(Block):
    """`wandb`: the same to Weights & Biases."""

    enabled: Annotated[bool, works("log to wandb, which is imported only then.")] = False
    group: Annotated[str | None, works("as wandb.init.")] = None
    team: Annotated[str | None, works("wandb.init's entity.")] = None
    project: Annotated[str | None, works("as wandb.init.")] = "deepspeed"


class CometBlock(Block):
    """`comet`: the same to Comet."""

    enabled: Annotated[bool, works("log to comet_ml, which is imported only then.")] = False
    samples_log_interval: Annotated[Positive, works("samples between two points.")] = 100
    project: Annotated[str | None, works("as comet_ml.start.")] = None
    workspace: Annotated[str | None, works("as comet_ml.start.")] = None
    api_key: Annotated[str | None, works("as comet_ml.start.")] = None
    experiment_name: Annotated[str | None, works("the experiment's name.")] = None
    experiment_key: Annotated[str | None, works("as comet_ml.start.")] = None
    online: Annotated[bool | None, works("as comet_ml.start.")] = None
    mode: Annotated[str | None, works("as comet_ml.start.")] = None


class CommsLoggerBlock(Block):
    """`comms_logger`: what travels between ranks."""

    enabled: Annotated[bool, works("the line of steps_per_print also says the bytes sent since the last, by collective.")] = False
    verbose: Annotated[bool, no_meaning("bytes are counted by collective.")] = False
    prof_all: Annotated[bool, no_meaning("all collectives are counted.")] = True
    prof_ops: Annotated[list[Any], no_meaning("all collectives are counted.")] = []
    debug: Annotated[bool, no_meaning("bytes are counted by collective.")] = False


class ActivationCheckpointingBlock(Block):
    """`activation_checkpointing`: activations that are computed again in the backward, on top of torch's checkpointing.

    It applies to the modules that `checkpoint_units` names, and to `zeroshard.checkpointing.checkpoint` after
    `zeroshard.checkpointing.configure(deepspeed_config=...)`. A model's own `gradient_checkpointing_enable()` is torch's alone.
    """

    checkpoint_units: Annotated[Literal["auto"] | tuple[str, ...] | None, works(
        'checkpoint modules without touching the model: "auto" is each block of a list of blocks; else a list '
        'of full ' "names, with `*` for anything. Not in DeepSpeed.")] = None
    partition_activations: Annotated[bool, works(
        "saved inputs that are the same over a model-parallel group are kept sharded over it; without one, it says so.")] = False
    cpu_checkpointing: Annotated[bool, works("saved inputs rest in pinned CPU memory, and come back ahead of use.")] = False
    contiguous_memory_optimization: Annotated[bool, works(
        "saved inputs rest in memory that is allocated once, for number_checkpoints.")] = False
    number_checkpoints: Annotated[Count | None, works(
        "the most checkpoints of a forward, for contiguous_memory_optimization.")] = None
    synchronize_checkpoint_boundary: Annotated[bool, works("wait for the accelerator where a checkpoint begins and ends.")] = False
    profile: Annotated[bool, works("measure time and bytes of each checkpoint: `engine.checkpointing.table()`.")] = False


class CheckpointBlock(Block):
    """`checkpoint`: how DeepSpeed writes and reads checkpoints; here there is one way, see docs/checkpoint_format.md."""

    tag_validation: Annotated[
        Literal["Ignore", "Warn", "Fail"],
        BeforeValidator(lambda value: value.capitalize() if isinstance(value, str) else value),
        works(
            "where ranks name different tags, Fail raises on all of them; Warn takes rank 0's and says so; Ignore takes it."
        ),
    ] = "Warn"
    load_universal: Annotated[bool, no_meaning("every checkpoint loads at any world size and stage.")] = False
    use_node_local_storage: Annotated[bool, works(
        "the folder is each host's own: a local disk, or memory (/dev/shm). The next host keeps a copy, so that the "
        "loss of one host loses nothing; at a load hosts give one another what they lack.")] = False
    parallel_write: Annotated[Any, no_meaning("every rank writes its own file.")] = None
    checkpoint_serialization: Annotated[bool, no_meaning("safetensors; nothing is pickled.")] = True
    writer: Annotated[Any, no_meaning("files are written straight from where the states lie.")] = None


_OF_DEEPCOMPILE = "an option of DeepCompile."
_COMPILE_YOURSELF = "nothing is compiled unless you do it: `model.compile()`, or transformers' `torch_compile`."


class CompileBlock(Block):
    """torch.compile, and DeepSpeed's own passes."""

    deepcompile: Annotated[bool, refused("DeepSpeed's passes over the graph; compile the model with torch's own.")] = False
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
    """The top level. Unknown keys are errors, but for those of other programs that `ignored_keys` names."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    ignored_keys: Annotated[tuple[str, ...], works(
        "top-level keys that other programs keep in this file; any other unknown key is an error. Not in DeepSpeed.")] = ()
    train_batch_size: Annotated[Positive | None, works("samples of one optimizer step, over all ranks and microbatches.")] = None
    train_micro_batch_size_per_gpu: Annotated[Positive | None, works(
        "samples of one forward on one rank. This or train_batch_size is needed to train.")] = None
    gradient_accumulation_steps: Annotated[Positive | None, works("microbatches per optimizer step.")] = None
    managed_gradient_accumulation: Annotated[bool, works(
        "the engine counts microbatches. false: every engine.step() ends a step, however many backwards it had.")] = True
    gradient_clipping: Annotated[NonNegative, works(
        "the largest global L2 norm of the gradients; 0 is off. Left out it is 1.0, as in DeepSpeed 0.19.")] = 1.0
    zero_optimization: Annotated[ZeroBlock, works("what is sharded.")] = ZeroBlock()
    optimizer: Annotated[OptimizerBlock | None, works("made here, unless `initialize` is given one.")] = None
    scheduler: Annotated[SchedulerBlock | None, works("made here, unless `initialize` is given one.")] = None
    min_lr: Annotated[NonNegative, works("a floor under the rates of every scheduler.")] = 0.0
    bf16: Annotated[BF16Block, Field(validation_alias=AliasChoices("bf16", "bfloat16")), works("bfloat16 training.")] = BF16Block()
    fp16: Annotated[FP16Block, works("fp16 training.")] = FP16Block()
    torch_autocast: Annotated[AutocastBlock, works("mixed precision by torch.autocast.")] = AutocastBlock()
    data_types: Annotated[DataTypesBlock, works("dtypes that differ from the model's.")] = DataTypesBlock()
    communication_data_type: Annotated[DType | None, works(
        "dtype in which gradients travel; left out: the parameters', or fp32 where that has 16 bits and the backend "
        "rounds each sum (NCCL).")] = None
    seq_parallel_communication_data_type: Annotated[Any, no_meaning("heads and positions are exchanged in their own dtype.")] = "fp32"
    gradient_predivide_factor: Annotated[PositiveNumber, works(
        "gradients are divided by it before they are summed over ranks, and by ranks / it after.")] = 1.0
    prescale_gradients: Annotated[bool, works(
        "gradients are divided by the number of ranks before they are summed, not after.")] = False
    gradient_allreduce_op: Annotated[Literal["mean", "sum"], BeforeValidator(_in_small_letters), works("gradients are averaged over ranks, or summed.")] = "mean"
    fp32_allreduce: Annotated[bool, refused('"communication_data_type": "fp32" is its new name.')] = False
    graph_harvesting: Annotated[bool, no_meaning("no graphs are captured here.")] = False
    sparse_gradients: Annotated[bool, refused("gradients are dense.")] = False
    steps_per_print: Annotated[Annotated[float, Field(gt=0, allow_inf_nan=True)] | None, works(
        "rank 0 prints step, loss, lr, loss scale, norm, samples/s and memory every so many steps.")] = None
    wall_clock_breakdown: Annotated[bool, works(
        "the milliseconds of forward, backward, step, and of waiting for reductions and gathers, per step.")] = False
    memory_breakdown: Annotated[bool, works("the bytes of each model state in that line.")] = False
    dump_state: Annotated[bool, works("print the resolved config at the start.")] = False
    tensorboard: Annotated[MonitorBlock, works("needs the tensorboard package.")] = MonitorBlock()
    csv_monitor: Annotated[MonitorBlock, works("one CSV file for each figure.")] = MonitorBlock()
    json_monitor: Annotated[MonitorBlock, works(
        "one line of JSON for each step, for programs and `zeroshard report`. Not in DeepSpeed.")] = MonitorBlock()
    wandb: Annotated[WandbBlock, works("needs the wandb package.")] = WandbBlock()
    comet: Annotated[CometBlock, works("needs the comet_ml package.")] = CometBlock()
    comms_logger: Annotated[CommsLoggerBlock, works("what travels between ranks.")] = CommsLoggerBlock()
    activation_checkpointing: Annotated[ActivationCheckpointingBlock, works("see its page.")] = ActivationCheckpointingBlock()
    aio: Annotated[AioBlock, works("how the disk is read and written.")] = AioBlock()
    checkpoint: Annotated[CheckpointBlock, works("see its page.")] = CheckpointBlock()
    dataloader_drop_last: Annotated[bool, works("drop the last incomplete batch of training_data.")] = False
    zero_allow_untested_optimizer: Annotated[bool, works(
        "an optimizer of a class that is unknown here gets whole parameters. Without it such an optimizer is refused.")] = False
    zero_force_ds_cpu_optimizer: Annotated[bool, no_meaning("torch's own optimizers are used.")] = True
    disable_allgather: Annotated[bool, no_meaning("parameters are always brought together by all-gathers.")] = False
    disable_python_gc: Annotated[bool, refused("turn the collector off in your script, with gc.disable().")] = False
    vocabulary_size: Annotated[Any, no_meaning("DeepSpeed warns where it is no multiple of 8.")] = None
    log_level: Annotated[Any, no_meaning("nothing is logged but what the config asks for.")] = None
    timers: Annotated[dict[str, Any] | None, no_meaning("speed is in the line of steps_per_print.")] = None
    pipeline: Annotated[dict[str, Any] | None, no_meaning("there is no pipeline parallelism.")] = None
    use_data_before_expert_parallelism: Annotated[bool, no_meaning("there is no expert parallelism.")] = False
    flops_profiler: Annotated[dict[str, Any] | None, refused("use torch.utils.flop_counter.FlopCounterMode.")] = None
    autotuning: Annotated[dict[str, Any] | None, refused("choose sizes with `zeroshard plan`.")] = None
    compile: Annotated[CompileBlock, works("what DeepSpeed compiles with, where a script has it compile.")] = CompileBlock()
    tensor_parallel: Annotated[dict[str, Any] | None, BeforeValidator(_divided), refused(
        "divide the model with torch's `parallelize_module`, then call `zeroshard.shard`.")] = None
    expert_parallel: Annotated[dict[str, Any] | None, refused("there is no expert parallelism.")] = None
    sequence_parallel_size: Annotated[Literal[1], BeforeValidator(_one_rank), works(
        "zeroshard.sequence.Sequences cuts sequences over ranks, or accelerate's ParallelismConfig(sp_size=...).")] = 1
    data_parallel_size: Annotated[Positive | None, no_meaning("the process group says it.")] = None
    hybrid_engine: Annotated[dict[str, Any] | None, refused("use the model inside `zeroshard.unsharded`.")] = None
    data_efficiency: Annotated[dict[str, Any] | None, refused("curriculum and random token dropping change the data.")] = None
    curriculum_learning: Annotated[dict[str, Any] | None, refused("it changes the data.")] = None
    progressive_layer_drop: Annotated[dict[str, Any] | None, refused("it changes the model.")] = None
    eigenvalue: Annotated[dict[str, Any] | None, refused("it belongs to DeepSpeed's compression.")] = None
    quantize_training: Annotated[dict[str, Any] | None, refused("quantised training changes the result.")] = None
    weight_quantization: Annotated[dict[str, Any] | None, refused("quantised weights change the result.")] = None
    compression_training: Annotated[dict[str, Any] | None, refused("compression changes the result.")] = None
    sparse_attention: Annotated[dict[str, Any] | None, refused("it changes the model.")] = None
    elasticity: Annotated[dict[str, Any] | None, refused("batch sizes follow from the config and the ranks alone.")] = None
    amp: Annotated[dict[str, Any] | None, refused("Apex; use fp16, bf16 or torch_autocast.")] = None
    datastates_ckpt: Annotated[dict[str, Any] | None, refused("save with engine.save_checkpoint(asynchronous=True).")] = None
    nebula: Annotated[dict[str, Any] | None, refused("save with engine.save_checkpoint(asynchronous=True).")] = None
# fmt: on


def block_of(block: type[BaseModel], key: str) -> type[BaseModel] | None:
    """Return the block that a key of another block holds, or None where it holds a plain value."""
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
    """Yield (path, value, whether it was set, effect) of every key below a block."""
    for key in type(block).model_fields:
        value = getattr(block, key)
        path = f"{prefix}{key}"
        if isinstance(value, BaseModel):
            yield from walk(value, f"{path}.")
        else:
            yield path, value, key in block.model_fields_set, effect_of(type(block), key)


KEYS: dict[str, None] = dict.fromkeys(paths_of(Schema))
"""The path of every key of the schema."""
