"""What the mask costs in a training step of a sparse autoencoder, beside plain top-k.

A record is one size: all contenders take whole steps (forward, backward, Adam, renormalisation) on
the same activations in one process; then the masks alone are timed on the scores of a trained
autoencoder, forward and backward, and the ways to decode k latents a sample. On a GPU all of it is
replayed from CUDA graphs: what the device needs, without what Python needs to launch it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import laprune
from laprune.sae import BatchTopKActivation, SparseAutoencoder, TopKActivation, Trainer

from .lab import Options, Record, Setting, Study, hardware
from .sae_training import matmul
from .style import COLOURS, figure, save
from .tables import markdown
from .timing import graph_ms, median_ms

K, GAMMA = 32, 0.9
SETTLE = 20
"""Steps that an autoencoder takes before its scores are used: no mere random projections."""


class _Stored(TopKActivation):
    """The soft mask as a tensor of its own, times u."""

    def _train(self, u: Tensor) -> Tensor:
        return u * laprune.soft_topk(u, self.k, self.gamma)


CONTENDERS: dict[str, Callable[[int], torch.nn.Module]] = {
    "no mask": lambda k: torch.nn.Identity(),
    "TopK": lambda k: TopKActivation(k, mode="hard"),
    "LaPrune": lambda k: TopKActivation(k, GAMMA),
    "LaPrune, mask stored": lambda k: _Stored(k, GAMMA),
    "LaPrune STE": lambda k: TopKActivation(k, GAMMA, "ste"),
    "BatchTopK": lambda k: BatchTopKActivation(k, mode="hard", postact=None),
    "LaPrune over the batch": lambda k: BatchTopKActivation(k, GAMMA, postact=None),
}


def settings(options: Options) -> list[Setting]:
    gpu = torch.device(options.device).type == "cuda"
    if options.quick:
        shapes = [(16, 64, 32, 4)]
    elif gpu:
        shapes = [(d, m, 4096, K) for m in (4096, 65536) for d in (512, 1280)]
    else:
        shapes = [(512, 4096, 256, K)]
    where = {"hardware": hardware(options.device), "device": options.device}
    return [
        {"d": d, "m": m, "batch": batch, "k": k, "matmul": precision, **where}
        for d, m, batch, k in shapes
        for precision in (("float32", "tf32") if gpu else ("float32",))
    ]


def measure(setting: Setting, options: Options) -> dict[str, Any]:
    d, m, k = setting["d"], setting["m"], setting["k"]
    g = torch.Generator().manual_seed(0)
    x = torch.randn(setting["batch"], d, generator=g).to(setting["device"])
    repeats = 3 if options.quick else 15
    with matmul(setting["matmul"]):
        steps = {}
        for name, make in CONTENDERS.items():
            sae = SparseAutoencoder(d, m, k, activation=make(k)).to(x.device)
            trainer = Trainer(sae)
            for group in trainer.optimiser.param_groups:
                group["capturable"] = x.is_cuda
            step = functools.partial(trainer.step, x)
            steps[name] = _ms(step, setting["device"], repeats)
            del sae, trainer, step
        sae = SparseAutoencoder(d, m, k, GAMMA).to(x.device)
        trainer = Trainer(sae)
        for _ in range(2 if options.quick else SETTLE):
            trainer.step(x)
        u = sae(x).scores.detach()
        sae.eval()
        return {
            "step": steps,
            "mask": _masks(u, k, setting["device"], repeats),
            "decode": _decodes(sae, x, setting["device"], repeats),
        }


def _ms(call: Callable[[], object], device: str, repeats: int) -> float:
    if torch.device(device).type == "cuda":
        return graph_ms(call, repeats, calls=3)
    return median_ms(call, device, repeats, warm_ups=3)


def _masks(u: Tensor, k: int, device: str, repeats: int) -> dict[str, float]:
    """Forward and backward of each activation alone."""
    upstream = torch.randn_like(u)
    u = u.requires_grad_()
    found = {}
    for name, make in CONTENDERS.items():
        if name == "no mask":
            continue
        layer = make(k).to(u.device)

        def both(layer: torch.nn.Module = layer) -> object:
            return torch.autograd.grad(layer(u), u, upstream)

        found[name] = _ms(both, device, repeats)
    return found


@torch.no_grad()
def _decodes(sae: SparseAutoencoder, x: Tensor, device: str, repeats: int) -> dict[str, float]:
    """Three ways from codes to activations; they must agree to be timed."""
    codes, dense = sae.encode_sparse(x), sae.encode(x)

    def gathered() -> Tensor:
        return (codes.values[:, None] @ sae.decoder[codes.indices]).squeeze(1) + sae.pre_bias

    ways: dict[str, Callable[[], Tensor]] = {
        "dense product": lambda: sae.decode(dense),
        "gather": gathered,
        "embedding_bag": lambda: sae.decode_sparse(codes),
    }
    wanted = sae.decode_sparse(codes)
    found = {}
    for name, way in ways.items():
        off = ((way() - wanted).norm() / wanted.norm()).item()
        if off > 1e-2:  # TF32 keeps three digits
            raise AssertionError(f"{name} is off by {off:.1e}")
        found[name] = _ms(way, device, repeats)
    return found


def _title(setting: Setting) -> str:
    names = ("d", "m", "batch", "k")
    sizes = ", ".join(f"{name} = {setting[name]}" for name in names)
    return f"{sizes}, {setting['matmul']}"


def _commits(records: list[Record]) -> str:
    """Which sizes were measured at which commit."""
    found: dict[str, list[str]] = {}
    for record in records:
        found.setdefault(str(record["where"]["commit"]), []).append(f"m = {record['setting']['m']}")
    return "; ".join(f"{', '.join(dict.fromkeys(sizes))} at {x}" for x, sizes in found.items())


def draw(records: list[Record], folder: Path) -> list[Path]:
    where = records[0]["where"]
    parts = [
        "# What the mask costs in a training step",
        f"Milliseconds, medians, {where['hardware']}, torch {where['versions']['torch']}; a step "
        "is forward, backward, Adam and renormalisation, on one batch of Gaussian activations. On "
        "a GPU all is replayed from CUDA graphs. `share`: the mask alone, forward and backward, "
        f"over the step it is part of; gamma = {GAMMA}. Measured with the kernels of: "
        f"{_commits(records)}.",
    ]
    for record in records:
        result = record["result"]
        plain = result["step"]["TopK"]
        rows = []
        for name, step in result["step"].items():
            mask = result["mask"].get(name)
            alone = ["", ""] if mask is None else [f"{mask:.3f}", f"{mask / step:.1%}"]
            rows.append([name, f"{step:.3f}", f"{step / plain:.2f}", *alone])
        header = ("training mask", "step", "x TopK", "mask alone", "share")
        decoding = ", ".join(f"{name} {ms:.3f}" for name, ms in result["decode"].items())
        parts += [
            f"## {_title(record['setting'])}",
            markdown(header, rows),
            f"Decoding k latents a sample at evaluation: {decoding}.",
        ]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "sae_cost.md"
    path.write_text("\n\n".join(parts) + "\n")
    return [path, *_figure(records, folder)]


def _figure(records: list[Record], folder: Path) -> list[Path]:
    """Steps as bars, the mask's part of each in the dark."""
    columns = min(4, len(records))
    fig, axes = figure(len(records), width=2.6, height=2.5, columns=columns)
    names = list(CONTENDERS)[::-1]
    for axis, record in zip(axes, records, strict=True):
        result = record["result"]
        axis.barh(names, [result["step"][name] for name in names], color=COLOURS[5], label="step")
        masks = [result["mask"].get(name, 0.0) for name in names]
        axis.barh(names, masks, color=COLOURS[0], label="mask alone")
        s = record["setting"]
        axis.set_title(f"d = {s['d']}, m = {s['m']}, {s['matmul']}", fontsize=8)
        axis.set_xlabel("ms")
        axis.grid(visible=False, axis="y")
        if axis not in axes[::columns]:
            axis.set_yticklabels([])
    fig.legend(
        *axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8
    )
    return save(fig, folder, "sae_cost")


STUDY = Study(
    "sae_cost",
    "what the mask costs in a training step of a sparse autoencoder",
    settings,
    measure,
    draw,
)
