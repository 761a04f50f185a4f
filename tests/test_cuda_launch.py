"""How the CUDA backend cuts shapes up, launches kernels, and what they compile to."""

from __future__ import annotations

import concurrent.futures
import importlib.util
import types

import pytest
import torch
from compile_cuda import Kernel, compiled

from laprune.backends import _plans, cuda

HAS_TRITON = importlib.util.find_spec("triton") is not None


def test_plans_fill_their_warps():
    for n in (1, 2, 5, 63, 64, 65, 1000, 4096, 8192, 16384, 32768, 40_000):
        for rows in (1, 100, 10_000):
            for dtype in (torch.float32, torch.float64):
                for backward in (False, True):
                    how = _plans.plan(rows, n, dtype, 132, backward)
                    assert how.rows * how.lanes == 32 * how.warps
                    # What a processor has.
                    assert how.registers * 32 * how.warps <= 1 << 16
    assert 4 * _plans.held(1000, 32).lanes * _plans.held(1000, 32).unroll == 1024
    assert _plans.long_plan(1, 10**9, 132, 8, 4).team == 132
    assert _plans.long_plan(4096, 100_000, 132, 8, 4).team == 1


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_a_compiled_kernel_is_launched_directly(monkeypatch):
    import triton.language as tl

    calls = []

    class Compiled:
        def __getitem__(self, grid):
            return lambda *args: calls.append(("again", grid, args))

    class Kernel:
        @staticmethod
        def fn(p_x, n, U: tl.constexpr, FIXED: tl.constexpr):
            pass

        def __getitem__(self, grid):
            return lambda *args, **_: calls.append(("compiled", grid, args)) or Compiled()

    monkeypatch.setattr(cuda, "_current", lambda: 0)
    launch = cuda._Launch(0, 8, 100, torch.float32, 0, cuda.Plan(4, 8, 4))
    kernel, kinds = Kernel(), (torch.float32,)
    x = torch.zeros(17)
    for scores, fixed in ((x[:16], True), (x[:16], True), (x[1:], True), (x[:16], False)):
        launch(kernel, kinds, (scores,), 16, FIXED=fixed)
    assert [kind for kind, _, _ in calls] == ["compiled", "again", "compiled", "compiled"]
    assert all(grid == (2, 1, 1) for _, grid, _ in calls)
    assert calls[0][2][1:] == calls[1][2][1:] == (16, 4, True)
    assert calls[1][2][0] == x.data_ptr()
    assert calls[3][2][1:] == (16, 4, False)


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
@pytest.mark.parametrize("n", [1000, 20_000])
@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_a_routine_launches_again_what_was_launched_before(n, fixed, gated, monkeypatch):
    calls = []

    class Compiled:
        def __getitem__(self, grid):
            return lambda *args: calls.append((grid, args))

    class Kernel:
        def __init__(self, kernel):
            self.fn = kernel.fn

        def __getitem__(self, grid):
            def first(*args, **_):
                places = (x.data_ptr() if isinstance(x, torch.Tensor) else x for x in args)
                calls.append((grid, tuple(places)))
                return Compiled()

            return first

    module = cuda.kernels()
    if module is None:
        pytest.skip("Triton cannot serve")
    names = ("solve_rows", "solve_long", "vjp")
    fake = types.SimpleNamespace(**{name: Kernel(getattr(module, name)) for name in names})
    monkeypatch.setattr(cuda, "kernels", lambda: fake)
    monkeypatch.setattr(cuda, "_current", lambda: 0)
    monkeypatch.setattr(cuda, "_stream", lambda _: 0)
    monkeypatch.setattr(cuda, "_processors", lambda _: 132)
    monkeypatch.setattr(cuda, "_kept", {})
    cuda._launch.cache_clear()
    routine = cuda.Routine(0, torch.Size((1, n)), torch.float32, 2 if gated else 0)
    r, g = torch.zeros(2, 1, n)
    for _ in range(2):
        out, state = routine.solve(r, 7, 0.7, fixed)
        assert routine.vjp(r, 7, 0.7, fixed, state, g).shape == out.shape == r.shape
    cuda._launch.cache_clear()
    for (grid, one), (grid_again, other), pointers in zip(
        calls[:2], calls[2:], (7 + 2 * (n > 4096), 14), strict=True
    ):
        assert grid == grid_again
        assert one[pointers:] == other[pointers:]
        state_at = 5 if pointers < 14 else 7
        for places in (one[:pointers], other[:pointers]):
            assert places[0] == places[1] == r.data_ptr()
            info = places[state_at + 1]
            assert info - places[state_at] == 48
            assert info % 16 == 0
        # The same addresses are equal.
        same = [[x.index(place) for place in x] for x in (one[:pointers], other[:pointers])]
        assert same[0] == same[1]
    assert calls[0][1][0] == r.data_ptr()


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_a_launch_asks_for_hooks_only_where_they_are_set(monkeypatch):
    from triton import knobs

    calls = []

    class Compiled:
        function, packed_metadata = 7, (1, 2, 3)

        def run(self, *args):
            calls.append(args)

        def __getitem__(self, grid):
            return lambda *args: calls.append(("public", grid, args))

    monkeypatch.setattr(cuda, "_stream", lambda index: 100 + index)
    go, seen = cuda._launcher(Compiled(), (4, 1, 1), 2), []
    go(5, 6)
    knobs.runtime.launch_exit_hook.add(seen.append)
    go(5, 6)
    knobs.runtime.launch_exit_hook.remove(seen.append)
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", seen.append)
    go(5, 6)
    direct = (4, 1, 1, 102, 7, (1, 2, 3), None, None, None, 5, 6)
    assert calls == [direct, ("public", (4, 1, 1), (5, 6)), ("public", (4, 1, 1), (5, 6))]

    class Old:
        def __getitem__(self, grid):
            return grid

    assert cuda._launcher(Old(), (4, 1, 1), 2) == (4, 1, 1)


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_only_the_default_stream_keeps_its_scratch(monkeypatch):
    monkeypatch.setattr(cuda, "_kept", {})
    small, large, other = (
        cuda._Launch(index, rows, 10**6, torch.float32, 0, cuda.Plan(1, 32, 4, team=4))
        for index, rows in ((0, 1), (0, 2), (1, 1))
    )
    like = torch.zeros(3, dtype=torch.float64)
    monkeypatch.setattr(cuda, "_stream", lambda _: 0)
    lines, counters = small.scratch(like)
    assert counters.dtype == torch.int32
    assert (counters == 0).all()
    assert small.scratch(like)[0] is lines
    assert small.scratch(like)[1] is counters
    assert other.scratch(like)[1] is not counters
    more = large.scratch(like)
    assert [x.numel() for x in more] == [2 * lines.numel(), 2 * counters.numel()]
    assert small.scratch(like) is large.scratch(like) is more
    monkeypatch.setattr(cuda, "_stream", lambda _: 5)
    assert small.scratch(like)[1] is not small.scratch(like)[1]
    assert (small.scratch(like)[1] == 0).all()


def test_captured_launches_have_zeros_that_nobody_else_has(monkeypatch):
    class OnDevice:
        device = torch.device("cuda", 0)
        new_empty, new_zeros = torch.empty, torch.zeros

    monkeypatch.setattr(cuda, "_spare", {})
    capturing = False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    counters = [cuda._scratch(OnDevice, 132, 1)[1]]
    capturing = True
    counters += [cuda._scratch(OnDevice, 132, rows)[1] for rows in (1, 66, 1)]
    assert [len(x) for x in counters] == [264, 32, 160, 32]
    assert all((x == 0).all() for x in counters)
    for i, x in enumerate(counters):  # what one launch counts, the others do not see
        x += i + 1
    assert [x.unique().tolist() for x in counters] == [[1], [2], [3], [4]]
    # Threads that capture at the same time share none either.
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = pool.map(lambda _: cuda._scratch(OnDevice, 132, 1)[1].data_ptr(), range(400))
    assert len(set(found)) == 400
    # When they are used up, a graph fills its own, and the next eager launch makes more.
    monkeypatch.setitem(cuda._spare, 0, torch.zeros(8, dtype=torch.int32))
    assert len(cuda._scratch(OnDevice, 132, 1)[1]) == 264
    capturing = False
    cuda._scratch(OnDevice, 132, 1)
    assert len(cuda._spare[0]) == cuda.SPARE


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
@pytest.mark.parametrize("n", [64, 60, 63])
def test_a_thread_adds_its_scores_up_alone(n):
    """Whatever order this Triton gives threads to dimensions in, and wherever rows begin."""
    ptx = compiled(Kernel("vjp", 64, n, cuda.Plan(8, 4, 4))).asm["ptx"]
    # Eight sums over four lanes, and a few votes.
    assert 16 <= ptx.count("shfl.sync") <= 32


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
@pytest.mark.parametrize(
    ("name", "rows", "n", "how", "at_once"),
    [
        ("solve_rows", 64, 100, cuda.Plan(4, 8, 4), True),
        ("solve_rows", 64, 101, cuda.Plan(4, 8, 4), False),
        ("vjp", 64, 100, cuda.Plan(4, 8, 4), True),
        ("vjp", 64, 101, cuda.Plan(4, 8, 4), False),
        ("solve_long", 1, 20_001, cuda.Plan(1, 64, 4, team=1), True),
        ("solve_long", 3, 20_001, cuda.Plan(1, 64, 4, team=1), False),
        ("vjp", 1, 20_001, cuda.Plan(1, 64, 4, team=1), True),
        ("vjp", 3, 20_001, cuda.Plan(1, 64, 4, team=1), False),
    ],
)
def test_fours_are_moved_at_once_where_rows_begin_with_one(name, rows, n, how, at_once):
    """Elsewhere nothing may be: an address that is no multiple of what is moved is an error."""
    ptx = compiled(Kernel(name, rows, n, how)).asm["ptx"]
    for kind in ("ld.global", "st.global"):
        moves = [line for line in ptx.splitlines() if kind in line]
        assert any(".v4" in line for line in moves) == at_once
        assert at_once or not any(".v2" in line for line in moves)


def test_serves_only_cuda():
    assert not cuda.serves(torch.zeros(2, 3))
