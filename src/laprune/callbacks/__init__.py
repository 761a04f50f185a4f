"""Annealing in other people's training loops: callbacks that step a gamma schedule and log masks.

`laprune.callbacks.lightning.GammaCallback` is for Lightning (``pip install 'laprune[lightning]'``)
and `laprune.callbacks.transformers.GammaCallback` for the Transformers trainer (``pip install
'laprune[transformers]'``). Both set the hardness from the trainer's own step count, so a run that
is resumed goes on where it was, and both log, as often as the trainer logs, ``laprune/gamma`` (in
force) and for each :class:`laprune.nn.SoftTopK` the mass and the gamma that its mask really has.
"""

from ._monitor import MaskMonitor

__all__ = ["MaskMonitor"]
