"""The gate as a scikit-learn transformer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse
from sklearn.base import BaseEstimator
from sklearn.feature_selection import SelectorMixin
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import LabelEncoder
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import type_of_target
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn

from laprune.schedules import GammaScheduler, Schedule, constant, cosine, linear

from .gate import FeatureGate

try:
    from sklearn.utils.validation import validate_data
except ImportError:  # scikit-learn before 1.6 has it as a method

    def validate_data(estimator: Any, X: Any, y: Any, **checks: Any) -> Any:
        return estimator._validate_data(X, y, **checks)


LINEAR_PENALTY = 0.05
"""Weight decay of the linear model. Without it a large weight makes up for a small mask: a column
that matters need not open, and mass goes to columns whose weight is nothing."""

ModelFactory = Callable[[int, int], nn.Module]
_TARGETS = {
    "binary": "classification",
    "multiclass": "classification",
    "continuous": "regression",
    "continuous-multioutput": "regression",
}


class LaPruneSelector(SelectorMixin, BaseEstimator):
    """Select exactly k columns by learning a soft top-k mask together with a model.

    Every column gets a score; the mask of mass k over the scores multiplies the columns, a model
    behind it is trained, and the mask goes from uniform to nearly hard as training proceeds. The k
    columns with the largest scores are selected. Columns are standardised inside, constant ones are
    passed over while k others exist, and what `transform` returns is the input's own columns.

    >>> X = np.random.default_rng(0).normal(size=(300, 20))
    >>> y = X[:, 2] - 2 * X[:, 5] + X[:, 7] > 0
    >>> selector = LaPruneSelector(3, random_state=0).fit(X, y)
    >>> selector.get_support(indices=True)
    array([2, 5, 7])
    >>> selector.transform(X).shape
    (300, 3)

    Args:
        n_features_to_select: k, or with a float in (0, 1) a fraction of the columns, rounded down
            (at least one).
        estimator: the model behind the mask: None for a linear one with an L2 penalty, a callable
            ``(n_features, n_outputs) -> torch.nn.Module``, or a module, which is copied.
            Classification has as many outputs as classes.
        gamma: the hardness the schedule ends with, in (0, 1).
        schedule: ``"linear"`` or ``"cosine"``, both from 0 to gamma, ``"constant"``, or a function
            from the epoch to a hardness (gamma is then unused).
        max_epochs: passes over the samples; that many are made.
        learning_rate: of Adam.
        batch_size: samples per step; None for all of them.
        task: ``"classification"``, ``"regression"``, or ``"auto"``: from the target, where whole
            numbers mean classes.
        validation_fraction: hold out this share of the samples and keep the scores of the epoch
            whose k columns alone did best on it; None to train on everything and keep the last.
        random_state: seed or generator of the initial scores and weights, batches and hold-out.
        device: ``"auto"`` for a GPU where there is one, or a torch device.
        verbose: above 0, print the loss ten times on the way.

    Sparse input is made dense in `fit` and stays sparse in `transform`.

    Attributes:
        support_: True for the k selected columns.
        scores_: the learned scores.
        mask_: the soft mask over the scores at the last hardness.
        n_iter_: epochs made.
        best_epoch_: the epoch whose scores were kept.
        history_: lists with one entry per epoch: ``gamma``, ``loss`` and, with a hold-out,
            ``validation_loss`` of the k columns alone.
        n_features_to_select_: k.
        classes_: the classes, of a classification.
    """

    def __init__(
        self,
        n_features_to_select: float,
        *,
        estimator: nn.Module | ModelFactory | None = None,
        gamma: float = 0.9,
        schedule: str | Schedule = "linear",
        max_epochs: int = 150,
        learning_rate: float = 1e-2,
        batch_size: int | None = None,
        task: str = "auto",
        validation_fraction: float | None = None,
        random_state: Any = None,
        device: str | torch.device = "auto",
        verbose: int = 0,
    ) -> None:
        self.n_features_to_select = n_features_to_select
        self.estimator = estimator
        self.gamma = gamma
        self.schedule = schedule
        self.max_epochs = max_epochs
        self.learning_rate = learning_rate
        self.batch_size = batch_size
        self.task = task
        self.validation_fraction = validation_fraction
        self.random_state = random_state
        self.device = device
        self.verbose = verbose

    def fit(self, X: Any, y: Any) -> LaPruneSelector:
        """Learn which k columns to keep for predicting y."""
        self._check_parameters()
        schedule = self._schedule()
        X, y = validate_data(
            self,
            X,
            y,
            accept_sparse=("csr", "csc"),
            dtype=(np.float64, np.float32),
            multi_output=True,
            ensure_min_samples=2,
        )
        X = X.toarray() if sparse.issparse(X) else X
        k = _count(self.n_features_to_select, X.shape[1])
        target = self._target(y)
        # One integer seeds everything below, whatever kind of random state was given.
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        device = _device(self.device)
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            self._train(_split(X, target, self.validation_fraction, seed), k, schedule, device)
        self.n_features_to_select_ = k
        return self

    def _train(self, data: _Data, k: int, schedule: Schedule, device: torch.device) -> None:
        varying = data.varying if data.varying.sum() >= k else None
        gate = FeatureGate(data.x.shape[1], k, eligible=varying)
        model = nn.Sequential(gate, self._model(data.x.shape[1], data.outputs))
        model = model.to(device, torch.float32)  # as the samples, whatever the default
        scheduler = GammaScheduler(gate, schedule)
        groups: list[dict[str, Any]] = [
            {"params": gate.parameters()},
            {"params": model[1].parameters(), "weight_decay": self._penalty()},
        ]
        optimiser = torch.optim.Adam(groups, lr=self.learning_rate)
        data = data.to(device)
        history: dict[str, list[float]] = {"gamma": [], "loss": []}
        best, best_loss = gate.scores.detach().clone(), float("inf")
        for epoch in range(self.max_epochs):
            if epoch:
                scheduler.step()
            history["gamma"].append(scheduler.gamma)
            history["loss"].append(self._epoch(model, optimiser, data))
            if data.held_out is not None:
                loss = _deployed_loss(model, data)
                history.setdefault("validation_loss", []).append(loss)
                if loss < best_loss or epoch == 0:
                    best, best_loss, self.best_epoch_ = gate.scores.detach().clone(), loss, epoch
            self._report(epoch, history)
        if data.held_out is None:
            best, self.best_epoch_ = gate.scores.detach(), self.max_epochs - 1
        with torch.no_grad():
            gate.scores.copy_(best)
            model.train()
            self.mask_ = gate.mask().cpu().numpy()
            self.scores_ = gate.scores.cpu().numpy()
            self.support_ = gate.support().cpu().numpy()
        self.history_ = history
        self.n_iter_ = self.max_epochs

    def _epoch(self, model: nn.Module, optimiser: torch.optim.Optimizer, data: _Data) -> float:
        """One pass over the samples; the mean loss on the way."""
        model.train()
        n = len(data.x)
        size = n if self.batch_size is None else min(self.batch_size, n)
        order = torch.arange(n) if size == n else torch.randperm(n)
        total = 0.0
        for rows in order.to(data.x.device).split(size):
            loss = data.loss(model(data.x[rows]), data.y[rows])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            total += loss.item() * len(rows)
        return total / n

    def _model(self, n_features: int, n_outputs: int) -> nn.Module:
        if self.estimator is None:
            return _linear_model(n_features, n_outputs)
        if isinstance(self.estimator, nn.Module):
            return copy.deepcopy(self.estimator)
        model = self.estimator(n_features, n_outputs)
        if not isinstance(model, nn.Module):
            raise TypeError(f"estimator must give a torch.nn.Module, got {type(model).__name__}")
        return model

    def _penalty(self) -> float:
        return LINEAR_PENALTY if self.estimator is None else 0.0

    def _schedule(self) -> Schedule:
        if callable(self.schedule):
            return self.schedule
        return {
            "linear": linear(0.0, self.gamma, self.max_epochs),
            "cosine": cosine(0.0, self.gamma, self.max_epochs),
            "constant": constant(self.gamma),
        }[self.schedule]

    def _target(self, y: NDArray[Any]) -> NDArray[Any]:
        """Class indices, or standardised float targets with one column per output."""
        kind = type_of_target(y, input_name="y")
        task = _TARGETS.get(kind) if self.task == "auto" else self.task
        if task is None or (task == "classification" and _TARGETS.get(kind) != task):
            raise ValueError(f"Unknown label type: {kind}: y is neither classes nor real numbers")
        if task == "classification":
            encoder = LabelEncoder()
            codes = encoder.fit_transform(np.ravel(y))
            self.classes_ = encoder.classes_
            if len(self.classes_) < 2:
                raise ValueError("y has only one class; there is nothing to select columns for")
            return codes.astype(np.int64)
        if hasattr(self, "classes_"):  # of an earlier fit
            del self.classes_
        y = np.asarray(y, dtype=np.float64).reshape(len(y), -1)
        spread = y.std(0)
        return ((y - y.mean(0)) / np.where(spread > 0, spread, 1)).astype(np.float32)

    def _check_parameters(self) -> None:
        if not 0 < self.gamma < 1:
            raise ValueError(f"gamma must lie in (0, 1), got {self.gamma}")
        if not callable(self.schedule) and self.schedule not in ("linear", "cosine", "constant"):
            raise ValueError(
                "schedule must be 'linear', 'cosine', 'constant' or a function, "
                f"got {self.schedule!r}"
            )
        for name, value in (("max_epochs", self.max_epochs), ("batch_size", self.batch_size)):
            if not (value is None and name == "batch_size") and not _whole(value):
                raise ValueError(f"{name} must be a whole number from 1 on, got {value!r}")
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate must be positive, got {self.learning_rate}")
        if self.task not in ("auto", "classification", "regression"):
            raise ValueError(
                f"task must be 'auto', 'classification' or 'regression', got {self.task!r}"
            )
        if self.validation_fraction is not None and not 0 < self.validation_fraction < 1:
            raise ValueError(
                f"validation_fraction must be None or lie in (0, 1), got {self.validation_fraction}"
            )
        if self.estimator is not None and not callable(self.estimator):
            raise TypeError(
                "estimator must be None, a torch.nn.Module or a callable that makes one, "
                f"got {type(self.estimator).__name__}"
            )

    def _report(self, epoch: int, history: dict[str, list[float]]) -> None:
        if self.verbose and (epoch + 1) % max(1, self.max_epochs // 10) == 0:
            now = "  ".join(f"{key} {values[-1]:.4f}" for key, values in history.items())
            print(f"epoch {epoch + 1}/{self.max_epochs}  {now}")

    def _get_support_mask(self) -> NDArray[np.bool_]:
        check_is_fitted(self)
        return self.support_

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.required = True
        tags.input_tags.sparse = True
        return tags

    def _more_tags(self) -> dict[str, Any]:  # scikit-learn before 1.6
        return {"requires_y": True}


def _linear_model(n_features: int, n_outputs: int) -> nn.Linear:
    """A linear model that starts at zero.

    A weight of the wrong sign would push its column's score down before it turns round.
    """
    model = nn.Linear(n_features, n_outputs)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return model


class _Data(NamedTuple):
    """Standardised samples, and those held out where there are."""

    x: Tensor
    y: Tensor
    varying: Tensor
    """True for each column that is not constant."""
    held_out: tuple[Tensor, Tensor] | None
    outputs: int

    def to(self, device: torch.device) -> _Data:
        held = self.held_out and (self.held_out[0].to(device), self.held_out[1].to(device))
        return self._replace(x=self.x.to(device), y=self.y.to(device), held_out=held)

    def loss(self, prediction: Tensor, target: Tensor) -> Tensor:
        if prediction.shape != (len(target), self.outputs):
            raise ValueError(
                f"estimator must give {self.outputs} number(s) a sample, shape "
                f"{(len(target), self.outputs)}, got {tuple(prediction.shape)}"
            )
        if target.dtype == torch.int64:
            return nn.functional.cross_entropy(prediction, target)
        return nn.functional.mse_loss(prediction, target)


def _split(X: NDArray[Any], y: NDArray[Any], fraction: float | None, seed: int) -> _Data:
    """Hold out a fraction, by class where there are classes, and standardise by what is left."""
    classes = y.dtype == np.int64
    outputs = int(y.max()) + 1 if classes else y.shape[1]
    parts: list[NDArray[Any]] = [X, y]
    if fraction is not None:
        X, held_x, y, held_y = train_test_split(
            X, y, test_size=fraction, random_state=seed, stratify=y if classes else None
        )
        parts = [X, y, held_x, held_y]
    centre, spread = X.mean(0, dtype=np.float64), X.std(0, dtype=np.float64)
    # Rounding leaves a constant column a spread of this order.
    varying = spread > 10 * np.finfo(X.dtype).eps * np.abs(centre)
    scale = np.where(varying, spread, 1)
    x, target, *held = (
        torch.as_tensor(((part - centre) / scale).astype(np.float32) if i % 2 == 0 else part)
        for i, part in enumerate(parts)
    )
    return _Data(x, target, torch.as_tensor(varying), (held[0], held[1]) if held else None, outputs)


@torch.no_grad()
def _deployed_loss(model: nn.Module, data: _Data) -> float:
    assert data.held_out is not None
    model.eval()
    x, y = data.held_out
    return data.loss(model(x), y).item()


def _count(asked: float, n_features: int) -> int:
    """How many columns are meant."""
    if isinstance(asked, bool) or not isinstance(asked, Real):
        raise ValueError(f"n_features_to_select must be a number, got {asked!r}")
    if isinstance(asked, Integral):
        if not 1 <= int(asked) <= n_features:
            raise ValueError(
                f"n_features_to_select must lie between 1 and n_features = {n_features}, "
                f"got {asked}"
            )
        return int(asked)
    if not 0 < asked < 1:
        raise ValueError(
            f"n_features_to_select as a fraction must lie in (0, 1), got {asked}; "
            "as a count it must be an int"
        )
    return max(1, int(n_features * asked))


def _whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1


def _device(name: str | torch.device) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)
