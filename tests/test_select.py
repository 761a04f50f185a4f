"""The gate and the scikit-learn selector."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import textwrap

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import sparse
from sklearn.base import clone
from sklearn.datasets import load_iris
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import parametrize_with_checks

import laprune
from laprune.schedules import GammaScheduler, linear
from laprune.select import FeatureGate, LaPruneSelector

TRUE = [1, 4, 6]


def problem(n: int = 400, features: int = 12, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Real targets that depend on the TRUE columns alone."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, features))
    return x, x[:, TRUE] @ np.array([2.0, -1.5, 1.0])


def small(k: float = 3, **kwargs: object) -> LaPruneSelector:
    return LaPruneSelector(k, **({"random_state": 0} | kwargs))


pytestmark = pytest.mark.usefixtures("one_thread")


# The gate


def gate_with(scores: list[float], **kwargs: object) -> FeatureGate:
    gate = FeatureGate(len(scores), **kwargs)
    with torch.no_grad():
        gate.scores.copy_(torch.tensor(scores))
    return gate


def test_gate_is_the_operator_while_training_and_hard_in_evaluation() -> None:
    gate = gate_with([3.0, 1.0, 2.0, 0.0], k=2, gamma=0.5)
    x = torch.randn(5, 4)
    torch.testing.assert_close(gate(x), x * laprune.soft_topk(gate.scores, 2, 0.5))
    torch.testing.assert_close(gate.eval()(x), x * torch.tensor([1.0, 0.0, 1.0, 0.0]))
    assert gate.support().tolist() == [True, False, True, False]


def test_gate_passes_gradients_to_scores_and_input() -> None:
    gate = gate_with([3.0, 1.0, 2.0, 0.0], k=2, gamma=0.5)
    x = torch.randn(5, 4, requires_grad=True)
    gate(x).square().sum().backward()
    assert gate.scores.grad is not None
    assert gate.scores.grad.abs().max() > 0
    assert x.grad is not None


def test_gate_at_gamma_zero_moves_no_score() -> None:
    gate = gate_with([3.0, 1.0, 2.0, 0.0], k=2, gamma=0.0)
    gate(torch.randn(5, 4)).square().sum().backward()
    assert gate.scores.grad is not None
    assert not gate.scores.grad.any()


def test_gate_follows_a_scheduler_and_survives_saving() -> None:
    gate = FeatureGate(6, 2)
    model = torch.nn.Sequential(gate, torch.nn.Linear(6, 1))
    scheduler = GammaScheduler(model, linear(0.0, 0.8, steps=3))
    scheduler.step()
    assert gate.topk.gamma.item() == pytest.approx(0.4)
    other = torch.nn.Sequential(FeatureGate(6, 2), torch.nn.Linear(6, 1))
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(other[0].mask(), gate.mask())


def test_gate_keeps_ineligible_features_out() -> None:
    eligible = torch.tensor([False, True, True, True])
    gate = gate_with([9.0, 1.0, 2.0, 0.0], k=2, eligible=eligible)
    assert gate.mask()[0] == 0
    assert gate.mask().sum().item() == pytest.approx(2, abs=1e-5)
    assert gate.support().tolist() == [False, True, True, False]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_features": 4, "k": 5}, r"k must lie in \[1, 4\]"),
        ({"n_features": 4, "k": 0}, r"k must lie in \[1, 4\]"),
        ({"n_features": 4, "k": 2, "initial_spread": 0.0}, "initial_spread must be positive"),
        ({"n_features": 4, "k": 2, "eligible": torch.ones(3, dtype=torch.bool)}, r"shape \(4,\)"),
        (
            {"n_features": 4, "k": 3, "eligible": torch.tensor([True, True, False, False])},
            r"\[1, 2\]",
        ),
    ],
)
def test_gate_refuses_bad_arguments(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FeatureGate(**arguments)


def test_gate_refuses_the_wrong_number_of_features() -> None:
    with pytest.raises(ValueError, match="4 features along its last dimension"):
        FeatureGate(4, 2)(torch.zeros(3, 5))


# scikit-learn's own checks


@parametrize_with_checks([LaPruneSelector(1, max_epochs=3)])
def test_scikit_learn_contract(estimator: LaPruneSelector, check: object) -> None:
    check(estimator)  # type: ignore[operator]


# What is selected


@pytest.mark.parametrize("schedule", ["linear", "cosine", linear(0.1, 0.8, 100)])
def test_finds_the_columns_that_matter(schedule: object) -> None:
    x, y = problem()
    for target in (y, y > 0, np.stack([y, -y], 1)):
        selector = small(schedule=schedule).fit(x, target)
        assert selector.get_support(indices=True).tolist() == TRUE


@pytest.mark.parametrize("k", [1, 2, 11, 12])
def test_selects_exactly_k_and_returns_the_columns_untouched(k: int) -> None:
    x, y = problem()
    selector = small(k, max_epochs=4).fit(x, y)
    assert selector.support_.sum() == k
    assert selector.n_features_to_select_ == k
    np.testing.assert_array_equal(selector.transform(x), x[:, selector.support_])
    assert selector.mask_.sum() == pytest.approx(k, rel=1e-5)
    top = np.sort(np.argsort(-selector.scores_)[:k])
    assert selector.get_support(indices=True).tolist() == top.tolist()


@pytest.mark.parametrize(("fraction", "k"), [(0.5, 6), (0.3, 3), (0.26, 3), (0.01, 1), (0.99, 11)])
def test_fractions_round_down(fraction: float, k: int) -> None:
    x, y = problem()
    assert small(fraction, max_epochs=2).fit(x, y).support_.sum() == k


def test_scale_and_offset_of_the_columns_do_not_matter() -> None:
    x, y = problem()
    scale = 10.0 ** np.arange(-6, 6)
    plain, other = small().fit(x, y), small().fit(1e3 * scale + scale * x, 1e6 * y - 5)
    np.testing.assert_array_equal(plain.support_, other.support_)


def test_constant_columns_are_passed_over_while_others_exist() -> None:
    x, y = problem()
    x[:, :4] = 7.0
    assert not small(8, max_epochs=2).fit(x, y).support_[:4].any()
    assert small(10, max_epochs=2).fit(x, y).support_.sum() == 10


def test_history_starts_uniform_and_ends_at_gamma() -> None:
    x, y = problem()
    selector = small(gamma=0.7).fit(x, y)
    assert selector.n_iter_ == 150
    assert selector.best_epoch_ == 149
    assert set(selector.history_) == {"gamma", "loss"}
    assert len(selector.history_["loss"]) == 150
    assert selector.history_["gamma"][0] == 0
    assert selector.history_["gamma"][-1] == pytest.approx(0.7)
    assert selector.history_["loss"][-1] < 0.5 * selector.history_["loss"][0]
    measured = laprune.diagnostics(torch.as_tensor(selector.mask_))
    assert measured.gamma.item() == pytest.approx(0.7, abs=1e-4)


def test_held_out_samples_choose_the_epoch() -> None:
    x, y = problem()
    selector = small(validation_fraction=0.25).fit(x, y > 0)
    losses = selector.history_["validation_loss"]
    assert len(losses) == selector.n_iter_
    assert selector.best_epoch_ == int(np.argmin(losses))
    assert selector.get_support(indices=True).tolist() == TRUE


# How it is called


def test_the_same_seed_gives_the_same_selector_and_leaves_torch_alone() -> None:
    x, y = problem()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first = small(batch_size=32, max_epochs=5).fit(x, y)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(4)
    second = small(batch_size=32, max_epochs=5).fit(x, y)
    third = small(batch_size=32, max_epochs=5, random_state=1).fit(x, y)
    np.testing.assert_array_equal(first.scores_, second.scores_)
    assert not np.array_equal(first.scores_, third.scores_)


def test_a_model_of_ones_own() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 8))
    y = x[:, 2] * x[:, 5] > 0  # no column matters alone

    def network(n_features: int, n_outputs: int) -> torch.nn.Module:
        return torch.nn.Sequential(
            torch.nn.Linear(n_features, 32), torch.nn.Tanh(), torch.nn.Linear(32, n_outputs)
        )

    selector = small(2, estimator=network, max_epochs=150).fit(x, y)
    assert selector.get_support(indices=True).tolist() == [2, 5]

    module = network(8, 2)
    weights = copy.deepcopy(module.state_dict())
    small(2, estimator=module, max_epochs=3).fit(x, y)
    for name, value in module.state_dict().items():
        assert torch.equal(value, weights[name])


def test_pipeline_and_grid_search() -> None:
    x, y = problem()
    pipeline = make_pipeline(small(), LogisticRegression())
    search = GridSearchCV(pipeline, {"lapruneselector__n_features_to_select": [1, 3]}, cv=2).fit(
        x, y > 0
    )
    assert search.best_params_["lapruneselector__n_features_to_select"] == 3
    assert search.best_score_ > 0.9
    regression = make_pipeline(small(), LinearRegression()).fit(x, y)
    assert regression.score(x, y) > 0.999


def test_clone_and_pickle() -> None:
    x, y = problem()
    selector = small(max_epochs=4, gamma=0.8).fit(x, y)
    assert clone(selector).get_params() == selector.get_params()
    with pytest.raises(NotFittedError):
        clone(selector).transform(x)
    again = pickle.loads(pickle.dumps(selector))
    np.testing.assert_array_equal(again.transform(x), selector.transform(x))


def test_data_frames_keep_their_names() -> None:
    x, y = problem()
    frame = pd.DataFrame(x, columns=[f"c{i}" for i in range(x.shape[1])])
    selector = small().set_output(transform="pandas")
    out = selector.fit_transform(frame, pd.Series(y > 0))
    assert list(out.columns) == ["c1", "c4", "c6"]
    assert selector.get_feature_names_out().tolist() == ["c1", "c4", "c6"]
    pd.testing.assert_frame_equal(out, frame[["c1", "c4", "c6"]])


@pytest.mark.parametrize("kind", [sparse.csr_matrix, sparse.csc_array, sparse.coo_array])
def test_sparse_input_selects_the_same_and_stays_sparse(kind: type) -> None:
    x, y = problem()
    x[np.abs(x) < 0.3] = 0
    dense, other = small().fit(x, y), small().fit(kind(x), y)
    np.testing.assert_array_equal(dense.support_, other.support_)
    out = other.transform(kind(x))
    assert sparse.issparse(out)
    np.testing.assert_array_equal(out.toarray(), dense.transform(x))


def test_classes_may_be_words_and_integers_may_be_regressed() -> None:
    x, y = load_iris(return_X_y=True)
    words = np.array(["a", "b", "c"])[y]
    selector = small(2).fit(x, words)
    assert selector.get_support(indices=True).tolist() == [2, 3]
    assert selector.classes_.tolist() == ["a", "b", "c"]
    assert not hasattr(small(2, task="regression", max_epochs=2).fit(x, y), "classes_")


def test_progress_is_printed_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    x, y = problem()
    small(max_epochs=20, verbose=1).fit(x, y)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10
    assert lines[-1].startswith("epoch 20/20  gamma 0.9000  loss ")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"k": 0}, ValueError, "between 1 and n_features = 12, got 0"),
        ({"k": 13}, ValueError, "between 1 and n_features = 12, got 13"),
        ({"k": 1.0}, ValueError, r"fraction must lie in \(0, 1\), got 1.0"),
        ({"k": "all"}, ValueError, "must be a number, got 'all'"),
        ({"gamma": 1.0}, ValueError, r"gamma must lie in \(0, 1\), got 1.0"),
        ({"schedule": "steps"}, ValueError, "schedule must be .* got 'steps'"),
        ({"max_epochs": 0}, ValueError, "max_epochs must be a whole number"),
        ({"batch_size": 2.5}, ValueError, "batch_size must be a whole number"),
        ({"learning_rate": 0}, ValueError, "learning_rate must be positive, got 0"),
        ({"task": "ranking"}, ValueError, "task must be .* got 'ranking'"),
        ({"validation_fraction": 1.0}, ValueError, r"validation_fraction must be None or lie in"),
        ({"estimator": 3}, TypeError, "estimator must be None, .* got int"),
        ({"estimator": lambda n, m: "no"}, TypeError, r"estimator must give a torch.nn.Module"),
    ],
)
def test_bad_parameters_are_named(
    arguments: dict[str, object], error: type[Exception], message: str
) -> None:
    x, y = problem()
    with pytest.raises(error, match=message):
        small(**arguments).fit(x, y)


def test_bad_targets_are_named() -> None:
    x, y = problem()
    with pytest.raises(ValueError, match="only one class"):
        small().fit(x, np.zeros(len(x), dtype=int))
    with pytest.raises(ValueError, match="multilabel-indicator"):
        small().fit(x, np.stack([y > 0, y < 1], 1).astype(int))


# Without scikit-learn


def test_without_scikit_learn_the_gate_works_and_the_selector_says_what_to_install() -> None:
    script = """
        import sys

        sys.modules["sklearn"] = None  # as if it were not installed
        import torch
        import laprune
        from laprune.select import FeatureGate

        print(FeatureGate(4, 2)(torch.ones(1, 4)).shape)
        try:
            from laprune.select import LaPruneSelector
        except ImportError as error:
            print(error)
    """
    out = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True
    ).stdout
    assert out.splitlines() == [
        "torch.Size([1, 4])",
        "LaPruneSelector needs scikit-learn: pip install 'laprune[select]'",
    ]


def test_classes_must_be_classes() -> None:
    x, y = np.random.default_rng(0).normal(size=(2, 30, 4))
    for target in (y[:, 0], y[:, :2]):
        with pytest.raises(ValueError, match="Unknown label type"):
            LaPruneSelector(2, task="classification", max_epochs=2).fit(x, target)


def test_the_default_type_does_not_matter() -> None:
    x, y = load_iris(return_X_y=True)
    torch.set_default_dtype(torch.float64)
    try:
        assert LaPruneSelector(2, max_epochs=3, random_state=0).fit(x, y).support_.sum() == 2
    finally:
        torch.set_default_dtype(torch.float32)


def test_an_estimator_must_give_a_number_for_each_output() -> None:
    x, y = load_iris(return_X_y=True)
    flat = lambda n, outputs: torch.nn.Sequential(torch.nn.Linear(n, 1), torch.nn.Flatten(0))  # noqa: E731
    with pytest.raises(ValueError, match="number"):
        LaPruneSelector(2, max_epochs=2, estimator=flat).fit(x, y * 1.3)
