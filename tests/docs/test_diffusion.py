"""Tables of diffusion.md are of docs/records."""

from itertools import pairwise

import pytest

from residua.train.options import read_flat

from .records import (
    RECORDS,
    agree,
    fids_along,
    losses,
    points,
    read,
    said,
    speed,
    table,
    whole,
)

LONGER = [f"cifar100-diffusion-24k-alpha-{alpha}-seed-0" for alpha in ("1.0", "0.7")]
"""From the original's initialisation."""


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
        measured = fids_along(run)
        for cell, step in zip(row[1:5], (2000, 4000, 6000, 8000)):
            agree(cell, *([measured[step]] if step in measured else []))
    agree(fids[0][5], read(f"{names[0]}/score.json")["scores"]["FID"]["value"])
    for cell, step in zip(gain[1:], (2000, 4000, 6000, 8000)):
        a, b = (losses(run, step - 1000, step) for run in names)
        agree(cell, 100 * (b / a - 1))


@pytest.mark.parametrize("page", ["diffusion.md", "results.md"])
def test_diffusion_models_from_the_originals_initialisation(page):
    one, other = map(fids_along, LONGER)
    steps = range(4000, 24001, 4000)
    assert [*one] == [*other] == [*steps]
    rows = [cells for _, *cells in table(page, "| steps | 4,000 | 8,000 | 12,000 |")]
    for plain, faded, gain, loss, step in zip(*rows, steps, strict=True):
        a, b = (losses(name, step - 2000, step) for name in LONGER)
        for cell, value in ((plain, one[step]), (faded, other[step]), (gain, other[step] - one[step])):
            agree(cell, value)
        agree(loss, 100 * (b / a - 1))
    deficits = [other[step] - one[step] for step in steps]
    assert deficits == sorted(deficits, reverse=True)  # "shrinks from each measurement to the next"
    assert deficits[-2] > 0 > deficits[-1]


def test_sentences_on_diffusion_models_from_the_originals_initialisation():
    one, other = map(fids_along, LONGER)
    deficits = [other[step] - one[step] for step in one]
    (shown,) = whole(said("diffusion.md", "(H200, 2026-11-18, both runs at once,", "images/s each"))
    assert all(round(speed(run), -1) == shown for run in LONGER)
    shrunk = [100 * (1 - b / a) for a, b in pairwise(deficits[:-1])]
    agree(said("diffusion.md", "The deficit in FID shrinks by", "every 4,000 steps"), min(shrunk), max(shrunk))
    text = said("diffusion.md", "and becomes a gain of", "between 20,000")
    agree(text, -deficits[-1], 100 * (1 - other[24000] / one[24000]))
    zero = [f"cifar100-diffusion-8k-alpha-1.0-seed-{seed}" for seed in (0, 1)]
    ends = [read(f"{run}/score.json")["scores"]["FID"]["value"] for run in zero]
    agree(
        said("diffusion.md", "two seeds of the ordinary network differed by", "points in the runs"), ends[1] - ends[0]
    )
    agree(said("results.md", "network differed by", "points in shorter runs"), ends[1] - ends[0])
    averages = [read_flat(RECORDS / run / "config.yaml")["ema"] for run in (LONGER[0], zero[0])]
    agree(said("diffusion.md", "averaged over more steps here (", "). Longer"), *averages)
    text = said("diffusion.md", "ordinary network is better than from zero (", ", of as many")
    agree(points(text), one[8000], fids_along(zero[1])[8000])
