"""Exact nearest neighbours against a plain `torch.topk(queries @ bank.T)`, in one run, as ratios.

    python benchmarks/knn.py             # 50,000 queries, 1,281,167 x 768 bank, on the GPU
    python benchmarks/knn.py --small     # 2,000 queries, 50,000 x 384 bank, on the CPU

Both sides compute in float32 (no TF32) and hold as many similarities at once. The plain side searches
`--plain-queries` of the queries, enough to know its rate; on those the found similarities are compared, and the
neighbours as well wherever two similarities do not tie. `knn` is the whole score: moving, normalising, checking,
searching and voting.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from residua.evaluate import knn
from residua.evaluate.featureset import full_precision
from residua.evaluate.knn import tile, top_similar

CLASSES = 1000


def make_features(n: int, dim: int, device: torch.device, seed: int) -> tuple[Tensor, Tensor]:
    """Overlapping Gaussian classes."""
    g = torch.Generator(device).manual_seed(99)
    means = torch.randn(CLASSES, dim, generator=g, device=device)
    g.manual_seed(seed)
    y = torch.randint(CLASSES, (n,), generator=g, device=device)
    return 0.2 * means[y] + torch.randn(n, dim, generator=g, device=device), y


@full_precision()
def plain(queries: Tensor, bank: Tensor, k: int, entries: int) -> tuple[Tensor, Tensor]:
    parts = [torch.topk(q @ bank.T, k) for q in queries.split(max(1, entries // len(bank)))]
    return torch.cat([p.values for p in parts]), torch.cat([p.indices for p in parts])


def ours(queries: Tensor, bank: Tensor, k: int) -> tuple[Tensor, Tensor]:
    rows, columns = tile(bank.device)
    parts = [top_similar(q, bank, k, columns) for q in queries.split(rows)]
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


def timed(run: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    result = run()
    wait()
    return time.perf_counter() - start, result


def compare(queries: Tensor, bank: Tensor, k: int, plain_queries: int) -> dict[str, Any]:
    rows, columns = tile(bank.device)
    few = queries[:plain_queries]
    ours(few[:64], bank, k), plain(few[:64], bank, k, rows * columns)  # warm up
    seconds, found = timed(lambda: ours(queries, bank, k), bank.device)
    plain_seconds, _ = timed(lambda: plain(few, bank, k, rows * columns), bank.device)
    plain_seconds *= len(queries) / len(few)
    value, index = (x[: len(few)] for x in found)
    expected, place = plain(few, bank, k + 1, rows * columns)
    # products of other shapes round otherwise, which may swap neighbours whose similarities nearly tie
    tied = expected.diff(dim=1).abs() < 1e-6
    tied = tied | F.pad(tied, (1, -1))
    row = {"k": k, "seconds": seconds, "plain_seconds": plain_seconds, "times_faster": plain_seconds / seconds}
    row["value_deviation"] = (value - expected[:, :k]).abs().max().item()
    row["neighbours_that_differ"] = int(((index != place[:, :k]) & ~tied).sum())
    print(json.dumps(row), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="2,000 queries, 50,000 x 384 bank, on the CPU")
    parser.add_argument("--k", type=int, nargs="+", default=[20, 200])
    parser.add_argument("--plain-queries", type=int, default=4096, help="queries that the plain side searches")
    parser.add_argument("--device", help="default: cuda, or cpu with --small")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    args = parser.parse_args()
    queries, n, dim = (2000, 50_000, 384) if args.small else (50_000, 1_281_167, 768)
    device = torch.device(args.device or ("cpu" if args.small else "cuda"))
    train, test = make_features(n, dim, device, 0), make_features(queries, dim, device, 1)
    unit_bank, unit_queries = F.normalize(train[0], dim=1), F.normalize(test[0], dim=1)
    rows = [compare(unit_queries, unit_bank, k, min(args.plain_queries, queries)) for k in args.k]
    del unit_bank, unit_queries

    whole, result = timed(lambda: knn(train, test, k=20, device=device), device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    setting = f"{queries:,} queries, {n:,} x {dim} bank; {name}; torch {torch.__version__}; {date.today()}"
    table = Table(title=setting, title_justify="left", caption=f"knn, k 20: {whole:.2f} s, {result.accuracy:.2f} %")
    for heading in ("k", "s", "plain s", "ratio", "value deviation", "neighbours that differ"):
        table.add_column(heading, justify="right")
    for r in rows:
        cells = (f"{r['seconds']:.2f}", f"{r['plain_seconds']:.2f}", f"{r['times_faster']:.2f}")
        table.add_row(str(r["k"]), *cells, f"{r['value_deviation']:.1e}", str(r["neighbours_that_differ"]))
    Console().print(table)
    if args.json:
        found = {"setting": setting, "rows": rows, "knn_seconds": whole, "knn_accuracy": result.accuracy}
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
