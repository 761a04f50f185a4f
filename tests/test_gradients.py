"""Derivatives against oracles of another kind: finite differences, and 60-digit arithmetic."""

from __future__ import annotations

from collections.abc import Callable

import mpmath as mp
import pytest
import torch
from conftest import normal, problem
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import laprune
from laprune import Status
from laprune.backends import reference, use
from laprune.studies.inputs import REGISTRY, draw

SCORES = normal(2, 5)
VALUES = normal(2, 5, seed=1)
BUDGETS = torch.tensor([2.0, 1.5], dtype=torch.float64)
GAMMAS = torch.tensor([0.8, 0.3], dtype=torch.float64)

# Raised inside torch, when it loads formulas of its own.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script")
FUNCTIONS: dict[str, tuple[Callable[..., object], tuple[Tensor, ...]]] = {
    "soft_topk": (laprune.soft_topk, (SCORES, BUDGETS, GAMMAS)),
    "lapsum_topk": (laprune.lapsum_topk, (SCORES, BUDGETS, GAMMAS)),
    "gated_topk": (laprune.gated_topk, (VALUES, BUDGETS, GAMMAS)),
    "gated_topk by scores": (
        lambda v, r, k, g: laprune.gated_topk(v, k, g, scores=r),
        (VALUES, SCORES, BUDGETS, GAMMAS),
    ),
    "solve": (lambda r, k, g: laprune.solve(r, k, g)[:3], (SCORES, BUDGETS, GAMMAS)),
    "barrier and temperature": (
        lambda r, k, g: laprune.solve(r, k, g)[1:3],
        (SCORES, BUDGETS, GAMMAS),
    ),
}
every_function = pytest.mark.parametrize(("f", "inputs"), FUNCTIONS.values(), ids=FUNCTIONS)


def leaves(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x.clone().requires_grad_() for x in inputs)


@every_function
def test_first_derivatives(f, inputs, backend: str) -> None:
    assert gradcheck(
        f,
        leaves(inputs),
        check_forward_ad=True,
        check_batched_grad=True,
        check_batched_forward_grad=True,
    )


@every_function
def test_second_derivatives(f, inputs, backend: str) -> None:
    assert gradgradcheck(f, leaves(inputs), check_fwd_over_rev=True, check_rev_over_rev=True)


def test_second_derivatives_with_numbers(backend: str) -> None:
    hessian = torch.autograd.functional.hessian
    f = lambda r: laprune.soft_topk(r, 1.5, 0.6)  # noqa: E731
    assert gradgradcheck(f, leaves((SCORES,)), check_fwd_over_rev=True)
    of_mask = hessian(lambda r: f(r).square().sum(), SCORES)
    of_solution = hessian(lambda r: laprune.solve(r, 1.5, 0.6).mask.square().sum(), SCORES)
    torch.testing.assert_close(of_mask, of_solution)


def test_derivatives_along_another_dimension_of_what_the_mask_leaves(backend: str) -> None:
    may = torch.tensor([[True], [False], [True], [True]])
    r = normal(4, 5, seed=2)

    def f(r: Tensor) -> Tensor:
        return laprune.soft_topk(r, 1.7, 0.6, dim=0, mask=may)

    assert gradcheck(f, leaves((r,)), check_forward_ad=True)
    assert (torch.autograd.grad(f(x := leaves((r,))[0]).square().sum(), x)[0][1] == 0).all()


@pytest.mark.parametrize("shape", [(6,), (2, 6), (2, 2, 6)], ids=str)
def test_derivatives_of_scores_of_any_shape(shape: tuple[int, ...], backend: str) -> None:
    r, v = normal(*shape, seed=3), normal(*shape, seed=4)

    def f(r: Tensor, v: Tensor) -> Tensor:
        return laprune.gated_topk(v, 2, 0.6, scores=r)

    assert gradcheck(f, leaves((r, v)), check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(f, leaves((r, v)))
    (x,) = leaves((r,))
    want = torch.autograd.grad(3 * laprune.soft_topk(x, 2, 0.6), x, v)[0]
    p = laprune.soft_topk(x, 2, 0.6)
    p.mul_(3)  # it is no view that autograd would guard
    with use(reference):
        got = torch.autograd.grad(p, x, v)[0]
    torch.testing.assert_close(got, want)


class Oracle:
    """The paper's two equations and their implicit derivatives, in 60 digits."""

    def __init__(self, r: list[float], k: float, gamma: float, b: float, t: float) -> None:
        self.r, self.k, self.gamma = [mp.mpf(x) for x in r], mp.mpf(k), mp.mpf(gamma)
        self.b, self.t = mp.mpf(b), mp.mpf(t)
        self.a = self.k / len(r)
        for _ in range(12):
            self._evaluate()
            excess = mp.matrix(
                [
                    mp.fsum(self.p) - self.k,
                    mp.fsum(p * p for p in self.p) - (self.a + (1 - self.a) * self.gamma) * self.k,
                ]
            )
            step = mp.lu_solve(self.jacobian, -excess)
            self.b, self.t = self.b + step[0], self.t + step[1]
        self._evaluate()

    def _evaluate(self) -> None:
        self.z = [(x - self.b) / self.t for x in self.r]
        self.q = [mp.exp(-abs(z)) / 2 for z in self.z]
        self.p = [1 - q if z > 0 else q for z, q in zip(self.z, self.q, strict=True)]
        dp_db = [-q / self.t for q in self.q]
        dp_dt = [-q * z / self.t for q, z in zip(self.q, self.z, strict=True)]
        self.slopes = dp_db, dp_dt
        self.jacobian = mp.matrix(
            [
                [mp.fsum(dp_db), mp.fsum(dp_dt)],
                [
                    2 * mp.fsum(p * d for p, d in zip(self.p, dp_db, strict=True)),
                    2 * mp.fsum(p * d for p, d in zip(self.p, dp_dt, strict=True)),
                ],
            ]
        )

    def vjp(self, g: list[float]) -> tuple[list[mp.mpf], mp.mpf, mp.mpf]:
        """Gradients of sum(g * p) in r, k and gamma."""
        pull = mp.matrix([mp.fsum(x * d for x, d in zip(g, s, strict=True)) for s in self.slopes])
        weights = mp.lu_solve(self.jacobian.T, pull)
        dr = [
            q / self.t * (x - weights[0] - 2 * weights[1] * p)
            for q, x, p in zip(self.q, g, self.p, strict=True)
        ]
        dk = weights[0] + weights[1] * (2 * self.a + (1 - 2 * self.a) * self.gamma)
        return dr, dk, weights[1] * self.k * (1 - self.a)

    def uncorrected(self, g: list[float]) -> float:
        return float(mp.norm([q * x / self.t for q, x in zip(self.q, g, strict=True)]))


@pytest.mark.parametrize("gamma", [0.01, 0.3, 0.9, 0.99, 1 - 1e-4, 1 - 1e-6])
@pytest.mark.parametrize("name", ["gaussian", "cauchy", "lognormal", "narrow", "offset", "tiny"])
def test_gradient_agrees_with_sixty_digits(name: str, gamma: float, backend: str) -> None:
    for n, k in ((2, 1.0), (3, 1.0), (5, 2.0), (8, 3.0), (8, 7.0)):
        r, budget, hardness = leaves(
            (draw(name, 1, n, seed=n)[0], *torch.tensor([k, gamma], dtype=torch.float64))
        )
        g = normal(n, seed=n)
        s = laprune.solve(r, budget, hardness)
        assert s.status == Status.CONVERGED
        found = torch.autograd.grad((s.mask * g).sum(), (r, budget, hardness))
        with mp.workdps(60):
            oracle = Oracle(r.tolist(), k, gamma, s.barrier.item(), s.temperature.item())
            dr, dk, dgamma = oracle.vjp([mp.mpf(x) for x in g.tolist()])
            error = mp.norm([x - y for x, y in zip(found[0].tolist(), dr, strict=True)])
            size = max(mp.norm(dr), mp.mpf("1e-6") * oracle.uncorrected(g.tolist()))
            assert error <= 1e-6 * size
            assert abs(found[1].item() - dk) <= 1e-6 * max(abs(dk), 1e-3)
            assert abs(found[2].item() - dgamma) <= 1e-6 * max(abs(dgamma), 1e-3)


# Where t is near the rounding of the scores, r + h is not what was asked for.
@pytest.mark.parametrize("name", [x for x in REGISTRY if x not in ("near_ties", "narrow")])
def test_gradient_agrees_with_finite_differences(name: str, backend: str) -> None:
    r, k = draw(name, 8, 40, seed=1), torch.full((8,), 9.0, dtype=torch.float64)
    gamma = torch.linspace(0.05, 0.9, 8, dtype=torch.float64)
    v, direction = normal(8, 40, seed=2), normal(8, 40, seed=3)
    s = laprune.solve(r, k, gamma)
    soft = s.status == Status.CONVERGED
    h = 1e-4 * s.temperature[:, None].detach()

    def loss(x: Tensor) -> Tensor:
        return (laprune.soft_topk(x, k, gamma) * v).sum(-1)

    ends = [loss(r + c * h * direction) for c in (-2.0, -1.0, 1.0, 2.0)]
    slope = (ends[0] - 8 * ends[1] + 8 * ends[2] - ends[3]) / 12
    (x,) = leaves((r,))
    grad = torch.autograd.grad(loss(x).sum(), x)[0] * h
    apart = ((grad * direction).sum(-1) - slope).abs()
    assert (apart <= 1e-4 * grad.norm(dim=-1))[soft].all()


@pytest.mark.parametrize("name", REGISTRY)
def test_gradient_is_orthogonal_to_shift_and_scale(
    name: str, dtype: torch.dtype, backend: str
) -> None:
    """The mask ignores shift and scale, so sum dr = sum dr z = 0, to the digits of q g / t."""
    r, k, gamma = problem(name, 24, 50, dtype)
    (x,) = leaves((r,))
    s = laprune.solve(x, k, gamma)
    g = normal(24, 50, seed=4, dtype=dtype)
    grad = torch.autograd.grad((s.mask * g).sum(), x)[0].double()
    soft = s.status == Status.CONVERGED
    t = s.temperature[:, None].detach()
    z = (r - s.barrier[:, None].detach()) / t
    raw = 0.5 * torch.exp(-z.abs()) * g.abs() / t
    digits = 1e-11 if dtype == torch.float64 else 2e-5
    for weight in (torch.ones_like(z), z):
        left = (grad * weight).sum(-1).abs()
        assert (left <= digits * (raw * weight.abs()).sum(-1))[soft].all()


@pytest.mark.parametrize("fixed", [False, True], ids=["gamma", "temperature"])
@pytest.mark.parametrize("name", ["gaussian", "relu", "integers", "cauchy"])
def test_jvp_is_the_transpose_of_vjp_whatever_the_status(
    name: str, fixed: bool, backend: str
) -> None:
    """Over converged, tied, constant, uniform and hard rows alike."""
    r, k, h = problem(name, 30, 12)
    h[:3], h[3:6], k[6:9] = 0.0, torch.inf if fixed else 1.0, 12.0
    r[9:12], v = 2.0, normal(30, 12, seed=1)
    primals, tangents = (v, r, k, h), (normal(30, 12), normal(30, 12), normal(30), normal(30))

    def f(v: Tensor, r: Tensor, k: Tensor, h: Tensor) -> Tensor:
        if fixed:
            return v * laprune.lapsum_topk(r, k, h)
        return laprune.gated_topk(v, k, h, scores=r) + laprune.soft_topk(r, k, h)

    g = normal(30, 12, seed=9)
    out, forward = torch.func.jvp(f, primals, tangents)
    _, pull = torch.func.vjp(f, *primals)
    reverse = [(d * dx).reshape(30, -1).sum(-1) for d, dx in zip(pull(g), tangents, strict=True)]
    assert out.isfinite().all()
    size = torch.stack([x.abs() for x in reverse]).sum(0) + 1
    assert (((forward * g).sum(-1) - sum(reverse)).abs() <= 1e-9 * size).all()


def test_gamma_of_the_mask_moves_with_gamma(backend: str) -> None:
    """d/dk sum p = 1, d/dgamma sum p = 0, and the second moment follows its definition."""
    r, (k, gamma) = normal(20), torch.tensor([4.0, 0.7], dtype=torch.float64)
    k, gamma = leaves((k, gamma))
    p = laprune.soft_topk(r, k, gamma)
    dk, dgamma = torch.autograd.grad(p.sum(), (k, gamma), retain_graph=True)
    assert dk.item() == pytest.approx(1)
    assert dgamma.item() == pytest.approx(0, abs=1e-12)
    dk, dgamma = torch.autograd.grad(p.square().sum(), (k, gamma))
    assert dk.item() == pytest.approx(2 * 0.2 + 0.6 * 0.7)
    assert dgamma.item() == pytest.approx(4 * 0.8)


def test_straight_through_has_the_soft_gradient(backend: str) -> None:
    grads = []
    for mode in ("soft", "ste"):
        r, k, gamma = leaves((SCORES, BUDGETS, GAMMAS))
        p = laprune.soft_topk(r, k, gamma, mode=mode)
        grads.append(torch.autograd.grad((p * VALUES).sum(), (r, k, gamma)))
    assert torch.equal(p, laprune.hard_topk(SCORES, BUDGETS))
    for soft, ste in zip(*grads, strict=True):
        assert torch.equal(soft, ste)


def test_straight_through_gate_uses_the_hard_mask(backend: str) -> None:
    v, r = leaves((VALUES, SCORES))
    h = laprune.gated_topk(v, BUDGETS, GAMMAS, scores=r, mode="ste")
    hard = laprune.hard_topk(SCORES, BUDGETS)
    assert torch.equal(h, VALUES * hard)
    dv, dr = torch.autograd.grad(h.sum(), (v, r))
    assert torch.equal(dv, hard)
    (x,) = leaves((SCORES,))
    soft = laprune.soft_topk(x, BUDGETS, GAMMAS)
    torch.testing.assert_close(dr, torch.autograd.grad((soft * VALUES).sum(), x)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_low_precision_gradients_follow_float64(dtype: torch.dtype, backend: str) -> None:
    r, g = normal(6, 64, dtype=torch.float32).to(dtype), normal(6, 64, seed=1)
    grads = []
    for scores in (r, r.double()):
        (x,) = leaves((scores,))
        p = laprune.soft_topk(x, 8, 0.8)
        assert p.dtype == scores.dtype
        grads.append(torch.autograd.grad(p, x, g.to(scores.dtype))[0].double())
    tolerance = max(4 * torch.finfo(dtype).eps, 1e-4)
    apart = (grads[0] - grads[1]).norm(dim=-1)
    assert (apart <= tolerance * grads[1].norm(dim=-1)).all()


def test_native_backward_serves_a_reference_forward() -> None:
    """A state means the same to every backend, also where its pivot is no float32."""
    (x,) = leaves((draw("offset", 8, 64, dtype=torch.float32),))
    g = normal(8, 64, dtype=torch.float32)
    with use(reference):
        p = laprune.soft_topk(x, 32, 0.2)
        want = torch.autograd.grad(p, x, g, retain_graph=True)[0]
    got = torch.autograd.grad(p, x, g)[0]
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-5 * want.abs().max().item())


@pytest.mark.parametrize("gamma", [0.9, 0.999])
def test_scores_masked_by_the_lowest_number_leave_the_others_their_gradients(
    gamma: float, backend: str
) -> None:
    """They are more temperatures away than float32 can say."""
    r, g = (normal(8, 300, seed=seed, dtype=torch.float32) for seed in (0, 1))
    r[:, ::2] = torch.finfo(torch.float32).min
    k = torch.linspace(3, 120, 8, dtype=torch.float64)

    def gradients(r: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        inputs = leaves((r, k, torch.full_like(k, gamma)))
        return torch.autograd.grad(laprune.soft_topk(*inputs), inputs, g)

    found = gradients(r, g)
    with use(reference):
        wanted = gradients(r.double(), g.double())
    assert (found[0][:, ::2] == 0).all()
    for x, y in zip(found, wanted, strict=True):
        assert (x - y).norm() <= 1e-3 * y.norm()


@pytest.mark.parametrize("t", [1.0, 1e3, 1e6])
def test_a_temperature_far_above_the_spread_has_its_gradient(t: float, backend: str) -> None:
    """The barrier lies many temperatures outside of all scores."""
    r, g = (normal(4, 200, seed=seed, dtype=torch.float32) for seed in (0, 1))

    def gradient(r: Tensor, g: Tensor) -> Tensor:
        heat = torch.full((4,), t, dtype=torch.float64, requires_grad=True)
        return torch.autograd.grad(laprune.lapsum_topk(r, 2, heat), heat, g)[0]

    with use(reference):
        wanted = gradient(r.double(), g.double())
    assert ((gradient(r, g) - wanted).abs() <= 1e-4 * wanted.abs() + 1e-30).all()
