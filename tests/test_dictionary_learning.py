"""The dictionary_learning adapter, against the package itself: `make test-dictionary-learning`."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip(
    "dictionary_learning", reason="needs dictionary_learning: make test-dictionary-learning"
)

from dictionary_learning.trainers.top_k import AutoEncoderTopK, TopKTrainer

import laprune
from laprune.sae.dictionary_learning import LaPruneDictionary, LaPruneTrainer
from laprune.schedules import linear

D, M, K, BATCH = 12, 48, 4, 64


def batch(seed: int) -> torch.Tensor:
    parts = torch.randn(24, D, generator=torch.Generator().manual_seed(0))
    chosen = torch.rand(BATCH, 24, generator=torch.Generator().manual_seed(seed)).topk(3).indices
    return parts[chosen].sum(1)


def arguments(steps: int) -> dict[str, object]:
    return {
        "steps": steps,
        "activation_dim": D,
        "dict_size": M,
        "k": K,
        "layer": 0,
        "lm_name": "none",
        "lr": 1e-2,
        "warmup_steps": 1,
        "seed": 0,
        "device": "cpu",
    }


def test_codes_are_soft_in_training_and_stock_in_evaluation() -> None:
    ae, x = LaPruneDictionary(D, M, K, gamma=0.6), batch(1)
    stock = AutoEncoderTopK(D, M, K)
    stock.load_state_dict(ae.state_dict())
    u = ae.encoder(x - ae.b_dec)
    torch.testing.assert_close(ae.encode(x), u.relu() * laprune.soft_topk(u, K, 0.6))
    torch.testing.assert_close(ae.eval().encode(x), stock.encode(x))
    assert torch.equal(ae.encode(x, use_threshold=True), stock.encode(x, use_threshold=True))


@pytest.mark.parametrize("mode", ["soft", "ste"])
def test_what_the_package_counts_is_what_is_deployed(mode: str) -> None:
    from dictionary_learning.training import log_stats

    class Run(list):
        put = list.append

    trainer, run = LaPruneTrainer(mode=mode, **arguments(3)), Run()
    trainer.update(0, batch(0))
    log_stats([trainer], 0, batch(1), False, False, log_queues=[run])
    assert run[0]["l0"] <= K
    assert trainer.config["laprune"] == {"mode": mode, "gamma": pytest.approx(0.9)}


def test_a_wrong_mode_is_named() -> None:
    with pytest.raises(ValueError, match="mode must be 'soft' or 'ste', got 'hard'"):
        LaPruneDictionary(D, M, K, mode="hard")  # type: ignore[arg-type]


def test_the_one_line_way_in() -> None:
    trainer = TopKTrainer(**arguments(60), dict_class=LaPruneDictionary)
    x = batch(1)
    with torch.no_grad():
        trainer.ae.encoder.bias[:5] = -50
    trainer.dead_feature_threshold = 10 * BATCH
    before = (trainer.ae.eval()(x) - x).square().mean()
    trainer.ae.train()
    for step in range(60):
        trainer.update(step, batch(step))
    assert (trainer.ae.eval()(x) - x).square().mean() < 0.5 * before
    # Counts are of what is deployed: these never were among the k largest.
    assert (trainer.num_tokens_since_fired[:5] == 60 * BATCH).all()
    assert trainer.dead_features >= 5


@pytest.mark.parametrize("mode", ["soft", "ste"])
def test_gamma_follows_the_schedule_and_the_model_reloads_as_stock(mode: str, tmp_path) -> None:
    trainer = LaPruneTrainer(schedule=linear(0.0, 0.9, 10), mode=mode, **arguments(12))
    seen = []
    for step in range(12):
        trainer.update(step, batch(step))
        seen.append(trainer.ae.gamma.item())
    assert seen == pytest.approx([0.1 * min(step, 9) for step in range(12)])
    assert trainer.ae.mode == mode
    torch.save(trainer.ae.state_dict(), tmp_path / "ae.pt")
    stock = AutoEncoderTopK.from_pretrained(tmp_path / "ae.pt")
    x = batch(1)
    torch.testing.assert_close(stock(x), trainer.ae.eval()(x))


def test_a_gamma_outside_its_range_is_named() -> None:
    with pytest.raises(ValueError, match=r"gamma must lie in \[0, 1\], got 2"):
        LaPruneDictionary(D, M, K, gamma=2)


def test_k_may_be_annealed() -> None:
    ae = LaPruneDictionary(8, 32, 4, mode="ste")
    ae.k.fill_(12)
    x = torch.randn(5, 8)
    codes, values, _, _ = ae.train().encode(x, return_topk=True)
    assert values.shape == (5, 12)
    assert (codes != 0).sum(-1).max() <= 12
    assert (codes != 0).sum(-1).max() > 4
