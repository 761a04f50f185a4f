"""What users call: a budget over a model, its schedules and its end."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from laprune._arguments import Mode, check_mode
from laprune._mesh import is_dtensor, local
from laprune.schedules import Schedule, constant

from .budget import Budget, Granularity, check_part, over

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
        check_part(self._density(0), "density")
        check_part(self._gamma(0), "gamma")
        sites = _sites(model, include, exclude)
        if not sites:
            raise ValueError("no parameter to prune: nothing passed the filters")
        modules = [model] if isinstance(model, nn.Module) else [module for _, module, _ in sites]
        self._roots = list(dict.fromkeys(modules))
        if any(is_dtensor(getattr(module, name)) for _, module, name in sites):
            _check_unsharded(x for root in self._roots for x in root.modules())
        self._budget = Budget(granularity, scores == "learned", mode == "ste")
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
        masks = map(over, units, budget.originals())
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
                weight.mul_(over(mask, weight).to(weight.dtype))
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

    def _alive(self) -> Budget:
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
    check_part(float(x), name)
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
