"""The classification studies: the network, the images, a run and its interruptions, the tables."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from typer.testing import CliRunner

import laprune
from laprune import cli
from laprune.studies import classification, collapse, hardness_path
from laprune.studies.classification import (
    CROSS_ENTROPY,
    LABELS,
    LAPRUNE,
    LAPSUM,
    Method,
    TopFive,
    method_of,
    synthetic,
)
from laprune.studies.image_training import (
    PADDING,
    Draws,
    Images,
    Recipe,
    ResNet18,
    Run,
    _right,
    crop,
    normalised,
    train_all,
)
from laprune.studies.lab import Options, Unfinished, load, run

RECIPE = Recipe(epochs=3, batch=20, width=4)
QUICK = Options(quick=True, seeds=1)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def images() -> Images:
    return synthetic()


def never() -> bool:
    return False


def make(images: Images, method: Method = LAPRUNE, seed: int = 0, **options: object) -> Run:
    return Run(images, TopFive(method, RECIPE.epochs), RECIPE, seed, **options)


def trained(*runs: Run, at_once: int = 1) -> list[Run]:
    jobs = [(i, lambda r=r: r) for i, r in enumerate(runs)]
    found = dict(train_all(jobs, at_once, never))
    return [found[i] for i in range(len(runs))]


def weights(run: Run) -> Tensor:
    return torch.cat([p.detach().flatten() for p in run.net.parameters()])


def test_the_network_is_resnet18() -> None:
    count = sum(p.numel() for p in ResNet18().parameters())
    assert count == 11_220_132  # eleven million, as everywhere for 100 classes and a 3x3 stem
    shapes: list[torch.Size] = []
    net = ResNet18(classes=7, width=4)
    for block in net.blocks:
        block.register_forward_hook(lambda _, __, y: shapes.append(y.shape[1:]))
    net(torch.zeros(2, 3, 32, 32))
    wanted = [(4, 32, 32)] * 2 + [(8, 16, 16)] * 2 + [(16, 8, 8)] * 2 + [(32, 4, 4)] * 2
    assert [tuple(s) for s in shapes] == wanted


def test_crops_are_parts_of_the_padded_image_and_flips_mirror_it() -> None:
    image = torch.arange(1, 1 + 32 * 32 * 3).reshape(1, 32, 32, 3) % 251
    images = Images.of(image.byte(), torch.zeros(1).long(), image, torch.zeros(1).long(), "cpu")

    def one(down: int, right: int, flip: int) -> Tensor:
        return crop(images.train, Draws(*(torch.tensor([x]) for x in (0, down, right, flip))))[0]

    middle = one(PADDING, PADDING, 0)
    assert torch.equal(middle, image[0].byte())
    assert torch.equal(one(PADDING, PADDING, 1), image[0].byte().flip(1))
    corner = one(0, 2 * PADDING, 0)
    assert torch.equal(corner[PADDING:, :-PADDING], middle[:-PADDING, PADDING:])
    assert corner[:PADDING].max() == 0
    assert corner[:, -PADDING:].max() == 0


def test_images_are_normalised_by_the_training_images(images: Images) -> None:
    inner = images.train[:, PADDING:-PADDING, PADDING:-PADDING]
    x = normalised(inner, images, torch.float32)
    assert x.shape == (60, 3, 32, 32)
    assert x.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(x.mean((0, 2, 3)), torch.zeros(3), atol=1e-4, rtol=0)
    torch.testing.assert_close(x.std((0, 2, 3)), torch.ones(3), atol=1e-3, rtol=0)


def test_draws_depend_on_seed_and_epoch_alone() -> None:
    first, again = Draws.of(50, 1, 2), Draws.of(50, 1, 2)
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    for seed, epoch in ((1, 3), (2, 2)):
        assert not torch.equal(first.order, Draws.of(50, seed, epoch).order)
    assert first.order.sort().values.tolist() == list(range(50))
    assert first.down.max() == 2 * PADDING
    assert first.right.min() == 0
    assert set(first.flip.tolist()) == {0, 1}


def test_accuracy_by_chance_among_equals() -> None:
    scores = torch.tensor([[0.0, 3, 1, 2, -1, -2], [5, 0, 1, 2, 3, 4], [0] * 6, [math.nan] * 6])
    first, five = _right(scores, torch.tensor([1, 1, 3, 3]))
    assert first[:2].tolist() == [True, False]
    assert five[:2].tolist() == [True, False]
    # A collapsed network is not taken for a perfect one.
    everywhere = torch.stack([_right(scores[[2, 3]], torch.full((2,), y))[1] for y in range(6)])
    assert everywhere.sum(0).tolist() == [5, 5]


@pytest.mark.parametrize(
    "method", [LAPSUM, Method("laprune", 0.3), Method("laprune", 0.5, floor=None)], ids=str
)
def test_the_loss_falls(images: Images, method: Method) -> None:
    how = Recipe(epochs=12, batch=20, width=8, learning_rate=3e-3)
    run = Run(images, TopFive(method, how.epochs), how, 0)
    trained(run)
    loss = [log["loss"] for log in run.logs]
    assert loss[-1] < 0.7 * loss[0]
    assert run.logs[-1]["train_top5"] > 0.8
    assert run.logs[-1]["top5"] > 0.5


def test_runs_side_by_side_are_as_alone(images: Images) -> None:
    methods = (LAPRUNE, CROSS_ENTROPY)
    alone = [trained(make(images, m))[0] for m in methods]
    beside = trained(*(make(images, m) for m in methods), at_once=2)
    for one, other in zip(alone, beside, strict=True):
        assert torch.equal(weights(one), weights(other))
        assert one.logs[-1]["loss"] == other.logs[-1]["loss"]
    assert not torch.equal(weights(alone[0]), weights(trained(make(images, seed=1))[0]))


def test_a_stopped_run_goes_on_where_it_was(images: Images, tmp_path: Path) -> None:
    whole = trained(make(images))[0]
    path = tmp_path / "a" / "run.safetensors"
    half = make(images, checkpoint=path)
    next(train_all([(0, lambda: half)], 1, lambda: half.epoch == 1))
    assert (half.epoch, half.finished) == (1, False)
    assert path.exists()
    rest = trained(make(images, checkpoint=path))[0]
    assert rest.finished
    assert torch.equal(weights(rest), weights(whole))
    for one, other in zip(rest.logs, whole.logs, strict=True):
        same = one.keys() - {"seconds"}
        assert {k: one[k] for k in same} == {k: other[k] for k in same}


def test_convolutions_in_bfloat16_follow_float32_weights(images: Images, tmp_path: Path) -> None:
    whole = trained(make(images, CROSS_ENTROPY, mixed=True))[0]
    assert len(whole.masters) == 20
    for master, half in zip(whole.masters, whole.halves, strict=True):
        assert (master.dtype, half.dtype) == (torch.float32, torch.bfloat16)
        assert torch.equal(master.detach().bfloat16(), half.detach())
        assert not torch.equal(master.detach(), half.detach().float())
    names = {id(p) for p in (*whole.masters, *whole.net.parameters())} - {
        id(h) for h in whole.halves
    }
    assert {id(p) for p in whole.parameters} == names
    assert {p.dtype for p in whole.net.head.parameters()} == {torch.float32}
    full = trained(make(images, CROSS_ENTROPY))[0]
    assert whole.logs[0]["loss"] == pytest.approx(full.logs[0]["loss"], rel=0.02)

    path = tmp_path / "run.safetensors"
    half_way = make(images, CROSS_ENTROPY, mixed=True, checkpoint=path)
    next(train_all([(0, lambda: half_way)], 1, lambda: half_way.epoch == 1))
    rest = trained(make(images, CROSS_ENTROPY, mixed=True, checkpoint=path))[0]
    assert all(torch.equal(x, y) for x, y in zip(rest.masters, whole.masters, strict=True))


def test_gamma_and_the_learning_rate_follow_the_epochs(images: Images) -> None:
    run = make(images)
    found = []
    begin = run._begin

    def spy() -> None:
        begin()
        gamma = run.criterion.top5.gamma.item()  # type: ignore[attr-defined]
        found.append((gamma, run.optimiser.param_groups[0]["lr"]))

    run._begin = spy  # type: ignore[method-assign]
    trained(run)
    rate = RECIPE.learning_rate
    wanted = [(0.1, rate), (0.45, 0.75 * rate), (0.8, 0.25 * rate)]
    assert [x for pair in found for x in pair] == pytest.approx([x for p in wanted for x in p])


def test_clipping_limits_the_step(images: Images) -> None:
    for clip, largest in ((0.01, 0.01), (None, math.inf)):
        run = make(images, LAPRUNE, clip=clip)
        run.prepare()
        run._begin()
        run.step()
        norm = torch.nn.utils.get_total_norm([p.grad for p in run.parameters])
        before = run.sums[run.names.index("gradient")].item()
        assert before > 1
        assert norm.item() == pytest.approx(min(before, largest), rel=1e-3)
        assert run.sums[run.names.index("clipped")] == (clip is not None)


def test_fewer_batches_than_steps_to_warm_up(images: Images) -> None:
    """On a GPU there are three of those, and a step beyond the last batch would stop it."""
    few = images._replace(train=images.train[:20], train_labels=images.train_labels[:20])
    run = make(few)
    assert run.steps == 1
    run.prepare()
    run.step()
    assert run.at == 1


class _NoReading(TorchDispatchMode):
    """Refuses whatever would make the host wait for a GPU."""

    WAITING = ("_local_scalar_dense", "nonzero", "equal", "masked_select", "unique")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.__name__.split(".")[0]
        assert not name.startswith(self.WAITING), f"a step waits for {name}"
        if name in ("index", "index_put"):
            assert all(i is None or i.dtype != torch.bool for i in args[1]), "a boolean index"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("method", dict.fromkeys([*LABELS, *collapse.LABELS]), ids=str)
def test_a_step_waits_for_nothing(images: Images, method: Method) -> None:
    run = make(images, method)
    run.prepare()
    # Adam on a CPU reads its own counter; on a GPU it does not.
    run.optimiser.step = lambda: None  # type: ignore[method-assign]
    with _NoReading():
        run.step()
    assert run.sums[0] != 0


def test_a_run_without_finite_gradients_ends_and_says_so(images: Images) -> None:
    run = make(images, Method("laprune", 0.99, floor=0.0))
    broken = run.criterion.loss
    run.criterion.loss = lambda r, y: broken(r, y) * math.nan  # type: ignore[method-assign]
    trained(run)
    result = run.result()
    assert result["broken"] == 1
    assert result["epochs"]["loss"] == [None]
    assert result["top5"] == 0.25  # five classes of twenty
    assert json.loads(json.dumps(result, allow_nan=False)) == result


@pytest.mark.parametrize("method", [LAPRUNE, LAPSUM, collapse.RAISED], ids=str)
def test_what_is_watched(method: Method) -> None:
    scores = 3 * torch.randn(50, 100, generator=torch.Generator().manual_seed(0))
    target = torch.arange(50)
    criterion = TopFive(method, 1)
    criterion.begin(0)
    values = criterion.watch(scores, target)
    found = dict(zip(criterion.watched, (x.item() for x in values), strict=True))
    if method == LAPSUM:
        t = torch.full((50,), 1.0, dtype=torch.float64)
    else:
        t = laprune.solve(scores, 5, method.softness).temperature
        t = t.clamp(min=method.min_temperature)
    p = laprune.lapsum_topk(scores, 5, t)
    own = p[torch.arange(50), target]
    assert found["temperature"] == pytest.approx(t.mean().item())
    near = (p < 1e-3) | (p > 1 - 1e-3)
    assert found["saturated"] == pytest.approx(near.float().mean().item(), abs=1e-3)
    assert found["floored"] == pytest.approx((own < 1e-7).float().mean().item())
    assert found["underflow"] == pytest.approx((own == 0).float().mean().item())
    if method == LAPRUNE:
        assert found["hardness"] == pytest.approx(LAPRUNE.softness, abs=1e-5)
    else:
        assert 0 < found["hardness"] < 1


def test_lost_rows_are_wrong_and_silent(images: Images) -> None:
    run = make(images)
    scores = torch.zeros(4, 20)
    scores[:, 10:] = 1 + torch.arange(10)
    scores.grad = torch.zeros(4, 20)
    scores.grad[0, 0] = 1.0
    target = torch.tensor([0, 0, 19, 0])  # the third is right
    run._record(scores, target, torch.tensor(1.0), torch.tensor(7.0))
    found = dict(zip(run.names, run.sums.tolist(), strict=False))
    assert found["lost"] == 0.5
    assert found["score_gradient"] == pytest.approx(4 / 4)
    assert (found["clipped"], found["broken"], run.sums[-3].item()) == (1, 0, 7)


@pytest.mark.parametrize("study", [classification, collapse])
def test_every_row_has_one_schedule_and_its_own_setting(study: object) -> None:
    for options in (Options(), Options(epochs=30), QUICK):
        wanted = study.settings(options)  # type: ignore[attr-defined]
        assert {s["epochs"] for s in wanted} == {options.epochs or (2 if options.quick else 200)}
        keys = [json.dumps(s, sort_keys=True) for s in wanted]
        assert len(set(keys)) == len(keys)
        methods = {method_of(s) for s in wanted}
        assert methods == set(study.LABELS)  # type: ignore[attr-defined]
    assert len(set(study.LABELS.values())) == len(study.LABELS)  # type: ignore[attr-defined]


def test_tables_refuse_mixed_schedules() -> None:
    records = [
        {"setting": s, "result": {"precision": "float32"}}
        for epochs in (2, 3)
        for s in classification.settings(Options(epochs=epochs, seeds=1))
    ]
    with pytest.raises(ValueError, match=r"one table, one schedule: got records of \[2, 3\]"):
        classification.notes(records, LABELS)


def test_a_study_out_of_time_goes_on_and_draws_what_is_there(tmp_path: Path) -> None:
    late = Options(quick=True, seeds=1, cache=tmp_path / "cache", deadline=0.0)
    with pytest.raises(Unfinished, match="0 of 10 settings are on file"):
        run(classification.STUDY, late, tmp_path)
    arguments = ["reproduce", "classification", "--quick", "--device", "cpu", "--seeds", "1"]
    arguments += ["--results", str(tmp_path), "--cache", str(tmp_path / "cache")]
    told = CliRunner().invoke(cli.app, [*arguments, "--minutes", "0"])
    assert told.exit_code == 1
    assert "not complete: 0 of 10" in told.output
    assert CliRunner().invoke(cli.app, [*arguments, "--stored"]).exit_code == 1

    some = classification.settings(QUICK)[:2]
    with (tmp_path / "classification.jsonl").open("w") as file:
        for setting, result in classification.together(some, QUICK):
            file.write(json.dumps({"setting": setting, "result": result, "where": {}}) + "\n")
    drawn = CliRunner().invoke(cli.app, [*arguments, "--stored"])
    assert drawn.exit_code == 0, drawn.output
    text = (tmp_path / "classification_2_epochs.md").read_text()
    assert "ACC@5, paper" in text
    assert "difference" not in text  # not the paper's schedule
    records = load(tmp_path / "classification.jsonl")
    for record in records:
        record["setting"] |= {"images": "cifar100", "epochs": 200}
        record["result"] |= {"top1": 0.74, "top5": 0.874}
    table = classification.accuracies(records, classification.LABELS, classification.PAPER)
    assert "| LaPrune, gamma 0.1 → 0.8 | 72.0 | 74.0 | +2.0 | 87.4 | 87.4 | +0.0 |" in table
    assert "Not run for 2 epochs: Smooth top-k" in text
    assert len(load(tmp_path / "classification.jsonl")) == 2


def test_any_study_can_be_out_of_time(tmp_path: Path) -> None:
    with pytest.raises(Unfinished, match=r"0 of \d+ settings are on file"):
        run(hardness_path.STUDY, Options(quick=True, deadline=0.0), tmp_path)
    assert run(hardness_path.STUDY, Options(quick=True, deadline=math.inf), tmp_path)


def test_studies_share_finished_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = Options(quick=True, seeds=1, cache=tmp_path)
    wanted = [s for s in collapse.settings(options) if method_of(s) == LAPRUNE]
    assert wanted == [s for s in classification.settings(options) if method_of(s) == LAPRUNE]
    first = classification.measure(wanted[0], options)
    assert not list(tmp_path.rglob("*.safetensors"))
    monkeypatch.setattr(classification, "_run", None)
    assert collapse.measure(wanted[0], options) == first


def test_speed_counts_the_images_of_all_runs() -> None:
    assert classification.speed(2, Options(quick=True), CROSS_ENTROPY, epochs=3) > 0
