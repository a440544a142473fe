"""One training step of a ResNet-18 on small images, ours against torchvision's with the same stem, in one run.

    python benchmarks/resnet_step.py                            # on CUDA: bf16, batch 512; else float32, batch 64
    python benchmarks/resnet_step.py --width 16 --batch 128     # narrow, as in docs/results.md
    python benchmarks/resnet_step.py --precision bf16

All train with fused AdamW on fixed random images of 32 px and ten classes. Rounds alternate between them; a ratio is
the median over rounds of torchvision's time over that of the other. On a CPU ours get images whose channels come last
in memory, as our training shows them; `torchvision, channels last` is the same network after
`.to(memory_format=torch.channels_last)`, which its users have to know of.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torchvision
from torch import Tensor, nn

import residua


def theirs(width: int, channels_last: bool) -> nn.Module:
    """torchvision's ResNet-18, with a first convolution that keeps the size of small images."""
    model = torchvision.models.ResNet(torchvision.models.resnet.BasicBlock, [2, 2, 2, 2], num_classes=10)
    if width != 64:  # its class has no such option: every layer anew
        narrow(model, width / 64)
    model.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model.to(memory_format=torch.channels_last) if channels_last else model


def narrow(model: nn.Module, share: float) -> None:
    """Every convolution, norm and the head with this share of their channels."""
    for name, layer in list(model.named_modules()):
        parent = model.get_submodule(name.rpartition(".")[0])
        last = name.rpartition(".")[2]
        if isinstance(layer, nn.Conv2d):
            channels = int(layer.in_channels * share) or 3, int(layer.out_channels * share)
            new: nn.Module = nn.Conv2d(*channels, layer.kernel_size, layer.stride, layer.padding, bias=False)
        elif isinstance(layer, nn.BatchNorm2d):
            new = nn.BatchNorm2d(int(layer.num_features * share))
        elif isinstance(layer, nn.Linear):
            new = nn.Linear(int(layer.in_features * share), layer.out_features)
        else:
            continue
        setattr(parent, last, new)


def trainer(model: nn.Module, images: Tensor, labels: Tensor, half: bool) -> Callable[[], None]:
    model.to(images.device).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)

    def step() -> None:
        with torch.autocast(images.device.type, torch.bfloat16, enabled=half):
            loss = nn.functional.cross_entropy(model(images).float(), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def seconds(step: Callable[[], None], steps: int, cuda: bool) -> float:
    if cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    if cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps


def main() -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--batch", type=int, default=512 if cuda else 64)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="bf16" if cuda else "fp32")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=20 if cuda else 2, help="of each round")
    args = parser.parse_args()

    device = "cuda" if cuda else "cpu"
    images = torch.randn(args.batch, 3, 32, 32, device=device)
    labels = torch.randint(0, 10, (args.batch,), device=device)
    ours = lambda alpha: residua.create_model(  # noqa: E731
        "resnet18", img_size=32, num_classes=10, width=args.width, alpha_min=alpha
    )
    models = {
        "torchvision": theirs(args.width, channels_last=False),
        "torchvision, channels last": theirs(args.width, channels_last=True),
        "ours, alpha 1": ours(1.0),
        "ours, alpha 0.7": ours(0.7),
    }
    counts = {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()}
    assert len(set(counts.values())) == 1, counts
    last = images.contiguous(memory_format=torch.channels_last)
    runs = {
        name: trainer(model, last if name.startswith("ours") and not cuda else images, labels, args.precision == "bf16")
        for name, model in models.items()
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        seconds(run, 2, cuda)
    for i in range(args.rounds):
        for name in list(runs)[:: 1 if i % 2 else -1]:
            times[name].append(seconds(runs[name], args.steps, cuda))
    print(f"{device}, {torch.get_num_threads()} threads, width {args.width}, batch {args.batch}, {args.precision}")
    for name, own in times.items():
        ratio = statistics.median(a / b for a, b in zip(times["torchvision"], own, strict=True))
        print(f"{name:28} {args.batch / statistics.median(own):8.0f} images/s  {ratio:.2f} x")


if __name__ == "__main__":
    main()
