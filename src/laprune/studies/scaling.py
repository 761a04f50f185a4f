"""Runtime and memory against n, every operator beside every other, by the paper's protocol.

One float32 row, k = n/16, forward and backward; then a sweep over shapes with many rows. Each point
runs in a fresh process with a time limit: one warm-up, then the median of 15, 7 or 3 calls. Its
answer is checked first, and a wrong one gets no time. Running out of memory or time is a result.
On a GPU our own operator is also replayed from a CUDA graph, which shows what the device needs
without what Python needs to launch it.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import laprune
from laprune import baselines

from .lab import Options, Record, Setting, Study, hardware
from .style import COLOURS, LINES, MARKERS, figure, save
from .timing import copy_bandwidth, graph_ms, median_ms

LIMIT_S = 240
GAMMA = 0.9
MASS_TOLERANCE = 1e-3
TRANSFERS = 5  # read r, write p; read r, read g, write dr
OURS = "laprune"
LENGTHS = (100, 1_000, 10_000, 100_000, 1_000_000, 10_000_000)
BEYOND = (100_000_000, 1_000_000_000)
SHAPES = ((16384, 64, 8), (4096, 512, 16), (1024, 4096, 128), (256, 16384, 256))
SHAPE_PEERS = (
    OURS,
    "paper",
    "lapsum",
    "dftopk",
    "hard_ste",
    "budget_sparsemax",
    "sander_pav",
    "sinkhorn",
)
PAPER = "The paper, 1 x 10,000,000 on an A100: LaPrune 10.75 ms (305), LapSum 5.38 ms (544)."


def settings(options: Options) -> list[Setting]:
    gpu = torch.device(options.device).type == "cuda"
    common = {"device": options.device, "hardware": hardware(options.device)}
    points = []
    for name in (OURS, *(x for x in baselines.names() if baselines.available(x))):
        largest = 10**9 if name == OURS else baselines.get(name).max_n
        lengths = LENGTHS + (BEYOND if gpu else BEYOND[:1])
        points += [(name, 1, n, 16) for n in lengths if n <= largest]
    points += [(name, *shape) for shape in SHAPES for name in SHAPE_PEERS if baselines_has(name)]
    if options.quick:
        points = [p for p in points if p[1] * p[2] <= 1_000 and p[0] in (OURS, "lapsum")]
    return [
        {"operator": name, "rows": rows, "n": n, "k": n // part, **common}
        for name, rows, n, part in points
    ]


def baselines_has(name: str) -> bool:
    return name == OURS or baselines.available(name)


_gave_up: dict[tuple[str, str], str] = {}


def measure(setting: Setting, options: Options) -> dict[str, Any]:
    """One point in a process of its own; after a failure, longer single rows are not tried."""
    key = (setting["operator"], setting["device"])
    if setting["rows"] == 1 and key in _gave_up:
        return {"failed": f"not tried: {_gave_up[key]} at a smaller n"}
    result = _alone(setting)
    if setting["rows"] == 1 and "failed" in result:
        _gave_up[key] = result["failed"]
    return result


def _alone(setting: Setting) -> dict[str, Any]:
    """:func:`point` in a fresh process. A server that has done the imports forks it."""
    methods = multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    context.set_forkserver_preload([__name__])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_report, args=(setting, sender))  # type: ignore[attr-defined]
    process.start()
    sender.close()
    try:
        if not receiver.poll(LIMIT_S):
            return {"failed": f"over {LIMIT_S} s"}
        return receiver.recv()
    except EOFError:
        process.join()
        killed = process.exitcode == -signal.SIGKILL
        return {"failed": "out of memory" if killed else f"exit status {process.exitcode}"}
    finally:
        process.kill()
        process.join()


def _report(setting: Setting, sender: Connection) -> None:
    try:
        sender.send(point(setting))
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        memory = "OutOfMemory" in text or "not enough memory" in text
        sender.send({"failed": "out of memory" if memory else text.splitlines()[0][:200]})


def _operator(name: str) -> Callable[[Tensor, int], Tensor]:
    if name == OURS:
        return lambda r, k: laprune.soft_topk(r, k, GAMMA)
    baseline = baselines.get(name)
    return lambda r, k: baseline(r, k)


def point(setting: Setting) -> dict[str, Any]:
    """Check, warm up, time and weigh one operator at one size, in this process."""
    device, k, f = setting["device"], setting["k"], _operator(setting["operator"])
    shape = (setting["rows"], setting["n"])
    gpu = torch.device(device).type == "cuda"
    torch.manual_seed(0)
    r = torch.randn(shape, device=device, requires_grad=True)
    g = torch.randn(shape, device=device)
    call = lambda: torch.autograd.grad(f(r, k), r, g)  # noqa: E731
    start = _resident()
    if wrong := _wrong(f, r, g, k, setting["operator"]):
        return {"failed": wrong}
    if gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    numbers = r.numel()
    repeats = 15 if numbers <= 10**5 else 7 if numbers <= 10**6 else 3
    ms = median_ms(call, device, repeats, warm_ups=0)
    peak = torch.cuda.max_memory_allocated() if gpu else _resident() - start
    result = {"ms": ms, "peak_bytes": peak, "copy_bytes_per_s": copy_bandwidth(device)}
    if gpu and setting["operator"] == OURS:
        result["graph_ms"] = graph_ms(call, repeats, calls=10 if numbers <= 10**8 else 1)
    return result


def _wrong(
    f: Callable[[Tensor, int], Tensor], r: Tensor, g: Tensor, k: int, name: str
) -> str | None:
    """What is wrong with the answer, if anything; this call is the warm-up."""
    p = f(r, k)
    (d,) = torch.autograd.grad(p, r, g)
    if not (p.isfinite().all() and d.isfinite().all()):
        return "wrong: not finite"
    exact = name == OURS or baselines.get(name).exact_mass
    error = float((p.detach().double().sum(-1) / k - 1).abs().max())
    return f"wrong: mass off by {error:.1e}" if exact and error > MASS_TOLERANCE else None


def _resident() -> int:
    import resource

    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def draw(records: list[Record], folder: Path) -> list[Path]:
    """Runtime and memory against n for each device, and one table of everything."""
    paths = []
    for device in sorted({r["setting"]["hardware"] for r in records}):
        chosen = [r for r in records if r["setting"]["hardware"] == device]
        slug = "gpu" if chosen[0]["setting"]["device"].startswith("cuda") else "cpu"
        paths += _figure(
            [r for r in chosen if r["setting"]["rows"] == 1], device, folder, f"scaling_{slug}"
        )
        paths.append(_table(chosen, device, folder / f"scaling_{slug}.md"))
    return paths


def _figure(records: list[Record], device: str, folder: Path, name: str) -> list[Path]:
    fig, (time_axis, memory_axis) = figure(2, width=4.6, height=3.6)
    looks: dict[str, dict[str, Any]] = {}
    for i, operator in enumerate((OURS, *baselines.names())):
        good = [r for r in records if r["setting"]["operator"] == operator and "ms" in r["result"]]
        if not good:
            continue
        n = [r["setting"]["n"] for r in good]
        looks[operator] = {
            "label": operator,
            "color": COLOURS[i % len(COLOURS)],
            "marker": MARKERS[i % len(MARKERS)],
            "linestyle": LINES[i // len(COLOURS) % len(LINES)],
            "linewidth": 2.4 if operator == OURS else 1,
            "markersize": 4,
        }
        look = looks[operator]
        time_axis.plot(n, [r["result"]["ms"] for r in good], **look)
        memory_axis.plot(n, [max(r["result"]["peak_bytes"], 4096) / 1e6 for r in good], **look)
    graph = [r for r in records if "graph_ms" in r["result"]]
    if graph:
        look = looks[OURS] | {"linestyle": ":", "label": f"{OURS}, CUDA graph"}
        times = {r["setting"]["n"]: r["result"]["graph_ms"] for r in graph}
        time_axis.plot(list(times), list(times.values()), **look)
        memory_axis.plot([], [], **look)
    shortest = min(r["result"].get("graph_ms", r["result"].get("ms", 1e9)) for r in records)
    lengths = sorted({r["setting"]["n"] for r in records})
    bandwidth = max(r["result"].get("copy_bytes_per_s", 0) for r in records)
    floor = [1e3 * TRANSFERS * 4 * n / bandwidth for n in lengths]
    time_axis.plot(lengths, floor, color="0.6", linewidth=1)
    time_axis.annotate(
        "five transfers",
        (lengths[-2], floor[-2]),
        (8, -2),
        textcoords="offset points",
        fontsize=6.5,
        color="0.4",
        va="top",
    )
    memory_axis.plot(
        lengths, [4 * 4 * n / 1e6 for n in lengths], color="0.6", linewidth=1, label="r, g, p, dr"
    )
    time_axis.set(xscale="log", yscale="log", xlabel="n", ylabel="forward + backward, ms")
    time_axis.set_ylim(bottom=shortest / 10)
    memory_axis.set(xscale="log", yscale="log", xlabel="n", ylabel="peak memory, MB")
    memory_axis.legend(fontsize=6.5, loc="center left", bbox_to_anchor=(1.01, 0.5))
    fig.suptitle(f"one row, k = n/16, {device}", fontsize=9)
    return save(fig, folder, name)


def _table(records: list[Record], device: str, path: Path) -> Path:
    """Milliseconds, or what went wrong, operator by operator."""
    columns = list(dict.fromkeys((r["setting"]["rows"], r["setting"]["n"]) for r in records))
    cells = {
        (r["setting"]["operator"], r["setting"]["rows"], r["setting"]["n"]): r["result"]
        for r in records
    }
    found = {r["setting"]["operator"] for r in records}
    operators = [name for name in (OURS, *baselines.names()) if name in found]
    lines = [
        f"Forward + backward in ms (peak MB), gamma = {GAMMA}; one row has k = n/16. {device}.",
        "",
        "| operator | " + " | ".join(f"{rows} x {n:,}" for rows, n in columns) + " |",
        "|---|" + "---:|" * len(columns),
    ]
    for operator in operators:
        row = [_cell(cells.get((operator, *column))) for column in columns]
        lines.append(f"| {operator} | " + " | ".join(row) + " |")
    lines += ["", PAPER]
    path.write_text("\n".join(lines) + "\n")
    return path


def _cell(result: dict[str, Any] | None) -> str:
    if result is None:
        return ""
    if "failed" in result:
        return (
            result["failed"].split(":")[0]
            if result["failed"].startswith("not")
            else result["failed"]
        )
    graph = f", graph {result['graph_ms']:.3g}" if "graph_ms" in result else ""
    return f"{result['ms']:.3g}{graph} ({result['peak_bytes'] / 1e6:.0f})"


STUDY = Study("scaling", "runtime and memory against n, every operator", settings, measure, draw)
