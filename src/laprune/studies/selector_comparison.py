"""The selector beside the field's own, on data that nobody here made.

Every method chooses k columns of the training part; a logistic regression and a random forest are
then fitted on those columns alone and scored on the test part. Methods that follow a penalty take
the strongest one of their grid that keeps at least k columns; how many it kept is recorded, and the
k most important of them are scored, so that all accuracies are at the same k.
"""

from __future__ import annotations

import collections
import importlib.util
import time
from collections import abc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from .lab import Options, Record, Setting, Study, one_thread
from .style import COLOURS, MARKERS, figure, save
from .tables import Floats, Spread, markdown, pm, seeds, select, spread, stack

SEEDS = 5
Labels = NDArray[np.int64]


class Data(NamedTuple):
    load: Callable[[int], tuple[Floats, Labels]]
    """Samples of a seed; bundled sets are the same for every seed, and split differently."""
    k: int
    about: str


def _bundled(name: str) -> Callable[[int], tuple[Floats, Labels]]:
    def load(seed: int) -> tuple[Floats, Labels]:
        from sklearn import datasets

        x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
        return x, y

    return load


def _made(**kwargs: Any) -> Callable[[int], tuple[Floats, Labels]]:
    def load(seed: int) -> tuple[Floats, Labels]:
        from sklearn.datasets import make_classification

        x, y = make_classification(random_state=seed, **kwargs)
        return x, y

    return load


DATA: dict[str, Data] = {
    "breast_cancer": Data(_bundled("breast_cancer"), 5, "569 samples, 30 columns, 2 classes"),
    "wine": Data(_bundled("wine"), 4, "178 samples, 13 columns, 3 classes"),
    "digits": Data(_bundled("digits"), 16, "1797 samples, 64 columns, 10 classes"),
    "madelon_like": Data(
        _made(
            n_samples=1000,
            n_features=200,
            n_informative=5,
            n_redundant=15,
            n_clusters_per_class=8,
            class_sep=2.0,
            flip_y=0.01,
        ),
        20,
        "make_classification, 1000 samples, 200 columns: 5 informative and 15 mixtures of them, "
        "8 clusters per class on a hypercube",
    ),
    "correlated": Data(
        _made(
            n_samples=1000,
            n_features=200,
            n_informative=10,
            n_redundant=20,
            n_clusters_per_class=1,
            flip_y=0.05,
        ),
        10,
        "make_classification, 1000 samples, 200 columns: 10 informative, 20 mixtures of them",
    ),
}


class Choice(NamedTuple):
    """Which columns came out by themselves, and how much each counts."""

    importance: Floats
    kept: int


Chooser = Callable[[Floats, Labels, int, int, bool], Choice]
"""(x, y, k, seed, quick), x standardised."""


def _from_support(support: NDArray[np.bool_]) -> Choice:
    return Choice(support.astype(np.float64), int(support.sum()))


def _laprune(x: Floats, y: Labels, k: int, seed: int, quick: bool) -> Choice:
    from laprune.select import LaPruneSelector

    epochs = 10 if quick else 150
    return _from_support(
        LaPruneSelector(k, max_epochs=epochs, random_state=seed).fit(x, y).support_
    )


def _laprune_network(x: Floats, y: Labels, k: int, seed: int, quick: bool) -> Choice:
    from laprune.select import LaPruneSelector

    selector = LaPruneSelector(
        k, estimator=_network, max_epochs=10 if quick else 300, random_state=seed
    )
    return _from_support(selector.fit(x, y).support_)


def _network(n_features: int, n_outputs: int) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(n_features, 100), torch.nn.ReLU(), torch.nn.Linear(100, n_outputs)
    )


def _f_test(x: Floats, y: Labels, k: int, seed: int, quick: bool) -> Choice:
    from sklearn.feature_selection import SelectKBest, f_classif

    return _from_support(_filter(SelectKBest(f_classif, k=k), x, y))


def _mutual_information(x: Floats, y: Labels, k: int, seed: int, quick: bool) -> Choice:
    from sklearn.feature_selection import SelectKBest, mutual_info_classif

    def score(x: Floats, y: Labels) -> Floats:
        return mutual_info_classif(x, y, random_state=seed)

    return _from_support(_filter(SelectKBest(score, k=k), x, y))


def _filter(selector: Any, x: Floats, y: Labels) -> NDArray[np.bool_]:
    """Fit on columns that vary; the others have no score."""
    varying = x.std(0) > 0
    support = np.zeros(x.shape[1], dtype=bool)
    support[varying] = selector.fit(x[:, varying], y).get_support()
    return support


def _rfe(x: Floats, y: Labels, k: int, seed: int, quick: bool) -> Choice:
    from sklearn.feature_selection import RFE
    from sklearn.linear_model import LogisticRegression

    return _from_support(
        RFE(LogisticRegression(max_iter=1000), n_features_to_select=k).fit(x, y).support_
    )


def _l1(x: Floats, y: Labels, k: int, seed: int, quick: bool) -> Choice:
    from sklearn.linear_model import LogisticRegression
    from sklearn.multiclass import OneVsRestClassifier

    # From scikit-learn 1.8 on l1_ratio alone says it; before, penalty does.
    new = LogisticRegression().penalty == "deprecated"
    lasso = LogisticRegression(solver="liblinear", random_state=seed)
    lasso.set_params(**({"l1_ratio": 1} if new else {"penalty": "l1"}))

    def choices() -> Iterable[Choice]:
        for c in np.geomspace(1e-3, 10, 5 if quick else 25):
            lasso.set_params(C=c)
            fitted = OneVsRestClassifier(lasso).fit(x, y)
            size = np.sum([np.abs(m.coef_[0]) for m in fitted.estimators_], axis=0)
            yield Choice(size, int((size > 0).sum()))

    return _at_least(k, choices())


def _forest(x: Floats, y: Labels, k: int, seed: int, quick: bool) -> Choice:
    from sklearn.ensemble import RandomForestClassifier

    trees = RandomForestClassifier(10 if quick else 300, random_state=seed).fit(x, y)
    return Choice(trees.feature_importances_, k)


def _stg(x: Floats, y: Labels, k: int, seed: int, quick: bool) -> Choice:
    from stg import STG

    def choices() -> Iterable[Choice]:
        for strength in np.geomspace(30, 0.03, 4 if quick else 13):
            torch.manual_seed(seed)
            model = STG(
                device="cpu",
                input_dim=x.shape[1],
                output_dim=int(y.max()) + 1,
                hidden_dims=[100],
                sigma=0.5,
                lam=float(strength),
                optimizer="Adam",
                learning_rate=1e-2,
                batch_size=len(x),
                weight_decay=0.0,
            )
            with _old_collections():
                model.fit(x, y, nr_epochs=10 if quick else 300, verbose=False)
            gates = model.get_gates("prob")
            # Among gates that are fully open the raw value decides.
            raw = model.get_gates("raw")
            yield Choice(np.where(gates > 0, raw - raw.min() + 1, 0.0), int((gates > 0).sum()))

    return _at_least(k, choices())


@contextmanager
def _old_collections() -> Iterator[None]:
    """Names that stg 0.1.2 looks for in `collections`, which Python 3.10 moved away."""
    names = [n for n in ("Iterable", "Mapping", "Sequence", "Set") if not hasattr(collections, n)]
    for name in names:
        setattr(collections, name, getattr(abc, name))
    try:
        yield
    finally:
        for name in names:
            delattr(collections, name)


def _lassonet(x: Floats, y: Labels, k: int, seed: int, quick: bool) -> Choice:
    from lassonet import LassoNetClassifier

    model = LassoNetClassifier(
        hidden_dims=(100,),
        lambda_start=1.0 if quick else "auto",
        path_multiplier=2.0 if quick else 1.1,
        n_iters=(20, 5) if quick else (300, 30),
        verbose=0,
        random_state=seed,
        torch_seed=seed,
        device="cpu",
    )
    path = model.path(x.astype(np.float32), y, disable_lambda_warning=True)
    sizes = [int(item.selected.sum()) for item in path]
    kept = min((size for size in sizes if size >= k), default=max(sizes))
    return Choice(model.feature_importances_.numpy().astype(np.float64), kept)


def _at_least(k: int, choices: Iterable[Choice]) -> Choice:
    """The first of ever weaker penalties that keeps k columns, else the last."""
    last = None
    for last in choices:
        if last.kept >= k:
            break
    assert last is not None
    return last


METHODS: dict[str, tuple[Chooser, str, str | None]] = {
    "laprune": (_laprune, "LaPruneSelector, linear", None),
    "laprune_network": (_laprune_network, "LaPruneSelector, network", None),
    "f_test": (_f_test, "SelectKBest, F test", None),
    "mutual_information": (_mutual_information, "SelectKBest, mutual information", None),
    "rfe": (_rfe, "RFE, logistic", None),
    "l1": (_l1, "L1 logistic", None),
    "forest": (_forest, "random-forest importances", None),
    "stg": (_stg, "stg", "stg"),
    "lassonet": (_lassonet, "LassoNet", "lassonet"),
}
"""The chooser, its label, and the package it needs beside scikit-learn."""


def settings(options: Options) -> list[Setting]:
    names = ("wine",) if options.quick else tuple(DATA)
    return [
        {"data": name, "k": DATA[name].k, "method": method, "seed": seed, "quick": options.quick}
        for name in names
        for seed in seeds(options, SEEDS)
        for method, (_, _, package) in METHODS.items()
        if package is None or importlib.util.find_spec(package) is not None
    ]


def measure(setting: Setting, options: Options) -> dict[str, Any]:
    from sklearn.ensemble import RandomForestClassifier
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import train_test_split
    from sklearn.preprocessing import StandardScaler

    seed, k = setting["seed"], setting["k"]
    x, y = DATA[setting["data"]].load(seed)
    x, test_x, y, test_y = train_test_split(x, y, test_size=0.3, random_state=seed, stratify=y)
    scaler = StandardScaler().fit(x)
    x, test_x = scaler.transform(x), scaler.transform(test_x)
    with one_thread():  # as the other methods do
        start = time.perf_counter()
        choice = METHODS[setting["method"]][0](x, y, k, seed, setting["quick"])
        seconds = time.perf_counter() - start
    columns = np.sort(np.argsort(-choice.importance, kind="stable")[:k])
    judges = {
        "linear_accuracy": LogisticRegression(max_iter=1000),
        "forest_accuracy": RandomForestClassifier(200, random_state=seed),
    }
    scores = {
        name: float(judge.fit(x[:, columns], y).score(test_x[:, columns], test_y))
        for name, judge in judges.items()
    }
    return {**scores, "seconds": seconds, "kept": choice.kept, "columns": columns.tolist()}


def draw(records: list[Record], folder: Path) -> list[Path]:
    names = list(dict.fromkeys(r["setting"]["data"] for r in records))
    methods = [m for m in METHODS if select(records, method=m)]
    fig, axes = figure(len(names), width=2.6, height=3.4)
    for axis, name in zip(axes, names, strict=True):
        for j, (key, label) in enumerate(_JUDGES.items()):
            for i, method in enumerate(methods):
                value = spread(stack(select(records, data=name, method=method), key))
                axis.errorbar(
                    value.mean,
                    -i - 0.16 + 0.32 * j,
                    xerr=value.sd,
                    color=COLOURS[j],
                    marker=MARKERS[j],
                    ms=5,
                    lw=1,
                    label=label if i == 0 else None,
                )
        shown = [METHODS[m][1] for m in methods] if axis is axes[0] else []
        axis.set_yticks([-i for i in range(len(methods))], shown or [""] * len(methods))
        axis.set_title(f"{name}, k = {DATA[name].k}", fontsize=9)
        axis.set_xlabel("test accuracy")
    fig.legend(
        *axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8
    )
    return [*save(fig, folder, "selector_comparison"), _report(records, names, methods, folder)]


_JUDGES = {
    "linear_accuracy": "logistic regression on the k columns",
    "forest_accuracy": "random forest on the k columns",
}


def _report(records: list[Record], names: list[str], methods: list[str], folder: Path) -> Path:
    parts = [
        "# The selector beside others",
        "Test accuracy of a logistic regression and of a random forest fitted on the k selected "
        "columns, mean ± sample standard deviation over splits. Seconds are of the selection "
        "alone, on one thread of a CPU that other work shared. `kept` is how many columns the "
        "method itself kept: where that is not k, the k most important are scored. `rank` is by "
        "the better of the two accuracies.",
    ]
    for name in names:
        best = {m: max(_mean(records, name, m, key).mean for key in _JUDGES) for m in methods}
        order = sorted(methods, key=lambda m: -best[m])
        rows = []
        for method in methods:
            chosen = select(records, data=name, method=method)
            kept = stack(chosen, "kept")
            rows.append(
                [
                    METHODS[method][1],
                    *(pm(_mean(records, name, method, key), ".3f") for key in _JUDGES),
                    str(order.index(method) + 1),
                    f"{stack(chosen, 'seconds').mean():.2f}",
                    f"{kept.min():g}" if np.ptp(kept) == 0 else f"{kept.min():g} to {kept.max():g}",
                    "yes" if (kept == DATA[name].k).all() else "no",
                ]
            )
        parts += [
            f"## {name}, k = {DATA[name].k}",
            DATA[name].about + ".",
            markdown(
                ("method", "logistic", "forest", "rank", "seconds", "kept", "exactly k"), rows
            ),
            _verdict(records, name, methods),
        ]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "selector_comparison.md"
    path.write_text("\n\n".join(parts) + "\n")
    return path


def _mean(records: list[Record], name: str, method: str, key: str) -> Spread:
    return spread(stack(select(records, data=name, method=method), key))


def _verdict(records: list[Record], name: str, methods: list[str]) -> str:
    """Where the selector stands, without choosing the flattering judge."""
    said = []
    for key, label in (("linear_accuracy", "logistic regression"), ("forest_accuracy", "forest")):
        means = {m: _mean(records, name, m, key).mean for m in methods}
        top = max(means, key=lambda m: means[m])
        for ours in ("laprune", "laprune_network"):
            gap = means[top] - means[ours]
            said.append(
                f"{METHODS[ours][1]} is the best"
                if top == ours
                else f"{METHODS[ours][1]} is {gap:.3f} behind {METHODS[top][1]}"
            )
            said[-1] += f" under the {label}"
    return "; ".join(said) + "."


STUDY = Study(
    "selector_comparison",
    "the scikit-learn selector beside other selectors on bundled and classic data",
    settings,
    measure,
    draw,
)
