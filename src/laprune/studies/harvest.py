"""Activations of image networks: CIFAR-100 through a frozen ImageNet backbone, up to its avgpool.

The data folder holds `cifar100/` (lossless WebP sheets of 1,000 images, 25 rows of 40, and
`labels.npz`) and, for MobileNetV2, torchvision's own weights in `mobilenet_v2/`. What is not there
torchvision downloads: the images into that folder, and for a backbone ResNet-18, the paper's.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from .lab import MissingData, Options

SIZE = 224
MEAN, SD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's, as torchvision uses them
BATCH = 500


class Activations(NamedTuple):
    """Samples and their classes; standardised by the training samples."""

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor

    @property
    def classes(self) -> int:
        return int(self.train_labels.max()) + 1


def backbone(options: Options) -> str:
    """The network whose activations are studied."""
    if options.quick:
        return "synthetic"
    return "mobilenet_v2" if _weights(options.data) else "resnet18"


def activations(options: Options) -> Activations:
    """Harvest, or read what was harvested before, and standardise, on the wanted device."""
    if options.quick:
        return standardised(synthetic(), options.device)
    name = backbone(options)
    path = None if options.cache is None else options.cache / f"cifar100_{name}.safetensors"
    if path is not None and path.exists():
        from safetensors.torch import load_file

        return standardised(Activations(**load_file(path)), options.device)
    harvested = harvest(options)
    if path is not None:
        from safetensors.torch import save_file

        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(harvested._asdict(), path)
    return standardised(harvested, options.device)


def standardised(raw: Activations, device: str) -> Activations:
    """Every component with mean 0 and standard deviation 1 over the training samples."""
    train, test = raw.train.to(device), raw.test.to(device)
    mean, sd = train.mean(0), train.std(0)
    sd = torch.where(sd > 0, sd, 1)
    return Activations(
        (train - mean) / sd,
        raw.train_labels.to(device),
        (test - mean) / sd,
        raw.test_labels.to(device),
    )


def synthetic(n: int = 400, d: int = 24, classes: int = 5, seed: int = 10**6) -> Activations:
    """Samples that are sums of a few of 48 directions, some more likely in one class than another.

    >>> synthetic().train.shape
    torch.Size([400, 24])
    """
    g = torch.Generator().manual_seed(seed)
    directions = torch.randn(48, d, generator=g)
    likely = torch.rand(classes, 48, generator=g)
    labels = torch.randint(classes, (n + n // 2,), generator=g)
    chosen = torch.rand(len(labels), 48, generator=g) < 0.2 * likely[labels]
    strength = torch.rand(chosen.shape, generator=g)
    x = (chosen * strength) @ directions + 0.05 * torch.randn(len(labels), d, generator=g)
    return Activations(x[:n], labels[:n], x[n:], labels[n:])


def harvest(options: Options) -> Activations:
    """All images through the backbone."""
    splits = [cifar100(options.data, split) for split in ("train", "test")]
    name = backbone(options)
    network = (_mobilenet(options) if name == "mobilenet_v2" else _resnet()).to(options.device)
    parts: list[Tensor] = []
    for images, labels in splits:
        parts += [features(network, images, options.device), torch.from_numpy(labels)]
    return Activations(*parts)


@torch.no_grad()
def features(network: nn.Module, images: NDArray[np.uint8], device: str) -> Tensor:
    """(n, 32, 32, 3) images to (n, d) activations, on the host."""
    network.eval()
    mean, sd = (torch.tensor(x, device=device).view(3, 1, 1) for x in (MEAN, SD))
    found = []
    for start in range(0, len(images), BATCH):
        x = torch.from_numpy(images[start : start + BATCH]).to(device).permute(0, 3, 1, 2).float()
        x = nn.functional.interpolate(x / 255, size=SIZE, mode="bilinear", antialias=True)
        found.append(network((x - mean) / sd).cpu())
    return torch.cat(found)


def cifar100(data: Path | None, split: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Images (n, 32, 32, 3) and fine labels."""
    if data is None:
        raise MissingData("give the folder that holds cifar100/, or is to hold it, with --data")
    folder = data / "cifar100"
    sheets = sorted(folder.glob(f"{split}-*.webp"))
    if not sheets:
        return _downloaded(data, split)
    from PIL import Image

    images = np.concatenate(
        [
            np.asarray(Image.open(sheet).convert("RGB"))
            .reshape(25, 32, 40, 32, 3)
            .transpose(0, 2, 1, 3, 4)
            .reshape(1000, 32, 32, 3)
            for sheet in sheets
        ]
    )
    labels = np.load(folder / "labels.npz")[split].astype(np.int64)
    if len(labels) != len(images):
        raise MissingData(f"{folder} holds {len(images)} of {len(labels)} {split} images")
    return images, labels


def _downloaded(data: Path, split: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    try:
        from torchvision.datasets import CIFAR100
    except ModuleNotFoundError:
        raise MissingData(
            f"no cifar100/{split}-*.webp in {data}; torchvision, if installed, would download"
        ) from None
    found = CIFAR100(data, train=split == "train", download=True)
    return found.data, np.array(found.targets)


def _weights(data: Path | None) -> Path | None:
    found = [] if data is None else sorted((data / "mobilenet_v2").glob("*.pth"))
    return found[0] if found else None


def _mobilenet(options: Options) -> nn.Module:
    path = _weights(options.data)
    if path is None:
        raise MissingData(f"no mobilenet_v2/*.pth in {options.data}")
    network = MobileNetV2()
    network.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    return network


def _resnet() -> nn.Module:
    try:
        from torchvision.models import ResNet18_Weights, resnet18
    except ModuleNotFoundError:
        raise MissingData(
            "give a folder with mobilenet_v2/*.pth by --data, or install torchvision for ResNet-18"
        ) from None
    network = resnet18(weights=ResNet18_Weights.IMAGENET1K_V1)
    network.fc = nn.Identity()
    return network


class MobileNetV2(nn.Module):
    """MobileNetV2 up to its avgpool, with torchvision's names, so that its weights fit.

    >>> MobileNetV2().eval()(torch.zeros(1, 3, 32, 32)).shape
    torch.Size([1, 1280])
    """

    STAGES = (  # expansion, channels, blocks, first stride
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    )

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(_unit(3, 32, 3, 2), *self._blocks(), _unit(320, 1280, 1))
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, 1000))

    def _blocks(self) -> Iterator[nn.Module]:
        wide = 32
        for expansion, channels, blocks, first in self.STAGES:
            for i in range(blocks):
                yield _Residual(wide, channels, first if i == 0 else 1, expansion)
                wide = channels

    def forward(self, x: Tensor) -> Tensor:
        return self.features(x).mean((2, 3))


class _Residual(nn.Module):
    def __init__(self, wide: int, channels: int, stride: int, expansion: int) -> None:
        super().__init__()
        inner = wide * expansion
        expand = [] if expansion == 1 else [_unit(wide, inner, 1)]
        self.skips = stride == 1 and wide == channels
        self.conv = nn.Sequential(
            *expand,
            _unit(inner, inner, 3, stride, groups=inner),
            nn.Conv2d(inner, channels, 1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x) if self.skips else self.conv(x)


def _unit(wide: int, channels: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(wide, channels, kernel, stride, (kernel - 1) // 2, groups=groups, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU6(),
    )
