"""Rows spread over real processes: as the answer of one process, gradients included.

A set of processes costs seconds to start, so each runs many checks.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from conftest import normal
from torch import Tensor, nn

import laprune
from laprune import Status, distributed
from laprune.backends import reference, use
from laprune.prune import GlobalPruner
from laprune.schedules import linear
from laprune.studies.inputs import draw

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs torch's gloo"
)


def start(check: Callable[[int, int], None], world: int, folder: Path, seconds: float = 60) -> None:
    """Run check(rank, world) in that many processes; an error in any of them is raised here."""
    mp.spawn(_enter, (check, world, str(folder / "meet"), seconds), nprocs=world)


def _enter(
    rank: int, check: Callable[[int, int], None], world: int, meet: str, seconds: float
) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("error")
    os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group(
        "gloo", f"file://{meet}", rank=rank, world_size=world, timeout=timedelta(seconds=seconds)
    )
    check(rank, world)
    dist.destroy_process_group()


def lengths(n: int, world: int) -> list[int]:
    """Uneven shards of n entries, the first one empty."""
    parts = [0] + [n * (i + 1) // (2 * world) for i in range(world - 2)]
    return [*parts, n - sum(parts)]


def shard(x: Tensor, rank: int, world: int, dim: int = -1) -> Tensor:
    return x.split(lengths(x.shape[dim], world), dim)[rank].clone()


def close(found: Tensor, wanted: Tensor, **kwargs: float) -> None:
    torch.testing.assert_close(found, wanted, equal_nan=True, **kwargs)


def gradients(
    f: Callable[..., Tensor], r: Tensor, k: Tensor, h: Tensor, weights: Tensor
) -> tuple[Tensor, ...]:
    inputs = [x.detach().clone().requires_grad_() for x in (r, k, h)]
    p = f(*inputs)
    return (p.detach(), *torch.autograd.grad((p * weights).sum(), inputs))


def plain_shards(rank: int, world: int) -> None:
    k = torch.tensor([5.0, 300.5, 600.0], dtype=torch.float64)
    cases = (
        ("soft_topk", torch.tensor([0.2, 0.9, 0.999], dtype=torch.float64)),
        ("lapsum_topk", torch.tensor([1.0, 0.1, 0.01], dtype=torch.float64)),
    )
    for dtype, rtol in ((torch.float64, 1e-8), (torch.float32, 1e-3)):
        r, weights = normal(3, 1000, dtype=dtype), normal(3, 1000, seed=1, dtype=dtype)
        for name, h in cases:
            one = gradients(getattr(laprune, name), r, k, h, weights)
            own = [shard(x, rank, world) for x in (r, weights)]
            many = gradients(getattr(distributed, name), own[0], k, h, own[1])
            for found, wanted in zip(many[:2], one[:2], strict=True):
                close(found, shard(wanted, rank, world), rtol=rtol, atol=rtol)
            for found, wanted in zip(many[2:], one[2:], strict=True):
                close(found, wanted, rtol=rtol, atol=rtol)
    turned = distributed.soft_topk(shard(r, rank, world).T, k, 0.5, dim=0)
    close(turned, shard(laprune.soft_topk(r, k, 0.5), rank, world).T, rtol=1e-4, atol=1e-5)


def long_row(rank: int, world: int) -> None:
    r, weights = normal(200_000), normal(200_000, seed=1)
    for k, extra in ((30.0, 7), (5000.0, 3)):  # of the 7, 5 count: its sample says nothing
        solution = distributed.solve(shard(r, rank, world), k, 0.9)
        one = laprune.solve(r, k, 0.9)
        close(solution.mask, shard(one.mask, rank, world), rtol=1e-8, atol=1e-10)
        close(solution.temperature, one.temperature, rtol=1e-8, atol=0)
        close(solution.barrier, one.barrier, rtol=1e-8, atol=0)
        assert solution.collectives <= solution.passes + extra
    assert solution.collectives <= 8
    numbers = (torch.tensor(x, dtype=torch.float64) for x in (5000.0, 0.9))
    k, gamma = numbers
    many = gradients(
        distributed.soft_topk, shard(r, rank, world), k, gamma, shard(weights, rank, world)
    )
    one_row = gradients(laprune.soft_topk, r, k, gamma, weights)
    close(many[1], shard(one_row[1], rank, world), rtol=1e-7, atol=1e-8)
    close(many[2], one_row[2], rtol=1e-7, atol=1e-8)
    close(many[3], one_row[3], rtol=1e-7, atol=1e-6)


def edges(rank: int, world: int) -> None:
    r = normal(300)
    broken = r.clone()
    broken[-1] = math.nan
    for x in (draw("integers", 1, 300)[0], draw("integers", 1, 300)[0].float(), r, r * 0 + 2):
        for k in (0, 1, 77.5, 200, 300):
            found = distributed.hard_topk(shard(x, rank, world), k)
            assert torch.equal(found, shard(laprune.hard_topk(x, k), rank, world))
    tied = (r.round(), 77.5, 1 - 1e-7)
    for x, k, gamma in (tied, (r, 30, 0.0), (r * 0 + 2, 30, 0.9), (broken, 30, 0.5), (r, 300, 0.5)):
        one = laprune.solve(x, k, gamma)
        found = distributed.solve(shard(x, rank, world), k, gamma)
        assert found.status == one.status
        close(found.mask, shard(one.mask, rank, world))
    may = r > -0.5
    own = [shard(x, rank, world) for x in (r, may)]
    close(
        distributed.soft_topk(own[0], 30, 0.8, mask=own[1]),
        shard(laprune.soft_topk(r, 30, 0.8, mask=may), rank, world),
    )
    close(
        distributed.gated_topk(own[0], 30, 0.8, mask=own[1]),
        shard(laprune.gated_topk(r, 30, 0.8, mask=may), rank, world),
    )
    here, whole = own[0].clone().requires_grad_(), r.clone().requires_grad_()
    distributed.gated_topk(here, 30, 0.8, mask=own[1], mode="ste").square().sum().backward()
    laprune.gated_topk(whole, 30, 0.8, mask=may, mode="ste").square().sum().backward()
    close(here.grad, shard(whole.grad, rank, world))
    with pytest.raises(ValueError, match="shape of values"):
        distributed.gated_topk(own[0], 30, 0.8, scores=own[0][None])
    ste = distributed.soft_topk(own[0], 30, 0.8, mode="ste")
    close(ste, shard(laprune.hard_topk(r, 30), rank, world))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = distributed.solve(own[0], 250, 0.5, mask=own[1])
    assert found.status == Status.INFEASIBLE
    close(found.mask, own[1].double())
    tensors = {"a": own[0], "b": shard(normal(50, seed=3), rank, world)}
    found = distributed.global_topk(tensors, 60, 0.7)
    whole = laprune.global_topk({"a": r, "b": normal(50, seed=3)}, 60, 0.7)
    for name in tensors:
        close(found[name], shard(whole[name], rank, world))


def _rows(rank: int) -> Tensor:
    """Of one sum, whether or not it is weighted by the row."""
    return torch.tensor([1.0, 4.0, 2.0] if rank == 0 else [1.0, 1.0, 4.0])


def disagreement(rank: int, world: int) -> None:
    x = shard(normal(100), rank, world)
    for arguments, message in (
        ((x, 5 + rank, 0.5), "the ranks disagree on k: 5 on rank 0, 6 on rank 1"),
        ((x, 5, 0.5 + 0.1 * (rank == 1)), "the ranks disagree on gamma: 0.5 on rank 0, 0.6"),
        ((x.expand(1 + rank, -1), 5, 0.5), "the ranks disagree on the number of rows"),
        ((x, 101, 0.5), r"k must lie in \[0, 100\], got 101"),
        ((x, -3, 0.5), r"k must lie in"),
        ((x, -3 if rank == 0 else 5, 0.5), "the ranks disagree on k: -3 on rank 0, 5 on rank 1"),
        ((x, 5, 0.5 if rank == 0 else math.nan), "the ranks disagree on gamma: 0.5 .* nan on rank"),
        ((x, math.nan, 0.5), r"k must lie in \[0, 100\], got nan"),
        ((x.expand(3, -1), _rows(rank), 0.5), "the ranks disagree on the k of some row"),
        ((x[:0], 0, 0.5), "no entries to select from, on any rank"),
    ):
        with pytest.raises(ValueError, match=message):
            distributed.soft_topk(*arguments)
    with pytest.raises(ValueError, match="the ranks disagree on k: 5 on rank 0, -1 on rank 1"):
        distributed.global_topk([x], 5 if rank == 0 else -1, 0.5)
    # And everyone is still there.
    close(
        distributed.soft_topk(x, 5, 0.5), shard(laprune.soft_topk(normal(100), 5, 0.5), rank, world)
    )


def dtensors(rank: int, world: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    def compare(r: Tensor, mesh: object, placements: list[object], dim: int) -> None:
        n = r.shape[dim]
        rows = r.movedim(dim, -1).shape[:-1]
        k = torch.linspace(2, n - 2, rows.numel(), dtype=torch.float64).reshape(rows)
        gamma = torch.tensor(0.7, dtype=torch.float64)
        weights = normal(*r.shape, seed=7)
        one = gradients(lambda *a: laprune.soft_topk(*a, dim=dim), r, k, gamma, weights)

        x = distribute_tensor(r, mesh, placements).requires_grad_()
        numbers = [y.clone().requires_grad_() for y in (k, gamma)]
        p = laprune.soft_topk(x, *numbers, dim=dim)
        assert isinstance(p, DTensor)
        assert list(p.placements) == placements
        close(p.full_tensor().detach(), one[0], rtol=1e-8, atol=1e-9)
        (p * distribute_tensor(weights, mesh, placements)).sum().full_tensor().backward()
        close(x.grad.full_tensor(), one[1], rtol=1e-7, atol=1e-8)
        for number, wanted in zip(numbers, one[2:], strict=True):
            close(number.grad, wanted, rtol=1e-7, atol=1e-8)
        k0 = torch.tensor(2.5, dtype=torch.float64, requires_grad=True)
        laprune.soft_topk(x.detach(), k0, 0.7, dim=dim).square().sum().full_tensor().backward()
        k1 = k0.detach().requires_grad_()
        laprune.soft_topk(r, k1, 0.7, dim=dim).square().sum().backward()
        close(k0.grad, k1.grad, rtol=1e-7, atol=1e-8)
        close(laprune.hard_topk(x, k, dim=dim).full_tensor(), laprune.hard_topk(r, k, dim=dim))
        close(
            laprune.gated_topk(x, k, 0.4, dim=dim).full_tensor().detach(),
            laprune.gated_topk(r, k, 0.4, dim=dim),
        )
        close(
            laprune.lapsum_topk(x, k, 0.4, dim=dim).full_tensor().detach(),
            laprune.lapsum_topk(r, k, 0.4, dim=dim),
        )
        solution, alone = laprune.solve(x, k, 0.7, dim=dim), laprune.solve(r, k, 0.7, dim=dim)
        close(solution.temperature.full_tensor(), alone.temperature)
        assert torch.equal(solution.status.full_tensor(), alone.status)
        may = normal(*r.shape, seed=9) > -1
        close(
            laprune.soft_topk(x, 2, 0.4, dim=dim, mask=may).full_tensor().detach(),
            laprune.soft_topk(r, 2, 0.4, dim=dim, mask=may),
        )
        for mode in ("soft", "ste"):
            close(
                laprune.gated_topk(x, 2, 0.4, dim=dim, mask=may, mode=mode).full_tensor().detach(),
                laprune.gated_topk(r, 2, 0.4, dim=dim, mask=may, mode=mode),
            )

    line = init_device_mesh("cpu", (world,), mesh_dim_names=("x",))
    r = normal(5, 2 * world + 1)
    for dim in (0, 1):
        for placement in (Shard(0), Shard(1), Replicate()):
            compare(r, line, [placement], dim)
    compare(normal(3, 7, 6), line, [Shard(1)], 1)
    compare(normal(9), line, [Shard(0)], 0)
    square = line
    if world == 4:
        square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
        for placements in ([Shard(0), Shard(1)], [Shard(1), Shard(1)], [Replicate(), Shard(1)]):
            compare(r, square, placements, 1)

    tensors = [normal(5, 7), normal(3, seed=1), normal(4, seed=2), normal(2, 9, seed=3)]
    ndim = square.ndim
    layouts = [[Shard(0)] * ndim, [Shard(0)] * ndim, None, [Replicate()] * (ndim - 1) + [Shard(1)]]
    weights = [normal(*x.shape, seed=20 + i) for i, x in enumerate(tensors)]
    whole = [x.clone().requires_grad_() for x in tensors]
    masks = laprune.global_topk(whole, 20, 0.8)
    sum((p * w).sum() for p, w in zip(masks, weights, strict=True)).backward()
    spread = [
        (x.clone() if p is None else distribute_tensor(x, square, p)).requires_grad_()
        for x, p in zip(tensors, layouts, strict=True)
    ]
    found = laprune.global_topk(spread, 20, 0.8)
    loss = torch.zeros((), dtype=torch.float64)
    for p, w, layout in zip(found, weights, layouts, strict=True):
        part = p * (w if layout is None else distribute_tensor(w, square, layout))
        loss = loss + (part.sum() if layout is None else part.sum().full_tensor())
    loss.backward()
    for p, x, mask, full in zip(found, spread, masks, whole, strict=True):
        here = p.full_tensor() if isinstance(p, DTensor) else p
        grad = x.grad.full_tensor() if isinstance(x.grad, DTensor) else x.grad
        close(here.detach(), mask.detach(), rtol=1e-8, atol=1e-9)
        close(grad, full.grad, rtol=1e-7, atol=1e-8)
    equal = [distribute_tensor(torch.ones(5, 2), square, [Shard(0)] * ndim), torch.ones(3)]
    hard = laprune.global_topk(equal, 11, 1.0)
    close(hard[0].full_tensor(), torch.ones(5, 2))
    close(hard[1], torch.tensor([1.0, 0.0, 0.0]))

    cut = distribute_tensor(r, line, [Shard(1)])
    budget = distribute_tensor(torch.tensor(6.0), line, [Replicate()])
    for k in (budget, budget.reshape(1)):
        close(laprune.global_topk([cut], k, 0.5)[0], laprune.global_topk([cut], 6, 0.5)[0])
    with pytest.raises(ValueError, match=r"k of shape \(5, 1\) does not broadcast to \(5,\)"):
        laprune.soft_topk(cut, torch.ones(5, 1), 0.5)
    for values, scores in ((cut, r), (r, cut)):
        with pytest.raises(TypeError, match="both be DTensors or neither"):
            distributed.gated_topk(values, 2, 0.5, scores=scores)


def strided(rank: int, world: int) -> None:
    """Entries that tensor parallelism and FSDP2 cut one after the other lie in order."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    if world < 4:
        return
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def both(value: Tensor) -> DTensor:
        layer = nn.Linear(value.shape[1], len(value), bias=False).double()
        with torch.no_grad():
            layer.weight.copy_(value)
        parallelize_module(layer, mesh["tp"], ColwiseParallel())
        return fully_shard(layer, mesh=mesh["dp"]).weight.detach()

    r, ones = normal(8, 5), torch.ones(8, 5, dtype=torch.float64)
    x, equal, weights = both(r), both(ones), both(normal(8, 5, seed=1))
    for dim, rows in ((0, 5), (1, 8)):
        k = torch.linspace(1, 3, rows, dtype=torch.float64)
        gamma = torch.tensor(0.7, dtype=torch.float64)
        full = normal(8, 5, seed=1)
        one = gradients(lambda *a, dim=dim: laprune.soft_topk(*a, dim=dim), r, k, gamma, full)
        inputs = [y.clone().requires_grad_() for y in (x, k, gamma)]
        p = laprune.soft_topk(*inputs, dim=dim)
        (p * weights).sum().full_tensor().backward()
        found = (
            p.detach().full_tensor(),
            inputs[0].grad.full_tensor(),
            *(y.grad for y in inputs[1:]),
        )
        for have, want in zip(found, one, strict=True):
            close(have, want, rtol=1e-7, atol=1e-8)
        for tied in (1, 3, 4.5):
            close(
                laprune.hard_topk(equal, tied, dim=dim).full_tensor(),
                laprune.hard_topk(ones, tied, dim=dim),
            )
        may = r > -0.5
        close(
            laprune.soft_topk(x, 1, 0.7, dim=dim, mask=may).full_tensor(),
            laprune.soft_topk(r, 1, 0.7, dim=dim, mask=may),
        )
    close(laprune.global_topk([x], 10, 0.7)[0].full_tensor(), laprune.global_topk([r], 10, 0.7)[0])
    assert laprune.global_topk([equal], 7, 1.0)[0].full_tensor().sum() == 7


def net(width: int = 7) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 4)
    return nn.Sequential(*layers).double()


def pruning(rank: int, world: int) -> None:
    """Data parallel and fully sharded training prune as one process does."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    x, meshes = normal(4 * world, 8), {"fsdp": init_device_mesh("cpu", (world,))}
    if world == 4:
        meshes["hsdp"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    own = x[4 * rank : 4 * rank + 4]
    for kwargs in (
        {"density": linear(1.0, 0.2, 4)},
        {"density": 0.3, "scores": "learned", "mode": "ste"},
        {"density": 0.5, "granularity": "channel"},
        {"granularity": (1, 4), "exclude": ["2.*", "4.*"]},
    ):
        runs = []
        for kind in ("one", "ddp", *meshes):
            model = net()
            pruner = GlobalPruner(model, gamma=linear(0.3, 0.95, 4), **kwargs)
            wrapped: nn.Module = model
            if kind == "ddp":
                wrapped = nn.parallel.DistributedDataParallel(model)
            if kind in meshes:
                for layer in (model[0], model[2]):
                    fully_shard(layer, mesh=meshes[kind])
                wrapped = fully_shard(model, mesh=meshes[kind])
                pruner.refresh()
            optimiser = torch.optim.Adam(wrapped.parameters(), lr=0.05)
            for _ in range(4):
                optimiser.zero_grad()
                wrapped(x if kind == "one" else own).square().mean().backward()
                optimiser.step()
                pruner.step()
            runs.append((model, wrapped, pruner))
        (one, _, alone), *others = runs
        for model, wrapped, pruner in others:
            for p, q in zip(model.parameters(), one.parameters(), strict=True):
                whole = p.full_tensor() if hasattr(p, "full_tensor") else p
                close(whole.detach(), q.detach(), rtol=1e-7, atol=1e-9)
            assert pruner.report().kept == alone.report().kept
            for training in (True, False):
                close(wrapped.train(training)(x).detach(), one.train(training)(x).detach())
                masks, wanted = pruner.masks(), alone.masks()
                for name, mask in masks.items():
                    whole = mask.full_tensor() if hasattr(mask, "full_tensor") else mask
                    close(whole, wanted[name])
        with pytest.raises(RuntimeError, match="unsharded copy"):
            others[1][2].finalize()
    late = fully_shard(net(), mesh=meshes["fsdp"])
    with pytest.raises(RuntimeError, match="build the pruner first"):
        GlobalPruner(late, 0.5)
    for density, gamma in ((0.0, 0.5), (1.0, 0.5), (0.3, 1.0)):
        model = net()
        GlobalPruner(model, density, gamma=gamma, scores="learned")
        wrapped = nn.parallel.DistributedDataParallel(model)
        for _ in range(2):  # the second forward waits for what the first has left undone
            wrapped(own).square().mean().backward()


def tensor_parallel(rank: int, world: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    one, many, x = net(8), net(8), normal(6, 8)
    mesh = init_device_mesh("cpu", (world,))
    parallelize_module(many, mesh, {"2": ColwiseParallel(), "4": RowwiseParallel()})
    for model in (one, many):
        GlobalPruner(model, 0.4, gamma=0.8)
        model(x).square().sum().backward()
    for p, q in zip(many.parameters(), one.parameters(), strict=True):
        grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        close(grad, q.grad, rtol=1e-7, atol=1e-9)
    close(many.eval()(x).detach(), one.eval()(x).detach())


def parallel_and_sharded(rank: int, world: int) -> None:
    """Tensor parallelism inside FSDP2 prunes as one process does."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    if world < 4:
        return
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
    mesh, x = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), normal(8, 8)
    own = x.chunk(2)[mesh.get_local_rank("dp")]
    for kwargs in ({}, {"mode": "ste"}, {"scores": "learned"}, {"granularity": "channel"}):
        one, many = net(8), net(8)
        parallelize_module(many, mesh["tp"], {"2": ColwiseParallel(), "4": RowwiseParallel()})
        pruners = [GlobalPruner(m, 0.4, gamma=linear(0.3, 0.95, 4), **kwargs) for m in (one, many)]
        for layer in (many[0], many[2], many[4], many):
            fully_shard(layer, mesh=mesh["dp"])
        pruners[1].refresh()
        for model, pruner, data in ((one, pruners[0], x), (many, pruners[1], own)):
            optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
            for _ in range(3):
                optimiser.zero_grad()
                model(data).square().mean().backward()
                optimiser.step()
                pruner.step()
        for p, q in zip(many.parameters(), one.parameters(), strict=True):
            close(p.full_tensor().detach(), q.detach(), rtol=1e-7, atol=1e-9)
        assert pruners[1].report().kept == pruners[0].kept


def everything(rank: int, world: int) -> None:
    alone = (plain_shards, long_row, edges, disagreement, dtensors, strided)
    for check in (*alone, pruning, tensor_parallel, parallel_and_sharded):
        check(rank, world)
    with use(reference):  # what other devices run
        for check in (plain_shards, edges):
            check(rank, world)


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_together_answer_as_one(world: int, tmp_path: Path) -> None:
    start(everything, world, tmp_path)


def lonely(rank: int, world: int) -> None:
    x = shard(normal(100), rank, world)
    distributed.soft_topk(x, 5, 0.5)
    if rank == 1:
        os._exit(0)
    with pytest.raises(RuntimeError, match="a rank of 2 did not answer in collective"):
        distributed.soft_topk(x, 5, 0.5)
    os._exit(7)


def test_a_rank_that_dies_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(mp.ProcessExitedException) as failure:
        start(lonely, 2, tmp_path, seconds=5)
    assert failure.value.exit_code == 7


def test_plain_shards_need_a_group() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        distributed.soft_topk(torch.zeros(3), 1, 0.5)
