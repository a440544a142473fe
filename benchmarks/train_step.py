"""One masked-autoencoder training step, ours against two peers with the same sizes, in one run.

    python benchmarks/train_step.py --case vit-s-64     # H200: ViT-S/8 at 64 px, batch 1024, bf16
    python benchmarks/train_step.py --case vit-b-224    # H200: ViT-B/16 at 224 px, batch 256, bf16
    python benchmarks/train_step.py --case cpu          # a tiny one, float32

Peers: `transformers` ViTMAE (SDPA), and a masked autoencoder put together from timm's blocks in the structure of
the original implementation (all patches embedded by a convolution, then gathered; decoder input restored by
concatenation and gather). Every contestant trains with fused AdamW, bf16 under autocast on CUDA, eager and compiled,
on fixed random images. `--modes recorded` compiles, and replays the whole step, optimiser included, as one CUDA graph,
which is how our loop trains on one GPU; ratios are given against peers with and without that. `ours, U-shaped` is the
paper's model, which does more work; it has no peer.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import residua
from residua.train.recorded import Recorded

CASES = {
    "vit-s-64": dict(img_size=64, patch_size=8, embed_dim=384, depth=12, num_heads=6, dec=(256, 8, 8), batch=1024),
    "vit-b-224": dict(img_size=224, patch_size=16, embed_dim=768, depth=12, num_heads=12, dec=(512, 8, 16), batch=256),
    "cpu": dict(img_size=32, patch_size=4, embed_dim=96, depth=4, num_heads=3, dec=(64, 2, 2), batch=64),
}
H200_PEAK = 989e12  # dense bf16, datasheet


class TimmMAE(nn.Module):
    """The structure of the original masked autoencoder, from timm's parts."""

    def __init__(self, img_size: int, patch_size: int, embed_dim: int, depth: int, num_heads: int, dec: tuple) -> None:
        super().__init__()
        from timm.layers import PatchEmbed
        from timm.models.vision_transformer import Block

        width, decoder_depth, heads = dec
        norm = partial(nn.LayerNorm, eps=1e-6)
        self.patch_embed = PatchEmbed(img_size, patch_size, 3, embed_dim)
        n = self.patch_embed.num_patches
        self.patch = patch_size
        self.cls_token = nn.Parameter(torch.randn(1, 1, embed_dim) * 0.02)
        self.pos_embed = nn.Parameter(torch.randn(1, n + 1, embed_dim) * 0.02, requires_grad=False)
        block = lambda d, h: Block(d, h, 4.0, qkv_bias=True, norm_layer=norm)  # noqa: E731
        self.blocks = nn.ModuleList(block(embed_dim, num_heads) for _ in range(depth))
        self.norm = norm(embed_dim)
        self.decoder_embed = nn.Linear(embed_dim, width)
        self.mask_token = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.decoder_pos = nn.Parameter(torch.randn(1, n + 1, width) * 0.02, requires_grad=False)
        self.decoder_blocks = nn.ModuleList(block(width, heads) for _ in range(decoder_depth))
        self.decoder_norm = norm(width)
        self.decoder_pred = nn.Linear(width, patch_size**2 * 3)

    def forward(self, images: Tensor, noise: Tensor) -> Tensor:
        x = self.patch_embed(images) + self.pos_embed[:, 1:]
        b, n, d = x.shape
        keep = n // 4
        shuffle = noise.argsort(dim=1)
        back = shuffle.argsort(dim=1)
        x = x.gather(1, shuffle[:, :keep, None].expand(-1, -1, d))
        mask = torch.ones(b, n, device=x.device)
        mask[:, :keep] = 0
        mask = mask.gather(1, back)
        x = torch.cat([(self.cls_token + self.pos_embed[:, :1]).expand(b, -1, -1), x], 1)
        for block in self.blocks:
            x = block(x)
        x = self.decoder_embed(self.norm(x))
        tokens = torch.cat([x[:, 1:], self.mask_token.expand(b, n - keep, -1)], 1)
        tokens = tokens.gather(1, back[:, :, None].expand(-1, -1, x.shape[2]))
        x = torch.cat([x[:, :1], tokens], 1) + self.decoder_pos
        for block in self.decoder_blocks:
            x = block(x)
        pred = self.decoder_pred(self.decoder_norm(x))[:, 1:]
        p, grid = self.patch, images.shape[2] // self.patch
        target = images.reshape(b, 3, grid, p, grid, p).permute(0, 2, 4, 3, 5, 1).reshape(b, n, -1)
        target = (target - target.mean(-1, keepdim=True)) / (target.var(-1, keepdim=True) + 1e-6) ** 0.5
        return (((pred - target) ** 2).mean(-1) * mask).sum() / mask.sum()


def contestants(case: dict) -> dict[str, Callable[[], tuple[nn.Module, Callable]]]:
    """Name -> a function that builds the model and says how to get its loss."""
    sizes = {k: case[k] for k in ("img_size", "patch_size", "embed_dim", "depth", "num_heads")}
    width, depth, heads = case["dec"]
    decoder = dict(decoder_embed_dim=width, decoder_depth=depth, decoder_num_heads=heads)

    def ours(kind: str, alpha: float) -> Callable:
        model = residua.create_model("mae_vit", **sizes, **decoder, decoder=kind, alpha_min=alpha)
        return lambda: (model, lambda m, x, noise: m(x, noise)[0])

    def transformers() -> tuple[nn.Module, Callable]:
        from transformers import ViTMAEConfig, ViTMAEForPreTraining

        config = ViTMAEConfig(
            hidden_size=sizes["embed_dim"], num_hidden_layers=sizes["depth"], num_attention_heads=sizes["num_heads"],
            intermediate_size=4 * sizes["embed_dim"], image_size=sizes["img_size"], patch_size=sizes["patch_size"],
            decoder_hidden_size=width, decoder_num_hidden_layers=depth, decoder_num_attention_heads=heads,
            decoder_intermediate_size=4 * width, mask_ratio=0.75, norm_pix_loss=True, attn_implementation="sdpa",
        )  # fmt: skip
        return ViTMAEForPreTraining(config), lambda m, x, noise: m(x, noise=noise).loss

    return {
        "transformers": transformers,
        "timm blocks": lambda: (TimmMAE(**sizes, dec=case["dec"]), lambda m, x, noise: m(x, noise)),
        "ours, alpha 1": ours("plain", 1.0),
        "ours, alpha 0.6": ours("plain", 0.6),
        "ours, U-shaped": ours("ushape", 0.6),
    }


def flops_per_step(case: dict, kind: str) -> float:
    """Forward and backward matrix products of our model, counted on one image."""
    model, loss = contestants(case)["ours, U-shaped" if kind == "ushape" else "ours, alpha 1"]()
    n = (case["img_size"] // case["patch_size"]) ** 2
    with FlopCounterMode(display=False) as counter:
        loss(model, torch.randn(1, 3, case["img_size"], case["img_size"]), torch.rand(1, n)).backward()
    return counter.get_total_flops() * case["batch"]


def measure(build: Callable, case: dict, device: str, compiled: str, rounds: int) -> tuple[float, float]:
    """Median seconds of a step, and peak memory in GiB."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model, loss = build()
    model = model.to(device).train()
    if compiled != "eager":
        model.compile()
    recorded = compiled == "recorded"
    rate = torch.tensor(1e-4, device=device) if recorded else 1e-4
    optimizer = torch.optim.AdamW(model.parameters(), rate, betas=(0.9, 0.95), fused=True, capturable=recorded)
    size = case["img_size"]
    n = (size // case["patch_size"]) ** 2
    images = torch.randn(case["batch"], 3, size, size, device=device)
    noise = torch.rand(case["batch"], n, device=device)

    def step() -> tuple[Tensor, Tensor]:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            value = loss(model, images, noise)
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return value.detach(), value.detach()

    call = Recorded(step) if recorded else step
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


def _ratios(rows: list[dict]) -> None:
    """Ours at its best against the fastest peer of each mode."""
    ours = [r for r in rows if r["name"] == "ours, alpha 0.6"]
    for mode in dict.fromkeys(r["mode"] for r in rows):
        peers = [r for r in rows if r["mode"] == mode and not r["name"].startswith("ours")]
        if ours and peers:
            best = min(peers, key=lambda r: r["seconds"])
            fastest = min(r["seconds"] for r in ours)
            print(
                f"ours at its best against the faster {mode} peer ({best['name']}): {best['seconds'] / fastest:.2f} x"
            )
        pair = [
            r["seconds"]
            for n in ("ours, alpha 0.6", "ours, alpha 1")
            for r in rows
            if (r["name"], r["mode"]) == (n, mode)
        ]
        if len(pair) == 2:
            print(f"alpha 0.6 / alpha 1, {mode}: {pair[0] / pair[1]:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, default="cpu")
    parser.add_argument("--modes", nargs="+", choices=["eager", "compiled", "recorded"], default=["eager", "compiled"])
    parser.add_argument("--only", nargs="+", help="names of contestants")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    chip = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    case = CASES[args.case]
    rows = []
    for name, build in contestants(case).items():
        if args.only and name not in args.only:
            continue
        work = flops_per_step(case, "ushape" if "U-shaped" in name else "plain")
        for mode in args.modes:
            seconds, peak = measure(build, case, device, mode, args.rounds)
            mfu = 100 * work / seconds / H200_PEAK if "H200" in chip else float("nan")
            rows.append(dict(name=name, mode=mode, seconds=seconds, images_per_s=case["batch"] / seconds,
                             mfu=mfu, peak_gib=peak))  # fmt: skip
            print(f"{args.case:10} {name:16} {mode:10} {1e3 * seconds:8.2f} ms  {case['batch'] / seconds:10,.0f} img/s"
                  f"  MFU {mfu:5.1f} %  {peak:6.2f} GiB", flush=True)  # fmt: skip
    _ratios(rows)
    if args.json:
        args.json.write_text(json.dumps(dict(case=args.case, chip=chip, torch=torch.__version__, rows=rows), indent=1))


if __name__ == "__main__":
    main()
