"""Times every plausible plan of the CUDA backend, from a CUDA graph: forward, or backward.

    python tools/tune_cuda.py [--only 65536x64 ...] [--seconds 200]

Kernels are compiled first, by several processes at once, into Triton's cache.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from laprune.backends import cuda
from laprune.backends._plans import SHORT, Plan, long_plan, power

SHAPES = {"65536x64": 8, "65536x100": 8, "65536x256": 16, "16384x512": 32, "16384x1000": 32}
SHAPES |= {"8192x2048": 32, "4096x4096": 32, "4096x8192": 32, "4096x16384": 64, "4096x32768": 64}
SHAPES |= {"64x1000": 32, "64x4096": 32, "64x16384": 64}
SHAPES |= {f"1x{n}": n // 16 for n in (10**5, 10**6, 10**7, 10**8)}
REGISTERS = (64, 96, 128, 168)


def plans(rows: int, n: int, backward: bool) -> Iterator[Plan]:
    if n > SHORT:
        count = torch.cuda.get_device_properties(0).multi_processor_count
        for warps, unroll in ((8, 4), (16, 4)) if backward else ((8, 4), (8, 8)):
            yield long_plan(rows, n, count, warps, unroll)
        return
    for unroll in (2, 4, 8):
        for lanes in (1 << i for i in range(10)):
            tile = 4 * lanes * unroll
            if tile == power(n) or (tile < n and lanes >= 32 and unroll >= 4):
                plan = Plan(max(1, 32 // lanes), lanes, unroll)
                fit = (x for x in REGISTERS if 32 * plan.warps * x <= 1 << 16)
                yield from (plan._replace(registers=x) for x in fit)


class Job(NamedTuple):
    backward: bool
    shape: str
    plan: Plan


def jobs(only: list[str] | None) -> Iterator[Job]:
    for shape in only or SHAPES:
        rows, n = map(int, shape.split("x"))
        for backward in (False, True):
            yield from (Job(backward, shape, plan) for plan in plans(rows, n, backward))


def call(job: Job) -> Callable[[], object]:
    rows, n = map(int, job.shape.split("x"))
    generator = torch.Generator("cuda").manual_seed(0)
    r = torch.randn(rows, n, device="cuda", generator=generator)
    args = (r, float(SHAPES[job.shape]), 0.9, None, False, False)
    if not job.backward:
        return lambda: cuda.solve(*args, how=job.plan)
    _, state, info = cuda.solve(*args)
    g = torch.randn_like(r)
    return lambda: cuda.vjp(*args, state, info, g, None, how=job.plan)


def milliseconds(f: Callable[[], object], repeats: int = 10) -> float:
    f()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            f()
    times = []
    for _ in range(6):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / repeats)
    return sorted(times[1:])[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=list(SHAPES))
    parser.add_argument("--seconds", type=float, default=200)
    parser.add_argument("--processes", type=int, default=12)
    parser.add_argument("--compile", type=int, default=-1, help=argparse.SUPPRESS)
    options = parser.parse_args()
    todo = list(jobs(options.only))
    if options.compile >= 0:
        for job in todo[options.compile :: options.processes]:
            call(job)()
        return
    began = time.time()
    workers = [
        subprocess.Popen([sys.executable, *sys.argv, "--compile", str(i)])
        for i in range(options.processes)
    ]
    for worker in workers:
        worker.wait()
    print(f"compiled in {time.time() - began:.0f} s", flush=True)
    for job in todo:
        if time.time() - began > options.seconds:
            print("out of time")
            return
        what = "backward" if job.backward else "forward"
        try:
            ms = milliseconds(call(job))
            print(f"{job.shape} {what} {tuple(job.plan)}: {1e3 * ms:.1f} us")
        except Exception as error:
            print(
                f"{job.shape} {what} {tuple(job.plan)} failed: {type(error).__name__} {error}"[:200]
            )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
