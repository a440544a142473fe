"""Ranks of 10,000 x 768 features on the CPU against `np.linalg.svd`, in one run, as ratios.

    python benchmarks/rank.py            # 10,000 x 768
    python benchmarks/rank.py --small    # 2,000 x 128

Each row does from float32 features what a user would have to do without it: `np.linalg.svd` of the centred
features in float64, then the formula. The deviation is that of the two results.
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

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from residua.evaluate import entropy_rank, rankme
from residua.evaluate.rank import ranks


def make_features(n: int, dim: int, seed: int = 0) -> Tensor:
    """Gaussian features whose covariance has eigenvalues `1 / j`, rotated, with an offset; float32."""
    g = torch.Generator().manual_seed(seed)
    rotation = torch.linalg.qr(torch.randn(dim, dim, generator=g)).Q
    x = torch.randn(n, dim, generator=g) * torch.arange(1, dim + 1) ** -0.5
    return x @ rotation + 0.1 * torch.randn(dim, generator=g)


def svd_entropy_rank(x: np.ndarray) -> float:
    s = np.linalg.svd(x - x.mean(0), compute_uv=False)
    p = s**2 / np.sum(s**2)
    return float(-np.sum(p * np.log(p)))


def svd_rankme(x: np.ndarray) -> float:
    s = np.linalg.svd(x, compute_uv=False)
    p = s / s.sum() + 1e-7
    return float(np.exp(-np.sum(p * np.log(p))))


def best(run: Callable[[], float], repeats: int) -> tuple[float, float]:
    """(least seconds, result)."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        result = run()
        seconds.append(time.perf_counter() - start)
    return min(seconds), result


def compare(what: str, ours: Callable[[], float], theirs: Callable[[], float], repeats: int) -> dict[str, Any]:
    seconds, value = best(ours, repeats)
    reference_seconds, reference = best(theirs, repeats)
    row = {"what": what, "seconds": seconds, "svd_seconds": reference_seconds, "deviation": abs(value - reference)}
    row["times_faster"] = reference_seconds / seconds
    print(json.dumps(row), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="2,000 x 128 features")
    parser.add_argument("--repeats", type=int, default=3, help="the least time counts")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    args = parser.parse_args()
    n, dim = (2000, 128) if args.small else (10_000, 768)
    x = make_features(n, dim)

    def both(y: np.ndarray) -> float:
        return svd_entropy_rank(y) + svd_rankme(y)

    def five() -> float:
        found = ranks(x)
        return found["entropy rank"] + found["RankMe"]

    rows = [
        compare("entropy rank", lambda: entropy_rank(x), lambda: svd_entropy_rank(x.double().numpy()), args.repeats),
        compare("RankMe", lambda: rankme(x), lambda: svd_rankme(x.double().numpy()), args.repeats),
        compare("all five, against two", five, lambda: both(x.double().numpy()), args.repeats),
    ]
    cpu = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    setting = f"{n:,} x {dim} features; {cpu}; {date.today()}"
    table = Table(title=setting, title_justify="left")
    for heading in ("", "s", "np.linalg.svd s", "ratio", "deviation"):
        table.add_column(heading, justify="right" if heading else "left")
    for r in rows:
        cells = (f"{r['seconds']:.3f}", f"{r['svd_seconds']:.3f}", f"{r['times_faster']:.2f}", f"{r['deviation']:.1e}")
        table.add_row(r["what"], *cells)
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps({"setting": setting, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
