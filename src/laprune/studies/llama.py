"""A small Llama: loading, sampling, and its residual stream, read or replaced.

The folder is a Hugging Face checkpoint: `config.json`, `model.safetensors`, and `pieces.json`, the
text of every token.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from .lab import MissingData

START = 1


class Config(NamedTuple):
    width: int
    layers: int
    heads: int
    inner: int
    vocabulary: int
    positions: int
    theta: float = 10_000.0
    eps: float = 1e-5


Weights = dict[str, Tensor]
Cache = list[tuple[Tensor, Tensor]]


class Llama:
    """Tokens (batch, length) to next-token logits, cut in two after any layer.

    >>> model = Llama.random(Config(16, 2, 2, 32, 50, 12))
    >>> tokens = model.sample(3, 12, torch.Generator().manual_seed(0))
    >>> h = model.residual(tokens, layer=1)
    >>> h.shape, model.logits(h, layer=1).shape
    (torch.Size([3, 12, 16]), torch.Size([3, 12, 50]))
    """

    def __init__(self, config: Config, weights: Weights) -> None:
        self.config, self.weights = config, weights
        embedding = weights["model.embed_tokens.weight"]
        half = config.width // config.heads // 2
        rates = config.theta ** (-torch.arange(half, device=embedding.device) / half)
        angles = torch.arange(config.positions, device=embedding.device)[:, None] * rates
        angles = torch.cat([angles, angles], dim=-1)
        self._turn = angles.cos(), angles.sin()

    @classmethod
    def load(cls, folder: Path, device: str) -> Llama:
        path = folder / "model.safetensors"
        if not path.exists():
            raise MissingData(f"no language model in {folder}")
        from safetensors.torch import load_file

        said = json.loads((folder / "config.json").read_text())
        if said["num_key_value_heads"] != said["num_attention_heads"]:
            raise ValueError("grouped-query attention is not supported")
        rope = said.get("rope_parameters") or said
        config = Config(
            said["hidden_size"],
            said["num_hidden_layers"],
            said["num_attention_heads"],
            said["intermediate_size"],
            said["vocab_size"],
            said["max_position_embeddings"],
            rope["rope_theta"],
            said["rms_norm_eps"],
        )
        return cls(config, {k: v.float() for k, v in load_file(path, device=device).items()})

    @classmethod
    def random(cls, config: Config, seed: int = 0, device: str = "cpu") -> Llama:
        """Untrained, for tests."""
        g = torch.Generator().manual_seed(seed)
        width, inner = config.width, config.inner
        shapes = {"model.embed_tokens.weight": (config.vocabulary, width), "model.norm.weight": ()}
        for i in range(config.layers):
            at = f"model.layers.{i}."
            shapes |= {f"{at}self_attn.{x}_proj.weight": (width, width) for x in "qkvo"}
            shapes |= {f"{at}mlp.{x}_proj.weight": (inner, width) for x in ("gate", "up")}
            shapes |= {f"{at}mlp.down_proj.weight": (width, inner)}
            shapes |= {f"{at}{x}_layernorm.weight": () for x in ("input", "post_attention")}
        weights = {
            name: torch.randn(*shape, generator=g) / shape[-1] ** 0.5
            if shape
            else torch.ones(width)
            for name, shape in shapes.items()
        }
        return cls(config, {k: v.to(device) for k, v in weights.items()})

    @torch.no_grad()
    def residual(self, tokens: Tensor, layer: int) -> Tensor:
        """The residual stream after that many layers."""
        h = self.weights["model.embed_tokens.weight"][tokens]
        for i in range(layer):
            h = self._block(h, i)
        return h

    @torch.no_grad()
    def logits(self, residual: Tensor, layer: int) -> Tensor:
        """The rest of the model, from the residual stream after that many layers."""
        for i in range(layer, self.config.layers):
            residual = self._block(residual, i)
        return self._head(residual)

    @torch.no_grad()
    def sample(
        self,
        count: int,
        length: int,
        generator: torch.Generator | None = None,
        greedy: bool = False,
    ) -> Tensor:
        """Texts (count, length) that the model writes from the start token on, at temperature 1."""
        embedding = self.weights["model.embed_tokens.weight"]
        size = self.config.width // self.config.heads
        tokens = torch.full((count, length), START, device=embedding.device)
        shape = (count, self.config.heads, length, size)
        cache = [
            (embedding.new_zeros(shape), embedding.new_zeros(shape))
            for _ in range(self.config.layers)
        ]
        for at in range(length - 1):
            h = embedding[tokens[:, at : at + 1]]
            for i in range(self.config.layers):
                h = self._block(h, i, cache, at)
            logits = self._head(h[:, 0])
            if not greedy:  # the largest of logits plus Gumbel noise is a draw
                noise = torch.empty_like(logits).exponential_(generator=generator)
                logits = logits - noise.log()
            tokens[:, at + 1] = logits.argmax(-1)
        return tokens

    def _head(self, h: Tensor) -> Tensor:
        normed = rms_norm(h, h.shape[-1:], self.weights["model.norm.weight"], self.config.eps)
        head = self.weights.get("lm_head.weight", self.weights["model.embed_tokens.weight"])
        return normed @ head.T

    def _block(self, h: Tensor, i: int, cache: Cache | None = None, at: int = 0) -> Tensor:
        """Layer i on positions from ``at`` on; with a cache, on one position after those in it."""

        def weight(name: str) -> Tensor:
            return self.weights[f"model.layers.{i}.{name}.weight"]

        def norm(x: Tensor, name: str) -> Tensor:
            return rms_norm(x, x.shape[-1:], weight(name), self.config.eps)

        x = norm(h, "input_layernorm")
        q, k, v = (
            (x @ weight(f"self_attn.{name}_proj").T)
            .unflatten(-1, (self.config.heads, -1))
            .transpose(1, 2)
            for name in "qkv"
        )
        q, k = self._turned(q, at), self._turned(k, at)
        if cache is not None:
            keys, values = cache[i]
            keys[:, :, at : at + 1], values[:, :, at : at + 1] = k, v
            k, v = keys[:, :, : at + 1], values[:, :, : at + 1]
        mixed = scaled_dot_product_attention(q, k, v, is_causal=cache is None)
        h = h + mixed.transpose(1, 2).flatten(2) @ weight("self_attn.o_proj").T
        x = norm(h, "post_attention_layernorm")
        inner = silu(x @ weight("mlp.gate_proj").T) * (x @ weight("mlp.up_proj").T)
        return h + inner @ weight("mlp.down_proj").T

    def _turned(self, x: Tensor, at: int) -> Tensor:
        """Rotary positions."""
        cos, sin = (t[at : at + x.shape[-2]] for t in self._turn)
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-second, first], dim=-1) * sin


def text(folder: Path, tokens: list[int]) -> str:
    """What the tokens say."""
    pieces = json.loads((folder / "pieces.json").read_text())
    return "".join(pieces[t] for t in tokens).encode("latin-1").decode("utf-8", "replace")
