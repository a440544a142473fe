"""The whole training loop with real, device-resident images against the same loop on constant tensors, in one run.

    python benchmarks/loop.py --data parquet:tiny-imagenet-100 --batch-size 256 1024

The first crops, flips and masks every image of every batch; the second feeds the network the same tensors again and
again. Their ratio is what data and augmentation cost. Rounds alternate, so that a drifting clock hits both.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from torch import Tensor

from residua.data import Batch
from residua.train import Loop, Pretrain, prepare
from residua.train.machine import device_name


def constant(loop: Loop) -> None:
    """Let every step see the images and masks of the first."""
    batch = loop.feed.gather(*next(loop.batches(0, 1)))
    images, noise = loop.objective.view(batch, torch.zeros_like(batch.index))
    loop.objective = lambda model, batch, epochs: model(images, noise)[0]
    loop.feed = Still(batch)


class Still:
    """A feed of one batch."""

    resident = True
    cuts = False

    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    def gather(self, index: Tensor) -> Batch:
        return self.batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="shapes")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[64])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    for batch_size in args.batch_size:
        config = Pretrain().override(data=args.data, batch_size=batch_size, steps=1_000_000, dry_run=True)
        session = prepare(config)
        loops = {"real": session.loop(), "constant": session.loop()}
        loop = loops["real"]
        constant(loops["constant"])
        sync = torch.cuda.synchronize if loop.device.type == "cuda" else (lambda: None)
        seconds: dict[str, list[float]] = {"real": [], "constant": []}
        for round_ in range(args.rounds + 1):
            for name in seconds:
                loop = loops[name]
                sync()
                start = time.perf_counter()
                for images in loop.batches(loop.step, loop.step + args.steps):
                    loop.advance(images)
                sync()
                if round_:  # the first round compiles
                    seconds[name].append((time.perf_counter() - start) / args.steps)
        typical = {name: statistics.median(values) for name, values in seconds.items()}
        rate = batch_size / typical["real"]
        share = typical["constant"] / typical["real"]
        mfu = rate * session.settings.flops_per_image / loop.peak if loop.peak else float("nan")
        rows.append(dict(batch_size=batch_size, images_per_s=rate, share_of_constant=share, mfu=mfu))
        print(f"{device_name(loop.device)}, {args.data}, batch {batch_size}: {rate:,.0f} img/s, {100 * share:.1f} % of "
              f"the loop on constant tensors, MFU {100 * mfu:.1f} %", flush=True)  # fmt: skip
        session.feed.close()
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
