"""Image classifiers trained from scratch, several at once on one device, without waiting for it.

The images lie on the device as bytes; crops and flips are made there, in the order and with the
offsets that a run draws from its own seed. On a GPU a whole training step (batch, augmentation,
forward, loss, backward, clipping, Adam, diagnostics) is one CUDA graph, and every run has a stream
of its own: a batch of 100 small images fills a fraction of a large GPU, and kernels of different
runs fill the rest. Separate processes would take turns instead, unless a server merges them. The
host only launches graphs, and reads one row of numbers an epoch.

Convolutions compute in bfloat16 on a GPU; batch statistics, the last layer, the loss, the weights
Adam keeps and its moments are float32: scores of eight bits would tie.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from laprune.backends import cuda, use

PADDING = 4
CHUNK = 25
"""Steps launched at a time; two such chunks of a run are under way at most."""
WARM_UP = 3
EVALUATION_BATCH = 1000
SAVE_EVERY = 120.0
"""Seconds between two checkpoints of a run."""
SILENT = 1e-3
"""A row whose gradient in the scores is shorter than this no longer teaches."""


class Images(NamedTuple):
    """Images (n, height, width, 3) as bytes, and their classes; on the device they train on."""

    train: Tensor
    """With black borders, from which crops are cut."""
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor
    mean: Tensor
    """Of the three colours, over the training images."""
    sd: Tensor
    classes: int

    @classmethod
    def of(
        cls, train: Tensor, train_labels: Tensor, test: Tensor, test_labels: Tensor, device: str
    ) -> Images:
        train = train.to(device)
        pixels = train.flatten(0, 2).float()
        border = (0, 0, PADDING, PADDING, PADDING, PADDING)
        return cls(
            nn.functional.pad(train, border),
            train_labels.to(device),
            test.to(device),
            test_labels.to(device),
            pixels.mean(0),
            pixels.std(0),
            int(train_labels.max()) + 1,
        )


class Recipe(NamedTuple):
    """How a network is trained."""

    epochs: int = 200
    batch: int = 100
    width: int = 64
    learning_rate: float = 10**-3.25


class Criterion(Protocol):
    """What a run minimises, and what it is watched by."""

    watched: tuple[str, ...]
    """Names of the numbers that `watch` gives; their means over an epoch are kept."""

    def begin(self, epoch: int) -> None:
        """Set the hardness of an epoch, in place."""

    def loss(self, scores: Tensor, target: Tensor) -> Tensor:
        """The mean loss of a batch."""

    def watch(self, scores: Tensor, target: Tensor) -> list[Tensor]:
        """Diagnostics of a batch, without gradients and without waiting for the device."""

    def to(self, device: str) -> Any:
        """Move what it holds."""


class ResNet18(nn.Module):
    """ResNet-18 for 32x32 images: a 3x3 stem, no pooling before the last.

    >>> ResNet18(classes=10, width=4)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """

    def __init__(self, classes: int = 100, width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Sequential(_conv(3, width), nn.BatchNorm2d(width), nn.ReLU(inplace=True))
        blocks, wide = [], width
        for stage in range(4):
            for stride in (1 if stage == 0 else 2, 1):
                blocks.append(_Block(wide, width << stage, stride))
                wide = width << stage
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(wide, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).float().mean((2, 3)))

    def convolutions(self) -> list[nn.Conv2d]:
        return [m for m in self.modules() if isinstance(m, nn.Conv2d)]


class _Block(nn.Module):
    def __init__(self, wide: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = _conv(wide, channels, stride), nn.BatchNorm2d(channels)
        self.conv2, self.norm2 = _conv(channels, channels), nn.BatchNorm2d(channels)
        self.short: nn.Module = nn.Identity()
        if stride != 1 or wide != channels:
            self.short = nn.Sequential(
                nn.Conv2d(wide, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(y)) + self.short(x))


def _conv(wide: int, channels: int, stride: int = 1) -> nn.Module:
    return nn.Conv2d(wide, channels, 3, stride, 1, bias=False)


class Draws(NamedTuple):
    """An epoch's order of images, and the place and side of each crop."""

    order: Tensor
    down: Tensor
    right: Tensor
    flip: Tensor

    @classmethod
    def of(cls, n: int, seed: int, epoch: int) -> Draws:
        """Those of one epoch of one seed, whatever was drawn before."""
        g = torch.Generator().manual_seed(1_000_003 * (seed + 1) + epoch)
        order = torch.randperm(n, generator=g)
        down, right = torch.randint(2 * PADDING + 1, (2, n), generator=g)
        return cls(order, down, right, torch.randint(2, (n,), generator=g))


def crop(images: Tensor, draws: Draws) -> Tensor:
    """Crops (batch, height, width, 3) of padded images, some of them mirrored."""
    height, width = (s - 2 * PADDING for s in images.shape[1:3])
    rows = torch.arange(height, device=images.device)
    columns = torch.arange(width, device=images.device).expand(len(draws.order), -1)
    columns = torch.where(draws.flip[:, None] == 1, width - 1 - columns, columns)
    y, x = draws.down[:, None] + rows, draws.right[:, None] + columns
    return images[draws.order[:, None, None], y[:, :, None], x[:, None, :]]


def normalised(batch: Tensor, images: Images, dtype: torch.dtype) -> Tensor:
    """Bytes (batch, height, width, 3) to numbers (batch, 3, height, width), channels last."""
    return ((batch.float() - images.mean) / images.sd).to(dtype).permute(0, 3, 1, 2)


class Run:
    """One network in training. All that changes is in tensors that stay where they are."""

    def __init__(
        self,
        images: Images,
        criterion: Criterion,
        recipe: Recipe,
        seed: int,
        *,
        clip: float | None = 5.0,
        compiled: bool = False,
        checkpoint: Path | None = None,
        mixed: bool | None = None,  # None: on a GPU
    ) -> None:
        device = images.train.device
        self.images, self.criterion, self.recipe, self.seed = images, criterion, recipe, seed
        self.clip, self.checkpoint, self.on_gpu = clip, checkpoint, device.type == "cuda"
        self.mixed = self.on_gpu if mixed is None else mixed
        self.dtype = torch.bfloat16 if self.mixed else torch.float32
        self.stream = torch.cuda.Stream(device) if self.on_gpu else None
        self.logs: list[dict[str, Any]] = []
        self.epoch, self.last_saved = 0, time.monotonic()
        criterion.to(str(device))

        n = len(images.train)
        self.steps = n // recipe.batch
        self.draws = Draws(*(x.to(device) for x in Draws.of(n, seed, 0)))
        self.at = torch.zeros((), dtype=torch.int64, device=device)
        self.within = torch.arange(recipe.batch, device=device)

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            net = ResNet18(images.classes, recipe.width)
        self.net = net.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.masters, self.halves = self._mixed()
        own = [p for p in self.net.parameters() if p.dtype == torch.float32]
        self.parameters = [*self.masters, *own]
        self.forward: Callable[[Tensor], Tensor] = self.net
        if compiled:
            self.forward = torch.compile(self.net, dynamic=False)
        rate = torch.tensor(recipe.learning_rate, device=device) if self.on_gpu else 1.0
        self.optimiser = torch.optim.Adam(
            self.parameters, lr=rate, fused=self.on_gpu, capturable=self.on_gpu
        )
        self.names = (
            *("loss", "train_top1", "train_top5", "gradient", "clipped", "broken"),
            *("score_gradient", "lost", "spread", *criterion.watched),
        )
        # The last places: the largest gradient, then the test images classified rightly.
        self.sums = torch.zeros(len(self.names) + 3, dtype=torch.float64, device=device)
        self.replay: Callable[[], None] = self.step

    def _mixed(self) -> tuple[list[Tensor], list[Tensor]]:
        """float32 weights for Adam to keep, and the bfloat16 ones that compute."""
        if not self.mixed:
            return [], []
        convolutions = self.net.convolutions()
        masters = [m.weight.detach().clone().requires_grad_() for m in convolutions]
        for m in convolutions:
            m.to(torch.bfloat16)
        return masters, [m.weight for m in convolutions]

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        """On a GPU: its own stream, kernels that do not wait, the fastest convolutions."""
        if self.stream is None:
            yield
            return
        before, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, True
        kernels = use(cuda) if cuda.serves(self.sums) else contextlib.nullcontext()
        try:
            with torch.cuda.stream(self.stream), kernels:
                yield
        finally:
            torch.backends.cudnn.benchmark = before

    def prepare(self) -> None:
        """Run a few steps to set everything up, capture one, and go to the beginning or back to
        the checkpoint."""
        if self.on_gpu:
            torch.cuda.synchronize()  # what was made on another stream is there
        before = {name: x.clone() for name, x in self._tensors().items()}
        self.criterion.begin(0)
        for _ in range(WARM_UP if self.on_gpu else 1):
            self.step()
            self.at.zero_()  # there may be fewer batches than steps to warm up
        if self.on_gpu and cuda.serves(self.sums):
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=self.stream):
                self.step()
            self.replay = graph.replay
        for name, x in self._tensors().items():
            if name in before:
                x.copy_(before[name])
            else:
                x.zero_()
        if self.checkpoint is not None and self.checkpoint.exists():
            self._load(self.checkpoint)

    def _tensors(self) -> dict[str, Tensor]:
        """Everything that training changes, by name."""
        found = {f"net.{k}": v for k, v in self.net.state_dict().items()}
        found |= {f"master.{i}": x.detach() for i, x in enumerate(self.masters)}
        for i, p in enumerate(self.parameters):
            found |= {f"adam.{i}.{k}": v for k, v in self.optimiser.state.get(p, {}).items()}
        return found

    def step(self) -> None:
        """One step, on the device alone."""
        rows = self.at * self.recipe.batch + self.within
        some = Draws(*(x.index_select(0, rows) for x in self.draws))
        target = self.images.train_labels.index_select(0, some.order)
        x = normalised(crop(self.images.train, some), self.images, self.dtype)
        for p in self.net.parameters():
            p.grad = None
        scores = self.forward(x)
        scores.retain_grad()
        loss = self.criterion.loss(scores, target)
        loss.backward()
        with torch.no_grad():
            norm = self._update()
            self._record(scores, target, loss, norm)
            self.at += 1

    def _update(self) -> Tensor:
        """Clip and step; the gradient's norm before clipping."""
        if self.masters:
            for master in self.masters:
                if master.grad is None:
                    master.grad = torch.empty_like(master)
            torch._foreach_copy_(_gradients(self.masters), _gradients(self.halves))
        gradients = _gradients(self.parameters)
        norm = nn.utils.get_total_norm(gradients)
        if self.clip is not None:
            nn.utils.clip_grads_with_norm_(self.parameters, self.clip, norm)
        self.optimiser.step()
        if self.masters:
            torch._foreach_copy_(self.halves, self.masters)
        return norm

    def _record(self, scores: Tensor, target: Tensor, loss: Tensor, norm: Tensor) -> None:
        assert scores.grad is not None
        r = scores.detach()
        top1, top5 = _right(r, target)
        length = scores.grad.norm(dim=-1) * len(r)  # of each row's own loss, not of the mean
        clip = math.inf if self.clip is None else self.clip
        numbers = [
            *(loss, top1.float().mean(), top5.float().mean()),
            *(norm, norm > clip, ~norm.isfinite()),
            *(length.mean(), (~top5 & ~(length > SILENT)).float().mean(), r.std(-1).mean()),
            *self.criterion.watch(r, target),
        ]
        self.sums[:-3] += torch.stack([x.detach().double() for x in numbers])
        self.sums[-3] = torch.maximum(self.sums[-3], norm.double())

    @torch.no_grad()
    def _evaluate(self) -> None:
        self.net.eval()
        for i in range(0, len(self.images.test), EVALUATION_BATCH):
            part = slice(i, i + EVALUATION_BATCH)
            x = normalised(self.images.test[part], self.images, self.dtype)
            right = _right(self.net(x), self.images.test_labels[part])
            self.sums[-2:] += torch.stack([y.sum() for y in right])
        self.net.train()

    def work(self, stop: Callable[[], bool]) -> Iterator[torch.cuda.Event | None]:
        """Train to the end, or to the first epoch that begins after `stop` says so.

        Yields whenever there is something to wait for, or others may have a turn.
        """
        self.prepare()
        while self.epoch < self.recipe.epochs and not self.broken:
            if stop():
                self._save()
                return
            began = time.monotonic()
            self._begin()
            event = None
            for i in range(self.steps):
                self.replay()
                if (i + 1) % CHUNK == 0:
                    event, before = self._event(), event
                    yield before
            self._evaluate()
            found = self.sums.to("cpu", non_blocking=True)
            yield self._event()
            self._log(found, time.monotonic() - began)
            self.epoch += 1
            if time.monotonic() - self.last_saved > SAVE_EVERY:
                self._save()

    @property
    def finished(self) -> bool:
        return self.epoch == self.recipe.epochs or self.broken

    @property
    def broken(self) -> bool:
        """Whether a whole epoch had no finite gradient: from there no step leads back."""
        return bool(self.logs) and self.logs[-1]["broken"] == 1

    def _begin(self) -> None:
        """Set the epoch's order, learning rate and hardness."""
        e, recipe = self.epoch, self.recipe
        for own, new in zip(
            self.draws, Draws.of(len(self.images.train), self.seed, e), strict=True
        ):
            own.copy_(new)
        rate = recipe.learning_rate * 0.5 * (1 + math.cos(math.pi * e / recipe.epochs))
        for group in self.optimiser.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self.criterion.begin(e)
        self.at.zero_()
        self.sums.zero_()

    def _event(self) -> torch.cuda.Event | None:
        if self.stream is None:
            return None
        event = torch.cuda.Event()
        event.record(self.stream)
        return event

    def _log(self, found: Tensor, seconds: float) -> None:
        *means, largest, top1, top5 = found.tolist()
        count = len(self.images.test)
        log = dict(zip(self.names, (x / self.steps for x in means), strict=True))
        log |= {"largest_gradient": largest, "top1": top1 / count, "top5": top5 / count}
        log["seconds"] = seconds
        self.logs.append({k: x if math.isfinite(x) else None for k, x in log.items()})

    def result(self) -> dict[str, Any]:
        """The last epoch's numbers, and those of every epoch by name."""
        last = self.logs[-1]
        return {
            "top1": last["top1"],
            "top5": last["top5"],
            "broken": len(self.logs) if self.broken else None,
            "seconds": round(sum(log["seconds"] for log in self.logs), 1),
            "epochs": {name: [_short(log[name]) for log in self.logs] for name in last},
        }

    def _save(self) -> None:
        if self.checkpoint is None:
            return
        from safetensors.torch import save_file

        self.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        part = self.checkpoint.with_suffix(".part")
        notes = {"epoch": self.epoch, "logs": self.logs}
        tensors = {k: v.contiguous() for k, v in self._tensors().items()}
        save_file(tensors, part, metadata={"notes": json.dumps(notes)})
        part.replace(self.checkpoint)
        self.last_saved = time.monotonic()

    def _load(self, path: Path) -> None:
        from safetensors import safe_open

        with safe_open(path, framework="pt") as file:
            notes = json.loads(file.metadata()["notes"])
            for name, x in self._tensors().items():
                x.copy_(file.get_tensor(name))
        self.epoch, self.logs = notes["epoch"], notes["logs"]


def _gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


def _right(scores: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Whether the true class is the first, or among the first five; by chance among equals."""
    hits = scores.topk(min(5, scores.shape[-1])).indices == target[:, None]
    return hits[:, 0], hits.any(-1)


def _short(x: float | None) -> float | None:
    return None if x is None else float(f"{x:.5g}")


Job = TypeVar("Job")


class _Active(Generic[Job]):
    """A run under way and what it waits for."""

    def __init__(self, job: Job, run: Run, stop: Callable[[], bool]) -> None:
        self.job, self.run, self.ended = job, run, False
        self._work = run.work(stop)
        self._event: torch.cuda.Event | None = None

    def advance(self) -> bool:
        """Take a turn unless the device is not ready for it."""
        if self._event is not None and not self._event.query():
            return False
        with self.run.context():
            try:
                self._event = next(self._work)
            except StopIteration:
                self.ended = True
        return True


def train_all(
    jobs: Iterable[tuple[Job, Callable[[], Run]]], at_once: int, stop: Callable[[], bool]
) -> Iterator[tuple[Job, Run]]:
    """Train runs, so many at once, and give each as it ends; those that were stopped as well."""
    waiting = deque(jobs)
    active: deque[_Active[Job]] = deque()
    while active or (waiting and not stop()):
        while waiting and len(active) < at_once and not stop():
            job, make = waiting.popleft()
            active.append(_Active(job, make(), stop))
        turns = [one.advance() for one in active]
        for one in [one for one in active if one.ended]:
            active.remove(one)
            yield one.job, one.run
        if not any(turns):
            time.sleep(1e-4)
