"""Losses without whole logits, and modules in tiles: one tile gives the untiled run's bits, and more give close results."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import pytest
import torch
from families import llama
from models import sgd
from sequences import Case, batch, make
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from twin import build, update

from zeroshard import UsageError
from zeroshard.sequence import Sequences, head_log_probabilities, head_loss, tile, token_mean

TOKENS, WIDTH, WORDS = 60, 8, 50


def head(dtype: torch.dtype = torch.float32, bias: bool = True) -> tuple[list[Tensor], Tensor]:
    """Return [hidden, weight, bias], which want gradients, and labels of which some do not count."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(2, TOKENS // 2, WIDTH), (WORDS, WIDTH), (WORDS,)]
    tensors = [torch.randn(size, generator=generator).to(dtype).requires_grad_() for size in sizes]
    labels = torch.randint(0, WORDS, (2, TOKENS // 2), generator=generator)
    labels[0, :7] = -100
    return tensors[: 2 + bias], labels


def plain(tensors: list[Tensor], labels: Tensor) -> Tensor:
    losses = F.cross_entropy(F.linear(*tensors).flatten(0, 1).float(), labels.flatten(), reduction="none")
    return losses.sum() / (labels != -100).sum()


def tiled(tensors: list[Tensor], labels: Tensor, tiles: int) -> Tensor:
    return head_loss(tensors[0], tensors[1], labels, bias=tensors[2] if len(tensors) > 2 else None, tiles=tiles)


def gradients(loss: Tensor, tensors: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, [one for one in tensors if one.requires_grad])


@pytest.mark.quick(4)
@pytest.mark.parametrize("what", ["fp32 without a bias", "fp32", "bf16", "autocast", "a frozen head"])
def test_one_tile_gives_the_bits_of_none(what: str) -> None:
    tensors, labels = head(torch.bfloat16 if what == "bf16" else torch.float32, what != "fp32 without a bias")
    if what == "a frozen head":
        tensors = [tensors[0], *(one.detach() for one in tensors[1:])]
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=what == "autocast"):
        expected, found = plain(tensors, labels), tiled(tensors, labels, 1)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert all(map(torch.equal, gradients(found, tensors), gradients(expected, tensors)))


@pytest.mark.parametrize("tiles", [2, 7, TOKENS, 10 * TOKENS])
def test_tiles_change_rounding_only(tiles: int) -> None:
    tensors, labels = head()
    expected, found = plain(tensors, labels), tiled(tensors, labels, tiles)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    for one, other in zip(gradients(found, tensors), gradients(expected, tensors), strict=True):
        assert (one - other).abs().max() <= 1e-6 * other.abs().max()


def test_gradients_of_16_bits_are_summed_in_fp32() -> None:
    tensors, labels = head(torch.bfloat16)
    exact = [one.detach().double().requires_grad_() for one in tensors]
    wanted = gradients(tiled(exact, labels, 1), exact)[1]
    by_tiles = [gradients(tiled(tensors, labels, tiles), tensors)[1].double() for tiles in (1, TOKENS)]
    one, many = ((found - wanted).norm() / wanted.norm() for found in by_tiles)
    assert many < 1.5 * one


def test_log_probabilities_take_any_gradient_and_a_transform() -> None:
    """DPO's and KTO's losses need both: a gradient for each token, and the softcapping of some models."""
    (hidden, weight), labels = head(bias=False)

    def cap(logits: Tensor) -> Tensor:
        return 3 * torch.tanh(logits / 3)

    found = head_log_probabilities(hidden, weight, labels, tiles=4, transform=cap)
    whole = cap(hidden @ weight.t()).log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    whole = whole * (labels != -100)
    torch.testing.assert_close(found, whole)
    seed = torch.randn_like(found)
    by_tiles, at_once = (torch.autograd.grad(one, [hidden, weight], seed) for one in (found, whole))
    torch.testing.assert_close(by_tiles, at_once, rtol=1e-5, atol=1e-6)


class Largest(TorchDispatchMode):
    """Sees the largest tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.numel = max(self.numel, out.numel())
        return out


def test_whole_logits_are_never_made() -> None:
    tensors, labels = head()
    for tiles, most in ((1, TOKENS * WORDS), (10, TOKENS // 10 * WORDS)):
        with Largest() as largest:
            tiled(tensors, labels, tiles).backward()
        assert largest.numel == max(most, TOKENS * WIDTH)


@pytest.mark.parametrize("tokens", [0, TOKENS])
def test_no_token_counts(tokens: int) -> None:
    (_, weight), _ = head(bias=False)
    hidden = torch.ones(tokens, WIDTH, requires_grad=True)
    loss = tiled([hidden, weight], torch.full((tokens,), -100), 2)
    assert tokens == 0 or float(loss.detach()) == 0
    for one in gradients(loss, [hidden, weight]):
        assert not one.any()


@pytest.mark.ranks(2)
def test_a_token_mean_over_ranks(rank: int) -> None:
    """The average of gradients over ranks is that of the mean over all tokens."""
    values = torch.arange(6.0).requires_grad_()
    counted = torch.arange(6) < (2, 5)[rank]
    mean = token_mean(values * (rank + 1), counted)
    assert float(mean) == pytest.approx((0 + 1 + 2 * (0 + 1 + 2 + 3 + 4)) / 7)
    (gradient,) = torch.autograd.grad(mean, values)
    assert torch.equal(gradient, torch.where(counted, (rank + 1) * 2 / 7, 0.0))
    assert float(token_mean(values, counted, tokens=14)) == pytest.approx((1 + 10) / 14)
    sequences = Sequences(torch.distributed.group.WORLD)
    logp = torch.full((3,), rank + 1.0, requires_grad=True)
    total = sequences.sum(logp)
    assert total.tolist() == [3, 3, 3]
    # Both ranks' losses depend on this rank's tensor, and gradients are averaged over the ranks.
    (gradient,) = torch.autograd.grad((total * torch.arange(3)).sum(), logp)
    assert gradient.tolist() == [0, 2, 4]


def test_a_token_mean_of_fp16_values_does_not_overflow() -> None:
    values = torch.full((40_000,), 3.0, dtype=torch.float16, requires_grad=True)
    mean = token_mean(values, torch.ones(40_000, dtype=torch.bool))
    assert mean.item() == 3.0
    (mean * 40_000).backward()
    assert values.grad is not None and bool((values.grad == 1).all())


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"tiles": 0}, "1 tile or more"),
        ({"labels": torch.zeros(3)}, "do not match"),
        ({"weight": torch.zeros(3)}, "do not match"),
    ],
)
def test_what_does_not_fit(change: dict[str, Any], match: str) -> None:
    (hidden, weight), labels = head(bias=False)
    with pytest.raises(UsageError, match=match):
        head_loss(**{"hidden": hidden, "weight": weight, "labels": labels, **change})


@pytest.mark.ranks(2)
def test_a_head_outside_of_its_model_is_refused_by_name(rank: int) -> None:
    """The loss reads the head's weight: outside of a forward, a sharded one is not there."""
    model, _ = build(3, make_model=llama)
    one = batch(Case(), 0, rank)
    hidden = model.model(input_ids=one["input_ids"]).last_hidden_state
    with pytest.raises(UsageError, match=r"lm_head\.weight"):
        head_loss(hidden, model.lm_head.weight, one["labels"])


# ---------------------------------------------------------------------- modules


def mlp(dropout: float = 0.0) -> nn.Sequential:
    up, down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
    return nn.Sequential(OrderedDict(up=up, gelu=nn.GELU(), dropout=nn.Dropout(dropout), down=down))


def run(model: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    x = x.detach().requires_grad_()
    y = model(x)
    return y, list(torch.autograd.grad(y.square().sum(), [x, *(p for p in model.parameters() if p.requires_grad)]))


@pytest.mark.parametrize("tokens", [1, 4, 7, 12, 100])
def test_a_module_in_tiles_gives_close_results_until_they_are_removed(tokens: int) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(mlp(), mlp()), torch.randn(2, 12, WIDTH)
    model[1].up.weight.requires_grad_(False)  # type: ignore[union-attr]
    expected, gradients = run(model, x)
    tiles = tile(model, "*", tokens=tokens)
    found, by_tiles = run(model, x)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    largest = max(gradient.abs().max() for gradient in gradients)
    assert all((one - other).abs().max() <= 1e-6 * largest for one, other in zip(by_tiles, gradients, strict=True))
    if tokens >= 12:
        assert torch.equal(found, expected)
        assert all(torch.equal(one, other) for one, other in zip(by_tiles, gradients, strict=True))
    copied = copy.deepcopy(model)
    copied[0].up.weight.data.zero_()  # type: ignore[union-attr, operator]
    assert not torch.equal(copied(x), model(x))
    tiles.remove()
    assert all("forward" not in vars(module) for module in model.modules())
    assert torch.equal(run(model, x)[0], expected)


def test_a_backward_drops_what_the_forward_dropped() -> None:
    model = mlp(0.5)
    holder = nn.ModuleDict({"mlp": model})
    tile(holder, "mlp", tokens=5)
    x = torch.randn(2, 12, WIDTH, requires_grad=True)
    torch.manual_seed(3)
    y = model(x)
    after = torch.get_rng_state()
    # Where nothing was dropped, an input's gradient through a linear function is its part of the output.
    y.backward(torch.ones_like(y))
    assert torch.equal(torch.get_rng_state(), after)
    torch.manual_seed(3)
    with torch.no_grad():
        again = torch.cat([nn.Sequential.forward(model, part) for part in x.split(5, dim=1)], dim=1)
    assert torch.equal(y, again)
    torch.manual_seed(3)
    other = x.detach().requires_grad_()
    torch.cat([nn.Sequential.forward(model, part) for part in other.split(5, dim=1)], dim=1).sum().backward()
    torch.testing.assert_close(x.grad, other.grad)


@pytest.mark.parametrize(
    ("module", "match"),
    [
        (nn.Sequential(nn.Conv1d(12, 12, 1)), "whose result at one position depends on others"),
        (nn.Softmax(dim=1), "gives different results if positions run together"),
        (nn.Flatten(), "must return one tensor"),
        (nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)), "changes its input in place"),
    ],
)
def test_modules_that_cannot_run_in_tiles(module: nn.Module, match: str) -> None:
    model = nn.ModuleDict({"one": module})
    with pytest.raises(UsageError, match=match):
        tile(model, "one", tokens=4)
        module(torch.randn(1, 12, WIDTH))


@pytest.mark.ranks("ranks")
@pytest.mark.parametrize("ranks", [1, 2])
def test_parameters_that_a_module_uses_but_does_not_own_are_refused(rank: int, ranks: int) -> None:
    """They would get no gradient."""
    model = nn.ModuleDict({"mlp": mlp(), "adapter": nn.Linear(WIDTH, WIDTH)})
    model["mlp"].up.register_forward_hook(lambda up, args, y: y + F.pad(model["adapter"](args[0]), (0, 3 * WIDTH)))
    tile(model, "mlp", tokens=4)
    if ranks == 2:
        build(2, make_model=lambda: model)
    y = model["mlp"](torch.randn(2, 12, WIDTH))
    with pytest.raises(UsageError, match=r"uses a parameter \[.*\] that its module does not own"):
        y.sum().backward()


def test_calls_that_cannot_run_in_tiles() -> None:
    model = nn.ModuleDict({"bilinear": nn.Bilinear(WIDTH, WIDTH, 2), "mlp": mlp()})
    tile(model, ["bilinear", "mlp"], tokens=4)
    x = torch.randn(1, 12, WIDTH)
    for call in (lambda: model["bilinear"](x, x), lambda: model["mlp"](x[0])):
        with pytest.raises(UsageError, match="one positional argument, a tensor"):
            call()
    with pytest.raises(UsageError, match="no module of the model is called 'mpl'"):
        tile(model, "mpl")
    with pytest.raises(UsageError, match="1 position or more"):
        tile(model, "mlp", tokens=0)
    model["mlp"].up.weight.register_hook(lambda gradient: gradient * 0.5)
    with pytest.raises(UsageError, match=r"mlp has a hook \(register_hook\)"):
        model["mlp"](x)


class Attending(nn.Linear):
    """A projection of attention without a cause."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.scaled_dot_product_attention(x, x, x))


def test_a_module_that_mixes_positions_is_found_once_its_outputs_are_not_zero() -> None:
    model = nn.Sequential(Attending(WIDTH, WIDTH, bias=False))
    nn.init.zeros_(model[0].weight)
    tile(model, "0", tokens=2)
    x = torch.randn(1, 6, WIDTH)
    model(x).sum().backward()
    with torch.no_grad():
        model[0].weight.add_(model[0].weight.grad)
    with pytest.raises(UsageError, match="if positions run together"):
        model(x)


@pytest.mark.parametrize("first", [torch.full((2, 5, 4), torch.inf), torch.ones(0, 5, 4)], ids=["infinite", "empty"])
def test_a_first_batch_that_proves_nothing_is_not_judged(first: Tensor) -> None:
    model = nn.ModuleDict({"mlp": nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))})
    tile(model, "mlp", tokens=2)
    assert model["mlp"](first).shape == first.shape
    assert model["mlp"](torch.ones(2, 5, 4)).isfinite().all()


def test_a_second_backward_is_refused() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    tile(model, "0", tokens=2)
    x = torch.randn(1, 6, WIDTH, requires_grad=True)
    (hidden, weight), labels = head(bias=False)
    for name, y in (("tile", model(x).sum()), ("head_loss", head_loss(hidden, weight, labels, tiles=2))):
        with pytest.raises(UsageError, match=rf"{name}\(\) recomputes tiles"):
            torch.autograd.grad(y, [x, hidden], create_graph=True, allow_unused=True)


# ---------------------------------------------------------------------- sharded


@pytest.mark.ranks(2)
def test_a_tiled_unit_is_gathered_once(rank: int) -> None:
    found = []
    for tokens in (64, 3):

        def tiled(tokens: int = tokens) -> nn.Module:
            model = make(Case())
            tile(model, "*.mlp", tokens=tokens)
            return model

        model, sharded = build(3, make_model=tiled, make_optimizer=sgd)
        norms = []
        for _ in range(2):
            clip = lambda: norms.append(float(sharded.clip_grad_norm_(1.0)))  # noqa: B023, E731
            update(model(**batch(Case(), 0, rank)).loss, sharded.optimizer, clip)
        found.append((sharded.comm_report()["all_gather"], norms[-1]))
    (whole, norm), (tiles, other) = found
    assert whole == tiles > 0
    assert abs(norm - other) <= 1e-5 * norm
