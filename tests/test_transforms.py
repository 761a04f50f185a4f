"""Every PyTorch transform: functional, compiled, exported, fake, deterministic, remembered."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from conftest import normal, problem
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

import laprune

# Raised inside torch, when it loads formulas of its own.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script")

SCORES, WEIGHTS = normal(3, 7), normal(3, 7, seed=1)
BUDGETS = torch.tensor([2.0, 3.0, 1.5], dtype=torch.float64)
GAMMAS = torch.tensor([0.5, 0.9, 0.3], dtype=torch.float64)

FUNCTIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "soft": laprune.soft_topk,
    "ste": lambda r, k, g: laprune.soft_topk(r, k, g, mode="ste"),
    "lapsum": laprune.lapsum_topk,
    "gated": laprune.gated_topk,
    "gated by scores": lambda r, k, g: laprune.gated_topk(WEIGHTS, k, g, scores=r),
    "solve": lambda r, k, g: laprune.solve(r, k, g).mask,
    "masked columns": lambda r, k, g: (
        laprune.soft_topk(r.T, k, g, dim=0, mask=torch.arange(7)[:, None] != 2).T
    ),
}
every_function = pytest.mark.parametrize("f", FUNCTIONS.values(), ids=FUNCTIONS)


def loss(f: Callable[..., Tensor] = laprune.soft_topk) -> Callable[..., Tensor]:
    return lambda *args: (f(*args) * WEIGHTS).sum()


def reverse(f: Callable[..., Tensor], *args: Tensor) -> tuple[Tensor, ...]:
    """Output and gradients by plain autograd."""
    leaves = [x.clone().requires_grad_() for x in args]
    out = f(*leaves)
    return out.detach(), *torch.autograd.grad((out * WEIGHTS).sum(), leaves)


def assert_all_equal(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    for x, y in zip(found, wanted, strict=True):
        assert torch.equal(x, y)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@every_function
def test_func_grad_is_autograd(f, backend: str) -> None:
    args = (SCORES, BUDGETS, GAMMAS)
    assert_all_equal(grad(loss(f), (0, 1, 2))(*args), reverse(f, *args)[1:])


@pytest.mark.parametrize("arg", [0, 1, 2], ids=["scores", "k", "gamma"])
def test_vmap_is_a_loop(arg: int, backend: str) -> None:
    args: list[object] = [SCORES[0], BUDGETS[0], GAMMAS[0]]
    batch = (SCORES, BUDGETS, GAMMAS)[arg]

    def f(x: Tensor) -> Tensor:
        return laprune.soft_topk(*args[:arg], x, *args[arg + 1 :])

    assert torch.equal(vmap(f)(batch), torch.stack([f(x) for x in batch]))


def test_vmap_nests_and_maps_any_dimension(backend: str) -> None:
    both = vmap(vmap(laprune.soft_topk, (None, 0, None)), (0, None, 0))(SCORES, BUDGETS, GAMMAS)
    loop = [
        torch.stack([laprune.soft_topk(r, k, g) for k in BUDGETS])
        for r, g in zip(SCORES, GAMMAS, strict=True)
    ]
    assert torch.equal(both, torch.stack(loop))
    columns = vmap(lambda r: laprune.soft_topk(r, 2, 0.5), in_dims=1, out_dims=1)(SCORES.T)
    assert torch.equal(columns, laprune.soft_topk(SCORES, 2, 0.5).T)


@pytest.mark.parametrize("f", [laprune.soft_topk, laprune.gated_topk])
def test_vmap_of_grad_is_the_batched_gradient(f, backend: str) -> None:
    each = vmap(grad(lambda r, w, k, g: (f(r, k, g) * w).sum()))(SCORES, WEIGHTS, BUDGETS, GAMMAS)
    torch.testing.assert_close(each, reverse(f, SCORES, BUDGETS, GAMMAS)[1])


@pytest.mark.parametrize("arg", [0, 1, 2], ids=["scores", "k", "gamma"])
def test_jacobians_agree(arg: int, backend: str) -> None:
    args = (SCORES, BUDGETS, GAMMAS)
    backward, forward = (j(laprune.soft_topk, argnums=arg)(*args) for j in (jacrev, jacfwd))
    torch.testing.assert_close(backward, forward)


def test_hessians_agree(backend: str) -> None:
    args = (SCORES, BUDGETS, GAMMAS)
    over = hessian(loss())(*args)
    torch.testing.assert_close(over, jacrev(jacrev(loss()))(*args))
    torch.testing.assert_close(over, over.permute(2, 3, 0, 1))


@every_function
def test_compiled_without_a_break_is_eager(f) -> None:
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    args = (SCORES, BUDGETS, GAMMAS)
    assert_all_equal(reverse(compiled, *args), reverse(f, *args))


def test_compiled_by_inductor_is_eager() -> None:
    def f(r: Tensor, k: Tensor, g: Tensor) -> Tensor:
        return laprune.gated_topk(r.sin(), k, g) * 2

    args = (SCORES, BUDGETS, GAMMAS)
    for x, y in zip(
        reverse(torch.compile(f, fullgraph=True), *args), reverse(f, *args), strict=True
    ):
        torch.testing.assert_close(x, y)


def test_everything_solve_knows_is_compiled() -> None:
    found = torch.compile(
        lambda r: tuple(laprune.solve(r, 2, 0.9)), fullgraph=True, backend="aot_eager"
    )(SCORES)
    assert_all_equal(found, tuple(laprune.solve(SCORES, 2, 0.9)))


@pytest.mark.parametrize(
    "f",
    [
        grad(loss()),
        vmap(laprune.soft_topk),
        lambda r, k, g: jvp(lambda x: laprune.soft_topk(x, k, g), (r,), (WEIGHTS,))[1],
        jacrev(laprune.soft_topk),
        jacfwd(laprune.soft_topk),
    ],
    ids=["grad", "vmap", "jvp", "jacrev", "jacfwd"],
)
def test_transforms_are_compiled(f) -> None:
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    args = (SCORES, BUDGETS, GAMMAS)
    torch.testing.assert_close(compiled(*args), f(*args))


def test_a_new_gamma_does_not_recompile() -> None:
    counter = CompileCounter()
    f = torch.compile(lambda r, g: laprune.soft_topk(r, 2, g), backend=counter, fullgraph=True)
    for gamma in (0.0, 0.1, 0.5, 0.9, 1.0):
        assert torch.equal(
            f(SCORES, torch.tensor(gamma)), laprune.soft_topk(SCORES, 2, torch.tensor(gamma))
        )
    assert counter.frame_count == 1


def test_a_scheduled_module_does_not_recompile() -> None:
    counter = CompileCounter()
    layer = laprune.nn.SoftTopK(2)
    scheduler = laprune.schedules.GammaScheduler(layer, laprune.schedules.linear(0.0, 0.9, 4))
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    for _ in range(4):
        assert torch.equal(compiled(SCORES), laprune.soft_topk(SCORES, 2, scheduler.gamma))
        scheduler.step()
    assert counter.frame_count == 1


def test_compiled_with_symbolic_shapes() -> None:
    counter = CompileCounter()
    f = torch.compile(
        lambda r: laprune.soft_topk(r, r.shape[-1] / 4, 0.9),
        fullgraph=True, dynamic=True, backend=counter,
    )  # fmt: skip
    for rows, n in ((2, 12), (3, 20), (5, 33)):
        r = normal(rows, n)
        assert torch.equal(f(r), laprune.soft_topk(r, n / 4, 0.9))
    assert counter.frame_count == 1


@pytest.mark.parametrize("strict", [False, True])
def test_exported_with_free_sizes(strict: bool) -> None:
    rows, n = torch.export.Dim("rows"), torch.export.Dim("n", min=2)
    program = torch.export.export(
        laprune.nn.SoftTopK(2), (SCORES,), dynamic_shapes=({0: rows, 1: n},), strict=strict
    )
    other = normal(6, 9)
    assert torch.equal(program.module()(other), laprune.soft_topk(other, 2, 0.9))


def test_meta_tensors_have_shapes() -> None:
    r = torch.empty(3, 7, 5, device="meta", requires_grad=True)
    masks = [
        laprune.soft_topk(r, 2, 0.9, dim=1),
        laprune.soft_topk(r, 2, 0.9, dim=1, mode="ste"),
        laprune.lapsum_topk(r, 2, 0.9, dim=1),
        laprune.hard_topk(r, 2, dim=1),
        laprune.gated_topk(r, 2, 0.9, scores=r.sin(), dim=1),
    ]
    s = laprune.solve(r, 2, 0.9, dim=1)
    assert {m.shape for m in (*masks, s.mask)} == {r.shape}
    assert {x.shape for x in s[1:]} == {torch.Size([3, 5])}
    masks[0].sum().backward()
    assert r.grad.shape == r.shape
    assert all(x.device.type == "meta" for x in (*masks, *s))


def samples():  # type: ignore[no-untyped-def]
    """Arguments of the solve op: gated or not, either hardness, both dtypes, hard rows too."""
    for dtype in (torch.float64, torch.float32):
        r, v = SCORES.to(dtype), WEIGHTS.to(dtype)
        for values, gated in ((None, False), (None, True), (v, True)):
            for fixed in (False, True):
                yield r, BUDGETS, GAMMAS, values, gated, fixed
    yield SCORES, BUDGETS, torch.tensor([0.0, 1.0, 0.5], dtype=torch.float64), None, False, False
    yield SCORES[:0], BUDGETS[:0], GAMMAS[:0], None, False, False


@pytest.mark.parametrize("args", list(samples()))
def test_ops_keep_their_contract_with_torch(args, backend: str) -> None:
    torch.library.opcheck(torch.ops.laprune.solve, args)
    _, state, info = torch.ops.laprune.solve(*args)
    for cotangent in (None, torch.ones_like(state)):
        rest = (state, info, torch.ones_like(args[0]), cotangent)
        torch.library.opcheck(torch.ops.laprune.vjp, (*args, *rest))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_safe(dtype: torch.dtype, backend: str) -> None:
    x = normal(4, 16, dtype=torch.float32).requires_grad_()
    weight = normal(16, 32, seed=1, dtype=torch.float32)
    with torch.autocast("cpu", dtype=dtype):
        scores = x @ weight
        p = laprune.soft_topk(scores, 4, 0.9)
    assert p.dtype == scores.dtype == dtype
    assert ((p.float().sum(-1) - 4).abs() <= 32 * torch.finfo(dtype).eps).all()
    p.float().square().sum().backward()
    assert x.grad.isfinite().all()


def test_deterministic_mode_allows_everything(backend: str) -> None:
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        for f in FUNCTIONS.values():
            args = (SCORES, BUDGETS, GAMMAS)
            assert_all_equal(reverse(f, *args), reverse(f, *args))
        laprune.hard_topk(SCORES, 2)
    finally:
        torch.use_deterministic_algorithms(was)


@pytest.mark.parametrize(("rows", "n"), [(1, 300_000), (64, 3000), (3, 50)])
def test_threads_do_not_change_a_bit(rows: int, n: int, dtype: torch.dtype) -> None:
    args = problem("gaussian", rows, n, dtype)
    weight = normal(rows, n, seed=1, dtype=dtype)

    def run() -> tuple[Tensor, ...]:
        r = args[0].clone().requires_grad_()
        s = laprune.solve(r, *args[1:])
        return *(x.detach() for x in s), torch.autograd.grad((s.mask * weight).sum(), r)[0]

    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(run())
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert_all_equal(other, results[0])


def test_inference_mode(backend: str) -> None:
    with torch.inference_mode():
        p = laprune.soft_topk(SCORES, BUDGETS, GAMMAS)
    assert p.is_inference()
    assert torch.equal(p, laprune.soft_topk(SCORES, BUDGETS, GAMMAS))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_modules_are_copied(copied) -> None:
    layer = laprune.nn.SoftTopK(2, gamma=0.7, dim=0)
    twin = copied(layer)
    layer.set_gamma(0.1)
    assert twin.gamma.item() == 0.7
    assert torch.equal(twin(SCORES), laprune.soft_topk(SCORES, 2, 0.7, dim=0))


def kept_bytes(f: Callable[[], Tensor]) -> int:
    """Bytes of storage that backward keeps alive."""
    storages: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = f()
    assert out.requires_grad
    return sum(storages.values())


PER_ROW = 64  # k, gamma, five numbers of state and two of info


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_backward_keeps_the_scores_and_a_few_numbers(dtype: torch.dtype, backend: str) -> None:
    rows, n = 4, 1000
    r = normal(rows, n, dtype=torch.float32).to(dtype).requires_grad_()
    v = normal(rows, n, dtype=torch.float32, seed=1).to(dtype).requires_grad_()
    row = n * r.element_size()
    for mode in ("soft", "ste"):
        kept = kept_bytes(lambda mode=mode: laprune.soft_topk(r, 10, 0.9, mode=mode))
        assert kept <= rows * (row + PER_ROW)
    assert kept_bytes(lambda: laprune.lapsum_topk(r, 10, 0.9)) <= rows * (row + PER_ROW)
    assert kept_bytes(lambda: laprune.gated_topk(v, 10, 0.9)) <= rows * (row + PER_ROW)
    gated = kept_bytes(lambda: laprune.gated_topk(v, 10, 0.9, scores=r))
    assert gated <= rows * (2 * row + PER_ROW)
