"""LaPrune in SAELens: a training class for its registry, saved as a stock TopK SAE.

Importing this module makes the architecture ``"laprune_topk"`` known to SAELens
(``pip install 'laprune[sae-lens]'``). Hand its runner a :class:`LaPruneTrainingSAEConfig`, or:

>>> import torch
>>> sae = LaPruneTrainingSAE(LaPruneTrainingSAEConfig(d_in=8, d_sae=32, k=4, gamma=0.9))
>>> (sae.encode(torch.randn(5, 8)) != 0).sum(-1).max().item()
4
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from sae_lens import (
    SAE,
    JumpReLUSAE,
    JumpReLUSAEConfig,
    TopKSAE,
    TopKSAEConfig,
    TopKTrainingSAE,
    TopKTrainingSAEConfig,
)
from sae_lens.registry import SAE_TRAINING_CLASS_REGISTRY, register_sae_training_class
from sae_lens.saes.sae import (
    SAEConfig,
    TrainCoefficientConfig,
    TrainStepInput,
    TrainStepOutput,
)
from torch import Tensor

from .activations import BatchTopKActivation, Mode, TopKActivation
from .autoencoder import SparseAutoencoder

ARCHITECTURE = "laprune_topk"


@dataclass
class LaPruneTrainingSAEConfig(TopKTrainingSAEConfig):
    """A TopK SAE trained through a mask of hardness gamma.

    ``gamma_warm_up_steps`` lets SAELens raise gamma linearly from 0 over that many steps; ``mode``
    is as in :class:`laprune.sae.TopKActivation`. The other fields are those of a TopK SAE.
    """

    gamma: float = 0.9
    gamma_warm_up_steps: int = 0
    mode: Mode = "soft"

    @classmethod
    def architecture(cls) -> str:
        return ARCHITECTURE

    def get_inference_config_class(self) -> type[SAEConfig]:
        return TopKSAEConfig


class LaPruneTrainingSAE(TopKTrainingSAE):
    """SAELens's TopK SAE with our activation: soft in training steps, hard whenever it encodes."""

    cfg: LaPruneTrainingSAEConfig
    activation_fn: TopKActivation

    def get_activation_fn(self) -> TopKActivation:
        return TopKActivation(self.cfg.k, self.cfg.gamma, self.cfg.mode, postact="relu")

    def get_coefficients(self) -> dict[str, float | TrainCoefficientConfig]:
        gamma = TrainCoefficientConfig(self.cfg.gamma, self.cfg.gamma_warm_up_steps)
        return {**super().get_coefficients(), "gamma": gamma}

    def training_forward_pass(self, step_input: TrainStepInput) -> TrainStepOutput:
        self.activation_fn.set_gamma(step_input.coefficients["gamma"])
        output = super().training_forward_pass(step_input)
        if self.cfg.mode != "soft":
            return output
        # The trainer counts non-zeros, for L0 and for dead latents: give it what is deployed.
        return replace(output, feature_acts=self.activation_fn.deploy(output.hidden_pre.detach()))

    def encode(self, x: Tensor) -> Tensor:
        self.activation_fn.eval()
        try:
            return super().encode(x)
        finally:
            self.activation_fn.train()

    def process_state_dict_for_saving_inference(self, state_dict: dict[str, Any]) -> None:
        super().process_state_dict_for_saving_inference(state_dict)
        del state_dict["activation_fn.gamma"]


def to_sae_lens(sae: SparseAutoencoder) -> SAE[Any]:
    """An autoencoder of ours as a stock SAELens one: TopK, or JumpReLU for batch top-k.

    SAELens rectifies what it selects, so ours must have been trained with ``postact="relu"``.
    """
    activation = sae.activation
    if not isinstance(activation, TopKActivation) or activation.postact != "relu":
        raise ValueError("SAELens needs a top-k activation with postact='relu'")
    size = {"d_in": sae.d, "d_sae": sae.m, "device": str(sae.decoder.device)}
    weights = {
        "W_enc": sae.encoder.mT,
        "b_enc": sae.encoder_bias,
        "W_dec": sae.decoder,
        "b_dec": sae.pre_bias,
    }
    stock: SAE[Any]
    if isinstance(activation, BatchTopKActivation):
        stock = JumpReLUSAE(JumpReLUSAEConfig(**size))
        weights["threshold"] = activation.threshold.expand(sae.m)
    elif activation.k == int(activation.k):
        stock = TopKSAE(TopKSAEConfig(**size, k=int(activation.k)))
    else:
        raise ValueError(f"SAELens needs a whole k, got {activation.k}")
    stock.load_state_dict({name: w.detach().contiguous() for name, w in weights.items()})
    return stock


if ARCHITECTURE not in SAE_TRAINING_CLASS_REGISTRY:
    register_sae_training_class(ARCHITECTURE, LaPruneTrainingSAE, LaPruneTrainingSAEConfig)

__all__ = ["LaPruneTrainingSAE", "LaPruneTrainingSAEConfig", "to_sae_lens"]
