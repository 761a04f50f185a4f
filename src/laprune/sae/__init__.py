"""Sparse autoencoders with a top-k whose hardness is a knob.

>>> import torch
>>> from laprune.sae import SparseAutoencoder, Trainer, evaluate
>>> x = torch.randn(256, 16)
>>> sae = SparseAutoencoder(d=16, m=64, k=4)
>>> history = Trainer(sae, epochs=2, batch_size=64).fit(x, progress=False)
>>> evaluate(sae, x).l0.item()
4.0

Adapters for other libraries are modules of their own: :mod:`laprune.sae.sae_lens` and
:mod:`laprune.sae.dictionary_learning`.
"""

from .activations import BatchTopKActivation, JumpReLU, TopKActivation
from .autoencoder import Output, SparseAutoencoder, SparseCodes
from .auxiliary import AuxK
from .metrics import Metrics, evaluate, fvu
from .trainer import Epoch, Trainer

__all__ = [
    "AuxK",
    "BatchTopKActivation",
    "Epoch",
    "JumpReLU",
    "Metrics",
    "Output",
    "SparseAutoencoder",
    "SparseCodes",
    "TopKActivation",
    "Trainer",
    "evaluate",
    "fvu",
]
