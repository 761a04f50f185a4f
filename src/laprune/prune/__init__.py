"""Pruning a model to one budget over all its parameters.

>>> import torch
>>> from laprune.schedules import linear
>>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
>>> pruner = GlobalPruner(model, density=linear(1.0, 0.25, steps=10), gamma=linear(0.5, 0.99, 10))
>>> optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
>>> for _ in range(10):
...     loss = model(torch.ones(2, 8)).square().sum()
...     loss.backward()
...     optimiser.step()
...     pruner.step()
>>> pruner.finalize()
>>> sum(int((p != 0).sum()) for p in model.parameters() if p.dim() > 1)  # a quarter of 192
48
"""

from .pruner import GlobalPruner, LayerReport, Report

__all__ = ["GlobalPruner", "LayerReport", "Report"]
