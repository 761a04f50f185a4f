"""Pruning whole networks on real images: accuracy against the part of the weights that is kept.

A dense network is trained first. Every method starts from it, has the same optimiser, the same
number of fine-tuning steps and the same final count of weights over the whole network (the dense
network itself gets no such steps, so that a pruned one can be better than it):

- one-shot: ``torch.nn.utils.prune.global_unstructured`` by magnitude, then fine-tuning;
- gradual: the same function again and again along a cubic schedule;
- LaPrune: :class:`laprune.prune.GlobalPruner` along the same schedule, gamma from 0.5 to 1, by the
  size of the weights or by learned scores; with soft masks, or hard ones with the soft gradient
  (ste). A weight that is not yet certain keeps its gradient.

Soft masks can starve a layer where batch normalisation blows up whatever little passes, until the
hard mask lets nothing pass; so the convolutional network is there with and without it. Masks that
are hard forward leave nothing to blow up.

The digits of scikit-learn need no data; CIFAR-100 is added where its folder is given.
"""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from laprune.prune import GlobalPruner
from laprune.schedules import Schedule

from .harvest import cifar100
from .lab import Measured, Options, Record, Setting, Study, one_thread
from .style import figure, save
from .tables import Floats, markdown, plot, pm, prose, seeds, select, spread, stack

SEEDS = 3
DENSITIES = {"full": (0.5, 0.2, 0.1, 0.05, 0.02, 0.01), "quick": (0.5, 0.1)}
METHODS = {
    "laprune_ste": "LaPrune, magnitude, ste",
    "laprune_learned": "LaPrune, learned scores, ste",
    "laprune_soft": "LaPrune, magnitude, soft",
    "gradual": "gradual magnitude",
    "one_shot": "global_unstructured, one shot",
}
OURS = tuple(name for name in METHODS if name.startswith("laprune"))
SETTLED = 0.7  # the part of the fine-tuning after which count and gamma are final
FIRST_GAMMA = 0.5
FREE = "position"  # parameters of this name are not pruned


class Task(NamedTuple):
    """Images (n, channels, side, side) and classes, for training and for testing."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor


class Plan(NamedTuple):
    """How long to train, and the width of the networks."""

    epochs: int
    tuning: int
    batch: int
    rate: float
    width: int


PLANS = {
    "digits": {"full": Plan(20, 20, 128, 3e-3, 32), "quick": Plan(2, 2, 256, 5e-3, 8)},
    "cifar100": {"full": Plan(10, 5, 512, 2e-3, 64), "quick": Plan(1, 1, 256, 1e-3, 16)},
}


class Transformer(nn.Module):
    """Two blocks over patches of an image."""

    def __init__(self, shape: tuple[int, int, int], patch: int, width: int, classes: int) -> None:
        super().__init__()
        channels, side, _ = shape
        self.patch = patch
        self.embed = nn.Linear(channels * patch * patch, width)
        self.position = nn.Parameter(0.02 * torch.randn((side // patch) ** 2, width))
        self.blocks = nn.ModuleList(_Block(width) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.unfold(x, self.patch, stride=self.patch).transpose(1, 2)
        x = self.embed(x) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class _Block(nn.Module):
    HEADS = 4

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mix(self.norms[0](x)).unflatten(-1, (3 * self.HEADS, -1)).chunk(3, 2)
        heads = (y.transpose(1, 2) for y in (q, k, v))
        seen = nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        x = x + self.out(seen)
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


def _conv(
    shape: tuple[int, int, int], width: int, classes: int, normalised: bool = True
) -> nn.Module:
    channels, side, _ = shape
    layers: list[nn.Module] = []
    for out in (width // 2, width, 2 * width) if side > 8 else (width // 2, width):
        layers.append(nn.Conv2d(channels, out, 3, padding=1))
        layers += [nn.BatchNorm2d(out)] if normalised else []
        layers += [nn.ReLU(), nn.MaxPool2d(2)]
        channels, side = out, side // 2
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * side * side, classes))


NETWORKS: dict[str, Callable[[tuple[int, int, int], int, int], nn.Module]] = {
    "convolutional": _conv,
    "convolutional, plain": functools.partial(_conv, normalised=False),
    "transformer": lambda shape, width, classes: Transformer(
        shape, max(2, shape[1] // 8), width, classes
    ),
}


CASES = {"digits": tuple(NETWORKS), "cifar100": ("convolutional", "transformer")}
PARALLEL = 12
"""Trainings at once on a GPU: small networks keep the host busier than the device."""


@functools.lru_cache(maxsize=1)
def digits(seed: int) -> Task:
    """Scikit-learn's 1797 digits, 8 x 8, two thirds for training."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(y))
    images = torch.tensor(x[order] / 16 - 0.3, dtype=torch.float32).reshape(-1, 1, 8, 8)
    classes = torch.tensor(y[order])
    return Task(images[:1200], classes[:1200], images[1200:], classes[1200:])


@functools.lru_cache(maxsize=1)
def cifar(data: Path, quick: bool) -> Task:
    """CIFAR-100, standardised by channel; a thousand images of each kind when quick."""
    first = 1000 if quick else None

    def split(name: str) -> tuple[Tensor, Tensor]:
        images, labels = cifar100(data, name)
        x = torch.tensor(images[:first]).permute(0, 3, 1, 2) / 255
        return x, torch.tensor(labels[:first])

    (x, y), (test_x, test_y) = split("train"), split("test")
    mean, sd = x.mean((0, 2, 3), keepdim=True), x.std((0, 2, 3), keepdim=True)
    return Task((x - mean) / sd, y, (test_x - mean) / sd, test_y)


def settings(options: Options) -> list[Setting]:
    size = "quick" if options.quick else "full"
    tasks = ["digits"] + (["cifar100"] if options.data is not None else [])
    return [
        {"task": task, "size": size, "network": network, "method": method, "seed": seed}
        for task, seed in itertools.product(tasks, seeds(options, SEEDS))
        for network in CASES[task]
        for method in METHODS
    ]


def together(wanted: list[Setting], options: Options) -> Iterator[Measured]:
    """One setting after another, or each in a process of its own, some at once.

    There the dense networks come first: all methods start from the same.
    """
    gpu = torch.device(options.device).type == "cuda"
    at_once = options.parallel or (PARALLEL if gpu else 1)
    if at_once == 1:
        yield from ((s, measure(s, options)) for s in wanted if not options.late)
        return
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(at_once, multiprocessing.get_context("spawn")) as pool,
    ):
        options = replace(options, cache=options.cache or Path(folder))
        bases = {(s["task"], s["network"], s["seed"], s["size"]) for s in wanted}
        for base in [pool.submit(_train_dense, *key, options) for key in sorted(bases)]:
            base.result()
        futures = {pool.submit(_in_time, s, options): s for s in wanted}
        for done in as_completed(futures):
            if (result := done.result()) is not None:
                yield futures[done], result


def _in_time(setting: Setting, options: Options) -> dict[str, Any] | None:
    return None if options.late else measure(setting, options)


def measure(setting: Setting, options: Options) -> dict[str, Any]:
    """Prune one dense network to every density by one method."""
    with one_thread():
        return _measure(setting, options)


def _measure(setting: Setting, options: Options) -> dict[str, Any]:
    size, seed = setting["size"], setting["seed"]
    plan = PLANS[setting["task"]][size]
    task = _task(setting["task"], seed, options)
    dense = _dense(setting["task"], setting["network"], seed, size, options)
    total, accuracy, kept = _count(dense), [], []
    for density in DENSITIES[size]:
        torch.manual_seed(seed)
        model = _network(setting["network"], task, plan).to(options.device)
        model.load_state_dict(dense.state_dict())
        _prune(model, setting["method"], density, task, plan)
        accuracy.append(_accuracy(model, task))
        kept.append(_kept(model))
    return {
        "weights": total,
        "dense": _accuracy(dense, task),
        "density": list(DENSITIES[size]),
        "accuracy": accuracy,
        "kept": kept,
    }


def _task(name: str, seed: int, options: Options) -> Task:
    if name == "digits":
        task = digits(seed)
    else:
        assert options.data is not None
        task = cifar(options.data, options.quick)
    return Task(*(x.to(options.device) for x in task))


def _network(name: str, task: Task, plan: Plan) -> nn.Module:
    channels, height, width = task.x.shape[1:]
    classes = 1 + int(task.y.max())
    return NETWORKS[name]((channels, height, width), plan.width, classes)


@functools.lru_cache(maxsize=4)
def _dense(task_name: str, network: str, seed: int, size: str, options: Options) -> nn.Module:
    """The network that all methods start from; kept where there is a cache."""
    task, plan = _task(task_name, seed, options), PLANS[task_name][size]
    torch.manual_seed(seed)
    model = _network(network, task, plan).to(options.device)
    path = None
    if options.cache is not None:
        path = options.cache / "pruning" / f"{task_name}_{network}_{seed}_{plan}.pt"
    if path is not None and path.exists():
        model.load_state_dict(torch.load(path, weights_only=True))
        return model
    with one_thread():
        _train(model, task, plan, plan.epochs, lambda step: None)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), path)
    return model


def _train_dense(task_name: str, network: str, seed: int, size: str, options: Options) -> None:
    """For another process to find in the cache."""
    _dense(task_name, network, seed, size, options)


def _train(
    model: nn.Module, task: Task, plan: Plan, epochs: int, after: Callable[[int], None]
) -> None:
    """Adam with a rate that falls linearly; ``after(step)`` follows every step."""
    optimiser = torch.optim.Adam(model.parameters(), lr=plan.rate, fused=task.x.is_cuda)
    batches = -(-len(task.x) // plan.batch)
    decay = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.01, epochs * batches)
    model.train()
    for step in range(epochs * batches):
        if step % batches == 0:
            order = torch.randperm(len(task.x), device=task.x.device)
        chosen = order[step % batches * plan.batch :][: plan.batch]
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(task.x[chosen]), task.y[chosen]).backward()
        optimiser.step()
        decay.step()
        after(step)


def _steps(task: Task, plan: Plan) -> int:
    return plan.tuning * -(-len(task.x) // plan.batch)


def cubic(density: float, steps: int) -> Schedule:
    """From 1 to ``density`` as gradual pruning does it: fast first, final after SETTLED.

    >>> schedule = cubic(0.1, steps=100)
    >>> schedule(0), round(schedule(35), 4), schedule(70), schedule(99)
    (1.0, 0.2125, 0.1, 0.1)
    """
    last = max(1, round(SETTLED * steps))
    return lambda step: density + (1 - density) * (1 - min(step / last, 1.0)) ** 3


def _prune(model: nn.Module, method: str, density: float, task: Task, plan: Plan) -> None:
    """Fine-tune while pruning, and leave plain parameters with zeros."""
    steps = _steps(task, plan)
    schedule, last = cubic(density, steps), max(1, round(SETTLED * steps))
    if method in OURS:
        pruner = GlobalPruner(
            model,
            schedule,
            gamma=lambda step: FIRST_GAMMA + (1 - FIRST_GAMMA) * min(step / last, 1.0),
            scores="learned" if method == "laprune_learned" else "magnitude",
            mode="soft" if method == "laprune_soft" else "ste",
            exclude=FREE,
        )
        _train(model, task, plan, plan.tuning, lambda step: pruner.step())
        pruner.finalize()
        return
    sites = [(m, "weight") for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    total = remaining = sum(m.weight.numel() for m, _ in sites)

    def cut(to: float) -> None:
        nonlocal remaining
        amount = remaining - round(to * total)
        prune.global_unstructured(sites, prune.L1Unstructured, amount=amount)
        remaining -= amount

    if method == "one_shot":
        cut(density)
        _train(model, task, plan, plan.tuning, lambda step: None)
    else:
        every = max(1, steps // 100)

        def now_and_then(step: int) -> None:
            if (step + 1) % every == 0 and step < last + every:
                cut(schedule(step + 1))

        cut(1.0)
        _train(model, task, plan, plan.tuning, now_and_then)
    for module, name in sites:
        prune.remove(module, name)


def _weights(model: nn.Module) -> list[Tensor]:
    named = model.named_parameters()
    return [p for name, p in named if p.dim() > 1 and not name.endswith(FREE)]


def _count(model: nn.Module) -> int:
    return sum(p.numel() for p in _weights(model))


def _kept(model: nn.Module) -> int:
    return sum(int((p != 0).sum()) for p in _weights(model))


@torch.no_grad()
def _accuracy(model: nn.Module, task: Task) -> float:
    model.eval()
    found = torch.cat([model(x).argmax(-1) for x in task.test_x.split(1000)])
    return (found == task.test_y).double().mean().item()


def draw(records: list[Record], folder: Path) -> list[Path]:
    tasks = list(dict.fromkeys(r["setting"]["task"] for r in records))
    panels = [(task, network) for task in tasks for network in CASES[task]]
    columns = min(3, len(panels))
    fig, axes = figure(len(panels), width=3.4, height=2.9, columns=columns)
    for axis, (task, network) in zip(axes, panels, strict=True):
        here = select(records, task=task, network=network)
        for i, (method, label) in enumerate(METHODS.items()):
            x, y = _curve(here, method)
            plot(axis, x, y, i, label)
        dense = spread([r["result"]["dense"] for r in here]).mean
        axis.axhline(dense, color="black", lw=0.8, ls=":", label="dense")
        axis.set(xscale="log", xlabel="density")
        axis.set_title(f"{task}, {network}", fontsize=9)
        ticks = records[0]["result"]["density"]
        axis.set_xticks(ticks, [f"{x:g}" for x in ticks])
        axis.set_xticks([], minor=True)
    for axis in axes[::columns]:
        axis.set_ylabel("test accuracy")
    handles = axes[0].get_legend_handles_labels()
    fig.legend(*handles, loc="outside lower center", ncols=3, fontsize=8)
    return [*save(fig, folder, STUDY.name), _report(records, panels, folder)]


def _curve(records: list[Record], method: str) -> tuple[list[float], Floats]:
    chosen = select(records, method=method)
    return chosen[0]["result"]["density"], stack(chosen, "accuracy")


def _report(records: list[Record], panels: list[tuple[str, str]], folder: Path) -> Path:
    parts = ["# Pruning whole networks", prose(__doc__)]
    for task, network in panels:
        here = select(records, task=task, network=network)
        dense = spread([r["result"]["dense"] for r in here if r["setting"]["method"] == "one_shot"])
        weights = here[0]["result"]["weights"]
        density = here[0]["result"]["density"]
        wrong = [
            r
            for r in here
            if r["result"]["kept"] != [round(d * weights) for d in r["result"]["density"]]
        ]
        parts.append(
            f"## {task}, {network}: {weights:,} weights, dense {pm(dense, '.3f')}\n\n"
            f"{len(here) - len(wrong)} of {len(here)} runs kept exactly the weights asked for."
        )
        rows = []
        means: dict[str, list[float]] = {}
        for method, label in METHODS.items():
            _, y = _curve(here, method)
            cells = [spread(y[:, j]) for j in range(len(density))]
            means[method] = [c.mean for c in cells]
            rows.append([label, *(pm(c, ".3f") for c in cells)])
        parts.append(markdown(["accuracy", *(f"{d:g}" for d in density)], rows))
        parts.append(_verdict(density, means))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{STUDY.name}.md"
    path.write_text("\n\n".join(parts) + "\n")
    return path


def _verdict(density: list[float], means: dict[str, list[float]]) -> str:
    """Where each of ours is behind the better of the others, by the means as the table has them."""
    lines = []
    for method in OURS:
        behind = []
        for ours, d, *others in zip(
            means[method], density, *(means[m] for m in METHODS if m not in OURS), strict=True
        ):
            by = round(max(others) - ours, 3)
            if by > 0:
                behind.append(f"{d:g} (by {by:.3f})")
        where = "at " + ", ".join(behind) if behind else "nowhere"
        lines.append(f"- {METHODS[method]}: behind the better of the other two {where}")
    return "\n".join(lines)


STUDY = Study("pruning", "pruning whole networks to one budget", settings, measure, draw, together)
