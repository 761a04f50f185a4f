"""The operator's speed, beside the paper's solver, LapSum by sorting and plain selection.

One record is one shape: all contenders run in the same process, one after another, forward and
backward on the same scores. A contender whose answer is wrong gets no time. Calls are waited for,
each by itself. On a GPU, laprune and plain selection are also timed in a row that is not waited
for, and replayed from a CUDA graph of ten calls: what the device needs, without what Python needs
to launch it.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor

import laprune
from laprune.baselines.lapsum import lapsum_sort
from laprune.baselines.paper import paper_topk

from .inputs import draw as draw_scores
from .lab import Options, Record, Setting, Study, hardware
from .tables import markdown
from .timing import copy_bandwidth, graph_ms, median_ms, queued_ms

TRANSFERS = (
    5  # read r, write p; read r, read g, write dr: the fewest that forward + backward can move
)
MASS_TOLERANCE = {
    "laprune": 1e-6,
    "lapsum_sort": 1e-4,
    "paper": 2e-4,
}  # the paper's own: 1e-4 twice
SHAPES = ((1, 10**5, 16), (1, 10**6, 16), (1, 10**7, 16), (512, 4096, 128))
GPU_SHAPES = (
    *((1, 10**p, 16) for p in range(5, 10)),
    (4096, 4096, 128),
    (4096, 32768, 512),
    (65536, 64, 8),
)
BLOCK = 10**7  # the most scores that are drawn at once
VARIANTS = (
    *((name, 0.9) for name in ("laplace", "cauchy", "relu", "bimodal")),
    *(("gaussian", gamma) for gamma in (0.3, 0.99, 0.9999)),
)


def settings(options: Options) -> list[Setting]:
    gpu = torch.device(options.device).type == "cuda"
    shapes = GPU_SHAPES if gpu else SHAPES
    if options.quick:
        shapes = tuple(s for s in shapes if s[0] * s[1] <= 10**6)
    common = {
        "hardware": hardware(options.device),
        "device": options.device,
        "threads": torch.get_num_threads(),
    }
    cases = [(shape, "gaussian", 0.9, True) for shape in shapes]
    cases += [(shape, name, gamma, False) for shape in shapes for name, gamma in VARIANTS]
    return [
        {
            "rows": rows,
            "n": n,
            "k": n // part,
            "inputs": name,
            "gamma": gamma,
            "peers": peers,
            **common,
        }
        for (rows, n, part), name, gamma, peers in cases
    ]


def measure(setting: Setting, options: Options) -> dict[str, Any]:
    device, k, gamma = setting["device"], setting["k"], setting["gamma"]
    rows, n = setting["rows"], setting["n"]
    r = _scores(setting).requires_grad_()
    g = torch.randn(rows, n, device=device)
    solution = laprune.solve(r.detach(), k, gamma)
    t = float(solution.temperature.median())
    calls = _contenders(r, g, k, gamma, t, device, peers=setting["peers"])
    result: dict[str, Any] = {
        "floor_bytes": TRANSFERS * rows * n * r.element_size(),
        "copy_bytes_per_s": copy_bandwidth(device),
        "passes": {
            "median": float(solution.passes.float().median()),
            "max": int(solution.passes.max()),
        },
        "ms": {},
    }
    del solution
    repeats = 15 if rows * n <= 10**6 else 7
    for name, (call, check) in calls.items():
        if check is not None and (wrong := check()) > MASS_TOLERANCE[name.split(",")[0]]:
            result.setdefault("wrong", {})[name] = wrong
            continue
        slow = name.startswith("paper") and rows * n >= 10**6
        result["ms"][name] = median_ms(
            call, device, 3 if slow else repeats, warm_ups=1 if slow else 3
        )
    if torch.device(device).type == "cuda":
        for name in ("laprune", "torch.topk, forward", "torch.sort, forward"):
            if name in result["ms"]:
                result["ms"][f"{name}, queued"] = queued_ms(calls[name][0], 2 * repeats)
                many = 10 if rows * n <= 10**8 else 1
                result["ms"][f"{name}, graph"] = graph_ms(calls[name][0], 20, calls=many)
        call, _ = calls["laprune"]
        torch.cuda.reset_peak_memory_stats()
        call()
        result["peak_bytes"] = torch.cuda.max_memory_allocated()
    elif setting["peers"] and rows == 1 and n >= 10**7:  # smaller rows hide below the import's peak
        result["extra_bytes"] = _extra_memory(n, k, gamma)
    return result


def _scores(setting: Setting) -> Tensor:
    name, rows, n = setting["inputs"], setting["rows"], setting["n"]
    if rows * n < BLOCK:
        return draw_scores(name, rows, n, dtype=torch.float32).to(setting["device"])
    # More than the host should hold in float64: one drawn block, repeated with its order rolled on.
    block = _block(name).to(setting["device"])
    times = -(-rows * n // BLOCK)
    return torch.cat([block.roll(i) for i in range(times)])[: rows * n].reshape(rows, n)


@functools.cache
def _block(name: str) -> Tensor:
    return draw_scores(name, 1, BLOCK, dtype=torch.float32).flatten()


Contender = tuple[Callable[[], object], Callable[[], float] | None]


def _contenders(
    r: Tensor, g: Tensor, k: int, gamma: float, t: float, device: str, peers: bool
) -> dict[str, Contender]:
    """Name to (what is timed, the relative error of its mass)."""

    def both(f: Callable[[Tensor], Tensor]) -> Contender:
        def error() -> float:
            return float((f(r).detach().double().sum(-1) / k - 1).abs().max())

        return lambda: torch.autograd.grad(f(r), r, g), error

    ours = both(lambda x: laprune.soft_topk(x, k, gamma))
    calls: dict[str, Contender] = {
        "laprune": ours,
        FORWARD: (lambda: laprune.soft_topk(r.detach(), k, gamma), None),
        "torch.topk, forward": (lambda: torch.topk(r.detach(), k), None),
    }
    if peers:
        calls["torch.sort, forward"] = (lambda: torch.sort(r.detach()), None)
        calls["lapsum_sort"] = both(lambda x: lapsum_sort(x, k, t))
        if torch.device(device).type == "cuda":
            if r.numel() <= 10**8:
                calls["paper, compiled"] = both(
                    functools.partial(paper_topk, k=k, gamma=gamma, compiled=True)
                )
        else:
            calls["paper"] = both(functools.partial(paper_topk, k=k, gamma=gamma))
    return calls


def _extra_memory(n: int, k: int, gamma: float) -> int:
    """Peak resident bytes of one call beyond scores, mask and gradients, in a fresh process."""
    code = f"""
import json, resource, torch, laprune
def peak(): return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
small = torch.randn(300_000, requires_grad=True)
torch.autograd.grad(laprune.soft_topk(small, 1000, {gamma}), small, torch.ones(300_000))
r, g = torch.randn({n}, requires_grad=True), torch.ones({n})
hold = [torch.zeros({n}) for _ in range(2)]  # room for the mask and the gradient
before = peak()
del hold
p = laprune.soft_topk(r, {k}, {gamma})
d, = torch.autograd.grad(p, r, g)
print(json.dumps(peak() - before))
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(json.loads(out.stdout))


FORWARD = "laprune, forward"
CONTENDERS = {
    "laprune": "LaPrune",
    "laprune, queued": "in a row",
    "laprune, graph": "from a CUDA graph",
    FORWARD: "forward",
    "torch.topk, forward": "torch.topk, forward",
    "torch.topk, forward, queued": "in a row",
    "torch.topk, forward, graph": "from a CUDA graph",
    "torch.sort, forward": "torch.sort, forward",
    "torch.sort, forward, queued": "in a row",
    "torch.sort, forward, graph": "from a CUDA graph",
    "lapsum_sort": "LapSum by sorting",
    "paper": "the paper's solver",
    "paper, compiled": "the paper's solver, compiled",
}
Cells = tuple[list[str], list[list[str]]]
"""A table: its head, and its lines."""


def _shape(s: Setting) -> str:
    return f"{s['rows']} x {s['n']:.0e}" if s["n"] >= 10**5 else f"{s['rows']} x {s['n']}"


def _digits(x: float) -> str:
    return f"{x:.3g}" if x < 1000 else f"{x:,.0f}"


def _device_ms(record: Record) -> float:
    """Our time, without what Python needs where a graph was measured."""
    ms = record["result"]["ms"]
    return ms.get("laprune, graph", ms["laprune"])


def _beside_peers(records: list[Record], among: Iterable[str] = CONTENDERS) -> Cells:
    """Milliseconds, one line per shape."""
    chosen = [r for r in records if r["setting"]["peers"]]
    names = [x for x in among if any(x in r["result"]["ms"] for r in chosen)]
    head = ["rows x n", "k", *(CONTENDERS[x] for x in names), "GB/s", "of copy", "passes"]
    lines = []
    for record in chosen:
        s, result = record["setting"], record["result"]
        rate = result["floor_bytes"] / (_device_ms(record) * 1e-3)
        wrong = result.get("wrong", {})
        cells = [
            f"wrong: mass off by {wrong[x]:.0e}"
            if x in wrong
            else _digits(result["ms"][x])
            if x in result["ms"]
            else ""
            for x in names
        ]
        passes = f"{result['passes']['median']:g}, at most {result['passes']['max']}"
        speed = [_digits(rate / 1e9), f"{rate / result['copy_bytes_per_s']:.0%}", passes]
        lines.append([_shape(s), str(s["k"]), *cells, *speed])
    return head, lines


def _other_scores(records: list[Record]) -> Cells:
    """Our milliseconds on other scores and at other hardnesses, one column per shape."""
    usual = {_shape(r["setting"]): _device_ms(r) for r in records if r["setting"]["peers"]}
    found = {
        (r["setting"]["inputs"], r["setting"]["gamma"], _shape(r["setting"])): _device_ms(r)
        for r in records
    }
    cases = list(dict.fromkeys((name, gamma) for name, gamma, _ in found))
    lines = []
    for name, gamma in cases:
        cells = []
        for shape, base in usual.items():
            ms = found.get((name, gamma, shape))
            cells.append("" if ms is None else f"{_digits(ms)} ({ms / base:.2f})")
        lines.append([name, f"{gamma:g}", *cells])
    return ["scores", "gamma", *usual], lines


TITLES = (
    "Milliseconds, forward + backward unless said otherwise, Gaussian scores, gamma = 0.9. GB/s: "
    "five transfers of the scores, the fewest there can be, in our time, and their share of the "
    "speed of a copy.",
    "Other scores and other hardnesses: milliseconds of LaPrune, in brackets as a multiple of the "
    "first line.",
)


def table(records: list[Record]) -> Table:
    """The times that :func:`draw` writes first, narrow enough for a terminal."""
    among = [name for name in CONTENDERS if "sort, forward" not in name and name != FORWARD]
    head, lines = _beside_peers(records, among)
    title = "Milliseconds, forward + backward unless said otherwise; the file has more"
    view = Table(title=title, box=SIMPLE_HEAD)
    view.add_column(head[0], no_wrap=True)
    for name in head[2:-3]:
        view.add_column(name, justify="right", width=max(6, *map(len, name.split())))
    for line in lines:
        view.add_row(line[0], *line[2:-3])
    return view


def draw(records: list[Record], folder: Path) -> list[Path]:
    """Writes two tables per machine; the figure belongs to the scaling study."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for device in dict.fromkeys(r["setting"]["device"] for r in records):
        chosen = [r for r in records if r["setting"]["device"] == device]
        where = chosen[0]["where"]
        commits = ", ".join(dict.fromkeys(r["where"]["commit"] for r in chosen))
        machine = f"{where['hardware']}, torch {where['versions']['torch']}, laprune at {commits}"
        text = [f"{machine}. {TITLES[0]}", ""]
        text += [markdown(*_beside_peers(chosen)), "", TITLES[1], ""]
        text += [markdown(*_other_scores(chosen)), "", *_memory(chosen)]
        paths.append(folder / f"bench_operator_{device}.md")
        paths[-1].write_text("\n".join(text) + "\n")
    return paths


def _memory(records: list[Record]) -> Iterator[str]:
    for record in records:
        n, extra = record["setting"]["n"], record["result"].get("extra_bytes")
        peak = record["result"].get("peak_bytes")
        if peak is not None and record["setting"]["peers"]:
            yield (
                f"- {_shape(record['setting'])}: {peak / 1e6:,.1f} MB at most on the GPU "
                "in one call, scores and incoming gradient included."
            )
        if extra is not None:
            yield (
                f"- n = {n:.0e}: a call takes {extra / 1e6:,.1f} MB of memory beyond scores, mask "
                "and gradients, by the peak resident set of a fresh process."
            )


STUDY = Study("bench_operator", "the operator's speed beside its peers", settings, measure, draw)
