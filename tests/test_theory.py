"""The theory against closed forms, high precision, stratified samples and its own theorems."""

from itertools import pairwise

import mpmath as mp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

from laprune.theory import (
    Density,
    extremal_profile,
    gamma_for_floor,
    gamma_for_saturation,
    laplace_moments,
    mean_field,
    near_binary_temperature,
    near_binary_unsaturated,
    sparsity_floor,
)
from laprune.theory._mean_field import _fixed_point
from laprune.theory._population import Moments

DISTRIBUTIONS = {
    "norm": stats.norm(),
    "laplace": stats.laplace(),
    "uniform": stats.uniform(),
    "student": stats.t(3),
    "cauchy": stats.cauchy(),
    "expon": stats.expon(),
    "chi2, pole at 0": stats.chi2(1),
    "triangle, kink": stats.triang(0.3),
}
EXTREMES_A = [1e-6, 0.02, 0.5, 0.9, 1 - 1e-6]
EXTREMES_GAMMA = [1e-4, 0.3, 0.9, 1 - 1e-8]

each_distribution = pytest.mark.parametrize(
    "scores", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS.keys()
)
quick = settings(derandomize=True, deadline=None, max_examples=200)
fraction = st.floats(0.001, 0.999)
hardness = st.floats(0, 1)
threshold = st.floats(1e-4, 1)


@pytest.fixture(autouse=True)
def _fifty_digits():
    with mp.workdps(50):
        yield


def laplace_moments_in_fifty_digits(b, t):
    """The paper's formulas, off their removable poles by less than float64 can see."""
    b, t = mp.mpf(abs(b)), mp.mpf(t) + mp.mpf("1e-22")
    M1 = (mp.exp(-b) - t**2 * mp.exp(-b / t)) / (2 * (1 - t**2))
    M2 = (4 + t) * mp.exp(-b) / (2 * (1 + t) * (4 - t**2))
    return M1, M2 - t**2 * mp.exp(-2 * b / t) / (4 * (4 - t**2))


def gaussian_expectations_in_fifty_digits(b, t):
    """E p and E p(1 - p) for N(0, 1) scores, by completing the square."""
    b, t = mp.mpf(b), mp.mpf(t)

    def tilted(sign, c):
        """E exp(-c |X - b|/t) over X < b (sign 1) or X > b (sign -1)."""
        exponent = -sign * c * b / t + (c / t) ** 2 / 2
        return mp.exp(exponent) * mp.ncdf(sign * b - c / t)

    first = tilted(1, 1) / 2 + mp.ncdf(-b) - tilted(-1, 1) / 2
    q = (tilted(1, 1) + tilted(-1, 1)) / 2
    return first, q - (tilted(1, 2) + tilted(-1, 2)) / 4


POLES = [c + s * 10.0**-k for c in (1, 2) for s in (-1, 1) for k in (3, 5, 7, 9, 12)]


@pytest.mark.parametrize("t", [1.0, 2.0, *POLES, 1e-3, 0.3, 1.5, 7.0, 1e5])
@pytest.mark.parametrize("b", [0.0, 1e-9, 0.3, 4.0, 40.0])
def test_laplace_moments_hold_every_digit_through_their_poles(b, t):
    M1, M2 = laplace_moments_in_fifty_digits(b, t)
    assert laplace_moments(b, t) == pytest.approx((float(M1), float(M2)), rel=2e-14, abs=0)
    flipped = float(1 - M1), float(1 - 2 * M1 + M2)
    assert laplace_moments(-b, t) == pytest.approx(flipped, rel=2e-15, abs=0)


@pytest.mark.parametrize("gamma", EXTREMES_GAMMA)
@pytest.mark.parametrize("a", EXTREMES_A)
def test_quadrature_agrees_with_the_closed_form_for_laplace_scores(a, gamma):
    result = mean_field(a, gamma, "laplace")
    moments = laplace_moments(result.barrier, result.temperature)
    assert moments == pytest.approx((a, a * (a + (1 - a) * gamma)), rel=1e-12)


@pytest.mark.parametrize("gamma", EXTREMES_GAMMA)
@pytest.mark.parametrize("a", EXTREMES_A)
def test_gaussian_fixed_point_holds_in_fifty_digits(a, gamma):
    result = mean_field(a, gamma)
    M1, V = gaussian_expectations_in_fifty_digits(result.barrier, result.temperature)
    a, gamma = mp.mpf(a), mp.mpf(gamma)
    odds = (M1 / (1 - M1)) / (a / (1 - a))
    assert float(odds - 1) == pytest.approx(0, abs=1e-12)
    # C = E p^2 - (E p)^2 = M1 (1 - M1) - V, and gamma = C/(C + V).
    assert float((M1 * (1 - M1) / V - 1) * (1 - gamma) / gamma - 1) == pytest.approx(0, abs=1e-11)


@each_distribution
@pytest.mark.parametrize(("a", "gamma"), [(0.5, 0.02), (0.1, 0.5), (0.1, 0.95), (0.9, 0.8)])
def test_a_stratified_sample_has_the_predicted_moments_and_fractions(scores, a, gamma):
    n = 50_000
    x = scores.ppf((np.arange(n) + 0.5) / n)
    eps = 0.01
    result = mean_field(a, gamma, scores, eps)
    p = stats.laplace.cdf((x - result.barrier) / result.temperature)
    assert np.mean(p) == pytest.approx(a, abs=5e-5)
    assert np.mean(p**2) == pytest.approx(a * (a + (1 - a) * gamma), abs=5e-5)
    assert np.mean(p < eps) == pytest.approx(result.frac_zero, abs=5e-5)
    assert np.mean(p > 1 - eps) == pytest.approx(result.frac_one, abs=5e-5)
    assert result.saturated == result.frac_zero + result.frac_one


@each_distribution
def test_extreme_budgets_and_hardness_are_ordinary(scores):
    result = mean_field([[1e-6], [0.5], [1 - 1e-6]], EXTREMES_GAMMA, scores)
    assert np.all(np.isfinite(result))
    assert np.all(np.diff(result.temperature, axis=1) < 0)


@pytest.mark.parametrize(("a", "gamma"), [(0.2, 0.6), (0.02, 0.1), (0.8, 0.97)])
def test_a_kink_away_from_the_median_costs_no_digits(a, gamma):
    scores = stats.triang(0.3)
    b, t = mean_field(a, gamma, scores)[:2]
    breaks = sorted({0, 0.3, *np.clip(b + t * np.linspace(-40, 40, 81), 0, 1), 1})

    def expect(function):
        def integrand(x):
            return function(stats.laplace.cdf((x - b) / t)) * scores.pdf(x)

        return sum(integrate.fixed_quad(integrand, *piece, n=12)[0] for piece in pairwise(breaks))

    assert expect(lambda p: p) == pytest.approx(a, rel=1e-12)
    assert expect(lambda p: p**2) == pytest.approx(a * (a + (1 - a) * gamma), rel=1e-12)


def test_heavy_tails_keep_the_bulk_when_the_barrier_is_far_away():
    result = mean_field(1e-6, 1e-12, "cauchy")
    assert result.barrier > 1e15
    assert result.frac_zero == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("gamma", [0.97, 0.999, 1 - 1e-8])
def test_uniform_scores_meet_the_near_binary_law_exactly(gamma):
    # What the law leaves out is exp(-1/(2 t)), which is below rounding here.
    result = mean_field(0.5, gamma, "uniform")
    assert result.temperature == pytest.approx(near_binary_temperature(0.5, gamma, 1), rel=1e-13)
    assert result.barrier == pytest.approx(0.5, rel=1e-15)


@pytest.mark.parametrize(("loc", "scale"), [(3, 10), (-5, 1e-30), (0, 1e30)])
def test_barrier_and_temperature_follow_the_scale_of_the_scores(loc, scale):
    loc *= scale
    plain = mean_field(0.1, 0.9, stats.t(3), 0.01)
    moved = mean_field(0.1, 0.9, stats.t(3, loc, scale), 0.01)
    assert moved.barrier == pytest.approx(loc + scale * plain.barrier, rel=1e-12, abs=0)
    assert moved.temperature == pytest.approx(scale * plain.temperature, rel=1e-12, abs=0)
    assert moved[2:] == pytest.approx(plain[2:], rel=1e-12)


@pytest.mark.parametrize("a", [2.0**-20, 0.125])
def test_reflected_scores_exchange_zeros_and_ones(a):
    low, high = (mean_field(share, 0.7, "laplace") for share in (a, 1 - a))
    assert high.barrier == pytest.approx(-low.barrier, rel=1e-12)
    assert high.temperature == pytest.approx(low.temperature, rel=1e-12)
    assert high.frac_zero == pytest.approx(low.frac_one, rel=1e-12, abs=0)
    assert high.frac_one == pytest.approx(low.frac_zero, rel=1e-12)


def test_values_of_the_paper():
    saturated = mean_field([0.5, 0.02], 0.9, "norm", eps=0.01).saturated
    assert saturated == pytest.approx([0.74, 0.98], abs=0.005)


def test_the_hard_endpoint_is_top_k():
    result = mean_field(0.1, 1.0)
    assert result == (
        pytest.approx(stats.norm.isf(0.1)),
        0,
        pytest.approx(0.9),
        pytest.approx(0.1),
        1,
    )
    near = mean_field(0.1, 1 - 1e-12)
    assert near == pytest.approx(result, abs=1e-10)


@pytest.mark.parametrize(
    ("a", "barrier", "fractions"),
    [(0.0005, np.inf, (1, 0, 1)), (0.3, np.inf, (0, 0, 0)), (0.9995, -np.inf, (0, 1, 1))],
)
def test_the_uniform_endpoint_is_all_saturated_or_not_at_all(a, barrier, fractions):
    result = mean_field(a, 0.0, eps=1e-3)
    assert result == (barrier, np.inf, *fractions)
    near = mean_field(a, 1e-10, eps=1e-3)
    assert np.sign(near.barrier) == np.sign(barrier)
    assert near[2:] == pytest.approx(fractions, abs=1e-12)


def test_the_uniform_endpoint_has_no_barrier_at_one_half():
    result = mean_field(0.5, 0.0)
    assert np.isnan(result.barrier)
    assert result[1:] == (np.inf, 0, 0, 0)


def test_arguments_broadcast_and_scalars_stay_scalars():
    grid = mean_field([[0.1], [0.5]], [0.3, 0.6, 1.0], eps=0.01)
    assert {field.shape for field in grid} == {(2, 3)}
    one = mean_field(0.5, 0.6, eps=0.01)
    assert {type(field) for field in one} == {float}
    assert one == tuple(field[1, 1] for field in grid)
    swept = mean_field(0.5, 0.6, eps=[0.01, 0.001])
    assert {field.shape for field in swept} == {(2,)}
    assert swept.saturated[0] == one.saturated > swept.saturated[1]
    assert sparsity_floor(0.1, [0.5, 0.9], [[0.05], [0.5]]).shape == (2, 2)
    assert type(sparsity_floor(0.1, 0.5, 0.05)) is float
    assert type(gamma_for_floor(0.1, 0.5, 0.05)) is float


@pytest.mark.parametrize("scores", [stats.norm(), stats.expon(), stats.norm(0, 1e-30)])
def test_a_density_and_cdf_pair_is_as_good_as_scipy(scores):
    pair = Density(scores.pdf, scores.cdf, scores.support())
    grid = np.array([[0.5], [1e-6]]), [0.01, 0.9, 1 - 1e-8]
    given, known = mean_field(*grid, pair), mean_field(*grid, scores)
    rounding = 1e-15 * scores.std()
    for field in ("barrier", "temperature"):
        assert getattr(given, field) == pytest.approx(getattr(known, field), rel=1e-9, abs=rounding)
    assert np.array(given[2:]) == pytest.approx(np.array(known[2:]), abs=1e-12)


def test_two_narrow_peaks_are_found():
    peaks = stats.norm(-50, 0.1), stats.norm(50, 0.1)
    pair = Density(
        lambda x: 0.9 * peaks[0].pdf(x) + 0.1 * peaks[1].pdf(x),
        lambda x: 0.9 * peaks[0].cdf(x) + 0.1 * peaks[1].cdf(x),
    )
    result = mean_field(0.1, [0.5, 1 - 1e-8], pair)
    assert result.frac_zero == pytest.approx([0, 0.9], abs=1e-9)
    # Peaks far narrower than t act as two atoms, of which the two moments give the values.
    low, high = stats.laplace.cdf((np.array([-50, 50]) - result.barrier[0]) / result.temperature[0])
    assert 0.9 * low + 0.1 * high == pytest.approx(0.1, rel=1e-4)
    assert 0.9 * low**2 + 0.1 * high**2 == pytest.approx(0.055, rel=1e-4)


@pytest.mark.parametrize(
    ("distribution", "message"),
    [
        ("no such name", "got 'no such name'"),
        ("t", "without shape parameters"),
        (stats.poisson(3), "continuous"),
        (Density(lambda x: 1.5 * stats.norm.pdf(x), stats.norm.cdf), "not that of its cdf"),
        (Density(stats.norm(0.3).pdf, stats.norm.cdf), "not that of its cdf"),
        (
            Density(
                lambda x: 1 / (x * np.log(x) ** 2), lambda x: 1 - 1 / np.log(x), (np.e, np.inf)
            ),
            "tail too heavy",
        ),
        (stats.norm(1e15, 1), "shift the scores"),
        (stats.gamma(0.01), "integral 1"),
    ],
)
def test_what_quadrature_cannot_do_is_refused(distribution, message):
    with pytest.raises(ValueError, match=message):
        mean_field(0.3, 0.5, distribution)


def test_a_fixed_point_that_does_not_exist_is_an_error():
    class Jumping:
        scale = 1.0

        def isf(self, a):
            return 0.0

        def moments(self, b, t):
            return Moments(-b, 5.0 if t < 1.7 else -5.0)

    with pytest.raises(ArithmeticError, match=r"gamma = 0.5 at a = 0.5"):
        _fixed_point(Jumping(), 0.5, 0.5)


@each_distribution
@pytest.mark.parametrize("a", [0.1, 0.6])
def test_near_binary_laws_are_approached(scores, a):
    gamma = 1 - np.array([1e-2, 1e-3, 1e-5])
    result = mean_field(a, gamma, scores)
    t = near_binary_temperature(a, gamma, scores.pdf(scores.isf(a)))
    unsaturated = near_binary_unsaturated(a, gamma)
    for exact, law in ((result.temperature, t), (1 - result.saturated, unsaturated)):
        error = np.abs(exact / law - 1)
        assert error[-1] < 1e-4
        assert np.all(error <= np.maximum(50 * (1 - gamma), 1e-9))


@quick
@given(fraction, hardness, hardness, threshold)
def test_floor_grows_with_gamma_up_to_beta(a, low, high, eps):
    low, high = sorted((low, high))
    if eps <= a + (1 - a) * low:
        assert sparsity_floor(a, low, eps) <= sparsity_floor(a, high, eps) + 1e-14
    if eps > a + (1 - a) * high:
        assert sparsity_floor(a, low, eps) >= sparsity_floor(a, high, eps) - 1e-14


@quick
@given(fraction, hardness, threshold, threshold)
def test_floor_grows_with_eps(a, gamma, low, high):
    low, high = sorted((low, high))
    assert sparsity_floor(a, gamma, low) <= sparsity_floor(a, gamma, high) + 1e-12


@quick
@given(fraction, hardness, threshold)
def test_extremal_profile_has_both_moments_and_attains_the_floor(a, gamma, eps):
    levels, masses = extremal_profile(a, gamma, eps)
    assert np.all(np.diff(levels) >= 0)
    assert np.all((levels >= -1e-12) & (levels <= 1))
    assert np.all((masses >= -1e-12) & (masses <= 1 + 1e-12))
    assert masses.sum() == pytest.approx(1, abs=1e-12)
    assert masses @ levels == pytest.approx(a, abs=1e-12)
    assert masses @ levels**2 == pytest.approx(a * (a + (1 - a) * gamma), abs=1e-12)
    assert masses[levels < eps].sum() == pytest.approx(sparsity_floor(a, gamma, eps), abs=1e-12)


@pytest.mark.parametrize(
    ("gamma", "eps", "levels", "floor"),
    [
        (0.7, 0.05, [0.06, 1], 0),
        (0.85, 0.3, [0, 0.3, 1], 0.72),
        (0.3125, 0.7, [0.1, 0.7], 5 / 6),
    ],
)
def test_each_branch_of_the_floor(gamma, eps, levels, floor):
    assert extremal_profile(0.2, gamma, eps)[0] == pytest.approx(levels)
    assert sparsity_floor(0.2, gamma, eps) == pytest.approx(floor)


@pytest.mark.parametrize("gamma", [0.0, 1.0])
@pytest.mark.parametrize("eps", [0.1, 0.2, 0.6, 1.0])
def test_floor_at_the_endpoints(gamma, eps):
    hard, uniform = 0.8, float(eps > 0.2)
    assert sparsity_floor(0.2, gamma, eps) == pytest.approx(hard if gamma else uniform)
    levels, masses = extremal_profile(0.2, gamma, eps)
    assert masses @ levels == pytest.approx(0.2)
    assert masses[levels < eps].sum() == pytest.approx(hard if gamma else uniform)


@quick
@given(st.lists(st.floats(0, 1), min_size=1, max_size=30), threshold)
def test_no_mask_is_below_the_floor(values, eps):
    p = np.array([0.0, 1.0, *values])
    a = p.mean()
    gamma = np.clip(p.var() / (a * (1 - a)), 0, 1)
    assert np.mean(p < eps) >= sparsity_floor(a, gamma, eps) - 1e-9


@each_distribution
def test_mean_field_is_above_the_floor(scores):
    gamma = np.array([0.05, 0.5, 0.95])
    eps = np.array([[0.001], [0.05], [0.4]])
    assert np.all(mean_field(0.1, gamma, scores, eps).frac_zero >= sparsity_floor(0.1, gamma, eps))


@quick
@given(fraction, st.floats(0, 1), threshold)
def test_gamma_for_floor_inverts_the_floor(a, share, eps):
    target = share * (1 - a)
    gamma = gamma_for_floor(a, target, eps)
    assert 0 <= gamma <= 1
    beyond = np.linspace(gamma, 1, 20)
    assert np.all(sparsity_floor(a, beyond, eps) >= target - 1e-9)
    if gamma > 0:
        assert sparsity_floor(a, gamma, eps) == pytest.approx(target, abs=1e-9)


@pytest.mark.parametrize(("a", "target"), [(0.9, 0.1), (0.1, 0.9), (0.3, 0.7)])
def test_the_largest_floor_needs_the_hard_mask(a, target):
    assert gamma_for_floor(a, target, 0.05) == pytest.approx(1, abs=1e-15)
    assert gamma_for_floor(a, target, 0.05) <= 1


@pytest.mark.parametrize("name", ["norm", "uniform", "cauchy"])
def test_gamma_for_saturation_inverts_the_mean_field(name):
    a, target, eps = np.array([[0.5], [0.03]]), np.array([0.2, 0.95, 0.9999]), 0.01
    gamma = gamma_for_saturation(a, target, eps, name)
    result = mean_field(a, gamma, name, eps)
    assert result.saturated == pytest.approx(np.broadcast_to(target, (2, 3)), abs=1e-9)
    assert np.all(mean_field(a, (1 + gamma) / 2, name, eps).saturated > target)


def test_gamma_for_saturation_where_saturation_is_not_monotone():
    # Below eps the uniform mask is all saturated, and a spread mask is not.
    a, eps = 0.005, 0.01
    gamma = np.array([0, 0.01, 0.5])
    assert np.argmin(mean_field(a, gamma, eps=eps).saturated) == 1
    assert gamma_for_saturation(a, 0.8, eps) == 0
    late = gamma_for_saturation(a, 0.95, eps)
    assert mean_field(a, late, eps=eps).saturated == pytest.approx(0.95, abs=1e-9)
    assert np.all(mean_field(a, np.linspace(late + 1e-6, 1, 7), eps=eps).saturated > 0.95)


def test_gamma_for_saturation_at_the_ends():
    assert gamma_for_saturation(0.1, 1.0, 0.01) == 1
    assert gamma_for_saturation(0.1, 0.0, 0.01) == 0
    assert gamma_for_saturation(1e-6, 0.5, 0.01) == 0
    # Power tails leave a few saturated scores however uniform the mask is.
    assert 0 < gamma_for_saturation(0.1, 1e-11, 0.01, "cauchy") < 1e-8


INVALID = [
    (mean_field, {"a": 0.0, "gamma": 0.5}, r"a must be in \(0, 1\), got 0.0"),
    (mean_field, {"a": np.nan, "gamma": 0.5}, r"a must be in \(0, 1\), got nan"),
    (mean_field, {"a": 0.5, "gamma": [0.2, 1.5]}, r"gamma must be in \[0, 1\], got 1.5"),
    (mean_field, {"a": 0.5, "gamma": 1e-20}, "gamma must be 0 or at least 1e-12, got 1e-20"),
    (mean_field, {"a": 0.5, "gamma": 0.5, "eps": 0.5}, r"eps must be in \(0, 0.5\), got 0.5"),
    (laplace_moments, {"b": 0.0, "t": 0.0}, r"t must be in \(0, inf\), got 0.0"),
    (laplace_moments, {"b": np.inf, "t": 1.0}, r"b must be in \(-inf, inf\), got inf"),
    (sparsity_floor, {"a": 0.5, "gamma": 0.5, "eps": 0.0}, r"eps must be in \(0, 1\], got 0.0"),
    (extremal_profile, {"a": 1.0, "gamma": 0.5, "eps": 0.1}, r"a must be in \(0, 1\), got 1.0"),
    (
        gamma_for_floor,
        {"a": 0.2, "target": 0.81, "eps": 0.1},
        r"target must be in \[0, 1 - a\], got 0.81",
    ),
    (gamma_for_floor, {"a": 0.2, "target": -1, "eps": 0.1}, "target must be in .* got -1.0"),
    (
        gamma_for_saturation,
        {"a": 0.2, "target": 1.1, "eps": 0.1},
        r"target must be in \[0, 1\], got 1.1",
    ),
    (
        near_binary_temperature,
        {"a": 0.2, "gamma": 0.9, "density_at_quantile": 0},
        "density_at_quantile",
    ),
    (near_binary_unsaturated, {"a": 0.2, "gamma": 0.9, "eps": 0.6}, "eps must be in .* got 0.6"),
]


@pytest.mark.parametrize(("function", "arguments", "message"), INVALID)
def test_arguments_outside_their_domain_are_named(function, arguments, message):
    with pytest.raises(ValueError, match=message):
        function(**arguments)
