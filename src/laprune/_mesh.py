"""DTensors as the pieces of a row: what lies here, which ranks must talk, whose copy counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

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


def cuts(p: Placement, dim: int | None = None) -> bool:
    """Whether a placement cuts a tensor (along dim); a strided shard, as FSDP2 makes of tensor
    parallelism, does too, but not every torch counts it among the shards."""
    if p.is_replicate() or p.is_partial():
        return False
    return dim is None or p.dim == dim  # type: ignore[attr-defined]


def cut_dims(x: DTensor, dim: int) -> list[int]:
    """The dimensions of the mesh that cut x along dim, in the order of the entries.

    The first is outermost, but a strided shard lies inside as many later cuts as it says.
    """
    order: list[int] = []
    for d in reversed(range(x.device_mesh.ndim)):
        p = x.placements[d]
        if not cuts(p, dim):
            continue
        around, place = getattr(p, "split_factor", 1), 0
        while around > 1 and place < len(order):
            around /= x.device_mesh.size(order[place])
            place += 1
        if around != 1:
            raise ValueError(f"the entries lie in no order of the ranks: {x.placements}")
        order.insert(place, d)
    return order


def without(p: Placement, dim: int) -> Placement:
    """How rows are placed whose entries along dim are placed so."""
    from torch.distributed.tensor import Replicate, Shard

    if not cuts(p) or cuts(p, dim):
        return Replicate()
    own: int = p.dim  # type: ignore[attr-defined]
    own -= own > dim
    if hasattr(p, "split_factor"):
        return type(p)(own, split_factor=p.split_factor)  # type: ignore[call-arg]
    return Shard(own)


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


def full(x: Tensor) -> Tensor:
    """All of a tensor, differentiable."""
    return x.full_tensor() if is_dtensor(x) else x  # type: ignore[attr-defined]


def part(x: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    """The part of a tensor, the same on all ranks, that belongs here; differentiable."""
    from torch.distributed.tensor import DTensor, Replicate

    everywhere = [Replicate()] * mesh.ndim
    spread = DTensor.from_local(x.contiguous(), mesh, everywhere, run_check=False)
    return spread.redistribute(placements=placements).to_local()


def layout(tensors: Sequence[Tensor]) -> Layout:
    """Which ranks must talk to see all entries of these tensors once."""
    mesh = _largest(tensors)
    if mesh is None:
        return Layout("", (0,) * len(tensors))
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


def everyone(tensors: Sequence[Tensor]) -> str:
    """The names of the groups of all ranks that have a part or a copy of these tensors."""
    mesh = _largest(tensors)
    return "" if mesh is None else names(mesh, range(mesh.ndim))


def _largest(tensors: Sequence[Tensor]) -> DeviceMesh | None:
    meshes = [x.device_mesh for x in tensors if is_dtensor(x)]  # type: ignore[attr-defined]
    return max(meshes, key=lambda m: m.ndim, default=None)


def names(mesh: DeviceMesh, dims: Sequence[int]) -> str:
    return ",".join(mesh.get_group(d).group_name for d in dims)


def _sharded(x: Tensor, mesh: DeviceMesh) -> set[int]:
    """The dimensions of the mesh along which x is cut."""
    if not is_dtensor(x):
        return set()
    own = x.device_mesh  # type: ignore[attr-defined]
    cut = [d for d, p in enumerate(x.placements) if cuts(p)]  # type: ignore[attr-defined]
    if own == mesh:
        return set(cut)
    all_names, own_names = mesh.mesh_dim_names or (), own.mesh_dim_names or ()
    if not own_names or not set(own_names) <= set(all_names):
        raise ValueError(f"tensors on different meshes: {mesh} and {own}")
    return {all_names.index(own_names[d]) for d in cut}
