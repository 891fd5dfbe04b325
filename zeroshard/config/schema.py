"""Owns the keys of a DeepSpeed JSON config: their types, defaults, and what each does here. Called by config.load.

Every key carries an `Effect`: it works, or has no meaning here (accepted, and the resolved config says so), or would
change what the user gets and is not offered (refused when set to anything but its default). Nothing is accepted and ignored in silence.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

AUTO = "auto"


class Kind(StrEnum):
    """What a key does in zeroshard."""

    WORKS = "works"
    NO_MEANING = "has no meaning here"
    REFUSED = "not offered"


@dataclass(frozen=True)
class Effect:
    """What a key does in zeroshard, in a sentence."""

    kind: Kind
    text: str


def works(text: str) -> Effect:
    """A key that does its job."""
    return Effect(Kind.WORKS, text)


def no_meaning(text: str) -> Effect:
    """A key that is accepted with any value, since nothing here depends on it."""
    return Effect(Kind.NO_MEANING, text)


def refused(text: str) -> Effect:
    """A key that is accepted only with its default."""
    return Effect(Kind.REFUSED, text)


def _number_from_text(value: Any) -> Any:
    """JSON has no integer 5e8, and people quote it: "5e8" is 500000000."""
    if isinstance(value, str) and value != AUTO:
        try:
            number = float(value)
        except ValueError:
            return value
        return int(number) if number.is_integer() else number
    return value


Count = Annotated[int, BeforeValidator(_number_from_text), Field(ge=0)]
Positive = Annotated[int, BeforeValidator(_number_from_text), Field(gt=0)]
Number = Annotated[float, BeforeValidator(_number_from_text)]
NonNegative = Annotated[float, BeforeValidator(_number_from_text), Field(ge=0)]
Auto = Literal["auto"]
DType = Literal["fp32", "float32", "fp16", "float16", "bf16", "bfloat16"]


class Block(BaseModel):
    """A JSON object with known keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class OptimizerBlock(Block):
    """`optimizer`: which one, and its arguments."""

    type: Annotated[
        str,
        works(
            "Adam (AdamW mathematics unless adam_w_mode is false), AdamW, SGD, Adagrad, or any class of torch.optim."
        ),
    ]
    params: Annotated[
        dict[str, Any], works("arguments of the optimizer; Adam and AdamW are fused unless `fused` is false.")
    ] = {}
    legacy_fusion: Annotated[bool, no_meaning("a switch of DeepSpeed's own kernels.")] = False


class SchedulerBlock(Block):
    """`scheduler`: the learning rate over the steps."""

    type: Annotated[str, works("WarmupLR, WarmupDecayLR, or any class of torch.optim.lr_scheduler.")]
    params: Annotated[dict[str, Any], works("arguments of the scheduler.")] = {}


class BF16Block(Block):
    """`bf16`: parameters and gradients in bfloat16, master weights in fp32."""

    enabled: Annotated[bool | Auto, works('train in bfloat16; "auto" is off unless told otherwise.')] = False
    check_grad_overflow: Annotated[bool, no_meaning("bfloat16 has the range of fp32.")] = True
    immediate_grad_update: Annotated[bool, no_meaning("gradients are taken as they are made.")] = False
    bf16_master_weights_and_grads: Annotated[bool, refused("master weights are fp32.")] = False
    bf16_optimizer_states: Annotated[bool, refused("optimizer states are fp32.")] = False


class FP16Block(Block):
    """`fp16`: not offered yet; a block that is not enabled is accepted."""

    enabled: Annotated[bool | Auto, refused("fp16 with loss scaling; use bf16 or fp32.")] = False
    auto_cast: Annotated[bool, no_meaning("without fp16.")] = False
    loss_scale: Annotated[NonNegative, no_meaning("without fp16.")] = 0
    initial_scale_power: Annotated[Count, no_meaning("without fp16.")] = 16
    loss_scale_window: Annotated[Positive, no_meaning("without fp16.")] = 1000
    hysteresis: Annotated[Positive, no_meaning("without fp16.")] = 2
    consecutive_hysteresis: Annotated[bool, no_meaning("without fp16.")] = False
    min_loss_scale: Annotated[NonNegative, no_meaning("without fp16.")] = 1
    fp16_master_weights_and_grads: Annotated[bool, refused("master weights are fp32.")] = False


class OffloadBlock(Block):
    """`offload_optimizer`, `offload_param`: only `"device": "none"` so far."""

    device: Annotated[Literal["none", "cpu", "nvme"], refused("model states rest on the accelerator.")] = "none"
    nvme_path: Annotated[str | None, no_meaning("without offload.")] = None
    buffer_count: Annotated[Count, no_meaning("without offload.")] = 5
    buffer_size: Annotated[Count, no_meaning("without offload.")] = 100_000_000
    max_in_cpu: Annotated[Count, no_meaning("without offload.")] = 1_000_000_000
    pin_memory: Annotated[bool, no_meaning("without offload.")] = True
    pipeline_read: Annotated[bool, no_meaning("without offload.")] = False
    pipeline_write: Annotated[bool, no_meaning("without offload.")] = False
    fast_init: Annotated[bool, no_meaning("without offload.")] = False
    ratio: Annotated[NonNegative, no_meaning("without offload.")] = 1.0


class ZeroBlock(Block):
    """`zero_optimization`: what is sharded, and how it travels."""

    stage: Annotated[
        Annotated[int, Field(ge=0, le=3)] | bool,
        works(
            "the preset of the policy: 0 nothing, 1 optimizer states, 2 and gradients, 3 and parameters are sharded. "
            "true means 1, as in old configs."
        ),
    ] = 0
    reduce_bucket_size: Annotated[
        Positive | Auto, works("elements, the most that is reduced at once; bounds the transient buffers.")
    ] = 500_000_000
    allgather_bucket_size: Annotated[
        Positive | Auto, works("elements, the most that is gathered at once; the smaller of the two cuts the buckets.")
    ] = 500_000_000
    overlap_comm: Annotated[
        bool | Auto | None, works("collectives run behind the computation. Left out: yes. The bits are the same.")
    ] = None
    reduce_scatter: Annotated[
        bool, no_meaning("gradients are always reduce-scattered; an all-reduce would move the same bytes.")
    ] = True
    contiguous_gradients: Annotated[
        bool, no_meaning("gradients are packed as they are made, or sent from where they lie.")
    ] = True
    allgather_partitions: Annotated[bool, no_meaning("parameters are always brought together by all-gathers.")] = True
    use_multi_rank_bucket_allreduce: Annotated[bool, no_meaning("a bucket is cut evenly over all ranks.")] = True
    round_robin_gradients: Annotated[bool, no_meaning("shards are even, so there is no order to balance.")] = False
    legacy_stage1: Annotated[bool, no_meaning("there is one code path.")] = False
    elastic_checkpoint: Annotated[bool, no_meaning("a choice of checkpoint format in DeepSpeed.")] = False
    load_from_fp32_weights: Annotated[bool, no_meaning("master weights are always fp32.")] = True
    parameter_alignment: Annotated[Any, no_meaning("shards are aligned to 64 bytes.")] = False
    ignore_unused_parameters: Annotated[
        bool, no_meaning("an unused parameter counts as zeros, or is left alone if no rank used it.")
    ] = True
    compute_grad_norm: Annotated[bool, no_meaning("the norm costs one small message that is sent anyway.")] = True
    override_module_apply: Annotated[bool, no_meaning("nothing of torch is patched.")] = True
    memory_efficient_linear: Annotated[bool, no_meaning("nothing of torch is patched.")] = True
    pipeline_loading_checkpoint: Annotated[bool, no_meaning("a choice of DeepSpeed's checkpoint reader.")] = False
    log_trace_cache_warnings: Annotated[bool, no_meaning("an order that changes costs speed only.")] = False
    enable_sanity_checks: Annotated[bool, no_meaning("the checks are always on.")] = False
    save_muon_momentum_buffer_in_memory: Annotated[bool, no_meaning("Muon is refused.")] = False
    sub_group_size: Annotated[
        Positive | Auto, no_meaning("without offload the optimizer steps over everything in one call.")
    ] = 1_000_000_000
    stage3_prefetch_bucket_size: Annotated[
        Count | Auto, no_meaning("the next unit is prefetched, whatever its size.")
    ] = 50_000_000
    stage3_param_persistence_threshold: Annotated[
        Count | Auto, no_meaning("what belongs to no block stays unsharded from forward to backward.")
    ] = 100_000
    stage3_model_persistence_threshold: Annotated[
        Count | Auto, no_meaning("as stage3_param_persistence_threshold.")
    ] = 2**63 - 1
    stage3_max_live_parameters: Annotated[
        Count, no_meaning("at most the root, the unit in use and the next one are unsharded.")
    ] = 1_000_000_000
    stage3_max_reuse_distance: Annotated[Count, no_meaning("only the forward's last unit is kept.")] = 1_000_000_000
    stage3_module_granularity_threshold: Annotated[Count, no_meaning("units are whole blocks.")] = 0
    stage3_gather_16bit_weights_on_model_save: Annotated[
        bool | Auto, no_meaning("read parameters inside zeroshard.unsharded.")
    ] = False
    stage3_gather_fp16_weights_on_model_save: Annotated[
        bool | Auto, no_meaning("the old name of stage3_gather_16bit_weights_on_model_save.")
    ] = False
    stage3_use_all_reduce_for_fetch_params: Annotated[bool, no_meaning("parameters are all-gathered.")] = False
    stage3_allgather_sequential: Annotated[bool, no_meaning("a choice of schedule in DeepSpeed.")] = False
    leaf_module: Annotated[Any, no_meaning("a unit is always unsharded whole.")] = None
    offload_param: Annotated[OffloadBlock | None, works("where sharded parameters rest.")] = None
    offload_optimizer: Annotated[OffloadBlock | None, works("where optimizer states rest.")] = None
    cpu_offload: Annotated[bool, refused("the old name of offload_optimizer.")] = False
    cpu_offload_param: Annotated[bool, refused("the old name of offload_param.")] = False
    cpu_offload_use_pin_memory: Annotated[bool, no_meaning("without offload.")] = False
    zero_hpz_partition_size: Annotated[Positive, refused("secondary shards (ZeRO++ hpZ).")] = 1
    zero_quantized_weights: Annotated[bool, refused("quantised all-gathers (ZeRO++ qwZ) change the result.")] = False
    zero_quantized_nontrainable_weights: Annotated[bool, refused("quantised all-gathers change the result.")] = False
    zero_quantized_gradients: Annotated[bool, refused("quantised reductions (ZeRO++ qgZ) change the result.")] = False
    zenflow: Annotated[Any, refused("ZenFlow changes the result.")] = None


class Schema(BaseModel):
    """The top level. Unknown keys are warned about, not refused: other programs keep their own keys there."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    train_batch_size: Annotated[
        Positive | Auto | None, works("samples of one optimizer step, over all ranks and microbatches.")
    ] = None
    train_micro_batch_size_per_gpu: Annotated[Positive | Auto | None, works("samples of one forward on one rank.")] = (
        None
    )
    gradient_accumulation_steps: Annotated[Positive | Auto | None, works("microbatches per optimizer step.")] = None
    gradient_clipping: Annotated[
        NonNegative | Auto,
        works("the largest global L2 norm of the gradients; 0 is off. Left out it is 1.0, as in DeepSpeed 0.19."),
    ] = 1.0
    zero_optimization: Annotated[ZeroBlock, works("what is sharded.")] = ZeroBlock()
    optimizer: Annotated[OptimizerBlock | None, works("made here, unless `initialize` is given one.")] = None
    scheduler: Annotated[SchedulerBlock | None, works("made here, unless `initialize` is given one.")] = None
    bf16: Annotated[BF16Block, works("bfloat16 training.")] = BF16Block()
    fp16: Annotated[FP16Block, works("fp16 training.")] = FP16Block()
    steps_per_print: Annotated[Any, no_meaning("print what `engine.step()` reports.")] = None
    wall_clock_breakdown: Annotated[bool, no_meaning("use torch.profiler.")] = False
    zero_allow_untested_optimizer: Annotated[
        bool, no_meaning("an optimizer is refused where it would be wrong, not where it is unknown to DeepSpeed.")
    ] = False
    zero_force_ds_cpu_optimizer: Annotated[bool, no_meaning("torch's own optimizers are used.")] = True
    communication_data_type: Annotated[
        DType | None, works("dtype in which gradients travel; left out: the parameters'.")
    ] = None
    gradient_predivide_factor: Annotated[Number, refused("gradients are summed, then divided.")] = 1.0
    prescale_gradients: Annotated[bool, refused("gradients are summed, then divided.")] = False
    dataloader_drop_last: Annotated[bool, works("drop the last incomplete batch of training_data.")] = False
    activation_checkpointing: Annotated[
        dict[str, Any] | None, no_meaning("use torch.utils.checkpoint in the model.")
    ] = None
