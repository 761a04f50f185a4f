"""Rows whose scores lie in several tensors, on one rank or many.

Both constraints are sums, so a pass reads every piece where it lies, the sums of all pieces and
ranks are added, and every rank takes the same step of the same iteration. Nothing else moves, but
for a sample of the scores to start from.

A backend may offer any of the functions that touch scores under the names used here (``look``,
``sums``, ``start``, ``iterate``, ``digits``, ``write``, ``moments``, ``pull``); those it does not
offer are taken from this file, in plain torch. All take a list of pieces (rows, n_i) of one dtype,
none of them empty.

A backend that solves a row in one launch and reads no pieces (``cuda``) gets those of a single rank
put together: one more copy of the scores costs less there than asking the host after every pass.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import pick, reference
from ._contract import MEAN_P, MEAN_Z, OFFSET, PIVOT, TEMPERATURE, Status
from .exchange import Exchange
from .reference import (
    LONG,
    MIN_SAMPLE,
    SAMPLE_RATIO,
    TOLERANCE,
    _classify,
    _counting_start,
    _iterate,
    _mask,
    _Point,
    _start_from,
    _Sums,
    _sums,
    _work_dtype,
    _z_and_q,
)

SAMPLE_CAP = 1 << 18  # numbers in all samples together, beyond MIN_SAMPLE a row
ADDED = 9  # of the sums of a pass; then the largest score below, the smallest above, and the gap
DIGIT = 8

Read = Callable[[Tensor, bool], Tensor]


class _Found(NamedTuple):
    """Where the iteration of each row ended."""

    point: Tensor
    """(rows, 3): pivot, offset, temperature."""
    means: Tensor
    """(rows, 2): the q-weighted means of z and p."""
    status: Tensor
    passes: Tensor
    written: bool
    """Whether the last pass left the masks of all rows."""


def look(pieces: Sequence[Tensor], like: Tensor) -> Tensor:
    """(rows, 5): eligible, NaN or +inf, least, largest, sum; a row for each number in ``like``."""
    total = torch.stack([torch.zeros_like(like)] * 2 + [torch.full_like(like, math.inf)], -1)
    total = torch.cat([total, -total[:, 2:], total[:, :1]], -1)
    for piece in pieces:
        r = piece.to(like.dtype)
        ok = r > -math.inf
        add = [ok.sum(-1), (~(r < math.inf)).sum(-1), torch.where(ok, r, 0.0).sum(-1)]
        total[:, [0, 1, 4]] += torch.stack([x.to(like.dtype) for x in add], -1)
        total[:, 2] = torch.minimum(total[:, 2], torch.where(ok, r, math.inf).amin(-1))
        total[:, 3] = torch.maximum(total[:, 3], r.amax(-1))
    return total


def sums(pieces: Sequence[Tensor], points: Tensor, out: Sequence[Tensor] | None = None) -> Tensor:
    """The 12 sums of a pass at (pivot, b, t, a), each (rows, 4); may leave the mask in ``out``."""
    total = _none(points)
    for piece in pieces:
        pivot, b, t, a = points.unbind(-1)
        s = torch.stack(_sums(piece.to(points.dtype), pivot, b, t, a), -1)
        total = _combine(total, s)
    if out is not None:
        for piece, p in zip(pieces, out, strict=True):
            state = torch.nn.functional.pad(points[:, :3], (0, 2))
            status = torch.full_like(points[:, 0], Status.CONVERGED)
            p.copy_(_mask(piece.to(points.dtype), state, status))
    return total


def _none(points: Tensor) -> Tensor:
    """The sums of no scores."""
    total = points.new_zeros(len(points), len(_Sums._fields))
    total[:, ADDED:] = points.new_tensor([-math.inf, math.inf, math.inf])
    return total


def _combine(x: Tensor, y: Tensor) -> Tensor:
    least = torch.minimum(_flip(x[:, ADDED:]), _flip(y[:, ADDED:]))
    return torch.cat([x[:, :ADDED] + y[:, :ADDED], _flip(least)], -1)


def _flip(extremes: Tensor) -> Tensor:
    """The largest score below as the least of its negative, and back."""
    return torch.cat([-extremes[:, :1], extremes[:, 1:]], -1)


def start(sample: Tensor, part: Tensor, target: Tensor, fixed: bool) -> tuple[Tensor, Tensor]:
    """(pivot, b, log t) of a sample with ``part`` of the budget, and whether it says anything."""
    at, ok = _start_from(sample.to(part.dtype), part, target, fixed)
    return torch.stack([at.pivot, at.b, at.tau], -1), ok


def iterate(
    read: Read,
    n: Tensor,
    k: Tensor,
    target: Tensor,
    begin: Tensor,
    fixed: bool,
    tol: tuple[float, float],
    dtype: torch.dtype,
) -> _Found:
    """Step until every row is solved; ``read(points, write)`` gives the sums over everything."""

    def sums_at(at: _Point) -> _Sums:
        points = torch.stack([at.pivot, at.b, at.tau.exp(), k / n], -1)
        return _Sums(*read(points, False).unbind(-1))

    at, status, passes, mean_z, mean_p = _iterate(
        sums_at, n, k, target, _Point.start(*begin.unbind(-1)), fixed, tol
    )
    point = torch.stack([at.pivot, at.b, at.tau.exp()], -1)
    return _Found(point, torch.stack([mean_z, mean_p], -1), status, passes, False)


def digits(pieces: Sequence[Tensor], prefix: Tensor, shift: int) -> Tensor:
    """How often each digit at ``shift`` follows ``prefix`` among the scores' keys: (rows, 256)."""
    counts = torch.zeros(len(prefix), 1 << DIGIT, dtype=torch.int64, device=prefix.device)
    for piece in pieces:
        key = _key(piece)
        first = shift + DIGIT == 8 * piece.element_size()
        same = first | ((key >> (shift + DIGIT)) == (prefix >> (shift + DIGIT))[:, None])
        counts.scatter_add_(1, (key >> shift) & ((1 << DIGIT) - 1), same.to(torch.int64))
    return counts


def _key(r: Tensor) -> Tensor:
    """Integers in the order of the scores, from the highest bit on."""
    r = r + 0.0  # -0 counts as 0
    if r.dtype == torch.float64:
        u = r.view(torch.int64)
        return torch.where(u < 0, ~u, u ^ torch.iinfo(torch.int64).min)
    u = r.view(torch.int32).to(torch.int64)
    return torch.where(u < 0, ~u, u + (1 << 31))


def _unkey(key: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype == torch.float64:
        u = torch.where(key < 0, key ^ torch.iinfo(torch.int64).min, ~key)
        return u.view(dtype)
    u = torch.where(key >= 1 << 31, key - (1 << 31), ~key)
    return u.to(torch.int32).view(dtype)


def write(pieces: Sequence[Tensor], state: Tensor, status: Tensor, share: Tensor) -> list[Tensor]:
    """The masks; ``share`` (rows, pieces) is what is left for ties of a hard row in each piece."""
    masks = []
    for i, piece in enumerate(pieces):
        here = state.clone()
        here[:, OFFSET] = torch.where(status == Status.HARD, share[:, i], state[:, OFFSET])
        masks.append(_mask(piece.to(state.dtype), here, status).to(piece.dtype))
    return masks


def moments(
    pieces: Sequence[Tensor], grads: Sequence[Tensor], state: Tensor, status: Tensor
) -> Tensor:
    """What the gradient needs, (rows, 8), z and p centred on the means of the state.

    count, sum q, q z, q p, q z p, q g, q z g, and the sum of g over the eligible scores.
    """
    total = state.new_zeros(len(state), 8)
    for piece, grad in zip(pieces, grads, strict=True):
        r, ok = piece.to(state.dtype), piece > -math.inf
        g = torch.where(ok, grad.to(state.dtype), 0.0)
        z, q, p = _active(r, state, status)
        y, v = z - state[:, [MEAN_Z]], p - state[:, [MEAN_P]]
        columns = (ok.to(q.dtype), q, q * y, q * v, q * y * v, q * g, q * y * g, g)
        total += torch.stack([torch.where(ok, x, 0.0).sum(-1) for x in columns], -1)
    return total


def pull(
    pieces: Sequence[Tensor], grads: Sequence[Tensor], state: Tensor, status: Tensor, slopes: Tensor
) -> list[Tensor]:
    """dr = (q/t)(g - c0 - c1 p) with the slopes (c0, c1) of each row."""
    regular = ((status == Status.CONVERGED) | (status == Status.STALLED))[:, None]
    broken = (status == Status.NONFINITE)[:, None]
    c0, c1, t = slopes[:, [0]], slopes[:, [1]], state[:, [TEMPERATURE]]
    out = []
    for piece, grad in zip(pieces, grads, strict=True):
        _, q, p = _active(piece.to(state.dtype), state, status)
        d = torch.where(q > 0, q / t * (grad.to(state.dtype) - c0 - c1 * p), 0.0)
        d = torch.where(regular, d, torch.where(broken, math.nan, 0.0))
        out.append(d.to(piece.dtype))
    return out


def _active(r: Tensor, state: Tensor, status: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """z, q and p; q = 0 in rows without a temperature."""
    smooth = _soft(status)
    pivot, b = (torch.where(smooth, state[:, i], 0.0) for i in (PIVOT, OFFSET))
    t = torch.where(smooth, state[:, TEMPERATURE], 1.0)
    z, q = _z_and_q(r, pivot, b, t)
    q = torch.where(smooth[:, None], q, 0.0)
    return z, q, torch.where(z > 0, 1 - q, q)


def _soft(status: Tensor) -> Tensor:
    return (status == Status.CONVERGED) | (status == Status.TIED) | (status == Status.STALLED)


def _plain(x: Tensor, dtype: torch.dtype) -> Tensor:
    """As the loops read it; there may be many, so nothing is called that would change nothing."""
    return x if x.dtype == dtype and x.is_contiguous() else x.detach().to(dtype).contiguous()


class _Job:
    """The pieces of one call: those read here, and how to reach the rest."""

    def __init__(
        self, pieces: Sequence[Tensor], owners: Sequence[int], exchange: Exchange, double: bool
    ) -> None:
        self.dtype = torch.float64 if double else torch.float32
        self.device = pieces[0].device
        self.work = _work_dtype(self.device)
        self.rows = len(pieces[0])
        self.exchange = exchange
        self.owners = owners
        self.pieces = [_plain(x, self.dtype) for x in pieces]
        self.filled = [i for i, x in enumerate(pieces) if x.numel()]
        own = [i for i in self.filled if owners[i] == exchange.rank]
        self.read = [self.pieces[i] for i in own]
        self.own = own
        self.backend = pick(self.pieces[0])

    def call(self, name: str, *args: Any) -> Any:
        """The backend's function of that name, or the one in this file."""
        return getattr(self.backend, name, globals()[name])(*args)

    @property
    def tol(self) -> tuple[float, float]:
        return TOLERANCE[self.dtype if hasattr(self.backend, "sums") else self.work]

    def pass_(self, rows: Tensor | None, masks: list[Tensor] | None) -> Read:
        """A pass over these rows (all if None), summed over pieces and ranks."""
        pieces = self.read if rows is None else [x[rows] for x in self.read]
        out = None if masks is None else [masks[i] for i in self.own]

        def read(points: Tensor, wanted: bool) -> Tensor:
            here = _none(points)
            if pieces:
                here = self.call("sums", pieces, points, out if wanted else None)
            if not self.exchange.groups:
                return here
            added, least = self.exchange.combine(here[:, :ADDED], _flip(here[:, ADDED:]))
            return torch.cat([added, _flip(least)], -1)

        return read

    def look(self, like: Tensor) -> Tensor:
        return self.call("look", self.read, like) if self.read else look([], like)

    def count(self, cut: Tensor) -> Tensor:
        """How many scores are above a cut, row by row; one collective."""
        here = torch.zeros_like(cut)
        for piece in self.read:
            here += (piece > cut.to(self.dtype)[:, None]).sum(-1)
        return self.exchange.add(here)

    def sample(self, offset: int, length: int, size: int, total: int) -> Tensor:
        """This rank's part of ``size`` scores evenly spread over ``total``."""
        if length == 0:
            return self.pieces[0].new_empty(self.rows, 0)
        starts = list(itertools.accumulate((x.shape[1] for x in self.read), initial=offset))
        ends = [-(-at * size // total) for at in starts]
        counts = [y - x for x, y in itertools.pairwise(ends)]
        # All indices at once: there may be many pieces.
        index = torch.arange(ends[0], ends[-1], device=self.device) * total // size
        places = zip(self.read, index.split(counts), starts, strict=False)
        return torch.cat([piece.index_select(1, here - at) for piece, here, at in places], 1)


def solve(
    pieces: Sequence[Tensor],
    k: Tensor,
    hardness: Tensor,
    fixed: bool,
    exchange: Exchange,
    owners: Sequence[int],
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Masks of the pieces, the state of the rows, and (status, passes, collectives) of each.

    ``owners[i]`` is the rank whose copy of piece i counts: this one's, or another's where a piece
    is there more than once.
    """
    if (backend := _in_one_launch(pieces, exchange)) is not None:
        mask, state, info = backend.solve(_row(pieces), k, hardness, None, False, fixed)
        cost = torch.zeros_like(info[:, :1])
        return _cut(mask, pieces), state, torch.cat([info, cost], -1)
    length = sum(x.shape[1] for x, o in zip(pieces, owners, strict=True) if o == exchange.rank)
    lengths, double = _agree(pieces, k, hardness, fixed, exchange, length)
    job, total = _Job(pieces, owners, exchange, double), sum(lengths)
    if total == 0:
        raise ValueError("there are no entries to select from, on any rank")
    _check(total, k, hardness, fixed, bool(exchange.groups))
    k, hardness = k.detach().to(job.work), hardness.detach().to(job.work)
    stats, sample = _gather_start(job, lengths, k)
    n, bad, low, high = stats[:, 0], stats[:, 1] > 0, stats[:, 2], stats[:, 3]
    status = _classify(low, high, bad, n, k, hardness, fixed)
    zero = torch.zeros_like(k)
    state = torch.stack(
        [zero, zero, zero + math.inf, zero, torch.where(status == Status.INFEASIBLE, 1.0, k / n)],
        -1,
    )
    state[status == Status.NONFINITE] = math.nan
    passes, share = torch.ones_like(status), zero[:, None].expand(-1, len(pieces))
    masks: list[Tensor] | None = None

    hard, open_ = status == Status.HARD, status == Status.STALLED
    if hard.any():
        threshold, left, share = _threshold(job, k, hard)
        nothing = torch.zeros_like(threshold)
        found = torch.stack([threshold, left, nothing, nothing, nothing], -1)
        state = torch.where(hard[:, None], found, state)
    if open_.any():
        every = bool(open_.all())
        out = [torch.empty_like(x) for x in job.pieces] if every else None
        rows = slice(None) if every else open_
        n_, k_, h = n[rows], k[rows], hardness[rows]
        target = torch.log(h) if fixed else torch.log(h) - torch.log1p(-h)
        begin = _begin(job, sample, total, stats, k, target, rows, fixed)
        read = job.pass_(None if every else open_, out)
        ended = job.call("iterate", read, n_, k_, target, begin, fixed, job.tol, job.dtype)
        t = h[:, None] if fixed else ended.point[:, TEMPERATURE, None]
        state[rows] = torch.cat([ended.point[:, :TEMPERATURE], t, ended.means], -1)
        status[rows], passes[rows] = ended.status, ended.passes
        masks = out if ended.written and len(job.own) == len(job.filled) else None
    if masks is None:
        masks = [torch.empty_like(x) for x in job.pieces]
        if job.filled:
            filled = [job.pieces[i] for i in job.filled]
            for i, mask in zip(
                job.filled,
                job.call("write", filled, state, status, share[:, job.filled].contiguous()),
                strict=True,
            ):
                masks[i] = mask
    cost = torch.full_like(passes, exchange.collectives)
    masks = [m.to(x.dtype) for m, x in zip(masks, pieces, strict=True)]
    return masks, state, torch.stack([status, passes, cost], -1)


def _in_one_launch(pieces: Sequence[Tensor], exchange: Exchange) -> Any:
    """The backend that wants the pieces as one row, if there is one and all are here."""
    backend = pick(pieces[0])
    wants = backend is not reference and not hasattr(backend, "sums")
    return backend if wants and not exchange.groups else None


def _row(pieces: Sequence[Tensor]) -> Tensor:
    """All pieces in one row, of the widest of their types."""
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces), -1)


def _cut(row: Tensor, pieces: Sequence[Tensor]) -> list[Tensor]:
    """A row's parts, each of its piece's length and type."""
    parts = row.split([x.shape[-1] for x in pieces], -1)
    return [y.to(x.dtype, copy=True) for x, y in zip(pieces, parts, strict=True)]


def _agree(
    pieces: Sequence[Tensor],
    k: Tensor,
    hardness: Tensor,
    fixed: bool,
    exchange: Exchange,
    length: int,
) -> tuple[list[int], bool]:
    """The lengths of all ranks, and whether any has float64 scores; refuses what differs."""
    double = any(x.dtype == torch.float64 for x in pieces)
    if not exchange.groups:
        return [length], double
    first_k, first_h, every_k, every_h = _summary(k, hardness)
    name = "temperature" if fixed else "gamma"
    header = {"the number of rows": float(len(k)), "the number of tensors": float(len(pieces))}
    header |= {"whether the temperature is fixed": float(fixed), "k": first_k, name: first_h}
    prints = {"the k of some row": every_k, f"the {name} of some row": every_h}
    seen = exchange.agree(header, prints, [float(length), float(double)], k.device)
    return [int(row[0]) for row in seen], any(row[1] for row in seen)


def _summary(k: Tensor, hardness: Tensor) -> list[float]:
    """k and hardness of the first row, and a fingerprint of those of all rows."""
    both = torch.stack([k.detach(), hardness.detach()]).double() + 0.0  # -0 counts as 0
    # Mixed bits, as splitmix64 does: plain sums of numbers that people write collide.
    bits = both.view(torch.int64) + torch.arange(len(k), device=k.device) * -0x61C8864680B583EB
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        bits = (bits ^ (bits >> shift)) * factor
    prints = (bits ^ (bits >> 31)).sum(1) >> 12  # what a float64 holds exactly
    first = both[:, 0] if len(k) else both.new_zeros(2)
    return torch.cat([first, prints.double()]).tolist()


def _check(total: int, k: Tensor, hardness: Tensor, fixed: bool, ranks: bool) -> None:
    """Refuse values that only real tensors show. A single GPU is not asked, as that takes longer
    than to come back with NaN."""
    if k.device.type != "cpu" and not ranks:
        return
    name, high = ("temperature", torch.inf) if fixed else ("gamma", 1.0)
    for label, x, largest in (("k", k, float(total)), (name, hardness, high)):
        wrong = ~((x >= 0) & (x <= largest))
        if wrong.any():
            raise ValueError(f"{label} must lie in [0, {largest:g}], got {x[wrong][0].item():g}")


def _gather_start(job: _Job, lengths: list[int], k: Tensor) -> tuple[Tensor, Tensor | None]:
    """A first look at the rows, (rows, 5), and a sample of long ones; one collective for both."""
    here = job.look(k)
    total, rank = sum(lengths), job.exchange.rank
    alone = not job.exchange.groups
    size = max(MIN_SAMPLE, min(total // SAMPLE_RATIO, SAMPLE_CAP // max(job.rows, 1)))
    # Between ranks a pass costs a collective, so a sample pays sooner.
    taken = total > (LONG if alone else 2 * MIN_SAMPLE)
    offset = sum(lengths[:rank])
    own = job.sample(offset, lengths[rank], size, total) if taken else None
    if alone:
        return here, own
    ends = [-(-sum(lengths[:i]) * size // total) for i in range(len(lengths) + 1)] if taken else [0]
    counts = [y - x for x, y in itertools.pairwise(ends)]
    if own is not None:
        padded = torch.nn.functional.pad(own.to(job.work), (0, max(counts) - own.shape[1]))
        here = torch.cat([here, padded], 1)
    seen = job.exchange.gather(here)
    first = seen[:, :, :5]
    stats = torch.stack(
        [
            first[:, :, 0].sum(0),
            first[:, :, 1].sum(0),
            first[:, :, 2].amin(0),
            first[:, :, 3].amax(0),
            first[:, :, 4].sum(0),
        ],
        -1,
    )
    if own is None:
        return stats, None
    parts = [seen[i, :, 5 : 5 + count] for i, count in enumerate(counts)]
    return stats, torch.cat(parts, 1).to(job.dtype)


def _begin(
    job: _Job,
    sample: Tensor | None,
    total: int,
    stats: Tensor,
    k: Tensor,
    target: Tensor,
    rows: slice | Tensor,
    fixed: bool,
) -> Tensor:
    """(pivot, b, log t) to start from: the sample's answer, or what some counts say."""
    begin, ok = None, None
    if sample is not None:
        part = k[rows] * sample.shape[1] / total
        begin, ok = job.call("start", sample[rows].contiguous(), part, target, fixed)
        if ok.all():
            return begin
    n, _, low, high, added = stats.unbind(-1)
    mean = torch.maximum(torch.minimum(added / n, high), low)
    cuts = torch.zeros_like(n)

    def count(cut: Tensor) -> Tensor:
        cuts[rows] = cut
        return job.count(cuts)[rows]

    low, high, mean, n, k = (x[rows] for x in (low, high, mean, n, k))
    at = _counting_start(count, low, high, mean, n, k, target, fixed)
    counted = torch.stack([at.pivot, at.b, at.tau], -1)
    return counted if begin is None or ok is None else torch.where(ok[:, None], begin, counted)


def _threshold(job: _Job, k: Tensor, hard: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The ceil(k)-th largest score, what scores equal to it share, and that share piece by piece.

    Digit by digit of the scores' bits: one count of 256 digits per collective.
    """
    rank = torch.where(hard, k.ceil(), 0.0)
    larger = torch.zeros_like(k)
    prefix = torch.zeros(job.rows, dtype=torch.int64, device=job.device)
    for shift in range(8 * job.pieces[0].element_size() - DIGIT, -1, -DIGIT):
        counts = (
            job.call("digits", job.read, prefix, shift) if job.read else digits([], prefix, shift)
        )
        counts = job.exchange.add(counts.to(job.work))
        down = torch.nn.functional.pad(counts.flip(-1).cumsum(-1), (1, 0))  # larger than a digit
        place = (larger[:, None] + down[:, 1:] < rank[:, None]).sum(-1).clamp(max=(1 << DIGIT) - 1)
        larger = larger + down.gather(1, place[:, None])[:, 0]
        prefix = prefix | (((1 << DIGIT) - 1 - place) << shift)
    threshold = _unkey(prefix, job.dtype).to(job.work)
    threshold = torch.where(rank > 0, threshold, math.inf)
    left = torch.where(rank > 0, k - larger, 0.0)

    ties = torch.zeros(job.rows, len(job.pieces), dtype=job.work, device=job.device)
    for i, piece in zip(job.own, job.read, strict=True):
        ties[:, i] = (piece == threshold[:, None]).sum(-1)
    seen = job.exchange.gather(ties)
    # In the order of the pieces, then of the ranks; a copy stands where its owner does.
    earlier = seen.sum(0).cumsum(-1) - seen.sum(0)
    before = [earlier[:, i] + seen[: job.owners[i], :, i].sum(0) for i in range(len(job.pieces))]
    return threshold, left, left[:, None] - torch.stack(before, -1)


def vjp(
    pieces: Sequence[Tensor],
    k: Tensor,
    hardness: Tensor,
    fixed: bool,
    exchange: Exchange,
    owners: Sequence[int],
    state: Tensor,
    info: Tensor,
    grads: Sequence[Tensor],
    grad_state: Tensor | None,
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Gradients of the pieces, k and hardness; one collective."""
    if (backend := _in_one_launch(pieces, exchange)) is not None:
        dr, _, dk, dh = backend.vjp(
            _row(pieces), k, hardness, None, False, fixed, state, info[:, :2], _row(grads),
            grad_state,
        )  # fmt: skip
        return _cut(dr, pieces), dk, dh
    double = any(x.dtype == torch.float64 for x in pieces)
    job = _Job(pieces, owners, exchange, double)
    state, status = state.detach(), info[:, 0].contiguous()
    given = [_plain(g, job.dtype) for g in grads]
    here = state.new_zeros(len(state), 8)
    if job.own:
        here = job.call("moments", job.read, [given[i] for i in job.own], state, status)
    count, s0, s1, u0, cov, g0, g1, level = exchange.add(here).unbind(-1)

    t, mean_z, mean_p = state[:, TEMPERATURE], state[:, MEAN_Z], state[:, MEAN_P]
    gb, gt = (
        (torch.zeros_like(t),) * 2
        if grad_state is None
        else (grad_state[:, OFFSET], grad_state[:, TEMPERATURE])
    )
    regular = (status == Status.CONVERGED) | (status == Status.STALLED)
    tied = status == Status.TIED
    s0 = torch.where(s0 > 0, s0, 1.0)
    z, p, cov = mean_z + s1 / s0, mean_p + u0 / s0, cov - s1 * u0 / s0
    two = regular & (cov > 0) & (not fixed)
    lever = g1 - s1 / s0 * g0 + t * (z * gb - gt)
    c1 = torch.where(two, lever / torch.where(two, cov, 1.0), 0.0)
    c0 = torch.where(regular | tied, (g0 - t * gb) / s0 - c1 * p, 0.0)

    n = count.clamp(min=1)
    k, hardness = k.detach().to(job.work), hardness.detach().to(job.work)
    a = k / n
    flat = (status == Status.UNIFORM) | (status == Status.CONSTANT)
    dk = torch.where(flat, level / n, c0)
    if fixed:
        dh = torch.where(regular, (c0 * s1 - g1) / t - mean_z * gb + gt, 0.0)
    else:
        dk = dk + 0.5 * c1 * (2 * a + (1 - 2 * a) * hardness)
        dh = 0.5 * c1 * k * (1 - a)
    broken = status == Status.NONFINITE
    dk, dh = (torch.where(broken, math.nan, x) for x in (dk, dh))

    out = [torch.empty_like(x) for x in pieces]
    if job.filled:
        filled, theirs = ([x[i] for i in job.filled] for x in (job.pieces, given))
        slopes = torch.stack([c0, c1], -1)
        for i, d in zip(
            job.filled, job.call("pull", filled, theirs, state, status, slopes), strict=True
        ):
            out[i] = d.to(pieces[i].dtype)
    return out, dk, dh
