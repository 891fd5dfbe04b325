"""Owns the attention of a transformers model whose positions are cut over ranks.

transformers looks up attention functions, and functions that make masks, by name. This module registers one function of
each kind, which calls the model's own function. Each mask is made from the positions of whole sequences, so packed
documents, sliding windows and chunks are masked as on one process.

[Note: which forwards are cut]
A cut batch has a slice of the tokens, and all positions of their sequences. These two lengths differ, which identifies
a cut batch. A hook before the decoder compares the lengths, slices the positions, and passes the whole positions to
each attention as a keyword. The recomputation of a checkpointed layer gets the same keyword. Forwards of whole
sequences (evaluation, generation) do not exchange anything.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zeroshard.core.module_hooks import untraced
from zeroshard.core.named_parameter import named_modules
from zeroshard.core.transport.sequence_ranks import SequenceRanks
from zeroshard.errors import UsageError
from zeroshard.sequence.batches import has_values, own_slice
from zeroshard.sequence.exchange import heads_for_positions, positions_for_heads, refuse_heads

_PREFIX = "zeroshard_sequence_"
_numbers = itertools.count()
_KEYWORD = "sequence_slice"
_LAYERS = ("full_attention", "sliding_attention", "chunked_attention")
"""Types of layers, as configurations name them, that combine positions only in attention."""
_RECURRENT = (
    "Mamba", "RWKV", "Rwkv", "Recurrent", "DeltaNet", "LinearAttention", "LightningAttention", "ShortConv", "RetNet",
)  # fmt: skip
"""Parts of the class names of modules that carry a state from position to position."""
_HARMLESS = ("position_ids", "cache_position", "labels", "shift_labels", "num_items_in_batch")
"""Tensors among a forward's keywords that reach each attention but do not change its result."""


_MESSAGES = (
    "the ranks of a sequence exchange heads and positions here, which no graph may contain. Leave fullgraph=True out, or compile "
    "only the MLPs"
)
"""The reason for graph breaks of compiled layers."""
_OWN_MASKS = "its model makes masks without transformers' mask functions"
_CROSS = "has cross attention to sequences of another length"
_ROUTER_LOSS = (
    "{} adds a loss of its routers, which is not a mean over tokens: set output_router_logits=False to "
    "cut sequences over ranks."
)


class Slice:
    """The positions and documents of whole sequences, of which a forward computes one slice.

    Attributes:
        positions: [rows, positions], of whole sequences, counted within each document.
        documents: [rows, positions], the number of each position's document; None if each row is one document.
        calls: the number of layers that have attended so far.
    """

    def __init__(self, positions: Tensor) -> None:
        self.positions = positions
        starts = torch.diff(positions, dim=1, prepend=positions[:, :1] - 1) != 1
        is_packed = has_values(starts) and bool(starts.any())
        self.documents = starts.cumsum(1) if is_packed else None
        self.calls = 0

    def within_documents(self, mask_function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a mask function that masks all other documents.

        Args:
            mask_function: a mask pattern from transformers, such as a window: (row, head, query, key) -> whether the
                query attends to the key. It gets positions within a document, so that windows and chunks restart with
                it.
        """
        positions = self.positions
        documents = self.documents
        assert documents is not None

        def sees(row: Any, head: Any, query: Any, key: Any) -> Any:
            in_pattern = mask_function(row, head, positions[row, query], positions[row, key])
            return in_pattern & (documents[row, query] == documents[row, key])

        return sees


class CutAttention:
    """The attention of one model whose sequences are cut over ranks."""

    def __init__(self, ranks: SequenceRanks, model: nn.Module) -> None:
        self._ranks = ranks
        self._decoder = _decoder_of(model)
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface

        config = self._decoder.config.get_text_config()
        _refuse_models(self._decoder, config, ranks.size)
        self._core: str = config._attn_implementation
        self._layers: int = config.num_hidden_layers
        self._slice: Slice | None = None
        # All models share the registry, so each needs a separate name. It contains the core's name, since transformers looks
        # for parts of the core's name.
        name = f"{_PREFIX}{next(_numbers)}_{self._core}".replace("/", "_")
        entry = untraced(_Entry, _MESSAGES)
        AttentionInterface.register(name, entry(self._attention))
        AttentionMaskInterface.register(name, entry(self._mask))
        self._decoder.set_attn_implementation(name)
        self._handles: list[RemovableHandle] = [
            self._decoder.register_forward_pre_hook(
                torch.compiler.disable(self._begin, reason=_MESSAGES), with_kwargs=True
            ),
            self._decoder.register_forward_hook(self._end, always_call=True),
        ]

    def __deepcopy__(self, memo: dict[int, Any]) -> CutAttention:
        return self  # a copy of the model uses the same registered name

    def remove(self) -> None:
        """Restore the model's own attention."""
        for handle in self._handles:
            handle.remove()
        self._decoder.set_attn_implementation(self._core)

    # ------------------------------------------------------------------ a forward

    def _begin(self, decoder: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        self._slice = None
        inputs = (*args[:1], kwargs.get("input_ids"), kwargs.get("inputs_embeds"))
        own = next((tokens.shape[1] for tokens in inputs if tokens is not None), None)
        positions = kwargs.get("position_ids")
        if not isinstance(positions, Tensor) or positions.shape[-1] == own:
            if decoder.training and torch.is_grad_enabled():
                raise UsageError(
                    "a training forward of a model whose sequences are cut got an uncut batch: pass everything that "
                    "Sequences.cut returned, including position_ids, or call Sequences.detach(model) first."
                )
            return None
        if own is None or positions.dim() != 2 or positions.shape[1] != own * self._ranks.size:
            raise UsageError(
                f"a forward got {own} tokens and position_ids of the shape {list(positions.shape)}: pass the batch that "
                f"Sequences.cut returned, with 1/{self._ranks.size} of the tokens and position_ids [rows, all positions]."
            )
        for name in ("attention_mask", "past_key_values"):
            if kwargs.get(name) is not None:
                raise UsageError(
                    f"a forward of a cut batch got {name}, which is valid only for whole sequences: leave it out."
                )
        if kwargs.get("output_router_logits"):
            raise UsageError(_ROUTER_LOSS.format(type(decoder).__name__))
        self._slice = Slice(positions)
        # With a mask of ones, the model passes its pattern on without reading positions, of which it has only a slice.
        ones = torch.ones(positions.shape[0], own, dtype=torch.bool, device=positions.device)
        mine = own_slice(self._ranks, positions)
        cut = {"position_ids": mine, "attention_mask": ones, "use_cache": False, _KEYWORD: self._slice}
        return args, {**kwargs, **cut}

    def _end(self, decoder: nn.Module, args: Any, output: Any) -> None:
        began = self._slice
        self._slice = None
        # After an exception, `output` is None.
        if began is None or output is None or began.calls == self._layers:
            return
        raise UsageError(
            f"{type(decoder).__name__} has {self._layers} layers, and {began.calls} of them called the registered "
            "attention. The others may combine positions of the slice only (recurrent layers?). Train this model "
            "without Sequences."
        )

    def _mask(self, **options: Any) -> Any:
        """Make the mask of whole sequences, with the model's own mask function."""
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

        cut = self._slice
        if cut is not None:
            if options.get("use_vmap") or not options.get("allow_is_causal_skip", True):
                raise _cannot(
                    self._decoder, "makes a mask that depends on more than positions (two directions, blocks, images)"
                )
            rows, length = cut.positions.shape
            options |= {"batch_size": rows, "q_length": length, "kv_length": length, "attention_mask": None}
            options |= {"q_offset": 0, "kv_offset": 0}
            if cut.documents is not None:
                options["mask_function"] = cut.within_documents(options["mask_function"])
                options["allow_is_causal_skip"] = False
        return ALL_MASK_ATTENTION_FUNCTIONS[self._core](**options)

    # ------------------------------------------------------------------ a layer

    def _attention(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **options: Any,
    ) -> Any:  # fmt: skip
        """Attend with this rank's heads. A cut query is [B, heads, S/P, D], and its result ([B, S/P, heads, D], None)."""
        core = _function_of(self._core, module)
        cut = options.pop(_KEYWORD, None)
        if cut is None:
            if self._slice is not None:
                raise UsageError(
                    f"{type(module).__name__} got none of the keywords of its model's forward, one of which shows "
                    "that positions are cut over ranks: pass them on (**kwargs) in the model, or train it without "
                    "Sequences."
                )
            return core(module, query, key, value, attention_mask, *args, **options)
        cut.calls += 1
        self._refuse(module, cut, attention_mask, options)
        groups = query.shape[1] // key.shape[1]
        query, key, value = heads_for_positions(self._ranks, query, key, value)
        options["position_ids"] = cut.positions
        own_groups = query.shape[1] // key.shape[1]
        asked = module if own_groups == groups else _WithGroups(module, own_groups)
        context, _ = core(asked, query, key, value, attention_mask, *args, **options)
        return positions_for_heads(self._ranks, context.transpose(1, 2)).transpose(1, 2).contiguous(), None

    def _refuse(self, module: nn.Module, cut: Slice, mask: Any, options: dict[str, Any]) -> None:
        """Raise if an option of a layer would give wrong results."""
        if options.get("dropout"):
            raise UsageError(
                f"{type(module).__name__} has attention dropout ({options['dropout']}), which would depend on the ranks that "
                "hold the heads: set it to 0 in the model's configuration."
            )
        is_causal = options.get("is_causal")
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        if not is_causal:
            raise _cannot(module, "attends in two directions or to other sequences")
        tensors = [name for name, value in options.items() if isinstance(value, Tensor) and name not in _HARMLESS]
        if tensors:
            held = "ALiBi, sinks or a bias, which is for all heads or for one slice"
            raise _cannot(module, f"passes {tensors[0]} to its attention ({held})")
        length = cut.positions.shape[1]
        if mask is None:
            window = options.get("sliding_window")
            if cut.documents is not None or (window is not None and window < length):
                raise _cannot(module, f"got no mask, but documents or a window of {window} need one ({_OWN_MASKS})")
        elif isinstance(mask, Tensor) and mask.shape[-2:] != (length, length):
            raise _cannot(
                module, f"got a mask of the shape {list(mask.shape)} for sequences of {length} positions ({_OWN_MASKS})"
            )


def _cannot(module: nn.Module, why: str) -> UsageError:
    """Return the error about a module that would give wrong results on slices of sequences."""
    return UsageError(
        f"{type(module).__name__} {why}: its sequences cannot be split across ranks. Train it without Sequences."
    )


class _Entry:
    """An entry in transformers' registry. It holds its method weakly, since the registry keeps entries forever."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = weakref.WeakMethod(method)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        method = self._method()
        if method is None:
            raise UsageError("the model that was attached to Sequences no longer exists: attach this one.")
        return method(*args, **kwargs)


class _WithGroups:
    """A view of an attention module for attention functions, with a different number of query heads per key head.

    The number differs on a rank if keys have fewer heads than there are ranks.
    """

    def __init__(self, module: nn.Module, groups: int) -> None:
        self._module = module
        self.num_key_value_groups = groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _function_of(core: str, module: nn.Module) -> Any:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if core in ALL_ATTENTION_FUNCTIONS:
        return ALL_ATTENTION_FUNCTIONS[core]
    of_model = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if of_model is None:
        raise UsageError(
            f"{type(module).__name__} has no attention function named {core!r}: load the model with attn_implementation='sdpa'."
        )
    return of_model


def _decoder_of(model: nn.Module) -> Any:
    """Return the innermost transformers model, which has the layers and makes the masks."""
    transformers = sys.modules.get("transformers")  # its models import it
    models: dict[str, Any] = {}
    if transformers is not None:
        models = {name: one for name, one in named_modules(model) if isinstance(one, transformers.PreTrainedModel)}
    inside = {name: set(one.modules()) - {one} for name, one in models.items()}
    for one in model.modules():
        prompts = [kind for kind in dict(getattr(one, "peft_config", None) or {}).values() if kind.is_prompt_learning]
        if prompts:
            raise _cannot(
                one, "puts virtual tokens (a prompt, a prefix) before each sequence, and so before each slice"
            )
    innermost = {name: one for name, one in models.items() if inside[name].isdisjoint(models.values())}
    if not innermost:
        raise UsageError(
            f"{type(model).__name__} is not a model of transformers: call Sequences.attend(function, query, key, value) "
            "in its attention instead of attach()."
        )
    for one in models.values():
        if one.config.is_encoder_decoder:
            raise _cannot(one, _CROSS)
    if len(innermost) > 1:
        raise UsageError(
            f"{type(model).__name__} contains several models of transformers ({', '.join(innermost)}), each with its own "
            "sequences: only a model of one text sequence can be cut over ranks. Train it without Sequences, or "
            "attach the language model inside it."
        )
    return next(iter(innermost.values()))


def _refuse_models(decoder: Any, config: Any, size: int) -> None:
    """Raise for models whose attention, or its input, would be wrong on a slice."""
    kind = type(decoder).__name__
    if config._attn_implementation.startswith(_PREFIX):
        raise UsageError(f"{kind} is already attached to Sequences: call detach(model) on that object first.")
    if "flash" in config._attn_implementation:
        # These kernels ignore chunks and support packed documents only in batches of one row.
        raise UsageError(
            f"{kind} uses {config._attn_implementation}, whose kernels transformers loads by that name, but attach() gives "
            "the attention another name: load the model with attn_implementation='sdpa'."
        )
    if getattr(config, "add_cross_attention", False):
        raise _cannot(decoder, _CROSS)
    if getattr(config, "alibi", False) or getattr(config, "model_type", "") in ("bloom", "mpt"):
        raise _cannot(decoder, "has ALiBi, whose biases would be those of local positions")
    types = [one for one in dict.fromkeys(getattr(config, "layer_types", None) or ()) if one not in _LAYERS]
    states = [
        name
        for name, module in named_modules(decoder)
        if isinstance(module, nn.RNNBase | nn.Conv1d) or any(part in type(module).__name__ for part in _RECURRENT)
    ]
    if types or states:
        found = [f"layers of the type {one}" for one in types] + states
        raise _cannot(
            decoder, f"has {found[0]}, which carry a state from position to position (recurrent layers, convolutions)"
        )
    if not (decoder._supports_attention_backend and decoder._can_set_attn_implementation()):
        raise UsageError(
            f"{kind} does not find its attention in transformers' registry (ALL_ATTENTION_FUNCTIONS), so its sequences "
            "cannot be split across ranks: use a model that does."
        )
    for name, module in named_modules(decoder):
        is_of_llama4 = hasattr(module, "attn_scale") and hasattr(module, "floor_scale")
        has_positions = getattr(module, "use_rope", False)
        if is_of_llama4 and not has_positions and getattr(module, "attn_temperature_tuning", False):
            raise UsageError(
                f"{name} of {kind} scales queries by its own count of positions, which starts at 0 in each slice "
                "(attn_temperature_tuning): load the model with attn_temperature_tuning=False to cut sequences over ranks."
            )
        ropes: Any = getattr(module, "rope_type", None)
        if not isinstance(ropes, dict):
            ropes = {"": ropes}
        if any(rope in ("dynamic", "longrope") for rope in ropes.values()):
            raise UsageError(
                f"{name} of {kind} changes its frequencies with the largest position in its input (dynamic or longrope), "
                "which differs between slices: set another rope_type to cut sequences over ranks."
            )
    if getattr(config, "output_router_logits", False):
        raise UsageError(_ROUTER_LOSS.format(kind))
    refuse_heads(
        config.num_attention_heads, getattr(config, "num_key_value_heads", None) or config.num_attention_heads, size
    )
