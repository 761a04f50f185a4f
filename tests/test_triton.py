"""The Triton kernels against the reference: on a GPU if there is one, else in Triton's interpreter.

The interpreter must be chosen before Triton is imported, so without a GPU one test runs this file
in a process of its own.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import subprocess
import sys

import pytest
import torch
from conftest import no_waiting
from torch.autograd import forward_ad

import laprune
from laprune.backends import Status, cuda, reference, use
from laprune.backends import pieces as in_pieces
from laprune.backends._contract import OFFSET, TEMPERATURE
from laprune.backends.exchange import Exchange
from laprune.op import topk
from laprune.studies import inputs

ON_GPU = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_TRITON = importlib.util.find_spec("triton") is not None
DEVICE = "cuda" if ON_GPU else "cpu"

kernels = pytest.mark.skipif(
    not HAS_TRITON or not (ON_GPU or INTERPRETED), reason="run by test_in_the_interpreter"
)
on_gpu = pytest.mark.skipif(not ON_GPU, reason="no NVIDIA GPU")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, inside the interpreter

if INTERPRETED:
    import interpreter

    interpreter.install()

PLANS = {
    "held": cuda.Plan(2, 16, 4),
    "rows": cuda.Plan(16, 4, 2),
    "row": cuda.Plan(1, 64, 1),
    "alone": cuda.Plan(1, 32, 2, team=1),
    "team": cuda.Plan(1, 32, 1, team=3),
}
REGIMES = list(PLANS)
PLANS["wide"] = cuda.Plan(1, 256, 4, team=1)
LINEAR = ("gaussian", "relu")  # around the barrier
# Mask and gradient. The reference itself stops at 1e-8 in the log odds of gamma.
TOLERANCE = {torch.float32: (2e-6, 1e-5), torch.float64: (2e-9, 1e-7)}
MASS = {torch.float32: 1e-6, torch.float64: 1e-12}


@pytest.fixture(autouse=True)
def poisoned():
    """Fresh memory is NaN: what a kernel forgets to write shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
@pytest.mark.skipif(ON_GPU or INTERPRETED, reason="the kernels run in this process")
def test_in_the_interpreter():
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            __file__,
            "-x",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
        ],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-4000:]


def compare(regime, r, k, h, values=None, gated=False, fixed=False, pull=None):
    """Mask, state, gradients and statuses of one regime against the reference in float64."""
    r, k, h = r.to(DEVICE), k.to(DEVICE), h.to(DEVICE)
    values = None if values is None else values.to(DEVICE)
    how = PLANS[regime]
    wide = [None if x is None else x.double() for x in (r, k, h, values)]
    out, state, info = cuda.solve(r, k, h, values, gated, fixed, how=how)
    want, want_state, want_info = reference.solve(*wide, gated, fixed)
    assert out.dtype == r.dtype
    assert info[:, 0].tolist() == want_info[:, 0].tolist()

    mask_tol, grad_tol = TOLERANCE.get(r.dtype, (5e-3, 2e-2))
    torch.testing.assert_close(out.double(), want, atol=mask_tol, rtol=0, equal_nan=True)
    if not (gated or fixed) and r.dtype in MASS:
        assert_constraints(
            out[info[:, 0] == 0], r[info[:, 0] == 0], k[info[:, 0] == 0], h[info[:, 0] == 0]
        )
    g = torch.randn(r.shape, generator=torch.Generator().manual_seed(7)).to(r)
    pull = None if pull is None else pull.to(DEVICE)
    got = cuda.vjp(r, k, h, values, gated, fixed, state, info, g, pull, how=how)
    want_grad = reference.vjp(*wide, gated, fixed, want_state, want_info, g.double(), pull)
    floors = floors_of_gradients(wide[0], k, g.double(), want_state, fixed)
    for i, (ours, theirs) in enumerate(zip(got, want_grad, strict=True)):
        if theirs is None:
            assert ours is None
            continue
        assert torch.equal(ours.isnan(), theirs.isnan())
        ours, theirs = ours.double().nan_to_num(), theirs.nan_to_num()
        # Row by row: a family with large gradients must not hide another.
        off = (ours - theirs).reshape(len(r), -1).norm(dim=-1)
        size = theirs.reshape(len(r), -1).norm(dim=-1)
        floor = torch.zeros_like(size) if gated or i == 1 else floors[i]
        floor = floor if i == 0 and not gated else floor.clamp(min=0.1)
        worst = (off - grad_tol * (size + floor)).argmax()
        assert off[worst] <= grad_tol * (size + floor)[worst], (i, worst, off[worst], size[worst])
    return out, state, info


def floors_of_gradients(r, k, g, state, fixed):
    """What the gradients of scores, nothing, k and hardness are measured beside: the size of the
    terms that they are sums of. Where few scores are active they cancel almost wholly."""
    pivot, b, t = (state[:, [i]] for i in range(3))
    z = (r - pivot - b) / t
    q = 0.5 * torch.exp(-z.abs())
    p = torch.where(z > 0, 1 - q, q)
    mean = lambda x: (q * x).sum(-1, keepdim=True) / q.sum(-1, keepdim=True)  # noqa: E731
    z = torch.where(q > 0, z, 0.0)
    lever = (q * (z - mean(z)) * g).norm(dim=-1)
    cov = (q * (z - mean(z)) * (p - mean(p))).sum(-1)
    of_h = lever / t[:, 0] if fixed else 0.5 * k * (1 - k / r.shape[-1]) * lever / cov
    of_k = (q * g).norm(dim=-1) / q.sum(-1) + (0 if fixed else lever / cov)
    return [x.nan_to_num(0, 0, 0) for x in ((q * g / t).norm(dim=-1), of_k, of_k, of_h)]


def assert_constraints(p, r, k, h):
    """Converged rows have their mass and their hardness, whatever the reference says."""
    tol, p, n = MASS[p.dtype], p.double(), (r > -math.inf).sum(-1)
    mean = (p.sum(-1) / n)[:, None]
    spread = torch.where(r > -math.inf, p - mean, 0.0).square().sum(-1)
    gamma = spread / (spread + (p * (1 - p)).sum(-1))
    assert ((p.sum(-1) - k).abs() <= tol * k).all()
    assert ((gamma - h).abs() <= 50 * tol * h).all(), (gamma - h).tolist()


def families(names, n, dtype, each=1):
    r = torch.cat([inputs.draw(name, each, n, seed=3, dtype=dtype) for name in names])
    return r, inputs.budgets(len(r), n), inputs.hardnesses(len(r), 0.99)


@kernels
@pytest.mark.parametrize(
    ("n", "dtype"), [(2, torch.float32), (63, torch.float64), (300, torch.float32)]
)
def test_rows_of_every_family(n, dtype):
    names = ["gaussian", "uniform"] if n == 2 else list(inputs.REGISTRY)
    compare("rows", *families(names, n, dtype, each=2))


@kernels
@pytest.mark.parametrize(
    ("regime", "dtype", "some"),
    [
        ("alone", torch.float32, slice(0, None, 2)),
        ("team", torch.float32, slice(1, None, 2)),
        ("team", torch.float64, slice(0, None, 4)),
    ],
)
def test_long_rows_of_every_family(regime, dtype, some):
    names = list(inputs.REGISTRY)
    compare(regime, *families(names if ON_GPU else names[some], 500, dtype))


@kernels
@pytest.mark.parametrize(
    ("name", "n", "dtype", "k", "h", "fixed"),
    [
        ("integers", 300, torch.float64, 39, 0.9869, False),  # ties look like a cold start
        ("relu", 300, torch.float64, 299, 0.9614, False),  # all weight on ties beside the barrier
        ("relu", 300, torch.float32, 299, 0.0018, False),  # as good as rounding allows
        ("cluster", 500, torch.float32, 8, 0.9569, False),  # the start is far too cold
        ("gaussian", 60, torch.float64, 11.8, 1e-6, True),  # the next score is hundreds of t away
        ("integers", 60, torch.float64, 52, 2e-6, True),
    ],
)
@pytest.mark.parametrize("regime", ["row", "alone"])
def test_rows_that_were_hard_to_solve(regime, name, n, dtype, k, h, fixed):
    r = inputs.draw(name, 4, n, dtype=dtype)
    k, h = (torch.full((4,), float(x), dtype=torch.float64) for x in (k, h))
    _, _, info = compare(regime, r, k, h, fixed=fixed)
    assert (info[:, 1] <= 40).all()


@kernels
@pytest.mark.parametrize(
    ("how", "rows", "n"),
    [
        (cuda.Plan(16, 16, 4), 32, 256),
        (cuda.Plan(1, 64, 8), 4, 4096),
        (cuda.Plan(1, 512, 2), 4, 4096),
        (cuda.Plan(1, 256, 4, team=1), 1, 40_960),
    ],
)
@pytest.mark.parametrize("name", ["gaussian", "uniform", "cauchy", "bimodal"])
def test_a_few_passes_do_however_scores_are_distributed(how, rows, n, name):
    r = inputs.draw(name, rows, n, seed=3, dtype=torch.float32).to(DEVICE)
    _, _, info = cuda.solve(r, n / 16, 0.9, None, False, False, how=how)
    assert info[:, 1].double().mean() <= 4.5


@kernels
@pytest.mark.parametrize("how", [cuda.Plan(8, 4, 4), PLANS["rows"]])
@pytest.mark.parametrize("far", [1e8, torch.finfo(torch.float32).max])
@pytest.mark.parametrize("masked", [slice(32), slice(None, None, 2)])
def test_a_few_passes_do_where_scores_are_masked_by_a_number(how, far, masked):
    r = inputs.draw("gaussian", 8, 64, seed=3, dtype=torch.float32)
    r[:, masked] = -far
    out, _, info = cuda.solve(r.to(DEVICE), 4.0, 0.9, None, False, False, how=how)
    assert (info[:, 0] == Status.CONVERGED).all()
    assert (info[:, 1] <= 8).all()
    assert (out.double().sum(-1) / 4 - 1).abs().max() <= 1e-6
    assert (out[:, masked] < 1e-30).all()


@kernels
@pytest.mark.parametrize("k", [0.2, 255.8])
def test_a_few_passes_do_for_a_part_of_one_entry(k):
    r = inputs.draw("gaussian", 8, 256, dtype=torch.float32).to(DEVICE)
    _, _, info = cuda.solve(r, k, 0.9, None, False, False, how=cuda.Plan(16, 16, 4))
    assert info[:, 1].double().mean() <= 4


@kernels
@pytest.mark.parametrize("regime", ["held", "rows", "alone"])
@pytest.mark.parametrize("k", [1e-4, 1e-3])
@pytest.mark.parametrize("name", ["gaussian", "cauchy", "outlier"])
def test_a_thousandth_of_an_entry_is_solved(regime, name, k):
    r = inputs.draw(name, 32, 64, seed=9, dtype=torch.float32).to(DEVICE)
    h = inputs.hardnesses(32, 1 - 1e-4, seed=9).to(DEVICE)
    out, _, info = cuda.solve(r, k, h, None, False, False, how=PLANS[regime])
    assert set(info[:, 0].tolist()) <= {Status.CONVERGED, Status.TIED}
    assert (out.double().sum(-1) / k - 1).abs().max() <= 1e-6


@kernels
def test_many_equal_scores_add_up_without_drift():
    n, k = 10_000, 4501.0
    r = torch.zeros(1, n)
    r[0, ::1000] = torch.arange(1.0, 11.0)
    how = cuda.Plan(1, 32, 1, team=1)  # 79 tiles, each with the same sums
    out, _, info = cuda.solve(r.to(DEVICE), k, 0.9, None, False, False, how=how)
    assert info[0, 0] == Status.TIED
    assert info[0, 1] <= 4
    assert abs(out.double().sum() / k - 1) <= 2e-7


@kernels
@pytest.mark.parametrize("upstream", [0.3, 0.7, 1.1])
def test_equal_weights_add_up_without_drift_in_the_gradient(upstream):
    """dk is the mean of the gradient that arrives, weighted by q."""
    n = 10_000
    r = torch.zeros(1, n)
    r[0, ::1000] = torch.arange(1.0, 11.0)
    r[0, 1::3] = 0.37
    r, g = r.to(DEVICE), torch.full((1, n), upstream, device=DEVICE)
    k, t = (torch.tensor([x], dtype=torch.float64, device=DEVICE) for x in (4501.0, 0.7))
    how = cuda.Plan(1, 32, 1, team=1)
    _, state, info = cuda.solve(r, k, t, None, False, True, how=how)
    _, _, dk, _ = cuda.vjp(r, k, t, None, False, True, state, info, g, None, how=how)
    assert abs(dk.item() / g[0, 0].item() - 1) <= 2e-7


@kernels
@pytest.mark.parametrize("regime", ["held", "rows"])
def test_a_row_does_not_depend_on_those_beside_it(regime):
    n, rows = 63, len(inputs.REGISTRY)
    r = torch.cat(
        [inputs.draw(name, 1, n, seed=1, dtype=torch.float32) for name in inputs.REGISTRY]
    )
    k, h = inputs.budgets(rows, n, seed=3), inputs.hardnesses(rows, 1 - 1e-4, seed=3)
    r[4, 1], h[3], k[7] = torch.nan, 1.0, 0.0
    r, k, h = r.to(DEVICE), k.to(DEVICE), h.to(DEVICE)
    together = cuda.solve(r, k, h, None, False, False, how=PLANS[regime])
    # A compiler may round the two ways through a pass differently.
    near = {"atol": 1e-6 if ON_GPU else 0, "rtol": 1e-4 if ON_GPU else 0, "equal_nan": True}
    for i in range(rows):
        one = slice(i, i + 1)
        alone = cuda.solve(r[one], k[one], h[one], None, False, False, how=PLANS[regime])
        torch.testing.assert_close(alone[0], together[0][one], **near)
        assert alone[2][0, 0] == together[2][i, 0]
        if not ON_GPU:
            assert torch.equal(alone[2], together[2][one])
            torch.testing.assert_close(alone[1], together[1][one], rtol=0, atol=0, equal_nan=True)


@kernels
@pytest.mark.parametrize("regime", REGIMES)
def test_edges(regime):
    inf, nan = math.inf, math.nan
    n = 40 if regime == "rows" else 300
    r = inputs.draw("gaussian", 12, n, dtype=torch.float32)
    r[0, 5] = nan
    r[1, 7] = inf
    r[2, 3:30] = -inf
    r[3] = 2.5
    r[4, 10:] = -inf
    r[8, ::2] = -inf
    r[9] = r[9].round()
    k = torch.tensor([3, 3, 5, 4, 20, 0, n, 3.5, n // 2, 6, 7, nan], dtype=torch.float64)
    h = torch.tensor([0.9, 0.9, 0.9, 0.9, 0.9, 0.5, 0.5, 1, 0.5, 1, 0, 0.5], dtype=torch.float64)
    out, _, info = compare(regime, r, k, h)
    S = Status
    expected = [S.NONFINITE, S.NONFINITE, S.CONVERGED, S.CONSTANT, S.INFEASIBLE, S.HARD, S.HARD]
    expected += [S.HARD, S.HARD, S.HARD, S.UNIFORM, S.NONFINITE]
    assert info[:, 0].tolist() == expected
    assert (out[2, 3:30] == 0).all()
    assert out[7].sum() == 3.5


@kernels
@pytest.mark.parametrize("regime", ["rows", "alone"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scores_at_both_ends_of_their_type_are_solved_or_said_to_be_unsolved(regime, dtype):
    most, n = torch.finfo(dtype).max, 12
    r = inputs.draw("uniform", 6, n)
    r[:4] = (2 * r[:4] - 1) * most
    r[1] = r[1].sign() * most
    r[3] *= 1e-3
    r[4, 0], r[4, 1] = most, -most
    k = torch.full((6,), 3.0, dtype=torch.float64)
    h = torch.tensor([0.03, 0.03, 1e-4, 1e-4, 0.9, 0.9], dtype=torch.float64)
    args = (r.to(DEVICE, dtype), k.to(DEVICE), h.to(DEVICE), None, False, False)
    out, state, info = (x.cpu() for x in cuda.solve(*args, how=PLANS[regime]))
    assert set(info[:, 0].tolist()) <= {Status.CONVERGED, Status.STALLED}
    assert (info[3::2, 0] == Status.CONVERGED).all()
    assert ((out >= 0) & (out <= 1)).all()
    assert state.isfinite().all()
    solved = info[:, 0] == Status.CONVERGED
    # In float64 the reference has no room for differences of scores either.
    want = reference.solve(r / 8, k, h, None, False, False)[0]
    torch.testing.assert_close(out[solved].double(), want[solved], atol=2e-6, rtol=0)


@kernels
@pytest.mark.parametrize("regime", ["rows", "alone"])
@pytest.mark.parametrize("temperature", [1e30, 1e38])
def test_a_temperature_at_the_end_of_its_type_leaves_a_uniform_mask(regime, temperature):
    r = inputs.draw("gaussian", 2, 12, dtype=torch.float32)
    k, t = torch.tensor([[3.0, 3.0], [temperature, temperature]], dtype=torch.float64)
    args = (r.to(DEVICE), k.to(DEVICE), t.to(DEVICE), None, False, True)
    out, _, info = (x.cpu() for x in cuda.solve(*args, how=PLANS[regime]))
    assert (info[:, 0] == Status.CONVERGED).all()
    torch.testing.assert_close(out, torch.full_like(r, 0.25), atol=1e-6, rtol=0)


@kernels
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
@pytest.mark.parametrize(("how", "n"), [(PLANS["wide"], 40_000), (PLANS["team"], 1501)])
def test_a_bad_score_beside_the_sample_breaks_its_row_alone(how, n, bad):
    r = inputs.draw("gaussian", 2, n, dtype=torch.float32)
    r[0, n // 2 + 10] = bad
    out, _, info = (
        x.cpu() for x in cuda.solve(r.to(DEVICE), n / 16, 0.9, None, False, False, how=how)
    )
    assert info[:, 0].tolist() == [Status.NONFINITE, Status.CONVERGED]
    assert out[0].isnan().all()
    assert abs(out[1].double().sum() / (n / 16) - 1) < 1e-6


@kernels
@pytest.mark.parametrize("regime", REGIMES)
def test_hard_rows_serve_the_lowest_index_first(regime):
    n = 200
    r = torch.zeros(3, n)
    r[1] = inputs.draw("integers", 1, n, dtype=torch.float32)[0]
    r[2, ::2] = -0.0
    k = torch.tensor([70.0, 41.25, 90.0], dtype=torch.float64)
    out, state, _ = compare(
        regime, r, k, torch.ones(3, dtype=torch.float64), gated=True, values=r + 1
    )
    assert state[0, OFFSET] == 70
    assert (out[0, :70] == 1).all()
    assert (out[0, 70:] == 0).all()
    assert (out[2, :90] == 1).all()


@kernels
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("own", [True, False])
def test_gated_rows(regime, own):
    r, k, h = families(["gaussian", "relu", "integers"], 150, torch.float32)
    r[0, :9] = -math.inf
    h[2] = 1
    values = inputs.draw("laplace", 3, 150, dtype=torch.float32) if own else None
    pull = torch.zeros(3, 5, dtype=torch.float64)
    pull[:, OFFSET], pull[:, TEMPERATURE] = 0.3, -0.7
    compare(regime, r, k, h, values=values, gated=True, pull=pull)


@kernels
@pytest.mark.parametrize("regime", REGIMES)
def test_a_given_temperature(regime):
    r, k, _ = families(["gaussian", "cauchy", "integers", "uniform"], 150, torch.float32)
    t = torch.tensor([0.3, 2.0, math.inf, 0.0], dtype=torch.float64)
    pull = torch.full((4, 5), 0.5, dtype=torch.float64)
    _, state, _ = compare(regime, r, k, t, fixed=True, pull=pull)
    assert state[:2, TEMPERATURE].tolist() == [0.3, 2.0]


@kernels
@pytest.mark.parametrize("regime", ["held", "row", "alone"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_barrier_far_from_all_scores_has_a_gradient(regime, dtype):
    """Between the third score and the fourth, hundreds of temperatures away from both."""
    far = torch.tensor([30, 60, 79, 85, 88, 100, 600, 699, 705, 711, 740, 760.0])
    r = torch.tensor([5, 3, 2, 1, 0, 4, -1, -2, -math.inf], dtype=dtype).expand(len(far), -1)
    r, t = r.contiguous().to(DEVICE), (0.5 / far.double()).to(DEVICE)
    k = torch.full_like(t, 3)
    g = torch.arange(1, 10).to(r).expand_as(r)
    found = []
    for backend, how in ((cuda, {"how": PLANS[regime]}), (reference, {})):
        _, state, info = backend.solve(r, k, t, None, False, True, **how)
        dr, _, dk, dt = backend.vjp(r, k, t, None, False, True, state, info, g, None, **how)
        assert dr.isfinite().all()
        found.append((dk, dt))
    # In float32 all scores weigh the same beyond 80 temperatures; and far enough from all of them
    # any barrier between the two will do, which a team does not move to the middle.
    same = len(far) if dtype == torch.float64 and regime != "alone" else 2
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours[:same], theirs[:same], rtol=1e-5, atol=1e-30)


@kernels
@pytest.mark.parametrize("regime", ["held", "team"])
def test_a_number_is_a_tensor_of_equal_numbers(regime):
    r = inputs.draw("gaussian", 3, 150, dtype=torch.float32).to(DEVICE)
    tensors = [torch.full((3,), x, dtype=torch.float64, device=DEVICE) for x in (7.5, 0.7)]
    how = PLANS[regime]
    out, state, info = cuda.solve(r, *tensors, None, False, False, how=how)
    for a, b in zip(
        cuda.solve(r, 7.5, 0.7, None, False, False, how=how), (out, state, info), strict=True
    ):
        assert torch.equal(a, b)
    g = torch.randn(r.shape, generator=torch.Generator().manual_seed(7)).to(r)
    rest = (None, False, False, state, info, g, None, how)
    want_dr, _, want_dk, want_dh = cuda.vjp(r, *tensors, *rest)
    for k, gamma in ((7.5, 0.7), (tensors[0], 0.7), (7.5, tensors[1])):
        dr, _, dk, dh = cuda.vjp(r, k, gamma, *rest)
        assert torch.equal(dr, want_dr)
        assert dk is None if isinstance(k, float) else torch.equal(dk, want_dk)
        assert dh is None if isinstance(gamma, float) else torch.equal(dh, want_dh)
    assert torch.equal(state, cuda.solve(r, *tensors, None, False, False, how=how)[1])


@kernels
@pytest.mark.filterwarnings("ignore:.torch.jit.script")  # torch itself, in forward mode
def test_numbers_have_every_derivative_that_tensors_have():
    r = inputs.draw("gaussian", 2, 30, dtype=torch.float64).to(DEVICE).requires_grad_()
    tensors = [torch.full((2,), x, dtype=torch.float64, device=DEVICE) for x in (7.5, 0.7)]
    g, v = torch.randn(
        2, 2, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(7)
    ).to(DEVICE)

    def derivatives(k, gamma):
        out = topk(r, k, gamma, None, False, False)[0]
        (first,) = torch.autograd.grad(out, r, g, create_graph=True)
        (second,) = torch.autograd.grad(first, r, v)
        with forward_ad.dual_level():
            dual = topk(forward_ad.make_dual(r.detach(), v), k, gamma, None, False, False)[0]
            tangent = forward_ad.unpack_dual(dual).tangent
        return out.detach(), first.detach(), second, tangent

    with use(cuda):
        for ours, theirs in zip(derivatives(7.5, 0.7), derivatives(*tensors), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


@kernels
@pytest.mark.parametrize("function", ["soft", "lapsum", "gated"])
def test_the_way_of_most_calls_leads_where_the_others_do(function):
    f = {
        "soft": lambda r, k: laprune.soft_topk(r, k, 0.7),
        "lapsum": lambda r, k: laprune.lapsum_topk(r, k, 0.3),
        "gated": lambda r, k: laprune.gated_topk(r, k, 0.7),
    }[function]
    generator = torch.Generator().manual_seed(7)
    wide = inputs.draw("gaussian", 6, 61, dtype=torch.float64).to(DEVICE)
    for scores in (
        wide[0, 1:],  # on a GPU, not at a multiple of 16 bytes
        wide[:, :60].reshape(2, 3, 60),
        wide.T.contiguous().T,
    ):
        g, v = torch.randn(2, *scores.shape, dtype=torch.float64, generator=generator).to(DEVICE)
        found = []
        rows = scores.shape[:-1]
        # A tensor of equal numbers goes the usual way.
        for backend, k in (
            (cuda, 7),
            (cuda, torch.full(rows, 7.0, dtype=torch.float64, device=DEVICE)),
            (reference, 7),
        ):
            r = scores.detach().requires_grad_()
            with use(backend):
                out = f(r, k)
                (plain,) = torch.autograd.grad(out, r, g, retain_graph=True)
                (spread,) = torch.autograd.grad(out, r, g[..., :1].expand_as(g), retain_graph=True)
                (batched,) = torch.autograd.grad(
                    out, r, torch.stack((g, v)), retain_graph=True, is_grads_batched=True
                )
                (first,) = torch.autograd.grad(out, r, g, create_graph=True)
                (second,) = torch.autograd.grad(first, r, v)
            assert out.shape == plain.shape == scores.shape
            found.append([out, plain, spread, batched, first, second])
        assert "_Plain" in found[0][0].grad_fn.name()
        for ours, usual, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, usual, atol=1e-12, rtol=1e-12)
            torch.testing.assert_close(ours, theirs, atol=2e-8, rtol=1e-6)


@kernels
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # which torch itself does
def test_a_backward_pass_that_is_compiled():
    from torch._dynamo import compiled_autograd

    scores, g = torch.randn(2, 2, 30, dtype=torch.float64, device=DEVICE)
    compiled = compiled_autograd._enable(torch.compile(backend="eager"))
    found = []
    for how in (contextlib.nullcontext(), compiled):
        r = scores.clone().requires_grad_()
        with use(cuda):
            out = laprune.soft_topk(r, 7, 0.7)
            with how:
                out.backward(g)
        found.append(r.grad)
    assert torch.equal(*found)


@kernels
def test_what_most_calls_are_not_given_goes_the_usual_way():
    r = inputs.draw("gaussian", 2, 30, dtype=torch.float32).to(DEVICE)
    with use(cuda):
        want = laprune.soft_topk(r, 7, 0.7)
        kept = []
        torch.func.grad(lambda x: kept.append(x) or x.sum())(r)  # a wrapper nobody needs any more
        assert torch.equal(laprune.soft_topk(kept[0], 7, 0.7), want)
        assert torch.equal(torch.func.vmap(lambda x: laprune.soft_topk(x, 7, 0.7))(r), want)
        with pytest.raises(ValueError, match="k must lie"):
            laprune.soft_topk(r, 31, 0.7)
        with pytest.raises(ValueError, match="gamma must lie"):
            laprune.soft_topk(r, 7, math.nan)
        with pytest.raises(TypeError, match="k must be a number"):
            laprune.soft_topk(r, True, 0.7)
        with pytest.raises(TypeError, match="dim must be an int"):
            laprune.soft_topk(r, 7, 0.7, dim=-1.0)
        with pytest.raises(ValueError, match="no entries"):
            laprune.soft_topk(r[:, :0], 0.0, 0.7)
        assert laprune.soft_topk(r[:0], 7, 0.7).shape == (0, 30)


@kernels
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types(dtype):
    r, k, h = families(["gaussian", "uniform", "relu"], 100, dtype)
    compare("rows", r, k, h.clamp(max=0.9))


@kernels
@pytest.mark.parametrize("regime", ["alone", "team"])
def test_a_few_tiles_precede_a_very_long_row(regime, monkeypatch):
    monkeypatch.setattr(cuda, "COARSE", 2)
    monkeypatch.setattr(cuda, "VERY_LONG", 600)
    r = inputs.draw("gaussian", 1, 1500, dtype=torch.float32)
    compare(regime, r, torch.tensor([300.0]).double(), torch.tensor([0.7]).double())


@kernels
def test_long_rows_whose_scores_lie_far_to_one_side():
    """Most of them, and with them the curvature of the sums, are temperatures from the barrier."""
    names = ("cauchy", "cauchy", "cauchy", "lognormal", "cauchy")
    r = torch.cat([inputs.draw(x, 1, 20_001, seed=3, dtype=torch.float32) for x in names])
    k = torch.tensor([19_960.5, 19_960.5, 32, 32, 1250], dtype=torch.float64)
    h = torch.tensor([0.05, 0.001, 0.05, 0.3, 0.9], dtype=torch.float64)
    compare("wide", r, k, h)


@kernels
def test_curvature_spares_long_rows_a_pass():
    r = torch.cat([inputs.draw(x, 4, 100_000, seed=1, dtype=torch.float32) for x in LINEAR])
    k = torch.full((8,), 6250.0, dtype=torch.float64, device=DEVICE)
    h = torch.full_like(k, 0.9)
    _, _, info = cuda.solve(r.to(DEVICE), k, h, None, False, False, how=PLANS["wide"])
    assert (info[:, 0] == Status.CONVERGED).all()
    assert info[:, 1].sum() <= 19  # 22 without


@kernels
@pytest.mark.parametrize("n", [5, 33, 256])
def test_many_rows_of_every_family(n):
    rows = 64
    r = torch.cat([inputs.draw(x, rows, n, seed=n, dtype=torch.float32) for x in inputs.REGISTRY])
    k, h = inputs.budgets(len(r), n), inputs.hardnesses(len(r), 1 - 1e-4)
    how = cuda.Plan(16 if ON_GPU else 1024, 4, 2)
    out, _, info = cuda.solve(*(x.to(DEVICE) for x in (r, k, h)), None, False, False, how=how)
    want = reference.solve(r.double(), k, h, None, False, False)[0]
    assert (info[:, 0] != Status.STALLED).all()
    assert (info[:, 1] <= 40).all()
    torch.testing.assert_close(out.double().cpu(), want, atol=2e-6, rtol=0)


@kernels
@pytest.mark.parametrize("gamma", [0.6, 1.0])
def test_pieces_are_solved_as_one_row(gamma):
    dtypes = (torch.float32, torch.float16, torch.float32)
    parts = (
        inputs.draw("gaussian", 2, 90, dtype=torch.float32).round(decimals=1).split((30, 0, 60), 1)
    )
    pieces = [x.to(DEVICE, t) for x, t in zip(parts, dtypes, strict=True)]
    k = torch.tensor([20.0, 7.5], dtype=torch.float64, device=DEVICE)
    h = torch.full_like(k, gamma)
    grads = [torch.cos(torch.arange(x.numel(), device=DEVICE)).view_as(x).to(x) for x in pieces]
    owners, alone, found = [0] * 3, Exchange(""), {}
    for name, backend in (("reference", reference), ("cuda", cuda)):
        with use(backend):
            masks, state, info = in_pieces.solve(pieces, k, h, False, alone, owners)
            scores, dk, dh = in_pieces.vjp(
                pieces, k, h, False, alone, owners, state, info, grads, None
            )
        assert info[:, 2].tolist() == [0, 0]
        assert [x.dtype for x in (*masks, *scores)] == [*dtypes, *dtypes]
        found[name] = [*masks, *scores, dk, dh]
    for ours, theirs in zip(found["cuda"], found["reference"], strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-5)


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "n"),
    [
        *((1, 100_003), (3, 100_003), (3, 1_000_000), (1, 20_000_000)),
        *((700, 20_000), (300, 9999), (300, 16384)),
        *((5000, 64), (5000, 100), (5000, 63), (2000, 1001)),
    ],
)
@pytest.mark.parametrize("name", ["gaussian", "cauchy", "relu"])
def test_large_rows(rows, n, name):
    r = inputs.draw(name, rows, n, dtype=torch.float32).cuda()
    k = torch.full((rows,), n / 16, dtype=torch.float64, device="cuda")
    h = torch.full_like(k, 0.9)
    out, state, info = cuda.solve(r, k, h, None, False, False)
    want, _, want_info = reference.solve(r.double(), k, h, None, False, False)
    assert torch.equal(info[:, 0], want_info[:, 0])
    torch.testing.assert_close(out.double(), want, atol=2e-6, rtol=0)
    g = torch.randn_like(r)
    got = cuda.vjp(r, k, h, None, False, False, state, info, g, None)[0].double()
    raw = out.double() * (1 - out.double()) * g / state[:, [TEMPERATURE]]
    want = reference.vjp(r.double(), k, h, None, False, False, state, info, g.double(), None)[0]
    assert (got - want).norm() <= 1e-5 * want.norm() + 1e-6 * raw.norm()


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "n"), [(1, 1_000_000), (64, 300), (200, 30_000)])
def test_no_sync_one_graph_same_bits(rows, n):
    r = inputs.draw("gaussian", rows, n, dtype=torch.float32).cuda()
    k = torch.full((rows,), 9.0, dtype=torch.float64, device="cuda")
    h = torch.full_like(k, 0.9)

    def both():
        out, state, info = cuda.solve(r, k, h, None, False, False)
        return out, *cuda.vjp(r, k, h, None, False, False, state, info, r, None)

    torch.use_deterministic_algorithms(False)
    first = both()
    torch.cuda.synchronize()
    with no_waiting():
        again = both()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    for a, b, c in zip(first, again, captured, strict=True):
        if a is not None:
            assert torch.equal(a, b)
            assert torch.equal(a, c)


@on_gpu
@pytest.mark.gpu
def test_two_streams_do_not_meet():
    r = inputs.draw("gaussian", 1, 400_000, dtype=torch.float32).cuda()
    k, h = torch.tensor([[5000.0], [0.9]], dtype=torch.float64, device="cuda")
    want = cuda.solve(r, k, h, None, False, False)[0]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    outs = []
    for _ in range(10):
        for stream in streams:
            with torch.cuda.stream(stream):
                outs.append(cuda.solve(r, k, h, None, False, False)[0])
    torch.cuda.synchronize()
    assert all(torch.equal(out, want) for out in outs)


@on_gpu
@pytest.mark.gpu
def test_kernels_leave_the_scratch_they_share_as_they_found_it():
    cases = [
        (inputs.draw("gaussian", rows, n, dtype=torch.float32).cuda(), gamma)
        for rows, n in ((1, 400_000), (3, 300_000), (1, 10**6))
        for gamma in (0.9, 1.0)
    ]

    def both(r, gamma):
        out, state, info = cuda.solve(r, 999.5, gamma, None, True, False)
        return out, cuda.vjp(r, 999.5, gamma, None, True, False, state, info, r, None)[0]

    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):  # with scratch of their own
        want = [both(*case) for case in cases]
    torch.cuda.synchronize()
    got = [[both(*case) for case in cases] for _ in range(3)]
    torch.cuda.synchronize()
    for again in got:
        for pair, wanted in zip(again, want, strict=True):
            assert torch.equal(pair[0], wanted[0])
            assert torch.equal(pair[1], wanted[1])
