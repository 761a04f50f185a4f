"""The registry: each operator with its source, its guarantees and its softness parameter."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

from torch import Tensor

from laprune.baselines.box_section import box_section
from laprune.baselines.dftopk import dftopk
from laprune.baselines.hard import hard_topk_ste
from laprune.baselines.lapsum import lapsum_sort
from laprune.baselines.paper import paper_topk
from laprune.baselines.sander import sander_dykstra, sander_pav
from laprune.baselines.sorting import bitonic_topk, diffsort_topk, neuralsort_topk, softsort_topk
from laprune.baselines.sparsemax import budget_sparsemax
from laprune.baselines.transport import sinkhorn_topk

__all__ = ["REGISTRY", "Baseline", "available", "get", "names"]

Operator: TypeAlias = Callable[[Tensor, float, float], Tensor]


@dataclass(frozen=True)
class Baseline:
    """A soft top-k operator and what may be expected of it.

    Call it as `baseline(scores, k)` or `baseline(scores, k, softness)`.
    """

    name: str
    function: Operator
    """`(scores, k, softness) -> mask`, rows along the last dimension."""
    source: str
    """Where the operator was published."""
    exact_mass: bool
    """Every row of the mask sums to k, up to rounding or the solver's tolerance."""
    in_unit_range: bool
    """Every value of the mask lies in [0, 1], up to rounding."""
    scale_free: bool
    """Multiplying the scores by any positive number leaves the mask as it is."""
    softness_name: str
    """The softness parameter's symbol in its paper."""
    softness_meaning: str
    """What the softness is and which way it works."""
    default_softness: float
    """The LaPrune paper's value for `paper` and `lapsum`, the usual one for all others."""
    max_n: int
    """The longest row that is sensible on one machine."""
    requires: str | None = None
    """The optional package it needs."""
    note: str = ""
    """Where the guarantees end."""

    def __call__(self, scores: Tensor, k: float, softness: float | None = None) -> Tensor:
        return self.function(scores, k, self.default_softness if softness is None else softness)


_QUADRATIC = "weight of the quadratic regularisation; hard top-k at 0"

_BASELINES = (
    Baseline(
        name="paper",
        function=paper_topk,
        source="LaPrune: Newton with a nested-bisection fallback, as its paper describes",
        exact_mass=True,
        in_unit_range=True,
        scale_free=False,
        softness_name="gamma",
        softness_meaning="normalised second moment; uniform at 0, hard top-k at 1",
        default_softness=0.9,
        max_n=10**8,
        note="mass to 1e-4 of max(k, 1) for scores near zero: no pivot keeps the digits of others; "
        "scale-free while log t stays within [-12, 8]",
    ),
    Baseline(
        name="lapsum",
        function=lapsum_sort,
        source="LapSum, 2025: Laplace-CDF barrier by sorting and logcumsumexp",
        exact_mass=True,
        in_unit_range=True,
        scale_free=False,
        softness_name="t",
        softness_meaning="temperature in units of the scores; hard top-k at 0",
        default_softness=1.0,
        max_n=10**8,
    ),
    Baseline(
        name="dftopk",
        function=dftopk,
        source="Zhu et al., 2025, Differentiable Fast Top-K Selection (arXiv:2510.11472)",
        exact_mass=False,
        in_unit_range=True,
        scale_free=False,
        softness_name="tau",
        softness_meaning="width of the logistic in units of the scores; hard top-k at 0",
        default_softness=1.0,
        max_n=10**8,
    ),
    Baseline(
        name="hard_ste",
        function=hard_topk_ste,
        source="hard top-k with the straight-through estimator of Bengio et al., 2013",
        exact_mass=True,
        in_unit_range=True,
        scale_free=True,
        softness_name="unused",
        softness_meaning="ignored",
        default_softness=0.0,
        max_n=10**8,
        note="the gradient is the identity, not the derivative of the mask",
    ),
    Baseline(
        name="neuralsort",
        function=neuralsort_topk,
        source="Grover et al., 2019, NeuralSort",
        exact_mass=True,
        in_unit_range=False,
        scale_free=False,
        softness_name="tau",
        softness_meaning="temperature of the row softmax, in units of the scores",
        default_softness=1.0,
        max_n=10**5,
        note="k n work, in chunks; values may exceed one",
    ),
    Baseline(
        name="softsort",
        function=softsort_topk,
        source="Prillo and Eisenschlos, 2020, SoftSort",
        exact_mass=True,
        in_unit_range=False,
        scale_free=False,
        softness_name="tau",
        softness_meaning="temperature of the row softmax, in units of the scores",
        default_softness=1.0,
        max_n=10**5,
        note="k n work, in chunks; values may exceed one",
    ),
    Baseline(
        name="bitonic",
        function=bitonic_topk,
        source="Petersen et al., 2021 and 2022, sorting networks with Cauchy swaps, matrix-free",
        exact_mass=True,
        in_unit_range=True,
        scale_free=False,
        softness_name="1/steepness",
        softness_meaning="width of a comparator's swap in units of the scores",
        default_softness=0.1,
        max_n=10**5,
        note="log^2(n)/2 layers are kept for the gradient",
    ),
    Baseline(
        name="diffsort",
        function=diffsort_topk,
        source="Petersen et al., 2021 and 2022, sorting networks, the authors' package",
        exact_mass=True,
        in_unit_range=True,
        scale_free=False,
        softness_name="1/steepness",
        softness_meaning="width of a comparator's swap in units of the scores",
        default_softness=0.1,
        max_n=1024,
        requires="diffsort",
        note="an n x n matrix for every layer",
    ),
    Baseline(
        name="sinkhorn",
        function=sinkhorn_topk,
        source="Xie et al., 2020, two-bin entropic optimal transport",
        exact_mass=True,
        in_unit_range=False,
        scale_free=False,
        softness_name="epsilon",
        softness_meaning="entropic regularisation of the squared cost; hard top-k at 0",
        default_softness=0.1,
        max_n=10**7,
        note="values in [0, 1] at convergence of its 200 iterations; differentiable once",
    ),
    Baseline(
        name="sander_pav",
        function=sander_pav,
        source="Sander et al., 2023, sparse top-k by isotonic regression, PAV, p = 2",
        exact_mass=True,
        in_unit_range=True,
        scale_free=False,
        softness_name="lambda",
        softness_meaning=_QUADRATIC,
        default_softness=1.0,
        max_n=10**7,
        note="on the CPU; compiled when numba is installed",
    ),
    Baseline(
        name="sander_dykstra",
        function=sander_dykstra,
        source="Sander et al., 2023, sparse top-k by isotonic regression, Dykstra, p = 2",
        exact_mass=True,
        in_unit_range=True,
        scale_free=False,
        softness_name="lambda",
        softness_meaning=_QUADRATIC,
        default_softness=1.0,
        max_n=10**7,
        note="equal to sander_pav at convergence; 500 steps settle some 20 fractional entries",
    ),
    Baseline(
        name="budget_sparsemax",
        function=budget_sparsemax,
        source="Malaviya et al., 2018 / entmax: sparsemax with a budget, by bisection",
        exact_mass=True,
        in_unit_range=True,
        scale_free=False,
        softness_name="lambda",
        softness_meaning=_QUADRATIC,
        default_softness=1.0,
        max_n=10**7,
        requires="entmax",
    ),
    Baseline(
        name="box_section",
        function=box_section,
        source="Blondel et al., 2021, jaxopt: projection onto a box section, by bisection",
        exact_mass=True,
        in_unit_range=True,
        scale_free=False,
        softness_name="lambda",
        softness_meaning=_QUADRATIC,
        default_softness=1.0,
        max_n=10**7,
        requires="jaxopt",
        note="mass to 1e-5, the package's tolerance; on the CPU, through JAX",
    ),
)

REGISTRY: Mapping[str, Baseline] = MappingProxyType({item.name: item for item in _BASELINES})


def names() -> tuple[str, ...]:
    """Names of all baselines, installed or not.

    >>> names()[:3]
    ('paper', 'lapsum', 'dftopk')
    """
    return tuple(REGISTRY)


def get(name: str) -> Baseline:
    """The baseline of that name.

    >>> get("lapsum").exact_mass
    True
    """
    try:
        return REGISTRY[name]
    except KeyError:
        raise KeyError(f"no baseline {name!r}; there are {', '.join(REGISTRY)}") from None


def available(name: str) -> bool:
    """Whether the baseline can be called, that is, whether its optional package is installed.

    >>> available("lapsum")
    True
    """
    package = get(name).requires
    return package is None or importlib.util.find_spec(package) is not None
