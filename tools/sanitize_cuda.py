"""Runs every CUDA kernel once, small, for a checker: all regimes, statuses, gates and types.

compute-sanitizer --tool memcheck python tools/sanitize_cuda.py
compute-sanitizer --tool racecheck python tools/sanitize_cuda.py
"""

from __future__ import annotations

import sys

import torch

from laprune.backends import cuda
from laprune.backends._plans import Plan
from laprune.studies import inputs

# Rows held in registers, rows in tiles, teams; tiles that end with the row, and others.
ALL, ONE = slice(None), slice(2, 3)
CASES = [
    (Plan(2, 16, 4), ALL, 77),
    (Plan(2, 16, 4), ALL, 256),
    (Plan(16, 4, 2), ALL, 77),
    (Plan(1, 64, 1), ALL, 1500),
    (Plan(1, 512, 1), ALL, 1500),
    (Plan(1, 32, 2, team=1), ALL, 1501),
    (Plan(1, 32, 4, team=3), ALL, 1501),
    (Plan(1, 32, 1, team=3), ONE, 1501),
    (Plan(1, 32, 1, team=3), ALL, 1536),
]


def main(device: str = "cuda") -> None:
    gamma = torch.tensor([0.0, 0.02, 0.9, 0.999, 1.0, 0.5], dtype=torch.float64, device=device)
    k = torch.tensor([5.0, 30.5, 9.0, 40.0, 33.25, 0.0], dtype=torch.float64, device=device)
    cuda.VERY_LONG, cuda.COARSE = 1502, 2  # the last case reads a few tiles first
    count = 0
    for plan, rows, n in CASES:
        for gated, own in ((False, False), (True, False), (True, True)):
            for fixed in (False, True):
                r = inputs.draw("integers", 6, n, dtype=torch.float32)
                r[2:4] = inputs.draw("gaussian", 2, n, dtype=torch.float32)
                r[2, 5:9] = -torch.inf
                r = r[rows].to(device)
                values = r * 0.5 + 1 if own else None
                # Of a long row, enough for a sample of it to say something.
                args = (r, (k * (20 if n > 256 else 1))[rows], gamma[rows], values, gated, fixed)
                _, state, info = cuda.solve(*args, how=plan)
                cuda.vjp(*args, state, info, torch.ones_like(r), None, how=plan)
                if device == "cuda":
                    torch.cuda.synchronize()
                count += 1
    print(f"{count} pairs of kernels ran")


if __name__ == "__main__":
    main(*sys.argv[1:])
