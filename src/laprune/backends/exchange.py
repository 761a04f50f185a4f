"""What ranks tell each other while they solve rows together.

Everything goes through sums: one all-reduce adds the sums of a pass, in a time that grows with the
logarithm of the number of ranks, where a gather around a ring would grow with their number. What
must be seen rank by rank travels the same way: every rank has a slot for its own values, zero
elsewhere, and adding zeros changes nothing. All ranks see the same numbers, so all take the same
steps, as the replicas of data-parallel training do.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor


class Exchange:
    """The ranks of some process groups, row by row through the last one; alone without groups.

    Several groups are the dimensions of a mesh: values go through one after the other.
    """

    def __init__(self, names: str = "") -> None:
        self.groups = [_resolve(name) for name in names.split(",") if name]
        self.size, self.rank = 1, 0
        for group in self.groups:
            own = dist.get_rank(group)
            self.size, self.rank = self.size * group.size(), self.rank * group.size() + own
        self.collectives = 0

    def gather(self, x: Tensor) -> Tensor:
        """``x`` of every rank, along a new first dimension; all must have one shape."""
        y = x[None]
        for group in reversed(self.groups):
            slots = y.new_zeros(group.size(), *y.shape)
            slots[dist.get_rank(group)] = y
            self._call(slots, group)
            y = slots.flatten(0, 1)
        return y

    def add(self, x: Tensor) -> Tensor:
        """The sum of ``x`` over the ranks."""
        x = x.clone() if self.groups else x
        for group in self.groups:
            self._call(x, group)
        return x

    def combine(self, sums: Tensor, smallest: Tensor) -> tuple[Tensor, Tensor]:
        """The sums over the ranks, and the least of ``smallest``, both (rows, ...)."""
        for group in self.groups:
            size, own = group.size(), dist.get_rank(group)
            slots = sums.new_zeros(len(sums), size, smallest.shape[1])
            slots[:, own] = smallest
            both = torch.cat([sums, slots.flatten(1)], 1)
            self._call(both, group)
            sums = both[:, : sums.shape[1]]
            smallest = both[:, sums.shape[1] :].reshape(slots.shape).amin(1)
        return sums, smallest

    def agree(
        self,
        header: dict[str, float],
        prints: dict[str, float],
        own: list[float],
        device: torch.device,
    ) -> list[list[float]]:
        """Refuse, on every rank, what is not the same on all; return ``own`` of every rank.

        ``prints`` are compared as the header is, but say nothing to a reader.
        """
        if not self.groups:
            return [own]
        values = [*header.values(), *prints.values(), *own]
        seen = self.gather(torch.tensor(values, dtype=torch.float64, device=device)).tolist()
        for column, name in enumerate((*header, *prints)):
            first, mine = seen[0][column], values[column]
            for rank, row in enumerate(seen):
                if row[column] == first or (math.isnan(row[column]) and math.isnan(first)):
                    continue
                text = f": {first:g} on rank 0, {row[column]:g} on rank {rank} (here: {mine:g})"
                between = f": rank 0 and rank {rank} have different ones"
                raise ValueError(
                    f"the ranks disagree on {name}{text if name in header else between}"
                )
        return [row[len(header) + len(prints) :] for row in seen]

    def _call(self, x: Tensor, group: dist.ProcessGroup) -> None:
        self.collectives += 1
        try:
            dist.all_reduce(x, group=group)
        except RuntimeError as error:
            raise RuntimeError(
                f"a rank of {self.size} did not answer in collective {self.collectives}; "
                f"it may have died or raised an error of its own: {error}"
            ) from error


def _resolve(name: str) -> dist.ProcessGroup:
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined,arg-type]
