"""Samples of a U-ViT, ours against the original's structure, in one run; figures are ratios.

    python benchmarks/sampling.py --case uvit-s-32 --images 10240 --json sampling.json     # on a GPU
    python benchmarks/sampling.py --case uvit-s-32 --released U-ViT                        # a checkout of baofff/U-ViT
    python benchmarks/sampling.py                                                          # seconds on a CPU

Everyone takes the same 50 steps of DPM-Solver++(2M) from the same noise, in batches of 512. `original` is the network
of `uvit_step.py` as its authors sample with it, eager under autocast; ours is `residua.sample` in each precision, eager
and compiled. `--released` adds the released code itself: its network and its solver, 50 evaluations (needs einops).
Time for compiling is left out of the ratios and printed beside them.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from uvit_step import CASES, PlainUViT

import residua
from residua.data import Preprocessing, mixing, rng
from residua.nn.diffusion import VP, clipped, dpm_solver, times
from residua.train.sample import Sampling, check_sampling, evaluating, generate

Maker = Callable[[Tensor], Tensor]


def original(case: dict, device: str, half: torch.dtype) -> Maker:
    """Image numbers (B,) -> images."""
    sizes = {key: value for key, value in case.items() if key != "batch"}
    torch.manual_seed(0)
    model, process = PlainUViT(**sizes, casts=True).to(device).eval(), VP()
    shape = (case["in_chans"], case["img_size"], case["img_size"])
    grid = times(process, 50, "logsnr")

    def denoise(x: Tensor, t: Tensor) -> Tensor:
        with torch.autocast(device, half):
            return model(x, process.time_input(t)).float()

    @torch.no_grad()
    def make(index: Tensor) -> Tensor:
        noise = mixing.normal(rng.uniform(0, 0, index, shape[0] * shape[1] * shape[2], "sample"))
        return dpm_solver(clipped(denoise, process), process, noise.reshape(-1, *shape), grid)

    return make


def released(folder: Path, case: dict, device: str, half: torch.dtype) -> Maker:
    """Image numbers (B,) -> images, by the released code."""
    sys.path.insert(0, str(folder))
    import dpm_solver_pytorch as solver  # type: ignore[import-not-found]
    import sde  # type: ignore[import-not-found]
    from libs.uvit import UViT  # type: ignore[import-not-found]

    sizes = {key: value for key, value in case.items() if key != "batch"}
    torch.manual_seed(0)
    score = sde.ScoreModel(UViT(**sizes).to(device).eval(), pred="noise_pred", sde=sde.VPSDE())
    schedule = solver.NoiseScheduleVP(schedule="linear")

    def denoise(x: Tensor, t: Tensor) -> Tensor:
        with torch.autocast(device, half):
            return score.noise_pred(x, t).float()

    def make(index: Tensor) -> Tensor:
        noise = torch.randn(len(index), case["in_chans"], case["img_size"], case["img_size"], device=device)
        network = solver.model_wrapper(denoise, schedule, time_input_type="0", model_kwargs={})
        return solver.DPM_Solver(network, schedule).sample(noise, steps=50, eps=1e-4, fast_version=True)

    return torch.no_grad()(make)


def ours(case: dict) -> torch.nn.Module:
    sizes = {key: value for key, value in case.items() if key != "batch"}
    torch.manual_seed(0)
    model = residua.create_model("uvit", **sizes, alpha_min=0.7, zero_init=False)
    model.process = VP()
    side, n = case["img_size"], case["in_chans"]
    model.preprocessing = Preprocessing((side, side), (0.5,) * n, (0.5,) * n, n)
    return model


def clock(make: Maker, images: int, batch: int, device: str) -> tuple[float, float]:
    """Seconds of the first batch, and of an image in the others."""
    sync = torch.cuda.synchronize if device == "cuda" else (lambda: None)

    def run(index: Tensor) -> float:
        sync()
        start = time.perf_counter()
        make(index)
        sync()
        return time.perf_counter() - start

    first = run(torch.arange(batch, device=device))
    rest = [run(torch.arange(i, i + batch, device=device)) for i in range(0, images, batch)]
    return first, sum(rest) / len(rest) / batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, default="cpu")
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--batch", type=int, help="default: 512, on a CPU 8")
    parser.add_argument("--precisions", nargs="+", default=["float32", "tf32", "bf16", "fp16"])
    parser.add_argument("--released", type=Path, help="a checkout of the released U-ViT, to be measured too")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    chip = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    case, batch = CASES[args.case], args.batch or (512 if device == "cuda" else 8)
    rows = []

    def report(name: str, first: float, seconds: float) -> None:
        rows.append(dict(name=name, seconds_per_1000=1000 * seconds, first_batch=first))
        print(f"{name:24} {1 / seconds:8.1f} images/s, the first {batch} in {first:6.1f} s", flush=True)

    torch.set_float32_matmul_precision("high")
    halves = {"bf16": torch.bfloat16, "fp16": torch.float16} if device == "cuda" else {"bf16": torch.bfloat16}
    for name, half in halves.items():
        report(f"original, {name}", *clock(original(case, device, half), args.images, batch, device))
        if args.released:
            peer = released(args.released, case, device, half)
            report(f"released code, {name}", *clock(peer, args.images, batch, device))
    model = ours(case)
    for precision in args.precisions:
        for compiled in (False, True):
            torch.compiler.reset()
            settings = check_sampling(model, replace(Sampling(), precision=precision, compile=compiled))
            with evaluating(model, device, settings):
                make = lambda index, s=settings: generate(model, index, s)  # noqa: E731
                report(f"ours, {precision}{', compiled' * compiled}", *clock(make, args.images, batch, device))
    for base in (row for row in rows if not row["name"].startswith("ours")):
        for row in rows:
            if row["name"].startswith("ours"):
                print(f"{row['name']}: {base['seconds_per_1000'] / row['seconds_per_1000']:.2f} x {base['name']}")
    if args.json:
        about = dict(case=args.case, chip=chip, torch=torch.__version__, images=args.images, batch=batch)
        args.json.write_text(json.dumps(dict(**about, rows=rows), indent=1))


if __name__ == "__main__":
    main()
