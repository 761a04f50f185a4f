"""Feature selection: a gate for any PyTorch model, and a scikit-learn transformer around it.

>>> import torch
>>> from laprune.select import FeatureGate
>>> gate = FeatureGate(n_features=4, k=2)
>>> gate(torch.ones(3, 4)).shape
torch.Size([3, 4])

The gate needs PyTorch alone, `LaPruneSelector` scikit-learn: ``pip install 'laprune[select]'``.
"""

from typing import TYPE_CHECKING, Any

from .gate import FeatureGate

if TYPE_CHECKING:
    from .selector import LaPruneSelector

__all__ = ["FeatureGate", "LaPruneSelector"]


def __getattr__(name: str) -> Any:
    # On demand, so that the gate works where scikit-learn is not installed.
    if name != "LaPruneSelector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from .selector import LaPruneSelector
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "sklearn":
            raise
        raise ImportError(
            "LaPruneSelector needs scikit-learn: pip install 'laprune[select]'"
        ) from error
    return LaPruneSelector
