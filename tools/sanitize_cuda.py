"""Runs every CUDA kernel once, small, for a checker: all regimes, statuses, gates and types.

compute-sanitizer --tool memcheck python tools/sanitize_cuda.py
compute-sanitizer --tool racecheck python tools/sanitize_cuda.py
"""

from __future__ import annotations

import torch

from laprune.backends import cuda
from laprune.backends._plans import Plan
from laprune.studies import inputs

PLANS = [Plan(16, 4, 2), Plan(1, 64, 1), Plan(1, 32, 2, team=1), Plan(1, 32, 4, team=3)]


def main() -> None:
    gamma = torch.tensor([0.0, 0.02, 0.9, 0.999, 1.0, 0.5], dtype=torch.float64, device="cuda")
    k = torch.tensor([5.0, 30.5, 9.0, 40.0, 33.25, 0.0], dtype=torch.float64, device="cuda")
    count = 0
    for plan in PLANS:
        for gated, own in ((False, False), (True, False), (True, True)):
            for fixed in (False, True):
                r = inputs.draw("integers", 6, 77 if plan.rows > 1 else 1501, dtype=torch.float32)
                r[2:4] = inputs.draw("gaussian", 2, r.shape[1], dtype=torch.float32)
                r[2, 5:9] = -torch.inf
                r = r.cuda()
                values = r * 0.5 + 1 if own else None
                args = (r, k, gamma, values, gated, fixed)
                _, state, info = cuda.solve(*args, how=plan)
                cuda.vjp(*args, state, info, torch.ones_like(r), None, how=plan)
                torch.cuda.synchronize()
                count += 1
    print(f"{count} pairs of kernels ran")


if __name__ == "__main__":
    main()
