"""How long probe grids take, and what half precision costs in accuracy.

    python benchmarks/probe.py                  # both goals on a GPU
    python benchmarks/probe.py --case grid      # 12 layers x 8 learning rates, 100,000 x 384, 200 classes, 100 epochs
    python benchmarks/probe.py --case imagenet  # 8 learning rates, 1.28 M x 768 x 4 views, 1,000 classes, 200 epochs
    python benchmarks/probe.py --small          # a hundredth of it, on a CPU too

Goals on an H200: 30 s and 60 s, selection on held-out images and the final training included. Features are random with
overlapping classes; they lie on the device as float32 (grid) or float16 (imagenet) before the clock starts. The second
figure is float32 against half precision, one learning rate, a tenth of the epochs: seconds and accuracy.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from residua.evaluate import FeatureSet, linear_probe

RATES = (3e-4, 1e-3, 2e-3, 3e-3, 5e-3, 1e-2, 2e-2, 3e-2)


@dataclass(frozen=True)
class Case:
    layers: int
    n: int
    dim: int
    classes: int
    epochs: int
    protocol: str
    batch_size: int
    views: int
    goal: float


CASES = {
    "grid": Case(12, 100_000, 384, 200, 100, "simple", 1024, 0, 30),
    "imagenet": Case(1, 1_281_167, 768, 1000, 200, "cached", 5120, 3, 60),
}


def features(case: Case, n: int, device: torch.device, seed: int, views: int = 0) -> FeatureSet:
    """Gaussian classes around the same means whatever the seed; each layer and view with noise of its own."""
    means = 0.15 * torch.randn(case.classes, case.dim, generator=torch.Generator().manual_seed(0)).to(device)
    g = torch.Generator(device).manual_seed(seed)
    y = torch.randint(case.classes, (n,), generator=g, device=device)
    dtype = torch.float16 if views else torch.float32

    def draw() -> Tensor:
        parts = [means[part] + torch.randn(len(part), case.dim, generator=g, device=device) for part in y.split(2**16)]
        return torch.cat([part.to(dtype) for part in parts])

    x = {i: draw() for i in range(case.layers)}
    more = {i: torch.stack([draw() for _ in range(views)]) for i in x} if views else {}
    return FeatureSet(x, y, views=more)


def run(case: Case, device: torch.device, **options: Any) -> dict[str, Any]:
    train = features(case, case.n, device, 1, case.views)
    test = features(case, max(1000, case.n // 25), device, 2)
    settings: dict[str, Any] = {"learning_rates": RATES, "epochs": case.epochs, "batch_size": case.batch_size} | options
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    result = linear_probe(train, test, protocol=case.protocol, **settings)  # type: ignore[arg-type]
    seconds = time.perf_counter() - start
    found: dict[str, Any] = {"seconds": seconds, "accuracy": result.accuracy, "precision": result.precision}
    if device.type == "cuda":
        found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", choices=tuple(CASES), default=list(CASES))
    parser.add_argument(
        "--small", action="store_true", help="a hundredth of the images, a tenth of the classes, 5 epochs"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    args = parser.parse_args()
    device = torch.device(args.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    rows: dict[str, Any] = {"setting": f"{name}, torch {torch.__version__}; {date.today()}", "small": args.small}
    warm = replace(CASES["grid"], layers=1, n=2000, dim=64, classes=10, epochs=5)
    run(warm, device, precision="half" if device.type == "cuda" else "auto")  # compiles the kernels
    for label in args.case:
        case = CASES[label]
        if args.small:
            batch = case.batch_size // 10
            case = replace(case, n=case.n // 100, classes=case.classes // 10, epochs=5, batch_size=batch)
        row = run(case, device)
        row["goal_seconds"] = None if args.small else case.goal
        short = replace(case, layers=1, epochs=max(1, case.epochs // 10))
        for precision in ("float32", "half"):
            if device.type == "cuda" or precision == "float32":
                row[precision] = run(short, device, learning_rates=(3e-3,), precision=precision)
        rows[label] = row
        print(json.dumps({label: row}), flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
