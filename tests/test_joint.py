"""One budget over several tensors: as one row of all their entries."""

from __future__ import annotations

import math
import warnings
from typing import NamedTuple

import pytest
import torch
from conftest import HARDNESS_ERROR, LARGEST_GAMMA, MASS_ERROR, hardness_error, mass_error, normal
from torch import Tensor

import laprune
from laprune import Status
from laprune.pieces import topk_pieces
from laprune.studies.inputs import REGISTRY, budgets, draw, hardnesses

INF, NAN = math.inf, math.nan
SIZES = (1, 0, 17, 200, 3, 63)


def cut(row: Tensor, sizes: tuple[int, ...] = SIZES) -> list[Tensor]:
    return [x.clone() for x in row.split(sizes, -1)]


def joint(row: Tensor, k: float, gamma: float, **kwargs: object) -> Tensor:
    return torch.cat(laprune.global_topk(cut(row), k, gamma, **kwargs), -1)


def test_structure_and_shapes_are_kept() -> None:
    a, b, c = normal(2, 3), normal(4, seed=1).float(), normal(1, 2, 2, seed=2).bfloat16()
    whole = laprune.soft_topk(torch.cat([x.double().flatten() for x in (a, b, c)]), 5, 0.7)
    as_list = laprune.global_topk([a, b, c], 5, 0.7)
    assert isinstance(as_list, list)
    for p, x in zip(as_list, (a, b, c), strict=True):
        assert p.shape == x.shape
        assert p.dtype == x.dtype
    torch.testing.assert_close(as_list[0].flatten(), whole[:6])
    torch.testing.assert_close(as_list[1], whole[6:10].float())
    as_tuple = laprune.global_topk((a, b, c), 5, 0.7)
    as_dict = laprune.global_topk({"z": a, "y": b, "x": c}, 5, 0.7)
    assert isinstance(as_tuple, tuple)
    assert list(as_dict) == ["z", "y", "x"]
    for one, two, three in zip(as_list, as_tuple, as_dict.values(), strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, three)


@pytest.mark.parametrize("name", REGISTRY)
def test_every_kind_of_row_holds_its_budget(name: str, dtype: torch.dtype, backend: str) -> None:
    rows, n = 24, sum(SIZES)
    r = draw(name, rows, n, 3, dtype)
    k, gamma = budgets(rows, n, 3), hardnesses(rows, LARGEST_GAMMA[dtype], 3)
    *masks, _, info = topk_pieces(k, gamma, False, "", (0,) * len(SIZES), *cut(r))
    p, status = torch.cat(masks, -1), info[:, 0]
    solved = status == Status.CONVERGED
    assert not (status == Status.STALLED).any()
    assert (mass_error(p, k) <= MASS_ERROR[dtype])[solved].all()
    assert (hardness_error(p, gamma) <= HARDNESS_ERROR[dtype])[solved].all()
    alone = laprune.solve(r, k, gamma)
    assert torch.equal(status, alone.status)
    torch.testing.assert_close(p, alone.mask, rtol=0, atol=2e-3 if dtype == torch.float32 else 1e-6)


@pytest.mark.parametrize("k", [5, 700, 3000.5, 99_000])
def test_long_rows_start_from_a_sample(k: float, dtype: torch.dtype, backend: str) -> None:
    r = normal(100_000, dtype=dtype)
    sizes = (10, 60_000, 0, 39_990)
    rows = [x[None] for x in cut(r, sizes)]
    numbers = (torch.tensor([x], dtype=torch.float64) for x in (k, 0.9))
    *masks, _, info = topk_pieces(*numbers, False, "", (0,) * 4, *rows)
    torch.testing.assert_close(torch.cat(masks, -1)[0], laprune.soft_topk(r, k, 0.9))
    assert info[0, 1] <= 6
    if backend == "reference":  # native rows are solved in part on a copy of their scores
        assert info[0, 1] == laprune.solve(r, k, 0.9).passes


@pytest.mark.parametrize("length", [1, 63, 300, 70_000])
def test_gradients_are_those_of_one_row(length: int, dtype: torch.dtype, backend: str) -> None:
    n = length + 40
    tensors = [x.requires_grad_() for x in cut(normal(n, dtype=dtype), (30, length, 10))]
    k = torch.tensor(0.3 * n, dtype=torch.float64, requires_grad=True)
    gamma = torch.tensor(0.8, dtype=torch.float64, requires_grad=True)
    weights = normal(n, seed=5, dtype=dtype)
    found = torch.cat(laprune.global_topk(tensors, k, gamma))
    one = laprune.soft_topk(torch.cat(tensors), k, gamma)
    torch.testing.assert_close(found, one)
    inputs = (*tensors, k, gamma)
    for x, y in zip(
        torch.autograd.grad((found * weights).sum(), inputs),
        torch.autograd.grad((one * weights).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(x, y, rtol=1e-4 if dtype == torch.float32 else 1e-8, atol=1e-6)


def test_gradcheck_twice(backend: str) -> None:
    a, b, k, g = (
        x.requires_grad_()
        for x in (normal(3), normal(2, 2, seed=1), *torch.tensor([2.5, 0.6]).double())
    )

    def masks(a: Tensor, b: Tensor, k: Tensor, gamma: Tensor) -> tuple[Tensor, ...]:
        return laprune.global_topk((a, b), k, gamma)

    assert torch.autograd.gradcheck(masks, (a, b, k, g))
    assert torch.autograd.gradgradcheck(masks, (a, b, k, g))


def test_fixed_temperature(backend: str) -> None:
    r = normal(2, sum(SIZES)).requires_grad_()
    k, t = (
        torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in ([9.0, 80.5], [0.3, 0.01])
    )
    weights = normal(2, sum(SIZES), seed=4)
    *masks, _, _ = topk_pieces(k, t, True, "", (0,) * len(SIZES), *r.split(SIZES, -1))
    one = laprune.lapsum_topk(r, k, t)
    found = torch.cat(masks, -1)
    torch.testing.assert_close(found, one)
    for x, y in zip(
        torch.autograd.grad((found * weights).sum(), (r, k, t)),
        torch.autograd.grad((one * weights).sum(), (r, k, t)),
        strict=True,
    ):
        torch.testing.assert_close(x, y, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("k", [0, 1, 40, 100.25, 283.5, 284])
def test_hard_masks_serve_the_lowest_index_first(
    k: float, dtype: torch.dtype, backend: str
) -> None:
    for r in (
        draw("integers", 1, 284)[0],
        normal(284),
        -0.0 * normal(284),
        draw("relu", 1, 284)[0],
    ):
        r = r.to(dtype)
        assert torch.equal(joint(r, k, 1.0), laprune.hard_topk(r, k))


@pytest.mark.parametrize(
    ("change", "gamma"),
    [
        (lambda r: r, 0.0),
        (lambda r: r * 0 + 3, 0.9),
        (lambda r: r.round(), 1 - 1e-7),
        (lambda r: torch.where(r > 0.5, -INF, r), 0.8),
        (lambda r: torch.where(r > 2, NAN, r), 0.8),
        (lambda r: torch.where(r > 2, INF, r), 0.0),
        (lambda r: torch.where(r < 1.5, -INF, r), 0.5),
        (lambda r: torch.where(r < 1.5, -INF, r), 1.0),
    ],
    ids=["uniform", "constant", "tied", "masked", "nan", "inf", "infeasible", "infeasible hard"],
)
@pytest.mark.filterwarnings("ignore:laprune")
def test_edges_are_those_of_one_row(change, gamma: float, backend: str) -> None:
    r = change(normal(sum(SIZES))).requires_grad_()
    weights = normal(sum(SIZES), seed=1)
    k = torch.tensor(40.5, dtype=torch.float64, requires_grad=True)
    h = torch.tensor(gamma, dtype=torch.float64, requires_grad=True)
    found = torch.cat(laprune.global_topk(r.split(SIZES), k, h))
    one = laprune.soft_topk(r, k, h)
    torch.testing.assert_close(found, one, equal_nan=True)
    for x, y in zip(
        torch.autograd.grad((found * weights).sum(), (r, k, h)),
        torch.autograd.grad((one * weights).sum(), (r, k, h)),
        strict=True,
    ):
        torch.testing.assert_close(x, y, equal_nan=True)


def test_masks_exclude() -> None:
    r, may = normal(sum(SIZES)), normal(sum(SIZES), seed=1) > -0.5
    found = torch.cat(laprune.global_topk(cut(r), 30, 0.8, masks=cut(may)))
    torch.testing.assert_close(found, laprune.soft_topk(r, 30, 0.8, mask=may))
    some = [None, None, None, may[18:218], None, None]
    assert (
        torch.cat(laprune.global_topk(cut(r), 30, 0.8, masks=some))[18:218][~may[18:218]]
        .eq(0)
        .all()
    )


def test_straight_through_is_hard_forward_and_soft_backward() -> None:
    tensors = [x.requires_grad_() for x in cut(normal(sum(SIZES)))]
    weights = normal(sum(SIZES), seed=1)
    ste, soft = (torch.cat(laprune.global_topk(tensors, 30, 0.8, mode=m)) for m in ("ste", "soft"))
    torch.testing.assert_close(ste, laprune.hard_topk(torch.cat(tensors), 30))
    for x, y in zip(
        torch.autograd.grad((ste * weights).sum(), tensors),
        torch.autograd.grad((soft * weights).sum(), tensors),
        strict=True,
    ):
        torch.testing.assert_close(x, y)


def test_compiles_into_one_graph() -> None:
    tensors = [x.requires_grad_() for x in cut(normal(sum(SIZES)))]
    weights = cut(normal(sum(SIZES), seed=1))

    def loss(tensors: list[Tensor], gamma: Tensor) -> Tensor:
        masks = laprune.global_topk(tensors, 30, gamma)
        return sum((p * w).sum() for p, w in zip(masks, weights, strict=True))

    gamma = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    wanted = torch.autograd.grad(loss(tensors, gamma), (*tensors, gamma))
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for x, y in zip(
        torch.autograd.grad(compiled(tensors, gamma), (*tensors, gamma)), wanted, strict=True
    ):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([], 1, 0.5), ValueError, "tensors are empty"),
        (([torch.zeros(0)], 0, 0.5), ValueError, "no entries"),
        ((torch.zeros(3), 1, 0.5), TypeError, "tensors must be a list, tuple or dict, got Tensor"),
        (([torch.zeros(3).int()], 1, 0.5), TypeError, "every tensor must be a float64"),
        (([torch.zeros(3)], 4, 0.5), ValueError, r"k must lie in \[0, 3\], got 4"),
        (([torch.zeros(3)], torch.tensor(4.0), 0.5), ValueError, r"k must lie in \[0, 3\], got 4"),
        (([torch.zeros(3)], 1, 1.5), ValueError, r"gamma must lie in \[0, 1\], got 1.5"),
        (([torch.zeros(3)], torch.ones(2), 0.5), ValueError, "k must have one element"),
    ],
)
def test_bad_arguments_are_refused(arguments, error, message: str) -> None:
    with pytest.raises(error, match=message):
        laprune.global_topk(*arguments)


def test_bad_masks_are_refused() -> None:
    x = torch.arange(3.0)
    with pytest.raises(ValueError, match="masks must have the structure of tensors"):
        laprune.global_topk([x], 1, 0.5, masks=[None, None])
    with pytest.raises(TypeError, match="mask must be a boolean tensor"):
        laprune.global_topk([x], 1, 0.5, masks=[x])
    with pytest.raises(ValueError, match="mode must be"):
        laprune.global_topk([x], 1, 0.5, mode="hard")


def test_infeasible_budgets_warn() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        laprune.global_topk([torch.tensor([1.0, -INF])], 2, 0.5)
    assert "fewer eligible entries than k" in str(seen[0].message)


def test_named_tuples_come_back_as_such() -> None:
    class Pair(NamedTuple):
        a: Tensor
        b: Tensor

    found = laprune.global_topk(Pair(normal(3), normal(4)), 2, 0.5)
    assert type(found) is Pair
    assert (found.a.sum() + found.b.sum()).item() == pytest.approx(2)


# Raised inside torch, when it loads formulas of its own.
@pytest.mark.filterwarnings("ignore:.torch.jit.script")
def test_transforms_that_are_missing_are_refused() -> None:
    a, b = normal(2, 3), normal(2, 4, seed=1)
    with pytest.raises(NotImplementedError, match="neither vmap nor forward mode"):
        torch.func.vmap(lambda x, y: laprune.global_topk([x, y], 3, 0.5)[0])(a, b)
    with pytest.raises(NotImplementedError, match="neither vmap nor forward mode"):
        torch.func.jvp(lambda x: laprune.global_topk([x, b], 3, 0.5)[0], (a,), (a,))
    slope = torch.func.grad(lambda x: laprune.global_topk([x, b], 3, 0.5)[0].square().sum())(a)
    assert slope.abs().sum() > 0
