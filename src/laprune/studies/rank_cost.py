"""One row over many ranks: measured on a few processes here, and a model for many GPUs.

Measured: one float32 row cut into equal shards, k = n/16, gamma = 0.9, one gloo process and one
thread per rank on this machine; the median over five calls of the slowest rank. The alternative
gathers all scores on every rank and sorts them, forward only. The machine was busy with other work
and has fewer cores than ranks at times: compare the columns of a line, not the lines.

Modelled: bytes over bandwidths plus latencies, with the constants of :class:`Machine`, which are
assumptions but where they say otherwise, and the number of passes and collectives that were
measured. What does not fit into the memory of a GPU has no time.

The model has two columns for LaPrune. Ranks on GPUs run plain torch today: its operations move
about 180 times the bytes of the shard in each pass and need 28 times its memory besides, as was
counted. Kernels that read the shard once, as a single GPU and the CPUs have, are not written for
several ranks: the column of fused kernels says what they would be worth. As it is, gather + sort is
faster where the scores fit into one GPU and the ranks are few.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from laprune import distributed
from laprune.backends.pieces import ADDED, SAMPLE_CAP
from laprune.backends.reference import SAMPLE_RATIO

from .lab import Options, Record, Setting, Study, hardware
from .style import COLOURS, LINES, MARKERS, figure, save
from .tables import markdown, prose, select

GAMMA, PART, REPEATS = 0.9, 16, 5
RANKS = {"full": (1, 2, 4), "quick": (1, 2)}
LENGTHS = {"full": (1_000_000, 10_000_000), "quick": (20_000,)}
GPUS = (8, 64, 512, 4096)
SCORES = (10**9, 10**10, 10**11, 10**12)
MASS_TOLERANCE = 1e-5


class Machine(NamedTuple):
    """What the model assumes of a GPU and its links."""

    memory_bandwidth: float = 4.2e12
    """Bytes a second, as a copy on one H200 was measured."""
    memory: float = 141e9
    sort_rate: float = 1e8 / 4.5e-3
    """float32 scores a second, as torch.sort of 1e8 on one H200 was measured."""
    node: int = 8
    inside: float = 450e9
    """Bytes a second per GPU inside a node."""
    outside: float = 50e9
    """Bytes a second per GPU between nodes."""
    hop_inside: float = 2e-6
    hop_outside: float = 5e-6
    launch: float = 10e-6
    """Seconds to start a collective."""
    step: float = 1e-3
    """Seconds for a step of the iteration: many small kernels, as plain torch has it today."""
    plain_pass: float = 180
    """Shards that one pass of plain torch reads and writes, counted from its operations."""
    plain_rest: float = 402
    """The same for all the rest: look 23, mask 111, moments 169, gradient 99."""
    plain_memory: float = 28
    """Shards that plain torch needs besides scores, mask, upstream and gradient, as counted."""


class Cost(NamedTuple):
    """Seconds, and bytes that each GPU sends; infinite where memory is too small."""

    seconds: float
    bytes: float


def settings(options: Options) -> list[Setting]:
    size = "quick" if options.quick else "full"
    return [
        {"ranks": ranks, "n": n, "k": n // PART, "gamma": GAMMA, "hardware": hardware("cpu")}
        for n in LENGTHS[size]
        for ranks in RANKS[size]
    ]


def measure(setting: Setting, options: Options) -> dict[str, Any]:
    """Start the ranks, and take what the first of them writes."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (setting, folder), nprocs=setting["ranks"])
        return json.loads((Path(folder) / "result").read_text())


def _rank(rank: int, setting: Setting, folder: str) -> None:
    torch.set_num_threads(1)
    ranks, n, k = setting["ranks"], setting["n"], setting["k"]
    meet = f"file://{folder}/meet"
    limit = timedelta(minutes=5)
    dist.init_process_group("gloo", meet, rank=rank, world_size=ranks, timeout=limit)
    torch.manual_seed(rank)
    r = torch.randn(n // ranks + (rank < n % ranks), requires_grad=True)
    g = torch.randn_like(r)
    solution = distributed.solve(r.detach(), k, GAMMA)
    mass = solution.mask.double().sum()
    dist.all_reduce(mass)
    if abs(mass.item() / k - 1) > MASS_TOLERANCE:
        raise AssertionError(f"mass {mass.item()} instead of {k}: no time for a wrong answer")
    lengths = [n // ranks + (i < n % ranks) for i in range(ranks)]

    def forward() -> None:
        distributed.soft_topk(r.detach(), k, GAMMA)

    def both() -> None:
        torch.autograd.grad(distributed.soft_topk(r, k, GAMMA), r, g)

    def gathered() -> None:
        parts = [torch.empty(length) for length in lengths]
        dist.all_gather(parts, r.detach())
        torch.sort(torch.cat(parts), descending=True)

    result = {
        "passes": int(solution.passes),
        "collectives": int(solution.collectives),
        "forward_ms": _median_ms(forward),
        "both_ms": _median_ms(both),
        "gather_sort_ms": _median_ms(gathered),
    }
    if rank == 0:
        (Path(folder) / "result").write_text(json.dumps(result))
    dist.destroy_process_group()


def _median_ms(call: Callable[[], None]) -> float:
    times = []
    for _ in range(REPEATS + 1):
        dist.barrier()
        start = time.perf_counter()
        call()
        seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        times.append(1e3 * seconds.item())
    return statistics.median(times[1:])


def hops(ranks: int, m: Machine) -> float:
    """The latency of one way through a tree of these ranks."""
    inside = math.ceil(math.log2(min(ranks, m.node)))
    outside = math.ceil(math.log2(max(1, ranks / m.node)))
    return inside * m.hop_inside + outside * m.hop_outside


def all_reduce(size: float, ranks: int, m: Machine) -> Cost:
    """Up and down a tree."""
    link = m.outside if ranks > m.node else m.inside
    return Cost(m.launch + 2 * hops(ranks, m) + 2 * size / link, 2 * size)


def all_gather(size: float, ranks: int, m: Machine) -> Cost:
    """Around a ring: ``size`` bytes of every rank to all others."""
    link = m.outside if ranks > m.node else m.inside
    hop = m.hop_outside if ranks > m.node else m.hop_inside
    sent = size * (ranks - 1)
    return Cost(m.launch + (ranks - 1) * hop + sent / link, sent)


def ours(n: float, ranks: int, passes: int, m: Machine, *, fused: bool) -> Cost:
    """Forward and backward of one float32 row: by fused kernels, or as plain torch has it today."""
    shard = 4 * n / ranks
    needed = 4 if fused else 4 + m.plain_memory  # scores, mask, upstream and gradient
    if needed * shard > m.memory:
        return Cost(math.inf, math.inf)
    sample = min(n // SAMPLE_RATIO, SAMPLE_CAP)
    sizes = [9 * ranks, 5 * ranks + sample, *[ADDED + 3 * ranks] * passes, 8]
    parts = [all_reduce(8 * size, ranks, m) for size in sizes]
    # Read for a look, each pass, the moments (two) and the gradient (two); write mask and gradient.
    moved = 1 + passes + 1 + 2 + 2 + 1 if fused else m.plain_rest + passes * m.plain_pass
    seconds = (
        sum(x.seconds for x in parts) + shard * moved / m.memory_bandwidth + (passes + 1) * m.step
    )
    return Cost(seconds, sum(x.bytes for x in parts))


def gather_and_sort(n: float, ranks: int, m: Machine) -> Cost:
    """Forward only: all scores to every rank, sorted there."""
    if 16 * n > m.memory:  # the scores, sorted values and their indices
        return Cost(math.inf, math.inf)
    gather = all_gather(4 * n / ranks, ranks, m)
    return Cost(gather.seconds + n / m.sort_rate, gather.bytes)


def _kinds(passes: int, m: Machine) -> list[tuple[str, Callable[[float, int], Cost]]]:
    """What the model compares, by name."""
    return [
        ("LaPrune, plain torch as today", lambda n, p: ours(n, p, passes, m, fused=False)),
        ("gather + sort", lambda n, p: gather_and_sort(n, p, m)),
        ("LaPrune, fused kernels assumed", lambda n, p: ours(n, p, passes, m, fused=True)),
    ]


def draw(records: list[Record], folder: Path) -> list[Path]:
    machine = Machine()
    lengths = sorted({r["setting"]["n"] for r in records})
    passes = max(r["result"]["passes"] for r in records)
    fig, (left, right) = figure(2, width=4.4, height=3.6)
    series = (("both_ms", "LaPrune, forward + backward"), ("gather_sort_ms", "gather and sort"))
    for i, n in enumerate(lengths):
        here = sorted(select(records, n=n), key=lambda r: int(r["setting"]["ranks"]))
        for line, (key, label) in enumerate(series):
            left.plot(
                [r["setting"]["ranks"] for r in here],
                [r["result"][key] for r in here],
                color=COLOURS[i],
                marker=MARKERS[i],
                linestyle=LINES[line],
                label=f"{label}, n = {n:.0e}",
            )
    ranks = sorted({r["setting"]["ranks"] for r in records})
    left.set(xscale="log", yscale="log", xlabel="ranks (processes)", ylabel="ms")
    left.set_xticks(ranks, [str(x) for x in ranks])
    left.set_xticks([], minor=True)
    left.set_title("measured here", fontsize=9)
    for i, n in enumerate(SCORES):
        for line, (label, cost) in enumerate(_kinds(passes, machine)):
            times = [cost(n, p).seconds for p in GPUS]
            # Hollow what is only assumed: such lines run over those of fewer scores today.
            look: dict[str, Any] = {"markerfacecolor": "white"} if "assumed" in label else {}
            look |= {"color": COLOURS[i], "marker": MARKERS[i], "linestyle": LINES[line]}
            right.plot(GPUS, times, **look)
        right.plot([], [], color=COLOURS[i], marker=MARKERS[i], label=f"n = {n:.0e}")
    for line, (label, _) in enumerate(_kinds(passes, machine)):
        right.plot([], [], color="0.3", linestyle=LINES[line], label=label)
    right.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="seconds")
    right.set_xticks(GPUS, [str(x) for x in GPUS])
    right.set_xticks([], minor=True)
    right.set_title("model", fontsize=9)
    for axis in (left, right):
        place: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.2), "ncols": 2}
        axis.legend(fontsize=7, handlelength=3.5, **place)
    return [*save(fig, folder, STUDY.name), _report(records, passes, machine, folder)]


def _report(records: list[Record], passes: int, machine: Machine, folder: Path) -> Path:
    fields = ("passes", "collectives", "forward_ms", "both_ms", "gather_sort_ms")
    measured = [
        [
            f"{r['setting']['n']:,} on {r['setting']['ranks']}",
            *(f"{r['result'][f]:,}" for f in fields[:2]),
            *(f"{r['result'][f]:,.1f}" for f in fields[2:]),
        ]
        for r in records
    ]
    names = ("passes", "collectives", "forward ms", "both ms", "gather + sort ms")
    kinds = _kinds(passes, machine)
    modelled = []
    for n in SCORES:
        for p in GPUS:
            costs = [cost(n, p) for _, cost in kinds]
            sent = costs[-1], costs[1]  # what LaPrune sends does not depend on its kernels
            modelled.append([f"{n:.0e} on {p:,}", *map(_time, costs), *map(_bytes, sent)])
    head = [
        "scores on GPUs",
        *(label for label, _ in kinds),
        "LaPrune sends",
        "gather + sort sends",
    ]
    constants = [[name, f"{value:g}"] for name, value in machine._asdict().items()]
    parts = [
        "# One row over many ranks",
        prose(__doc__),
        f"## Measured: {records[0]['setting']['hardware']}",
        markdown(["scores on ranks", *names], measured),
        f"## Model, with {passes} passes",
        "LaPrune, by either kind of kernel, is forward and backward, gather + sort forward only; "
        "the last columns are the bytes that each GPU sends.",
        markdown(head, modelled),
        markdown(["assumed or counted", "value"], constants),
    ]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{STUDY.name}.md"
    path.write_text("\n\n".join(parts) + "\n")
    return path


def _time(cost: Cost) -> str:
    return f"{1e3 * cost.seconds:,.1f} ms" if math.isfinite(cost.seconds) else "does not fit"


def _bytes(cost: Cost) -> str:
    if not math.isfinite(cost.bytes):
        return "-"
    return f"{cost.bytes / 1e6:,.2f} MB"


STUDY = Study("rank_cost", "one row over many ranks: cost against ranks", settings, measure, draw)
