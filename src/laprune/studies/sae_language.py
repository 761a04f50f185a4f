"""Sparse autoencoders on the residual stream of a small language model.

The model writes its own texts; the residual stream after half of its layers is what is encoded, the
outlying start tokens left out. Top-k, batch top-k and LaPrune autoencoders keep equally many
latents. Beside FVU and dead latents stands the measure that counts: how much the model's own loss
on held-out texts rises when its activations are replaced by what the autoencoder rebuilds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from laprune.sae import SparseAutoencoder, evaluate

from .lab import MissingData, Options, Record, Setting, Study
from .llama import START, Config, Llama
from .sae_training import Method, Recipe, matmul, train
from .style import figure, log_scale, save
from .tables import Floats, markdown, plot, pm, seeds, select, spread, stack

SEEDS = 3
MODEL = "stories15m"
CHUNK = 32
"""Texts that go through the model at a time when their logits are needed."""

TOPK = Method("topk", relu=True, aux=True)
BATCH_TOPK = Method("batchtopk", relu=True, aux=True)
LABELS = {
    Method("topk", relu=True): "TopK",
    TOPK: "TopK + AuxK",
    BATCH_TOPK: "BatchTopK + AuxK",
    Method("laprune", 0.9, relu=True): "LaPrune, gamma = 0.9",
    Method("laprune", 0.9, annealed=True, relu=True): "LaPrune, gamma 0 → 0.9",
    Method("laprune", 0.9, mode="ste", relu=True): "LaPrune STE, gamma = 0.9",
    Method("laprune", 0.9, relu=True, batch=True): "LaPrune over the batch, gamma = 0.9",
}


class Size(NamedTuple):
    train: int
    """Texts to train on."""
    test: int
    length: int
    m: int
    k: tuple[int, ...]
    recipe: Recipe


SIZES = {
    "full": Size(4096, 512, 256, 4096, (8, 16, 32, 64), Recipe(8, 4096, dead_after=1_000_000)),
    "quick": Size(24, 8, 16, 40, (3, 6), Recipe(3, 60, 1e-2, dead_after=300)),
}
UNTRAINED = Config(width=16, layers=2, heads=2, inner=32, vocabulary=60, positions=16)


def _size(options: Options) -> Size:
    return SIZES["quick" if options.quick else "full"]


def settings(options: Options) -> list[Setting]:
    size = _size(options)
    gpu = torch.device(options.device).type == "cuda"
    return [
        {
            "model": "untrained" if options.quick else MODEL,
            "matmul": "tf32" if gpu else "float32",
            "m": size.m,
            "k": k,
            **method._asdict(),
            "seed": seed,
        }
        for k in size.k
        for method in LABELS
        for seed in seeds(options, SEEDS)
    ]


def measure(setting: Setting, options: Options) -> dict[str, Any]:
    """One record out of a training that covers all seeds of its method."""
    method = Method(*(setting[name] for name in Method._fields))
    return _train(setting["matmul"], setting["k"], method, options)[setting["seed"]]


class Harvest(NamedTuple):
    """The residual stream at all tokens but start tokens, centred and of unit mean square."""

    model: Llama
    layer: int
    mean: Tensor
    scale: Tensor
    train: Tensor
    test: Tensor
    texts: Tensor
    """The held-out texts."""
    loss: float
    """The model's own loss on them."""
    ablated: float
    """Its loss when every activation is replaced by the mean."""


@functools.lru_cache(maxsize=1)
def harvest(options: Options) -> Harvest:
    """Sample texts, read the residual stream, measure the model as it is."""
    size, model = _size(options), _model(options)
    texts = _texts(model, size, options)
    layer = model.config.layers // 2
    held, rest = texts[: size.test], texts[size.test :]
    raw = _residuals(model, rest, layer)
    mean = raw.mean(0)
    scale = (raw - mean).square().mean().sqrt()
    test = (_residuals(model, held, layer) - mean) / scale
    loss = _loss(model, layer, held, lambda x: x)
    ablated = _loss(model, layer, held, lambda x: mean.expand_as(x))
    return Harvest(model, layer, mean, scale, (raw - mean) / scale, test, held, loss, ablated)


def _model(options: Options) -> Llama:
    if options.quick:
        return Llama.random(UNTRAINED, device=options.device)
    if options.data is None:
        raise MissingData(f"give the folder that holds {MODEL}/ with --data")
    return Llama.load(options.data / MODEL, options.device)


def _texts(model: Llama, size: Size, options: Options) -> Tensor:
    """Texts of the model's own, the same for every method; kept where there is a cache."""
    path = None
    if options.cache is not None and not options.quick:
        path = options.cache / f"{MODEL}_{size.train + size.test}x{size.length}.pt"
    if path is not None and path.exists():
        return torch.load(path, weights_only=True).to(options.device)
    g = torch.Generator(options.device).manual_seed(0)
    parts, left = [], size.train + size.test
    while left:
        parts.append(model.sample(min(left, 1024), size.length, g))
        left -= len(parts[-1])
    texts = torch.cat(parts)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(texts.cpu(), path)
    return texts


def _residuals(model: Llama, texts: Tensor, layer: int) -> Tensor:
    return torch.cat([model.residual(t, layer)[t != START] for t in texts.split(128)])


def _loss(model: Llama, layer: int, texts: Tensor, change: Callable[[Tensor], Tensor]) -> float:
    """The mean loss per token with the residual stream changed wherever it was harvested."""
    total = torch.zeros((), dtype=torch.float64, device=texts.device)
    for part in texts.split(CHUNK):
        h = model.residual(part, layer)
        at = part != START
        h[at] = change(h[at])
        logits = model.logits(h, layer)[:, :-1]
        total += torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum"
        )
    return total.item() / texts[:, 1:].numel()


@functools.lru_cache(maxsize=1)
def _train(precision: str, k: int, method: Method, options: Options) -> dict[int, dict[str, Any]]:
    size, data = _size(options), harvest(options)
    some = list(seeds(options, SEEDS))
    with matmul(precision):
        sae = train(data.train, method, some, size.m, k, size.recipe)
        found = evaluate(sae, data.test.expand(len(some), -1, -1), batch_size=4096)
    return {
        seed: {
            "fvu": found.fvu[i].item(),
            "l0": found.l0[i].item(),
            "dead": found.dead[i].item(),
            "mass": found.mass[i].item(),
            "gamma": found.gamma[i].item(),
            "loss": _spliced(sae, i, data),
            "own_loss": data.loss,
            "ablated_loss": data.ablated,
        }
        for i, seed in enumerate(some)
    }


@torch.no_grad()
def _spliced(sae: SparseAutoencoder, i: int, data: Harvest) -> float:
    """The model's loss with copy i's reconstructions in the place of its activations."""

    def rebuilt(x: Tensor) -> Tensor:
        scaled = ((x - data.mean) / data.scale).expand(len(sae.decoder), -1, -1)
        return sae(scaled).reconstruction[i] * data.scale + data.mean

    return _loss(data.model, data.layer, data.texts, rebuilt)


def draw(records: list[Record], folder: Path) -> list[Path]:
    # A GPU's, the usual ones, where a CPU's are on file too.
    records = select(records, matmul="tf32") or records
    return [*_figure(records, folder), _report(records, folder)]


def _values(records: list[Record], method: Method, k: int, key: str) -> Floats:
    some = select(records, k=k, **method._asdict())
    if key == "rise":
        return stack(some, "loss") - stack(some, "own_loss")
    return stack(some, key)


def _budgets(records: list[Record]) -> list[int]:
    return sorted({r["setting"]["k"] for r in records})


PANELS = {
    "fvu": "FVU",
    "rise": "rise of the model's loss, nats per token",
    "dead": "dead latents, %",
}


def _figure(records: list[Record], folder: Path) -> list[Path]:
    ks = _budgets(records)
    fig, axes = figure(3, width=3.6, height=3.8)
    for axis, (key, label) in zip(axes, PANELS.items(), strict=True):
        for i, (method, name) in enumerate(LABELS.items()):
            y = torch.tensor([_values(records, method, k, key).tolist() for k in ks]).T.numpy()
            plot(axis, ks, 100 * y if key == "dead" else y, i, label=name)
        axis.set_xscale("log", base=2)
        axis.set_xticks(ks, [str(k) for k in ks])
        axis.set(xlabel="k", ylabel=label)
        if key != "dead":
            log_scale(axis)
    fig.legend(
        *axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8
    )
    return save(fig, folder, "sae_language")


def _report(records: list[Record], folder: Path) -> Path:
    first, where = records[0]["result"], records[0]["where"]
    setting = records[0]["setting"]
    size = SIZES["quick" if setting["model"] == "untrained" else "full"]
    parts = [
        "# Sparse autoencoders on a language model",
        f"The residual stream after half of the layers of {setting['model']}, on {size.train} "
        f"texts of {size.length} tokens that the model wrote; {size.test} others are held out. m = "
        f"{size.m}, {size.recipe.epochs} epochs, batches of {size.recipe.batch}, Adam at "
        f"{size.recipe.learning_rate:g}; all with ReLU. Mean ± sample standard deviation over "
        f"{len(_values(records, TOPK, size.k[0], 'fvu'))} seeds; {where['hardware']}, torch "
        f"{where['versions']['torch']}, matrix products in {setting['matmul']}.",
        f"The model's own loss on the held-out texts is {first['own_loss']:.4f} nats per token, "
        f"and {first['ablated_loss']:.4f} with every activation replaced by the mean. `rise` is "
        "what the reconstruction adds to the loss; `dead` are latents that no held-out token uses. "
        "Everything is measured as deployed: hard top-k, or the learned threshold of the two that "
        "share a budget over the batch, whose L0 is k on average over training batches.",
    ]
    for k in _budgets(records):
        rows = [
            [
                name,
                pm(spread(_values(records, method, k, "fvu")), ".4f"),
                pm(spread(_values(records, method, k, "rise")), ".4f"),
                pm(spread(100 * _values(records, method, k, "dead")), ".1f"),
                pm(spread(_values(records, method, k, "l0")), ".1f"),
            ]
            for method, name in LABELS.items()
        ]
        parts += [f"## k = {k}", markdown(("method", "FVU", "rise", "dead %", "L0"), rows)]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "sae_language.md"
    path.write_text("\n\n".join(parts) + "\n")
    return path


STUDY = Study(
    "sae_language",
    "top-k, batch top-k and LaPrune autoencoders on the residual stream of a language model",
    settings,
    measure,
    draw,
)
