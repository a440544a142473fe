"""Numbers in tables of the documents, and on the front page, are those of docs/records."""

import re
from itertools import chain
from statistics import fmean

import pytest

from residua import alphas, recipes
from residua.report.along import as_dynamics
from residua.report.runs import read_runs, while_training
from residua.train import Pretrain
from residua.train.options import auto_alpha

from .records import (
    KNN,
    LAST,
    PROBE,
    RANK,
    RANKME,
    RECORDS,
    agree,
    along,
    best,
    difference,
    last_loss,
    report,
    said,
    scores,
    seeds,
    table,
    top5,
)


@pytest.mark.parametrize("page", ["../README.md", "results.md"])
def test_demo(page):
    probe, knn, rank = table(page, "| `shapes`, 1,024 test images | fading")
    columns = [("fading", "model", 3), ("plain", "model", 3), ("plain", "random init", 3), ("plain", "pixels", -1)]
    for column, (name, subject, last) in enumerate(columns, 1):
        own = scores(f"demo-{name}", subject)
        agree(probe[column], report(f"demo-{name}")["probes"][subject]["accuracy"])
        agree(knn[column], own[KNN, last])
        agree(rank[column], own[RANK, last])


def test_front_page_and_recipe():
    """Of what they say in a sentence, the numbers with a point."""

    def means(*lengths: str, metric: str) -> list[float]:
        """With fading, without; of every length."""
        names = [f"{length}-xavier-alpha-{alpha}" for length in lengths for alpha in ("0.7", "1.0")]
        return [fmean(scores(run)[metric, LAST] for run in seeds(name)) for name in names]

    probes, knns = (means("22k", "50k", metric=metric) for metric in (PROBE, KNN))
    expected = [value for pair in zip(probes, knns) for value in pair]
    agree(" ".join(re.findall(r"\d+\.\d", recipes.get("mae-tiny-imagenet").expect)), *expected)
    text = said("../README.md", "after 22,000 steps a probe", "Whether fading")
    plain, faded = ([scores(run)[PROBE, LAST] for run in seeds(f"22k-xavier-alpha-{a}")] for a in ("1.0", "0.7"))
    first = (fmean(faded), 0.7, fmean(plain), *difference(plain, faded))
    plain, faded = ([scores(run)[PROBE, LAST] for run in seeds(f"50k-xavier-alpha-{a}")] for a in ("1.0", "0.7"))
    second = (*means("50k", metric=PROBE), *difference(plain, faded)[1:])
    others = (*second, *means("86k", metric=PROBE), *means("22k", "50k", "86k", metric=KNN))
    agree(" ".join(re.findall(r"\d+\.\d", text)), *first, *others)


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


GAINS = "| alpha_min | 5,500 | 10,900 | 16,400 | 21,900 |"


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


def test_runs_from_zero():
    rows = table("results.md", "| | alpha_min 1 | 0.9 |")
    for column, name in enumerate(("alpha-1.0", "alpha-0.9", "alpha-0.8", "anneal-0.7"), 1):
        probe, five, *others = (row[column] for row in rows)
        own = scores(f"22k-{name}-seed-0")
        agree(probe, own[PROBE, LAST])
        agree(five, top5(f"22k-{name}-seed-0"))
        for cell, metric in zip(others, (KNN, RANK, RANKME), strict=True):
            agree(cell, own[metric, LAST])
    agree(rows[1][6], report("22k-alpha-1.0-seed-0")["probes"]["pixels"]["top5"])
    for column, subject, block in ((5, "random init", LAST), (6, "pixels", -1)):
        free = scores("22k-alpha-1.0-seed-0", subject)
        for row, metric in zip((rows[0], *rows[2:]), (PROBE, KNN, RANK, RANKME), strict=True):
            agree(row[column], free[metric, block])


def test_runs_of_three_seeds():
    plain, faded = seeds("22k-xavier-alpha-1.0"), seeds("22k-xavier-alpha-0.7")
    read = [
        lambda run: scores(run)[PROBE, LAST], top5, lambda run: scores(run)[PROBE, 9],
        lambda run: scores(run)[KNN, LAST], lambda run: scores(run)[KNN, 9],
        lambda run: scores(run)[RANK, LAST], lambda run: scores(run)[RANKME, LAST],
    ]  # fmt: skip
    for (_, ones, one, others, other, gain), of in zip(
        table("results.md", "| | alpha_min 1 | mean |"), read, strict=True
    ):
        a, b = ([of(run) for run in runs] for runs in (plain, faded))
        agree(ones, *a)
        agree(one, fmean(a))
        agree(others, *b)
        agree(other, fmean(b))
        agree(gain, *difference(a, b))


def test_other_values():
    names = ("xavier-alpha-0.8", "xavier-alpha-0.6", "xavier-alpha-1.0-lr-6e-4", "alpha-1.0", "alpha-0.8")
    rows = table("results.md", "| | 0.8 | 0.6 | alpha_min 1, lr 6e-4")
    agree(rows[-1][0].partition("(1: ")[2].replace("0.7: ", ""), *(
        fmean(map(last_loss, seeds(f"22k-xavier-alpha-{value}"))) for value in ("1.0", "0.7")
    ))  # fmt: skip
    for column, name in enumerate(names, 1):
        run = f"22k-{name}-seed-0"
        probe, probe_at, knn, knn_at, rank, rankme, loss = (row[column] for row in rows)
        for cell, metric in ((probe, PROBE), (knn, KNN), (rank, RANK), (rankme, RANKME)):
            agree(cell, scores(run)[metric, LAST])
        for cell, metric in ((probe_at, PROBE), (knn_at, KNN)):
            agree(cell, *best(run, metric) if cell else ())
        agree(loss, last_loss(run))


def test_longer_runs():
    runs = [seeds(f"{length}-xavier-alpha-{alpha}") for length in ("50k", "86k") for alpha in ("1.0", "0.7")]
    runs += [["22k-xavier-plain-decoder-seed-0"], ["22k-xavier-alpha-1.0-seed-0"]]
    read = [
        lambda run: (scores(run)[PROBE, LAST],), lambda run: (top5(run),), lambda run: (scores(run)[KNN, LAST],),
        lambda run: best(run, KNN), lambda run: (scores(run)[RANK, LAST],), lambda run: (scores(run)[RANKME, LAST],),
        lambda run: (last_loss(run),),
    ]  # fmt: skip
    for (_, *cells), of in zip(table("results.md", "| | 50k: alpha_min 1 |"), read, strict=True):
        gains = [cells.pop(2), cells.pop(4)]
        for cell, own in zip(cells, runs, strict=True):
            agree(cell, *chain.from_iterable(map(of, own)))
        for gain, pair in zip(gains, (runs[:2], runs[2:4])):
            agree(gain, *difference(*([of(run)[0] for run in own] for own in pair)))


def test_controls():
    names = (
        "alpha-1.0", "control-branch", "alpha-0.7-attn-only", "alpha-0.7-mlp-only", "alpha-0.8", "alpha-0.7",
        "alpha-0.6", "control-both",
    )  # fmt: skip
    for (_, left, probe, probe_at, knn, knn_at, rank, loss, _), name in zip(
        table("results.md", "| | alpha_eff | linear probe, last block"), names, strict=True
    ):
        run = f"22k-xavier-{name}-seed-0"
        decay = Pretrain.read(RECORDS / f"tiny-imagenet-{run}" / "config.yaml").shortcut.decay()
        agree(left, float(alphas(12, **decay).prod()))
        for cell, metric in ((probe, PROBE), (knn, KNN), (rank, RANK)):
            agree(cell, scores(run)[metric, LAST])
        for cell, metric in ((probe_at, PROBE), (knn_at, KNN)):
            agree(cell, *best(run, metric))
        agree(loss, last_loss(run))


def test_small_batches():
    rows = table("results.md", "| learning rate | alpha_min | 10,000 steps")
    for (_, alpha, *cells), rate in zip(rows, ["1.5e-4"] * 3 + ["3e-4"] * 3, strict=True):
        run = f"batch-64-alpha-{alpha}-lr-{rate}-seed-0"
        for cell, *values in zip(cells, along(run, PROBE), along(run, KNN), strict=True):
            agree(cell.replace("kNN", ""), *values)


def test_rank_and_accuracy():
    """By what `residua compare` computes."""
    rows = iter(table("results.md", "| runs | epoch | with the probe"))
    for pattern in ("tiny-imagenet-batch-64-*", "tiny-imagenet-22k-*"):
        found = as_dynamics({run.name: while_training(run) for run in read_runs(sorted(RECORDS.glob(pattern)))})
        for probe, knn in zip(found.correlation(RANK, PROBE), found.correlation(RANK, KNN), strict=True):
            _, epoch, *cells = next(rows)
            agree(epoch, probe.epoch)
            for cell, own in zip(cells, (probe, knn), strict=True):
                agree(cell, own.r, own.p)
    assert not list(rows)


def test_rank_and_probe_along_training():
    rows = iter(table("results.md", "| run of | after steps | entropy rank"))
    for length in ("22k", "50k", "86k"):
        one, other = (seeds(f"{length}-xavier-alpha-{value}") for value in ("1.0", "0.7"))
        for i in range(3):
            _, _, *cells = next(rows)
            for metric, (plain, faded) in ((RANK, cells[:2]), (PROBE, cells[2:])):
                a, b = ([along(run, metric)[i] for run in runs] for runs in (one, other))
                agree(plain, fmean(a))
                agree(faded, fmean(b))
                if (length, i) != ("22k", 0):
                    assert all((y < x) == (metric == RANK) for x, y in zip(a, b))  # lower rank, better probe
    assert not list(rows)
