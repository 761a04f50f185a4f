"""Pruning a model to one budget over all its parameters.

>>> from laprune.schedules import linear
>>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
>>> pruner = GlobalPruner(model, density=linear(1.0, 0.25, steps=10), gamma=linear(0.5, 0.99, 10))
>>> optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
>>> for _ in range(10):
...     loss = model(torch.ones(2, 8)).square().sum()
...     loss.backward()
...     optimiser.step()
...     pruner.step()
>>> pruner.finalize()
>>> sum(int((p != 0).sum()) for p in model.parameters() if p.dim() > 1)  # a quarter of 192
48
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ._arguments import Mode, check_floating, check_mode
from ._mesh import everyone, is_dtensor, layout, like, local, part
from .backends import Status
from .backends._contract import OFFSET, TEMPERATURE
from .backends.exchange import Exchange
from .functional import hard_topk, soft_topk
from .joint import global_topk
from .pieces import solve_pieces, vjp_pieces
from .schedules import Schedule, constant

Granularity = Literal["weight", "channel"] | tuple[int, int]
Filter = str | Sequence[str] | Callable[[str, Tensor], bool]
Site = tuple[nn.Module, str]


class LayerReport(NamedTuple):
    """One parameter."""

    entries: int
    """How many units (weights, channels) it has."""
    kept: int
    """How many the hard mask keeps."""
    density: float
    mass: float
    """The sum of its soft mask."""
    near_binary: float
    """The fraction of its soft mask within 1e-3 of 0 or 1."""


class Report(NamedTuple):
    """The whole model, and every parameter by name."""

    entries: int
    kept: int
    density: float
    mass: float
    near_binary: float
    gamma: float
    step: int
    layers: dict[str, LayerReport]


class GlobalPruner:
    """Soft masks over the parameters of a model, with one budget for all of them.

    Every pruned parameter becomes ``original * mask`` through :mod:`torch.nn.utils.parametrize`.
    The masks have together mass ``density * entries`` and hardness gamma while training, and are
    exactly that many ones in evaluation. They are solved in front of every forward while training,
    and in evaluation when a parameter has changed; gradients flow through them into weights or
    scores.

    Args:
        model: a module, or (module, parameter name) pairs, which name all uses of a tied parameter.
        density: the part that is kept; a number or a schedule, a function of the step. None with
            (n, m), which says it already.
        granularity: ``"weight"``; ``"channel"``: slices of the first dimension stay or go; (n, m):
            n of every m neighbouring weights of a slice stay, as in 2:4.
        gamma: the hardness while training, a number or a schedule.
        scores: ``"magnitude"``: the size of the weights (the root mean square of channels), or
            ``"learned"``: parameters of their own, which start there.
        include, exclude: which parameters: a pattern or patterns for names (``"encoder.*"``), or a
            function of name and parameter. All with two dimensions or more unless told. A tied
            parameter is pruned in all its uses: if one of its names passes and none is excluded.
        mode: ``"soft"``, or ``"ste"`` for hard masks forward and soft gradients while training:
            the safer choice with batch normalisation, which undoes soft masks of a whole layer.

    Call :meth:`step` after each step of the optimiser and :meth:`finalize` in the end. Data
    parallelism needs nothing more; for FSDP2 build the pruner first, then ``fully_shard``, then
    call :meth:`refresh`. All ranks must call each method. Between them travel sums and a sample of
    the scores, and hard masks as a whole: for ``"ste"``, evaluation, :meth:`masks` and
    :meth:`report`.

    Models and their layers may be compiled. Masks are solved outside of the graph: ``fullgraph`` is
    for layers that are only called by a model which is not compiled itself.
    """

    def __init__(
        self,
        model: nn.Module | Iterable[Site],
        density: float | Schedule | None = None,
        *,
        granularity: Granularity = "weight",
        gamma: float | Schedule = 0.9,
        scores: Literal["magnitude", "learned"] = "magnitude",
        include: Filter | None = None,
        exclude: Filter | None = None,
        mode: Mode = "soft",
    ) -> None:
        check_mode(mode)
        if scores not in ("magnitude", "learned"):
            raise ValueError(f"scores must be 'magnitude' or 'learned', got {scores!r}")
        self._density = _density(density, granularity)
        self._gamma = _scheduled(gamma, "gamma")
        _check_part(self._density(0), "density")
        _check_part(self._gamma(0), "gamma")
        sites = _sites(model, include, exclude)
        if not sites:
            raise ValueError("no parameter to prune: nothing passed the filters")
        modules = [model] if isinstance(model, nn.Module) else [module for _, module, _ in sites]
        self._roots = list(dict.fromkeys(modules))
        if any(is_dtensor(getattr(module, name)) for _, module, name in sites):
            _check_unsharded(x for root in self._roots for x in root.modules())
        self._budget = _Budget(granularity, scores == "learned", mode == "ste")
        self._sites = sites
        self._orders = {module: list(module._parameters) for _, module, _ in sites}
        self._budget.attach(sites)
        self._hooks = [x.register_forward_pre_hook(self._budget.before) for x in self._roots]
        self._hooks += [x.register_forward_hook(self._budget.after) for x in self._roots]
        self.last_step = 0
        self._apply()

    @property
    def gamma(self) -> float:
        """The hardness in force."""
        return self._gamma(self.last_step)

    @property
    def density(self) -> float:
        """The density in force."""
        return self._density(self.last_step)

    @property
    def kept(self) -> int:
        """How many units the hard masks keep."""
        return self._budget.kept

    def step(self) -> None:
        """Move both schedules on; the masks follow."""
        self.last_step += 1
        self._apply()

    def refresh(self) -> None:
        """Look at the parameters again: after ``fully_shard``, or a change through ``.data``."""
        self._alive().resolve()

    def masks(self) -> dict[str, Tensor]:
        """The mask of every parameter by name, whole: soft while training, hard in evaluation."""
        budget = self._alive()
        units = budget.units(soft=self._roots[0].training and not budget.ste)
        masks = map(_over, units, budget.originals())
        return dict(zip(self._names(), masks, strict=True))

    def report(self) -> Report:
        """Density by parameter, mass, and how binary the soft masks are."""
        budget, layers = self._alive(), {}
        soft, hard = budget.units(soft=True), budget.units(soft=False)
        self._check_finite(hard)
        for name, p, kept in zip(self._names(), soft, hard, strict=True):
            n, ones = p.numel(), int(kept.sum())
            some = max(n, 1)
            near = ((p < 1e-3) | (p > 1 - 1e-3)).sum().item() / some
            layers[name] = LayerReport(n, ones, ones / some, p.double().sum().item(), near)
        n, ones = (sum(getattr(x, f) for x in layers.values()) for f in ("entries", "kept"))
        near = sum(x.near_binary * x.entries for x in layers.values()) / n
        mass = sum(x.mass for x in layers.values())
        return Report(n, ones, ones / n, mass, near, self.gamma, self.last_step, layers)

    def finalize(self) -> None:
        """Burn the hard masks in and give the model its plain parameters back.

        Scores that are NaN choose nothing: then it raises, and the model stays as it is.
        """
        budget = self._alive()
        if any(is_dtensor(x) for x in budget.originals()):
            raise RuntimeError(
                "finalize() works on whole parameters: load the state dict into an unsharded copy "
                "with a pruner of its own, and finalize that"
            )
        masks = budget.units(soft=False)
        self._check_finite(masks)
        with torch.no_grad():
            for weight, mask in zip(budget.originals(), masks, strict=True):
                weight.mul_(_over(mask, weight).to(weight.dtype))
        for hook in self._hooks:
            hook.remove()
        for _, module, name in self._sites:
            _own_class(module)
            parametrize.remove_parametrizations(module, name, leave_parametrized=False)
        for module, order in self._orders.items():
            for name in order:
                if name in module._parameters:
                    module._parameters[name] = module._parameters.pop(name)
        self._hooks = []

    def state_dict(self) -> dict[str, Any]:
        """The step; learned scores are saved with the model."""
        return {"last_step": self.last_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.last_step = state["last_step"]
        self._apply()

    def _apply(self) -> None:
        budget = self._alive()
        if isinstance(budget.granularity, tuple):
            n, m = budget.granularity
            kept = budget.total * n // m
        else:
            kept = round(self.density * budget.total)
        budget.set(kept, self.gamma)

    def _alive(self) -> _Budget:
        if not self._hooks:
            raise RuntimeError("this pruner has been finalized")
        return self._budget

    def _check_finite(self, masks: list[Tensor]) -> None:
        """Refuse masks of nothing, naming the scores at fault."""
        if not any(bool(mask.isnan().any()) for mask in masks):
            return
        pairs = zip(self._names(), self._budget.sources, strict=True)
        found = [name for name, x in pairs if not bool(torch.isfinite(local(x.detach())).all())]
        where = ", ".join(found) or "a shard on another rank"
        raise ValueError(f"scores that are NaN or infinite choose nothing: those of {where}")

    def _names(self) -> list[str]:
        """The first name of every parameter."""
        first: dict[int, str] = {}
        for (name, *_), i in zip(self._sites, self._budget.index, strict=True):
            first.setdefault(i, name)
        return list(first.values())


def _own_class(module: nn.Module) -> None:
    """Give a parametrized module a class to itself: removing a parametrization takes the parameter
    from the class, which deep copies of the module share."""
    kind = type(module)
    inherited = ("__dict__", "__weakref__")
    body = {name: x for name, x in vars(kind).items() if name not in inherited}
    module.__class__ = type(kind.__name__, kind.__bases__, body)


def _check_part(x: float, name: str) -> None:
    if not 0 <= x <= 1:
        raise ValueError(f"{name} must lie in [0, 1], got {x:g}")


def _density(density: float | Schedule | None, granularity: Granularity) -> Schedule:
    if isinstance(granularity, tuple):
        n, m = granularity
        if density is not None:
            raise ValueError(f"granularity {granularity} sets the density: leave density out")
        if not 0 < n <= m:
            raise ValueError(f"granularity (n, m) needs 0 < n <= m, got {granularity}")
        return constant(n / m)
    if granularity not in ("weight", "channel"):
        raise ValueError(f"granularity must be 'weight', 'channel' or (n, m), got {granularity!r}")
    if density is None:
        raise ValueError("density is missing: a number in [0, 1] or a schedule")
    return _scheduled(density, "density")


def _scheduled(x: float | Schedule, name: str) -> Schedule:
    if callable(x):
        return x
    if not isinstance(x, Real):
        kind = type(x).__name__
        raise TypeError(f"{name} must be a number or a function of the step, got {kind}")
    _check_part(float(x), name)
    return constant(float(x))


def _sites(
    model: nn.Module | Iterable[Site], include: Filter | None, exclude: Filter | None
) -> list[tuple[str, nn.Module, str]]:
    """(full name, module, name) of all parameters that pass the filters."""
    if not isinstance(model, nn.Module):
        if include is not None or exclude is not None:
            raise ValueError("include and exclude choose from a module: leave them out with pairs")
        return _listed(model)
    found: list[tuple[str, nn.Module, str]] = []
    wanted, unwanted = set(), set()
    for prefix, module in model.named_modules():
        for name, weight in module.named_parameters(recurse=False, remove_duplicate=False):
            full = f"{prefix}.{name}" if prefix else name
            found.append((full, module, name))
            if weight.dim() > 1 if include is None else _passes(include, full, weight):
                wanted.add(id(weight))
            if exclude is not None and _passes(exclude, full, weight):
                unwanted.add(id(weight))
    chosen = wanted - unwanted
    return [site for site in found if id(getattr(*site[1:])) in chosen]


def _listed(pairs: Iterable[Site]) -> list[tuple[str, nn.Module, str]]:
    sites = []
    for i, pair in enumerate(pairs):
        match pair:
            case (nn.Module() as module, str() as name):
                sites.append((f"{i}.{name}", module, name))
            case _:
                kind = type(pair).__name__
                raise TypeError(f"model must be a module or (module, name) pairs, got a {kind}")
    if len({(id(module), name) for _, module, name in sites}) < len(sites):
        raise ValueError("a parameter is listed twice")
    return sites


def _check_unsharded(modules: Iterable[nn.Module]) -> None:
    """FSDP2 swaps the parameters that it found, and would not find those of a parametrization."""
    from torch.distributed.fsdp import FSDPModule

    if any(isinstance(module, FSDPModule) for module in modules):
        raise RuntimeError("build the pruner first, then fully_shard the model, then refresh()")


def _passes(rule: Filter, name: str, weight: Tensor) -> bool:
    if callable(rule):
        return rule(name, weight)
    patterns = [rule] if isinstance(rule, str) else rule
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


class _Masked(nn.Module):
    """The parametrization: a weight times its mask."""

    def __init__(self, budget: _Budget, index: int, scores: nn.Parameter | None) -> None:
        super().__init__()
        self.scores: nn.Parameter | None
        self.budget, self.index = budget, index
        self.register_parameter("scores", scores)

    def forward(self, weight: Tensor) -> Tensor:
        scores = weight if self.scores is None else self.scores
        mask = self.budget.mask(self.index, scores, weight, self.training)
        return weight * mask.to(weight.dtype)


class _Budget:
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
        self.points: dict[torch.dtype, _Point] = {}
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
                module, own, _Masked(self, i, scores[i]), unsafe=True
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
        return cast(Tensor, cast(_Masked, site[0]).scores if self.learned else site.original)

    def originals(self) -> list[Tensor]:
        first: dict[int, Tensor] = {}
        for i, site in zip(self.index, self.lists, strict=True):
            first.setdefault(i, site.original)
        return list(first.values())

    def set(self, kept: int, gamma: float) -> None:
        _check_part(kept / self.total, "density")
        _check_part(gamma, "gamma")
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
            self.state, status = _Barrier.apply(self, k, gamma, *self.sources)
            works = {torch.promote_types(x.dtype, torch.float32) for x in self.sources}
            self.points = {work: _Point.of(self.state.detach(), status, work) for work in works}
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
                mask = mask + 0.0 * _over(source, weight).nan_to_num()
        else:
            mask = _soft_mask(self.scored(source), cast(Tensor, self.state), self.points)
            if self.granularity == "channel":
                mask = mask.reshape(-1, *[1] * (weight.dim() - 1))
            if self.ste:
                mask = self._hard(index, weight) + (mask - mask.detach())
        return mask

    def _hard(self, index: int, weight: Tensor) -> Tensor:
        mask = _over(cast(list[Tensor], self.hard)[index], weight)
        if is_dtensor(weight):
            mesh, placements = weight.device_mesh, weight.placements  # type: ignore[attr-defined]
            mask = like(part(mask, mesh, placements), weight)
        return mask


def _over(mask: Tensor, weight: Tensor) -> Tensor:
    """The mask of units as one of the weights."""
    if mask.shape == weight.shape:
        return mask
    return mask.reshape(-1, *[1] * (weight.dim() - 1)).expand(weight.shape)


class _Point(NamedTuple):
    """A solution in the type that masks are computed in."""

    pivot: Tensor
    b: Tensor
    t: Tensor
    level: Tensor
    """Of a mask without a temperature."""
    soft: Tensor
    """Whether there is a temperature."""
    regular: Tensor
    """Whether the mask follows its scores; at the limits it does not."""

    @classmethod
    def of(cls, state: Tensor, status: Tensor, work: torch.dtype) -> _Point:
        pivot, b, t, _, level = state[0].unbind()
        regular = (status[0] == int(Status.CONVERGED)) | (status[0] == int(Status.STALLED))
        soft = regular | (status[0] == int(Status.TIED))
        # Harmless numbers where there is no temperature, so that no NaN reaches a gradient.
        pivot, b = (torch.where(soft, x, 0.0).to(work) for x in (pivot, b))
        t = torch.where(soft, t, 1.0).to(work).clamp(min=torch.finfo(work).tiny)
        return cls(pivot, b, t, level.to(work), soft, regular)


def _soft_mask(score: Tensor, state: Tensor, points: dict[torch.dtype, _Point]) -> Tensor:
    """sigma((score - b)/t) of what lies here, differentiable in the scores and the state."""
    here = local(score)
    if is_dtensor(score):
        state = _Shared.apply(state, layout([score]).groups)
    point = points[torch.promote_types(here.dtype, torch.float32)]
    return like(_Mask.apply(here, state, *point), score)


class _Mask(torch.autograd.Function):
    """A mask at a given point. By hand, since a model may have many small parameters: autograd
    would take five times as many operations."""

    @staticmethod
    def forward(
        ctx: Any,
        score: Tensor,
        state: Tensor,
        pivot: Tensor,
        b: Tensor,
        t: Tensor,
        level: Tensor,
        soft: Tensor,
        regular: Tensor,
    ) -> Tensor:
        z = ((score.to(t.dtype) - pivot) - b) / t
        q = 0.5 * torch.exp(-z.abs())
        ctx.save_for_backward(z, q, t, regular, state)
        p = torch.where(soft, torch.where(z > 0, 1 - q, q), level)
        return p.to(score.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise NotImplementedError("second derivatives through a pruner are not available")
        z, q, t, regular, state = ctx.saved_tensors
        pull = torch.where(regular, grad * q / t, 0.0)
        of_state = torch.zeros_like(state)
        of_state[:, OFFSET] = -pull.sum()
        of_state[:, TEMPERATURE] = -(pull * z).sum()
        return pull.to(grad.dtype), of_state, *[None] * 6


class _Shared(torch.autograd.Function):
    """The state as used by shards of one weight: their gradients belong together."""

    @staticmethod
    def forward(ctx: Any, state: Tensor, groups: str) -> Tensor:
        ctx.groups = groups
        return state.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return Exchange(ctx.groups).add(grad), None


class _Barrier(torch.autograd.Function):
    """``(budget, k, gamma, *sources) -> (state, status)`` of the scores of all sources.

    It keeps its inputs as they are, not as saved tensors, so that several losses may go back
    through it between two steps of the optimiser.
    """

    @staticmethod
    def forward(
        ctx: Any, budget: _Budget, k: Tensor, gamma: Tensor, *sources: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.sources, ctx.budget = sources, budget
        ctx.versions = [x._version for x in sources]
        scores = [budget.scored(x.detach()) for x in sources]
        ctx.groups, ctx.owners = layout(scores)
        rows = [local(x).reshape(1, -1) for x in scores]
        *_, state, info = solve_pieces(rows, k, gamma, False, ctx.groups, list(ctx.owners))
        ctx.rest = (k, gamma, state.clone(), info)
        status = info[:, 0].clone()
        ctx.mark_non_differentiable(status)
        return state, status

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
        k, gamma, state, info = ctx.rest
        if [x._version for x in ctx.sources] != ctx.versions:
            raise RuntimeError("a pruned parameter was changed between forward and backward")
        # Ranks see different data, and gradients are averaged over all of them, replicas included.
        exchange = Exchange(everyone(ctx.sources))
        grad = exchange.add(grad) / exchange.size
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() for x in ctx.sources]
            scores = [ctx.budget.scored(x) for x in inputs]
        rows = [local(x.detach()).reshape(1, -1) for x in scores]
        zeros = [torch.zeros_like(x) for x in rows]
        *pulled, _, _ = vjp_pieces(
            rows, k, gamma, False, ctx.groups, list(ctx.owners), state, info, zeros, grad
        )
        along = [
            like(d.reshape(local(s.detach()).shape), s.detach())
            for d, s in zip(pulled, scores, strict=True)
        ]
        found = torch.autograd.grad(scores, inputs, along) if not ctx.budget.learned else along
        return None, None, None, *found
