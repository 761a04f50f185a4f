"""The paper's sparse-autoencoder table and sweeps, on activations of a frozen image network.

Standardised avgpool activations of CIFAR-100, m = 4096 latents, k = 32, Adam at 1e-3, batches of
4096, 30 epochs, hard top-k at evaluation, and a linear probe on the hard codes. Beside the paper's
five methods: each operator with its softness tuned on training samples held back from it, LaPrune
with a hard forward pass, and the plain top-k autoencoder with ReLU and the auxiliary loss that is
in common use.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from laprune.sae import SparseAutoencoder, SparseCodes, evaluate

from .feature_selection import compare
from .harvest import Activations, activations, backbone
from .lab import Options, Record, Setting, Study
from .sae_training import (
    ANNEALED,
    DFTOPK,
    FIXED,
    HARD,
    LABELS,
    LAPSUM,
    Method,
    Recipe,
    matmul,
    orders,
    train,
)
from .style import figure, log_scale, save
from .tables import Floats, Spread, markdown, plot, pm, seeds, select, spread, stack

SEEDS, SWEEP_SEEDS = 8, 3
TUNING_SEEDS = range(1000, 1003)
HELD_BACK = 0.1
"""The share of the training samples that tuning is judged by, and does not train on."""

STE = Method("laprune", 0.9, mode="ste")
TOPK = Method("topk", relu=True, aux=True)
LAPRUNE_TUNED, LAPSUM_TUNED, DFTOPK_TUNED = (Method(x) for x in ("laprune", "lapsum", "dftopk"))
GRIDS = {
    LAPRUNE_TUNED: (0.5, 0.8, 0.9, 0.95, 0.99),
    LAPSUM_TUNED: (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0),
    DFTOPK_TUNED: (0.01, 0.03, 0.1, 0.3, 1.0),
}
EXTRA = {
    STE: "LaPrune STE, gamma = 0.9",
    LAPRUNE_TUNED: "LaPrune, gamma tuned",
    LAPSUM_TUNED: "LapSum, t tuned",
    DFTOPK_TUNED: "DFTopK, tau tuned",
    TOPK: "TopK + ReLU + AuxK",
}
ALL = {**LABELS, **EXTRA}
SWEPT = (*LABELS, LAPSUM_TUNED, TOPK)
CHECKED = (FIXED, HARD)
"""Trained a second time with products in full float32, to see whether TF32 matters."""


class Paper(NamedTuple):
    fvu: Spread
    probe: Spread


PAPER = {
    ANNEALED: Paper(Spread(0.3587, 0.0006), Spread(0.5659, 0.0036)),
    FIXED: Paper(Spread(0.3462, 0.0002), Spread(0.5719, 0.0040)),
    LAPSUM: Paper(Spread(7.906, 0.123), Spread(0.4535, 0.0033)),
    HARD: Paper(Spread(1.155, 0.010), Spread(0.4689, 0.0039)),
    DFTOPK: Paper(Spread(0.5825, 0.0005), Spread(0.5103, 0.0015)),
}


class Size(NamedTuple):
    m: int
    k: int
    recipe: Recipe
    probe_epochs: int
    probe_batch: int
    sweep_m: tuple[int, ...]
    sweep_k: tuple[int, ...]


SIZES = {
    "full": Size(
        4096,
        32,
        Recipe(epochs=30, batch=4096),
        60,
        8192,
        (1024, 2048, 4096, 8192, 16384),
        (8, 16, 32, 64, 128),
    ),
    "quick": Size(48, 4, Recipe(4, 100, 1e-2, dead_after=200), 5, 200, (32, 48), (4, 8)),
}


def _size(options: Options) -> Size:
    return SIZES["quick" if options.quick else "full"]


def settings(options: Options) -> list[Setting]:
    size, network = _size(options), backbone(options)
    gpu = torch.device(options.device).type == "cuda"
    usual, precise = ("tf32" if gpu else "float32"), "float32"
    few = seeds(options, SWEEP_SEEDS)
    cases = [(usual, size.m, size.k, m, s) for m in ALL for s in seeds(options, SEEDS)]
    cases += [(usual, size.m, k, m, s) for k in size.sweep_k for m in SWEPT for s in few]
    cases += [(usual, m, size.k, a, s) for m in size.sweep_m for a in SWEPT for s in few]
    cases += [(precise, size.m, size.k, m, s) for m in CHECKED for s in seeds(options, SEEDS)]
    # The sweeps pass through the main table's point; on a CPU the check is the table itself.
    return [
        {"backbone": network, "matmul": p, "m": m, "k": k, **method._asdict(), "seed": seed}
        for p, m, k, method, seed in dict.fromkeys(cases)
    ]


def measure(setting: Setting, options: Options) -> dict[str, Any]:
    """One record out of a training that covers all seeds of its method."""
    method = _method(setting)
    return _train(setting["matmul"], setting["m"], setting["k"], method, options)[setting["seed"]]


def _method(setting: Setting) -> Method:
    return Method(*(setting[name] for name in Method._fields))


@functools.lru_cache(maxsize=1)
def _activations(options: Options) -> Activations:
    return activations(options)


@functools.lru_cache(maxsize=1)
def _train(
    precision: str, m: int, k: int, method: Method, options: Options
) -> dict[int, dict[str, Any]]:
    size, data = _size(options), _activations(options)
    fields = {"matmul": precision, "m": m, "k": k, **method._asdict()}
    some = [s["seed"] for s in settings(options) if fields.items() <= s.items()]
    tuning: dict[str, float] = {}
    if method in GRIDS:
        tuning = _tune(method, precision, options)
        method = method._replace(softness=float(min(tuning, key=lambda x: tuning[x])))
    with matmul(precision):
        sae = train(data.train, method, some, m, k, size.recipe)
        found = evaluate(sae, data.test.expand(len(some), -1, -1), batch_size=2048)
        seen = evaluate(sae, data.train.expand(len(some), -1, -1), batch_size=2048)
        accuracy = probe(sae, data, some, size.probe_epochs, size.probe_batch)
    return {
        seed: {
            "fvu": found.fvu[i].item(),
            "probe": accuracy[i],
            "train_fvu": seen.fvu[i].item(),
            "dead": seen.dead[i].item(),
            "dead_on_test": found.dead[i].item(),
            "l0": found.l0[i].item(),
            "mass": found.mass[i].item(),
            "gamma": found.gamma[i].item(),
            "softness": method.softness,
            "tuning": tuning,
        }
        for i, seed in enumerate(some)
    }


@functools.lru_cache
def _tune(method: Method, precision: str, options: Options) -> dict[str, float]:
    """The FVU of each softness on training samples held back, at the main table's m and k."""
    size, x = _size(options), _activations(options).train
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0)).to(x.device)
    held = round(HELD_BACK * len(x))
    kept, judged = x[order[held:]], x[order[:held]]
    some = TUNING_SEEDS[:1] if options.quick else TUNING_SEEDS
    found = {}
    for softness in GRIDS[method]:
        candidate = method._replace(softness=softness)
        with matmul(precision):
            sae = train(kept, candidate, some, size.m, size.k, size.recipe)
            measured = evaluate(sae, judged.expand(len(some), -1, -1), batch_size=2048)
        found[f"{softness:g}"] = measured.fvu.mean().item()
    return found


def probe(
    sae: SparseAutoencoder, data: Activations, some: Sequence[int], epochs: int, batch: int
) -> list[float]:
    """The test accuracy of a linear classifier on the hard codes, one per copy."""
    weight, bias = fit_probe(sae, data, some, epochs, batch)
    codes, device = _codes(sae, data.test), data.test.device
    right = torch.zeros(len(some), dtype=torch.int64, device=device)
    for rows in torch.arange(len(data.test), device=device).split(batch):
        rows = rows.expand(len(some), -1)
        logits = torch.baddbmm(bias, _dense(codes, rows, sae.m), weight)
        right += (logits.argmax(-1) == data.test_labels[rows]).sum(-1)
    return [x / len(data.test) for x in right.tolist()]


def fit_probe(
    sae: SparseAutoencoder, data: Activations, some: Sequence[int], epochs: int, batch: int
) -> tuple[Tensor, Tensor]:
    """Weights (copies, m, classes) and biases of the classifiers."""
    codes = _codes(sae, data.train)
    draws = [torch.Generator().manual_seed(seed) for seed in some]
    bound = 1 / math.sqrt(sae.m)  # torch.nn.Linear's own start
    device = data.train.device
    weight, bias = (
        torch.stack([bound * (2 * torch.rand(*shape, generator=g) - 1) for g in draws])
        .to(device)
        .requires_grad_()
        for shape in ((sae.m, data.classes), (1, data.classes))
    )
    optimiser = torch.optim.Adam(
        [weight, bias], lr=1e-2, weight_decay=1e-4, fused=device.type == "cuda"
    )
    for _ in range(epochs):
        for rows in orders(len(data.train), batch, draws, device):
            logits = torch.baddbmm(bias, _dense(codes, rows, sae.m), weight)
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), data.train_labels[rows].flatten()
            )
            optimiser.zero_grad()
            # The mean is over all copies' samples; each copy's loss is a mean over its own.
            (loss * len(some)).backward()
            optimiser.step()
    return weight.detach(), bias.detach()


@torch.no_grad()
def _codes(sae: SparseAutoencoder, x: Tensor) -> SparseCodes:
    parts = [sae.encode_sparse(part.expand(len(sae.decoder), -1, -1)) for part in x.split(2048)]
    return SparseCodes(*(torch.cat(some, dim=1) for some in zip(*parts, strict=True)))


def _dense(codes: SparseCodes, rows: Tensor, m: int) -> Tensor:
    """Some samples' codes (copies, batch, m)."""
    at = rows[..., None].expand(-1, -1, codes.values.shape[-1])
    values, indices = (x.gather(1, at) for x in codes)
    return values.new_zeros(*rows.shape, m).scatter(-1, indices, values)


def draw(records: list[Record], folder: Path) -> list[Path]:
    return [*_sweeps(records, folder), _report(records, folder)]


def _main(records: list[Record], precision: str | None = None) -> list[Record]:
    """The records at the main table's point."""
    size = SIZES["quick" if records[0]["setting"]["backbone"] == "synthetic" else "full"]
    return select(records, m=size.m, k=size.k, matmul=precision or _usual(records))


def _usual(records: list[Record]) -> str:
    found = {r["setting"]["matmul"] for r in records}
    return "tf32" if "tf32" in found else "float32"


def _values(records: list[Record], method: Method, key: str) -> Floats:
    """One number per seed."""
    some = select(records, **method._asdict())
    return stack(sorted(some, key=lambda r: r["setting"]["seed"]), key)


def _sweeps(records: list[Record], folder: Path) -> list[Path]:
    size = SIZES["quick" if records[0]["setting"]["backbone"] == "synthetic" else "full"]
    usual = select(records, matmul=_usual(records))
    fig, axes = figure(4, width=3.1, height=3.6)
    panels = [
        (name, key, fixed) for name, fixed in (("k", "m"), ("m", "k")) for key in ("fvu", "probe")
    ]
    for axis, (name, key, fixed) in zip(axes, panels, strict=True):
        wanted = getattr(size, f"sweep_{name}")
        at = {fixed: getattr(size, fixed)}
        for i, method in enumerate(SWEPT):
            some = [_values(select(usual, **at, **{name: x}), method, key) for x in wanted]
            few = min(map(len, some))
            y = torch.tensor([v[:few].tolist() for v in some]).T.numpy()
            plot(axis, wanted, y if key == "fvu" else 100 * y, i, label=ALL[method])
        axis.set_xscale("log", base=2)
        axis.set_xticks(wanted, [str(x) for x in wanted])
        axis.set_xlabel(f"{name} at {fixed} = {at[fixed]}")
        axis.set_ylabel("FVU" if key == "fvu" else "probe accuracy, %")
        if key == "fvu":
            log_scale(axis)
    fig.suptitle(NAMES[records[0]["setting"]["backbone"]], fontsize=9)
    fig.legend(
        *axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8
    )
    return save(fig, folder, "sae_images_sweeps")


NAMES = {
    "mobilenet_v2": "MobileNetV2 (1280 components) on CIFAR-100",
    "resnet18": "ResNet-18 (512 components) on CIFAR-100, the paper's",
    "synthetic": "made on the spot, not of a network",
}


def _caveat(network: str, main: list[Record]) -> str:
    if network == "resnet18":
        return ""
    orders = [_order(main, "fvu", "FVU"), _order(main, "probe", "the probe")]
    return (
        "The paper's numbers are of ResNet-18: only the order of methods can be compared. "
        f"{' '.join(orders)} "
    )


def _order(main: list[Record], key: str, name: str) -> str:
    """The order of the paper's methods here and there, the best first."""
    sign = 1 if key == "fvu" else -1
    theirs = sorted(PAPER, key=lambda m: sign * getattr(PAPER[m], key).mean)
    ours = sorted(PAPER, key=lambda m: sign * spread(_values(main, m, key)).mean)
    if ours == theirs:
        return f"By {name} it is the paper's."
    here, there = ("; ".join(LABELS[m] for m in some) for some in (ours, theirs))
    return f"By {name} it differs. Here: {here}. In the paper: {there}."


def _report(records: list[Record], folder: Path) -> Path:
    network = records[0]["setting"]["backbone"]
    where = records[0]["where"]
    main = _main(records)
    count = len(_values(main, FIXED, "fvu"))
    parts = [
        "# Sparse autoencoders on image activations",
        f"Activations: {NAMES[network]}, standardised. {_caveat(network, main)}"
        f"Mean ± sample standard deviation over {count} seeds; evaluation is hard top-k; "
        f"{where['hardware']}, torch {where['versions']['torch']}, matrix products in "
        f"{_usual(records)}.",
        _table(main),
        "`dead`: latents that are in no training sample's hard top-k. `mass`, `gamma`: of the "
        "training mask at the end of training. The tuned rows take the softness with the smallest "
        f"FVU on a tenth of the training samples, held back, over {len(TUNING_SEEDS)} other seeds. "
        "TopK + ReLU + AuxK is the plain top-k autoencoder in common use: ReLU, no gradient to "
        "what is not selected, and d/2 dead latents (silent for one epoch) rebuilding the residual "
        "at weight 1/32.",
        "## LaPrune, gamma = 0.9, against each",
        _pairs(main),
        "The difference is LaPrune minus the other, paired by seed; p is Wilcoxon's two-sided "
        "signed-rank test. The paper reports p = 0.0078 against LapSum, hard top-k and DFTopK.",
        "## Softness, tuned",
        *_tuned(main),
        "## TF32 against float32",
        _precision(records),
        "## Sweeps",
        *(_sweep_table(records, name, key) for name in ("k", "m") for key in SWEEPS),
    ]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "sae_images.md"
    path.write_text("\n\n".join(parts) + "\n")
    return path


def _table(main: list[Record]) -> str:
    rows = []
    for method, label in ALL.items():
        paper = PAPER.get(method)
        probe_ = spread(100 * _values(main, method, "probe"))
        rows.append(
            [
                label,
                "" if paper is None else pm(paper.fvu, ".4f"),
                pm(spread(_values(main, method, "fvu")), ".4f"),
                "" if paper is None else pm(Spread(*(100 * x for x in paper.probe)), ".2f"),
                pm(probe_, ".2f"),
                pm(spread(100 * _values(main, method, "dead")), ".1f"),
                pm(spread(_values(main, method, "mass")), ".2f"),
                pm(spread(_values(main, method, "gamma")), ".3f"),
            ]
        )
    header = ("FVU, paper", "FVU", "probe %, paper", "probe %", "dead %", "mass", "gamma")
    return markdown(("method", *header), rows)


def _pairs(main: list[Record]) -> str:
    rows = []
    for method, label in ALL.items():
        if method == FIXED:
            continue
        cells = [label]
        for key, scale, form in (("fvu", 1, "+.4f"), ("probe", 100, "+.2f")):
            pair = compare(scale * _values(main, FIXED, key), scale * _values(main, method, key))
            cells += [pm(pair.difference, form).replace("± +", "± "), f"{pair.p:.2g}"]
        rows.append(cells)
    return markdown(("against", "FVU", "p", "probe, points", "p"), rows)


def _tuned(main: list[Record]) -> list[str]:
    parts = []
    for method in GRIDS:
        result = select(main, **method._asdict())[0]["result"]
        cells = [f"{fvu:.4f}" for fvu in result["tuning"].values()]
        parts.append(markdown((EXTRA[method], *result["tuning"]), [("FVU held back", *cells)]))
    return parts


def _precision(records: list[Record]) -> str:
    if not select(records, matmul="float32"):
        return "Not measured yet."
    rows = []
    for method in CHECKED:
        cells = [LABELS[method]]
        for key, scale, form in (("fvu", 1, ".4f"), ("probe", 100, ".2f")):
            cells += [
                pm(spread(scale * _values(_main(records, precision), method, key)), form)
                for precision in (_usual(records), "float32")
            ]
        rows.append(cells)
    usual = _usual(records)
    header = (f"FVU, {usual}", "FVU, float32", f"probe %, {usual}", "probe %, float32")
    return markdown(("method", *header), rows)


SWEEPS = {
    "fvu": ("FVU", 1, ".4f"),
    "probe": ("probe %", 100, ".2f"),
    "dead": ("dead %", 100, ".1f"),
}
"""What the tables of the sweeps show: title, factor and form."""


def _sweep_table(records: list[Record], name: str, key: str) -> str:
    size = SIZES["quick" if records[0]["setting"]["backbone"] == "synthetic" else "full"]
    fixed = "m" if name == "k" else "k"
    usual = select(records, matmul=_usual(records), **{fixed: getattr(size, fixed)})
    wanted = getattr(size, f"sweep_{name}")
    title, scale, form = SWEEPS[key]
    few = min(len(_values(select(usual, **{name: x}), FIXED, key)) for x in wanted)
    rows = [
        [
            ALL[method],
            *(
                pm(spread(scale * _values(select(usual, **{name: x}), method, key)[:few]), form)
                for x in wanted
            ),
        ]
        for method in SWEPT
    ]
    return markdown((f"{title} at {name} =", *map(str, wanted)), rows)


STUDY = Study(
    "sae_images",
    "the paper's sparse-autoencoder table and sweeps on image activations",
    settings,
    measure,
    draw,
)
