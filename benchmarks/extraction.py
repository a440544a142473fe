"""Extraction of features against the bare forward pass, in one run, as a ratio.

    python benchmarks/extraction.py                         # ViT-S/8, 64 px; 40,000 images on CUDA, 512 on a CPU
    python benchmarks/extraction.py --model vit_base --img-size 224 --patch-size 16 --images 8000 --bf16
    python benchmarks/extraction.py --layers all --readout tokens cls patches --cache

Bare: `encoder.forward_features` on normalised images that lie on the device, nothing kept. Prepared: the same with the
views made from uint8 first, which any evaluation has to do. Read: what `extract` does with a feed that is open: views,
forward pass, pooling, copies to the host. Extract: the whole call, which also hashes and loads the images and, with
--cache, writes files. The goal is that reading takes at most 1.10 times the bare pass on a GPU.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import date
from pathlib import Path

import numpy as np
import torch

from residua.data import Batch, Splits
from residua.data.arrays import ArraySource
from residua.evaluate import extract
from residua.evaluate.features import check_readout, preprocessing_of
from residua.evaluate.reading import EncoderReader, View, collect_all, open_feed, resolve_layers
from residua.nn import create_model


def timed(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Seconds of the quickest of several runs, after one to warm up."""
    seconds = []
    for _ in range(1 + repeats):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cuda = torch.cuda.is_available()
    parser.add_argument("--model", default="vit_small" if cuda else "vit_nano")
    parser.add_argument("--img-size", type=int, default=64 if cuda else 32)
    parser.add_argument("--patch-size", type=int, default=8)
    parser.add_argument("--images", type=int, default=40_000 if cuda else 512)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--views", type=int, default=0)
    parser.add_argument("--layers", default="last", choices=("last", "all"))
    parser.add_argument("--readout", nargs="+", default=["tokens"])
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--cache", action="store_true", help="write features to disk as well")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    args = parser.parse_args()

    device, size = torch.device(args.device), args.img_size
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (args.images, size, size, 3), dtype=np.uint8)
    data = Splits("random", ArraySource("random", "train", pixels, labels=np.arange(args.images) % 10, classes=None))
    torch.manual_seed(0)
    model = create_model(args.model, img_size=size, patch_size=args.patch_size).to(device).eval()
    view = View(preprocessing_of(model, data.train), args.batch_size, args.views, bf16=args.bf16)
    canvas = torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous().to(device)
    numbers = torch.arange(args.images, device=device).split(args.batch_size)
    sizes = torch.tensor([[size, size]], device=device)

    def batch(index: torch.Tensor) -> Batch:
        return Batch(canvas[index], sizes.expand(len(index), 2), index)

    @torch.inference_mode()
    def forward(prepared: bool) -> None:
        ready = view.center(batch(numbers[0]))
        cast = torch.autocast(device.type, torch.bfloat16) if args.bf16 else nullcontext()
        for index in numbers:
            for v in range(1 + args.views):
                images = ready[: len(index)]
                if prepared:
                    images = view.center(batch(index)) if v == 0 else view.random(batch(index), v - 1)
                with cast:
                    model.forward_features(images)

    readouts = tuple(check_readout(name) for name in args.readout)
    reader = EncoderReader(model, resolve_layers(args.layers, model.depth), readouts)
    feed = open_feed(data.train, device, view)

    def whole() -> None:
        folder = tempfile.mkdtemp() if args.cache else None
        try:
            extract(
                model, data, layers=args.layers, readout=readouts, batch_size=args.batch_size, views=args.views,
                bf16=args.bf16, cache=folder,
            )  # fmt: skip
        finally:
            if folder:
                shutil.rmtree(folder)

    seconds = {
        "bare": timed(lambda: forward(False), device, args.repeats),
        "prepared": timed(lambda: forward(True), device, args.repeats),
        "read": timed(lambda: collect_all(feed, reader, view), device, args.repeats),
        "extract": timed(whole, device, args.repeats),
    }
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    setting = f"{args.model}, {size} px, patch {args.patch_size}, {args.images:,} images, batch {args.batch_size}, "
    setting += (
        f"{'bf16' if args.bf16 else 'float32'}, layers {args.layers}, {' '.join(args.readout)}, {args.views} views"
    )
    setting += f"{', cache' if args.cache else ''}; {name}, torch {torch.__version__}; {date.today()}"
    found = {
        "setting": setting,
        "seconds": seconds,
        "images_per_s": {k: args.images * (1 + args.views) / s for k, s in seconds.items()},
        "read_to_bare": seconds["read"] / seconds["bare"],
        "read_to_prepared": seconds["read"] / seconds["prepared"],
        "extract_to_bare": seconds["extract"] / seconds["bare"],
    }
    print(json.dumps(found, indent=2))
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
