"""Numbers in sentences, of the recipe and of runs on Tiny-ImageNet, are those of docs/records."""

import re
from itertools import chain
from statistics import fmean

from residua import recipes
from residua.train import read_metrics

from .records import (
    KNN,
    LAST,
    PROBE,
    RECORDS,
    agree,
    along,
    best,
    difference,
    last_loss,
    points,
    report,
    said,
    scores,
    seeds,
    speed,
    whole,
)


def test_recipe():
    """Of what it expects, the numbers with a point."""

    def means(*lengths: str, metric: str) -> list[float]:
        """With fading, without; of every length."""
        names = [f"{length}-xavier-alpha-{alpha}" for length in lengths for alpha in ("0.7", "1.0")]
        return [fmean(scores(run)[metric, LAST] for run in seeds(name)) for name in names]

    probes, knns = (means("22k", "50k", metric=metric) for metric in (PROBE, KNN))
    expected = [value for pair in zip(probes, knns) for value in pair]
    agree(" ".join(re.findall(r"\d+\.\d", recipes.get("mae-tiny-imagenet").expect)), *expected)


def test_sentences_on_longer_runs():
    def by_seed(length: str, alpha: str, metric: str) -> list[float]:
        return [scores(run)[metric, LAST] for run in seeds(f"{length}-xavier-alpha-{alpha}")]

    def gains(length: str, metric: str) -> list[float]:
        return [b - a for a, b in zip(*(by_seed(length, alpha, metric) for alpha in ("1.0", "0.7")))]

    text = said("results.md", "it grows, seed by seed, from", ", and both intervals")
    agree(text, *chain.from_iterable(gains(length, metric) for metric in (PROBE, KNN) for length in ("22k", "50k")))
    for metric in (PROBE, KNN):
        mean, half = difference(*(by_seed("50k", alpha, metric) for alpha in ("1.0", "0.7")))
        assert mean > 3 * half  # "stay far from zero"
    text = said("results.md", "over their shorter runs, and", "stay between them")
    agree(text, *(fmean(gains("86k", metric)) for metric in (PROBE, KNN)))
    assert min(gains("50k", PROBE)) > 5
    text = said("results.md", "every seed gains more than 5 in the probe,", "after 86,000 steps (one")
    both = [by_seed("50k", alpha, PROBE) for alpha in ("1.0", "0.7")]
    agree(points(text), *difference(*both), *(fmean(gains(length, KNN)) for length in ("50k", "86k")))
    text = said("choosing-alpha.md", "the probe of the ordinary network rises by", "(three seeds)")
    both = [[fmean(by_seed(length, alpha, PROBE)) for length in ("22k", "50k")] for alpha in ("1.0", "0.7")]
    agree(text, *(b - a for a, b in both))
    for page, start, end, length, metrics in (
        ("results.md", "the ordinary network stands at", ". Of the two", "86k", (PROBE,)),
        ("choosing-alpha.md", "training images) it stands at", ". Training losses", "50k", (PROBE, KNN)),
    ):
        text = points(said(page, start, end))
        runs = [seeds(f"{length}-xavier-alpha-{alpha}") for alpha in ("1.0", "0.7")]
        values = [[fmean(each) for each in zip(*(along(r, m) for r in own))] for m in metrics for own in runs]
        agree(text, *values[0], 0.7, *chain.from_iterable(values[1:]))
    text = said("choosing-alpha.md", "Training losses do not show it:", "(mean of the last 1,000")
    agree(text, *(fmean(map(last_loss, seeds(f"50k-xavier-alpha-{alpha}"))) for alpha in ("1.0", "0.7")))


def test_sentences_on_stronger_fading_over_50000_steps():
    plain, faded, more = (f"50k-xavier-alpha-{alpha}-seed-0" for alpha in ("1.0", "0.7", "0.6"))
    short = "22k-xavier-alpha-0.6-seed-0"
    (probe, block), (knn, at) = best(more, PROBE), best(more, KNN)
    before = [best(short, metric) for metric in (PROBE, KNN)]
    assert (block, at) == (9, 9)
    assert {own for _, own in before} == {7}
    assert report(more)["probes"]["model"]["best"]["layer"] == 9
    last = {run: [scores(run)[metric, LAST] for metric in (PROBE, KNN)] for run in (plain, faded, more)}
    text = said("results.md", "at 22,000 steps:", ". Whether 0.6 overtakes")
    agree(
        points(text), probe, knn, 0.7, *last[faded], last[faded][0] - last[more][0], 0.7,
        last[faded][1] - last[more][1], last[plain][1] - last[more][1], probe - before[0][0], knn - before[1][0], 0.7,
    )  # fmt: skip
    assert abs(probe - last[faded][0]) < 1.9
    assert abs(knn - last[faded][1]) < 1.9


def test_sentences_on_runs_without_zero_initialisation():
    plain, faded = seeds("22k-xavier-alpha-1.0"), seeds("22k-xavier-alpha-0.7")
    gains = []
    for metric in (PROBE, KNN):
        gains += [along(b, metric)[0] - along(a, metric)[0] for a, b in zip(plain, faded, strict=True)]
        gains += [scores(b)[metric, LAST] - scores(a)[metric, LAST] for a, b in zip(plain, faded, strict=True)]
    text = said("choosing-alpha.md", "Seed by seed 0.7 is at", ". The last column")
    agree(" ".join(re.findall(r"[-+]\d+\.\d", text)), *gains)
    start = [fmean(scores(run)[metric, LAST] for run in plain) for metric in (PROBE, KNN)]
    zero = [scores("22k-alpha-1.0-seed-0")[metric, LAST] for metric in (PROBE, KNN)]
    better = list(map(max, start, zero))
    blocks = [[fmean(scores(run)[metric, block] for run in faded) for metric in (PROBE, KNN)] for block in (LAST, 9)]
    text = points(said("choosing-alpha.md", "are equal within noise at the end (", "at block 9"))
    agree(text, start[0], zero[0], start[1], zero[1], 0.7, *(b - a for own in blocks for a, b in zip(better, own)))
    text = said("results.md", "block 9 gains", ", its best")
    ninth = [fmean(scores(run)[metric, 9] for run in plain) for metric in (PROBE, KNN)]
    agree(points(text), *(b - a for base in (ninth, start) for a, b in zip(base, blocks[1])))


def test_speed_of_three_runs_at_once():
    (shown,) = whole(said("results.md", "three at once under MPS,", "images/s each"))
    for name in ("alpha-1.0-seed-2", "alpha-0.7-seed-2", "alpha-0.6-seed-0"):
        assert round(speed(f"tiny-imagenet-50k-xavier-{name}"), -2) == shown


def test_log_of_runs_that_were_stopped():
    runs = [f"tiny-imagenet-86k-xavier-alpha-{alpha}-seed-0" for alpha in ("1.0", "0.7")]
    ends = [read_metrics(RECORDS / run)[-1]["step"] for run in runs]
    assert whole(said("log.md", "on Tiny-ImageNet, stopped after", "steps for lack of time")) == ends
    unfinished = {run.parent.name for run in RECORDS.glob("tiny-imagenet-batch-64-*/config.yaml")}
    unfinished -= {run.parent.name for run in RECORDS.glob("tiny-imagenet-batch-64-*/evaluation.json")}
    assert len(unfinished) == 3  # "three of the six runs with batches of 64"
