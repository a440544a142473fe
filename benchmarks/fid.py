"""FID of images against the bare forward pass of its network over as many, in one run, as a ratio.

    python benchmarks/fid.py --data cifar100                     # 50,000 samples, on the GPU
    python benchmarks/fid.py --count 200 --batch-size 50         # on the CPU

Both sides run the same Inception in float32 proper. The bare pass sees one batch over and over, already on the
device. The score decodes the images, carries them to the device, extracts, sums, and takes the roots; statistics of
the reference come from the cache, as they do from the second score on. Without `--weights` the network is random:
as quick, and no FID.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch

from residua.evaluate.extractor import Extractor, inception_extractor
from residua.evaluate.fid import exact_float32
from residua.evaluate.generative import score
from residua.evaluate.inception import Inception


def timed(run: Callable[[], object], device: torch.device) -> float:
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def bare(net: Extractor, images: torch.Tensor, count: int) -> None:
    with torch.inference_mode(), exact_float32():
        for _ in range(0, count, len(images)):
            net.module(images)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", default="shapes?n=50000&size=32&test=1000", help="images, as samples and as reference"
    )
    parser.add_argument("--count", type=int, help="so many of them; default: all")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--weights", help="Inception's; default: random")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    args = parser.parse_args()
    device = torch.device(args.device)
    net = inception_extractor(args.weights) if args.weights else Extractor("Inception, random", Inception().eval())
    net.module.to(device)

    with tempfile.TemporaryDirectory() as cache:
        options = {
            "extractor": net,
            "batch_size": args.batch_size,
            "device": device,
            "cache": cache,
            "limit": args.count,
        }
        first = score(args.data, args.data, **options, reference_limit=min(args.count or 500, 500))
        count = first.samples["images"]
        seconds = timed(lambda: score(args.data, args.data, **options, reference_limit=min(count, 500)), device)
    height, width = first.samples["size"]
    images = torch.randint(0, 256, (args.batch_size, 3, height, width), dtype=torch.uint8, device=device)
    bare(net, images, args.batch_size)
    forward = timed(lambda: bare(net, images, count), device)

    where = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    row = {
        "images": count, "size": [height, width], "batch_size": args.batch_size, "device": where,
        "torch": torch.__version__, "date": str(date.today()), "score_seconds": round(seconds, 2),
        "forward_seconds": round(forward, 2), "ratio": round(seconds / forward, 3),
        "images_per_second": round(count / seconds, 1),
    }  # fmt: skip
    print(json.dumps(row))
    if args.json:
        args.json.write_text(json.dumps(row, indent=2) + "\n")


if __name__ == "__main__":
    main()
