"""What the kernels compile to for an NVIDIA GPU, an H200 by default, that need not be at hand.

    python tools/compile_cuda.py [--only 65536x64 ...] [--keep FOLDER]

One line for each kernel of the benchmark's shapes: its instructions, the registers of a thread,
bytes on its stack, instructions that move them, and a digest of the machine code. A change of form
shows in none of these, or it is no change of form; the code itself is kept to be compared.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import hashlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from laprune.backends import cuda
from laprune.backends._plans import Plan, plan
from laprune.studies.bench_operator import GPU_SHAPES

PROCESSORS, CAPABILITY = 132, 90  # of an H200


class Kernel(NamedTuple):
    """A kernel for rows of float32 whose budget and hardness are numbers."""

    name: str
    rows: int
    n: int
    how: Plan
    gate: int = 0


def compiled(kernel: Kernel) -> Any:
    """As Triton's own compile returns it: ``.asm`` holds PTX and machine code."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    function = getattr(cuda.kernels(), kernel.name)
    launch = cuda._Launch(None, kernel.rows, kernel.n, torch.float32, kernel.gate, kernel.how)
    constants = launch.constants | {"FIXED": False, "PULL": False, "ASKED": False}
    wide = ("p_k", "p_hardness", "p_state", "p_pull", "p_dk", "p_dh", "p_lines")
    kinds = dict.fromkeys(wide, "*fp64") | dict.fromkeys(("p_info", "p_count"), "*i32")
    kinds |= dict.fromkeys(("k_bits", "hardness_bits"), "i64")
    kinds |= dict.fromkeys(("mass_tol", "hardness_tol"), "fp32")
    signature, known, aligned = {}, {}, {}
    for i, name in enumerate(function.arg_names):
        if name in constants:
            signature[name], known[i,] = "constexpr", constants[name]
            continue
        signature[name] = kinds.get(name, "*fp32" if name.startswith("p_") else "i32")
        if name.startswith("p_") or (name == "n_cols" and kernel.n % 16 == 0):
            aligned[i,] = [["tt.divisibility", 16]]
    source = ASTSource(fn=function, signature=signature, constexprs=known, attrs=aligned)
    return compile(source, target=GPUTarget("cuda", CAPABILITY, 32), options=launch.options)


def kernels(only: list[str] | None) -> Iterator[Kernel]:
    for rows, n, _ in GPU_SHAPES:
        if only and f"{rows}x{n}" not in only:
            continue
        for backward in (False, True):
            how = plan(rows, n, torch.float32, PROCESSORS, backward)
            forward = "solve_long" if how.team else "solve_rows"
            yield Kernel("vjp" if backward else forward, rows, n, how)


def machine_code(cubin: Path) -> tuple[str, str]:
    """Its instructions, without addresses and encodings, and what it takes."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    run = functools.partial(subprocess.run, capture_output=True, text=True, check=True)
    listing = re.sub(r"/\*[0-9a-fx ]+\*/", "", run([tool, "-sass", cubin]).stdout)
    lines = [line.strip() for line in listing.splitlines()]
    return "\n".join(x for x in lines if x.endswith(";")), run([tool, "-res-usage", cubin]).stdout


def report(kernel: Kernel, folder: Path) -> str:
    name = f"{kernel.name}_{kernel.rows}x{kernel.n}"
    cubin = folder / f"{name}.cubin"
    cubin.write_bytes(compiled(kernel).asm["cubin"])
    code, takes = machine_code(cubin)
    (folder / f"{name}.sass").write_text(code)
    registers, stack = (re.search(rf"{x}:(\d+)", takes)[1] for x in ("REG", "STACK"))
    moves = len(re.findall(r"\b(?:LDL|STL)\b", code))
    digest = hashlib.sha256(code.encode()).hexdigest()[:12]
    return (
        f"{name:<24} {code.count(chr(10)) + 1:>6} instructions {registers:>4} registers "
        f"{stack:>4} bytes on the stack {moves:>4} moves of them  {digest}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", metavar="ROWSxN")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where the code is to stay")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as fresh, concurrent.futures.ProcessPoolExecutor(2) as pool:
        folder = arguments.keep or Path(fresh)
        folder.mkdir(parents=True, exist_ok=True)
        for line in pool.map(functools.partial(report, folder=folder), kernels(arguments.only)):
            print(line, flush=True)


if __name__ == "__main__":
    main()
