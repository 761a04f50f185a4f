"""Which ten of two hundred columns decide the class? A gate and a linear model learn it together.

python examples/feature_selection.py [--steps 150]
"""

from __future__ import annotations

import argparse

import torch

import laprune
from laprune.schedules import GammaScheduler, linear
from laprune.select import FeatureGate

COLUMNS, INFORMATIVE, ROWS = 200, 10, 1000


def main(steps: int) -> float:
    """Train, print, and return the share of informative columns that were found."""
    torch.manual_seed(0)
    x = torch.randn(ROWS, COLUMNS)
    truth = torch.randperm(COLUMNS)[:INFORMATIVE]
    y = (x[:, truth] @ torch.randn(INFORMATIVE).sign() > 0).float()

    gate = FeatureGate(COLUMNS, k=INFORMATIVE)
    linear_model = torch.nn.Linear(COLUMNS, 1)
    model = torch.nn.Sequential(gate, linear_model)
    # Without the decay a large weight makes up for a small mask, and columns need not open.
    optimiser = torch.optim.Adam(
        [
            {"params": gate.parameters()},
            {"params": linear_model.parameters(), "weight_decay": 0.05},
        ],
        lr=0.01,
    )
    scheduler = GammaScheduler(model, linear(0.0, 0.9, steps))
    for step in range(steps):
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(x)[:, 0], y)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        scheduler.step()
        if (step + 1) % max(steps // 5, 1) == 0:
            d = laprune.diagnostics(gate.mask(), eps=0.01)
            print(
                f"step {step + 1:4}  gamma {scheduler.gamma:.2f}  loss {loss.item():.3f}  "
                f"mass {d.mass.item():.4f}  near-binary {d.near_binary.item():.2f}"
            )

    found = set(gate.support().nonzero()[:, 0].tolist()) & set(truth.tolist())
    print(f"{len(found)} of {INFORMATIVE} informative columns among the {gate.k} selected")
    return len(found) / INFORMATIVE


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150)
    main(parser.parse_args().steps)
