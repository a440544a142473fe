"""Images decoded once (`--cache-images`): what it costs in pixels and in time, and how fast it is read after that.

    python benchmarks/store.py
    python benchmarks/store.py --folder my_photos --workers 16

Without `--folder` it makes the photographs of `streaming.py`. PSNR is of training views of 224 px that are cut from
stored images, against the same views cut from the images as training keeps them without a store: once with the same
part of the image in both, which is what the pixels lose, and once as training cuts them, with boxes in whole pixels of
either image. Loading alternates between files and stores, each timed from the start of its workers to its last batch.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from streaming import BATCH, SIDE, feed_rate, make_photos
from torch import Tensor

from residua.data import Batch, Crops, Source, decode, load, store
from residua.data.augment import resample


def psnr(one: Tensor, other: Tensor) -> float:
    """In dB, of values in [0, 1]."""
    return float(-10 * torch.log10((one.double() - other.double()).square().mean().clamp(min=1e-10)))


def quality(source: Source, numbers: list[int], side: int) -> dict[str, list[float]]:
    """PSNR of a training view of each image, stored at this side."""
    crops, shape = Crops((SIDE, SIDE)), (SIDE, SIDE)
    found: dict[str, list[float]] = {"same part": [], "as cut": []}
    for i in numbers:
        index = torch.tensor([i])
        kept = decode.shrink(source.read(i, SIDE), SIDE)
        short = decode.shrink(store._read(source, i, side), SIDE)
        full, small = (torch.tensor(image).permute(2, 0, 1) for image in (kept, short))
        sizes, less = (torch.tensor([image.shape[1:]]) for image in (full, small))
        box = crops.boxes(index, 0, sizes)
        mirrored = crops.mirrored(index, 0)
        scaled = box * (less / sizes).repeat(1, 2)
        views = (resample(x[None], part, shape, mirrored) for x, part in ((full, box), (small, scaled)))
        found["same part"].append(psnr(*views))
        cut = (crops(Batch(x[None], size, index), 0) for x, size in ((full, sizes), (small, less)))
        found["as cut"].append(psnr(*cut))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="images instead of those that are made")
    parser.add_argument("--place", type=Path, help="where the stores are made, for as long as this runs")
    parser.add_argument("--made", type=int, default=4000)
    parser.add_argument("--images", type=int, default=2048, help="images that are loaded in a round")
    parser.add_argument("--views", type=int, default=500, help="views that PSNR is of")
    parser.add_argument("--sides", type=int, nargs="+", default=[224, 256, 288, 320, 384])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.place) as made:
        if args.folder is None:
            make_photos(Path(made) / "photos", args.made)
        source = load(f"folder:{args.folder or Path(made) / 'photos'}").train
        order = torch.randperm(len(source), generator=torch.Generator().manual_seed(0))
        found: dict[str, object] = {"images": len(source), "workers": args.workers}
        for side in args.sides:
            values = quality(source, order[: args.views].tolist(), side)
            psnr_of = {name: (statistics.mean(v), float(np.quantile(v, 0.05))) for name, v in values.items()}
            text = ", ".join(f"{name} {mean:.1f} dB (5 % below {low:.1f})" for name, (mean, low) in psnr_of.items())
            print(f"side {side}: {text}; {store.estimate(source, side) / len(source) / 1e3:,.0f} kB an image")
            found[f"psnr at {side}"] = psnr_of
        times = found["seconds"] = {}
        start = time.perf_counter()
        kept = store.stored(source, made)
        times["building"] = time.perf_counter() - start
        start = time.perf_counter()
        store.stored(source, made)
        times["opening"] = time.perf_counter() - start
        (known,) = store.stores_in(Path(made))
        start = time.perf_counter()
        store.verify(known)
        times["verifying"] = time.perf_counter() - start
        print(f"building {len(source) / times['building']:,.0f} images/s, opening {1e3 * times['opening']:.1f} ms")
        print(f"verifying {known.bytes / times['verifying'] / 1e9:.2f} GB/s, {len(source):,} images")
        order, rates = order[: args.images], {"files": [], "store": []}
        for _ in range(args.rounds):
            for name, images in (("files", source), ("store", kept)):
                rates[name].append(feed_rate(images, order, args.workers))
        for name, values in rates.items():
            spread = f"{min(values):,.0f} to {max(values):,.0f}"
            print(f"loading from {name}: {statistics.median(values):,.0f} images/s ({spread})")
        ratio = statistics.median(b / a for a, b in zip(*rates.values()))
        print(f"store / files: {ratio:.2f}; batches of {BATCH}, {args.workers} workers")
        found["rates"] = rates
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
