"""The studies of pruning and of many ranks: equal terms, exact counts, and a model that adds up."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

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
    few, many = (rank_cost.ours(n, 512, 4, machine) for n in (10**9, 10**12))
    assert few.bytes == many.bytes
    assert few.seconds < many.seconds
    near, far = (rank_cost.gather_and_sort(n, 8, machine) for n in (10**8, 10**9))
    assert far.bytes == pytest.approx(10 * near.bytes)
    assert math.isinf(rank_cost.gather_and_sort(10**12, 4096, machine).seconds)
    assert math.isinf(rank_cost.ours(10**12, 8, 4, machine).seconds)


def test_more_ranks_are_worth_more_hops() -> None:
    machine = rank_cost.Machine()
    times = [rank_cost.hops(ranks, machine) for ranks in (1, 2, 8, 16, 4096)]
    assert times == pytest.approx([0, 2e-6, 6e-6, 11e-6, 51e-6])
