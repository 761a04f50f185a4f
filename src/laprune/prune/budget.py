"""What the masks of a model share, and how a layer makes its own of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from laprune._arguments import check_floating
from laprune._mesh import is_dtensor, like, local, part
from laprune.functional import hard_topk, soft_topk
from laprune.joint import global_topk

from .masks import Barrier, Point, soft_mask

Granularity = Literal["weight", "channel"] | tuple[int, int]


class Masked(nn.Module):
    """The parametrization: a weight times its mask."""

    def __init__(self, budget: Budget, index: int, scores: nn.Parameter | None) -> None:
        super().__init__()
        self.scores: nn.Parameter | None
        self.budget, self.index = budget, index
        self.register_parameter("scores", scores)

    def forward(self, weight: Tensor) -> Tensor:
        scores = weight if self.scores is None else self.scores
        mask = self.budget.mask(self.index, scores, weight, self.training)
        return weight * mask.to(weight.dtype)


class Budget:
    """What the masks of a model share: the budget, its solution, and the scores it is over.

    While training only barrier and temperature are kept. Each layer makes its mask of them, so the
    weights may be whole where the scores lie in shards, and gradients reach the scores both
    directly and through barrier and temperature.
    """

    def __init__(self, granularity: Granularity, learned: bool, ste: bool) -> None:
        self.granularity, self.learned, self.ste = granularity, learned, ste
        self.lists: list[parametrize.ParametrizationList] = []
        self.index: list[int] = []
        self.sources: list[Tensor] = []  # weights or learned scores, one for each mask
        self.kept, self.gamma = 0, torch.tensor(0.0, dtype=torch.float64, device="cpu")
        self.uncertain = True  # whether the training masks are soft at all
        self.training = True
        # Whether a module that sees to the masks is being called, and which ones it found.
        self.soft_inside, self.hard_inside = False, False
        self.served: set[nn.Module] = set()
        self._forget()

    def _forget(self) -> None:
        self.seen: tuple[object, ...] | None = None
        self.state: Tensor | None = None
        self.points: dict[torch.dtype, Point] = {}
        self.hard: list[Tensor] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "seen": None, "state": None, "points": {}, "hard": None}

    def attach(self, sites: list[tuple[str, nn.Module, str]]) -> None:
        positions: dict[int, int] = {}
        scores: list[nn.Parameter | None] = []
        for name, module, own in sites:
            weight = getattr(module, own)
            if not isinstance(weight, nn.Parameter) or parametrize.is_parametrized(module, own):
                raise ValueError(f"{name} must be a plain parameter")
            check_floating(weight, name)
            i = positions.setdefault(id(weight), len(positions))
            if i == len(scores):
                start = self.score(weight.detach(), name).clone()
                scores.append(nn.Parameter(start) if self.learned else None)
            self.index.append(i)
        for i, (_, module, own) in zip(self.index, sites, strict=True):
            parametrize.register_parametrization(
                module, own, Masked(self, i, scores[i]), unsafe=True
            )
            lists = cast(nn.ModuleDict, module.parametrizations)
            self.lists.append(cast(parametrize.ParametrizationList, lists[own]))
        self.resolve()
        self.total = sum(math.prod(self._unit_shape(x)) for x in self.sources)

    def _unit_shape(self, source: Tensor) -> Sequence[int]:
        return source.shape[:1] if self.granularity == "channel" else source.shape

    def score(self, weight: Tensor, name: str = "a parameter") -> Tensor:
        """What units are chosen by."""
        if isinstance(self.granularity, tuple):
            m = self.granularity[1]
            if weight[:1].numel() % m:
                raise ValueError(
                    f"{name} of shape {tuple(weight.shape)} has slices of {weight[:1].numel()} "
                    f"weights, which groups of {m} do not fill: exclude it"
                )
            return weight.abs()
        if self.granularity == "weight":
            return weight.abs()
        flat = weight.flatten(1) if weight.dim() > 1 else weight[:, None]
        return torch.linalg.vector_norm(flat, dim=1) / math.sqrt(max(flat.shape[1], 1))

    def scored(self, source: Tensor) -> Tensor:
        return source if self.learned else self.score(source)

    def resolve(self) -> None:
        """Take the parameters as they are in the modules now."""
        first: dict[int, Tensor] = {}
        for i, site in zip(self.index, self.lists, strict=True):
            first.setdefault(i, self._source(site))
        self.sources = list(first.values())
        self._forget()

    def _source(self, site: parametrize.ParametrizationList) -> Tensor:
        return cast(Tensor, cast(Masked, site[0]).scores if self.learned else site.original)

    def originals(self) -> list[Tensor]:
        first: dict[int, Tensor] = {}
        for i, site in zip(self.index, self.lists, strict=True):
            first.setdefault(i, site.original)
        return list(first.values())

    def set(self, kept: int, gamma: float) -> None:
        check_part(kept / self.total, "density")
        check_part(gamma, "gamma")
        self.kept, self.uncertain = kept, gamma < 1 and 0 < kept < self.total
        self.gamma.fill_(gamma)
        self._forget()

    @torch.compiler.disable
    def before(self, module: nn.Module, _: object) -> None:
        """In front of a forward of the whole: solve anew while training, and in evaluation if
        anything changed. Not every optimiser leaves a trace on the parameters it changes.

        Where several modules call this, a forward ends when one of them comes again.
        """
        if (module.training or self.training) and (module in self.served or not self.served):
            self._forget()
            self.served = set()
        self.served.add(module)
        self.training = module.training
        self.renew(module.training)
        self.soft_inside, self.hard_inside = self.state is not None, self.hard is not None

    @torch.compiler.disable
    def after(self, *_: object) -> None:
        self.soft_inside, self.hard_inside = False, False

    @torch.compiler.disable
    def renew(self, training: bool) -> None:
        """See to the masks that training or evaluation needs."""
        if isinstance(self.granularity, tuple):
            return
        for i, site in zip(self.index, self.lists, strict=True):
            source = self.sources[i]
            if self._source(site) is not source and not is_dtensor(source):
                raise RuntimeError("parameters were replaced: call refresh() outside of forward")
        seen = self._trace()
        if seen != self.seen:
            self._forget()
            self.seen = seen
        soft = training and self.uncertain
        if soft and self.state is None:
            k = torch.tensor([float(self.kept)], dtype=torch.float64, device=self.sources[0].device)
            gamma = self.gamma.to(k.device).reshape(1)
            self.state, status = Barrier.apply(self, k, gamma, *self.sources)
            works = {torch.promote_types(x.dtype, torch.float32) for x in self.sources}
            self.points = {work: Point.of(self.state.detach(), status, work) for work in works}
        if self.hard is None and (not soft or self.ste):
            self.hard = self.units(soft=False)

    def _trace(self) -> tuple[object, ...]:
        """What tells whether the masks are still those of the parameters."""
        return (*((x._version, x.dtype) for x in self.sources), torch.is_grad_enabled())

    def _stale(self, index: int, soft: bool) -> bool:
        """Whether a layer finds no masks for its parameter as it is."""
        if torch.compiler.is_compiling():  # a graph that looked at more would be compiled anew
            return not (self.soft_inside if soft else self.hard_inside)
        if self.seen is None or (self.state is None if soft else self.hard is None):
            return True
        source = self.sources[index]
        now = ((source._version, source.dtype), torch.is_grad_enabled())
        return (self.seen[index], self.seen[-1]) != now

    def units(self, soft: bool) -> list[Tensor]:
        """The masks of the units, whole on every rank."""
        with torch.no_grad():
            scores = [self.scored(x) for x in self.sources]
            if isinstance(self.granularity, tuple):
                masks = [self._groups(x, soft) for x in scores]
            else:
                gamma = self.gamma.to(scores[0].device) if soft else 1.0
                masks = global_topk(scores, self.kept, gamma)
            return [x.full_tensor() if is_dtensor(x) else x for x in masks]  # type: ignore[attr-defined]

    def _groups(self, score: Tensor, soft: bool) -> Tensor:
        n, m = cast(tuple[int, int], self.granularity)
        here = local(score)
        if here[:1].numel() % m:
            raise ValueError(f"shards of slices {tuple(here.shape)} cut groups of {m}: exclude it")
        rows = here.reshape(-1, m)
        mask = soft_topk(rows, n, self.gamma) if soft else hard_topk(rows, n)
        return like(mask.reshape(here.shape), score)

    def mask(self, index: int, source: Tensor, weight: Tensor, training: bool) -> Tensor:
        """The mask of one weight, from its source as it lies here."""
        if isinstance(self.granularity, tuple):
            score = self.scored(source)
            mask = self._groups(score, soft=training)
            if self.ste and training:
                mask = self._groups(score.detach(), soft=False) + (mask - mask.detach())
            return mask
        soft = training and self.uncertain
        if self._stale(index, soft):
            self.renew(training)
        if not soft:
            mask = self._hard(index, weight)
            if self.learned and training:  # data parallelism waits for every gradient, even of zero
                mask = mask + 0.0 * over(source, weight).nan_to_num()
        else:
            mask = soft_mask(self.scored(source), cast(Tensor, self.state), self.points)
            if self.granularity == "channel":
                mask = mask.reshape(-1, *[1] * (weight.dim() - 1))
            if self.ste:
                mask = self._hard(index, weight) + (mask - mask.detach())
        return mask

    def _hard(self, index: int, weight: Tensor) -> Tensor:
        mask = over(cast(list[Tensor], self.hard)[index], weight)
        if is_dtensor(weight):
            mesh, placements = weight.device_mesh, weight.placements  # type: ignore[attr-defined]
            mask = like(part(mask, mesh, placements), weight)
        return mask


def over(mask: Tensor, weight: Tensor) -> Tensor:
    """The mask of units as one of the weights."""
    if mask.shape == weight.shape:
        return mask
    return mask.reshape(-1, *[1] * (weight.dim() - 1)).expand(weight.shape)


def check_part(x: float, name: str) -> None:
    if not 0 <= x <= 1:
        raise ValueError(f"{name} must lie in [0, 1], got {x:g}")
