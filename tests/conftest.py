"""Fixtures and measures that the operator's tests share."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from laprune.backends import cpu, cuda, reference, use
from laprune.studies.inputs import budgets, draw, hardnesses


class OnGPU(ModuleType):
    """The CUDA backend for tests that hold their scores on the host; one plan for all short rows,
    since each is compiled anew."""

    @staticmethod
    def _there_and_back(f: Any, args: tuple[Any, ...]) -> tuple[Tensor | None, ...]:
        how = cuda.Plan(16, 4, 2) if args[0].shape[-1] <= 1000 else None
        found = f(*(x.cuda() if isinstance(x, Tensor) else x for x in args), how=how)
        return tuple(None if x is None else x.cpu() for x in found)

    def solve(self, *args: Any) -> Any:
        return self._there_and_back(cuda.solve, args)

    def vjp(self, *args: Any) -> Any:
        return self._there_and_back(cuda.vjp, args)


BACKENDS: dict[str, ModuleType] = {"cpu": cpu, "reference": reference}
if torch.cuda.is_available():
    BACKENDS["cuda"] = OnGPU("cuda")
DTYPES = {"float64": torch.float64, "float32": torch.float32}

LARGEST_GAMMA = {torch.float64: 1 - 1e-8, torch.float32: 1 - 1e-4}
MASS_ERROR = {torch.float64: 1e-12, torch.float32: 1e-6}
HARDNESS_ERROR = {torch.float64: 1e-7, torch.float32: 1e-3}


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tests run side by side: small operations on many threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every call inside the test goes to this backend."""
    if request.param == "cpu" and cpu.library() is None:
        pytest.skip("the native backend is not built")
    with use(BACKENDS[request.param]):
        yield request.param


@pytest.fixture(params=DTYPES.values(), ids=DTYPES)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def problem(
    name: str, rows: int, n: int, dtype: torch.dtype = torch.float64, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, budgets and hardnesses of the registry."""
    return (
        draw(name, rows, n, seed, dtype),
        budgets(rows, n, seed),
        hardnesses(rows, LARGEST_GAMMA[dtype], seed),
    )


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def mass_error(p: Tensor, k: Tensor) -> Tensor:
    return ((p.double().sum(-1) - k) / k).abs()


def realised(p: Tensor) -> tuple[Tensor, Tensor]:
    """Gamma and 1 - gamma of a mask, in float64 and without cancellation."""
    p = p.double()
    spread = (p - p.mean(-1, keepdim=True)).square().sum(-1)
    softness = (p * (1 - p)).sum(-1)
    return spread / (spread + softness), softness / (spread + softness)


def hardness_error(p: Tensor, gamma: Tensor) -> Tensor:
    """The larger relative error of gamma and of 1 - gamma."""
    found, rest = realised(p)
    return torch.maximum((found / gamma - 1).abs(), (rest / (1 - gamma) - 1).abs())


def sharpest(r: Tensor, k: Tensor) -> Tensor:
    """The t -> 0 limit of the mask: scores equal to the k-th largest share what is left."""
    ranked = r.sort(-1, descending=True).values
    threshold = ranked.gather(-1, k.ceil().long()[..., None] - 1)
    above, tied = (r > threshold).double(), (r == threshold).double()
    left = k[..., None] - above.sum(-1, keepdim=True)
    return above + tied * left / tied.sum(-1, keepdim=True)


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """Inside, whatever makes the host wait for the GPU is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mode calls itself a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
