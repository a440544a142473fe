"""One training step of a U-ViT, ours against the original's structure, in one run; figures are ratios.

    python benchmarks/uvit_step.py --case uvit-s-32 --modes eager compiled recorded
    python benchmarks/uvit_step.py --case uvit-m-latent --modes eager compiled recorded
    python benchmarks/uvit_step.py --case uvit-s-32 --modes recorded --released U-ViT    # a checkout of baofff/U-ViT
    python benchmarks/uvit_step.py --case cpu

Peers, put together from timm's parts: `original` has the structure of the released U-ViT (queries, keys and values
cast to float32 before `scaled_dot_product_attention`, which autocast casts back; long skips concatenated; patches by
convolution), `timm blocks` is the same without those casts. Every contestant predicts noise with a mean squared error
and trains with fused AdamW, in bf16 under autocast on CUDA, on fixed random images, and keeps a moving average of its
weights by one fused operation. `--modes recorded` compiles, and replays the whole step, optimiser included, as one CUDA
graph, which is how our loop trains on one GPU. `--released` adds the released code itself, network and training step as
its authors run them: their noise, AdamW, rate schedule and moving average (needs einops and absl-py); and prints how
far our network is from theirs with the same weights.
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from timm.layers import PatchEmbed
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import residua
from residua.train.optim import Average
from residua.train.recorded import Recorded

CASES = {
    "uvit-s-32": dict(img_size=32, patch_size=2, in_chans=3, embed_dim=512, depth=12, num_heads=8, batch=128),
    "uvit-m-latent": dict(img_size=32, patch_size=2, in_chans=4, embed_dim=768, depth=16, num_heads=12, batch=256),
    "cpu": dict(img_size=16, patch_size=2, in_chans=3, embed_dim=96, depth=4, num_heads=3, batch=16),
}
H200_PEAK = 989e12  # dense bf16, datasheet


class FloatAttention(nn.Module):
    """Attention with its inputs cast to float32."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim)

    def forward(self, x: Tensor, **_: object) -> Tensor:
        b, n, d = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).float()
        return self.proj(F.scaled_dot_product_attention(*qkv).transpose(1, 2).reshape(b, n, d))


class PlainUViT(nn.Module):
    """The structure of the original U-ViT, from timm's parts."""

    def __init__(
        self, img_size: int, patch_size: int, in_chans: int, embed_dim: int, depth: int, num_heads: int, casts: bool
    ) -> None:
        super().__init__()

        def block() -> Block:
            made = Block(embed_dim, num_heads, 4.0, qkv_bias=False, norm_layer=nn.LayerNorm)
            if casts:
                made.attn = FloatAttention(embed_dim, num_heads)
            return made

        self.patch, self.dim = patch_size, embed_dim
        self.patch_embed = PatchEmbed(img_size, patch_size, in_chans, embed_dim)
        self.pos_embed = nn.Parameter(torch.randn(1, 1 + self.patch_embed.num_patches, embed_dim) * 0.02)
        self.first = nn.ModuleList(block() for _ in range(depth // 2))
        self.middle = block()
        self.last = nn.ModuleList(block() for _ in range(depth // 2))
        self.fuse = nn.ModuleList(nn.Linear(2 * embed_dim, embed_dim) for _ in range(depth // 2))
        self.norm = nn.LayerNorm(embed_dim)
        self.pred = nn.Linear(embed_dim, patch_size**2 * in_chans)
        self.conv = nn.Conv2d(in_chans, in_chans, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        b, c, height, width = x.shape
        w = torch.exp(-math.log(10000) * torch.arange(self.dim // 2, device=t.device) / (self.dim // 2))
        angles = t[:, None] * w
        time = torch.cat([angles.cos(), angles.sin()], dim=1)
        h = torch.cat([time[:, None], self.patch_embed(x)], dim=1) + self.pos_embed
        skips = []
        for block in self.first:
            h = block(h)
            skips.append(h)
        h = self.middle(h)
        for fuse, block in zip(self.fuse, self.last):
            h = block(fuse(torch.cat([h, skips.pop()], dim=-1)))
        h = self.pred(self.norm(h))[:, 1:]
        h = h.reshape(b, height // self.patch, width // self.patch, self.patch, self.patch, c)
        return self.conv(h.permute(0, 5, 1, 3, 2, 4).reshape(b, c, height, width))


def contestants(case: dict) -> dict[str, Callable[[], nn.Module]]:
    """Name -> a function that builds the model."""
    sizes = {key: value for key, value in case.items() if key != "batch"}
    return {
        "original": lambda: PlainUViT(**sizes, casts=True),
        "timm blocks": lambda: PlainUViT(**sizes, casts=False),
        "ours, alpha 1": lambda: residua.create_model("uvit", **sizes),
        "ours, alpha 0.7": lambda: residua.create_model("uvit", **sizes, alpha_min=0.7),
    }


def flops_per_step(case: dict) -> float:
    """Forward and backward matrix products of our model, attention included, counted on one image."""
    model = contestants(case)["ours, alpha 1"]()
    x = torch.randn(1, case["in_chans"], case["img_size"], case["img_size"])
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(x, torch.rand(1)).square().mean().backward()
    return counter.get_total_flops() * case["batch"]


def measure(build: Callable[[], nn.Module], case: dict, device: str, mode: str, rounds: int) -> tuple[float, float]:
    """Median seconds of a step, and peak memory in GiB."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = build().to(device).train()
    if mode != "eager":
        model.compile()
    average, recorded = Average(model, 0.9999), mode == "recorded"
    rate = torch.tensor(2e-4, device=device) if recorded else 2e-4
    optimizer = torch.optim.AdamW(
        model.parameters(), rate, betas=(0.99, 0.999), weight_decay=0.03, fused=True, capturable=recorded
    )
    shape = (case["batch"], case["in_chans"], case["img_size"], case["img_size"])
    x, noise = torch.randn(shape, device=device), torch.randn(shape, device=device)
    t = 999 * torch.rand(case["batch"], device=device)

    def step() -> tuple[Tensor, Tensor]:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            prediction = model(x, t)
        loss = F.mse_loss(prediction.float(), noise)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach(), loss.detach()

    replay = Recorded(step) if recorded else step

    def call() -> None:
        replay()
        average.update(100_000)

    return clock(call, device, rounds)


def released(folder: Path, case: dict, device: str) -> Callable[[], None]:
    """A training step of the released code."""
    sys.path.insert(0, str(folder))
    import sde  # type: ignore[import-not-found]
    import utils  # type: ignore[import-not-found]

    half = "bf16" if device == "cuda" else "no"
    accelerator = Accelerator(mixed_precision=half, cpu=device == "cpu")
    sizes = {key: value for key, value in case.items() if key != "batch"}
    state = utils.initialize_train_state(
        SimpleNamespace(
            nnet=dict(name="uvit", **sizes),
            optimizer=dict(name="adamw", lr=2e-4, weight_decay=0.03, betas=(0.99, 0.999)),
            lr_scheduler=dict(name="customized", warmup_steps=2500),
        ),
        accelerator.device,
    )
    network, _, optimizer = accelerator.prepare(state.nnet, state.nnet_ema, state.optimizer)
    score = sde.ScoreModel(network, pred="noise_pred", sde=sde.VPSDE())
    x = torch.randn(case["batch"], case["in_chans"], case["img_size"], case["img_size"], device=accelerator.device)
    ours, t = residua.create_model("uvit", **sizes), 999 * torch.rand(2)
    ours.load_state_dict(state.nnet.state_dict(), strict=False)
    with torch.no_grad():
        theirs = state.nnet_ema.cpu()(x[:2].cpu(), t)  # as state.nnet, not yet trained
        difference = (ours.eval()(x[:2].cpu(), t) - theirs).norm() / theirs.norm()
    state.nnet_ema.to(x.device)
    print(f"released code: with the same weights ours differs by {float(difference):.1e} of its output, on the CPU")

    def call() -> None:
        network.train()
        optimizer.zero_grad()
        loss = sde.LSimple(score, x, pred="noise_pred")
        accelerator.gather(loss.detach()).mean()
        accelerator.backward(loss.mean())
        optimizer.step()
        state.lr_scheduler.step()
        state.ema_update(0.9999)

    return call


def clock(call: Callable[[], None], device: str, rounds: int) -> tuple[float, float]:
    """Median seconds of a call, and peak memory in GiB."""
    for _ in range(5):
        call()
    sync = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(rounds):
        sync()
        start = time.perf_counter()
        call()
        sync()
        times.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else float("nan")
    return statistics.median(times), peak


def print_ratios(rows: list[dict]) -> None:
    """Ours at its best against each peer, and decay against none, mode by mode."""
    seconds = {(row["name"], row["mode"]): row["seconds"] for row in rows}
    ours = [value for (name, _), value in seconds.items() if name == "ours, alpha 0.7"]
    for (name, mode), value in seconds.items():
        if ours and not name.startswith("ours"):
            print(f"ours at its best against {name}, {mode}: {value / min(ours):.2f} x")
    for mode in dict.fromkeys(row["mode"] for row in rows):
        pair = [seconds.get((f"ours, alpha {alpha}", mode)) for alpha in ("0.7", "1")]
        if all(pair):
            print(f"alpha 0.7 / alpha 1, {mode}: {pair[0] / pair[1]:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, default="cpu")
    parser.add_argument("--modes", nargs="+", choices=["eager", "compiled", "recorded"], default=["eager", "compiled"])
    parser.add_argument("--only", nargs="+", help="names of contestants")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--released", type=Path, help="a checkout of the released U-ViT, to be measured too")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and "recorded" in args.modes:
        parser.error("--modes recorded needs a CUDA device")
    chip = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    case = CASES[args.case]
    work = flops_per_step(case)
    rows: list[dict] = []

    def report(name: str, mode: str, seconds: float, peak: float) -> None:
        mfu = 100 * work / seconds / H200_PEAK if "H200" in chip else float("nan")
        rows.append(dict(name=name, mode=mode, seconds=seconds, images_per_s=case["batch"] / seconds,
                         mfu=mfu, peak_gib=peak))  # fmt: skip
        print(f"{args.case:14} {name:16} {mode:10} {1e3 * seconds:8.2f} ms  {case['batch'] / seconds:10,.0f} img/s"
              f"  MFU {mfu:5.1f} %  {peak:6.2f} GiB", flush=True)  # fmt: skip

    if args.released:
        report("released code", "eager", *clock(released(args.released, case, device), device, args.rounds))
    for name, build in contestants(case).items():
        if args.only and name not in args.only:
            continue
        for mode in args.modes:
            report(name, mode, *measure(build, case, device, mode, args.rounds))
    print_ratios(rows)
    if args.json:
        args.json.write_text(json.dumps(dict(case=args.case, chip=chip, torch=torch.__version__, rows=rows), indent=1))


if __name__ == "__main__":
    main()
