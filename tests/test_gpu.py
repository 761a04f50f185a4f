"""On a GPU the functions give what they give on a CPU."""

import pytest
import torch
from conftest import no_waiting

import laprune
from laprune.sae import AuxK, SparseAutoencoder, Trainer, evaluate
from laprune.studies import inputs, sae_training
from laprune.studies.sae_training import Method, Recipe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

FUNCTIONS = {
    "soft": lambda r, k, h: laprune.soft_topk(r, k, h),
    "ste": lambda r, k, h: laprune.soft_topk(r, k, h, mode="ste"),
    "gated": lambda r, k, h: laprune.gated_topk(r, k, h),
    "lapsum": lambda r, k, h: laprune.lapsum_topk(r, k, h),
}


def _outcome(f, r, k, h, g):
    r = r.detach().requires_grad_()
    out = f(r, k, h)
    (d,) = torch.autograd.grad(out, r, g)
    return out.detach().cpu(), d.cpu()


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("name", ["gaussian", "cauchy", "relu", "integers", "offset"])
def test_masks_and_gradients_agree_with_the_cpu(function, name):
    rows, n = 16, 300
    r, g = inputs.draw(name, rows, n), inputs.draw("gaussian", rows, n, seed=1)
    k, h = inputs.budgets(rows, n), inputs.hardnesses(rows, 0.99)
    here = _outcome(FUNCTIONS[function], r, k, h, g)
    there = _outcome(FUNCTIONS[function], r.cuda(), k.cuda(), h.cuda(), g.cuda())
    torch.testing.assert_close(there[0], here[0], atol=1e-7, rtol=1e-6)
    assert (there[1] - here[1]).norm() <= 1e-6 * here[1].norm()


def test_hard_masks_are_equal():
    r = inputs.draw("integers", 8, 100)
    assert torch.equal(laprune.hard_topk(r.cuda(), 10).cpu(), laprune.hard_topk(r, 10))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_million_scores(dtype):
    r = inputs.draw("gaussian", 1, 10**6, dtype=dtype).cuda()
    d = laprune.diagnostics(laprune.soft_topk(r, 62_500, 0.9))
    assert abs(d.mass.item() / 62_500 - 1) < 1e-6
    assert abs((1 - d.gamma.item()) / 0.1 - 1) < 1e-3


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("mode", ["soft", "ste", "hard"])
def test_autoencoders_train_as_on_the_cpu(mode, batch):
    x = inputs.draw("gaussian", 200, 24, dtype=torch.float32)
    found = []
    for device in ("cpu", "cuda"):
        g = torch.Generator().manual_seed(0)
        sae = SparseAutoencoder(24, 96, 8, 0.8, mode=mode, batch=batch, generator=g).to(device)
        trainer = Trainer(sae, aux=AuxK(k=8, dead_after=400))
        errors = [trainer.step(x.to(device)).cpu() for _ in range(4)]
        found.append((torch.stack(errors), *(y.cpu() for y in evaluate(sae, x.to(device)))))
    for here, there in zip(*found, strict=True):
        torch.testing.assert_close(there, here, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize(
    "method",
    [
        Method("laprune", 0.8, annealed=True),
        Method("topk", relu=True, aux=True),
        Method("batchtopk", relu=True, aux=True),
    ],
    ids=lambda method: method.operator,
)
def test_replayed_steps_train_as_others_do(method, monkeypatch):
    x = inputs.draw("gaussian", 190, 24, dtype=torch.float32).cuda()
    recipe, found = Recipe(epochs=3, batch=40, dead_after=100), []
    for warm_up in (2, 1000):
        monkeypatch.setattr(sae_training._Step, "WARM_UP", warm_up)
        sae = sae_training.train(x, method, (0, 1), 96, 8, recipe)
        found.append((sae.encoder, sae.decoder, *evaluate(sae, x.expand(2, -1, -1))))
    for replayed, eager in zip(*found, strict=True):
        torch.testing.assert_close(replayed, eager, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("batch", [False, True])
def test_a_training_step_does_not_wait_for_the_gpu(batch):
    sae = SparseAutoencoder(24, 96, 8, mode="hard", postact="relu", batch=batch).cuda()
    trainer = Trainer(sae, aux=AuxK(k=8, dead_after=400))
    x = torch.randn(200, 24, device="cuda")
    trainer.step(x)
    with no_waiting():
        trainer.step(x)


def test_a_checkpoint_moves_between_devices(tmp_path):
    x = torch.randn(200, 24)
    path = tmp_path / "run.safetensors"
    for epochs, device in ((1, "cpu"), (2, "cuda"), (3, "cpu")):
        torch.manual_seed(0)
        trainer = Trainer(SparseAutoencoder(24, 96, 8).to(device), epochs=epochs, batch_size=64)
        history = trainer.fit(x.to(device), progress=False, checkpoint=path)
        assert len(history) == epochs


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gamma", [0.0, 0.7, 1.0])
def test_one_budget_over_several_tensors(gamma, dtype):
    tensors = [x.to(dtype) for x in inputs.draw("gaussian", 1, 70_300)[0].split((300, 0, 70_000))]
    weights = [torch.linspace(-1, 1, len(x), dtype=dtype) for x in tensors]
    outcomes = []
    for device in ("cpu", "cuda"):
        leaves = [x.to(device).requires_grad_() for x in tensors]
        masks = laprune.global_topk(leaves, 5000, gamma)
        loss = sum((p * w.to(device)).sum() for p, w in zip(masks, weights, strict=True))
        outcomes.append([x.detach().cpu() for x in (*masks, *torch.autograd.grad(loss, leaves))])
    for here, there in zip(*outcomes, strict=True):
        torch.testing.assert_close(there, here, atol=1e-5, rtol=1e-4)


def test_nccl_with_one_rank(tmp_path):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    from laprune import distributed
    from laprune.prune import GlobalPruner

    dist.init_process_group("nccl", f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        r = inputs.draw("gaussian", 2, 5000)
        found = distributed.solve(r.cuda(), 300, 0.8)
        torch.testing.assert_close(found.mask.cpu(), laprune.soft_topk(r, 300, 0.8))
        assert (found.collectives == found.passes.max() + 2).all()
        hard = distributed.hard_topk(r.round().cuda(), 300)
        assert torch.equal(hard.cpu(), laprune.hard_topk(r.round(), 300))
        model = torch.nn.Linear(64, 64).cuda()
        pruner = GlobalPruner(model, 0.1, gamma=0.9)
        torch.nn.parallel.DistributedDataParallel(model)(torch.ones(2, 64).cuda()).sum().backward()
        pruner.finalize()
        assert int((model.weight != 0).sum()) == 410

        mesh = init_device_mesh("cuda", (1,))
        sharded = distribute_tensor(r.float().cuda(), mesh, [Shard(1)])
        mask = laprune.soft_topk(sharded, 300, 0.8).full_tensor()
        torch.testing.assert_close(mask.cpu(), laprune.soft_topk(r.float(), 300, 0.8))
        model = torch.nn.Linear(64, 64).cuda()
        pruner = GlobalPruner(model, 0.1, gamma=0.9)
        fully_shard(model, mesh=mesh)
        pruner.refresh()
        model(torch.ones(2, 64).cuda()).square().mean().backward()
        assert pruner.report().kept == 410
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", ["laprune", "lapsum", "neuralsort", "bitonic", "smooth_topk"])
def test_a_captured_training_step_is_the_step(name: str) -> None:
    from laprune.studies.classification import LABELS, TopFive, synthetic
    from laprune.studies.image_training import Recipe, Run, train_all

    method = next(m for m in LABELS if m.operator == name)
    recipe = Recipe(epochs=2, batch=10, width=8)
    captured, plain = (Run(synthetic("cuda"), TopFive(method, 2), recipe, 0) for _ in range(2))
    prepare = plain.prepare

    def without_graph() -> None:
        prepare()
        plain.replay = plain.step

    plain.prepare = without_graph  # type: ignore[method-assign]
    runs = [run for _, run in train_all([(r, lambda r=r: r) for r in (captured, plain)], 2, bool)]
    assert {id(r) for r in runs} == {id(captured), id(plain)}
    assert captured.replay != captured.step
    for one, other in zip(captured.logs, plain.logs, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=0.02)
        assert one["broken"] == other["broken"] == 0
