"""The top-k cross-entropy: what it is worth, its gradient, its limits and its errors."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from conftest import normal
from torch import Tensor
from torch.autograd import gradcheck

import laprune
from laprune import baselines
from laprune.losses import TopKCrossEntropy, topk_cross_entropy
from laprune.schedules import GammaScheduler, linear

K = 3
TARGET = torch.tensor([0, 4, 8, 11])
HARDNESS: dict[str, dict[str, float]] = {
    "gamma": {"gamma": 0.7},
    "temperature": {"temperature": 0.3},
    "raised": {"gamma": 0.9, "min_temperature": 0.4},
    "not raised": {"gamma": 0.5, "min_temperature": 1e-3},
}
hardness = pytest.mark.parametrize("how", HARDNESS.values(), ids=HARDNESS)


@pytest.fixture
def scores() -> Tensor:
    return normal(4, 12)


def entries(mask: Tensor) -> Tensor:
    return mask.gather(-1, TARGET[:, None])[:, 0]


@pytest.mark.usefixtures("backend")
@hardness
@pytest.mark.parametrize("floor", [None, 0.0, 1e-7])
def test_gradient(scores: Tensor, how: dict[str, float], floor: float | None) -> None:
    scores.requires_grad_()
    gradcheck(lambda r: topk_cross_entropy(r, TARGET, K, floor=floor, **how), scores)


def test_gradient_of_gamma_and_temperature(scores: Tensor) -> None:
    half = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    gradcheck(lambda g: topk_cross_entropy(scores, TARGET, K, g), half)
    gradcheck(lambda t: topk_cross_entropy(scores, TARGET, K, temperature=t), half)


@pytest.mark.usefixtures("backend")
def test_is_minus_the_logarithm_of_the_mask(scores: Tensor) -> None:
    found = topk_cross_entropy(scores, TARGET, K, 0.7, reduction="none")
    wanted = -entries(laprune.soft_topk(scores, K, 0.7)).log()
    torch.testing.assert_close(found, wanted)
    found = topk_cross_entropy(scores, TARGET, K, temperature=0.3, reduction="none")
    torch.testing.assert_close(found, -entries(laprune.lapsum_topk(scores, K, 0.3)).log())


def test_the_mask_and_the_logarithm_agree(scores: Tensor) -> None:
    for how in HARDNESS.values():
        exact = topk_cross_entropy(scores, TARGET, K, **how)
        torch.testing.assert_close(topk_cross_entropy(scores, TARGET, K, floor=0.0, **how), exact)


def test_floor_is_the_published_formula(scores: Tensor) -> None:
    p = entries(laprune.soft_topk(scores, K, 0.7))
    wanted = -torch.log(p * (1 - 2e-2) + 1e-2).mean()
    torch.testing.assert_close(topk_cross_entropy(scores, TARGET, K, 0.7, floor=1e-2), wanted)


@pytest.mark.usefixtures("backend")
def test_a_lost_class_keeps_its_gradient_in_log_space_alone() -> None:
    """p_y underflows in float32: the logarithm is exact, a floor mutes it, none at all is NaN."""
    row = torch.cat([torch.tensor([-50.0]), normal(60, dtype=torch.float32)]).requires_grad_()
    y = torch.tensor(0)
    assert laprune.soft_topk(row, 5, 0.95)[0] == 0

    def loss_and_gradient(floor: float | None) -> tuple[float, Tensor]:
        loss = topk_cross_entropy(row, y, 5, 0.95, floor=floor)
        return loss.item(), torch.autograd.grad(loss, row)[0]

    loss, gradient = loss_and_gradient(None)
    s = laprune.solve(row.detach().double(), 5, 0.95)
    assert loss == pytest.approx((s.barrier.item() + 50) / s.temperature.item() + math.log(2))
    assert loss > 100
    assert gradient.isfinite().all()
    # Dominated by the direct way: one over t.
    assert gradient[0].item() == pytest.approx(-1 / s.temperature.item(), rel=0.01)
    muted, gradient = loss_and_gradient(1e-7)
    assert muted == pytest.approx(-math.log(1e-7))
    assert gradient.abs().max() < 1e-12
    lost, gradient = loss_and_gradient(0.0)
    assert lost == math.inf
    assert gradient.isnan().any()


def test_scale_changes_nothing(scores: Tensor) -> None:
    one, many = (topk_cross_entropy(s * scores - 4, TARGET, K, 0.8) for s in (1.0, 1e3))
    torch.testing.assert_close(one, many)


def test_min_temperature_is_the_higher_of_two(scores: Tensor) -> None:
    t = laprune.solve(scores, K, 0.8).temperature
    least = t.median().item()
    assert (t < least).any()
    assert (t > least).any()
    found = topk_cross_entropy(scores, TARGET, K, 0.8, min_temperature=least, reduction="none")
    by_gamma = topk_cross_entropy(scores, TARGET, K, 0.8, reduction="none")
    fixed = topk_cross_entropy(scores, TARGET, K, temperature=least, reduction="none")
    torch.testing.assert_close(found, torch.where(t > least, by_gamma, fixed))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("floor", [None, 0.0])
def test_a_detached_temperature_is_a_given_one(scores: Tensor, floor: float | None) -> None:
    scores.requires_grad_()
    t = laprune.solve(scores.detach(), K, 0.8).temperature
    wanted = topk_cross_entropy(scores, TARGET, K, temperature=t, floor=floor)
    found = topk_cross_entropy(scores, TARGET, K, 0.8, detach_temperature=True, floor=floor)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(found, topk_cross_entropy(scores, TARGET, K, 0.8, floor=floor))
    gradients = [torch.autograd.grad(x, scores)[0] for x in (found, wanted)]
    torch.testing.assert_close(*gradients)


def test_a_detached_temperature_bounds_the_gradient() -> None:
    """Through the temperature a nearly hard row may pull a thousand times harder."""
    rows, y = normal(200, 20).requires_grad_(), torch.arange(200) % 20
    gamma = 0.99
    t = laprune.solve(rows.detach(), 5, gamma).temperature

    def pull(detached: bool) -> Tensor:
        loss = topk_cross_entropy(rows, y, 5, gamma, detach_temperature=detached, reduction="sum")
        return torch.autograd.grad(loss, rows)[0].abs().sum(-1) * t

    assert pull(True).max() <= 2 + 1e-9
    assert pull(False).max() > 1000


@pytest.mark.usefixtures("backend")
def test_limits_are_finite_and_have_no_gradient() -> None:
    rows = torch.tensor([[3.0, 2.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0], [2.0, 1.0, 1.0, 1.0]])
    rows.requires_grad_()
    y = torch.tensor([3, 0, 1])
    tiny = torch.finfo(torch.float32).tiny
    for gamma, wanted in (
        (0.0, [math.log(2)] * 3),
        (1.0, [-math.log(tiny), 0.0, 0.0]),
    ):
        loss = topk_cross_entropy(rows, y, 2, gamma, reduction="none")
        torch.testing.assert_close(loss, torch.tensor(wanted))
        assert torch.autograd.grad(loss.sum(), rows)[0].abs().max() == 0
    # Constant, and tied: three equal scores share one unit of mass.
    loss = topk_cross_entropy(rows[1:], y[1:], 2, 0.9, reduction="none")
    torch.testing.assert_close(loss, torch.tensor([math.log(2), math.log(3)]))
    assert torch.autograd.grad(loss.sum(), rows)[0].abs().max() == 0


def test_a_nan_row_stays_alone(scores: Tensor) -> None:
    scores[1, 2] = math.nan
    for how in HARDNESS.values():
        loss = topk_cross_entropy(scores, TARGET, K, reduction="none", **how)
        assert loss.isnan().tolist() == [False, True, False, False]


@pytest.mark.parametrize(
    "name", ["lapsum", "neuralsort", "softsort", "sinkhorn", "bitonic", "dftopk"]
)
def test_any_operator(scores: Tensor, name: str) -> None:
    operator = functools.partial(baselines.get(name), softness=0.5)
    scores.requires_grad_()
    loss = topk_cross_entropy(scores, TARGET, K, operator=operator, reduction="none")
    torch.testing.assert_close(loss, -entries(operator(scores, K)).log())
    (gradient,) = torch.autograd.grad(loss.sum(), scores)
    # The true class is pushed up, and the loss falls that way.
    assert (entries(gradient) < 0).all()
    lower = topk_cross_entropy(scores - 1e-3 * gradient, TARGET, K, operator=operator)
    assert lower < loss.mean()


def test_an_operator_that_underflows_is_finite() -> None:
    row = torch.tensor([[0.0, 1000.0, 1001.0]], requires_grad=True)
    operator = functools.partial(baselines.get("lapsum"), softness=1.0)
    loss = topk_cross_entropy(row, torch.tensor([0]), 1, operator=operator)
    loss.backward()
    assert loss.item() == pytest.approx(-math.log(torch.finfo(torch.float32).tiny))
    assert row.grad is not None
    assert row.grad.isfinite().all()


def test_reductions_and_shapes() -> None:
    scores, y = normal(2, 3, 8), torch.tensor([[0, 1, 2], [7, 6, 5]])
    each = topk_cross_entropy(scores, y, 2, 0.6, reduction="none")
    assert each.shape == (2, 3)
    torch.testing.assert_close(topk_cross_entropy(scores, y, 2, 0.6), each.mean())
    torch.testing.assert_close(topk_cross_entropy(scores, y, 2, 0.6, reduction="sum"), each.sum())
    one = topk_cross_entropy(scores[0, 0], y[0, 0], 2, 0.6)
    torch.testing.assert_close(one, each[0, 0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_scores_give_a_float32_loss(dtype: torch.dtype) -> None:
    scores = normal(4, 12).to(dtype).requires_grad_()
    loss = topk_cross_entropy(scores, TARGET, K, 0.6)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, topk_cross_entropy(scores.float(), TARGET, K, 0.6))
    loss.backward()
    assert scores.grad is not None
    assert scores.grad.dtype == dtype


def test_module_follows_a_schedule(scores: Tensor) -> None:
    loss = TopKCrossEntropy(K, gamma=0.1)
    scheduler = GammaScheduler(loss, linear(0.1, 0.8, steps=3))
    for gamma in (0.1, 0.45, 0.8):
        torch.testing.assert_close(
            loss(scores, TARGET), topk_cross_entropy(scores, TARGET, K, gamma)
        )
        scheduler.step()
    assert "gamma" in loss.state_dict()
    assert repr(loss) == "TopKCrossEntropy(k=3, gamma=0.8)"
    fixed = TopKCrossEntropy(K, temperature=0.3)
    torch.testing.assert_close(
        fixed(scores, TARGET), topk_cross_entropy(scores, TARGET, K, temperature=0.3)
    )
    with pytest.raises(ValueError, match="made without a gamma"):
        fixed.set_gamma(0.5)
    with pytest.raises(ValueError, match=r"gamma must lie in \[0, 1\], got 2"):
        loss.set_gamma(2.0)


def test_compiles_without_breaks(scores: Tensor) -> None:
    loss = TopKCrossEntropy(K, gamma=0.7)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(scores, TARGET), loss(scores, TARGET))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gamma": None}, "give one of gamma, temperature and operator, got none"),
        ({"temperature": 1.0}, "give one of .*, got gamma, temperature"),
        ({"gamma": 1.5}, r"gamma must lie in \[0, 1\], got 1.5"),
        ({"k": 13}, r"k must lie in \[0, 12\], got 13"),
        ({"min_temperature": -1.0}, "min_temperature must be finite and at least 0, got -1"),
        ({"gamma": None, "temperature": 1.0, "min_temperature": 1.0}, "needs a gamma"),
        (
            {"gamma": None, "temperature": 1.0, "detach_temperature": True},
            "detach_temperature needs a gamma",
        ),
        ({"floor": 0.5}, r"floor must lie in \[0, 0.5\), got 0.5"),
        ({"reduction": "max"}, "reduction must be 'none', 'mean' or 'sum', got 'max'"),
        ({"target": TARGET[:2]}, r"target must have the shape of scores \(4, 12\) without"),
    ],
)
def test_errors(scores: Tensor, change: dict[str, object], message: str) -> None:
    arguments = {"target": TARGET, "k": K, "gamma": 0.5} | change
    with pytest.raises(ValueError, match=message):
        topk_cross_entropy(scores, **arguments)


def test_wrong_types(scores: Tensor) -> None:
    with pytest.raises(TypeError, match=r"int64 tensor of class indices, got torch\.float32"):
        topk_cross_entropy(scores, TARGET.float(), K, 0.5)
    with pytest.raises(TypeError, match=r"scores must be .* got torch\.int64"):
        topk_cross_entropy(scores.long(), TARGET, K, 0.5)
    with pytest.raises(RuntimeError, match="out of bounds"):
        topk_cross_entropy(scores, TARGET + 10, K, 0.5)
