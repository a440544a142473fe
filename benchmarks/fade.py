"""What fading costs: a faded stock timm ViT-S against the plain one, forward and backward, eager and compiled.

    python benchmarks/fade.py                          # on CUDA: bf16 autocast, batch 128; else CPU, batch 2
    python benchmarks/fade.py --batch 8 --modes eager

Both are the same model with the same weights; rounds alternate between them, and the ratio is the median over rounds of
faded time / plain time of one round. Goal: below 1.03 compiled, below 1.05 eager.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext

import timm
import torch
from torch import Tensor, nn

import residua


def trainer(model: nn.Module, images: Tensor) -> Callable[[], None]:
    """One forward and backward pass."""
    device = images.device.type
    half = torch.autocast(device, torch.bfloat16) if device == "cuda" else nullcontext()

    def run() -> None:
        model.zero_grad(set_to_none=True)
        with half:
            loss = model(images).square().mean()
        loss.backward()

    return run


def seconds(run: Callable[[], None], steps: int, cuda: bool) -> float:
    if cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        run()
    if cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps


def compare(contestants: dict[str, Callable[[], None]], rounds: int, steps: int, cuda: bool) -> dict[str, float]:
    """Median time of each in milliseconds, and the median over rounds of faded / plain."""
    for run in contestants.values():
        seconds(run, 3, cuda)
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for i in range(rounds):
        for name in list(contestants)[:: 1 if i % 2 else -1]:
            times[name].append(seconds(contestants[name], steps, cuda))
    ratios = [f / p for f, p in zip(times["faded"], times["plain"], strict=True)]
    again = [f / p for f, p in zip(times["plain again"], times["plain"], strict=True)]
    found = {name: 1e3 * statistics.median(values) for name, values in times.items()}
    return found | {"ratio": statistics.median(ratios), "plain again / plain": statistics.median(again)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cuda = torch.cuda.is_available()
    parser.add_argument("--model", default="vit_small_patch16_224")
    parser.add_argument("--batch", type=int, default=128 if cuda else 2)
    parser.add_argument("--rounds", type=int, default=21 if cuda else 9)
    parser.add_argument("--steps", type=int, default=10 if cuda else 1, help="steps in a round")
    parser.add_argument("--modes", nargs="+", choices=["eager", "compiled"], default=["eager", "compiled"])
    args = parser.parse_args()

    device = torch.device("cuda" if cuda else "cpu")
    torch.manual_seed(0)
    plain = timm.create_model(args.model).to(device).train()
    faded = timm.create_model(args.model).to(device).train()
    faded.load_state_dict(plain.state_dict())
    residua.fade(faded, alpha_min=0.6)
    images = torch.randn(args.batch, *plain.pretrained_cfg["input_size"], device=device)
    where = torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} threads"
    print(f"{args.model}, batch {args.batch}, {where}, torch {torch.__version__}")
    for mode in args.modes:
        wrap = torch.compile if mode == "compiled" else lambda model: model
        runs = {"plain": trainer(wrap(plain), images), "faded": trainer(wrap(faded), images)}
        runs["plain again"] = runs["plain"]  # what a ratio of 1 looks like on this machine
        found = compare(runs, args.rounds, args.steps, cuda)
        print(json.dumps({"mode": mode} | {name: round(value, 4) for name, value in found.items()}))


if __name__ == "__main__":
    main()
