"""kNN and linear probe on the CPU against scikit-learn, in one run, as ratios.

    python benchmarks/evaluation.py            # 50,000 x 384 features, 200 classes, 10,000 test images
    python benchmarks/evaluation.py --small    # a quick look

Features are Gaussian classes that differ in 32 leading directions; variance falls along the others. Both sides
see the same standardised float32 features; as probes, both minimise scikit-learn's default objective
(C = 1). Choosing among penalties, and the protocols with AdamW, have no counterpart: they are timed alone.
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
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor

from residua.evaluate import knn, linear_probe

Pair = tuple[Tensor, Tensor]
TEMPERATURE = 0.07


def make_features(n: int, n_test: int, dim: int, classes: int, seed: int = 0) -> tuple[Pair, Pair]:
    """Overlapping classes; standardised with the training part's statistics."""
    g = torch.Generator().manual_seed(seed)
    rotation = torch.linalg.qr(torch.randn(dim, dim, generator=g)).Q
    mixing = torch.arange(1, dim + 1)[:, None] ** -0.5 * rotation
    means = 0.7 * torch.randn(classes, dim, generator=g) * (torch.arange(dim) < 32)
    y = torch.randint(classes, (n + n_test,), generator=g)
    x = (means[y] + torch.randn(n + n_test, dim, generator=g)) @ mixing
    x = (x - x[:n].mean(0)) / x[:n].std(0)
    return (x[:n], y[:n]), (x[n:], y[n:])


def timed(run: Callable[[], float]) -> tuple[float, float]:
    """(seconds, result)."""
    start = time.perf_counter()
    result = run()
    return time.perf_counter() - start, result


def weigh(distance: np.ndarray) -> np.ndarray:
    return np.exp((1 - distance) / TEMPERATURE)


def sklearn_knn(train: Pair, test: Pair) -> float:
    model = KNeighborsClassifier(20, metric="cosine", algorithm="brute", weights=weigh, n_jobs=-1)
    model.fit(train[0].numpy(), train[1].numpy())
    return 100 * float(model.score(test[0].numpy(), test[1].numpy()))


def sklearn_probe(train: Pair, test: Pair) -> float:
    model = LogisticRegression(max_iter=1000).fit(train[0].numpy(), train[1].numpy())
    return 100 * float(model.score(test[0].numpy(), test[1].numpy()))


def compare(name: str, ours: Callable[[], float], theirs: Callable[[], float] | None) -> dict[str, Any]:
    seconds, accuracy = timed(ours)
    row: dict[str, Any] = {"what": name, "seconds": seconds, "accuracy": accuracy}
    if theirs is not None:
        row["sklearn_seconds"], row["sklearn_accuracy"] = timed(theirs)
        row["times_faster"] = row["sklearn_seconds"] / seconds
    print(json.dumps(row), flush=True)
    return row


def show(rows: list[dict[str, Any]], setting: str) -> None:
    table = Table(title=setting, title_justify="left")
    for heading in ("", "s", "sklearn s", "ratio", "%", "sklearn %"):
        table.add_column(heading, justify="right" if heading else "left")
    for row in rows:
        keys = ("seconds", "sklearn_seconds", "times_faster", "accuracy", "sklearn_accuracy")
        table.add_row(row["what"], *(f"{row[k]:.1f}" if k in row else "-" for k in keys))
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="5,000 x 128 features, 20 classes")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    args = parser.parse_args()
    n, n_test, dim, classes = (5000, 2000, 128, 20) if args.small else (50_000, 10_000, 384, 200)
    train, test = make_features(n, n_test, dim, classes)
    knn((train[0][:500], train[1][:500]), test)  # warm up

    def probe(**options: Any) -> float:
        return linear_probe(train, test, **options).accuracy

    rows = [
        compare("kNN, k 20", lambda: knn(train, test).accuracy, lambda: sklearn_knn(train, test)),
        compare(
            "probe, lbfgs, C = 1",
            lambda: probe(protocol="lbfgs", weight_decays=(1 / n,)),
            lambda: sklearn_probe(train, test),
        ),
        compare("probe, lbfgs, best of 4", lambda: probe(protocol="lbfgs"), None),
        compare("probe, simple, lr 1e-2", lambda: probe(learning_rates=(1e-2,)), None),
        compare("probe, simple, best of 2", probe, None),
    ]
    cpu = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    setting = f"{n:,} x {dim} features, {classes} classes, {n_test:,} test; {cpu}; {date.today()}"
    show(rows, setting)
    if args.json:
        args.json.write_text(json.dumps({"setting": setting, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
