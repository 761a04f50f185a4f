"""Sparse autoencoders: activations, the model, metrics, training and checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import normal
from torch import Tensor

import laprune
from laprune.sae import (
    AuxK,
    BatchTopKActivation,
    JumpReLU,
    SparseAutoencoder,
    TopKActivation,
    Trainer,
    evaluate,
    fvu,
)
from laprune.sae.auxiliary import silence
from laprune.schedules import linear

U = normal(6, 20)
MODES = ("soft", "ste", "hard")


def data(n: int = 400, d: int = 12, seed: int = 0) -> Tensor:
    """Standardised mixtures of three out of 24 directions."""
    g = torch.Generator().manual_seed(seed)
    parts = torch.randn(24, d, generator=g)
    x = torch.stack([parts[torch.randperm(24, generator=g)[:3]].sum(0) for _ in range(n)])
    return (x - x.mean(0)) / x.std(0)


def gradient(f, u: Tensor) -> Tensor:
    u = u.clone().requires_grad_()
    return torch.autograd.grad((f(u) * normal(*u.shape, seed=9)).sum(), u)[0]


@pytest.mark.parametrize("postact", [None, "relu"])
def test_training_activations_are_the_operators(postact: str | None) -> None:
    def values(u: Tensor) -> Tensor:
        return u if postact is None else u.relu()

    expected = {
        "soft": lambda u: values(u) * laprune.soft_topk(u, 7, 0.8),
        "ste": lambda u: values(u) * laprune.soft_topk(u, 7, 0.8, mode="ste"),
        "hard": lambda u: values(u) * laprune.hard_topk(u, 7),
    }
    for mode in MODES:
        layer = TopKActivation(7, 0.8, mode, postact)
        torch.testing.assert_close(layer(U), expected[mode](U))
        torch.testing.assert_close(gradient(layer, U), gradient(expected[mode], U))


@pytest.mark.parametrize("mode", MODES)
def test_evaluation_is_hard_in_every_mode(mode: str) -> None:
    layer = TopKActivation(7, 0.8, mode, "relu").eval()
    wanted = laprune.hard_topk(U, 7) * U.relu()
    assert torch.equal(layer(U), wanted)
    assert torch.equal(layer.train().deploy(U), wanted)
    values, indices = layer.sparse(U)
    assert torch.equal(torch.zeros_like(U).scatter(-1, indices, values), wanted)


def test_a_fractional_k_gives_its_fraction() -> None:
    layer = TopKActivation(2.5).eval()
    assert torch.equal(layer(U), U * laprune.hard_topk(U, 2.5))
    assert layer.sparse(U) is None


@pytest.mark.parametrize("mode", MODES)
def test_one_budget_over_the_batch(mode: str) -> None:
    layer = BatchTopKActivation(2.5, 0.8, mode, postact=None)
    row = U.reshape(1, -1)
    mask = laprune.soft_topk(row, 15, 0.8) if mode == "soft" else laprune.hard_topk(row, 15)
    torch.testing.assert_close(layer(U), (row * mask).reshape(U.shape))
    torch.testing.assert_close(layer.mask(U), mask.reshape(U.shape))
    assert len(set(layer.mask(U).sum(-1).tolist())) > 1


@pytest.mark.parametrize("mode", MODES)
def test_the_threshold_is_the_mean_smallest_selected_activation(mode: str) -> None:
    layer = BatchTopKActivation(2, mode=mode, momentum=0.9)
    smallest = []
    for seed in range(3):
        u = normal(6, 20, seed=seed)
        layer(u)
        smallest.append(u.flatten().topk(12).values.min())
    assert layer.threshold.item() == pytest.approx(torch.stack(smallest).mean().item())
    for seed in range(3, 40):  # from the tenth batch on it forgets
        layer(normal(6, 20, seed=seed))
    before = layer.threshold.item()
    layer(U + 5)
    expected = before + 0.1 * ((U + 5).flatten().topk(12).values.min().item() - before)
    assert layer.threshold.item() == pytest.approx(expected)


def test_a_batch_without_positive_activations_leaves_the_threshold_alone() -> None:
    layer = BatchTopKActivation(2, mode="hard")
    layer(-U.abs() - 1)
    assert layer.threshold.item() == 0
    layer(U)
    assert layer.threshold.item() == pytest.approx(U.flatten().topk(12).values.min().item())


def test_deployed_batch_topk_is_jump_relu_and_minds_no_neighbours() -> None:
    sae = SparseAutoencoder(12, 30, 4, batch=True, mode="hard", postact="relu")
    x = data()
    Trainer(sae, epochs=3, batch_size=100).fit(x, progress=False)
    exported, sae = sae.eval().jump_relu(), sae.eval()
    assert isinstance(exported.activation, JumpReLU)
    assert torch.equal(exported(x).reconstruction, sae(x).reconstruction)
    torch.testing.assert_close(sae(x[:1]).codes, sae(x).codes[:1])
    assert evaluate(sae, x).l0.item() == pytest.approx(4, rel=0.15)
    with pytest.raises(TypeError, match="only a single BatchTopK"):
        SparseAutoencoder(12, 30, 4).jump_relu()
    with pytest.raises(ValueError, match="same whole number"):
        sae.encode_sparse(x)


def test_the_model_is_what_it_says() -> None:
    sae = SparseAutoencoder(12, 30, 4, gamma=0.7).double()
    assert torch.equal(sae.encoder, sae.decoder)
    assert sae.encoder.data_ptr() != sae.decoder.data_ptr()
    torch.testing.assert_close(sae.decoder.norm(dim=-1), torch.ones(30).double())
    with torch.no_grad():
        for parameter in sae.parameters():
            parameter += 0.1 * normal(*parameter.shape, seed=3)
    x = data().double()
    u = (x - sae.pre_bias) @ sae.encoder.T + sae.encoder_bias
    h = u * laprune.soft_topk(u, 4, 0.7)
    out = sae(x)
    torch.testing.assert_close(out.scores, u)
    torch.testing.assert_close(out.codes, h)
    torch.testing.assert_close(out.reconstruction, h @ sae.decoder + sae.pre_bias)
    torch.testing.assert_close(sae.encode(x), h)
    torch.testing.assert_close(sae.decode(h), out.reconstruction)


@pytest.mark.parametrize("copies", [None, 3])
def test_sparse_decode_is_the_dense_one(copies: int | None) -> None:
    sae = SparseAutoencoder(12, 30, 4, copies=copies).eval()
    x = data() if copies is None else torch.stack([data(seed=i) for i in range(copies)])
    with torch.no_grad():
        sae.pre_bias += 0.3
    codes = sae.encode_sparse(x)
    assert codes.values.shape == codes.indices.shape == (*x.shape[:-1], 4)
    out = sae(x)
    torch.testing.assert_close(out.reconstruction, sae.decode(out.codes))
    torch.testing.assert_close(out.reconstruction, sae.decode_sparse(codes))
    assert torch.equal(out.codes, sae.activation(out.scores))


def test_fvu() -> None:
    x = normal(50, 4)
    assert fvu(x, x).item() == 0
    assert fvu(x, x.mean(0).expand_as(x)).item() == pytest.approx(1)
    assert fvu(torch.stack([x, 5 * x + 3]), torch.stack([0 * x, 5 * x + 3])).tolist() == [
        pytest.approx((x.square().sum() / (x - x.mean(0)).square().sum()).item()),
        0,
    ]


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_evaluation_counts_what_is_deployed(mode: str, batch: bool) -> None:
    sae = SparseAutoencoder(12, 30, 4, gamma=0.8, mode=mode, batch=batch, postact="relu")
    x = data()
    sae(x)  # a batch topk learns its threshold
    with torch.no_grad():
        sae.encoder_bias[:3] -= 100  # three latents that never fire
    found = evaluate(sae, x, batch_size=150)
    assert sae.training
    out = sae.eval()(x)
    assert found.fvu.item() == pytest.approx(fvu(x, out.reconstruction).item(), rel=1e-5)
    assert found.l0.item() == pytest.approx((out.codes != 0).double().sum(-1).mean().item())
    assert found.dead.item() == pytest.approx((out.codes == 0).all(0).double().mean().item())
    assert round(30 * found.dead.item()) >= 3
    assert found.mass.item() == pytest.approx(4, rel=1e-5)
    assert found.gamma.item() == pytest.approx(0.8 if mode == "soft" else 1, rel=1e-3)


def test_evaluation_of_copies_is_that_of_each() -> None:
    x = torch.stack([data(seed=i) for i in range(2)])
    both = SparseAutoencoder(12, 30, 4, copies=2)
    found = evaluate(both, x)
    for i in range(2):
        one = SparseAutoencoder(12, 30, 4)
        for name, parameter in one.named_parameters():
            parameter.data = getattr(both, name)[i].detach()
        for field, value in evaluate(one, x[i])._asdict().items():
            assert getattr(found, field)[i].item() == pytest.approx(value.item(), rel=1e-5), field


@pytest.mark.parametrize("batch", [False, True])
def test_copies_train_as_if_alone(batch: bool) -> None:
    x = torch.stack([data(seed=i) for i in range(2)])
    both = SparseAutoencoder(12, 30, 4, copies=2, batch=batch)
    alone = SparseAutoencoder(12, 30, 4, batch=batch)
    for name, parameter in alone.named_parameters():
        parameter.data = getattr(both, name)[1].detach().clone()
    aux = AuxK(k=4, dead_after=400)
    trainers = [Trainer(sae, aux=aux) for sae in (both, alone)]
    for _ in range(4):
        errors = trainers[0].step(x), trainers[1].step(x[1])
        torch.testing.assert_close(errors[0][1], errors[1])
    torch.testing.assert_close(both.decoder[1], alone.decoder, atol=1e-4, rtol=1e-4)
    assert torch.equal(trainers[0].silent[1], trainers[1].silent)


def test_training_learns_and_keeps_unit_directions() -> None:
    x = data(800)
    for mode in MODES:
        torch.manual_seed(0)
        sae = SparseAutoencoder(12, 48, 4, mode=mode)
        before = evaluate(sae, x).fvu.item()
        trainer = Trainer(sae, epochs=20, batch_size=100, learning_rate=1e-2)
        history = trainer.fit(x, progress=False)
        assert len(history) == 20
        assert trainer.steps == 160
        assert evaluate(sae, x).fvu.item() < 0.5 * before
        torch.testing.assert_close(sae.decoder.norm(dim=-1), torch.ones(48))


def test_the_projected_gradient_has_no_part_along_the_directions() -> None:
    sae = SparseAutoencoder(12, 30, 4)
    (sae(data()).reconstruction ** 2).sum().backward()
    full = sae.decoder.grad.clone()
    assert (full * sae.decoder).sum(-1).abs().max() > 1e-2
    sae.project_gradient()
    assert (sae.decoder.grad * sae.decoder).sum(-1).abs().max() < 1e-3
    moved = full - sae.decoder.grad
    torch.testing.assert_close(moved, (moved * sae.decoder).sum(-1, keepdim=True) * sae.decoder)


def test_silence_counts_deployed_firing_under_a_soft_mask() -> None:
    sae = SparseAutoencoder(12, 30, 4, gamma=0.5)
    with torch.no_grad():
        sae.encoder_bias[7] = -10
    out = sae(data())
    assert (out.codes[:, 7] != 0).any()  # what a count of non-zeros would see
    silent = silence(torch.full((30,), 5), sae, out)
    assert silent[7].item() == 405
    assert (silent == 0).sum() >= 20


def test_the_auxiliary_loss_teaches_dead_latents_alone() -> None:
    sae = SparseAutoencoder(12, 30, 4, mode="hard", postact="relu")
    x = data()
    out = sae(x)
    silent = torch.zeros(30, dtype=torch.int64)
    aux = AuxK(k=3, dead_after=100)
    assert aux.loss(sae, x, out, silent).item() == 0
    silent[[2, 5]] = 100
    share = aux.loss(sae, x, out, silent)
    assert 0 < share.item() < 1.5
    share.backward()
    assert sae.decoder.grad.norm(dim=-1).nonzero().flatten().tolist() == [2, 5]


def test_the_auxiliary_loss_revives() -> None:
    x = data(800)
    dead = []
    for aux in (None, AuxK(k=8, dead_after=400)):
        torch.manual_seed(0)
        sae = SparseAutoencoder(12, 48, 4, mode="hard", postact="relu")
        with torch.no_grad():
            sae.encoder_bias[:24] = -3
        Trainer(sae, epochs=30, batch_size=100, aux=aux, learning_rate=1e-2).fit(x, progress=False)
        dead.append(evaluate(sae, x).dead.item())
    assert dead[1] < 0.5 * dead[0]


@pytest.mark.parametrize("batch", [False, True])
def test_training_goes_on_from_a_checkpoint_as_if_uninterrupted(
    tmp_path: Path, batch: bool
) -> None:
    x, path = data(), tmp_path / "run.safetensors"

    def trainer(epochs: int) -> Trainer:
        torch.manual_seed(1)
        sae = SparseAutoencoder(12, 30, 4, batch=batch)
        with torch.no_grad():
            sae.encoder_bias[:3] = -50
        schedule = linear(0.0, 0.9, steps=6)
        aux = AuxK(k=4, dead_after=500)
        return Trainer(sae, epochs=epochs, batch_size=150, schedule=schedule, aux=aux, seed=3)

    whole = trainer(6)
    wanted = whole.fit(x, progress=False)
    trainer(3).fit(x, progress=False, checkpoint=path)
    resumed = trainer(6)
    assert resumed.fit(x, progress=False, checkpoint=path) == wanted
    assert resumed.steps == whole.steps == 18
    for a, b in zip(
        whole.sae.state_dict().values(), resumed.sae.state_dict().values(), strict=True
    ):
        assert torch.equal(a, b)
    assert (whole.silent[:3] == 6 * 400).all()
    assert torch.equal(whole.silent, resumed.silent)
    assert not list(tmp_path.glob("*.part"))


def test_training_goes_on_from_the_middle_of_an_epoch(tmp_path: Path) -> None:
    x = data()

    def trainer() -> Trainer:
        torch.manual_seed(1)
        return Trainer(SparseAutoencoder(12, 30, 4), epochs=2, batch_size=150)

    class Interrupted(Exception):
        pass

    whole, first, second = trainer(), trainer(), trainer()
    wanted = whole.fit(x, progress=False)
    step = first.step

    def fail_at_the_fifth(batch: Tensor) -> Tensor:
        if first.steps == 4:
            raise Interrupted
        return step(batch)

    first.step = fail_at_the_fifth
    with pytest.raises(Interrupted):
        first.fit(x, progress=False)
    first.save(tmp_path / "run.safetensors")
    second.load(tmp_path / "run.safetensors")
    assert second.fit(x, progress=False) == wanted
    assert torch.equal(whole.sae.decoder, second.sae.decoder)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="mode must be 'soft', 'ste' or 'hard', got 'firm'"):
        TopKActivation(2, mode="firm")
    with pytest.raises(ValueError, match="postact must be None or 'relu', got 'tanh'"):
        TopKActivation(2, postact="tanh")
    with pytest.raises(ValueError, match="k must be positive, got 0"):
        TopKActivation(0)
    with pytest.raises(ValueError, match=r"gamma must lie in \[0, 1\], got 2"):
        TopKActivation(2, gamma=2)
    with pytest.raises(ValueError, match=r"momentum must lie in \[0, 1\), got 1"):
        BatchTopKActivation(2, momentum=1)
    with pytest.raises(ValueError, match=r"k must lie in \(0, m = 8\], got 9"):
        SparseAutoencoder(4, 8, 9)
    with pytest.raises(ValueError, match="epochs must be at least 1, got 0"):
        Trainer(SparseAutoencoder(4, 8, 2), epochs=0)


def test_an_empty_batch_passes() -> None:
    activation = BatchTopKActivation(2, mode="hard")
    assert activation(torch.empty(0, 6)).shape == (0, 6)
    assert activation.batches == 0


def test_an_activation_of_no_layers_is_one() -> None:
    sae = SparseAutoencoder(4, 8, 2, activation=torch.nn.Sequential())
    assert isinstance(sae.activation, torch.nn.Sequential)


def test_a_direction_of_length_zero_stays() -> None:
    sae = SparseAutoencoder(4, 8, 2)
    with torch.no_grad():
        sae.decoder[3] = 0
    sae.normalise_decoder()
    assert (sae.decoder[3] == 0).all()
    torch.testing.assert_close(sae.decoder.norm(dim=-1)[4:], torch.ones(4))


def test_copies_are_fitted_together() -> None:
    sae = SparseAutoencoder(4, 8, 2, copies=3)
    history = Trainer(sae, epochs=2, batch_size=10).fit(normal(25, 4).float(), progress=False)
    assert history[1].loss < history[0].loss


def test_wrong_samples_are_named_and_the_mode_is_kept() -> None:
    sae = SparseAutoencoder(8, 32, 4).train()
    for x in (torch.randn(3, 5, 8), torch.randn(5, 7), torch.randn(8), torch.empty(0, 8)):
        with pytest.raises(ValueError, match=r"samples must have the shape \(n, 8\), got"):
            evaluate(sae, x)
    assert sae.training
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        evaluate(sae, torch.randn(5, 8), batch_size=0)
    for x in (torch.randn(3, 5, 8), torch.empty(0, 8)):
        with pytest.raises(ValueError, match=r"samples must have the shape \(n, d\), got"):
            Trainer(sae).fit(x)


@pytest.mark.parametrize("mode", ["soft", "ste", "hard"])
def test_more_latents_than_there_are_is_named(mode: str) -> None:
    activation = TopKActivation(30, mode=mode)
    for way in (activation.train(), activation.eval(), activation.sparse):
        with pytest.raises(ValueError, match=r"k must lie in \[0, 20\], got 30"):
            way(torch.randn(5, 20))


def test_a_checkpoint_of_other_settings_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    x, path = torch.randn(60, 8), tmp_path / "new folder" / "sae.safetensors"

    def trainer(k: int = 4, mode: str = "soft", **given: object) -> Trainer:
        return Trainer(SparseAutoencoder(8, 32, k, mode=mode), batch_size=20, epochs=1, **given)

    history = trainer().fit(x, progress=False, checkpoint=path)
    assert history[0].gamma == pytest.approx(0.9)
    others = {
        "k is 4 there, 5 here": trainer(5),
        "mode is soft there, ste here": trainer(mode="ste"),
        "has a schedule is False there, True here": trainer(schedule=linear(0.1, 0.9, 3)),
    }
    for words, other in others.items():
        with pytest.raises(ValueError, match=words):
            other.fit(x, progress=False, checkpoint=path)
        assert other.steps == 0
    trainer().load(path)
    save_file({"x": x}, tmp_path / "foreign.safetensors")
    with pytest.raises(ValueError, match="is not a checkpoint of this trainer"):
        trainer().load(tmp_path / "foreign.safetensors")
