"""Predict how binary a mask will be, then solve a million scores and count.

python examples/choose_gamma.py [--n 1000000]
"""

from __future__ import annotations

import argparse

import torch

import laprune
from laprune import theory

A, EPS = 0.05, 0.01


def main(n: int) -> float:
    """Print predicted and realised fractions, and return the largest difference."""
    torch.manual_seed(0)
    k, worst = round(A * n), 0.0
    print(f"{n:,} Gaussian scores, k = {k:,}: entries within {EPS} of 0 or 1")
    print("wanted   gamma    realised  at every scale")
    scores = torch.randn(n, dtype=torch.float64)
    for wanted in (0.8, 0.9, 0.95, 0.99):
        gamma = theory.gamma_for_saturation(a=A, target=wanted, eps=EPS)
        fractions = [
            laprune.diagnostics(laprune.soft_topk(c * scores, k, gamma), eps=EPS).near_binary.item()
            for c in (1e-3, 1.0, 1e3)
        ]
        same = max(fractions) - min(fractions) < 1e-4
        print(f"{wanted:.2f}     {gamma:.4f}   {fractions[1]:.4f}    {'yes' if same else 'no'}")
        worst = max(worst, *(abs(f - wanted) for f in fractions))
    return worst


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=1_000_000)
    main(parser.parse_args().n)
