"""The SAELens adapter, against SAELens itself: `make test-sae-lens`."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("sae_lens", reason="needs SAELens: make test-sae-lens")

from sae_lens import SAE, JumpReLUSAE, TopKSAE, TrainingSAE
from sae_lens.config import LoggingConfig, SAETrainerConfig
from sae_lens.registry import get_sae_training_class
from sae_lens.saes.sae import TrainStepInput
from sae_lens.training.sae_trainer import SAETrainer

import laprune
from laprune.sae import SparseAutoencoder, Trainer
from laprune.sae.sae_lens import LaPruneTrainingSAE, LaPruneTrainingSAEConfig, to_sae_lens

D, M, K, BATCH, STEPS = 12, 48, 4, 64, 60


def autoencoder(**changes: object) -> LaPruneTrainingSAE:
    torch.manual_seed(0)
    return LaPruneTrainingSAE(LaPruneTrainingSAEConfig(d_in=D, d_sae=M, k=K, **changes))


def batches():
    g = torch.Generator().manual_seed(1)
    parts = torch.randn(24, D, generator=g)
    while True:
        chosen = torch.rand(BATCH, 24, generator=g).topk(3).indices
        yield parts[chosen].sum(1)


def trained(sae: LaPruneTrainingSAE, lr: float = 1e-2) -> SAETrainer:
    config = SAETrainerConfig(
        total_training_samples=STEPS * BATCH,
        device="cpu",
        autocast=False,
        lr=lr,
        lr_end=lr,
        lr_scheduler_name="constant",
        lr_warm_up_steps=0,
        adam_beta1=0.9,
        adam_beta2=0.999,
        lr_decay_steps=0,
        n_restart_cycles=1,
        train_batch_size_samples=BATCH,
        dead_feature_window=10,
        feature_sampling_window=1000,
        logger=LoggingConfig(log_to_wandb=False),
        n_checkpoints=0,
        checkpoint_path=None,
        save_final_checkpoint=False,
    )
    trainer = SAETrainer(config, sae, batches())
    trainer.fit()
    return trainer


def step_input(x: torch.Tensor, gamma: float) -> TrainStepInput:
    return TrainStepInput(x, {"gamma": gamma}, None, 0, False)


def test_the_registry_knows_the_architecture() -> None:
    assert get_sae_training_class("laprune_topk") == (LaPruneTrainingSAE, LaPruneTrainingSAEConfig)
    config = autoencoder(mode="ste", gamma=0.7).cfg
    again = LaPruneTrainingSAEConfig.from_dict(config.to_dict())
    assert (again.k, again.gamma, again.mode) == (K, 0.7, "ste")


def test_a_training_step_uses_the_soft_mask_at_the_scheduled_gamma() -> None:
    sae, x = autoencoder(), next(batches())
    out = sae.training_forward_pass(step_input(x, 0.35))
    u = out.hidden_pre
    soft = u.relu() * laprune.soft_topk(u, K, 0.35)
    torch.testing.assert_close(out.sae_out, sae.decode(soft))


@pytest.mark.parametrize("mode", ["soft", "ste"])
def test_the_trainer_sees_true_counts(mode: str) -> None:
    sae = autoencoder(mode=mode)
    with torch.no_grad():
        sae.W_enc[:, :5] *= 1e-3  # too small to be selected, and yet a soft mask lets them pass
    out = sae.training_forward_pass(step_input(next(batches()), 0.5))
    soft = out.hidden_pre.relu() * laprune.soft_topk(out.hidden_pre, K, 0.5)
    assert soft[:, :5].any(0).all()
    assert (out.feature_acts != 0).sum(-1).max() <= K
    assert not out.feature_acts[:, :5].any()
    trainer = trained(sae, lr=1e-9)
    assert trainer.dead_neurons[:5].all()
    assert not trainer.dead_neurons[5:].all()


@pytest.mark.parametrize("mode", ["soft", "ste"])
def test_it_trains_and_gamma_follows_the_coefficient_schedule(mode: str) -> None:
    sae, x = autoencoder(mode=mode, gamma_warm_up_steps=STEPS // 2), next(batches())
    seen = []
    step = sae.training_forward_pass

    def watch(step_input: TrainStepInput):
        seen.append(step_input.coefficients["gamma"])
        return step(step_input)

    sae.training_forward_pass = watch
    before = (sae(x) - x).square().mean()
    trained(sae)
    assert seen[0] < 0.1
    assert seen == sorted(seen)
    assert seen[STEPS // 2] == pytest.approx(0.9)
    assert (sae(x) - x).square().mean() < 0.5 * before


def test_it_saves_as_a_stock_topk_sae(tmp_path) -> None:
    sae, x = autoencoder(), next(batches())
    trained(sae)
    sae.save_inference_model(tmp_path)
    stock = SAE.load_from_disk(tmp_path)
    assert type(stock) is TopKSAE
    torch.testing.assert_close(stock.encode(x), sae.encode(x))
    torch.testing.assert_close(stock(x), sae(x))
    assert (stock.encode(x) != 0).sum(-1).max() <= K


def test_a_training_checkpoint_comes_back(tmp_path) -> None:
    sae, x = autoencoder(gamma=0.6), next(batches())
    trained(sae)
    sae.save_model(tmp_path)
    again = TrainingSAE.load_from_disk(tmp_path)
    assert type(again) is LaPruneTrainingSAE
    assert again.activation_fn.gamma.item() == pytest.approx(0.6)
    torch.testing.assert_close(again(x), sae(x))


@pytest.mark.parametrize(("batch", "kind"), [(False, TopKSAE), (True, JumpReLUSAE)])
def test_our_own_autoencoders_become_stock_ones(batch: bool, kind: type, tmp_path) -> None:
    torch.manual_seed(0)
    sae, x = SparseAutoencoder(D, M, K, postact="relu", batch=batch), next(batches())
    trainer = Trainer(sae)
    for some, _ in zip(batches(), range(20), strict=False):
        trainer.step(some)
    stock = to_sae_lens(sae.eval())
    assert type(stock) is kind
    torch.testing.assert_close(stock.encode(x), sae.encode(x))
    stock.save_model(tmp_path)
    torch.testing.assert_close(SAE.load_from_disk(tmp_path)(x), sae(x).reconstruction)


def test_what_saelens_cannot_say_is_refused() -> None:
    with pytest.raises(ValueError, match="postact='relu'"):
        to_sae_lens(SparseAutoencoder(D, M, K))
    with pytest.raises(ValueError, match=r"a whole k, got 2\.5"):
        to_sae_lens(SparseAutoencoder(D, M, 2.5, postact="relu"))
