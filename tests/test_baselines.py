"""Each baseline is held to what its record claims, and to an oracle of another kind."""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys

import numpy as np
import pytest
import torch
from scipy import optimize, special
from torch import Tensor

from laprune import baselines
from laprune.baselines import paper, sander, sorting
from laprune.baselines.lapsum import lapsum_sort
from laprune.baselines.paper import paper_solve, paper_topk
from laprune.baselines.sander import isotonic_dykstra, isotonic_pav, sander_dykstra, sander_pav
from laprune.baselines.smooth_loss import log_symmetric_polynomials
from laprune.baselines.sorting import bitonic_topk, diffsort_topk, neuralsort_topk, softsort_topk
from laprune.baselines.transport import sinkhorn_topk

pytestmark = pytest.mark.filterwarnings("ignore:JAXopt is no longer maintained:DeprecationWarning")

NAMES = baselines.names()
SCALE_FREE = [name for name in NAMES if baselines.get(name).scale_free]
NOT_SCALE_FREE = [name for name in NAMES if not baselines.get(name).scale_free and name != "paper"]
PROJECTIONS = ["sander_pav", "sander_dykstra", "budget_sparsemax", "box_section"]

# Mass error in float64 beyond rounding: the solver's own tolerance.
MASS_TOLERANCE = {"paper": 1e-4, "box_section": 2e-5}
# The gradient is not that of the mask (straight-through), or the mask is too coarse for finite
# differences (the tolerance of jaxopt).
INEXACT_GRADIENT = {"hard_ste", "box_section"}
SOFT_TO_HARD = {"paper": (0.1, 0.5, 0.95)}


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Small tensors on several threads mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def operator(name: str) -> baselines.Baseline:
    if not baselines.available(name):
        pytest.skip(f"{baselines.get(name).requires} is not installed")
    return baselines.get(name)


def softnesses(name: str) -> tuple[float, ...]:
    return SOFT_TO_HARD.get(name, (5.0, 0.5, 0.05))


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def hard_indicator(rows: Tensor, k: int) -> Tensor:
    return torch.zeros_like(rows).scatter(-1, rows.topk(k).indices, 1.0)


def test_every_record_is_complete_and_frozen() -> None:
    for name, record in baselines.REGISTRY.items():
        assert record.name == name
        assert record.source
        assert record.softness_name
        assert record.softness_meaning
        assert record.max_n > 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        baselines.get("lapsum").max_n = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        baselines.REGISTRY["mine"] = baselines.get("lapsum")  # type: ignore[index]


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(KeyError, match="lapsum"):
        baselines.get("softmax")


@pytest.mark.parametrize("name", [n for n in NAMES if baselines.get(n).requires])
def test_a_missing_package_is_named_only_when_called(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = baselines.get(name).requires
    assert package is not None
    monkeypatch.setitem(sys.modules, package, None)
    assert not baselines.available(name)
    extra = "jaxopt" if package == "jaxopt" else "baselines"
    with pytest.raises(ImportError, match=rf"{package}.*laprune\[{extra}\]"):
        baselines.get(name)(draw(4), 2)


@pytest.mark.parametrize("k", [1, 5, 7.25, 15])
@pytest.mark.parametrize("name", [n for n in NAMES if baselines.get(n).exact_mass])
def test_mass_is_exact_where_claimed(name: str, k: float) -> None:
    f = operator(name)
    for softness in softnesses(name):
        mass = f(draw(20, 16), k, softness).sum(-1)
        assert (mass - k).abs().max() <= MASS_TOLERANCE.get(name, 1e-11) * max(k, 1)


PIVOTED = ("lapsum", "sander_pav", "sander_dykstra", "budget_sparsemax", "box_section")


@pytest.mark.parametrize("name", PIVOTED)
def test_far_from_zero_scores_keep_their_digits(name: str) -> None:
    f, shift = operator(name), 1e6
    near = (draw(4, 16).float() + shift) - shift  # what float32 keeps of them there
    assert torch.equal((near + shift) - shift, near)
    far = f(near + shift, 5)
    assert (far - f(near, 5)).abs().max() <= 1e-6
    assert (far.double().sum(-1) - 5).abs().max() <= 1e-4


@pytest.mark.parametrize("name", PIVOTED)
def test_wide_gaps_are_hard_and_keep_the_mass(name: str) -> None:
    f, x = operator(name), draw(4, 16)
    hard = (x >= x.topk(5).values[:, -1:]).double()
    assert torch.allclose(f(x, 5, 1e-17), hard, atol=1e-5)
    outlier = x.clone()
    outlier[:, 3] = 1e16
    assert (f(outlier, 5).sum(-1) - 5).abs().max() <= 1e-4


def test_mass_is_not_exact_where_not_claimed() -> None:
    loose = [n for n in NAMES if not baselines.get(n).exact_mass]
    assert loose == ["dftopk"]
    assert (operator("dftopk")(draw(16), 3, 1.0).sum() - 3).abs() > 0.5


@pytest.mark.parametrize("k", [1, 5, 7.25, 12])
@pytest.mark.parametrize("name", [n for n in NAMES if baselines.get(n).in_unit_range])
def test_range_holds_where_claimed(name: str, k: float) -> None:
    f = operator(name)
    for softness in softnesses(name):
        mask = f(draw(20, 16), k, softness)
        assert mask.min() >= -1e-12
        assert mask.max() <= 1 + 1e-12


@pytest.mark.parametrize(
    ("name", "softness"), [("neuralsort", 0.3), ("softsort", 0.3), ("sinkhorn", 0.01)]
)
def test_range_fails_where_not_claimed(name: str, softness: float) -> None:
    assert not baselines.get(name).in_unit_range
    assert operator(name)(draw(3, 16), 12, softness).max() > 1.05


def test_the_witnesses_cover_every_operator_without_a_range() -> None:
    without = {n for n in NAMES if not baselines.get(n).in_unit_range}
    assert without == {"neuralsort", "softsort", "sinkhorn"}


@pytest.mark.parametrize("name", SCALE_FREE)
def test_scale_is_free_where_claimed(name: str) -> None:
    f, x = operator(name), draw(4, 16)
    for scale in (1e-6, 7.0, 1e6):
        assert torch.equal(f(x * scale, 5), f(x, 5))


@pytest.mark.parametrize("name", NOT_SCALE_FREE)
def test_scale_matters_where_not_claimed(name: str) -> None:
    f, x = operator(name), draw(4, 16)
    assert (f(7 * x, 5) - f(x, 5)).abs().max() > 1e-2


def test_paper_is_scale_free_until_its_clipping() -> None:
    x = draw(4, 16)
    assert (paper_topk(7 * x, 5, 0.5) - paper_topk(x, 5, 0.5)).abs().max() < 1e-5
    assert (paper_topk(1e-8 * x, 5, 0.5) - paper_topk(x, 5, 0.5)).abs().max() > 1e-2


@pytest.mark.parametrize("name", NAMES)
def test_endpoints_of_k(name: str) -> None:
    f = operator(name)
    for k, value in ((0, 0.0), (6, 1.0)):
        x = draw(2, 6).requires_grad_()
        mask = f(x, k)
        mask.sum().backward()
        assert torch.equal(mask, torch.full_like(x, value))
        assert x.grad is not None
        assert torch.equal(x.grad, torch.zeros_like(x))
    assert f(draw(1), 1).tolist() == [1.0]


@pytest.mark.parametrize("name", NAMES)
def test_nothing_passed_in_is_modified(name: str) -> None:
    f, x = operator(name), draw(3, 16)
    before = x.clone()
    leaf = x.requires_grad_()
    upstream = draw(3, 16, seed=1)
    kept = upstream.clone()
    f(leaf, 5).backward(upstream)
    assert torch.equal(leaf.detach(), before)
    assert torch.equal(upstream, kept)


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_independent_for_any_leading_shape(name: str) -> None:
    f = operator(name)
    x = draw(3, 1, 16).requires_grad_()
    upstream = draw(3, 1, 16, seed=1)
    mask = f(x, 5)
    mask.backward(upstream)
    assert mask.shape == x.shape
    assert x.grad is not None
    for i in range(3):
        row = x[i, 0].detach().clone().requires_grad_()
        alone = f(row, 5)
        alone.backward(upstream[i, 0])
        assert row.grad is not None
        torch.testing.assert_close(alone, mask[i, 0], rtol=0, atol=1e-10)
        torch.testing.assert_close(row.grad, x.grad[i, 0], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", NAMES)
def test_rows_need_not_be_contiguous(name: str) -> None:
    f, x = operator(name), draw(16, 3)
    torch.testing.assert_close(f(x.T, 5), f(x.T.contiguous(), 5), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_lower_precision_agrees_and_keeps_its_dtype(name: str) -> None:
    f, x = operator(name), draw(4, 16)
    for dtype in (torch.float32, torch.bfloat16):
        low = x.to(dtype)
        mask = f(low, 5)
        assert mask.dtype == dtype
        error = (mask.double() - f(low.double(), 5)).abs().max()
        assert error < (2e-5 if dtype == torch.float32 else 5e-3)


@pytest.mark.parametrize("name", [n for n in NAMES if n not in INEXACT_GRADIENT])
def test_gradient_is_that_of_the_mask(name: str) -> None:
    f = operator(name)
    for softness in softnesses(name)[:2]:
        for k in (4, 2.5):
            x = draw(2, 9, seed=3).requires_grad_()
            assert torch.autograd.gradcheck(
                lambda x, k=k, softness=softness: f(x, k, softness), (x,), atol=2e-5
            )


@pytest.mark.parametrize("name", [n for n in NAMES if n not in {"paper", "sinkhorn"}])
def test_a_wide_gap_gives_hard_top_k_and_not_zeros(name: str) -> None:
    f = operator(name)
    x = torch.tensor([[1e3, -2e3, 2e3, 0.0, -1e3]], dtype=torch.float64).requires_grad_()
    mask = f(x, 2, 1e-3)
    mask.sum().backward()
    torch.testing.assert_close(mask.detach(), hard_indicator(x.detach(), 2), rtol=0, atol=1e-5)
    assert x.grad is not None
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_bad_arguments_say_what_was_given(name: str) -> None:
    f = operator(name)
    with pytest.raises(ValueError, match="n = 4, got 5"):
        f(draw(4), 5)
    with pytest.raises(ValueError, match="got -1"):
        f(draw(4), -1)
    with pytest.raises(TypeError, match="int64"):
        f(torch.arange(4), 2)
    with pytest.raises(ValueError, match="non-empty"):
        f(torch.empty(3, 0), 0)
    if name != "hard_ste":
        with pytest.raises(ValueError, match="got -2"):
            f(draw(4), 2, -2.0)


def laplace_cdf(z: np.ndarray) -> np.ndarray:
    q = np.exp(-np.abs(z)) / 2
    return np.where(z > 0, 1 - q, q)


def lapsum_oracle(r: np.ndarray, k: float, t: float) -> np.ndarray:
    span = 60 * t + 1
    b = optimize.brentq(
        lambda b: laplace_cdf((r - b) / t).sum() - k, r.min() - span, r.max() + span, xtol=1e-14
    )
    return laplace_cdf((r - b) / t)


def laprune_oracle(r: np.ndarray, k: float, gamma: float) -> np.ndarray:
    a = k / r.size
    target = (a + (1 - a) * gamma) * k
    tau = optimize.brentq(
        lambda tau: np.square(lapsum_oracle(r, k, math.exp(tau))).sum() - target, -12, 8
    )
    return lapsum_oracle(r, k, math.exp(tau))


@pytest.mark.parametrize("gamma", [0.05, 0.5, 0.9])
@pytest.mark.parametrize("k", [2, 6.5])
def test_paper_agrees_with_nested_root_finding(k: float, gamma: float) -> None:
    x = draw(3, 12)
    mask = paper_topk(x, k, gamma)
    expected = np.stack([laprune_oracle(row, k, gamma) for row in x.numpy()])
    np.testing.assert_allclose(mask.numpy(), expected, atol=1e-5)


@pytest.mark.parametrize(("gamma", "share"), [(0.3, 0.0), (0.9, 0.27), (0.99, 0.97)])
def test_paper_needs_its_fallback_as_often_as_reported(gamma: float, share: float) -> None:
    x = draw(100, 100, dtype=torch.float32)
    solution = paper_solve(x, 5, gamma)
    assert abs(solution.fallback.double().mean() - share) <= 0.1
    assert (solution.iterations[solution.fallback] == 30).all()
    assert solution.budget_residual.max() < 1e-4
    assert solution.hardness_residual.max() < 1e-4
    torch.testing.assert_close(solution.mask, paper_topk(x, 5, gamma))


def test_paper_freezes_a_row_once_it_has_converged() -> None:
    solution = paper_solve(draw(20, 100), 5, 0.3)
    assert (solution.iterations >= 2).all()
    assert (solution.iterations <= 12).all()


def test_paper_without_fallback_leaves_the_missed_rows_missed() -> None:
    solution = paper_solve(draw(20, 100, dtype=torch.float32), 5, 0.99, fallback=False)
    residual = torch.maximum(solution.budget_residual, solution.hardness_residual)
    assert (residual[solution.fallback] > 5e-5).all()
    assert (residual[~solution.fallback] < 2e-4).all()


def test_paper_endpoints_of_gamma() -> None:
    x = draw(3, 8).requires_grad_()
    assert torch.equal(paper_topk(x, 2, 0.0), torch.full_like(x, 0.25))
    assert torch.equal(paper_topk(x, 2, 1.0), hard_indicator(x, 2))
    paper_topk(x, 2, 1.0).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.zeros_like(x))
    solution = paper_solve(x, 2, 1.0)
    assert solution.temperature.isnan().all()
    assert not solution.fallback.any()
    with pytest.raises(ValueError, match=r"gamma.*got 1\.5"):
        paper_topk(x, 2, 1.5)


def test_paper_newton_step_is_clipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paper, "NEWTON_STEPS", 1)
    x = draw(1, 32)
    far, cold = torch.full((1, 1), 30.0).double(), torch.full((1, 1), -2.0).double()
    b, tau, steps = paper.newton_solve(x, far, cold, 5, 0.6)
    assert steps.item() == 1
    assert abs(b - far).item() == pytest.approx(8 * x.std(unbiased=False).item() + 1)
    assert abs(tau - cold).item() == pytest.approx(1.5)
    hottest = paper.newton_solve(x, far, torch.full_like(far, 9.0), 5, 0.6)[1]
    coldest = paper.newton_solve(x, far, torch.full_like(far, -14.0), 5, 0.6)[1]
    assert hottest <= 8
    assert coldest >= -12


def test_paper_newton_loop_has_no_data_dependent_control_flow() -> None:
    x = draw(4, 32, dtype=torch.float32)
    start = paper.gaussian_start(x, 5, 0.5)
    compiled = torch.compile(paper.newton_solve, fullgraph=True, backend="eager")
    for ours, theirs in zip(
        compiled(x, *start, 5, 0.6), paper.newton_solve(x, *start, 5, 0.6), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("t", [0.01, 0.3, 1.0, 50.0])
@pytest.mark.parametrize("k", [0.25, 1, 6, 11.75])
def test_lapsum_agrees_with_bisection(k: float, t: float) -> None:
    x = draw(5, 12)
    expected = np.stack([lapsum_oracle(row, k, t) for row in x.numpy()])
    np.testing.assert_allclose(lapsum_sort(x, k, t).numpy(), expected, atol=1e-11)


def test_lapsum_shares_the_mass_among_ties() -> None:
    x = torch.tensor([1.0, 0.0, 0.0, 0.0, -1.0], dtype=torch.float64)
    expected = torch.tensor([1, 1 / 3, 1 / 3, 1 / 3, 0], dtype=torch.float64)
    torch.testing.assert_close(lapsum_sort(x, 2, 1e-4), expected)


@pytest.mark.parametrize("t", [1e-2, 1.0, 10.0])
def test_lapsum_keeps_its_mass_on_a_long_float32_row(t: float) -> None:
    gaussian = draw(100_000, dtype=torch.float32)
    cauchy = gaussian / draw(100_000, seed=1, dtype=torch.float32)
    for x in (gaussian, cauchy):
        mass = lapsum_sort(x, 6250, t).double().sum()
        assert abs(mass / 6250 - 1) < 2e-6


def test_lapsum_saves_nothing_but_scores_and_barrier() -> None:
    saved: list[Tensor] = []
    x = draw(3, 16).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        lapsum_sort(x, 5, 1.0)
    assert sorted(t.numel() for t in saved) == [3, 3, 48]  # the barrier in two parts


@pytest.mark.parametrize(("tau", "ratio", "atol"), [(0.05, 1.03, 0.08), (5.0, 38.75, 1.0)])
def test_dftopk_drifts_from_the_budget_as_reported(tau: float, ratio: float, atol: float) -> None:
    mass = operator("dftopk")(draw(10_000, dtype=torch.float32), 100, tau).sum() / 100
    assert abs(mass.item() - ratio) < atol


def test_dftopk_is_logistic_around_the_midpoint() -> None:
    x = draw(12)
    ordered = np.sort(x.numpy())[::-1]
    for k in (1, 5, 11):
        theta = (ordered[k - 1] + ordered[k]) / 2
        expected = special.expit((x.numpy() - theta) / 0.3)
        np.testing.assert_allclose(operator("dftopk")(x, k, 0.3).numpy(), expected)


def test_hard_top_k_breaks_ties_by_index_and_passes_gradients_through() -> None:
    x = torch.tensor([[0.0, 2.0, 2.0, 2.0], [1.0, 1.0, 1.0, 1.0]], requires_grad=True)
    mask = operator("hard_ste")(x, 2)
    assert mask.tolist() == [[0, 1, 1, 0], [1, 1, 0, 0]]
    upstream = draw(2, 4, dtype=torch.float32)
    mask.backward(upstream)
    assert x.grad is not None
    assert torch.equal(x.grad, upstream)


def neuralsort_matrix(r: np.ndarray, tau: float) -> np.ndarray:
    distance = np.abs(r[:, None] - r[None]).sum(1)
    rank = np.arange(1, r.size + 1)[:, None]
    return special.softmax(((r.size + 1 - 2 * rank) * r - distance) / tau, axis=1)


def softsort_matrix(r: np.ndarray, tau: float) -> np.ndarray:
    return special.softmax(-np.abs(np.sort(r)[::-1, None] - r) / tau, axis=1)


@pytest.mark.parametrize(
    ("function", "matrix"),
    [(neuralsort_topk, neuralsort_matrix), (softsort_topk, softsort_matrix)],
)
@pytest.mark.parametrize("chunk_entries", [1, 40, 1 << 22])
def test_summed_rows_agree_with_the_relaxed_permutation(
    function, matrix, chunk_entries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sorting, "CHUNK_ENTRIES", chunk_entries)
    x = draw(2, 9).requires_grad_()
    mask = function(x, 4.5, 0.7)
    for row, ours in zip(x.detach().numpy(), mask.detach().numpy(), strict=True):
        relaxed = matrix(row, 0.7)
        np.testing.assert_allclose(ours, relaxed[:4].sum(0) + relaxed[4] / 2, atol=1e-12)
    mask.square().sum().backward()
    assert x.grad is not None
    assert x.grad.abs().sum() > 0


@pytest.mark.parametrize("n", range(2, 13))
def test_bitonic_network_sorts_every_pattern_of_zeros_and_ones(n: int) -> None:
    patterns = torch.tensor(list(itertools.product([0.0, 1.0], repeat=n)), dtype=torch.float64)
    ones = patterns.sum(-1)
    for k in range(1, n):
        selected = (bitonic_topk(patterns, k, 1e-9) * patterns).sum(-1)
        torch.testing.assert_close(selected, ones.clamp_max(k), rtol=0, atol=1e-5)


@pytest.mark.parametrize("n", [2, 8, 16])
def test_bitonic_agrees_with_the_package_on_powers_of_two(n: int) -> None:
    operator("diffsort")
    x = draw(3, n)
    torch.testing.assert_close(bitonic_topk(x, 1.5, 0.3), diffsort_topk(x, 1.5, 0.3))


def logistic_oracle(r: np.ndarray, k: float, epsilon: float) -> np.ndarray:
    def excess(c: float) -> float:
        return special.expit((2 * r - c) / epsilon).sum() - k

    c = optimize.brentq(excess, 2 * r.min() - 50, 2 * r.max() + 50, xtol=1e-14)
    return special.expit((2 * r - c) / epsilon)


@pytest.mark.parametrize("k", [1, 5.5, 11])
def test_sinkhorn_converges_to_the_transport_plan(k: float) -> None:
    x = draw(4, 12)
    expected = np.stack([logistic_oracle(row, k, 0.5) for row in x.numpy()])
    np.testing.assert_allclose(sinkhorn_topk(x, k, 0.5).numpy(), expected, atol=1e-9)


def test_sinkhorn_agrees_with_scaling_the_kernel_matrix() -> None:
    x, k, epsilon, n = draw(10), 3, 0.5, 10
    kernel = torch.exp(-(x[:, None] - torch.tensor([0.0, 1.0])).square() / epsilon)
    masses = torch.tensor([(n - k) / n, k / n], dtype=torch.float64)
    v = torch.ones(2, dtype=torch.float64)
    for _ in range(2000):
        u = (1 / n) / (kernel @ v)
        v = masses / (u @ kernel)
    torch.testing.assert_close(sinkhorn_topk(x, k, epsilon), n * u * kernel[:, 1] * v[1])


@pytest.mark.parametrize("iterations", [1, 200])
def test_sinkhorn_gradient_keeps_the_mass_and_is_that_of_the_plan(iterations: int) -> None:
    k, epsilon = 3, 0.5
    x = draw(8).requires_grad_()

    def mask(x: Tensor) -> Tensor:
        return sinkhorn_topk(x, k, epsilon, iterations=iterations)

    jacobian = torch.autograd.functional.jacobian(mask, x)
    torch.testing.assert_close(jacobian.sum(0), torch.zeros(8, dtype=torch.float64))
    p = mask(x).detach()
    q = (p * (1 - p)).clamp(min=0)
    expected = (q.diag() - torch.outer(q, q) / q.sum()) * 2 / epsilon
    torch.testing.assert_close(jacobian, expected)


def test_sinkhorn_refuses_no_iterations() -> None:
    with pytest.raises(ValueError, match="iterations"):
        sinkhorn_topk(draw(4), 2, iterations=0)


def quadratic_program(r: np.ndarray, k: float, softness: float) -> np.ndarray:
    result = optimize.minimize(
        lambda p: softness / 2 * p @ p - r @ p,
        np.full(r.size, k / r.size),
        jac=lambda p: softness * p - r,
        bounds=[(0, 1)] * r.size,
        constraints={"type": "eq", "fun": lambda p: p.sum() - k},
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 500},
    )
    assert result.success
    return result.x


@pytest.mark.parametrize("softness", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("k", [1, 3.5, 6])
@pytest.mark.parametrize("name", PROJECTIONS)
def test_projections_solve_the_quadratic_program(name: str, k: float, softness: float) -> None:
    f, x = operator(name), draw(3, 8)
    expected = np.stack([quadratic_program(row, k, softness) for row in x.numpy()])
    np.testing.assert_allclose(f(x, k, softness).numpy(), expected, atol=2e-5)


@pytest.mark.parametrize("name", PROJECTIONS)
def test_projection_gradient_averages_over_the_fractional_block(name: str) -> None:
    f = operator(name)
    x = draw(12).requires_grad_()
    upstream = draw(12, seed=1)
    mask = f(x, 4, 1.0)
    mask.backward(upstream)
    active = (mask > 1e-9) & (mask < 1 - 1e-9)
    assert 2 <= active.sum() < 12
    expected = torch.where(active, upstream - upstream[active].mean(), 0.0)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, expected)


def test_isotonic_solvers_agree_with_scipy(monkeypatch: pytest.MonkeyPatch) -> None:
    y = draw(6, 20)
    expected = np.stack(
        [optimize.isotonic_regression(row, increasing=False).x for row in y.numpy()]
    )
    np.testing.assert_allclose(isotonic_pav(y)[0].numpy(), expected, atol=1e-12)
    np.testing.assert_allclose(isotonic_dykstra(y, 3000)[0].numpy(), expected, atol=1e-9)
    compiled = isotonic_pav(y)
    monkeypatch.setattr(sander, "_pav_kernel", lambda: sander._pool_adjacent_violators)
    for ours, theirs in zip(isotonic_pav(y), compiled, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("steps", [1, 5, 50])
def test_dykstra_keeps_mass_and_range_before_it_converges(steps: int) -> None:
    x = draw(10, 200)
    mask = sander_dykstra(x, 40.5, 3.0, steps=steps)
    torch.testing.assert_close(mask.sum(-1), torch.full((10,), 40.5, dtype=torch.float64))
    assert mask.min() >= 0
    assert mask.max() <= 1 + 1e-12
    assert (mask - sander_pav(x, 40.5, 3.0)).abs().max() > 1e-2


def test_sander_keeps_its_digits_far_from_zero() -> None:
    x = (256 * draw(50)).round() / 256
    near, far = sander_pav(x, 7, 4.0), sander_pav(x + 2.0**40, 7, 4.0)
    torch.testing.assert_close(far, near, rtol=0, atol=1e-12)


def smooth_loss_oracle(s: np.ndarray, label: int, k: int, tau: float, margin: float) -> float:
    subsets = list(itertools.combinations(range(s.size), k))
    mean = np.array([s[list(subset)].mean() for subset in subsets])
    has_label = np.array([label in subset for subset in subsets])
    everything = special.logsumexp((margin * ~has_label + mean) / tau)
    return tau * (everything - special.logsumexp(mean[has_label] / tau))


@pytest.mark.parametrize("tau", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("k", [1, 2, 5, 6])
def test_smooth_loss_agrees_with_enumeration(k: int, tau: float) -> None:
    scores, labels = draw(3, 7), torch.tensor([0, 3, 6])
    ours = baselines.smooth_topk_loss(scores, labels, k, tau, margin=0.7)
    expected = [
        smooth_loss_oracle(s, y, k, tau, 0.7)
        for s, y in zip(scores.numpy(), labels.tolist(), strict=True)
    ]
    np.testing.assert_allclose(ours.numpy(), expected, rtol=1e-9, atol=1e-12)


def test_smooth_loss_gradient_and_shapes() -> None:
    scores, labels = draw(2, 3, 9).requires_grad_(), torch.arange(6).reshape(2, 3)
    assert baselines.smooth_topk_loss(scores, labels, 5).shape == (2, 3)
    assert torch.autograd.gradcheck(
        lambda s: baselines.smooth_topk_loss(s, labels, 4, 0.5), (scores,)
    )


def test_smooth_loss_is_the_hard_hinge_when_cold() -> None:
    scores = torch.tensor([[300.0, 200.0, 100.0, 0.0]], requires_grad=True)
    loss = baselines.smooth_topk_loss(scores, torch.tensor([3]), 2, 1e-3)
    loss.sum().backward()
    # margin + (mean of the best two) - (mean of the best with the label)
    torch.testing.assert_close(loss.detach(), torch.tensor([101.0]))
    assert scores.grad is not None
    torch.testing.assert_close(scores.grad, torch.tensor([[0.0, 0.5, 0.0, -0.5]]))


def test_smooth_loss_vanishes_when_every_class_is_allowed() -> None:
    scores = draw(2, 5).requires_grad_()
    loss = baselines.smooth_topk_loss(scores, torch.tensor([0, 4]), 5)
    loss.sum().backward()
    assert torch.equal(loss, torch.zeros_like(loss))
    assert scores.grad is not None
    assert torch.equal(scores.grad, torch.zeros_like(scores))


def test_symmetric_polynomials_of_many_large_scores_stay_finite() -> None:
    x = 50 * draw(4, 1000, dtype=torch.float32)
    log_e = log_symmetric_polynomials(x, 20)
    reference = log_symmetric_polynomials(x.double(), 20)
    assert log_e.isfinite().all()
    torch.testing.assert_close(log_e.double(), reference, rtol=1e-5, atol=1e-3)


def test_smooth_loss_names_bad_arguments() -> None:
    scores, labels = draw(2, 5), torch.tensor([0, 1])
    with pytest.raises(ValueError, match="got 6"):
        baselines.smooth_topk_loss(scores, labels, 6)
    with pytest.raises(ValueError, match="tau"):
        baselines.smooth_topk_loss(scores, labels, 2, 0.0)
    with pytest.raises(ValueError, match="labels"):
        baselines.smooth_topk_loss(scores, labels[:1], 2)


def test_a_network_made_in_inference_trains_later() -> None:
    scores = torch.randn(13, requires_grad=True)
    sorting._bitonic_layers.cache_clear()
    with torch.inference_mode():
        bitonic_topk(scores.detach(), 3)
    bitonic_topk(scores, 3)[0].backward()
    assert scores.grad is not None


@pytest.mark.parametrize("name", ["paper", "lapsum"])
def test_second_derivatives_that_would_be_wrong_are_refused(name: str) -> None:
    scores = torch.randn(9, dtype=torch.float64, requires_grad=True)
    (d,) = torch.autograd.grad(
        baselines.get(name)(scores, 3).square().sum(), scores, create_graph=True
    )
    with pytest.raises(RuntimeError, match=r"not have been used|once_differentiable"):
        torch.autograd.grad(d.sum(), scores)


@pytest.mark.parametrize("name", ["neuralsort", "softsort"])
def test_no_rows_give_no_rows(name: str) -> None:
    assert baselines.get(name)(torch.empty(0, 5), 2).shape == (0, 5)
