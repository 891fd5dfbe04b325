"""Owns the keys of the config's `zero_optimization` and `aio` blocks."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from zeroshard.config.fields import Block, Count, NonNegative, Positive, no_meaning, refused, works


# A table: one row for each key.
# fmt: off
class OffloadParamBlock(Block):
    """`offload_param`: where parameters rest. Stage 3: their shards. Below: the whole of them, between steps."""

    device: Annotated[Literal["none", "cpu", "nvme"], works(
        "cpu: parameters rest in CPU memory. nvme, for stage 3: on disk. Where the model computes on the CPU, its "
        "memory and the accelerator's are one, and cpu moves nothing.")] = "none"
    nvme_path: Annotated[str | None, works("nvme: the folder; it must be there. No file in it has a name.")] = None
    buffer_count: Annotated[Positive, works("nvme: buffers in CPU memory for shards that are read ahead or on their way.")] = 5
    buffer_size: Annotated[Positive, works(
        "nvme: elements of each of these buffers. Buckets are cut so that a shard fits into one.")] = 100_000_000
    max_in_cpu: Annotated[Count, works(
        "nvme: so many elements of this rank's shards stay in CPU memory, the first ones; the rest goes to disk.")] = 1_000_000_000
    pin_memory: Annotated[bool, works("CPU memory that an accelerator reads and writes is pinned.")] = True


class OffloadOptimizerBlock(Block):
    """`offload_optimizer`: where optimizer states and master weights rest, and gradients where they are sharded."""

    device: Annotated[Literal["none", "cpu", "nvme"], works(
        "cpu: they rest in CPU memory, and the CPU steps. nvme: on disk; the CPU steps, sub-group by sub-group. For "
        "stages 1 to 3.")] = "none"
    nvme_path: Annotated[str | None, works("nvme: the folder; it must be there. No file in it has a name.")] = None
    buffer_count: Annotated[Positive, works(
        "nvme: with buffer_size: the CPU memory for what is on its way or in use, over all states.")] = 4
    buffer_size: Annotated[Positive, works(
        "nvme: buffer_count x buffer_size fp32 elements are never exceeded, whatever the model's size.")] = 100_000_000
    pin_memory: Annotated[bool, works("CPU memory that an accelerator reads and writes is pinned.")] = True
    pipeline_read: Annotated[bool | None, works(
        "nvme: sub-groups are read before their turn. Left out: yes. The bits are the same.")] = None
    pipeline_write: Annotated[bool | None, works(
        "nvme: sub-groups are written behind the next one's step. Left out: yes. The bits are the same.")] = None
    fast_init: Annotated[bool, no_meaning("space on the disk is taken without writing it.")] = False
    ratio: Annotated[NonNegative, Field(le=1), works(
        "the share of the parameters whose optimizer states leave the accelerator, by units.")] = 1.0
    super_offload: Annotated[bool, no_meaning("torch's fused optimizer steps.")] = False
    cpuadam_cores_perc: Annotated[NonNegative, no_meaning("torch's own threads are used.")] = 0.8


class LeafModuleBlock(Block):
    """`leaf_module`: modules that are one unit with all that they contain. For those that run a part of it, by their input."""

    classes: Annotated[tuple[str, ...], works("by class: its name, with or without its module's.")] = ()
    names: Annotated[tuple[str, ...], works("by full name; `*` stands for anything.")] = ()
    name_suffixes: Annotated[tuple[str, ...], works("by the end of the full name.")] = ()


class ZeroBlock(Block):
    """`zero_optimization`: what is sharded, and how it travels."""

    stage: Annotated[Annotated[int, Field(ge=0, le=3)] | bool, works(
        "the preset of the policy: 0 nothing, 1 optimizer states, 2 and gradients, 3 and parameters are sharded. true "
        "means 1, as in old configs.")] = 0
    reduce_bucket_size: Annotated[Positive, works(
        "elements, the most that is reduced at once; bounds the transient buffers.")] = 500_000_000
    allgather_bucket_size: Annotated[Positive, works(
        "elements, the most that is gathered at once; the smaller of the two cuts the buckets.")] = 500_000_000
    overlap_comm: Annotated[bool | None, works(
        "collectives run behind the computation. Left out: yes. The bits are the same.")] = None
    reduce_scatter: Annotated[bool, no_meaning(
        "gradients are always reduce-scattered; an all-reduce would move the same bytes.")] = True
    contiguous_gradients: Annotated[bool, no_meaning("gradients are packed as they are made, or sent from where they lie.")] = True
    allgather_partitions: Annotated[bool, no_meaning("parameters are always brought together by all-gathers.")] = True
    use_multi_rank_bucket_allreduce: Annotated[bool, no_meaning("a bucket is cut evenly over all ranks.")] = True
    round_robin_gradients: Annotated[bool, no_meaning("shards are even, so there is no order to balance.")] = False
    legacy_stage1: Annotated[bool, no_meaning("there is one code path.")] = False
    elastic_checkpoint: Annotated[bool, no_meaning("a choice of checkpoint format in DeepSpeed.")] = False
    load_from_fp32_weights: Annotated[bool, no_meaning("master weights are always fp32.")] = True
    parameter_alignment: Annotated[Any, no_meaning("shards are aligned to 64 bytes.")] = False
    ignore_unused_parameters: Annotated[bool, no_meaning(
        "an unused parameter counts as zeros, or is left alone if no rank used it.")] = True
    compute_grad_norm: Annotated[bool, no_meaning("the norm costs one small message that is sent anyway.")] = True
    override_module_apply: Annotated[bool, no_meaning("nothing of torch is patched.")] = True
    memory_efficient_linear: Annotated[bool, no_meaning("nothing of torch is patched.")] = True
    pipeline_loading_checkpoint: Annotated[bool, no_meaning("a choice of DeepSpeed's checkpoint reader.")] = False
    log_trace_cache_warnings: Annotated[bool, no_meaning("an order that changes costs speed only.")] = False
    enable_sanity_checks: Annotated[bool, no_meaning("the checks are always on.")] = False
    save_muon_momentum_buffer_in_memory: Annotated[bool, no_meaning("Muon's momentum is ordinary state.")] = False
    sub_group_size: Annotated[Count, works(
        "the most elements that the optimizer updates in one call, where they come from elsewhere. 4 Mi at most in any "
        "case; 0: as few as can be.")] = 1_000_000_000
    stage3_prefetch_bucket_size: Annotated[Count | None, works(
        "elements that are brought together ahead of their use; 0 is none. Left out: the next unit, whatever its size.")] = None
    stage3_param_persistence_threshold: Annotated[Count, works(
        "parameters of fewer elements are not sharded. Left out: all are.")] = 0
    stage3_model_persistence_threshold: Annotated[Count, works(
        "the most elements that stay unsharded by stage3_param_persistence_threshold, the smallest first.")] = 2**63 - 1
    stage3_max_live_parameters: Annotated[Count, works(
        "nothing is prefetched or kept that would bring the unsharded elements above it.")] = 1_000_000_000
    stage3_max_reuse_distance: Annotated[Count, works(
        "a unit stays unsharded after its forward if at most this many elements are used before its backward. Left "
        "out: only the last is kept.")] = 0
    stage3_module_granularity_threshold: Annotated[Count, works(
        "a block of fewer elements is no unit of its own: it belongs to what contains it. Left out, or 0: in models of "
        "more than 128 blocks, those of fewer than 10,000 elements.")] = 0
    stage3_rests_as_masters: Annotated[bool, works(
        "of trained parameters in 16 bits only the fp32 master weights rest, and are rounded on their way to each "
        "all-gather: 14 bytes a parameter instead of 16 with Adam, and the same bits. Where both rest on the "
        "accelerator, and parameters are sharded over all ranks. A key of zeroshard's own.")] = False
    stage3_gather_16bit_weights_on_model_save: Annotated[bool | None, works(
        "a Trainer that saves may bring the weights together in rank 0's CPU memory. Left out: yes. engine.export "
        "needs no such thing.")] = None
    stage3_gather_fp16_weights_on_model_save: Annotated[bool | None, works(
        "the old name of stage3_gather_16bit_weights_on_model_save.")] = None
    stage3_use_all_reduce_for_fetch_params: Annotated[bool, no_meaning("parameters are all-gathered.")] = False
    stage3_allgather_sequential: Annotated[bool, no_meaning("a choice of schedule in DeepSpeed.")] = False
    leaf_module: Annotated[LeafModuleBlock | None, works("modules that are unsharded whole, whatever they run.")] = None
    offload_param: Annotated[OffloadParamBlock | None, works("where parameters rest.")] = None
    offload_optimizer: Annotated[OffloadOptimizerBlock | None, works("where optimizer states rest.")] = None
    cpu_offload: Annotated[bool, works('the old name of "offload_optimizer": {"device": "cpu"}.')] = False
    cpu_offload_param: Annotated[bool, works('the old name of "offload_param": {"device": "cpu"}.')] = False
    cpu_offload_use_pin_memory: Annotated[bool, no_meaning(
        "memory for offload is pinned; pin_memory of a block says otherwise.")] = False
    zero_hpz_partition_size: Annotated[Count, works(
        "ranks of a host (ZeRO++ hpZ): parameters of stage 3 are sharded over these, gradients and optimizer states over all, "
        "and sums are made host by host. There is no second copy. 0, 1: parameters are sharded over all ranks.")] = 1
    mics_shard_size: Annotated[int, Field(ge=-1), works(
        "ranks of a host (MiCS), as zero_hpz_partition_size: optimizer states are sharded over all ranks, where MiCS "
        "repeats them. -1, 0: parameters are sharded over all ranks.")] = -1
    mics_hierarchical_params_gather: Annotated[bool, no_meaning(
        "parameters are gathered inside mics_shard_size ranks alone.")] = False
    zero_quantized_weights: Annotated[bool, no_meaning(
        "all-gathers of parameters are exact; zero_hpz_partition_size keeps them inside hosts.")] = False
    zero_quantized_nontrainable_weights: Annotated[bool, no_meaning("frozen parameters rest exact.")] = False
    zero_quantized_gradients: Annotated[bool | Literal["int8", "int4"], works(
        "with zero_hpz_partition_size or mics_shard_size (ZeRO++ qgZ): sums of gradients cross between hosts as int8 (true), or "
        "int4, " 'if it says "int4". Sums are made in fp32. The bits are other ones than without.')] = False
    zenflow: Annotated[dict[str, Any] | None, refused("ZenFlow changes the result.", by_presence=True)] = None


class AioBlock(Block):
    """`aio`: how the disk is read and written."""

    block_size: Annotated[Positive, works(
        "bytes of one request, with one checksum; a multiple of 4096. Left out: 4 MiB.")] = 4 << 20
    queue_depth: Annotated[Positive, works("requests that are under way at once, in each of intra_op_parallelism lanes.")] = 4
    intra_op_parallelism: Annotated[Positive, works("multiplies queue_depth.")] = 1
    thread_count: Annotated[Positive | None, works("the old name of intra_op_parallelism.")] = None
    single_submit: Annotated[bool, no_meaning("threads submit requests, one at a time each.")] = False
    overlap_events: Annotated[bool, no_meaning("reads and writes always go on together.")] = True
    use_gds: Annotated[bool, refused("the disk is read through CPU memory.")] = False
