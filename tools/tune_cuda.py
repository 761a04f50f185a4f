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
from laprune.backends._plans import Plan, long_plan

SHAPES = {"65536x64": 8, "65536x100": 8, "16384x512": 32, "16384x1000": 32}
SHAPES |= {"4096x4096": 32, "4096x32768": 64}
SHAPES |= {f"1x{n}": n // 16 for n in (10**5, 10**6, 10**7, 10**8)}
FORWARD = {
    "65536x64": [Plan(16, 2, 8), Plan(16, 2, 4), Plan(8, 4, 4), Plan(4, 8, 2)],
    "65536x100": [Plan(8, 4, 8), Plan(4, 8, 4), Plan(2, 16, 2)],
    "16384x512": [Plan(2, 16, 8), Plan(1, 32, 4)],
    "16384x1000": [Plan(4, 8, 4), Plan(1, 32, 4), Plan(1, 32, 8)],
    "4096x4096": [Plan(1, 32, 4), Plan(1, 64, 4)],
    "4096x32768": [Plan(1, 256, 4), Plan(1, 256, 8)],
}
BACKWARD = {
    "65536x64": [Plan(8, 4, 4), Plan(16, 4, 4), Plan(32, 4, 4), Plan(4, 8, 2)],
    "65536x100": [Plan(4, 8, 4), Plan(2, 16, 2)],
    "16384x512": [Plan(1, 32, 4), Plan(2, 64, 2)],
    "16384x1000": [Plan(4, 32, 8), Plan(1, 64, 4), Plan(1, 128, 2)],
    "4096x4096": [Plan(1, 128, 8), Plan(1, 256, 4), Plan(1, 128, 2), Plan(1, 512, 2)],
    "4096x32768": [Plan(1, 256, 4), Plan(1, 512, 2), Plan(1, 512, 4)],
}
LONG_FORWARD = [(8, 4), (8, 8)]
LONG_BACKWARD = [(8, 4), (16, 4)]
REGISTERS = [0, 64, 96, 128, 168]


class Job(NamedTuple):
    backward: bool
    shape: str
    plan: Plan


def jobs(only: list[str] | None) -> Iterator[Job]:
    for shape in only or SHAPES:
        rows, n = map(int, shape.split("x"))
        for backward in (False, True):
            plans = (BACKWARD if backward else FORWARD).get(shape)
            if plans is None:
                pairs = LONG_BACKWARD if backward else LONG_FORWARD
                count = torch.cuda.get_device_properties(0).multi_processor_count
                plans = [long_plan(rows, n, count, *pair) for pair in pairs]
                plans += [Plan(1, 256, 4, 2 * count)] if backward else []
            for plan in plans:
                for registers in REGISTERS if plan.team == 0 else [0]:
                    yield Job(backward, shape, plan._replace(registers=registers))


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
