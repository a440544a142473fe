"""Tables of diffusion.md are of docs/records."""

from residua.train import read_metrics

from .records import (
    RECORDS,
    agree,
    losses,
    read,
    table,
)


def test_diffusion_models():
    alphas_ = ("1.0", "0.7")
    names = [f"cifar100-diffusion-8k-alpha-{alpha}-seed-0" for alpha in alphas_]
    *cells, probe = table("diffusion.md", "| | alpha_min 1.0 | alpha_min 0.7 | paper")
    for (_, *own, _, _), name in zip(cells, ("FID", "KID", "precision", "recall"), strict=True):
        for cell, run in zip(own, names, strict=True):
            score = read(f"{run}/score.json")["scores"][name]
            agree(cell, score["value"], *([score["std"]] if name == "KID" else []))
    for cell, run in zip(probe[1:3], names, strict=True):
        found = read(f"{run}/evaluation.json")["probes"]["model"]
        agree(cell, found["accuracy"], found["best"]["layer"], float(found["best"]["readout"].removeprefix("t=")))
    plain, faded, gain = table("diffusion.md", "| steps | 1,000 to 2,000 |")
    for column, first in enumerate(range(1000, 8000, 1000), 1):
        a, b = (losses(run, first, first + 1000) for run in names)
        agree(plain[column], a)
        agree(faded[column], b)
        agree(gain[column], 100 * (b / a - 1))


def test_diffusion_models_second_seed():
    names = [f"cifar100-diffusion-8k-alpha-{alpha}-seed-1" for alpha in ("1.0", "0.7")]
    *fids, gain = table("diffusion.md", "| steps | 2,000 | 4,000 |")
    for row, run in zip(fids, names, strict=True):
        measured = {r["step"]: r["eval/fid"] for r in read_metrics(RECORDS / run) if "eval/fid" in r}
        for cell, step in zip(row[1:5], (2000, 4000, 6000, 8000)):
            agree(cell, *([measured[step]] if step in measured else []))
    agree(fids[0][5], read(f"{names[0]}/score.json")["scores"]["FID"]["value"])
    for cell, step in zip(gain[1:], (2000, 4000, 6000, 8000)):
        a, b = (losses(run, step - 1000, step) for run in names)
        agree(cell, 100 * (b / a - 1))
