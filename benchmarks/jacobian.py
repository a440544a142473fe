"""Top singular triplets of residual Jacobians, against `torch.func.jacrev` and `torch.linalg.svd`, in one run.

    python benchmarks/jacobian.py --case small                # seconds on a CPU
    python benchmarks/jacobian.py --case fc                   # fully connected, 2,048 wide
    python benchmarks/jacobian.py --case resnet18             # 32 px, 8 images, all blocks, top 15
    python benchmarks/jacobian.py --case vit --device cuda    # ViT-S/8 at 64 px, all tokens: 24,960 dimensions
    python benchmarks/jacobian.py --case conv --device cuda   # a stage of 512 x 8 x 8: 32,768 dimensions
    python benchmarks/jacobian.py --case vit-b --device cuda  # ViT-B/16 at 224 px, 8 images: 151,296 dimensions

Both sides find the triplets of every block for every image; ours chooses its method by itself. Where a dense Jacobian
with its decomposition would not fit into memory, or has more than 6,000 rows on a CPU (hours), the peer is not run.
Weights are random, which makes spectra flat: the hard case. `--images` and `--blocks` measure a part; a block is a
residual step, so a transformer has two a layer. float32 is without TF32.
Deviation is that of the singular values over the largest.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import residua
from residua.anatomy import jacobian_svd
from residua.anatomy.jacobian import exact
from residua.anatomy.network import block_of
from residua.nn.stream import stream

Map = Callable[[Tensor], Tensor]
PATIENCE = 6000  # rows of a dense Jacobian that a CPU decomposes in minutes
CASES: dict[str, dict[str, Any]] = {
    "fc": {"k": 30, "images": 2, "name": "resmlp", "img_size": 8, "depth": 4, "width": 2048},
    "resnet18": {"k": 15, "images": 8, "name": "resnet18", "img_size": 32, "num_classes": 10},
    "vit": {"k": 30, "images": 2, "name": "vit_small", "img_size": 64, "patch_size": 8},
    "conv": {"k": 30, "images": 2, "name": "resconv", "img_size": 8, "depth": 2, "width": 512},
    "vit-b": {"k": 30, "images": 8, "name": "vit_base", "img_size": 224, "patch_size": 16},
}
SMALL: dict[str, dict[str, Any]] = {
    "fc, small": {"k": 30, "images": 2, "name": "resmlp", "img_size": 8, "depth": 4, "width": 256},
    "conv, small": {"k": 15, "images": 2, "name": "resconv", "img_size": 8, "depth": 2, "width": 16},
    "vit, small": {"k": 15, "images": 2, "name": "vit_nano", "img_size": 16, "patch_size": 8},
}


class Peak:
    """Memory that was taken beyond what was there, in GiB: of the device, or of this process by looking often."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.most, self.running = device, 0, True

    def __enter__(self) -> Peak:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self.before = torch.cuda.memory_allocated(self.device)
        else:
            self.before = self.most = resident()
            self.thread = threading.Thread(target=self._watch, daemon=True)
            self.thread.start()
        return self

    def _watch(self) -> None:
        while self.running:
            self.most = max(self.most, resident())
            time.sleep(0.005)

    def __exit__(self, *_: object) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self.most = torch.cuda.max_memory_allocated(self.device)
        else:
            self.running = False
            self.thread.join()
        self.gib = (self.most - self.before) / 2**30


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def dense_peer(f: Map, x: Tensor, k: int) -> Tensor:
    """Singular values (B, k) as anyone would compute them: the whole Jacobian of one image after the other."""
    found = []
    for one in x:
        rows = torch.func.jacrev(lambda z: f(z[None])[0].flatten(), chunk_size=256)(one).flatten(1)
        watch = threading.Timer(10, lambda: print(f"decomposing; so far {used(x):.2f} GiB", flush=True))
        watch.start()
        found.append(torch.linalg.svd(rows, full_matrices=False)[1][:k])
        watch.cancel()
    return torch.stack(found)


def used(x: Tensor) -> float:
    """GiB in use where x lies, at the peak on a GPU: known before a decomposition of many minutes ends."""
    return (torch.cuda.max_memory_allocated(x.device) if x.is_cuda else resident()) / 2**30


def fits(rows: int, columns: int, x: Tensor) -> bool:
    """Jacobian, factors and the decomposition's workspace."""
    need = 6 * rows * columns * x.element_size()
    if x.device.type == "cuda":
        return need < 0.8 * torch.cuda.mem_get_info(x.device)[0]
    return max(rows, columns) <= PATIENCE


def timed(run: Callable[[], Any], device: torch.device) -> tuple[float, float, Any]:
    """Seconds, GiB, result."""
    with Peak(device) as peak:
        start = time.perf_counter()
        with torch.no_grad(), exact():
            result = run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - start
    return seconds, peak.gib, result


def measure(
    title: str,
    case: dict[str, Any],
    device: torch.device,
    dtype: torch.dtype,
    budget: float,
    chosen: list[int] | None = None,
) -> dict[str, Any]:
    options = dict(case)
    k, images = options.pop("k"), options.pop("images")
    torch.manual_seed(0)
    model = residua.create_model(**options).to(device, dtype).eval().requires_grad_(False)
    size = model.img_size
    x = torch.randn(images, 3, *size, device=device, dtype=dtype)
    with torch.no_grad():
        blocks = [block_of(step) for step in stream(model, x)]
    blocks = blocks if chosen is None else [blocks[i] for i in chosen]
    row: dict[str, Any] = {"case": title, "blocks": len(blocks), "images": images, "k": k, "seconds": 0.0, "gib": 0.0}
    row |= {
        "methods": set(),
        "cpu_seconds": 0.0,
        "converged": 1.0,
        "largest": 0,
        "peer_seconds": 0.0,
        "peer_gib": 0.0,
        "deviation": 0.0,
    }
    for block in blocks:
        cpu = time.process_time()
        seconds, gib, svd = timed(lambda b=block: jacobian_svd(b.branch, b.x, k, budget=budget), device)
        cpu = time.process_time() - cpu
        rows, columns = svd.U[0, 0].numel(), svd.V[0, 0].numel()
        share = float(svd.converged.double().mean())
        error = float((svd.residual / svd.S[:, :1]).max())
        took = f"{svd.rounds} rounds, {seconds:.2f} s (CPU {cpu:.2f} s), {gib:.2f} GiB"
        right = f"{100 * share:.1f} % converged, largest residual {error:.1e}"
        print(f"{block.name}: {rows:,} x {columns:,}, {svd.method}, {took}; {right}", flush=True)
        row["seconds"] += seconds
        row["cpu_seconds"] += cpu
        row["gib"] = max(row["gib"], gib)
        row["methods"].add(svd.method)
        row["largest"] = max(row["largest"], rows, columns)
        row["converged"] = min(row["converged"], share)
        if row["peer_seconds"] is None or not fits(rows, columns, x):
            row["peer_seconds"] = None
            continue
        seconds, gib, values = timed(lambda b=block: dense_peer(b.branch, b.x, k), device)
        row["peer_seconds"] += seconds
        row["peer_gib"] = max(row["peer_gib"], gib)
        row["deviation"] = max(row["deviation"], float(((svd.S - values).abs() / values[:, :1]).max()))
    row["methods"] = " + ".join(sorted(row["methods"]))
    row["ratio"] = row["peer_seconds"] and row["peer_seconds"] / row["seconds"]
    print(json.dumps(row), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=["small", *CASES], default="small")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=["float64", "float32"], default="float32")
    parser.add_argument("--budget", type=float, default=2.0, help="GiB for products at once")
    parser.add_argument("--images", type=int, help="instead of the case's own number")
    parser.add_argument("--blocks", type=int, nargs="+", help="which of the blocks, from 0; default: all")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    args = parser.parse_args()
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    cases = SMALL if args.case == "small" else {args.case: CASES[args.case]}
    tiny = torch.randn(2, 4, device=device, dtype=dtype)
    for warm in (jacobian_svd, dense_peer):  # what only the first call pays
        warm(torch.tanh, tiny, 1)
    if args.images:
        cases = {title: case | {"images": args.images} for title, case in cases.items()}
    rows = [measure(title, case, device, dtype, args.budget, args.blocks) for title, case in cases.items()]
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    setting = f"{where}, {args.dtype}; {date.today()}"
    table = Table(title=setting, title_justify="left")
    for heading in ("case", "dimensions", "method", "s", "GiB", "jacrev + svd s", "GiB", "ratio", "deviation"):
        table.add_column(heading, justify="left" if heading in ("case", "method") else "right")
    for r in rows:
        peer = ("not run", "–", "–", "–")
        if r["peer_seconds"] is not None:
            peer = (f"{r['peer_seconds']:.2f}", f"{r['peer_gib']:.2f}", f"{r['ratio']:.2f}", f"{r['deviation']:.0e}")
        what = f"{r['case']}: {r['blocks']} blocks, {r['images']} images, top {r['k']}"
        table.add_row(what, f"{r['largest']:,}", r["methods"], f"{r['seconds']:.2f}", f"{r['gib']:.2f}", *peer)
    Console(width=150).print(table)
    if args.json:
        args.json.write_text(json.dumps({"setting": setting, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
