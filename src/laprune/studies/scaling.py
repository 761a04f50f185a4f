"""Runtime and memory against n, every operator beside every other, by the paper's protocol.

One float32 row, k = n/16, forward and backward; then a sweep over shapes with many rows. Ours runs
at gamma = 0.9, every other operator at the softness that its record names. Each point runs in a
fresh process with a time limit: one warm-up, then the median of 15, 7 or 3 calls, and the peak of
memory over them. Its answer is checked first, and a wrong one gets no time. Running out of memory
or time is a result.
On a GPU our own operator is also replayed from a CUDA graph, which shows what the device needs
without what Python needs to launch it.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import re
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import laprune
from laprune import backends, baselines

from .lab import Options, Record, Setting, Study, hardware
from .style import COLOURS, LINES, MARKERS, figure, save
from .tables import markdown
from .timing import copy_bandwidth, graph_ms, median_ms

LIMIT_S = 240
GAMMA = 0.9
MASS_TOLERANCE = 1e-3
MASK_TOLERANCE = 0.01  # of an operator that is to find another's mask
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
PAPER = {OURS: (10.75, 305), "lapsum": (5.38, 544)}
"""The paper's milliseconds and MB at n = 1e7 on an A100."""
NOTES = f"""
- `{OURS}` at gamma = {GAMMA}, the others at their default softness (`laprune.baselines.get(name)`).
- `-`: longer than the operator's largest sensible n, or not part of the sweep over many rows.
- `paper` is the paper's solver in plain PyTorch; `bench operator` also has it compiled.
- `sander_dykstra` gets no time where its 500 steps are too few, by more than {MASK_TOLERANCE} from
  `sander_pav`.
- The paper, 1 x 10,000,000 on an A100: LaPrune {PAPER[OURS][0]} ms ({PAPER[OURS][1]} MB), LapSum
  {PAPER["lapsum"][0]} ms ({PAPER["lapsum"][1]} MB), Sander's operator by PAV and optimal transport
  18 to 22 times LaPrune's time, sorting relaxations out of memory far earlier.
"""


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
        full = isinstance(error, MemoryError) or _OUT_OF_MEMORY.search(text)
        sender.send({"failed": "out of memory" if full else text.splitlines()[0][:200]})


_OUT_OF_MEMORY = re.compile(
    "out ?of ?memory|not enough memory|can't allocate memory|unable to allocate|resource_exhausted",
    re.IGNORECASE,
)
"""As torch, numpy and JAX say it."""


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
    if wrong := _wrong(f, r, g, k, setting["operator"]):
        return {"failed": wrong}
    start = 0
    if gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    else:
        start = _forget_peak()
    numbers = r.numel()
    repeats = 15 if numbers <= 10**5 else 7 if numbers <= 10**6 else 3
    ms = median_ms(call, device, repeats, warm_ups=0)
    peak = torch.cuda.max_memory_allocated() if gpu else _peak() - start
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
    p = p.detach()
    if not (p.isfinite().all() and d.isfinite().all()):
        return "wrong: not finite"
    if not d.any():
        return "wrong: no gradient"
    mass = p.sum(-1, dtype=torch.float64)
    error = float((mass / k - 1).abs().max())
    if (name == OURS or baselines.get(name).exact_mass) and error > MASS_TOLERANCE:
        return f"wrong: mass off by {error:.1e}"
    chosen = p.gather(-1, r.detach().topk(k).indices).sum(-1, dtype=torch.float64)
    if (chosen / k <= (mass - chosen) / (r.shape[-1] - k)).any():
        return "wrong: the largest scores get less than the others"
    if name == OURS:
        return _wrong_of_ours(p, d, r.detach(), g, k)
    if name == "sander_dykstra":
        off = float((p - baselines.get("sander_pav")(r.detach(), k)).abs().max())
        if off > MASK_TOLERANCE:
            return f"not converged: off by {off:.2f}"
    return None


def _wrong_of_ours(p: Tensor, d: Tensor, r: Tensor, g: Tensor, k: int) -> str | None:
    """Hardness; the gradient along the two directions that change no mask; and up to a million
    scores the reference's mask and gradient in float64."""
    even = k * k / r.shape[-1]
    gamma = (p.square().sum(-1, dtype=torch.float64) - even) / (k - even)
    hardness = float((gamma - GAMMA).abs().max())
    if hardness > MASS_TOLERANCE:
        return f"wrong: gamma off by {hardness:.1e}"
    size = d.abs().sum(-1, dtype=torch.float64)
    for direction in (d, d * r):
        if (direction.sum(-1, dtype=torch.float64).abs() > MASS_TOLERANCE * size).any():
            return "wrong: the gradient is not that of a mask without scale and shift"
    if r.numel() <= 10**6:
        with backends.use(backends.reference):
            exact = r.double().requires_grad_()
            want = laprune.soft_topk(exact, k, GAMMA)
            (slope,) = torch.autograd.grad(want, exact, g.double())
        off = float((p - want.detach()).abs().max())
        off = max(off, float((d - slope).norm() / slope.norm()))
        if off > MASS_TOLERANCE:
            return f"wrong: off by {off:.1e} from float64"
    return None


def _forget_peak() -> int:
    """Start the peak of this process's memory anew where the system can; what it takes now."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # what is free but still held would hide what comes
        Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> int:
    """The most bytes this process has held, since the last start where the system can say that."""
    with contextlib.suppress(OSError):
        found = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
        if found:
            return 1024 * int(found[1])
    import resource

    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def draw(records: list[Record], folder: Path) -> list[Path]:
    """Runtime and memory against n for each machine, and one table of everything."""
    folder.mkdir(parents=True, exist_ok=True)
    machines = dict.fromkeys((_slug(r), r["setting"]["hardware"]) for r in records)
    slugs = [slug for slug, _ in machines]
    paths = []
    for slug, machine in machines:
        chosen = [r for r in records if r["setting"]["hardware"] == machine]
        if slugs.count(slug) > 1:
            slug += "_" + re.sub(r"\W+", "_", machine).strip("_").lower()
        rows = [r for r in chosen if r["setting"]["rows"] == 1]
        if any("ms" in r["result"] for r in rows):
            paths += _figure(rows, machine, folder, f"scaling_{slug}")
        paths.append(_table(chosen, machine, folder / f"scaling_{slug}.md"))
    return paths


def _slug(record: Record) -> str:
    return "gpu" if record["setting"]["device"].startswith("cuda") else "cpu"


def _figure(records: list[Record], device: str, folder: Path, name: str) -> list[Path]:
    fig, axes = figure(2, width=4.8, height=4.2)
    gpu = _slug(records[0]) == "gpu"
    for i, operator in enumerate((OURS, *baselines.names())):
        here = [r for r in records if r["setting"]["operator"] == operator]
        if not here:
            continue
        look = {
            "label": operator,
            "color": COLOURS[i % len(COLOURS)],
            # Where the colours begin anew, so do the lines, and the markers are one further.
            "marker": MARKERS[(i + i // len(COLOURS)) % len(MARKERS)],
            "linestyle": LINES[i // len(COLOURS) % len(LINES)],
            "linewidth": 2.4 if operator == OURS else 1,
            "markersize": 4,
        }
        _curves(axes, here, look)
        if gpu and operator in PAPER:
            for axis, y in zip(axes, PAPER[operator], strict=True):
                axis.plot([10**7], [y], marker="*", markersize=10, color=look["color"])
    lengths = sorted({r["setting"]["n"] for r in records})
    bandwidth = max(r["result"].get("copy_bytes_per_s", 0) for r in records)
    floors = (
        ("five transfers", [1e3 * TRANSFERS * 4 * n / bandwidth for n in lengths]),
        # On a CPU the peak is counted from where scores and gradient are there already.
        ("r, g, p, dr" if gpu else "p, dr", [4 * (4 if gpu else 2) * n / 1e6 for n in lengths]),
    )
    for axis, (label, floor), what in zip(axes, floors, ("ms", "peak memory, MB"), strict=True):
        axis.plot(lengths, floor, color="0.6", linewidth=1)
        at = len(lengths) // 2
        axis.annotate(label, (lengths[at], floor[at]), (7, -5), textcoords="offset points",
                      fontsize=6.5, color="0.4", va="top")  # fmt: skip
        axis.set(xscale="log", yscale="log", xlabel="n", ylabel=what)
    times = [r["result"].get("graph_ms", r["result"].get("ms")) for r in records]
    axes[0].set_ylim(bottom=min(x for x in times if x) / 10)
    axes[0].set_ylabel("forward + backward, ms")
    axes[1].set_ylim(bottom=0.1)  # a page or two is nothing that could be compared
    axes[1].plot([], [], "x", color="0.3", label="out of memory or time, or wrong")
    if gpu:
        axes[1].plot([], [], "*", color="0.3", markersize=10, label="the paper, on an A100")
    handles = axes[1].get_legend_handles_labels()
    fig.legend(*handles, loc="outside lower center", ncols=5, fontsize=6.5)
    fig.suptitle(f"one row, k = n/16, {device}", fontsize=9)
    return save(fig, folder, name)


def _curves(axes: list[Any], records: list[Record], look: dict[str, Any]) -> None:
    """An operator's time and memory, and crosses at the top where it failed."""
    good = [r for r in records if "ms" in r["result"]]
    n = [r["setting"]["n"] for r in good]
    axes[0].plot(n, [r["result"]["ms"] for r in good], **look)
    axes[1].plot(n, [r["result"]["peak_bytes"] / 1e6 for r in good], **look)
    graph = {r["setting"]["n"]: r["result"]["graph_ms"] for r in good if "graph_ms" in r["result"]}
    if graph:
        dotted = look | {"linestyle": ":", "label": f"{look['label']}, CUDA graph"}
        axes[0].plot(list(graph), list(graph.values()), **dotted)
        axes[1].plot([], [], **dotted)
    failed = [r["setting"]["n"] for r in records if "failed" in r["result"]]
    for axis in axes:
        top = axis.get_xaxis_transform()
        axis.plot(failed, [0.98] * len(failed), "x", color=look["color"], transform=top)


def _table(records: list[Record], device: str, path: Path) -> Path:
    """Milliseconds, or what went wrong, operator by operator."""
    columns = list(dict.fromkeys((r["setting"]["rows"], r["setting"]["n"]) for r in records))
    columns.sort(key=lambda column: (column[0] > 1, column[1]))
    cells = {
        (r["setting"]["operator"], r["setting"]["rows"], r["setting"]["n"]): r["result"]
        for r in records
    }
    found = {r["setting"]["operator"] for r in records}
    operators = [name for name in (OURS, *baselines.names()) if name in found]
    left_out = [name for name in baselines.names() if name not in found]
    head = ["operator", *(f"{rows} x {n:,}" for rows, n in columns)]
    lines = [
        [name, *(_cell(cells.get((name, *column))) for column in columns)] for name in operators
    ]
    text = [f"Forward + backward in ms (peak MB); one row has k = n/16. {device}.", ""]
    text += [markdown(head, lines), NOTES.rstrip()]
    if left_out:
        text.append(f"- Not measured here: {', '.join(f'`{x}`' for x in left_out)}.")
    path.write_text("\n".join(text) + "\n")
    return path


def _cell(result: dict[str, Any] | None) -> str:
    if result is None:
        return "-"
    if "failed" in result:  # why a longer row was not tried stands where a shorter one failed
        return (
            result["failed"].split(":")[0] if "not tried" in result["failed"] else result["failed"]
        )
    graph = f", graph {result['graph_ms']:.3g}" if "graph_ms" in result else ""
    mb = result["peak_bytes"] / 1e6
    return f"{_digits(result['ms'])}{graph} ({f'{mb:,.0f}' if mb >= 1 else '<1'})"


def _digits(x: float) -> str:
    return f"{x:.3g}" if x < 1000 else f"{x:,.0f}"


STUDY = Study("scaling", "runtime and memory against n, every operator", settings, measure, draw)
