"""DTensors as the pieces of a row: what lies here, which ranks must talk, whose copy counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement


def is_dtensor(x: object) -> bool:
    """Whether x is a DTensor, without importing what that takes."""
    return hasattr(x, "device_mesh") and hasattr(x, "placements")


class Layout(NamedTuple):
    """How pieces lie on a mesh."""

    groups: str
    """The names of the process groups that must talk, outermost first."""
    owners: tuple[int, ...]
    """For each piece the rank, among those groups, whose copy counts."""


def whole(x: DTensor) -> DTensor:
    """The same tensor without pending sums."""
    from torch.distributed.tensor import Replicate

    if not any(p.is_partial() for p in x.placements):
        return x
    return x.redistribute(placements=[Replicate() if p.is_partial() else p for p in x.placements])


def local(x: Tensor) -> Tensor:
    """What lies here, differentiable."""
    return x.to_local() if is_dtensor(x) else x  # type: ignore[attr-defined]


def like(out: Tensor, x: Tensor) -> Tensor:
    """What lies here, as a tensor laid out as x."""
    if not is_dtensor(x):
        return out
    from torch.distributed.tensor import DTensor

    assert isinstance(x, DTensor)
    return DTensor.from_local(
        out, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride()
    )


def part(
    x: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]
) -> Tensor:
    """The part of a tensor, the same on all ranks, that belongs here; differentiable."""
    from torch.distributed.tensor import DTensor, Replicate

    if is_dtensor(x):
        x = x.full_tensor()  # type: ignore[attr-defined]
    everywhere = [Replicate()] * mesh.ndim
    spread = DTensor.from_local(
        x.expand(torch.Size(shape)).contiguous(), mesh, everywhere, run_check=False
    )
    return spread.redistribute(placements=placements).to_local()


def layout(tensors: Sequence[Tensor]) -> Layout:
    """Which ranks must talk to see all entries of these tensors once."""
    meshes = [x.device_mesh for x in tensors if is_dtensor(x)]  # type: ignore[attr-defined]
    if not meshes:
        return Layout("", (0,) * len(tensors))
    mesh = max(meshes, key=lambda m: m.ndim)
    shards = [_sharded(x, mesh) for x in tensors]
    dims = sorted(set().union(*shards))
    sizes, here = [mesh.size(d) for d in dims], [mesh.get_local_rank(d) for d in dims]
    owners = []
    for sharded in shards:
        owner = 0
        for d, size, at in zip(dims, sizes, here, strict=True):
            owner = owner * size + (at if d in sharded else 0)
        owners.append(owner)
    return Layout(names(mesh, dims), tuple(owners))


def names(mesh: DeviceMesh, dims: Sequence[int]) -> str:
    return ",".join(mesh.get_group(d).group_name for d in dims)


def _sharded(x: Tensor, mesh: DeviceMesh) -> set[int]:
    """The dimensions of the mesh along which x is cut."""
    if not is_dtensor(x):
        return set()
    own = x.device_mesh  # type: ignore[attr-defined]
    cut = [d for d, p in enumerate(x.placements) if p.is_shard()]  # type: ignore[attr-defined]
    if own == mesh:
        return set(cut)
    all_names, own_names = mesh.mesh_dim_names or (), own.mesh_dim_names or ()
    if not own_names or not set(own_names) <= set(all_names):
        raise ValueError(f"tensors on different meshes: {mesh} and {own}")
    return {all_names.index(own_names[d]) for d in cut}
