"""The module, the schedules and the diagnostics."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
from conftest import normal, realised

import laprune
from laprune.losses import TopKCrossEntropy
from laprune.nn import SoftTopK
from laprune.sae import TopKActivation
from laprune.schedules import GammaScheduler, constant, cosine, linear

SCORES = normal(3, 8)


def test_module_is_soft_in_training_and_hard_in_evaluation(backend: str) -> None:
    layer = SoftTopK(3, gamma=0.6)
    assert torch.equal(layer(SCORES), laprune.soft_topk(SCORES, 3, 0.6))
    assert torch.equal(layer.eval()(SCORES), laprune.hard_topk(SCORES, 3))
    assert torch.equal(layer.train()(SCORES), laprune.soft_topk(SCORES, 3, 0.6))


def test_module_may_stay_soft_in_evaluation() -> None:
    layer = SoftTopK(3, gamma=0.6, hard_eval=False).eval()
    assert torch.equal(layer(SCORES), laprune.soft_topk(SCORES, 3, 0.6))


def test_module_passes_its_arguments_on() -> None:
    may = normal(3, 8, seed=1) > -1
    may[0] = True
    k = torch.linspace(0.3, 1.0, 8)
    layer = SoftTopK(k, gamma=0.6, dim=0, mode="ste")
    wanted = laprune.soft_topk(SCORES, k, 0.6, dim=0, mask=may, mode="ste")
    assert torch.equal(layer(SCORES, mask=may), wanted)
    wanted = laprune.hard_topk(SCORES, k, dim=0, mask=may)
    assert torch.equal(layer.eval()(SCORES, mask=may), wanted)


def test_gamma_is_saved_and_restored_with_the_model(tmp_path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), SoftTopK(2, gamma=0.3))
    torch.save(model.state_dict(), tmp_path / "model.pt")
    other = torch.nn.Sequential(torch.nn.Linear(8, 8), SoftTopK(2, gamma=0.9))
    other.load_state_dict(torch.load(tmp_path / "model.pt"))
    assert other[1].gamma.item() == 0.3
    x = normal(2, 8, dtype=torch.float32)
    assert torch.equal(model(x), other(x))


def test_gamma_is_a_buffer_and_no_parameter() -> None:
    layer = SoftTopK(2, gamma=0.25)
    assert list(layer.parameters()) == []
    assert list(layer.state_dict()) == ["gamma"]
    layer.set_gamma(1)
    assert layer.gamma.item() == 1
    for wrong in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match=r"gamma must lie in \[0, 1\]"):
            layer.set_gamma(wrong)
    with pytest.raises(ValueError, match=r"gamma must lie in \[0, 1\], got 2"):
        SoftTopK(2, gamma=2)


def test_module_says_what_it_is() -> None:
    assert repr(SoftTopK(2, gamma=0.5)) == "SoftTopK(k=2, gamma=0.5, dim=-1, mode='soft')"


@pytest.mark.parametrize("to", [torch.float32, torch.bfloat16])
def test_module_in_another_type_still_solves(to: torch.dtype) -> None:
    layer = SoftTopK(3, gamma=0.5).to(to)
    p = layer(SCORES.to(to))
    assert p.dtype == to
    assert ((p.double().sum(-1) - 3).abs() <= 8 * torch.finfo(to).eps).all()


def test_linear_is_the_schedule_of_the_paper() -> None:
    anneal = linear(0.0, 0.9, steps=150)
    assert anneal(0) == 0.0
    assert anneal(149) == pytest.approx(0.9, abs=1e-15)
    assert anneal(75) == pytest.approx(0.9 * 75 / 149)


@pytest.mark.parametrize("schedule", [linear, cosine])
def test_schedules_rise_from_start_to_end_and_stay(schedule) -> None:
    anneal = schedule(0.2, 0.8, steps=11)
    values = [anneal(i) for i in range(30)]
    assert values[0] == pytest.approx(0.2)
    assert values[5] == pytest.approx(0.5)
    assert values[10:] == pytest.approx([0.8] * 20)
    assert values[:11] == sorted(values[:11])
    assert schedule(0.2, 0.8, steps=1)(0) == pytest.approx(0.8)


def test_cosine_is_slow_at_both_ends() -> None:
    curve = cosine(0.0, 1.0, steps=101)
    assert curve(10) == pytest.approx(0.5 * (1 - math.cos(0.1 * math.pi)))
    assert curve(10) == pytest.approx(1 - curve(90))


def test_constant_is_constant() -> None:
    assert {constant(0.4)(i) for i in range(5)} == {0.4}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: linear(-0.1, 0.9, 5), r"start must lie in \[0, 1\], got -0.1"),
        (lambda: cosine(0.0, 1.5, 5), r"end must lie in \[0, 1\], got 1.5"),
        (lambda: linear(0.0, 0.9, 0), "steps must be at least 1, got 0"),
        (lambda: constant(2.0), r"\[0, 1\], got 2.0"),
        (lambda: GammaScheduler(torch.nn.Linear(2, 2), constant(0.5)), "Linear has no layer"),
    ],
)
def test_bad_schedules_are_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_scheduler_drives_every_layer() -> None:
    model = torch.nn.Sequential(SoftTopK(1), torch.nn.Sequential(SoftTopK(2)))
    scheduler = GammaScheduler(model, linear(0.0, 0.9, steps=4))
    seen = []
    for _ in range(6):
        assert model[0].gamma == model[1][0].gamma == scheduler.gamma
        seen.append(scheduler.gamma)
        scheduler.step()
    assert seen == pytest.approx([0.0, 0.3, 0.6, 0.9, 0.9, 0.9])


def test_scheduler_resumes_where_it_was() -> None:
    schedule = [0.1, 0.2, 0.4, 0.8].__getitem__
    first = GammaScheduler(SoftTopK(1), schedule)
    first.step()
    first.step()
    layer = SoftTopK(1)
    second = GammaScheduler(layer, schedule)
    second.load_state_dict(first.state_dict())
    assert layer.gamma.item() == 0.4
    second.step()
    assert layer.gamma.item() == 0.8
    assert second.state_dict() == {"last_step": 3}


def test_diagnostics_measure_what_was_asked_for(backend: str) -> None:
    k, gamma = torch.tensor([2.0, 3.0, 1.5]), torch.tensor([0.5, 0.9, 0.2])
    solution = laprune.solve(SCORES, k, gamma)
    for measured in (laprune.diagnostics(solution), laprune.diagnostics(solution.mask)):
        torch.testing.assert_close(measured.mass, k.double())
        torch.testing.assert_close(measured.gamma, gamma.double())
        torch.testing.assert_close(measured.gamma, realised(solution.mask)[0])


def test_diagnostics_count_by_hand() -> None:
    p = torch.tensor([[1.0, 0.9995, 0.9985, 0.0005, 0.0015, 0.4], [1.0, 1.0, 0.0, 0.0, 0.0, 1.0]])
    d = laprune.diagnostics(p, eps=1e-3)
    torch.testing.assert_close(d.near_binary, torch.tensor([3 / 6, 1.0]).double())
    torch.testing.assert_close(d.overlap, torch.tensor([2.998 / 3.4, 1.0]).double())
    assert d.gamma[1] == 1
    assert laprune.diagnostics(p, eps=1e-4).near_binary[0].item() == pytest.approx(1 / 6)
    turned = laprune.diagnostics(p.T, dim=0, eps=1e-3)
    for one, other in zip(d, turned, strict=True):
        torch.testing.assert_close(one, other)


def test_diagnostics_leave_out_what_was_excluded(backend: str) -> None:
    may = torch.arange(8) % 3 != 0
    p = laprune.soft_topk(SCORES, 2, 0.7, mask=may)
    inside = laprune.diagnostics(p[:, may])
    for one, other in zip(laprune.diagnostics(p, eligible=may), inside, strict=True):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(inside.gamma, torch.full((3,), 0.7, dtype=torch.float64))


def test_diagnostics_of_a_lost_row_are_lost_and_the_others_are_not(backend: str) -> None:
    r = normal(3, 20)
    r[1, 4] = math.nan
    d = laprune.diagnostics(laprune.soft_topk(r, 5, 0.7))
    for field in (d.mass, d.gamma, d.overlap):
        assert field.isnan().tolist() == [False, True, False]
    assert d.gamma[[0, 2]].tolist() == pytest.approx([0.7, 0.7])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_no_change_of_type_rounds_gamma(dtype: torch.dtype) -> None:
    for module in (SoftTopK(2, 0.9999), TopKActivation(2, 0.9999), TopKCrossEntropy(2, 0.9999)):
        assert module.to(dtype).gamma.item() == 0.9999
        assert module.gamma.dtype == torch.float64


def test_gamma_may_move_between_forward_and_backward() -> None:
    layer, scores = SoftTopK(2, 0.5), SCORES.clone().requires_grad_()
    p = layer(scores)
    layer.set_gamma(0.9)
    p[:, 0].sum().backward()
    expected = torch.autograd.grad(laprune.soft_topk(scores, 2, 0.5)[:, 0].sum(), scores)[0]
    torch.testing.assert_close(scores.grad, expected)


def test_scheduler_passes_over_losses_without_gamma() -> None:
    layer = SoftTopK(2)
    GammaScheduler(
        torch.nn.ModuleList([layer, TopKCrossEntropy(2, temperature=1.0)]), constant(0.3)
    )
    assert layer.gamma.item() == 0.3


def test_schedules_can_be_pickled() -> None:
    for schedule in (linear(0.0, 0.9, 5), cosine(0.1, 0.9, 5), constant(0.4)):
        again = pickle.loads(pickle.dumps(schedule))
        assert [again(i) for i in range(6)] == [schedule(i) for i in range(6)]


def test_module_on_no_device_shows_itself() -> None:
    assert "gamma=?" in repr(SoftTopK(2).to("meta"))


def test_module_refuses_a_negative_k() -> None:
    with pytest.raises(ValueError, match="k must not be negative"):
        SoftTopK(-1)


def test_diagnostics_broadcast_what_is_eligible() -> None:
    scores, may = normal(2, 5, 5), normal(5, 5, seed=1) > -0.5
    may[0] = True
    p = laprune.soft_topk(scores, 1.5, 0.8, dim=1, mask=may)
    found = laprune.diagnostics(p, dim=1, eligible=may)
    wanted = laprune.diagnostics(p, dim=1, eligible=may.expand(2, 5, 5).contiguous())
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y)


def test_diagnostics_of_a_row_of_nan_are_nan() -> None:
    assert all(x.isnan() for x in laprune.diagnostics(torch.full((4,), torch.nan)))
