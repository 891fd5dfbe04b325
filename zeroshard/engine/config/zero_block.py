"""Owns the keys of the config's `zero_optimization` and `aio` blocks."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from zeroshard.engine.config.fields import ConfigBlock, Count, NonNegative, Positive, no_meaning, refused, works


# A table: one row for each key.
# fmt: off
class OffloadParamBlock(ConfigBlock):
    """`offload_param`: where parameters are stored while they are not in use.

    At stage 3 the block applies to the shards of parameters. At stages 1 and 2 it applies to whole parameters.
    At stage 0 it has no effect, as in DeepSpeed. TRL's configs for reference models combine stage 0 with this block.
    """

    device: Annotated[Literal["none", "cpu", "nvme"], works(
        "`cpu` stores parameters in CPU memory, and `nvme` (stage 3 only) on disk. If the model computes on the CPU, `cpu` "
        "has no effect. At stage 0, neither value has an effect.")] = "none"
    nvme_path: Annotated[str | None, works(
        "for `nvme`, an existing folder. zeroshard unlinks its files there, so they disappear with the process.")] = None
    buffer_count: Annotated[Positive, works("for `nvme`, the number of buffers in CPU memory for shards that are being transferred.")] = 5
    buffer_size: Annotated[Positive, works(
        "for `nvme`, elements per buffer. zeroshard limits the size of buckets so that each shard fits.")] = 100_000_000
    max_in_cpu: Annotated[Count, works(
        "for `nvme`, the maximum number of elements of each rank's shards that stay in CPU memory. The rest are on "
        "disk.")] = 1_000_000_000
    pin_memory: Annotated[bool, works("pin the CPU memory that an accelerator reads and writes. With "
        "`offload_optimizer`, that block's setting applies instead.")] = True


class OffloadOptimizerBlock(ConfigBlock):
    """`offload_optimizer`: where optimizer states, master weights and sharded gradients are stored."""

    device: Annotated[Literal["none", "cpu", "nvme"], works(
        "`cpu` stores optimizer states in CPU memory, and `nvme` on disk. In both cases the CPU runs the optimizer step. "
        "Stages 1 to 3 support this key.")] = "none"
    nvme_path: Annotated[str | None, works(
        "for `nvme`, an existing folder. zeroshard unlinks its files there, so they disappear with the process.")] = None
    buffer_count: Annotated[Positive, works(
        "for `nvme`: CPU memory for states that are being transferred or used is limited to `buffer_count` x `buffer_size` fp32 "
        "elements, regardless of model size.")] = 4
    buffer_size: Annotated[Positive, works(
        "for `nvme`: see `buffer_count`.")] = 100_000_000
    pin_memory: Annotated[bool, works("pin the CPU memory that an accelerator reads and writes.")] = True
    pipeline_read: Annotated[bool | None, works(
        "for `nvme`, prefetch sub-groups. Default: true. Does not affect results.")] = None
    pipeline_write: Annotated[bool | None, works(
        "for `nvme`, write each sub-group while the next one is being updated. Default: true. Does not affect results.")] = None
    fast_init: Annotated[bool, no_meaning("disk space is always preallocated if the file system supports it.")] = False
    ratio: Annotated[NonNegative, Field(le=1), works(
        "the share of the parameters whose optimizer states are offloaded. zeroshard offloads complete units, beginning with the "
        "root unit (which holds, for example, the embeddings). A unit that would exceed the share stays on the accelerator.")] = 1.0
    super_offload: Annotated[bool, no_meaning("torch's fused optimizer runs the step.")] = False
    cpuadam_cores_perc: Annotated[NonNegative, no_meaning("the step uses torch's CPU threads, whatever this value is.")] = 0.8


class LeafModuleBlock(ConfigBlock):
    """`leaf_module`: modules, such as mixtures of experts, that each form one unit with all their submodules.

    The MoE blocks of Mixtral, Qwen2-MoE and Qwen3-MoE are always included.
    """

    classes: Annotated[tuple[str, ...], works("class names, with or without the name of the Python module.")] = ()
    names: Annotated[tuple[str, ...], works("full module names; `*` matches anything.")] = ()
    name_suffixes: Annotated[tuple[str, ...], works("endings of full module names.")] = ()


class ZeroBlock(ConfigBlock):
    """`zero_optimization`: sharding and communication."""

    stage: Annotated[Annotated[int, Field(ge=0, le=3)] | bool, works(
        "0 shards nothing, 1 shards optimizer states, 2 also gradients, and 3 also parameters. true means "
        "1.")] = 0
    reduce_bucket_size: Annotated[Positive, works(
        "maximum elements per reduction. It limits the communication buffers. It has no effect with an optimizer that needs "
        "whole parameters.")] = 500_000_000
    allgather_bucket_size: Annotated[Positive, works(
        "maximum elements per all-gather. The bucket size is the smaller of this and `reduce_bucket_size`.")] = 500_000_000
    overlap_comm: Annotated[bool | None, works(
        "overlap collectives with computation. Default: true. Does not affect results.")] = None
    reduce_scatter: Annotated[bool, no_meaning(
        "gradients are always reduce-scattered. At stages 1 and 2, with the all-gather of updated parameters, this moves as many "
        "bytes as an all-reduce.")] = True
    contiguous_gradients: Annotated[bool, no_meaning(
        "gradients are packed as they are computed, or sent directly from their memory.")] = True
    allgather_partitions: Annotated[bool, no_meaning("parameters are always all-gathered.")] = True
    use_multi_rank_bucket_allreduce: Annotated[bool, no_meaning("every bucket is divided evenly over all ranks.")] = True
    round_robin_gradients: Annotated[bool, no_meaning("all shards have equal sizes.")] = False
    legacy_stage1: Annotated[bool, no_meaning("zeroshard has one implementation of stage 1.")] = False
    elastic_checkpoint: Annotated[bool, no_meaning("it selects one of DeepSpeed's checkpoint formats, which zeroshard does not write.")] = False
    load_from_fp32_weights: Annotated[bool, no_meaning("master weights are always fp32 or wider.")] = True
    parameter_alignment: Annotated[Any, no_meaning("parameters and shards are padded to multiples of 16 elements.")] = False
    ignore_unused_parameters: Annotated[bool, no_meaning(
        "an unused parameter gets a gradient of zeros, or None if no rank used it.")] = True
    compute_grad_norm: Annotated[bool, no_meaning("the norm never needs an extra message, so it is always computed.")] = True
    override_module_apply: Annotated[bool, no_meaning("zeroshard does not patch torch.")] = True
    memory_efficient_linear: Annotated[bool, no_meaning("zeroshard does not patch torch.")] = True
    pipeline_loading_checkpoint: Annotated[bool, no_meaning("it selects one of DeepSpeed's checkpoint readers, which zeroshard does not use.")] = False
    log_trace_cache_warnings: Annotated[bool, no_meaning("a change in the order of modules affects only the speed.")] = False
    enable_sanity_checks: Annotated[bool, no_meaning("the checks are always on.")] = False
    save_muon_momentum_buffer_in_memory: Annotated[bool, no_meaning("Muon's momentum is an ordinary optimizer state.")] = False
    sub_group_size: Annotated[Count, works(
        "maximum elements per optimizer call for offloaded states. A larger shard takes one call. Values above 4 Mi act as 4 Mi. 0: "
        "one shard per call.")] = 1_000_000_000
    stage3_prefetch_bucket_size: Annotated[Count | None, works(
        "prefetch units until these have at least this many elements in all. 0 turns prefetching off. Default: the next unit.")] = None
    stage3_param_persistence_threshold: Annotated[Count, works(
        "parameters with fewer elements than this are not sharded, but their gradients and optimizer states are.")] = 0
    stage3_model_persistence_threshold: Annotated[Count, works(
        "maximum total elements that `stage3_param_persistence_threshold` keeps unsharded. The smallest parameters count first.")] = 2**63 - 1
    stage3_max_live_parameters: Annotated[Count, works(
        "the limit on unsharded elements. Above the limit, units are neither prefetched nor kept for reuse.")] = 1_000_000_000
    stage3_max_reuse_distance: Annotated[Count, works(
        "keep a unit unsharded after its forward if at most this many elements are used before its backward. "
        "Default: only the last unit.")] = 0
    stage3_module_granularity_threshold: Annotated[Count, works(
        "a block with fewer elements than this is not a unit, but part of the unit that contains it. 0 means 10,000 in "
        "models with more than 128 blocks.")] = 0
    stage3_rests_as_masters: Annotated[bool, no_meaning(
        "16-bit parameters always rest as their master weights where both are on the accelerator. Not in DeepSpeed.")] = False
    stage3_gather_16bit_weights_on_model_save: Annotated[bool | None, works(
        "allow a Trainer to gather the weights in rank 0's CPU memory when it saves. Default: true. `engine.export` "
        "does not need this key.")] = None
    stage3_gather_fp16_weights_on_model_save: Annotated[bool | None, works(
        "the old name of `stage3_gather_16bit_weights_on_model_save`.")] = None
    stage3_use_all_reduce_for_fetch_params: Annotated[bool, no_meaning("parameters are always all-gathered.")] = False
    stage3_allgather_sequential: Annotated[bool, no_meaning("it selects one of DeepSpeed's schedules, which zeroshard does not use.")] = False
    leaf_module: Annotated[LeafModuleBlock | None, works("modules that each form one unit with all their submodules.")] = None
    offload_param: Annotated[OffloadParamBlock | None, works("the place of parameters: the accelerator, CPU memory or disk.")] = None
    offload_optimizer: Annotated[OffloadOptimizerBlock | None, works("the place of optimizer states: the accelerator, CPU memory or disk.")] = None
    cpu_offload: Annotated[bool, works('the old name of `"offload_optimizer": {"device": "cpu"}`.')] = False
    cpu_offload_param: Annotated[bool, works('the old name of `"offload_param": {"device": "cpu"}`.')] = False
    cpu_offload_use_pin_memory: Annotated[bool, no_meaning(
        "offload memory is pinned, unless a block sets `pin_memory` to false.")] = False
    zero_hpz_partition_size: Annotated[Count, works(
        "ranks per host (ZeRO++ hpZ). At stage 3, parameters are sharded over the ranks of a host, and gradients and "
        "optimizer states over all ranks. Gradients are summed inside each host first. Unlike ZeRO++, zeroshard does not keep a "
        "second copy of parameters. 0 or 1: parameters are sharded over all ranks.")] = 1
    mics_shard_size: Annotated[int, Field(ge=-1), works(
        "MiCS's name for `zero_hpz_partition_size`, except that 1 leaves parameters unsharded. Optimizer states are "
        "sharded over all ranks, while DeepSpeed's MiCS shards them over `mics_shard_size` ranks. -1 or 0: parameters "
        "are sharded over all ranks.")] = -1
    mics_hierarchical_params_gather: Annotated[bool, no_meaning(
        "parameters are gathered only among `mics_shard_size` ranks.")] = False
    zero_quantized_weights: Annotated[bool, no_meaning(
        "parameters are always sent exactly. `zero_hpz_partition_size` keeps the all-gathers of forward and backward inside "
        "hosts.")] = False
    zero_quantized_nontrainable_weights: Annotated[bool, no_meaning("frozen parameters are stored exactly.")] = False
    zero_quantized_gradients: Annotated[bool | Literal["int8", "int4"], no_meaning(
        "gradients are always sent exactly. With `zero_hpz_partition_size`, each host sends only their sums to other hosts.")] = False
    zenflow: Annotated[dict[str, Any] | None, refused("ZenFlow changes the result.", by_presence=True)] = None


class AioBlock(ConfigBlock):
    """`aio`: how disk offload reads and writes files."""

    block_size: Annotated[Positive, works(
        "bytes per request, a multiple of 4096. Each request has one checksum. Default: 4 MiB.")] = 4 << 20
    queue_depth: Annotated[Positive, works(
        "each file has at most `queue_depth` x `intra_op_parallelism` concurrent requests. A rank has one file for each `offload_*` "
        "block with `nvme`.")] = 4
    intra_op_parallelism: Annotated[Positive, works("see `queue_depth`.")] = 1
    thread_count: Annotated[Positive | None, works("the old name of `intra_op_parallelism`.")] = None
    single_submit: Annotated[bool, no_meaning("each thread always submits one request at a time.")] = False
    overlap_events: Annotated[bool, no_meaning("reads and writes always overlap.")] = True
    use_gds: Annotated[bool, refused("zeroshard reads the disk through CPU memory.")] = False
