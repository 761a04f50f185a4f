"""A sparse autoencoder with exactly k latents per input, from soft to hard.

    python examples/autoencoder.py [--steps 1500]

The data are sums of three directions out of 64 in 24 dimensions. The mask over the latents begins
soft, so that all of them learn, and ends hard, which is how the autoencoder is evaluated.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import laprune
from laprune.schedules import cosine

WIDTH, DIRECTIONS, LATENTS, K = 24, 64, 96, 3


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(WIDTH, LATENTS)
        self.decoder = nn.Linear(LATENTS, WIDTH)
        with torch.no_grad():
            self.decoder.weight.copy_(self.encoder.weight.T)

    def forward(self, x: Tensor, gamma: float) -> Tensor:
        return self.decoder(laprune.gated_topk(torch.relu(self.encoder(x)), K, gamma))


def unexplained(model: Autoencoder, x: Tensor, gamma: float) -> float:
    """The share of the variance that the reconstruction misses."""
    with torch.no_grad():
        return float((model(x, gamma) - x).square().sum() / (x - x.mean(0)).square().sum())


def main(steps: int) -> float:
    """Train, print, and return what the hard autoencoder leaves unexplained."""
    torch.manual_seed(0)
    directions = nn.functional.normalize(torch.randn(DIRECTIONS, WIDTH), dim=-1)
    chosen = laprune.hard_topk(torch.rand(8192, DIRECTIONS), K)
    x = (chosen * (0.5 + torch.rand(8192, DIRECTIONS))) @ directions

    model = Autoencoder()
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    schedule = cosine(0.2, 0.98, steps)
    for step in range(steps):
        batch = x[torch.randint(len(x), (512,))]
        loss = (model(batch, schedule(step)) - batch).square().sum(-1).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if (step + 1) % max(steps // 5, 1) == 0:
            soft, hard = (unexplained(model, x, g) for g in (schedule(step), 1.0))
            print(
                f"step {step + 1:5}  gamma {schedule(step):.2f}  soft {soft:.3f}  hard {hard:.3f}"
            )
    return unexplained(model, x, 1.0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1500)
    main(parser.parse_args().steps)
