"""The autoencoder studies: harvesting, training side by side, the probe, the spliced loss."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import laprune
from laprune import baselines, cli
from laprune.sae import BatchTopKActivation, evaluate
from laprune.studies import harvest, sae_images, sae_language
from laprune.studies.lab import MissingData, Options
from laprune.studies.llama import START, Config, Llama, text
from laprune.studies.sae_training import (
    ANNEALED,
    DFTOPK,
    FIXED,
    HARD,
    LAPSUM,
    Method,
    Recipe,
    activation,
    train,
)

QUICK = Options(quick=True)
RECIPE = Recipe(epochs=3, batch=100, learning_rate=1e-2, dead_after=300)
TINY = Config(width=16, layers=2, heads=2, inner=32, vocabulary=50, positions=12)


pytestmark = pytest.mark.usefixtures("one_thread")


def test_activations_are_standardised_by_the_training_samples() -> None:
    raw = harvest.synthetic()
    raw.train[:, 3] = 7.0  # a component that never varies
    data = harvest.standardised(raw, "cpu")
    varying = torch.arange(24) != 3
    torch.testing.assert_close(data.train.mean(0), torch.zeros(24), atol=1e-5, rtol=0)
    torch.testing.assert_close(data.train.std(0)[varying], torch.ones(23))
    assert data.train[:, 3].abs().max() == 0
    mean, sd = raw.train.mean(0), raw.train.std(0)
    wanted = (raw.test - mean) / sd
    torch.testing.assert_close(data.test[:, varying], wanted[:, varying])
    assert data.classes == 5


def _sheets(folder: Path, split: str, sheets: int) -> np.ndarray:
    """Random images stored as CIFAR-100 is."""
    from PIL import Image

    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (1000 * sheets, 32, 32, 3), dtype=np.uint8)
    folder.mkdir(exist_ok=True)
    for i in range(sheets):
        sheet = images[1000 * i : 1000 * (i + 1)].reshape(25, 40, 32, 32, 3)
        pixels = sheet.transpose(0, 2, 1, 3, 4).reshape(800, 1280, 3)
        Image.fromarray(pixels).save(folder / f"{split}-{i:02d}.webp", lossless=True)
    return images


def test_images_are_read_in_order_and_missing_ones_are_noticed(tmp_path: Path) -> None:
    folder = tmp_path / "cifar100"
    images = _sheets(folder, "test", 1)
    labels = np.arange(1000) % 100
    np.savez(folder / "labels.npz", test=labels, train=np.zeros(2000))
    found, classes = harvest.cifar100(tmp_path, "test")
    np.testing.assert_array_equal(found, images)
    np.testing.assert_array_equal(classes, labels)
    _sheets(folder, "train", 1)
    with pytest.raises(MissingData, match="holds 1000 of 2000 train images"):
        harvest.cifar100(tmp_path, "train")
    with pytest.raises(MissingData, match="give the folder that holds cifar100/"):
        harvest.cifar100(None, "train")


def test_what_is_missing_is_left_to_torchvision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchvision.datasets", None)
    with pytest.raises(MissingData, match="torchvision, if installed, would download"):
        harvest.cifar100(tmp_path, "train")
    fake = types.ModuleType("torchvision.datasets")
    images = np.zeros((4, 32, 32, 3), dtype=np.uint8)
    fake.CIFAR100 = lambda root, train, download: types.SimpleNamespace(
        data=images + train, targets=[1, 2, 3, 4]
    )
    monkeypatch.setitem(sys.modules, "torchvision", types.ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.datasets", fake)
    found, labels = harvest.cifar100(tmp_path, "train")
    assert found.max() == found.min() == 1
    assert labels.tolist() == [1, 2, 3, 4]


def test_features_are_those_of_resized_normalised_images() -> None:
    images = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), dtype=np.uint8)
    images[0] = 255
    found = harvest.features(torch.nn.Flatten(), images, "cpu").reshape(3, 3, 224, 224)
    white = (1 - torch.tensor(harvest.MEAN)) / torch.tensor(harvest.SD)
    torch.testing.assert_close(found[0].mean((1, 2)), white, atol=1e-4, rtol=1e-4)
    back = found[1] * torch.tensor(harvest.SD).view(3, 1, 1) + torch.tensor(harvest.MEAN).view(
        3, 1, 1
    )
    mean = torch.from_numpy(images[1] / 255).mean((0, 1)).float()
    torch.testing.assert_close(back.mean((1, 2)), mean, atol=0.02, rtol=0)


def test_the_backbone_is_the_one_whose_weights_are_there(tmp_path: Path) -> None:
    assert harvest.backbone(Options(data=tmp_path)) == "resnet18"
    (tmp_path / "mobilenet_v2").mkdir()
    network = harvest.MobileNetV2()
    torch.save(network.state_dict(), tmp_path / "mobilenet_v2" / "weights.pth")
    options = Options(data=tmp_path)
    assert harvest.backbone(options) == "mobilenet_v2"
    x = torch.randn(2, 3, 64, 64)
    again = harvest._mobilenet(options).eval()
    assert torch.equal(again(x), network.eval()(x))
    assert sum(p.numel() for p in network.parameters()) == 3_504_872  # as published


def test_harvested_activations_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def once(options: Options) -> harvest.Activations:
        calls.append(options)
        return harvest.synthetic()

    monkeypatch.setattr(harvest, "harvest", once)
    options = Options(cache=tmp_path / "cache")
    first, second = harvest.activations(options), harvest.activations(options)
    assert len(calls) == 1
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


def test_every_method_masks_as_its_operator_does() -> None:
    u = torch.randn(2, 6, 40, generator=torch.Generator().manual_seed(0))
    expected = {
        FIXED: laprune.soft_topk(u, 4, 0.9),
        LAPSUM: laprune.lapsum_topk(u, 4, 1.0),
        HARD: baselines.get("hard_ste")(u, 4),
        DFTOPK: baselines.get("dftopk")(u, 4, 1.0),
        Method("topk"): laprune.hard_topk(u, 4),
    }
    for method, mask in expected.items():
        layer = activation(method, 4, copies=2)
        torch.testing.assert_close(layer(u), u * mask)
        torch.testing.assert_close(layer.mask(u), mask)
        torch.testing.assert_close(layer.eval()(u), u * laprune.hard_topk(u, 4))
    over_batch = activation(Method("laprune", 0.9, batch=True), 4, copies=2)
    assert isinstance(over_batch, BatchTopKActivation)
    torch.testing.assert_close(over_batch.mask(u).sum((-2, -1)), torch.full((2,), 24.0))


def test_gamma_follows_the_papers_schedule() -> None:
    schedule = ANNEALED.gamma(30)
    assert schedule is not None
    for epoch in range(30):
        assert schedule(epoch) == pytest.approx(min(0.9, 0.9 * epoch / 23))
    assert FIXED.gamma(30) is None


@pytest.mark.parametrize(
    "method", [ANNEALED, LAPSUM, sae_language.TOPK, sae_language.BATCH_TOPK], ids=str
)
def test_seeds_trained_together_are_those_trained_alone(method: Method) -> None:
    x = harvest.activations(QUICK).train
    together = train(x, method, [0, 1, 2], 32, 4, RECIPE)
    alone = train(x, method, [1], 32, 4, RECIPE)
    torch.testing.assert_close(together.decoder[1], alone.decoder[0], atol=1e-3, rtol=1e-3)
    assert not torch.allclose(together.decoder[0], together.decoder[1])


def test_training_explains_variance() -> None:
    data = harvest.activations(QUICK)
    recipe = Recipe(epochs=20, batch=100, learning_rate=1e-2)
    sae = train(data.train, FIXED, [0, 1], 48, 4, recipe)
    assert (evaluate(sae, data.test.expand(2, -1, -1)).fvu < 0.6).all()


def test_the_probe_is_a_linear_classifier_on_the_hard_codes() -> None:
    data = harvest.activations(QUICK)
    sae = train(data.train, FIXED, [0, 1], 32, 4, RECIPE)
    weight, bias = sae_images.fit_probe(sae, data, [0, 1], epochs=8, batch=150)
    found = sae_images.probe(sae, data, [0, 1], epochs=8, batch=150)
    # The same for seed 1 with torch's own parts.
    codes, test_codes = (
        sae(x.expand(2, -1, -1)).codes[1].detach() for x in (data.train, data.test)
    )
    g = torch.Generator().manual_seed(1)
    model = torch.nn.Linear(32, data.classes)
    bound = 32**-0.5
    with torch.no_grad():
        model.weight.copy_((bound * (2 * torch.rand(32, data.classes, generator=g) - 1)).T)
        model.bias.copy_((bound * (2 * torch.rand(1, data.classes, generator=g) - 1))[0])
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=1e-4)
    for _ in range(8):
        for rows in torch.randperm(len(codes), generator=g).split(150):
            loss = torch.nn.functional.cross_entropy(model(codes[rows]), data.train_labels[rows])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    torch.testing.assert_close(weight[1].T, model.weight, atol=1e-4, rtol=0)
    torch.testing.assert_close(bias[1, 0], model.bias, atol=1e-4, rtol=0)
    right = (model(test_codes).argmax(-1) == data.test_labels).double().mean().item()
    assert found[1] == pytest.approx(right, abs=0.006)  # one sample of 200 may fall otherwise
    assert found[1] > 0.22  # chance is 0.2


def test_tuning_takes_the_softness_that_is_best_on_samples_held_back() -> None:
    setting = next(
        s for s in sae_images.settings(QUICK) if s["operator"] == "lapsum" and not s["softness"]
    )
    result = sae_images.measure(setting, QUICK)
    tuning = result["tuning"]
    assert f"{result['softness']:g}" == min(tuning, key=tuning.get)
    assert len(tuning) == len(sae_images.GRIDS[sae_images.LAPSUM_TUNED])


def test_the_sweeps_share_the_main_tables_point() -> None:
    wanted = sae_images.settings(Options(device="cpu"))
    keys = [tuple(s.items()) for s in wanted]
    assert len(set(keys)) == len(keys)
    at_main = [s for s in wanted if (s["m"], s["k"]) == (4096, 32)]
    assert len(at_main) == 8 * len(sae_images.ALL)


def test_the_language_model_samples_what_it_predicts() -> None:
    model = Llama.random(TINY)
    for name in model.weights:
        if "proj" in name:  # so that what is attended to decides
            model.weights[name] *= 4
    tokens = model.sample(1, 12, greedy=True)
    assert (tokens[:, 0] == START).all()
    assert len(tokens.unique()) > 4
    for layer in range(3):  # cut anywhere, the model is the same
        logits = model.logits(model.residual(tokens, layer), layer)
        assert torch.equal(logits[:, :-1].argmax(-1), tokens[:, 1:])
    # Causal: what comes later changes nothing before.
    other = tokens.clone()
    other[:, 8:] = 7
    again = model.logits(model.residual(other, 1), 1)
    torch.testing.assert_close(again[:, :8], logits[:, :8])
    draws = model.sample(2000, 2, torch.Generator().manual_seed(0))[:, 1]
    p = logits[0, 0].softmax(-1)
    shares = torch.bincount(draws, minlength=50) / 2000
    assert (shares - p).abs().max() < 0.05


def test_a_checkpoint_folder_is_read(tmp_path: Path) -> None:
    import json

    from safetensors.torch import save_file

    model = Llama.random(TINY)
    save_file({k: v.half() for k, v in model.weights.items()}, tmp_path / "model.safetensors")
    said = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 32,
        "vocab_size": 50,
        "max_position_embeddings": 12,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 10000.0},
    }
    (tmp_path / "config.json").write_text(json.dumps(said))
    (tmp_path / "pieces.json").write_text(json.dumps(["<unk>", "A", "\u00c3\u00a9"]))
    again = Llama.load(tmp_path, "cpu")
    assert again.config == TINY
    tokens = model.sample(2, 12, torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        again.logits(again.residual(tokens, 1), 1),
        model.logits(model.residual(tokens, 1), 1),
        atol=0.05,
        rtol=0.05,
    )
    assert text(tmp_path, [1, 2]) == "Aé"
    with pytest.raises(MissingData, match="no language model in"):
        Llama.load(tmp_path / "elsewhere", "cpu")


def test_the_spliced_loss_lies_between_the_models_own_and_that_without() -> None:
    data = sae_language.harvest(QUICK)
    tokens = data.texts
    logits = data.model.logits(data.model.residual(tokens, 0), 0)[:, :-1]
    own = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    assert data.loss == pytest.approx(own.item(), rel=1e-5)
    assert data.ablated > data.loss
    assert data.train.square().mean().item() == pytest.approx(1, rel=1e-4)
    assert len(data.test) == (tokens != START).sum()
    seen: list[torch.Tensor] = []
    sae_language._loss(data.model, data.layer, tokens, lambda x: seen.append(x.clone()) or x)
    torch.testing.assert_close(torch.cat(seen), data.test * data.scale + data.mean)
    recipe = Recipe(epochs=30, batch=60, learning_rate=1e-2)
    method = Method("laprune", 0.9, relu=True)
    sae = train(data.train, method, [0, 1], 64, 8, recipe)
    for i in range(2):
        assert data.loss - 0.02 < sae_language._spliced(sae, i, data) < data.ablated


def test_a_study_without_its_data_is_left_out_in_a_line(tmp_path: Path) -> None:
    arguments = ["reproduce", "sae_language", "--device", "cpu", "--results", str(tmp_path)]
    outcome = CliRunner().invoke(cli.app, arguments)
    assert outcome.exit_code == 1
    assert "sae_language left out: give the folder that holds stories15m" in outcome.output
