"""What a hardness gamma does to a mask, before any mask is computed.

Scores follow a density rho with CDF F. The population mask is p(x) = sigma((x - b)/t), with sigma
the Laplace CDF, and the barrier b and temperature t solve the two-moment fixed point

    E p = a        E p^2 = beta a        beta = a + (1 - a) gamma

Three kinds of answer: the fixed point itself (`mean_field`), its limit as gamma -> 1
(`near_binary_temperature`, `near_binary_unsaturated`) and what holds for every score
distribution (`sparsity_floor`, attained by `extremal_profile`). `gamma_for_saturation` and
`gamma_for_floor` turn them round: which gamma gives the sparsity that is wanted?

Needs numpy and scipy only. Arguments broadcast as arrays; scalars give Python floats.
"""

from ._floor import extremal_profile, gamma_for_floor, sparsity_floor
from ._laplace import laplace_moments
from ._mean_field import (
    MeanField,
    gamma_for_saturation,
    mean_field,
    near_binary_temperature,
    near_binary_unsaturated,
)
from ._population import Density

__all__ = [
    "Density",
    "MeanField",
    "extremal_profile",
    "gamma_for_floor",
    "gamma_for_saturation",
    "laplace_moments",
    "mean_field",
    "near_binary_temperature",
    "near_binary_unsaturated",
    "sparsity_floor",
]
