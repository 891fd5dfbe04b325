"""Owns the table of the names that each module takes from other modules, and of the refused names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Row:
    """The names of a module, in addition to those in its own file.

    Attributes:
        names: modules with a colon, each followed by the names from it. `own=theirs` renames one, and `*` stands for
            `__all__`. Modules of this package begin with a dot. Classes and functions of files whose names begin with `_`
            get this module as their `__module__`.
        instead: a sentence that names a replacement, for each name that the module lacks. A key is one such name, or several
            with spaces. Reading the name raises an error with the sentence.
        refused: the same, for classes that exist only for `isinstance`. Creating an instance raises an error.
        values: constants by name.
        otherwise: the module that has all other names.
    """

    names: str = ""
    instead: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    otherwise: str = ""


def constant(answer: Any) -> Callable[..., Any]:
    """Return a function that returns `answer`, whatever its arguments are."""
    return lambda *_, **__: answer


_SCHEDULES = {
    "LR_RANGE_TEST": "LRRangeTest", "ONE_CYCLE": "OneCycle", "WARMUP_LR": "WarmupLR", "WARMUP_DECAY_LR": "WarmupDecayLR",
    "WARMUP_COSINE_LR": "WarmupCosineLR",
}  # fmt: skip
# The value of each constant is its name in lower case.
_SCHEDULE_KEYS = """
    LR_SCHEDULE LR_RANGE_TEST_MIN_LR LR_RANGE_TEST_STEP_RATE LR_RANGE_TEST_STEP_SIZE LR_RANGE_TEST_STAIRCASE
    EDGE_VALUE MID_VALUE CYCLE_FIRST_STEP_SIZE CYCLE_FIRST_STAIR_COUNT CYCLE_SECOND_STEP_SIZE CYCLE_SECOND_STAIR_COUNT
    DECAY_STEP_SIZE CYCLE_MIN_LR CYCLE_MAX_LR DECAY_LR_RATE CYCLE_MIN_MOM CYCLE_MAX_MOM DECAY_MOM_RATE
    WARMUP_MIN_LR WARMUP_MAX_LR WARMUP_NUM_STEPS WARMUP_TYPE WARMUP_MIN_RATIO COS_MIN_RATIO TOTAL_NUM_STEPS
"""
_KERNELS = ("fused_adam", "cpu_adam", "cpu_adagrad", "cpu_lion", "fused_lion", "async_io")
_MICS = "Use zero.Init(), and mics_shard_size in the config."
_MONITORS = "The config's blocks tensorboard, csv_monitor, wandb and comet write the figures of engine.step()."
_OPTIMIZER = "deepspeed.initialize makes the engine's optimizer."
_MODEL_PARALLEL = {
    f"{prefix}model_parallel_{what}": constant(answer)
    for prefix in ("_get_", "get_", "get_tensor_") for what, answer in (("world_size", 1), ("rank", 0))
}  # fmt: skip
_GROUPS = """
    _get_data_parallel_group=get_world_group get_data_parallel_group=get_world_group
    _get_sequence_data_parallel_group=get_world_group
    torch.distributed:
    _get_data_parallel_world_size=get_world_size get_data_parallel_world_size=get_world_size
    _get_sequence_data_parallel_world_size=get_world_size
    _get_data_parallel_rank=get_rank get_data_parallel_rank=get_rank _get_sequence_data_parallel_rank=get_rank
    zeroshard.integrations.accelerate_sequences:
    sequence_groups _get_sequence_parallel_group=get_sequence_parallel_group
    _get_sequence_parallel_world_size=get_sequence_parallel_world_size
    _get_sequence_parallel_rank=get_sequence_parallel_rank
"""

# fmt: off
_ROWS = {
    "": Row(
        "deepspeed: dist=comm .comm: init_distributed .git_version_info: version __version__=version __git_hash__=git_hash "
        "__git_branch__=git_branch .pipe: PipelineModule .runtime.base_optimizer: DeepSpeedOptimizer "
        ".runtime.config: DeepSpeedConfig DeepSpeedConfigError "
        ".runtime.engine: DeepSpeedEngine .accelerator: get_accelerator .utils: OnDevice log_dist logger",
        {"InferenceEngine": "It has no inference: serve the files that engine.export() writes with transformers, vLLM or SGLang.",
         "DeepSpeedHybridEngine": "Train with initialize(). Inside zeroshard.unsharded(model) each rank may generate.",
         "PipelineEngine": "It has only data-parallel ranks: stage 3 shards a model without pipeline stages."}),
    ".accelerator": Row(
        ".accelerator.real_accelerator: *",
        {"set_accelerator": "torch finds the accelerator. CUDA_VISIBLE_DEVICES hides devices."}),
    ".accelerator.real_accelerator": Row(
        "._accelerator: DeepSpeedAccelerator get_accelerator", values={"is_current_accelerator_supported": constant(True)}),
    ".checkpoint": Row(instead={
        "DeepSpeedCheckpoint": "`zeroshard inspect` shows a checkpoint, and `zeroshard import-deepspeed` imports DeepSpeed's."}),
    ".checkpoint.utils": Row("._functions: clone_tensors_for_torch_save get_model_ckpt_name_for_rank"),
    ".checkpointing": Row(".runtime.activation_checkpointing.checkpointing: * __getattr__"),
    ".comm": Row(".comm.comm: * __getattr__"),
    ".comm.comm": Row(
        "zeroshard.launch: get_local_rank=local_rank ._ranks: is_initialized init_distributed get_world_group "
        "get_global_rank get_all_ranks_from_group",
        {"log_summary": 'The config\'s {"comms_logger": {"enabled": true}} prints the bytes sent, with the line of each step.'},
        values={  # the config's `comms_logger` configures logs
            "configure": constant(None), "has_all_gather_into_tensor": constant(True), "has_reduce_scatter_tensor": constant(True)},
        otherwise="torch.distributed"),
    ".git_version_info": Row(values={
        "version": "0.19.8", "git_hash": "zeroshard", "git_branch": "zeroshard", "installed_ops": {}, "compatible_ops": {},
        "accelerator_name": "",
        "torch_info": {
            "version": ".".join(torch.__version__.split(".")[:2]), "cuda_version": torch.version.cuda or "0.0",
            "nccl_version": "0.0", "hip_version": torch.version.hip or "0.0", "bf16_support": True}}),
    ".launcher.runner": Row(
        instead={"main": "Start scripts with `zeroshard run`, torchrun, srun or mpirun."},
        values={"DEEPSPEED_ENVIRONMENT_NAME": ".deepspeed_env"}),
    ".linear": Row(refused={
        "LoRAConfig OptimizedLinear QuantizationConfig QuantizedParameter": "Use PEFT's LoraConfig and get_peft_model."}),
    ".monitor.config": Row(instead={"DeepSpeedMonitorConfig get_monitor_config": _MONITORS}),
    ".monitor.monitor": Row(refused={"Monitor MonitorMaster": _MONITORS}),
    ".moe.layer": Row(
        refused={"MoE": "The experts of transformers' models, such as Mixtral, are sharded like other parameters."}),
    ".moe.utils": Row(
        "._functions: split_params_into_different_moe_groups_for_optimizer",
        values={"has_moe_layers": constant((False, 0)), "is_moe_param": constant(False)}),
    ".ops": Row(
        "", {"transformer": "zeroshard has no compiled kernels."},
        values={"__compatible_ops__": dict.fromkeys(_KERNELS, True)}),
    ".ops.adagrad": Row(".ops.adagrad.cpu_adagrad: *"),
    ".ops.adagrad.cpu_adagrad": Row("._optimizers: DeepSpeedCPUAdagrad"),
    ".ops.adam": Row(".ops.adam.cpu_adam: * .ops.adam.fused_adam: *"),
    ".ops.adam.cpu_adam": Row("._optimizers: DeepSpeedCPUAdam"),
    ".ops.adam.fused_adam": Row("._optimizers: FusedAdam"),
    ".ops.aio": Row(".ops.op_builder: AsyncIOBuilder"),
    ".ops.lamb": Row(refused={"FusedLamb": "Its trust ratio needs whole layers. Use AdamW, Lion or Muon."}),
    ".ops.lion": Row(".ops.lion.cpu_lion: * .ops.lion.fused_lion: *"),
    ".ops.lion.cpu_lion": Row("._optimizers: DeepSpeedCPULion"),
    ".ops.lion.fused_lion": Row("._optimizers: FusedLion"),
    ".ops.op_builder": Row(
        "._functions: AsyncIOBuilder CPUAdagradBuilder CPUAdamBuilder CPULionBuilder FusedAdamBuilder FusedLionBuilder"),
    ".pipe": Row(".runtime.pipe.module: *"),
    ".runtime": Row(".runtime.base_optimizer: *", {"hybrid_engine": "Train with initialize()."}),
    ".runtime.activation_checkpointing.checkpointing": Row(
        "zeroshard.engine.recompute.checkpointing: configure is_configured reset checkpoint non_reentrant_checkpoint=checkpoint",
        {"get_cuda_rng_tracker model_parallel_cuda_manual_seed model_parallel_reconfigure_tp_seed":
            "checkpoint() itself saves and restores torch's random state of every device.",
         "partition_activations_in_checkpoint set_num_layers":
            "torch keeps each input whole. Leave the call out; configure(None, checkpoint_in_cpu=True) saves memory.",
         "CheckpointFunction": "Use checkpoint(function, *args)."}),
    ".runtime.base_optimizer": Row(
        "zeroshard.engine.engine_optimizer: DeepSpeedOptimizer=EngineOptimizer ZeROOptimizer=EngineOptimizer"),
    ".runtime.bf16_optimizer": Row("zeroshard.engine.engine_optimizer: BF16_Optimizer=EngineOptimizer"),
    ".runtime.config": Row(
        "._config: DeepSpeedConfig zeroshard: DeepSpeedConfigError=ConfigError",
        values={f"{name.upper()}_OPTIMIZER": name for name in ("adam", "adamw", "lion", "muon", "adagrad")}),
    ".runtime.config_utils": Row("zeroshard.engine.config.fields: DeepSpeedConfigModel=ConfigBlock"),
    ".runtime.dataloader": Row(
        "._functions: RepeatingLoader", {"DeepSpeedDataLoader": "initialize(training_data=...) returns a loader."}),
    ".runtime.engine": Row("zeroshard: DeepSpeedEngine=Engine"),
    ".runtime.fp16.fused_optimizer": Row("zeroshard.engine.engine_optimizer: FP16_Optimizer=EngineOptimizer"),
    ".runtime.fp16.loss_scaler": Row(
        "zeroshard: DynamicLossScaler LossScaler=StaticLossScaler ._functions: LossScalerBase",
        {"CreateLossScaler": "The config's fp16 block creates one, engine.loss_scaler."},
        values={"INITIAL_LOSS_SCALE": "init_scale", "MIN_LOSS_SCALE": "min_scale", "SCALE_WINDOW": "scale_window",
                "DELAYED_SHIFT": "delayed_shift", "CONSECUTIVE_HYSTERESIS": "consecutive_hysteresis"}),
    ".runtime.lr_schedules": Row(
        "zeroshard.optim.lr_schedules: LRRangeTest OneCycle WarmupCosineLR WarmupDecayLR WarmupLR",
        values={**_SCHEDULES, "VALID_LR_SCHEDULES": list(_SCHEDULES.values()), "WARMUP_LOG_RATE": "log",
                "WARMUP_LINEAR_RATE": "linear", **{name: name.lower() for name in _SCHEDULE_KEYS.split()}}),
    ".runtime.pipe": Row(".runtime.pipe.module: * .runtime.pipe.topology: ProcessTopology"),
    ".runtime.pipe.module": Row(refused={
        "LayerSpec PipelineModule TiedLayerSpec":
            "There is no pipeline parallelism. Pass the whole model to initialize(), with stage 3 if it is large."}),
    ".runtime.pipe.topology": Row(refused={
        "ProcessTopology PipeDataParallelTopology PipeModelDataParallelTopology":
            "There is no pipeline parallelism. All ranks are data-parallel."}),
    ".runtime.sequence_parallel.ulysses_sp": Row(
        "zeroshard.integrations.accelerate_sequences: UlyssesSPAttentionHF=SequenceAttention "
        "UlyssesSPDataLoaderAdapter=SequenceLoader",
        {"SequenceTiledCompute TiledMLP": "zeroshard.sequence.tile(model, '*.mlp') runs modules in tiles.",
         "TiledFusedLogitsLoss": "zeroshard.sequence.head_loss computes a loss without whole logits."}),
    ".runtime.utils": Row(
        "torch.nn.utils: clip_grad_norm_ .accelerator: get_accelerator ._accelerator: empty_cache see_memory_usage "
        "._functions: move_to_device"),
    ".runtime.zero": Row(
        ".runtime.zero.parameter_offload: * .runtime.zero.partition_parameters: GatheredParameters Init "
        "ZeroParamStatus ZeroParamType register_external_parameter unregister_external_parameter .runtime.zero.stage3: "
        "unwrap_model_for_generation",
        {"MiCS_Init": _MICS},
        {"TiledLinear TiledLinearReturnBias": "Split a large Linear into several modules."}),
    ".runtime.zero.config": Row(
        "._config: ZeroStageEnum .runtime.zero.leaf_module_config: DeepSpeedZeroLeafModuleConfig "
        ".runtime.zero.offload_config: DeepSpeedZeroOffloadOptimizerConfig DeepSpeedZeroOffloadParamConfig "
        "OffloadDeviceEnum zeroshard.engine.config.zero_block: DeepSpeedZeroConfig=ZeroBlock"),
    ".runtime.zero.leaf_module_config": Row(
        "._config: DEFAULT_LEAF_MODULE_CLASSES DEFAULT_LEAF_MODULE_NAMES DEFAULT_LEAF_MODULE_NAME_SUFFIXES "
        "zeroshard.engine.config.zero_block: DeepSpeedZeroLeafModuleConfig=LeafModuleBlock"),
    ".runtime.zero.offload_config": Row(
        "._config: OffloadDeviceEnum OffloadStateTypeEnum zeroshard.engine.config.zero_block: "
        "DeepSpeedZeroOffloadOptimizerConfig=OffloadOptimizerBlock DeepSpeedZeroOffloadParamConfig=OffloadParamBlock"),
    ".runtime.zero.mics": Row(instead={"MiCS_Init": _MICS}, refused={"MiCS_Optimizer": _OPTIMIZER}),
    ".runtime.zero.parameter_offload": Row("._functions: DeepSpeedZeRoOffload"),
    ".runtime.zero.partition_parameters": Row(
        ".accelerator: get_accelerator ._parameters: DeepSpeedParameter GatheredParameters Init ZeroParamStatus ZeroParamType "
        "is_zero_param register_external_parameter unregister_external_parameter zero_wrapper_for_fp_tensor_constructor "
        "torch: _orig_torch_arange=arange _orig_torch_empty=empty _orig_torch_zeros=zeros _orig_torch_ones=ones "
        "_orig_torch_full=full",
        {"shutdown_init_context restore_init_context":
            "Build modules that must not be sharded outside the `with zero.Init()` block."}),
    ".runtime.zero.stage3": Row(
        "._functions: unwrap_model_for_generation ._estimates: model_to_params estimate_zero3_model_states_mem_needs "
        "estimate_zero3_model_states_mem_needs_all_cold estimate_zero3_model_states_mem_needs_all_live",
        refused={"DeepSpeedZeroOptimizer_Stage3": _OPTIMIZER}),
    ".runtime.zero.stage_1_and_2": Row(
        "._estimates: model_to_params=number_of_parameters estimate_zero2_model_states_mem_needs "
        "estimate_zero2_model_states_mem_needs_all_cold estimate_zero2_model_states_mem_needs_all_live",
        refused={"DeepSpeedZeroOptimizer": _OPTIMIZER}),
    ".runtime.zero.utils": Row(
        "._functions: ZeRORuntimeException is_zero_supported_optimizer .runtime.zero.partition_parameters: is_zero_param"),
    ".utils": Row(
        "torch.distributed: is_initialized .runtime.dataloader: RepeatingLoader "
        ".utils.init_on_device: OnDevice .utils.logging: log_dist logger set_log_level_from_string "
        ".utils.tensor_fragment: * .utils.z3_leaf_module: *",
        {"instrument_w_nvtx": "Use torch.profiler."}),
    ".utils.comms_logging": Row(instead={
        "CommsLogger calc_bw_log convert_size get_caller_func":
            'The config\'s {"comms_logger": {"enabled": true}} prints the bytes sent, with the line of each step.'}),
    ".utils.groups": Row(
        f"._ranks: {_GROUPS}", {
        "_get_expert_parallel_group _get_expert_data_parallel_group get_tensor_model_parallel_group initialize":
            "All ranks are data-parallel. There are no groups of experts, tensors or pipeline stages."},
        values=_MODEL_PARALLEL),
    ".utils.init_on_device": Row("._functions: OnDevice"),
    ".utils.logging": Row("._functions: log_dist logger print_dist set_log_level_from_string"),
    ".utils.tensor_fragment": Row(
        "._parameters: safe_get_full_fp32_param safe_get_full_optimizer_state safe_get_full_grad safe_set_full_fp32_param "
        "safe_set_full_optimizer_state safe_set_full_grad safe_get_local_fp32_param safe_get_local_grad "
        "safe_get_local_optimizer_state safe_set_local_fp32_param safe_set_local_grad safe_set_local_optimizer_state "
        "safe_update_full_grad_vectorized"),
    ".utils.torch": Row("._functions: required_torch_version"),
    ".utils.z3_leaf_module": Row(
        "._config: get_z3_leaf_modules set_z3_leaf_module set_z3_leaf_modules set_z3_leaf_modules_by_name "
        "set_z3_leaf_modules_by_suffix unset_z3_leaf_modules with_leaf_modules z3_leaf_module z3_leaf_parameter"),
    ".utils.zero_to_fp32": Row(instead={
        "get_model_state_file get_optim_files": "zeroshard has one format. get_fp32_state_dict_from_zero_checkpoint and "
        "`zeroshard consolidate` read them."}),
    ".zero": Row(".runtime.zero: * __getattr__"),
}
# fmt: on
TABLE = {f"deepspeed{name}": row for name, row in _ROWS.items()}
for _name in list(TABLE):
    while "." in _name:  # a package needs no row of its own
        _name = _name.rpartition(".")[0]
        TABLE.setdefault(_name, Row())
