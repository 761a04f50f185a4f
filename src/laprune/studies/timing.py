"""Fair timing: warmed up, synchronised, the median of several calls."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable

import torch

Call = Callable[[], object]


def median_ms(call: Call, device: str, repeats: int, warm_ups: int = 1) -> float:
    """Median wall-clock of ``call`` in milliseconds."""
    for _ in range(warm_ups):
        call()
    return statistics.median(_once(call, device) for _ in range(repeats))


def _once(call: Call, device: str) -> float:
    if torch.device(device).type != "cuda":
        start = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - start)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def queued_ms(call: Call, repeats: int) -> float:
    """Median time of ``call`` on a GPU among calls that are not waited for, as in training: what
    Python or the device takes, whichever is longer."""
    call()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    torch.cuda.synchronize()
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(marks))


def graph_ms(call: Call, repeats: int, calls: int = 10) -> float:
    """Median time of ``call`` replayed from a CUDA graph that holds it so many times."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    return median_ms(graph.replay, "cuda", repeats, warm_ups=3) / calls


def copy_bandwidth(device: str, size: int = 1 << 28) -> float:
    """Bytes per second of a large copy, read and written bytes both counted."""
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    ms = median_ms(lambda: target.copy_(source), device, repeats=9, warm_ups=3)
    return 2 * size / (ms * 1e-3)
