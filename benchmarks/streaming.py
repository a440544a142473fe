"""Photographs from a folder to training: reading, decoding and loading, against torchvision's loader, in one run.

    python benchmarks/streaming.py
    python benchmarks/streaming.py --folder my_photos --workers 16

Without `--folder` it makes 4,000 different JPEGs of 300 to 700 px, 80 KB on average, from noise whose amplitude falls
with frequency as it does in photographs. Every arm reads the same images in the same order with as many workers, and
is timed from the start of its workers to its last batch; arms alternate, so that a drifting clock hits all. Features of
a ViT-Ti/16 (on a GPU ViT-B/16) are written by `embed`, beside its forward pass alone. On a machine with a GPU a masked
autoencoder (ViT-B/16) is trained as well, on streamed and on resident images.
"""

import argparse
import io
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms
from torchvision.transforms import InterpolationMode

from residua import create_model
from residua.data import Crops, Feed, Source, Splits, decode, load
from residua.evaluate.table import write_table
from residua.train import Pretrain, prepare

SIDE, BATCH = 224, 256


def make_photos(folder: Path, count: int) -> None:
    """`count` different JPEGs in ten classes: patches of fields of noise, mixed into colours that go together."""
    random = np.random.default_rng(0)
    frequency = np.hypot(np.fft.fftfreq(2048)[:, None], np.fft.rfftfreq(2048))
    frequency[0, 0] = 1
    fields = [
        np.fft.irfft2(np.fft.rfft2(random.standard_normal((2048, 2048))) / frequency**1.2).astype(np.float32)
        for _ in range(8)
    ]
    fields = [(field - field.mean()) / field.std() for field in fields]

    def one(i: int) -> None:
        chance = np.random.default_rng([1, i])
        width, height = sorted(chance.integers(300, 701, 2), reverse=chance.random() < 0.85)

        def patch() -> np.ndarray:
            top, left = chance.integers(0, 2048 - height), chance.integers(0, 2048 - width)
            return fields[chance.integers(8)][top : top + height, left : left + width]

        light, first, second = patch() + patch(), patch(), patch()
        colours = [light + first / 2, light - first / 5 + second / 10, light - second / 2]
        pixels = (np.stack(colours, 2) * 38 + 118).clip(0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"class-{i % 10}" / f"{i:06d}.jpg", quality=85)

    for k in range(10):
        (folder / f"class-{k}").mkdir(parents=True)
    with ThreadPoolExecutor() as pool:
        list(pool.map(one, range(count)))


class Each(Dataset[int]):
    """Does something with each image, in the workers, and hands over nothing."""

    def __init__(self, work: Callable[[int], object]) -> None:
        self.work = work

    def __getitem__(self, i: int) -> int:
        self.work(i)
        return i


class Pictures(Dataset[tuple[Tensor, int]]):
    """As torchvision's ImageFolder."""

    def __init__(self, source: Source, transform: Callable[[Image.Image], Tensor]) -> None:
        self.source, self.transform = source, transform

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        with open(self.source.encoded(i), "rb") as file:
            return self.transform(Image.open(file).convert("RGB")), i


def loader_rate(dataset: Dataset, order: Tensor, workers: int, batch: int = BATCH) -> float:
    """Images a second of torch's loader."""
    batches = [part.tolist() for part in order.split(batch)]
    start = time.perf_counter()
    for _ in DataLoader(dataset, batch_sampler=batches, num_workers=workers, worker_init_fn=one_thread):
        pass
    return len(order) / (time.perf_counter() - start)


def one_thread(_: int) -> None:
    torch.set_num_threads(1)


def feed_rate(source: Source, order: Tensor, workers: int) -> float:
    """Images a second of ours: training views of 224 px."""
    feed = Feed(source, "cpu", img_size=SIDE, resident=False, workers=workers, crops=Crops((SIDE, SIDE)))
    start = time.perf_counter()
    for _ in feed.iterate(order.split(BATCH)):
        pass
    rate = len(order) / (time.perf_counter() - start)
    feed.close()
    return rate


def by_pil(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def arms_of(source: Source, workers: int) -> dict[str, Callable[[Tensor], float]]:
    crop = [
        transforms.RandomResizedCrop(SIDE, scale=(0.2, 1.0), interpolation=InterpolationMode.BICUBIC),
        transforms.RandomHorizontalFlip(),
    ]
    normalize = [transforms.ToTensor(), transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]
    float_, uint8 = (transforms.Compose([*crop, *last]) for last in (normalize, [transforms.PILToTensor()]))

    def bytes_of(i: int) -> bytes:
        return source.encoded(i).read_bytes()

    def each(work: Callable[[int], object]) -> Callable[[Tensor], float]:
        return lambda order: loader_rate(Each(work), order, workers, batch=32)

    return {
        "reading bytes": each(bytes_of),
        "decoding by PIL": each(lambda i: by_pil(bytes_of(i))),
        "decoding": each(lambda i: decode.decode(bytes_of(i), "")),
        "decoding to the size kept": each(lambda i: source.read(i, SIDE)),
        "loading": lambda order: feed_rate(source, order, workers),
        "torchvision's loader": lambda order: loader_rate(Pictures(source, float_), order, workers),
        "torchvision's loader, uint8": lambda order: loader_rate(Pictures(source, uint8), order, workers),
    }


def training_rates(spec: str, workers: int, steps: int, rounds: int) -> dict[str, list[float]]:
    """Images a second of training ViT-B/16 on a GPU, by the way in which images come."""
    loops = {}
    for name, resident in (("training, streamed", False), ("training, resident", True)):
        config = Pretrain().override(
            data=spec, img_size=SIDE, patch_size=16, size="base", batch_size=BATCH, steps=1_000_000, dry_run=True,
            resident=resident, workers=workers,
        )  # fmt: skip
        loops[name] = prepare(config).loop()
    rates: dict[str, list[float]] = {name: [] for name in loops}
    for round_ in range(rounds + 1):
        for name, loop in loops.items():
            batches = loop.batches(loop.step, loop.step + steps)
            loop.advance(next(batches))
            torch.cuda.synchronize()
            start = time.perf_counter()
            for images in batches:
                loop.advance(images)
            torch.cuda.synchronize()
            if round_:  # the first compiles
                rates[name].append((steps - 1) * BATCH / (time.perf_counter() - start))
    return rates


def measuring_rates(source: Source, order: Tensor, rounds: int, made: Path) -> dict[str, list[float]]:
    """Images a second of `residua.embed`, and of the same network's forward pass on images that are there."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = {"embed_dim": 768, "num_heads": 12} if device.type == "cuda" else {"embed_dim": 192, "num_heads": 3}
    model = create_model("vit", img_size=SIDE, patch_size=16, depth=12, **size).to(device).eval()
    data, half = Splits("photos", source.subset(order.numpy())), device.type == "cuda"
    batch = torch.randn(BATCH, 3, SIDE, SIDE, device=device)
    rates: dict[str, list[float]] = {"embedding": [], "forward pass": []}
    for round_ in range(rounds + 1):
        start = time.perf_counter()
        write_table(model, data, made / "features.parquet", device=device, bf16=half)
        middle = time.perf_counter()
        with torch.inference_mode(), torch.autocast(device.type, torch.bfloat16, enabled=half):
            for k in range(0, len(order), BATCH):
                model.forward_features(batch[: len(order) - k]).float().mean(1).cpu()
        if round_:
            rates["embedding"].append(len(order) / (middle - start))
            rates["forward pass"].append(len(order) / (time.perf_counter() - middle))
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="images instead of those that are made")
    parser.add_argument("--made", type=int, default=4000)
    parser.add_argument("--images", type=int, default=2048, help="images an arm reads in a round")
    parser.add_argument("--embed", type=int, default=512, help="images that are embedded in a round")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200, help="steps of training in a round, on a GPU")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as made, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if args.folder is None:
            make_photos(Path(made) / "train", args.made)
        folder = args.folder or Path(made)
        source = load(f"folder:{folder}").train
        order = torch.randperm(len(source), generator=torch.Generator().manual_seed(0))[: args.images]
        source.read(0)  # imports the decoder, which workers then have
        rates: dict[str, list[float]] = {}
        for _ in range(args.rounds):
            for name, arm in arms_of(source, args.workers).items():
                rates.setdefault(name, []).append(arm(order))
        if torch.cuda.is_available():
            rates |= training_rates(f"folder:{folder}", args.workers, args.steps, args.rounds)
        rates |= measuring_rates(source, order[: args.embed], args.rounds, Path(made))
    typical = {name: statistics.median(values) for name, values in rates.items()}
    for name, rate in typical.items():
        spread = f"{min(rates[name]):,.0f} to {max(rates[name]):,.0f}"
        print(f"{name:30s} {rate:9,.0f} images/s ({spread})")
    ratios = [("loading", over) for over in typical if "decoding" in over or "loader" in over]
    ratios += [("training, streamed", "training, resident")] * ("training, resident" in typical)
    ratios += [("embedding", min("forward pass", "decoding", key=lambda name: typical[name]))]
    for what, over in ratios:
        each = [a / b for a, b in zip(rates[what], rates[over])]
        print(f"{what} / {over}: {statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f})")
    if args.json:
        args.json.write_text(json.dumps({"workers": args.workers, "rates": rates}, indent=1))


if __name__ == "__main__":
    main()
