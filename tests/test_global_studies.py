"""The studies of pruning and of many ranks: equal terms, exact counts, and a model that adds up."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from laprune.backends import Status, pieces
from laprune.studies import pruning, rank_cost
from laprune.studies.lab import Options

QUICK = Options(quick=True)


@pytest.mark.parametrize("network", pruning.NETWORKS)
@pytest.mark.parametrize("method", pruning.METHODS)
def test_every_method_keeps_exactly_what_was_asked_for(method: str, network: str) -> None:
    setting = {"task": "digits", "size": "quick", "network": network, "method": method, "seed": 0}
    result = pruning.measure(setting, QUICK)
    wanted = [round(d * result["weights"]) for d in pruning.DENSITIES["quick"]]
    assert result["kept"] == wanted
    assert all(0 <= a <= 1 for a in result["accuracy"])


def test_methods_start_from_the_same_dense_network() -> None:
    settings = pruning.settings(QUICK)
    dense = {
        pruning.measure(s, QUICK)["dense"]
        for s in settings
        if s["seed"] == 0 and s["network"] == "convolutional"
    }
    assert len(dense) == 1


def test_a_difference_that_rounds_to_nothing_is_none() -> None:
    means = {m: [0.9, 0.5] for m in pruning.METHODS} | {pruning.OURS[0]: [0.8997, 0.48]}
    first, *others = pruning._verdict([0.5, 0.1], means).splitlines()
    assert first.endswith("at 0.1 (by 0.020)")
    assert all(line.endswith("nowhere") for line in others)


def test_images_are_standardised_by_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    images = np.random.default_rng(0).integers(0, 256, (1200, 32, 32, 3), dtype=np.uint8)
    labels = np.arange(1200) % 100
    monkeypatch.setattr(pruning, "cifar100", lambda data, split: (images, labels))
    task = pruning.cifar(Path("anywhere"), True)
    assert task.x.shape == (1000, 3, 32, 32)
    torch.testing.assert_close(task.x.mean((0, 2, 3)), torch.zeros(3), rtol=0, atol=1e-4)
    torch.testing.assert_close(task.x.std((0, 2, 3)), torch.ones(3), rtol=0, atol=1e-4)
    assert task.x[7, 1].argmax() == images[7, :, :, 1].argmax()
    assert task.test_y[107] == 7


def test_what_ranks_send_does_not_grow_with_the_row() -> None:
    machine = rank_cost.Machine()
    few, many = (rank_cost.ours(n, 512, 4, machine, fused=True) for n in (10**9, 10**12))
    assert few.bytes == many.bytes
    assert few.seconds < many.seconds
    near, far = (rank_cost.gather_and_sort(n, 8, machine) for n in (10**8, 10**9))
    assert far.bytes == pytest.approx(10 * near.bytes)
    assert math.isinf(rank_cost.gather_and_sort(10**12, 4096, machine).seconds)
    assert math.isinf(rank_cost.ours(10**12, 8, 4, machine, fused=True).seconds)
    fits = [rank_cost.ours(10**10, 8, 4, machine, fused=fused).seconds for fused in (True, False)]
    assert math.isfinite(fits[0])
    assert math.isinf(fits[1])


class Traffic(TorchDispatchMode):
    """Bytes that operations read and write; views move nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        if not (op.is_view or "alias" in str(op)):
            tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor)]
            self.bytes += sum(x.numel() * x.element_size() for x in tensors)
        return out


def test_the_model_knows_what_plain_torch_moves() -> None:
    n, machine = 100_000, rank_cost.Machine()
    scores, grads = [torch.randn(1, n)], [torch.randn(1, n)]
    k, slopes, share = (
        torch.ones(1).double(),
        torch.zeros(1, 2).double(),
        torch.zeros(1, 1).double(),
    )
    points = torch.tensor([[0.0, 1.5, 0.1, 1 / 16]]).double()
    state = torch.tensor([[0.0, 1.5, 0.1, 0.0, 0.5]]).double()
    status = torch.tensor([int(Status.CONVERGED)])

    def shards(*calls: Callable[[], object]) -> float:
        with Traffic() as traffic:
            for call in calls:
                call()
        return traffic.bytes / (4 * n)

    a_pass = shards(lambda: pieces.sums(scores, points))
    rest = shards(
        lambda: pieces.look(scores, k),
        lambda: pieces.write(scores, state, status, share),
        lambda: pieces.moments(scores, grads, state, status),
        lambda: pieces.pull(scores, grads, state, status, slopes),
    )
    assert machine.plain_pass == pytest.approx(a_pass, rel=0.05)
    assert machine.plain_rest == pytest.approx(rest, rel=0.05)


def test_more_ranks_are_worth_more_hops() -> None:
    machine = rank_cost.Machine()
    times = [rank_cost.hops(ranks, machine) for ranks in (1, 2, 8, 16, 4096)]
    assert times == pytest.approx([0, 2e-6, 6e-6, 11e-6, 51e-6])
