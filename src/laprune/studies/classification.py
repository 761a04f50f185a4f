"""CIFAR-100 with a pure top-5 loss: the paper's classification table.

A ResNet-18 from scratch under ``-log p_y``, p the soft top-5 mask of the 100 scores: Adam at
10^-3.25, batches of 100, a cosine over all epochs, gradients clipped at norm 5, LaPrune's gamma
linear by epoch from 0.1 to 0.8. Beside the paper's seven methods: plain cross-entropy, and LaPrune
with the logarithm taken exactly, and LaPrune almost to the hard end with a lower bound on the
temperature. All rows of a table have the same number of epochs.

`python -m laprune.studies.classification` measures how many images per second this machine trains
on, for some numbers of runs at once.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import laprune
from laprune import baselines
from laprune.baselines import smooth_topk_loss
from laprune.baselines.transport import sinkhorn_topk
from laprune.losses import Operator, TopKCrossEntropy
from laprune.schedules import linear

from .harvest import cifar100
from .image_training import Images, Recipe, Run, train_all
from .lab import Measured, Options, Record, Setting, Study
from .style import COLOURS, LINES, figure, save
from .tables import Floats, markdown, page, pm, seeds, select, spread, stack

K = 5
SEEDS = 2
FLOOR = 1e-7
"""Of the masks in the published comparison: the loss is -log((1 - 2e-7) p + 1e-7)."""
CLIP = 5.0
PARALLEL = 6
"""Runs at once on a GPU where nothing else is asked for."""
SINKHORN_ITERATIONS = 50
NEAR = 1e-3
"""A mask's entry this close to 0 or 1 is saturated."""


class Method(NamedTuple):
    """What is minimised."""

    operator: str
    """laprune, lapsum, a baseline, smooth_topk or cross_entropy."""
    softness: float | None = None
    """gamma (at the last epoch), t, tau, epsilon or the width of a swap, whichever there is."""
    start: float | None = None
    """gamma at the first epoch, if it is annealed."""
    floor: float | None = FLOOR
    """None: the exact logarithm."""
    clip: float | None = CLIP
    min_temperature: float = 0.0
    detached: bool = False
    """Whether the gradient takes the temperature as given."""


LAPRUNE = Method("laprune", 0.8, 0.1)
LOG = LAPRUNE._replace(floor=None)
RAISED = LAPRUNE._replace(softness=0.99, min_temperature=0.5)
LAPSUM = Method("lapsum", 1.0, floor=None)
CROSS_ENTROPY = Method("cross_entropy", floor=None)
SMOOTH = Method("smooth_topk", 1.0, floor=None)
NEURALSORT = Method("neuralsort", 16.0)
SOFTSORT = Method("softsort", 16.0)
SINKHORN = Method("sinkhorn", 2.0)
NETWORK = Method("bitonic", 2.0)

LABELS = {
    SMOOTH: "Smooth top-k, tau = 1",
    NEURALSORT: "NeuralSort, tau = 16",
    SOFTSORT: "SoftSort, tau = 16",
    SINKHORN: "SinkhornSort, epsilon = 2",
    NETWORK: "sorting network, steepness 1/2",
    LAPSUM: "LapSum, t = 1",
    LAPRUNE: "LaPrune, gamma 0.1 → 0.8",
    LOG: "LaPrune, gamma 0.1 → 0.8, log space",
    RAISED: "LaPrune, gamma 0.1 → 0.99, t ≥ 0.5",
    CROSS_ENTROPY: "cross-entropy",
}
PAPER = {
    SMOOTH: (57.3, 90.3),
    NEURALSORT: (13.4, 86.3),
    SOFTSORT: (60.4, 89.8),
    SINKHORN: (62.4, 90.2),
    NETWORK: (62.4, 90.6),
    LAPSUM: (65.9, 92.3),
    LAPRUNE: (72.0, 87.4),
}
"""Top-1 and top-5 accuracy in per cent."""
FIRST = (LAPRUNE, LAPSUM, CROSS_ENTROPY)

RECIPES = {"full": Recipe(), "quick": Recipe(epochs=2, batch=20, width=4)}


class TopFive(nn.Module):
    """A method as a loss, with what is watched of its mask."""

    def __init__(self, method: Method, epochs: int) -> None:
        super().__init__()
        name, softness = method.operator, method.softness
        self.method, self.masks = method, name in ("laprune", "lapsum")
        self.watched: tuple[str, ...] = ()
        if self.masks:
            self.watched = ("saturated", "floored", "underflow", "temperature", "hardness")
        self.schedule = None
        if name == "laprune":
            assert softness is not None
            start = softness if method.start is None else method.start
            self.schedule = linear(start, softness, epochs)
            self.top5 = TopKCrossEntropy(
                K,
                start,
                min_temperature=method.min_temperature,
                detach_temperature=method.detached,
                floor=method.floor,
            )
        elif name == "lapsum":
            self.top5 = TopKCrossEntropy(K, temperature=softness, floor=method.floor)
        elif name not in ("cross_entropy", "smooth_topk"):
            self.top5 = TopKCrossEntropy(K, operator=operator(method), floor=method.floor)

    def begin(self, epoch: int) -> None:
        if self.schedule is not None:
            self.top5.set_gamma(self.schedule(epoch))

    def loss(self, scores: Tensor, target: Tensor) -> Tensor:
        if self.method.operator == "cross_entropy":
            return nn.functional.cross_entropy(scores, target)
        if self.method.operator == "smooth_topk":
            assert self.method.softness is not None
            return smooth_topk_loss(scores, target, K, self.method.softness).mean()
        return self.top5(scores, target)

    @torch.no_grad()
    def watch(self, scores: Tensor, target: Tensor) -> list[Tensor]:
        if not self.masks:
            return []
        gamma, least = self.top5.gamma, self.method.min_temperature
        if gamma is None:
            t = scores.new_full(scores.shape[:-1], self.method.softness or 0.0)
        else:
            s = laprune.solve(scores, K, gamma)
            t = torch.where(s.temperature > least, s.temperature, least)
        p = laprune.lapsum_topk(scores, K, t) if gamma is None or least else s.mask
        own = p.gather(-1, target[:, None])
        shares = (torch.minimum(p, 1 - p) < NEAR, own < FLOOR, own == 0)
        a = K / p.shape[-1]
        hardness = (p.square().sum(-1) / K - a) / (1 - a)  # the gamma of a mask of mass k
        return [*(x.float().mean() for x in shares), t.mean(), hardness.mean()]


def operator(method: Method) -> Operator:
    """A baseline at the method's softness."""
    assert method.softness is not None
    if method.operator == "sinkhorn":
        return functools.partial(
            sinkhorn_topk, epsilon=method.softness, iterations=SINKHORN_ITERATIONS
        )
    return functools.partial(baselines.get(method.operator), softness=method.softness)


def recipe(options: Options) -> Recipe:
    usual = RECIPES["quick" if options.quick else "full"]
    return usual if options.epochs is None else usual._replace(epochs=options.epochs)


def listed(methods: Sequence[Method], options: Options) -> list[Setting]:
    """Every seed of each method in turn."""
    source = "synthetic" if options.quick else "cifar100"
    epochs = recipe(options).epochs
    return [
        {"images": source, "epochs": epochs, **method._asdict(), "seed": seed}
        for method in methods
        for seed in seeds(options, 1 if options.quick else SEEDS)
    ]


def settings(options: Options) -> list[Setting]:
    return listed([*FIRST, *(m for m in LABELS if m not in FIRST)], options)


def method_of(setting: Setting) -> Method:
    return Method(*(setting[name] for name in Method._fields))


@functools.lru_cache(maxsize=1)
def load_images(data: Path | None, device: str, quick: bool) -> Images:
    if quick:
        return synthetic(device)
    parts = [torch.from_numpy(x) for split in ("train", "test") for x in cifar100(data, split)]
    return Images.of(parts[0], parts[1], parts[2], parts[3], device)


def synthetic(device: str = "cpu", n: int = 60, classes: int = 20, seed: int = 0) -> Images:
    """Noise about a pattern of each class.

    >>> synthetic(n=40).test.shape
    torch.Size([40, 32, 32, 3])
    """
    g = torch.Generator().manual_seed(seed)
    patterns = torch.randint(256, (classes, 4, 4, 3), generator=g).float()
    labels = torch.arange(2 * n) % classes
    large = patterns[labels].repeat_interleave(8, 1).repeat_interleave(8, 2)
    noisy = large + 40 * torch.randn(large.shape, generator=g)
    x = noisy.clamp(0, 255).to(torch.uint8)
    return Images.of(x[:n], labels[:n], x[n:], labels[n:], device)


def together(wanted: list[Setting], options: Options) -> Iterator[Measured]:
    """Train all that is wanted, some at once; a run that was stopped goes on from its checkpoint.

    A finished run leaves its result among the checkpoints: another study may want it.
    """
    jobs = []
    for setting in wanted:
        path = _checkpoint(setting, options)
        if path is not None and path.with_suffix(".json").exists():
            yield setting, json.loads(path.with_suffix(".json").read_text())
        else:
            jobs.append((setting, functools.partial(_run, setting, options)))
    gpu = torch.device(options.device).type == "cuda"
    at_once = options.parallel or (PARALLEL if gpu else 1)
    for setting, run in train_all(jobs, at_once, lambda: options.late):
        if not run.finished:
            continue
        result = run.result() | {
            "precision": str(run.dtype).removeprefix("torch."),
            "at_once": at_once,
            "compiled": options.compiled,
        }
        if run.checkpoint is not None:
            run.checkpoint.parent.mkdir(parents=True, exist_ok=True)
            run.checkpoint.with_suffix(".json").write_text(json.dumps(result))
            run.checkpoint.unlink(missing_ok=True)
        yield setting, result


def measure(setting: Setting, options: Options) -> dict[str, Any]:
    """One setting by itself."""
    return next(together([setting], options))[1]


def _run(setting: Setting, options: Options) -> Run:
    method, how = method_of(setting), recipe(options)
    return Run(
        load_images(options.data, options.device, options.quick),
        TopFive(method, how.epochs),
        how,
        setting["seed"],
        clip=method.clip,
        compiled=options.compiled,
        checkpoint=_checkpoint(setting, options),
    )


def _checkpoint(setting: Setting, options: Options) -> Path | None:
    if options.cache is None:
        return None
    key = hashlib.sha256(json.dumps(setting, sort_keys=True).encode()).hexdigest()[:16]
    return options.cache / "classification" / f"{key}.safetensors"


def accuracies(
    records: list[Record],
    labels: dict[Method, str],
    paper: dict[Method, tuple[float, float]],
) -> str:
    """A table with a line per method that was run.

    The paper's numbers stand beside ours, and are compared where the schedule is the paper's.
    """
    compared = records[0]["setting"]["epochs"] == RECIPES["full"].epochs and not trial(records)
    head, lines = ["method"], []
    for k in (1, 5):
        head += [f"ACC@{k}, paper", f"ACC@{k}", "difference"] if compared else [f"ACC@{k}"]
    if not compared:
        head += ["ACC@1, paper", "ACC@5, paper"]
    for method, label in labels.items():
        some = select(records, **method._asdict())
        if not some:
            continue
        ours = [spread(100 * stack(some, key)) for key in ("top1", "top5")]
        theirs = paper.get(method)
        said = ["not given"] * 2 if theirs is None else [f"{x:.1f}" for x in theirs]
        cells = [pm(x, ".1f") for x in ours]
        if compared:
            off = [""] * 2
            if theirs is not None:
                off = [f"{x.mean - y:+.1f}" for x, y in zip(ours, theirs, strict=True)]
            lines.append([label, said[0], cells[0], off[0], said[1], cells[1], off[1]])
        else:
            lines.append([label, *cells, *said])
    return markdown(head, lines)


def trial(records: list[Record]) -> bool:
    """Whether these are of made-up images."""
    return records[0]["setting"]["images"] == "synthetic"


def data(records: list[Record]) -> str:
    """For the title of a table."""
    source = "a trial" if trial(records) else "CIFAR-100, ResNet-18"
    return f"{source}, {records[0]['setting']['epochs']} epochs"


def notes(records: list[Record], labels: dict[Method, str]) -> list[str]:
    """What every table says of how it was made."""
    epochs = {r["setting"]["epochs"] for r in records}
    if len(epochs) != 1:
        raise ValueError(f"one table, one schedule: got records of {sorted(epochs)} epochs")
    count = epochs.pop()
    counts = {len(select(records, **m._asdict())) for m in labels} - {0}
    seeds_ = " to ".join(map(str, sorted({min(counts), max(counts)})))
    plural = "" if seeds_ == "1" else "s"
    paper = RECIPES["full"].epochs
    as_there = "as in the paper" if count == paper else f"the paper: {paper}"
    said = (
        f"All rows: {count} epochs ({as_there}), {seeds_} seed{plural}, accuracy in per cent on "
        "the test images after the last epoch."
    )
    if count != paper:
        said += (
            " Another schedule than the paper's, the same for all rows: compare rows with rows, "
            "not with the paper."
        )
    if trial(records):
        said += " A trial of the machinery on made-up images: nothing here is a result."
    precisions = sorted({r["result"]["precision"] for r in records})
    lines = [said + f" Convolutions in {' and '.join(precisions)}."]
    missing = [label for m, label in labels.items() if not select(records, **m._asdict())]
    if missing:
        lines.append(f"Not run for {count} epochs: {'; '.join(missing)}.")
    return lines


def suffix(records: list[Record]) -> str:
    """Files carry the number of epochs: there may be several schedules."""
    return f"_{records[0]['setting']['epochs']}_epochs"


def curve(records: list[Record], method: Method, key: str) -> Floats:
    """The mean over seeds by epoch; it ends where the first of them ended."""
    some = [r["result"]["epochs"][key] for r in select(records, **method._asdict())]
    shortest = min(map(len, some))
    cut = [{"result": {key: x[:shortest]}} for x in some]
    return stack(cut, key).mean(0)


def style(i: int) -> dict[str, Any]:
    """The i-th line, thinner in the second round."""
    n = len(COLOURS)
    return {"color": COLOURS[i % n], "linestyle": LINES[i % n], "linewidth": 1.6 - 0.6 * (i // n)}


def draw(records: list[Record], folder: Path) -> list[Path]:
    name = f"classification{suffix(records)}"
    fig, axes = figure(2, width=4.6, height=4.2)
    for i, method in enumerate(m for m in LABELS if select(records, **m._asdict())):
        for axis, key in zip(axes, ("top1", "top5"), strict=True):
            y = 100 * curve(records, method, key)
            axis.plot(range(1, len(y) + 1), y, label=LABELS[method], **style(i))
    for axis, k in zip(axes, (1, 5), strict=True):
        axis.set(xlabel="epoch", ylabel=f"ACC@{k} on the test images, %")
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    said = [
        "The paper takes the softness of the other methods from the LapSum benchmark and prints "
        "none. Here NeuralSort, SoftSort, smooth top-k and the network have that of Petersen et "
        "al.'s experiments on the same data, LapSum and SinkhornSort unit temperature (epsilon = 2 "
        "is a logistic of unit width). The network is bitonic with Cauchy swaps, Sinkhorn's plan "
        "has two bins. How the paper takes the logarithm is not said; here masks enter as "
        "-log((1 - 2e-7) p + 1e-7), as in Petersen et al.'s code; LapSum, and LaPrune where it "
        "says log space, as -log p from barrier and temperature; t ≥ 0.5: a row whose gamma asks "
        "for less has that temperature. Every row is clipped at norm 5.",
    ]
    title = f"Pure top-5 loss, {data(records)}"
    found = accuracies(records, LABELS, PAPER)
    table = page(folder, name, title, [found, *notes(records, LABELS), *said])
    return [*save(fig, folder, f"{name}_curves"), table]


STUDY = Study(
    "classification",
    "CIFAR-100 with a pure top-5 loss: LaPrune, six other methods and cross-entropy",
    settings,
    measure,
    draw,
    together,
)


def speed(parallel: int, options: Options, method: Method = LAPRUNE, epochs: int = 4) -> float:
    """Images per second over all runs, on random images, once all are under way."""
    n, how = 10_000 if not options.quick else 100, recipe(options)._replace(epochs=epochs)
    g = torch.Generator().manual_seed(0)
    x = torch.randint(256, (n, 32, 32, 3), generator=g, dtype=torch.uint8)
    y = torch.arange(n) % 100
    images = Images.of(x, y, x[:100], y[:100], options.device)

    def make(seed: int) -> Run:
        return Run(images, TopFive(method, epochs), how, seed, compiled=options.compiled)

    jobs = [(i, functools.partial(make, i)) for i in range(parallel)]
    took = []
    for _, run in train_all(jobs, parallel, lambda: False):
        took += [log["seconds"] for log in run.logs[1:-1]]
    return parallel * run.steps * how.batch / statistics.median(took)


def main() -> None:
    parser = argparse.ArgumentParser(description="Images per second, by how many runs at once.")
    parser.add_argument("parallel", type=int, nargs="*", default=[1, 2, 4, 6, 8])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--operator", default="laprune", choices=[m.operator for m in LABELS])
    given = parser.parse_args()
    method = next(m for m in LABELS if m.operator == given.operator)
    options = Options(device=given.device, quick=given.quick, compiled=given.compile)
    for parallel in given.parallel:
        rate = speed(parallel, options, method)
        epoch = math.inf if rate == 0 else 50_000 / rate
        print(f"{parallel:3} at once: {rate:9.0f} images/s, {epoch:.2f} s per 50,000", flush=True)


if __name__ == "__main__":
    main()
