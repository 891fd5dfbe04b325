"""Sequences that are cut over ranks give one process's results, the same bits at all stages, or an error."""

from __future__ import annotations

import copy
import gc
import itertools
import resource
import sys
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from families import SIZES, bert, llama, mixtral, t5
from insides import set_slice
from ranks import RankError, on_ranks, run_ranks
from sequences import Case, Outcome, alone, batch, expect_close, llama4, make, same_bits, train
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from twin import LARGE_BUCKETS, build, microbatch, update

import zeroshard
from zeroshard import ConfigError, Place, Policy, Residency, UsageError
from zeroshard.core.transport.sequence_ranks import SequenceRanks
from zeroshard.engine.config.load import load_config
from zeroshard.sequence import Sequences, tile, token_mean
from zeroshard.sequence.attention import CutAttention, Slice
from zeroshard.sequence.batches import cut_batch
from zeroshard.sequence.exchange import refuse_heads


@pytest.fixture(autouse=True, scope="module")
def _imported_once() -> None:
    """The forked ranks find imports that take seconds."""
    import peft  # noqa: F401
    import transformers

    transformers.logging.set_verbosity_error()


def attached(model: nn.Module | None = None) -> tuple[Any, Sequences]:
    """Return a model, by default a Llama, and the `Sequences` of all ranks that is attached to it."""
    model = make(Case()) if model is None else model
    return model, Sequences(torch.distributed.group.WORLD).attach(model)


def sharded_and_attached(
    stage: int, model: nn.Module | None = None, **options: Any
) -> tuple[Any, Sequences, zeroshard.Sharded]:
    model, sequences = attached(model)
    return model, sequences, build(stage, make_model=lambda: model, bucket_numel=LARGE_BUCKETS, **options)[1]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


# ---------------------------------------------------------------------- equal

ON_TWO_RANKS = [
    Case(packed=True),
    Case("chunks"),
    Case("window"),
    Case("learned positions"),
    Case("experts"),
    Case("eager", packed=True),
    Case(tiles=3, mlp_tokens=4, checkpointing=True),
    Case("learned positions", tiles=2, mlp_tokens=3),
    Case("lora"),
    Case(checkpointing=True, packed=True),
    Case("two kinds of layers", packed=True),
    Case(tiles=3, mlp_tokens=4),
]
RUNS: list[tuple[Case, int, int, tuple[int, ...]]] = [
    *((case, 2, 2, (1, 3)) for case in ON_TWO_RANKS),
    (Case(), 2, 2, (0, 1, 2, 3)),
    (Case("window", packed=True), 4, 4, (0, 3)),  # two heads of keys, each on two ranks
    (Case("window", packed=True), 4, 2, (0, 3)),
    (Case("chunks", packed=True), 2, 2, (1, 3)),
    (Case("lora", tiles=2, mlp_tokens=3), 2, 2, (0, 3)),
    (Case(accumulation=2), 2, 2, (0, 1, 2, 3)),
]


@pytest.mark.quick(4)
@pytest.mark.parametrize(("case", "world", "size", "stages"), RUNS)
def test_ranks_are_one_process(case: Case, world: int, size: int, stages: tuple[int, ...]) -> None:
    """At each stage with the same bits, but for the order of sums over microbatches; `size` ranks have one sequence."""
    from transformers import masking_utils

    if case.model == "chunks" and case.packed and not hasattr(masking_utils, "remap_positions_for_packed_sequence"):
        pytest.skip("one process of this transformers counts chunks from the first packed sequence, not from each")

    def body(rank: int) -> list[Outcome]:
        return [train(rank, case, size, stage) for stage in stages]

    by_rank = on_ranks(body, world)
    for stage, outcomes in zip(stages, zip(*by_rank, strict=True), strict=True):
        assert all(same_bits(one, outcomes[0]) for one in outcomes), f"stage {stage}: ranks differ"
    first = by_rank[0]
    # Unsharded gradients are summed over microbatches first.
    alike = [first] if case.accumulation == 1 else [first[:2], first[2:]]
    assert all(same_bits(one, row[0]) for row in alike for one in row), "stages differ"
    expect_close(first[-1], alone(case, world // size))
    layers = 3
    recomputed = 2 * layers if case.checkpointing else 0
    assert first[-1].messages == case.accumulation * (4 * layers + recomputed)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.full)])
def test_places_and_overlap_are_equal(rank: int, dtype: torch.dtype) -> None:
    """To the bit, also in 16 bits."""
    case = Case("two kinds of layers", packed=True, tiles=2)
    on_cpu = Residency(sharded=True, place=Place.CPU)
    offload = Policy(parameters=on_cpu, gradients=on_cpu, optimizer=on_cpu)
    settings: list[tuple[int | Policy, bool]] = [(0, True), (3, True), (3, False), (offload, True)]
    outcomes = [train(rank, case, 2, policy, overlap, dtype) for policy, overlap in settings]
    assert all(same_bits(one, outcomes[0]) for one in outcomes)


@pytest.mark.ranks(2)
def test_attention_of_ones_own(rank: int) -> None:
    """By `attend`, with slices by `own`: of one head of keys, which is on both ranks, and of values of another width."""

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    sequences = Sequences(torch.distributed.group.WORLD)
    query, key, value = torch.randn(3, 4, 6, 8), torch.randn(3, 1, 6, 8), torch.randn(3, 1, 6, 5)
    wholes = [one.requires_grad_() for one in (query, key, value)]
    expected = attention(*wholes)
    seed = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, wholes, seed)
    owns = [sequences.own(one, dim=2).detach().requires_grad_() for one in wholes]
    found = sequences.attend(attention, *owns)
    torch.testing.assert_close(found, sequences.own(expected, dim=2))
    for one, gradient in zip(torch.autograd.grad(found, owns, sequences.own(seed, dim=2)), gradients, strict=True):
        torch.testing.assert_close(one, sequences.own(gradient, dim=2))


def preferences(pair: Tensor) -> Tensor:
    """DPO's loss of log-probabilities [chosen and rejected rows] against a reference without preferences."""
    chosen, rejected = (0.5 * pair).chunk(2)
    return -F.logsigmoid(chosen - rejected).mean()


@pytest.mark.ranks(2)
def test_preferences_are_one_process(rank: int) -> None:
    """By `log_probabilities` of a slice, and `sum` over the ranks of a sequence."""
    pair = batch(Case(), 0, 0)  # one row is chosen, and the other rejected
    plain: Any = make(Case())
    logits = plain(input_ids=pair["input_ids"], use_cache=False).logits[:, :-1]
    labels = pair["labels"][:, 1:]
    whole = (
        logits.log_softmax(-1).gather(2, labels.clamp(min=0)[..., None])[..., 0].masked_fill(labels == -100, 0).sum(1)
    )
    preferences(whole).backward()
    model, sequences, sharded = sharded_and_attached(3)
    found = sequences.sum(sequences.log_probabilities(model, sequences.cut(pair), tiles=2).sum(1))
    preferences(found).backward()
    torch.testing.assert_close(found, whole, rtol=1e-5, atol=0)
    norm = float(nn.utils.clip_grad_norm_(plain.parameters(), 0.5))
    assert float(sharded.clip_grad_norm_(0.5)) == pytest.approx(norm, rel=1e-5)


@pytest.mark.ranks(2)
def test_a_checkpoint_continues_without_cut_sequences(rank: int, tmp_path: Path) -> None:
    ends = []
    for cut in (True, False):
        model, sequences = attached() if cut else (make(Case()), None)
        make_optimizer = partial(torch.optim.AdamW, lr=1e-2, eps=1e-3)
        _, sharded = build(3, make_model=lambda: model, make_optimizer=make_optimizer)  # noqa: B023
        if not cut:
            sharded.load(tmp_path)
        for number in range(0 if cut else 2, 4):
            one = batch(Case(), number, 0)
            loss = sequences.loss(model, sequences.cut(one)) if sequences else model(**one).loss
            ends.append(float(update(loss, sharded.optimizer)))
            if number == 1:
                sharded.save(tmp_path, "tag")
        sharded.remove()
    assert ends[4:] == pytest.approx(ends[2:4], rel=1e-5)


@pytest.mark.ranks(2)
def test_an_engine_takes_cut_batches(rank: int) -> None:
    """In a loop as DeepSpeed's users have it."""
    model, sequences = attached()
    config = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.5}
    engine, *_ = zeroshard.initialize(model=model, optimizer=sgd(model), config=config)
    loss = microbatch(engine, sequences.loss(engine, sequences.cut(batch(Case(), 0, 0)), tiles=2))
    twin = alone(Case(steps=1), 1)
    assert float(loss) == pytest.approx(twin.losses[0], rel=1e-6)
    assert float(engine.get_global_grad_norm()) == pytest.approx(twin.norms[0], rel=1e-5)


@pytest.mark.full
@pytest.mark.ranks(2)
def test_autocast_and_compiled_blocks_are_one_process(rank: int) -> None:
    """Rotary positions are computed in fp32 under autocast, so queries and keys have another dtype than values."""
    for compiles in (False, True):
        model, sequences = attached()
        for block in model.model.layers if compiles else ():
            block.compile(backend="eager")
        zeroshard.shard(model, sgd(model), 2)
        with torch.autocast("cpu", torch.bfloat16):
            loss = sequences.loss(model, sequences.cut(batch(Case(), 0, 0)))
            loss.backward()
            expected = make(Case())(**batch(Case(), 0, 0)).loss
        assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-3)


@pytest.mark.ranks(2)
def test_generation_and_copies_run_whole(rank: int) -> None:
    torch.manual_seed(0)
    model: Any = llama().eval()
    prompt = torch.randint(2, 64, (1, 4 + rank), generator=torch.Generator().manual_seed(rank))
    options = {"max_new_tokens": 3 + rank, "do_sample": False, "eos_token_id": None}
    generate = partial(model.generate, prompt, **options, attention_mask=torch.ones_like(prompt))
    before = generate()
    _, sequences = attached(model)
    assert torch.equal(generate(), before)
    copied: Any = copy.deepcopy(model)
    assert sequences.messages == 0
    one = sequences.cut(batch(Case(), 0, 0))
    assert torch.equal(sequences.loss(model, one), sequences.loss(copied, one))
    assert "zeroshard" not in str(model.config.to_dict())
    with pytest.raises(UsageError, match="a model that is not attached"):
        sequences.detach(copied)
    sequences.detach(model)
    assert torch.equal(generate(), before)
    assert model.config._attn_implementation == "sdpa"
    other, _ = attached(llama())
    kept = weakref.ref(other.model)
    del other, _
    gc.collect()
    assert kept() is None, "transformers' registry keeps the model"


PACKED = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in ((9, 15), (3, 12, 9))])
ONE_PACKED = torch.stack([torch.arange(24), torch.cat([torch.arange(10), torch.arange(14)])])
SHORTENED = torch.cat([torch.arange(5, 14), torch.arange(15)]).expand(2, 24)


@pytest.mark.parametrize("core", ["sdpa", "eager"])
@pytest.mark.parametrize("positions", [PACKED, ONE_PACKED, SHORTENED], ids=["packed", "one packed", "shortened"])
@pytest.mark.parametrize("pattern", ["causal", "window", "chunks"])
def test_masks_see_what_each_pattern_says(pattern: str, positions: Tensor, core: str) -> None:
    """Query by query and key by key, within each document."""
    from transformers import masking_utils

    length = positions.shape[1]
    model: Any = llama()
    model.set_attn_implementation(core)
    config = model.model.config
    config.sliding_window, config.attention_chunk_size = 5, 4
    makers = {
        "causal": masking_utils.create_causal_mask,
        "window": masking_utils.create_sliding_window_causal_mask,
        "chunks": masking_utils.create_chunked_causal_mask,
    }
    attention = CutAttention(SequenceRanks(), model)
    set_slice(attention, Slice(positions))
    made = makers[pattern](
        config=config, inputs_embeds=torch.zeros(2, length // 2, 32), past_key_values=None,
        attention_mask=torch.ones(2, length // 2, dtype=torch.bool), position_ids=positions[:, : length // 2],
    )  # fmt: skip
    found = made[:, 0] if core == "sdpa" else made[:, 0] == 0
    document = Slice(positions).documents
    for row, query, key in itertools.product(range(2), range(length), range(length)):
        sees = key <= query and bool(document[row, query] == document[row, key])
        here, there = int(positions[row, query]), int(positions[row, key])
        if pattern == "window":
            sees = sees and here - there < 5
        if pattern == "chunks":
            sees = sees and here // 4 == there // 4
        assert bool(found[row, query, key]) == sees, (row, query, key)
    attention.remove()


# ---------------------------------------------------------------------- batches


@pytest.mark.ranks(2)
def test_a_batch_is_cut_into_slices(rank: int) -> None:
    sequences = Sequences(torch.distributed.group.WORLD)
    tokens = torch.arange(10).view(2, 5)
    mask = torch.tensor([[1] * 5, [1, 1, 1, 0, 0]])
    labels = tokens.masked_fill(mask == 0, -100)
    cut = sequences.cut({"input_ids": tokens, "labels": labels, "attention_mask": mask, "name": "x"})
    assert set(cut) == {"input_ids", "position_ids", "shift_labels", "name"}
    assert cut["input_ids"].tolist() == ([[0, 1, 2], [5, 6, 7]], [[3, 4, 0], [8, 9, 0]])[rank]
    assert cut["shift_labels"].tolist() == ([[1, 2, 3], [6, 7, -100]], [[4, -100, -100], [-100, -100, -100]])[rank]
    assert cut["position_ids"].tolist() == [[0, 1, 2, 3, 4, 5]] * 2
    own = {"input_ids": tokens + 100 * rank}
    with pytest.raises(UsageError, match="different batches"):
        list(sequences.cut([own]))
    turns = list(sequences.cut([own], in_turn=True))
    assert [int(one["input_ids"][0, 0]) - 3 * rank for one in turns] == [0, 100]
    for in_turn in (False, True):
        with pytest.raises(UsageError, match="needs batches with names"):
            next(sequences.cut([[tokens]], in_turn=in_turn))  # type: ignore[list-item]
    packed = {"input_ids": tokens, "position_ids": torch.tensor([[0, 1, 0, 1, 2]])}
    assert sequences.cut(packed)["position_ids"].tolist() == [[0, 1, 0, 1, 2, 3]] * 2


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"attention_mask": torch.tensor([[0, 1, 1, 1]])}, "on the left"),
        ({"attention_mask": torch.tensor([[1, 0, 1, 1]])}, "or between"),
        ({"attention_mask": torch.tensor([[1, 1, 1, 0]]), "labels": torch.arange(4)[None]}, "labels of padding count"),
        ({"attention_mask": torch.ones(1, 1, 4, 4)}, r"that is not \[rows, tokens\]"),
        ({"position_ids": torch.zeros(3, 1, 4)}, "one position for each token"),
        ({"cu_seq_lens_q": torch.tensor([0, 4])}, "position_ids that begin at 0"),
        ({"bias": torch.zeros(2, 4, 4)}, "unclear how to cut"),
        ({"labels": torch.zeros(1)}, "with a label for each token"),
        ({"labels": torch.zeros(1, 3), "attention_mask": torch.ones(1, 4)}, "with a label for each token"),
        ({"input_ids": torch.arange(4)}, "with input_ids"),
    ],
)
def test_batches_that_are_refused(change: dict[str, Tensor], match: str) -> None:
    given = {"input_ids": torch.arange(4)[None], **change}
    with pytest.raises(UsageError, match=match):
        cut_batch(SequenceRanks(), given)


# ---------------------------------------------------------------------- refusals


def of_transformers(name: str, **sizes: Any) -> Any:
    """Return a model of a family, with `SIZES` where none are given."""
    import transformers

    config = getattr(transformers, f"{name}Config")(**(sizes if "vocab_size" in sizes else {**SIZES, **sizes}))
    return getattr(transformers, f"{name}ForCausalLM")(config)


def three_heads() -> nn.Module:
    return of_transformers("Llama", hidden_size=36, num_attention_heads=3, num_key_value_heads=3)


def bloom() -> nn.Module:
    return of_transformers("Bloom", vocab_size=64, hidden_size=32, n_layer=2, n_head=4)


def mamba() -> nn.Module:
    return of_transformers("Mamba", vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4)


def linear_attention() -> nn.Module:
    heads = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    }
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
    return of_transformers(
        "Qwen3Next", num_hidden_layers=2, head_dim=8, **heads, **experts, shared_expert_intermediate_size=16
    )


def dynamic_rope() -> nn.Module:
    return of_transformers("Llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})


def prompt_tuning() -> nn.Module:
    from peft import PromptTuningConfig, get_peft_model

    model: Any = llama()
    return get_peft_model(model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))  # type: ignore[arg-type]


def changed(model: Any, **config: Any) -> nn.Module:
    for name, value in config.items():
        setattr(model.config, name, value)
    return model  # type: ignore[no-any-return]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("model", "match"),
    [
        (three_heads, "3 attention heads cannot be cut over 2"),
        (t5, "cross attention"),
        (bloom, "ALiBi"),
        (mamba, "state from position to position"),
        (linear_attention, "linear_attention"),
        (dynamic_rope, "changes its frequencies"),
        (lambda: changed(mixtral(), output_router_logits=True), "output_router_logits=False"),
        (llama4, "layers.1.self_attn of Llama4TextModel scales queries by its own count of positions"),
        (prompt_tuning, "virtual tokens"),
        (
            lambda: changed(llama(), _attn_implementation="flash_attention_2"),
            "flash_attention_2, whose kernels transformers loads by that name",
        ),
        (lambda: nn.Linear(2, 2), "not a model of transformers"),
    ],
)
def test_models_that_are_refused(rank: int, model: Callable[[], nn.Module], match: str) -> None:
    made = model()
    with pytest.raises(UsageError) as caught:
        attached(made)
    assert match in str(caught.value)
    assert "zeroshard" not in str(getattr(getattr(made, "config", None), "_attn_implementation", ""))


def test_heads_that_cannot_be_cut_name_the_numbers_of_ranks_that_can() -> None:
    with pytest.raises(UsageError, match="divides the number of heads"):
        refuse_heads(3, 3, 2)
    with pytest.raises(
        UsageError, match=r"6 attention heads \(2 for keys and values\).* both numbers, or divides the first"
    ):
        refuse_heads(6, 2, 3)
    refuse_heads(6, 2, 2)
    refuse_heads(6, 2, 6)


@pytest.mark.ranks(2)
def test_a_head_that_is_not_plain_is_refused_with_a_remedy_that_works(rank: int) -> None:
    """PEFT wraps the modules of `modules_to_save`."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    targets = ["q_proj", "down_proj"]
    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=targets, modules_to_save=["lm_head"])
    made: Any = get_peft_model(make(Case()), config)  # type: ignore[arg-type]
    whole = batch(Case(), 0, 0)
    expected = float(made(**whole).loss.detach())
    model, sequences, _ = sharded_and_attached(3, made)
    one = sequences.cut(whole)
    with pytest.raises(UsageError, match=r"ModulesToSaveWrapper.*token_mean"):
        sequences.loss(model, one)
    labels = one.pop("shift_labels").flatten()
    values = F.cross_entropy(model(**one).logits.flatten(0, 1), labels, reduction="none")
    loss = token_mean(values, labels != -100)
    loss.backward()
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_without_transformers_a_model_is_none_of_its_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError, match="not a model of transformers"):
        CutAttention(SequenceRanks(), nn.Linear(2, 2))


@pytest.mark.ranks(2)
def test_forwards_that_are_refused(rank: int) -> None:
    model, sequences = attached()
    one = sequences.cut(batch(Case(), 0, 0))
    inputs = {name: value for name, value in one.items() if name != "shift_labels"}
    attention = model.model.layers[1].self_attn
    with pytest.raises(UsageError, match="already attached to Sequences"):
        sequences.attach(model)
    with pytest.raises(UsageError, match="got an uncut batch"):
        model(input_ids=one["input_ids"])
    with pytest.raises(UsageError, match="got attention_mask"):
        model(**inputs, attention_mask=torch.ones_like(one["input_ids"]))
    with pytest.raises(UsageError, match=r"1/2 of the tokens"):
        model(input_ids=one["input_ids"], position_ids=torch.arange(7)[None])
    with pytest.raises(UsageError, match="has no shift_labels"):
        sequences.loss(model, inputs)
    attention.attention_dropout = 0.1
    with pytest.raises(UsageError, match=r"has attention dropout \(0.1\)"):
        model(**inputs)
    attention.attention_dropout = 0.0
    attention.is_causal = False
    with pytest.raises(UsageError, match="two directions"):
        model(**inputs)
    attention.is_causal = True
    forward = attention.forward
    attention.forward = lambda hidden_states, **_: (hidden_states, None)
    with pytest.raises(UsageError, match="3 layers, and 2 of them"):
        model(**inputs)

    def without_keywords(hidden_states: Tensor, position_embeddings: Any, attention_mask: Any, **_: Any) -> Any:
        return forward(hidden_states, position_embeddings, attention_mask)

    attention.forward = without_keywords
    with pytest.raises(UsageError, match="none of the keywords"):
        model(**inputs)


@pytest.mark.ranks(2)
def test_router_losses_and_two_directions_are_refused_in_the_forward(rank: int) -> None:
    model, sequences = attached(make(Case("experts")))
    one = sequences.cut(batch(Case(), 0, 0))
    with pytest.raises(UsageError, match="adds a loss of its routers"):
        model(input_ids=one["input_ids"], position_ids=one["position_ids"], output_router_logits=True)
    both, sequences = attached(bert().eval())
    with pytest.raises(UsageError, match="more than positions"):
        both(**sequences.cut({"input_ids": torch.arange(8)[None]}))


@pytest.mark.ranks(2)
def test_logits_that_go_on_are_refused(rank: int) -> None:
    """Granite divides its logits: log-probabilities in tiles would pass that by, unless they are given it."""
    torch.manual_seed(0)
    granite = of_transformers("Granite", logits_scaling=3.0)
    one = batch(Case(), 0, 0)
    expected = float(granite(**one, use_cache=False).loss)
    model, sequences = attached(granite)
    cut = sequences.cut(one)
    with pytest.raises(UsageError, match="changes its logits after its head"):
        sequences.loss(model, cut)
    found = sequences.loss(model, cut, tiles=2, transform=lambda logits: logits / 3.0)
    assert abs(float(found.detach()) - expected) < 1e-5


def test_a_rank_that_is_not_there_is_named() -> None:
    def body(rank: int) -> None:
        sequences = Sequences(torch.distributed.group.WORLD)
        query = torch.zeros(1, 2, 4, 2)
        sequences.attend(lambda q, k, v: q, query, query, query)
        if rank == 1:
            torch.distributed.destroy_process_group()
        else:
            sequences.attend(lambda q, k, v: q, query, query, query)

    with pytest.raises(RankError, match=r"CollectiveError: an exchange of heads .* among ranks \[0, 1\] failed"):
        run_ranks(body, 2)


@pytest.mark.ranks(2)
def test_counts_are_of_all_ranks(rank: int) -> None:
    """One rank of a sequence may hold no label that counts."""
    model, sequences = attached()
    one = batch(Case(), 0, 0)
    one["labels"][:, :12] = -100
    cut = sequences.cut(one)
    assert bool((cut["shift_labels"] != -100).any()) == (rank == 1)
    loss = sequences.loss(model, cut)
    loss.backward()
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters())
    sequences.detach(model)
    torch.testing.assert_close(loss, model(**one).loss, rtol=1e-6, atol=0)


@pytest.mark.full
@pytest.mark.parametrize(("length", "room"), [(4096, 300 * 10**6), (32768, 600 * 10**6)])
def test_a_sequence_trains_where_it_does_not_fit_whole(length: int, room: int) -> None:
    """Two ranks, each with so many bytes more than at the start. Whole logits over 16,384 words need 268 MB three times for 4,096
    tokens, and 2.1 GB for 32,768, of which each rank's half is too much as well."""
    sizes = SIZES | {
        "hidden_size": 16, "intermediate_size": 512, "vocab_size": 16384, "num_hidden_layers": 2, "num_attention_heads": 2,
        "max_position_embeddings": length,
    }  # fmt: skip
    tokens = torch.randint(0, 16384, (1, length), generator=torch.Generator().manual_seed(0))
    given = {"input_ids": tokens, "labels": tokens}

    def body(rank: int, is_limited: bool, tiles: int, steps: int) -> list[float]:
        torch.manual_seed(0)
        model = of_transformers("Llama", **sizes)
        sequences = Sequences(torch.distributed.group.WORLD)
        sharded = None
        if tiles:
            sequences.attach(model)
            tile(model, "*.mlp", tokens=256)
            sharded = zeroshard.shard(model, sgd(model), 3)
        before = resource.getrlimit(resource.RLIMIT_AS)
        found = []
        try:
            if is_limited:
                used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
                resource.setrlimit(resource.RLIMIT_AS, (used + room, before[1]))
            if sharded is None:
                model(**given).loss.backward()
            else:
                for _ in range(steps):
                    loss = sequences.loss(model, sequences.cut(given), tiles=tiles)
                    found.append(float(update(loss, sharded.optimizer)))
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)
        return found

    limited = run_ranks(body, 2, True, 64, 2, timeout=900)
    if length == 4096:  # a limit changes no numbers
        assert limited == run_ranks(body, 2, False, 64, 2, timeout=900)
    assert limited[0][1] < limited[0][0]
    with pytest.raises(RankError, match="allocate memory"):
        run_ranks(body, 2, True, 0, 1)
    if length == 32768:
        with pytest.raises(RankError, match="allocate memory"):
            run_ranks(body, 2, True, 1, 1)


@pytest.mark.ranks(2)
def test_groups_that_leave_ranks_of_a_sequence_out(rank: int) -> None:
    """Their ranks' gradients would never meet."""
    own = [torch.distributed.new_group([one]) for one in range(2)]
    with pytest.raises(UsageError, match="every rank of a sequence"):
        Sequences(torch.distributed.group.WORLD, group=own[rank])
    with pytest.raises(UsageError, match="pass the one with"):
        Sequences(own[1 - rank])
    model, sequences, _ = sharded_and_attached(2, group=own[rank])
    with pytest.raises(UsageError, match=r"over 1 rank, but these Sequences average losses over ranks \[0, 1\]"):
        sequences.loss(model, sequences.cut(batch(Case(), 0, 0)))


@pytest.mark.ranks(4)
def test_a_group_of_equally_many_but_other_ranks_is_refused(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
    model: Any = make(Case())
    sequences = Sequences(mesh["sp"], group=mesh["sp"]).attach(model)
    zeroshard.shard(model, sgd(model), 2, group=mesh["dp"])
    with pytest.raises(UsageError, match=r"over ranks \[., .\], but these Sequences average losses over ranks"):
        sequences.loss(model, sequences.cut(batch(Case(), 0, rank // 2)))
    torch.distributed.barrier()


def test_a_config_cannot_cut_sequences() -> None:
    """It has no loop: batches and losses change, too."""
    with pytest.raises(ConfigError, match=r"sequence_parallel_size: a config alone cannot cut sequences.*it is 2"):
        load_config({"sequence_parallel_size": 2, "train_micro_batch_size_per_gpu": 1}, 2)
