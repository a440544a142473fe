"""Tables of choosing-alpha.md are of docs/records."""

import re
from itertools import product
from statistics import fmean

import pytest

from residua.train import read_metrics
from residua.train.options import auto_alpha

from .records import (
    KNN,
    LAST,
    PROBE,
    RANKME,
    RECORDS,
    agree,
    along,
    best,
    difference,
    last_block,
    losses,
    said,
    scores,
    seeds,
    table,
    take_off,
    whole,
)

GAINS = "| alpha_min | 5,500 | 10,900 | 16,400 | 21,900 |"


def test_gain_by_the_length_of_the_run():
    rows = table("choosing-alpha.md", "| steps of 256 images | 5,000 |")
    lengths = {"5k": 5000, "10k": 10000, "22k": 21875, "50k": 50000, "86k": 100000}
    for column, (length, steps) in enumerate(lengths.items(), 1):
        alpha, count, *cells = (row[column] for row in rows)
        agree(alpha, auto_alpha(steps, depth=12, zero_init=False))
        for metric, (plain, faded, gain) in ((PROBE, cells[:3]), (KNN, cells[3:])):
            runs = (seeds(f"{length}-xavier-alpha-{value}") for value in ("1.0", alpha))
            ones, others = ([scores(run)[metric, LAST] for run in own] for own in runs)
            agree(count, len(ones))
            agree(plain, fmean(ones))
            agree(faded, fmean(others))
            agree(gain, *difference(ones, others))


@pytest.mark.parametrize(("start", "names"), [
    (f"{GAINS} 5,000 (p)", ("22k-alpha-0.9", "22k-alpha-0.8", "", "", "22k-anneal-0.7")),
    (f"{GAINS} kNN", ("22k-xavier-alpha-0.8", "22k-xavier-alpha-0.7", "22k-xavier-alpha-0.6")),
])  # fmt: skip
def test_gains_along_training(start, names):
    for row, name in zip(table("choosing-alpha.md", start), names, strict=True):
        pairs = [(run, re.sub("(alpha|anneal)-0..", "alpha-1.0", run)) for run in seeds(name)]
        for metric, cells in ((PROBE, row[1:5]), (KNN, row[5:9] if "kNN" in start else [])):
            gains = [[b - a for b, a in zip(along(run, metric), along(plain, metric))] for run, plain in pairs]
            ends = [scores(run)[metric, LAST] - scores(plain)[metric, LAST] for run, plain in pairs]
            for cell, each in zip(cells, [*zip(*gains), ends] if pairs else []):
                agree(cell, fmean(each))


def test_very_short_runs():
    rows = table("choosing-alpha.md", "| | 1.0 | 0.7 | 1.0 from zero | 0.7 from zero |")
    means = {}
    for (_, *cells), metric in zip(rows, (PROBE, KNN, RANKME), strict=True):
        for cell, (zero, alpha) in zip(cells, product((False, True), ("1.0", "0.7")), strict=True):
            names = [f"cifar100-1200-steps/alpha-{alpha}-zero-{zero}-seed-{seed}" for seed in (0, 1)]
            own = [last_block(name, metric) for name in names]
            agree(cell, *own)
            means[metric, zero, alpha] = fmean(own)
    costs = (
        means[metric, zero, "1.0"] - means[metric, zero, "0.7"] for metric in (PROBE, KNN) for zero in (False, True)
    )
    agree(said("choosing-alpha.md", "In the probe 0.7 costs", ". The last"), *costs)


def test_other_ways_to_fade_in_very_short_runs():
    names = ("alpha-1.0-zero-False", "alpha-0.7-zero-False", "alpha-0.7-annealed", "alpha-0.7-until-0.75",
             "constant-0.846")  # fmt: skip
    runs = [[f"cifar100-1200-steps/{name}-seed-{seed}" for seed in range(3)] for name in names]
    probe, probe_gain, knn, knn_gain, rankme, loss, steps = (
        cells for _, *cells in table("choosing-alpha.md", "| | 1.0 | 0.7 | 0.7 `--anneal 0.5` |")
    )
    for metric, cells, gains in ((PROBE, probe, probe_gain), (KNN, knn, knn_gain), (RANKME, rankme, None)):
        found = [[last_block(run, metric) for run in own] for own in runs]
        for i, (cell, own) in enumerate(zip(cells, found, strict=True)):
            agree(cell, *own)
            if gains and i:
                agree(gains[i], *difference(found[0], own))
    for cell, left, own in zip(loss, steps, runs, strict=True):
        agree(cell, *(losses(run, 1080, 1200) for run in own))
        assert [take_off(run) for run in own] == (whole(left) or [float("inf")] * 3)
        assert all(0.745 < losses(run, 120, 264) < 0.765 for run in own)


def test_how_long_losses_linger():
    every, plain, auto = table("choosing-alpha.md", "| run of steps | 5,000 |")[-3:]
    lengths = {"5k": "0.914", "10k": "0.814", "22k": "0.7", "50k": "0.7", "86k": "0.7"}
    later = []
    for column, (length, alpha) in enumerate(lengths.items(), 1):
        names = [[f"tiny-imagenet-{run}" for run in seeds(f"{length}-xavier-alpha-{a}")] for a in ("1.0", alpha)]
        ones, others = ([take_off(name) for name in own] for own in names)
        assert (ones, others) == (whole(plain[column]), whole(auto[column]))
        assert all(b > a for a, b in zip(ones, others, strict=True))
        first, second, *_ = (row["step"] for row in read_metrics(RECORDS / names[0][0]) if "loss" in row)
        assert whole(every[column]) == [second - first]
        if alpha == "0.7":
            later += [100 * (b / a - 1) for a, b in zip(ones, others)]
            at = [[losses(name, 9500, 10500) for name in own] for own in names]
            assert all(abs(a - b) < 0.003 for a, b in zip(*at))
    agree(said("choosing-alpha.md", "at 0.7 by", "%; longer"), min(later), max(later))


def test_gains_of_small_batches():
    rows = table("choosing-alpha.md", "| alpha_min | 10,000 steps | 20,000 | 30,000 |")
    plain = along("batch-64-alpha-1.0-lr-1.5e-4-seed-0", PROBE)
    for alpha, *cells in rows:
        for cell, b, a in zip(cells, along(f"batch-64-alpha-{alpha}-lr-1.5e-4-seed-0", PROBE), plain, strict=True):
            agree(cell, b - a)


def test_what_auto_chooses():
    alphas_, zeros = table("choosing-alpha.md", "| steps of 256 images | up to 2,750 |")
    head = said("choosing-alpha.md", "| steps of 256 images | up to 2,750 |", "|---")
    steps = [2750, *(int(n.replace(",", "")) for n in re.findall(r"[\d,]+", head))]
    from_zero = [int(n.replace(",", "")) for n in re.findall(r"[\d,]+", " ".join(zeros[1:]))]
    for cell, *counts in zip(alphas_[1:], steps, from_zero, strict=True):
        for zero, count in zip((False, True), counts):
            agree(cell, auto_alpha(count, depth=12, zero_init=zero))


def test_best_blocks_without_zero_initialisation():
    for row, alpha in zip(table("choosing-alpha.md", f"{GAINS} kNN"), ("0.8", "0.7", "0.6"), strict=True):
        runs = seeds(f"22k-xavier-alpha-{alpha}")
        block = best(runs[0], KNN)[1]
        plain = [scores(run.replace(alpha, "1.0"))[KNN, LAST] for run in runs]
        agree(row[9], fmean(scores(run)[KNN, block] for run in runs) - fmean(plain), block)
