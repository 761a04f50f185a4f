"""Pruning whole models: counts, gradients, schedules, and the model that is left."""

from __future__ import annotations

import copy

import pytest
import torch
from conftest import normal
from torch import Tensor, nn

import laprune
from laprune.prune import GlobalPruner, masks
from laprune.schedules import linear

X = normal(5, 8)


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()


def conv_net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.Flatten(), nn.Linear(64, 3)
    return nn.Sequential(*layers).double()


def originals(model: nn.Module) -> list[Tensor]:
    return [p for name, p in model.named_parameters() if name.endswith("original")]


def count(model: nn.Module) -> int:
    return sum(int((p != 0).sum()) for p in model.parameters() if p.dim() > 1)


def train(model: nn.Module, pruner: GlobalPruner, steps: int, x: Tensor = X) -> None:
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(steps):
        optimiser.zero_grad()
        model(x).square().sum().backward()
        optimiser.step()
        pruner.step()


@pytest.mark.parametrize("mode", ["soft", "ste"])
@pytest.mark.parametrize("scores", ["magnitude", "learned"])
def test_forward_and_gradients_are_those_of_the_joint_mask(scores: str, mode: str) -> None:
    model = net()
    pruner = GlobalPruner(model, 0.3, gamma=0.8, scores=scores, mode=mode)
    weights = originals(model)
    sources = weights
    if scores == "learned":
        sources = [p for name, p in model.named_parameters() if name.endswith("scores")]
        with torch.no_grad():
            for i, p in enumerate(sources):
                p.copy_(normal(*p.shape, seed=i))
    found = model(X)
    by = [s.abs() for s in sources] if scores == "magnitude" else sources
    first, last = laprune.global_topk(by, pruner.kept, 0.8, mode=mode)
    hidden = nn.functional.linear(X, weights[0] * first, model[0].bias).tanh()
    wanted = nn.functional.linear(hidden, weights[1] * last, model[2].bias)
    torch.testing.assert_close(found, wanted)
    inputs = list(dict.fromkeys([*weights, *sources]))
    for x, y in zip(
        torch.autograd.grad(found.square().sum(), inputs),
        torch.autograd.grad(wanted.square().sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(x, y)


def test_several_losses_between_two_steps() -> None:
    model = net()
    GlobalPruner(model, 0.3, gamma=0.8)
    for x in (X, 2 * X):
        model(x).square().sum().backward()
    twice = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    (model(X).square().sum() + model(2 * X).square().sum()).backward()
    for x, p in zip(twice, model.parameters(), strict=True):
        torch.testing.assert_close(x, p.grad)


def test_masks_follow_the_weights() -> None:
    model = net()
    pruner = GlobalPruner(model, 0.25, gamma=0.9)
    before = pruner.masks()
    assert sum(p.sum().item() for p in before.values()) == pytest.approx(48)
    with torch.no_grad():
        originals(model)[0].mul_(100)
    model(X)
    after = pruner.masks()
    assert sum(p.sum().item() for p in after.values()) == pytest.approx(48)
    assert after["0.weight"].sum() > before["0.weight"].sum() + 1
    with torch.no_grad():
        silent = model(X)
    torch.testing.assert_close(silent, model(X).detach())


@pytest.mark.parametrize("density", [0.0, 0.01, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("scores", ["magnitude", "learned"])
def test_the_count_is_exactly_the_one_asked_for(scores: str, density: float) -> None:
    model = net()
    pruner = GlobalPruner(model, density, gamma=0.5, scores=scores)
    train(model, pruner, 2)
    model.eval()
    assert sum(int(m.sum()) for m in pruner.masks().values()) == round(density * 192)
    wanted = model(X)
    pruner.finalize()
    assert count(model) == round(density * 192)
    torch.testing.assert_close(model(X), wanted)


def test_ties_do_not_change_the_count() -> None:
    model = net()
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.5)
    pruner = GlobalPruner(model, 0.3, gamma=0.5)
    train(model, pruner, 1)
    pruner.finalize()
    assert count(model) == 58


def test_schedules_move_with_the_steps() -> None:
    model = net()
    pruner = GlobalPruner(model, linear(1.0, 0.1, steps=5), gamma=linear(0.5, 1.0, steps=5))
    seen = []
    for _ in range(5):
        report = pruner.report()
        seen.append((report.kept, report.gamma))
        assert report.kept == round(pruner.density * 192)
        assert report.mass == pytest.approx(report.kept)
        train(model, pruner, 1)
    assert seen[0] == (192, 0.5)
    assert seen[-1] == (19, 1.0)
    assert pruner.report().near_binary == 1.0
    other = GlobalPruner(net(), linear(1.0, 0.1, steps=5), gamma=linear(0.5, 1.0, steps=5))
    other.load_state_dict(pruner.state_dict())
    assert (other.density, other.gamma, other.kept) == (pruner.density, pruner.gamma, pruner.kept)


def test_report_adds_up() -> None:
    model = net()
    pruner = GlobalPruner(model, 0.3, gamma=0.8)
    report, masks = pruner.report(), pruner.masks()
    assert list(report.layers) == ["0.weight", "2.weight"]
    for name, layer in report.layers.items():
        p = masks[name]
        assert layer.entries == p.numel()
        assert layer.mass == pytest.approx(p.sum().item())
        near = ((p < 1e-3) | (p > 1 - 1e-3)).double().mean().item()
        assert layer.near_binary == pytest.approx(near)
        assert layer.density == layer.kept / layer.entries
    assert report.kept == sum(x.kept for x in report.layers.values()) == pruner.kept


def test_biases_are_channels_too() -> None:
    model = net()
    pruner = GlobalPruner(model, 0.5, granularity="channel", include="*", gamma=0.7)
    train(model, pruner, 1)
    pruner.finalize()
    kept = [p.reshape(len(p), -1).ne(0).all(1).sum() for p in model.parameters()]
    assert sum(kept) == 20


def test_channels_stay_or_go_as_a_whole() -> None:
    model = conv_net()
    pruner = GlobalPruner(model, 0.5, granularity="channel", exclude="4.*", gamma=0.7)
    x = normal(2, 1, 8, 8)
    found = model(x)
    first, last = originals(model)
    scores = [w.flatten(1).square().mean(1).sqrt() for w in (first, last)]
    masks = laprune.global_topk(scores, 5, 0.7)
    torch.testing.assert_close(pruner.masks()["0.weight"][:, 0, 0, 0], masks[0].detach())
    train(model, pruner, 2, x)
    pruner.finalize()
    kept = [m.weight.flatten(1).ne(0).double().mean(1) for m in (model[0], model[2])]
    assert torch.cat(kept).sum() == 5
    assert set(torch.cat(kept).tolist()) == {0.0, 1.0}
    assert model(x).shape == found.shape


@pytest.mark.parametrize("mode", ["soft", "ste"])
@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 8)])
def test_groups_come_out_exactly_n_of_m(n: int, m: int, mode: str) -> None:
    model = net()
    pruner = GlobalPruner(model, granularity=(n, m), gamma=0.6, mode=mode)
    weight = originals(model)[0]
    mask = pruner.masks()["0.weight"].reshape(-1, m)
    torch.testing.assert_close(mask.sum(-1), torch.full_like(mask[:, 0], n))
    if mode == "soft":
        torch.testing.assert_close(mask, laprune.soft_topk(weight.reshape(-1, m).abs(), n, 0.6))
    train(model, pruner, 3)
    assert weight.grad.abs().sum() > 0
    pruner.finalize()
    for layer in (model[0], model[2]):
        assert (layer.weight.reshape(-1, m).ne(0).sum(-1) == n).all()
    assert count(model) == 192 * n // m


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x))


@pytest.mark.parametrize("scores", ["magnitude", "learned"])
def test_tied_weights_count_once_and_stay_tied(scores: str) -> None:
    model, x = Tied(), torch.arange(6)
    pruner = GlobalPruner(model, 0.5, gamma=0.7, scores=scores)
    assert list(pruner.masks()) == ["embed.weight"]
    assert pruner.report().entries == 24
    train(model, pruner, 3, x)
    assert torch.equal(model.embed.weight, model.head.weight)
    pruner.finalize()
    assert model.head.weight is model.embed.weight
    assert int(model.head.weight.ne(0).sum()) == 12


@pytest.mark.parametrize("include", ["embed.*", "head.*"])
def test_tied_weights_are_pruned_in_all_their_uses(include: str) -> None:
    model, x = Tied(), torch.arange(6)
    pruner = GlobalPruner(model, 0.5, include=include)
    assert list(pruner.masks()) == ["embed.weight"]
    for weight in (model.eval().embed.weight, model.head.weight):
        assert int(weight.ne(0).sum()) == 12
    wanted = model(x)
    pruner.finalize()
    torch.testing.assert_close(model(x), wanted)
    with pytest.raises(ValueError, match="nothing passed the filters"):
        GlobalPruner(Tied(), 0.5, exclude=include)


def test_finalize_leaves_a_plain_model() -> None:
    model = net()
    keys, kinds = list(model.state_dict()), [type(m) for m in model]
    weights = list(model.parameters())
    pruner = GlobalPruner(model, 0.5, scores="learned")
    train(model, pruner, 1)
    pruner.finalize()
    assert list(model.state_dict()) == keys
    assert [type(m) for m in model] == kinds
    assert all(p is q for p, q in zip(model.parameters(), weights, strict=True))
    assert not model._forward_pre_hooks
    twin = copy.deepcopy(model)
    torch.testing.assert_close(twin(X), model(X))
    exported = torch.export.export(model, (X,)).module()
    torch.testing.assert_close(exported(X), model(X))
    with pytest.raises(RuntimeError, match="has been finalized"):
        pruner.step()


def test_a_model_being_pruned_can_be_copied() -> None:
    model = net()
    GlobalPruner(model, 0.4, gamma=0.8)
    wanted = model(X)
    twin = copy.deepcopy(model)
    torch.testing.assert_close(twin(X), wanted)
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(2)
    torch.testing.assert_close(model(X), wanted)
    assert not torch.allclose(twin(X), wanted)


def test_state_dicts_restore_learned_scores() -> None:
    model = net()
    pruner = GlobalPruner(model, 0.4, scores="learned")
    train(model, pruner, 2)
    other = net(seed=1)
    GlobalPruner(other, 0.4, scores="learned")
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(other(X), model(X))


# Dynamo's own look at inputs and at functions.
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled_models_train_alike() -> None:
    plain, compiled = net(), net()
    schedule = linear(1.0, 0.3, steps=3)
    pruners = [GlobalPruner(m, schedule, gamma=0.8) for m in (plain, compiled)]
    fast = torch.compile(compiled, backend="aot_eager")
    train(plain, pruners[0], 3)
    train(fast, pruners[1], 3)
    for x, y in zip(plain.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(x, y)
    torch.testing.assert_close(fast.eval()(X), plain.eval()(X))


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled_layers_called_by_themselves_follow_their_weights() -> None:
    model = net()
    pruner = GlobalPruner(model, 0.3, gamma=0.7)
    layer = torch.compile(model[0], backend="aot_eager")
    for training in (True, False, True):
        model.train(training)
        torch.testing.assert_close(layer(X), model[0](X))
        model(X)
        with torch.no_grad():
            model[0].parametrizations.weight.original[0].mul_(3)
        torch.testing.assert_close(layer(X), model[0](X))
    pruner.step()
    layer(X).sum().backward()


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled_graphs_are_kept() -> None:
    from torch._dynamo.testing import CompileCounter

    counted = CompileCounter()
    model = net()
    pruner = GlobalPruner(model, 0.3, gamma=linear(0.5, 1.0, steps=8))
    model[0].forward = torch.compile(model[0].forward, backend=counted, fullgraph=True)
    for _ in range(10):
        model.train()(X).sum().backward()
        model.eval()(X)
        pruner.step()
    assert counted.frame_count <= 3


def test_float32_masks_hold_the_budget() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 200), nn.Linear(200, 100))
    pruner = GlobalPruner(model, 0.1, gamma=0.99)
    mass = sum(p.double().sum().item() for p in pruner.masks().values())
    assert mass == pytest.approx(8000, rel=1e-5)


@pytest.mark.filterwarnings("ignore:laprune")
@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0])
def test_limits_have_finite_gradients(gamma: float) -> None:
    for change in (lambda p: p, lambda p: p * 0 + 1, lambda p: p.sign()):
        model = net()
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(change(p))
        pruner = GlobalPruner(model, 0.3, gamma=gamma)
        model(X).square().sum().backward()
        assert all(p.grad.isfinite().all() for p in model.parameters())
        assert sum(p.sum().item() for p in pruner.masks().values()) == pytest.approx(58)


def test_filters_choose() -> None:
    def names(**kwargs: object) -> list[str]:
        return list(GlobalPruner(net(), 0.5, **kwargs).masks())

    assert names() == ["0.weight", "2.weight"]
    assert names(include="*") == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert names(include=["2.*", "0.bias"]) == ["0.bias", "2.weight", "2.bias"]
    assert names(exclude="0.*") == ["2.weight"]
    assert names(exclude=lambda name, p: p.numel() > 100) == ["2.weight"]
    model = net()
    pruner = GlobalPruner([(model[2], "weight"), (model[0], "bias")], 0.5)
    assert list(pruner.masks()) == ["0.weight", "1.bias"]
    train(model, pruner, 2)
    pruner.finalize()
    assert int(model[2].weight.ne(0).sum() + model[0].bias.ne(0).sum()) == 40
    with pytest.raises(ValueError, match="leave them out with pairs"):
        GlobalPruner([(model[0], "weight")], 0.5, exclude="*.bias")


def test_pairs_are_solved_once_a_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    model, twin, solved = net(), net(), []
    pairs = [(layer, "weight") for layer in (model[0], model[2])]
    pruners = [GlobalPruner(x, 0.3, gamma=0.7) for x in (pairs, twin)]
    solve = masks.solve_pieces
    monkeypatch.setattr(masks, "solve_pieces", lambda *args: solved.append(1) or solve(*args))
    train(model, pruners[0], 3)
    assert len(solved) == 3
    train(twin, pruners[1], 3)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "density is missing"),
        ({"density": 0.5, "granularity": (2, 4)}, "leave density out"),
        ({"granularity": (5, 4)}, "needs 0 < n <= m"),
        ({"granularity": (1, 3)}, "0.weight of shape .* groups of 3 do not fill"),
        ({"density": 0.5, "granularity": "row"}, "granularity must be"),
        ({"density": 1.5}, r"must lie in \[0, 1\]"),
        ({"density": lambda step: 1.5}, r"density must lie in \[0, 1\]"),
        ({"density": 0.5, "gamma": lambda step: 2.0}, r"gamma must lie in \[0, 1\]"),
        ({"density": 0.5, "scores": "size"}, "scores must be"),
        ({"density": 0.5, "include": "nothing"}, "nothing passed the filters"),
        ({"density": 0.5, "mode": "hard"}, "mode must be"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, object], message: str) -> None:
    model = net()
    keys = list(model.state_dict())
    with pytest.raises(ValueError, match=message):
        GlobalPruner(model, **arguments)
    assert list(model.state_dict()) == keys


@pytest.mark.parametrize(
    ("model", "density", "message"),
    [
        (
            net(),
            torch.tensor(0.5),
            "density must be a number or a function of the step, got Tensor",
        ),
        (net().parameters(), 0.5, r"a module or \(module, name\) pairs, got a Parameter"),
        ([net()], 0.5, r"a module or \(module, name\) pairs, got a Sequential"),
        (nn.Linear(3, 3, dtype=torch.complex64), 0.5, "weight must be a float64.*complex64"),
    ],
)
def test_wrong_types_are_refused(model: object, density: object, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        GlobalPruner(model, density)


@pytest.mark.parametrize("kwargs", [{"density": 0.3}, {"granularity": (2, 4)}], ids=str)
def test_weights_without_a_number_choose_nothing_and_lose_nothing(kwargs) -> None:
    model = net()
    pruner = GlobalPruner(model, **kwargs)
    with torch.no_grad():
        originals(model)[1][0, 0] = torch.nan
    before = [p.detach().clone() for p in model.parameters()]
    for method in (pruner.report, pruner.finalize):
        with pytest.raises(ValueError, match=r"NaN or infinite choose nothing: those of 2.weight"):
            method()
    for p, q in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(p.detach(), q, equal_nan=True)
    with torch.no_grad():
        originals(model)[1][0, 0] = 1.0
    pruner.finalize()
    assert count(model) == pruner.kept


@pytest.mark.filterwarnings("ignore:laprune")
@pytest.mark.parametrize(("density", "gamma"), [(0.0, 0.5), (1.0, 0.5), (0.3, 1.0)])
@pytest.mark.parametrize("granularity", ["weight", "channel"])
def test_learned_scores_always_have_a_gradient(
    granularity: str, density: float, gamma: float
) -> None:
    model = net()
    GlobalPruner(model, density, gamma=gamma, scores="learned", granularity=granularity)
    scores = [p for name, p in model.named_parameters() if name.endswith("scores")]
    with torch.no_grad():
        scores[0].view(-1)[0] = -torch.inf
    model(X).square().sum().backward()
    for p in scores:
        torch.testing.assert_close(p.grad, torch.zeros_like(p))


def test_a_parameter_is_pruned_once() -> None:
    model = net()
    GlobalPruner(model, 0.5)
    with pytest.raises(ValueError, match="must be a plain parameter"):
        GlobalPruner([(model[0], "weight")], 0.5)


def test_replaced_parameters_are_noticed() -> None:
    model = net()
    pruner = GlobalPruner(model, 0.5)
    site = model[0].parametrizations.weight
    site.original = nn.Parameter(2 * site.original.detach())
    with pytest.raises(RuntimeError, match="call refresh"):
        model(X)
    pruner.refresh()
    model(X)


def test_second_derivatives_are_refused():
    model = nn.Linear(4, 4)
    GlobalPruner(model, 0.5)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        torch.autograd.grad(model(torch.ones(1, 4)).sum(), model.parameters(), create_graph=True)


def test_all_and_nothing_are_masks_too() -> None:
    for density, whole in ((1.0, True), (0.0, False)):
        model = net()
        before = [m.weight.detach().clone() for m in (model[0], model[2])]
        GlobalPruner(model, density, gamma=0.5)
        model(X).sum().backward()
        for module, weight in zip((model[0], model[2]), before, strict=True):
            torch.testing.assert_close(module.weight, weight * whole)
            assert bool(module.parametrizations.weight.original.grad.any()) is whole


def test_layers_called_by_themselves_follow_mode_weights_and_gradients() -> None:
    model, twin = net(), net()
    for m in (model, twin):
        GlobalPruner(m, 0.3, gamma=0.7)
    with torch.no_grad():
        model[0](X)  # without a graph
        for m in (model, twin):
            m[0].parametrizations.weight.original.mul_(1.5)
    for training in (True, False, True):
        twin.train(training)(X)
        wanted = twin[0](X)
        torch.testing.assert_close(model.train(training)[0](X), wanted)
    found = []
    for m in (model, twin):
        m[0](X).square().sum().backward()
        found.append(m[0].parametrizations.weight.original.grad)
    torch.testing.assert_close(*found)


def test_fused_optimisers_are_seen() -> None:
    model = net()
    pruner = GlobalPruner(model, 0.3, gamma=0.9)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.1, fused=True)
    for _ in range(5):
        model(X).square().sum().backward()
        optimiser.step()
    model(X)
    mass = sum(p.sum().item() for p in pruner.masks().values())
    used = sum((m.weight / m.parametrizations.weight.original).sum() for m in (model[0], model[2]))
    assert mass == pytest.approx(pruner.kept)
    assert used.item() == pytest.approx(pruner.kept)
    optimiser.step()
    model.eval()(X)
    kept = sum(int((m.weight != 0).sum()) for m in (model[0], model[2]))
    assert kept == pruner.kept


def test_models_change_type_between_forwards() -> None:
    model = net()
    GlobalPruner(model, 0.3, gamma=0.7)
    model(X)
    half = model.float()(X.float())
    torch.testing.assert_close(half.double(), model.double()(X), rtol=1e-5, atol=1e-5)


def test_copies_outlive_the_original() -> None:
    model = net()
    pruner = GlobalPruner(model, 0.3, gamma=0.7)
    other = copy.deepcopy(model)
    wanted = other.eval()(X)
    pruner.finalize()
    torch.testing.assert_close(other(X), wanted)
    torch.testing.assert_close(model(X), wanted)
    assert type(model[0]) is nn.Linear


def test_a_change_between_forward_and_backward_is_refused() -> None:
    model = net()
    GlobalPruner(model, 0.3, gamma=0.7)
    loss = model(X).sum()
    with torch.no_grad():
        model[2].parametrizations.weight.original.add_(1.0)
    with pytest.raises(RuntimeError, match=r"between forward and backward|inplace operation"):
        loss.backward()


def test_two_pruners_of_one_module() -> None:
    model = net()
    first = GlobalPruner(model, 0.3)
    second = GlobalPruner(model, 0.5, include=["0.bias", "2.bias"])
    first.finalize()
    second.finalize()
    names = [name for name, _ in model.named_parameters()]
    assert sorted(names) == ["0.bias", "0.weight", "2.bias", "2.weight"]
    with pytest.raises(ValueError, match="twice"):
        GlobalPruner([(model[0], "weight")] * 2, 0.5)
