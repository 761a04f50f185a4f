"""Accuracy over the registry of inputs, agreement of the backends, invariants of the mask."""

from __future__ import annotations

import pytest
import torch
from conftest import (
    HARDNESS_ERROR,
    MASS_ERROR,
    hardness_error,
    mass_error,
    normal,
    problem,
    realised,
    sharpest,
)
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

import laprune
from laprune import Status
from laprune.backends import cpu, reference, use
from laprune.backends._contract import OFFSET, PIVOT, TEMPERATURE
from laprune.studies.inputs import REGISTRY, budgets, draw, hardnesses

NAMES = list(REGISTRY)
SIZES = [2, 3, 8, 33, 100, 512, 5000]
LIMIT_ERROR = {torch.float64: 1e-9, torch.float32: 2e-6}


def rounding_floor(r: Tensor, k: Tensor, gamma: Tensor) -> Tensor | float:
    """The hardness error of the exact mask once its entries are rounded to the scores' type.

    A float32 near 1 cannot hold 1 - p to better than 6e-8, so no float32 mask can do better.
    """
    if r.dtype == torch.float64:
        return 0.0
    with use(reference):
        exact = laprune.soft_topk(r.double(), k, gamma)
    return hardness_error(exact.to(r.dtype), gamma)


def check_answer(r: Tensor, k: Tensor, gamma: Tensor) -> None:
    """Mass always; hardness where it is attainable; the sharpest mask where it is not."""
    s = laprune.solve(r, k, gamma)
    converged, tied = s.status == Status.CONVERGED, s.status == Status.TIED
    constant = s.status == Status.CONSTANT
    assert (converged | tied | constant).all()
    assert mass_error(s.mask, k).max() <= MASS_ERROR[r.dtype]
    excess = hardness_error(s.mask, gamma) - rounding_floor(r, k, gamma)
    assert (excess[converged] <= HARDNESS_ERROR[r.dtype]).all()

    limit = sharpest(r.double(), k)
    apart = (s.mask - limit).abs().amax(-1)
    assert (apart <= LIMIT_ERROR[r.dtype])[tied].all()
    assert torch.equal((r == r[:, :1]).all(-1), constant)
    assert ((s.mask - (k / r.shape[-1])[:, None])[constant].abs() <= 1e-7).all()
    most, least_soft = realised(limit)
    assert (most <= gamma)[tied].all()
    slack = 1 + HARDNESS_ERROR[r.dtype]
    assert (least_soft <= slack * (1 - gamma))[converged].all()


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_mass_and_hardness_hold_over_the_registry(
    name: str, n: int, dtype: torch.dtype, backend: str
) -> None:
    check_answer(*problem(name, min(48, 20_000 // n), n, dtype, seed=n))


@pytest.mark.parametrize("n", [20, 200])
@pytest.mark.parametrize("name", ["gaussian", "cauchy", "integers", "bimodal"])
def test_float32_masks_are_those_of_float64(name: str, n: int, backend: str) -> None:
    r, k, gamma = problem(name, 400, n, torch.float32, seed=3)
    with use(reference):
        exact = laprune.soft_topk(r.double(), k, gamma)
    assert (laprune.soft_topk(r, k, gamma) - exact).abs().max() <= 2e-6


@pytest.mark.parametrize("name", ["gaussian", "cauchy", "relu", "near_ties"])
def test_long_rows_started_from_a_sample(name: str, dtype: torch.dtype, backend: str) -> None:
    check_answer(*problem(name, 1, 100_000, dtype, seed=5))


@pytest.mark.parametrize("gamma", [0.1, 0.9])
def test_a_sample_leaves_a_long_row_few_passes(gamma: float, backend: str) -> None:
    n = 200_000
    assert laprune.solve(draw("gaussian", 1, n), n / 16, gamma).passes <= 6


@pytest.mark.parametrize(("name", "n"), [("outlier", 5), ("bimodal", 5), ("relu", 256)])
def test_float32_rows_whose_hardness_is_flat_are_those_of_float64(name: str, n: int) -> None:
    """Among some thousand rows there are a few whose gamma tells the temperature to 1 % at best."""
    if cpu.library() is None:
        pytest.skip("the native backend is not built")
    rows = 6700
    r, k, gamma = draw(name, rows, n, dtype=torch.float32), budgets(rows, n), hardnesses(rows, 0.9)
    apart = laprune.solve(r, k, gamma).mask - laprune.solve(r.double(), k, gamma).mask
    assert apart.abs().max() <= 2e-6


def test_sharp_rows_are_solved_on_the_scores_near_their_barrier(dtype: torch.dtype) -> None:
    """Read whole they take four passes and more; what is left out shows in no mask."""
    if cpu.library() is None:
        pytest.skip("the native backend is not built")
    n = 16_384
    r = draw("gaussian", 32, n, seed=3, dtype=dtype)
    k, gamma = (torch.full((32,), x, dtype=torch.float64) for x in (64, 0.9))
    args = (r, k, gamma, None, False, False)
    (fast, _, fast_info), (slow, _, info) = cpu.solve(*args), reference.solve(*args)
    assert (fast_info[:, 0] == Status.CONVERGED).all()
    assert 3 * fast_info[:, 1].sum() <= 2 * info[:, 1].sum()
    assert (fast - slow).abs().max() <= MASK_AGREEMENT[dtype]


@pytest.mark.slow
def test_ten_million_scores() -> None:
    n = 10_000_000
    r = torch.randn(n, generator=torch.Generator().manual_seed(0))
    k, gamma = torch.tensor(n / 16, dtype=torch.float64), torch.tensor(0.9, dtype=torch.float64)
    s = laprune.solve(r, k, gamma)
    assert s.status == Status.CONVERGED
    assert mass_error(s.mask, k) <= 1e-6
    assert hardness_error(s.mask, gamma) <= 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_many_rows_all_end_within_sixty_passes(name: str, dtype: torch.dtype) -> None:
    sizes = torch.randint(2, 513, (10,), generator=torch.Generator().manual_seed(7))
    for seed, n in enumerate(sizes.tolist()):
        r, k, gamma = problem(name, 200, n, dtype, seed)
        s = laprune.solve(r, k, gamma)
        honest = torch.isin(
            s.status, torch.tensor([Status.CONVERGED, Status.TIED, Status.CONSTANT])
        )
        assert honest.all()
        assert s.passes.max() <= 60


def test_a_row_on_which_newton_swings_ends_soon(backend: str) -> None:
    """Steps in log t that jump between the two sides of the answer have to bisect."""
    r = draw("bimodal", 500, 215, seed=43215)[166]
    assert laprune.solve(r, 214, 0.09248436571054021).passes <= 60


def test_reference_rounds_its_float64_mask() -> None:
    r, k, gamma = problem("gaussian", 50, 100, torch.float32)
    with use(reference):
        exact = laprune.soft_topk(r.double(), k, gamma)
        assert torch.equal(laprune.soft_topk(r, k, gamma), exact.float())


# The backends stop at different iterates: the masks differ by the solver's tolerance, which is on
# the mass of the row and so, near the hard end, all of it on the entries at the boundary.
MASK_AGREEMENT = {torch.float64: 1e-9, torch.float32: 5e-6}
# Relative to the norm of q g / t: what is left after centring may be a cancellation.
GRADIENT_AGREEMENT = {torch.float64: 1e-12, torch.float32: 1e-5}


@pytest.mark.parametrize("n", [2, 7, 33, 512, 2000])
@pytest.mark.parametrize("name", NAMES)
def test_native_agrees_with_reference(name: str, n: int, dtype: torch.dtype) -> None:
    rows = min(32, 10_000 // n)
    r, k, gamma = problem(name, rows, n, dtype, seed=n + 1)
    args = (r, k, gamma, None, False, False)
    fast, _, fast_info = cpu.solve(*args)
    slow, state, info = reference.solve(*args)
    assert torch.equal(fast_info[:, 0], info[:, 0])
    apart = (fast - slow).abs().amax(-1) / k.clamp(min=1)
    assert apart.max() <= MASK_AGREEMENT[dtype]

    g = normal(rows, n, seed=3, dtype=dtype)
    t = state[:, [TEMPERATURE]]
    z = (r - state[:, [PIVOT]] - state[:, [OFFSET]]) / t
    raw = (0.5 * torch.exp(-z.abs()) * g / t).norm(dim=-1)
    fast_grads = cpu.vjp(*args, state, info, g, None)
    slow_grads = reference.vjp(*args, state, info, g, None)
    tolerance = GRADIENT_AGREEMENT[dtype]
    smooth = info[:, 0] == Status.CONVERGED
    apart = (fast_grads[0] - slow_grads[0]).double().norm(dim=-1)
    assert (apart <= tolerance * raw)[smooth].all()
    assert torch.equal(fast_grads[0][~smooth], slow_grads[0][~smooth])
    for fast_grad, slow_grad in zip(fast_grads[2:], slow_grads[2:], strict=True):
        size = slow_grad.abs().clamp(min=1.0)
        assert ((fast_grad - slow_grad).abs() <= 50 * tolerance * size).all()


# Scores on a grid of 1/64, so that shifting by an integer and scaling by a power of two are exact.
# No -0.0, no scale: hypothesis finds ties and constant rows by itself.
SCORES = st.lists(st.integers(-512, 512), min_size=2, max_size=24).map(
    lambda xs: torch.tensor(xs, dtype=torch.float64) / 64
)
SHARE = st.floats(0.02, 0.98)
GAMMA = st.floats(1e-3, 0.9999)


def invariant(test):  # type: ignore[no-untyped-def]
    """A property of every mask, on both backends."""
    return settings(
        derandomize=True,
        database=None,
        deadline=None,
        max_examples=60,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )(given(r=SCORES, share=SHARE, gamma=GAMMA)(test))


def close(p: Tensor, q: Tensor) -> bool:
    """Equal up to the solver's tolerance."""
    return torch.allclose(p, q, rtol=0, atol=2e-8)


@invariant
def test_mask_has_the_mass_and_second_moment_asked_for(backend, r, share, gamma) -> None:
    n, k = len(r), share * len(r)
    s = laprune.solve(r, k, gamma)
    assert s.mask.min() >= 0
    assert s.mask.max() <= 1
    assert abs(s.mask.sum().item() / k - 1) <= 1e-12
    moment = (share + (1 - share) * gamma) * k
    assert s.mask.square().sum().item() <= moment + 1e-8 * n
    if s.status == Status.CONVERGED:
        assert s.mask.square().sum().item() == pytest.approx(moment, rel=1e-7)


@invariant
def test_mask_preserves_order_and_ties(backend, r, share, gamma) -> None:
    p = laprune.soft_topk(r, share * len(r), gamma)
    higher, equal = r[:, None] > r, r[:, None] == r
    apart = p[:, None] - p
    assert (apart[higher] >= 0).all()
    assert (apart[equal] == 0).all()


@invariant
def test_mask_follows_permutations(backend, r, share, gamma) -> None:
    order = torch.randperm(len(r), generator=torch.Generator().manual_seed(len(r)))
    p = laprune.soft_topk(r, share * len(r), gamma)
    assert close(laprune.soft_topk(r[order], share * len(r), gamma), p[order])


@invariant
def test_mask_ignores_shift_and_scale(backend, r, share, gamma) -> None:
    k = share * len(r)
    p = laprune.soft_topk(r, k, gamma)
    assert close(laprune.soft_topk(r + 1000, k, gamma), p)
    for scale in (2.0**-90, 4.0, 2.0**90):
        assert close(laprune.soft_topk(r * scale, k, gamma), p)


@invariant
def test_mask_of_the_negated_scores_is_the_complement(backend, r, share, gamma) -> None:
    n = len(r)
    p = laprune.soft_topk(r, share * n, gamma)
    assert close(laprune.soft_topk(-r, n - share * n, gamma), 1 - p)


@invariant
def test_hardness_is_monotone_in_gamma(backend, r, share, gamma) -> None:
    assume((r != r[0]).any())
    s = laprune.solve(r.expand(3, -1), share * len(r), gamma * torch.tensor([0.3, 0.9, 1.0]))
    assert (s.mask.square().sum(-1).diff() >= -1e-8).all()
    soft = s.status == Status.CONVERGED
    assert (s.temperature[soft].diff() < 0).all()


@invariant
def test_lapsum_at_the_solved_temperature_is_the_mask(backend, r, share, gamma) -> None:
    s = laprune.solve(r, share * len(r), gamma)
    assume(s.status == Status.CONVERGED)
    assert close(laprune.lapsum_topk(r, share * len(r), s.temperature), s.mask)


@pytest.mark.parametrize("name", NAMES)
def test_lapsum_has_the_mass_at_any_temperature(
    name: str, dtype: torch.dtype, backend: str
) -> None:
    r, k, _ = problem(name, 24, 60, dtype)
    width = r.double().std(-1)
    for heat in (1e-6, 1e-2, 1.0, 1e3):
        p = laprune.lapsum_topk(r, k, heat * width)
        assert mass_error(p, k).max() <= MASS_ERROR[dtype]


def test_gated_is_values_times_mask(dtype: torch.dtype, backend: str) -> None:
    r, k, gamma = problem("gaussian", 20, 40, dtype)
    v = normal(20, 40, seed=1, dtype=dtype)
    p = laprune.soft_topk(r, k, gamma)
    tolerance = {"rtol": 1e-5, "atol": 1e-30} if dtype == torch.float32 else {"rtol": 1e-12}
    torch.testing.assert_close(
        laprune.gated_topk(v, k, gamma, scores=r), v * p, **({"atol": 0.0} | tolerance)
    )
    torch.testing.assert_close(
        laprune.gated_topk(r, k, gamma), r * p, **({"atol": 0.0} | tolerance)
    )


def test_solution_describes_the_mask(backend: str) -> None:
    r, k, gamma = problem("gaussian", 40, 30)
    s = laprune.solve(r, k, gamma)
    soft = s.status == Status.CONVERGED
    z = ((r - s.barrier[:, None]) / s.temperature[:, None])[soft]
    p = torch.where(z > 0, 1 - 0.5 * torch.exp(-z.abs()), 0.5 * torch.exp(-z.abs()))
    torch.testing.assert_close(p, s.mask[soft], rtol=1e-9, atol=1e-12)


@pytest.mark.skipif(cpu.library() is None, reason="the native backend is not built")
@pytest.mark.parametrize("n", [3, 2**19 + 5, 3 * 2**19])  # no large page fits, or one, or two
def test_large_pages_change_nothing(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    r = draw("gaussian", 1, n, dtype=torch.float32).requires_grad_()
    found = []
    for fresh in (1 << 60, 0):
        monkeypatch.setattr(cpu, "FRESH", fresh)
        p = laprune.soft_topk(r, 2, 0.8)
        found.append((p.detach(), *torch.autograd.grad(p[..., 0].sum(), r)))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
