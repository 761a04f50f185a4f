"""Endpoints, ties, excluded and broken entries, shapes and types, refused arguments."""

from __future__ import annotations

import contextlib
import math
import warnings
from fractions import Fraction

import numpy as np
import pytest
import torch
from conftest import normal
from torch import Tensor

import laprune
from laprune import Status
from laprune.backends import cpu, pick, reference, use

INF, NAN = math.inf, math.nan
HALF_TYPES = [torch.float16, torch.bfloat16]


def row(*scores: float, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(scores, dtype=dtype)


def gradients(r: Tensor, k: float | Tensor, gamma: float, **kwargs: object) -> list[Tensor]:
    """Of a loss that tells entries apart, in scores, k and gamma."""
    r = r.clone().requires_grad_()
    k, gamma = (torch.as_tensor(x, dtype=torch.float64).requires_grad_() for x in (k, gamma))
    p = laprune.soft_topk(r, k, gamma, **kwargs)
    weights = torch.arange(1.0, r.shape[-1] + 1, dtype=r.dtype)
    return list(torch.autograd.grad((p * weights).sum(), (r, k, gamma)))


@pytest.mark.parametrize("gamma", [0.0, 0.5, 0.99, 1.0])
def test_minus_inf_is_never_selected(gamma: float, dtype: torch.dtype, backend: str) -> None:
    r = row(-INF, 3, 1, -INF, 2, 0, dtype=dtype)
    p = laprune.soft_topk(r, 2, gamma)
    rest = r > -INF
    assert (p[~rest] == 0).all()
    torch.testing.assert_close(p[rest], laprune.soft_topk(r[rest], 2, gamma))
    dr = gradients(r, 2, gamma)[0]
    assert (dr[~rest] == 0).all()
    assert dr.isfinite().all()


@pytest.mark.parametrize("gamma", [0.0, 0.5, 0.99, 1.0])
def test_mask_excludes_like_minus_inf(gamma: float, backend: str) -> None:
    r, may = normal(4, 9), normal(4, 9, seed=1) > -0.5
    p = laprune.soft_topk(r, 2, gamma, mask=may)
    assert torch.equal(p, laprune.soft_topk(r.masked_fill(~may, -INF), 2, gamma))
    assert (gradients(r, 2, gamma, mask=may)[0][~may] == 0).all()
    assert torch.equal(p, laprune.soft_topk(r.masked_fill(~may, NAN), 2, gamma, mask=may))


def test_excluded_values_are_gated_to_zero_whatever_they_are(backend: str) -> None:
    may = torch.tensor([True, True, False, True])
    for mode in ("soft", "ste"):
        v = row(1, 2, NAN, -INF).requires_grad_()
        h = laprune.gated_topk(v, 1, 0.5, mask=may, mode=mode)
        assert (h[2:] == 0).all()
        assert h.isfinite().all()
        grad = torch.autograd.grad(h.sum(), v)[0]
        assert grad.isfinite().all()
        assert (grad[2:] == 0).all()


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0])
def test_a_broken_row_is_nan_and_alone(
    bad: float, gamma: float, dtype: torch.dtype, backend: str
) -> None:
    r = normal(3, 6, dtype=dtype)
    r[1, 2] = bad
    s = laprune.solve(r, 2, gamma)
    assert s.status[1] == Status.NONFINITE
    assert s.mask[1].isnan().all()
    dr = gradients(r, 2, gamma)[0]
    assert dr[1].isnan().all()
    for i in (0, 2):
        torch.testing.assert_close(s.mask[i], laprune.soft_topk(r[i], 2, gamma))
        torch.testing.assert_close(dr[i], gradients(r[i], 2, gamma)[0])


def test_a_broken_entry_is_seen_in_a_long_row(dtype: torch.dtype, backend: str) -> None:
    r = normal(100_001, dtype=dtype)
    r[77_777] = NAN
    assert laprune.solve(r, 5, 0.5).status == Status.NONFINITE


@pytest.mark.parametrize("value", [0.0, -3.5, 1e30])
def test_a_constant_row_is_uniform(value: float, dtype: torch.dtype, backend: str) -> None:
    r = torch.full((5,), value, dtype=dtype)
    s = laprune.solve(r, 2, 0.7)
    assert s.status == Status.CONSTANT
    assert torch.equal(s.mask, torch.full_like(r, 0.4))
    dr, dk, dgamma = gradients(r, 2, 0.7)
    assert (dr == 0).all()
    assert dk.item() == pytest.approx(3)
    assert dgamma == 0


def test_tied_scores_share_what_is_left(dtype: torch.dtype, backend: str) -> None:
    r = row(1, 2, 2, 3, 2, 0, dtype=dtype)
    s = laprune.solve(r, 2, 0.9)
    assert s.status == Status.TIED
    third = 1 / 3
    wanted = row(0, third, third, 1, third, 0, dtype=dtype)
    torch.testing.assert_close(s.mask, wanted, rtol=0, atol=1e-6)
    dr, dk, dgamma = gradients(r, 2, 0.9)
    assert (dr == 0).all()
    assert dk.item() == pytest.approx((2 + 3 + 5) / 3)
    assert dgamma == 0


def test_a_fractional_budget_allows_only_so_much_hardness(backend: str) -> None:
    s = laprune.solve(row(3, 1, 2, 0), 1.5, 0.99)
    assert s.status == Status.TIED
    torch.testing.assert_close(s.mask, row(1, 0, 0.5, 0), rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("scores", "k", "wanted"),
    [
        ((2, 2, 2, 2), 2, (1, 1, 0, 0)),
        ((1, 2, 2, 2), 2, (0, 1, 1, 0)),
        ((1, 3, 2, 2), 2, (0, 1, 1, 0)),
        ((0.0, -0.0, 0.0, -1), 2, (1, 1, 0, 0)),
        ((0.0, -0.0, -1, -1), 2, (1, 1, 0, 0)),
        ((-0.0, 0.0, 1, -1), 2, (1, 0, 1, 0)),
        ((2, 2, 2, 2), 2.5, (1, 1, 0.5, 0)),
        ((-INF, 2, -INF, 2), 1, (0, 1, 0, 0)),
    ],
)
def test_hard_ties_go_to_the_lowest_index(
    scores: tuple[float, ...], k: float, wanted: tuple[float, ...], dtype, backend: str
) -> None:
    r = row(*scores, dtype=dtype)
    for p in (
        laprune.hard_topk(r, k),
        laprune.soft_topk(r, k, 1.0),
        laprune.lapsum_topk(r, k, 0.0),
        laprune.soft_topk(r, k, 0.3, mode="ste"),
    ):
        assert torch.equal(p, row(*wanted, dtype=dtype))
    assert laprune.solve(r, k, 1.0).status == Status.HARD


@pytest.mark.parametrize("n", [1, 5, 100, 4097])
def test_hard_topk_is_torch_topk(n: int, dtype: torch.dtype, backend: str) -> None:
    r = normal(3, n, dtype=dtype)
    for k in {1, n // 2, n}:
        wanted = torch.zeros_like(r).scatter(-1, r.topk(k).indices, 1.0)
        assert torch.equal(laprune.hard_topk(r, k), wanted)


def test_hard_topk_carries_no_gradient(backend: str) -> None:
    assert not laprune.hard_topk(normal(5).requires_grad_(), 2).requires_grad


def test_endpoints_have_no_gradient_in_the_scores(backend: str) -> None:
    for gamma in (0.0, 1.0):
        assert (gradients(normal(3, 6), 2, gamma)[0] == 0).all()


@pytest.mark.parametrize("gamma", [0.0, 0.4, 1.0])
def test_no_budget_and_the_whole_budget(gamma: float, dtype: torch.dtype, backend: str) -> None:
    r = normal(2, 5, dtype=dtype)
    assert torch.equal(laprune.soft_topk(r, 0, gamma), torch.zeros_like(r))
    assert torch.equal(laprune.soft_topk(r, 5, gamma), torch.ones_like(r))
    for k in (0, 5):
        assert (gradients(r, k, gamma)[0] == 0).all()
        assert (laprune.solve(r, k, gamma).status == Status.HARD).all()


def test_gamma_zero_is_uniform(dtype: torch.dtype, backend: str) -> None:
    r = normal(2, 5, dtype=dtype)
    s = laprune.solve(r, 2, 0.0)
    assert (s.status == Status.UNIFORM).all()
    assert torch.equal(s.mask, torch.full_like(r, 0.4))
    assert torch.equal(laprune.lapsum_topk(r, 2, INF), s.mask)
    assert s.barrier.isnan().all()
    assert s.temperature.isinf().all()


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_scale_changes_nothing(scale: float, dtype: torch.dtype, backend: str) -> None:
    r = normal(6, 40, dtype=dtype)
    p, q = laprune.soft_topk(r, 7, 0.9), laprune.soft_topk(r * scale, 7, 0.9)
    torch.testing.assert_close(p, q, rtol=0, atol=1e-8 if dtype == torch.float64 else 5e-5)


@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_half_types_are_solved_in_float32(dtype: torch.dtype, backend: str) -> None:
    r = normal(4, 50, dtype=torch.float32).to(dtype)
    for f in (
        lambda r: laprune.soft_topk(r, 5, 0.9),
        lambda r: laprune.gated_topk(r, 5, 0.9),
        lambda r: laprune.lapsum_topk(r, 5, 0.3),
        lambda r: laprune.hard_topk(r, 5),
    ):
        assert f(r).dtype == dtype
        assert torch.equal(f(r), f(r.float()).to(dtype))


def test_gating_promotes_types(backend: str) -> None:
    r, v = normal(8), normal(8, seed=1)
    for a, b in ((torch.float32, torch.float64), (torch.float64, torch.float32)):
        h = laprune.gated_topk(v.to(a), 2, 0.7, scores=r.to(b))
        assert h.dtype == torch.float64
        wanted = v.to(a).double() * laprune.soft_topk(r.to(b).double(), 2, 0.7)
        torch.testing.assert_close(h, wanted)


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2, -3])
def test_any_dimension_and_stride(dim: int, backend: str) -> None:
    r = normal(4, 10, 6).transpose(0, 2)[:, ::2]
    assert not r.is_contiguous()
    k, gamma = normal(1).abs() + 1, torch.tensor(0.7)
    moved = laprune.soft_topk(r.movedim(dim, -1).contiguous(), k, gamma)
    for p in (laprune.soft_topk(r, k, gamma, dim=dim), laprune.solve(r, k, gamma, dim=dim).mask):
        assert torch.equal(p, moved.movedim(-1, dim))
    rows = r.movedim(dim, -1).shape[:-1]
    assert {x.shape for x in laprune.solve(r, k, gamma, dim=dim)[1:]} == {rows}
    per_row = 1 + torch.rand(rows, generator=torch.Generator().manual_seed(0)).double()
    p = laprune.soft_topk(r, per_row, 0.5, dim=dim)
    torch.testing.assert_close(p.sum(dim), per_row)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0, 5), (0,)])
def test_no_rows_give_no_mask(shape: tuple[int, ...], backend: str) -> None:
    r = torch.empty(*shape, 4).requires_grad_()
    p = laprune.soft_topk(r, 2, 0.9)
    p.sum().backward()
    s = laprune.solve(r, 2, 0.9)
    assert p.shape == r.shape == r.grad.shape == s.mask.shape
    assert s.status.shape == shape


def test_one_entry_takes_its_budget(backend: str) -> None:
    assert laprune.soft_topk(row(3), 0.25, 0.6).item() == 0.25
    assert laprune.soft_topk(row(3), 1, 0.6).item() == 1


@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0])
def test_too_few_entries_warn_and_are_all_selected(k: int, gamma: float, backend: str) -> None:
    r, may = normal(2, 4), torch.tensor([[True, False, False, False], [True] * 4])
    with pytest.warns(RuntimeWarning, match=r"1 of 2 rows .* fewer eligible entries than k"):
        s = laprune.solve(r, k, gamma, mask=may)
    assert s.status[0] == Status.INFEASIBLE
    assert torch.equal(s.mask[0], row(1, 0, 0, 0))
    assert s.status[1] != Status.INFEASIBLE
    with pytest.warns(RuntimeWarning, match="fewer eligible"):
        grads = gradients(r, k, gamma, mask=may)
    assert all(g.isfinite().all() for g in grads)
    assert (grads[0][0] == 0).all()


def test_rows_without_entries_are_zero(backend: str) -> None:
    r = torch.full((2, 3), -INF)
    assert (laprune.soft_topk(r, 0, 0.5) == 0).all()
    with pytest.warns(RuntimeWarning, match="2 of 2 rows"):
        grads = gradients(r, 1, 0.5)
    assert all((g == 0).all() for g in grads)


EXTREMES = {
    "opposite ends of float64": row(1.7e308, -1.7e308, 3e307, 0),
    "near the top of float64": row(*[1.7e308] * 5, *[1.6e308] * 5),
    "one astronomic score": row(1e308, 1, 2, 0),
    "subnormal float64": row(1e-310, 2e-310, 5e-310, 0),
    "least float64": row(5e-324, 1e-323, 2e-323, 0),
    "ends of float32": row(3e38, -3e38, 1e38, 0, dtype=torch.float32),
    "subnormal float32": row(1e-40, 2e-40, 5e-40, 0, dtype=torch.float32),
}


@pytest.mark.parametrize("r", EXTREMES.values(), ids=EXTREMES)
@pytest.mark.parametrize("gamma", [0.0, 0.3, 0.9, 1.0])
def test_extreme_scores_are_solved_or_said_to_be_unsolved(
    r: Tensor, gamma: float, backend: str
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        s = laprune.solve(r, 2, gamma)
    assert ((s.mask >= 0) & (s.mask <= 1)).all()
    said = any("did not converge" in str(w.message) for w in caught)
    assert said == (s.status == Status.STALLED)
    if not said:
        assert s.mask.double().sum().item() == pytest.approx(2, rel=1e-6)


@pytest.mark.parametrize("temperature", [1e-30, 1e-3, 1e30])
def test_lapsum_at_extreme_temperatures(temperature: float, backend: str) -> None:
    p = laprune.lapsum_topk(row(1, 3, 2, 0), 2, temperature)
    wanted = row(0, 1, 1, 0) if temperature < 1 else torch.full((4,), 0.5, dtype=torch.float64)
    torch.testing.assert_close(p, wanted, rtol=0, atol=1e-9)


@pytest.mark.parametrize("temperature", [1e-5, 1e-20, 1e-30])
@pytest.mark.parametrize("k", [12.0, 12.5, 200.5])
def test_lapsum_keeps_a_fraction_at_tiny_temperatures(
    k: float, temperature: float, dtype: torch.dtype, backend: str
) -> None:
    r = normal(4, 300, dtype=dtype).clamp(min=0)
    p = laprune.lapsum_topk(r, k, temperature)
    torch.testing.assert_close(p.double().sum(-1), torch.full((4,), k).double(), rtol=1e-6, atol=0)


def test_ties_at_the_smallest_scale_are_found_soon(backend: str) -> None:
    r = 1e-30 * torch.tensor([[-1.2, 0.9], [0.3, -0.4]])
    s = laprune.solve(r, torch.tensor([1.7425, 0.2643]), torch.tensor([0.9, 0.53]))
    assert s.status.tolist() == [Status.TIED, Status.TIED]
    assert s.passes.max() <= 60


def test_nothing_passed_in_is_modified(dtype: torch.dtype, backend: str) -> None:
    r = normal(6, 8, dtype=dtype)
    r[0, 0], r[1, 1], r[2] = -INF, NAN, 1.0
    inputs = {
        "scores": r,
        "values": normal(6, 8, seed=1, dtype=dtype),
        "k": torch.tensor([1.0, 2, 3, 0, 8, 2.5]),
        "gamma": torch.tensor([0.5, 0.9, 0.1, 0.5, 0.5, 1.0]),
        "mask": torch.arange(8) != 0,
    }
    before = {name: x.clone() for name, x in inputs.items()}
    scores, values, k, gamma, mask = (
        x.requires_grad_() if x.is_floating_point() else x for x in inputs.values()
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        outs = [
            *(laprune.soft_topk(scores, k, gamma, mask=mask, mode=m) for m in ("soft", "ste")),
            laprune.lapsum_topk(scores, k, gamma, mask=mask),
            laprune.gated_topk(values, k, gamma, scores=scores, mask=mask),
            laprune.gated_topk(scores, k, gamma, mask=mask, mode="ste"),
            laprune.hard_topk(scores, k, mask=mask),
            laprune.solve(scores, k, gamma, mask=mask).mask,
        ]
        sum(x.sum() for x in outs).backward()
    for name, x in inputs.items():
        assert torch.equal(x.nan_to_num(7.0), before[name].nan_to_num(7.0)), name


REFUSED = [
    ({"k": -1}, ValueError, r"k must lie in \[0, 4\], got -1"),
    ({"k": 4.5}, ValueError, r"k must lie in \[0, 4\], got 4.5"),
    ({"k": NAN}, ValueError, r"k must lie in \[0, 4\], got nan"),
    ({"k": True}, TypeError, "k must be a number or a tensor, got bool"),
    ({"k": "2"}, TypeError, "k must be a number or a tensor, got str"),
    ({"k": None}, TypeError, "k must be a number or a tensor, got NoneType"),
    ({"k": torch.tensor(True)}, TypeError, "k must be real, got torch.bool"),
    ({"k": torch.tensor([1.0, 9.0])}, ValueError, r"k must lie in \[0, 4\], got 9"),
    ({"k": torch.tensor(-0.5)}, ValueError, r"k must lie in \[0, 4\], got -0.5"),
    ({"k": torch.tensor(NAN)}, ValueError, r"k must lie in \[0, 4\], got nan"),
    ({"k": torch.ones(3)}, ValueError, r"k of shape \(3,\) does not broadcast to \(2,\)"),
    ({"gamma": 1.01}, ValueError, r"gamma must lie in \[0, 1\], got 1.01"),
    ({"gamma": -0.1}, ValueError, r"gamma must lie in \[0, 1\], got -0.1"),
    ({"gamma": NAN}, ValueError, r"gamma must lie in \[0, 1\], got nan"),
    ({"gamma": 1j}, TypeError, "gamma must be a number or a tensor, got complex"),
    ({"gamma": torch.tensor(2.0)}, ValueError, r"gamma must lie in \[0, 1\], got 2"),
    ({"gamma": torch.ones(2, 4)}, ValueError, r"gamma of shape \(2, 4\) does not broadcast"),
    ({"dim": 2}, ValueError, r"dim must be a dimension of scores \(2, 4\), got 2"),
    ({"dim": -3}, ValueError, r"dim must be a dimension of scores \(2, 4\), got -3"),
    ({"dim": 0.0}, TypeError, "dim must be an int, got float"),
    ({"mask": torch.ones(2, 4)}, TypeError, "mask must be a boolean tensor, got torch.float32"),
    ({"mask": [True] * 4}, TypeError, "mask must be a boolean tensor, got list"),
    ({"mask": torch.ones(3, dtype=torch.bool)}, ValueError, r"mask of shape \(3,\) does not"),
    ({"mode": "hard"}, ValueError, "mode must be 'soft' or 'ste', got 'hard'"),
    ({"scores": torch.arange(4)}, TypeError, "scores must be .*, got torch.int64"),
    ({"scores": torch.ones(4, dtype=torch.complex64)}, TypeError, "got torch.complex64"),
    ({"scores": [1.0, 2.0]}, TypeError, "scores must be .* tensor, got list"),
    ({"scores": torch.ones(3, 0)}, ValueError, r"scores \(3, 0\) have no entries along dim -1"),
    ({"scores": torch.tensor(1.0)}, ValueError, r"dim must be a dimension of scores \(\)"),
]


@pytest.mark.parametrize(("change", "error", "message"), REFUSED, ids=[str(x[0]) for x in REFUSED])
def test_bad_arguments_are_named(change, error, message: str, backend: str) -> None:
    with pytest.raises(error, match=message):
        laprune.soft_topk(**({"scores": torch.ones(2, 4), "k": 2, "gamma": 0.5} | change))


def test_bad_arguments_of_the_other_functions_are_named() -> None:
    r = torch.ones(4)
    with pytest.raises(ValueError, match=r"temperature must lie in \[0, inf\], got -1"):
        laprune.lapsum_topk(r, 2, -1)
    with pytest.raises(ValueError, match=r"temperature must lie in \[0, inf\], got nan"):
        laprune.lapsum_topk(r, 2, torch.tensor(NAN))
    with pytest.raises(TypeError, match="temperature must be a number or a tensor, got str"):
        laprune.lapsum_topk(r, 2, "1")
    with pytest.raises(ValueError, match=r"k must lie in \[0, 4\], got 5"):
        laprune.hard_topk(r, 5)
    with pytest.raises(ValueError, match=r"gamma must lie in \[0, 1\], got 3"):
        laprune.solve(r, 2, 3)
    with pytest.raises(ValueError, match=r"scores must have the shape of values, \(4,\)"):
        laprune.gated_topk(r, 2, 0.5, scores=torch.ones(3))
    with pytest.raises(TypeError, match=r"values must be .*, got torch.int64"):
        laprune.gated_topk(torch.arange(4), 2, 0.5, scores=r)
    with pytest.raises(TypeError, match=r"scores must be .*, got list"):
        laprune.gated_topk(r, 2, 0.5, scores=[1.0] * 4)
    with pytest.raises(ValueError, match="mode must be 'soft' or 'ste'"):
        laprune.gated_topk(r, 2, 0.5, mode="x")


@pytest.mark.parametrize("k", [2, 2.0, Fraction(2), np.float32(2), np.int64(2), torch.tensor(2)])
def test_any_real_number_is_a_budget(k) -> None:
    r = normal(2, 5)
    assert torch.equal(laprune.soft_topk(r, k, 0.5), laprune.soft_topk(r, 2, 0.5))


def test_without_the_native_unit_the_reference_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    r = normal(3, 20)
    p = laprune.soft_topk(r, 4, 0.8)
    monkeypatch.setattr(cpu, "library", lambda: None)
    assert pick(r) is reference
    torch.testing.assert_close(laprune.soft_topk(r, 4, 0.8), p, rtol=0, atol=1e-9)


def test_a_chosen_backend_lasts_as_long_as_its_block() -> None:
    r = normal(4)
    before = pick(r)
    with use(reference):
        with use(cpu):
            assert pick(r) is cpu
        assert pick(r) is reference
        with contextlib.suppress(ZeroDivisionError), use(cpu):
            _ = 1 / 0
        assert pick(r) is reference
    assert pick(r) is before


def test_the_default_device_is_not_that_of_the_scores(backend: str) -> None:
    r = normal(3, 50).requires_grad_()
    wanted = laprune.soft_topk(r, 5, 0.5)
    joint = laprune.global_topk([r], 5, 0.5)[0]
    with torch.device("meta"):
        p = laprune.soft_topk(r, 5, 0.5)
        q = laprune.global_topk([r], 5, 0.5)[0]
    torch.testing.assert_close(p, wanted)
    torch.testing.assert_close(q, joint)
    p.square().sum().backward()
    assert r.grad is not None


@pytest.mark.parametrize("gamma", [0.7, 0.97, 0.9999])
def test_scores_an_ulp_apart_are_solved_as_their_differences(
    gamma: float, dtype: torch.dtype, backend: str
) -> None:
    """The barrier between two of them is no number of their type."""
    steps = torch.randint(0, 7, (16, 2000), generator=torch.Generator().manual_seed(1)).to(dtype)
    k = torch.arange(100.0, 1700.0, 100.0, dtype=torch.float64)
    near = laprune.solve(steps, k, gamma)
    far = laprune.solve(steps + 2.0 ** (52 if dtype == torch.float64 else 23), k, gamma)
    assert (far.status < Status.INFEASIBLE).all()
    torch.testing.assert_close(far.mask, near.mask, rtol=0, atol=2e-6)
