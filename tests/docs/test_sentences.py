"""Numbers in sentences, of the front page and of runs on Tiny-ImageNet, are those of docs/records."""

import re
from itertools import chain
from statistics import fmean

from residua import recipes

from .records import (
    KNN,
    LAST,
    PROBE,
    agree,
    along,
    best,
    difference,
    last_loss,
    points,
    said,
    scores,
    seeds,
)


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


def test_sentences_on_longer_runs():
    def by_seed(length: str, alpha: str, metric: str) -> list[float]:
        return [scores(run)[metric, LAST] for run in seeds(f"{length}-xavier-alpha-{alpha}")]

    def gains(length: str, metric: str) -> list[float]:
        return [b - a for a, b in zip(*(by_seed(length, alpha, metric) for alpha in ("1.0", "0.7")))]

    text = said("results.md", "With 2.3 times the steps the gain of the two seeds", ", and 0.7 has its best")
    agree(text, *chain.from_iterable(gains(length, metric)[:2] for metric in (PROBE, KNN) for length in ("22k", "50k")))
    text = said("results.md", "over their shorter runs, and", "stay between them")
    agree(text, *(fmean(gains("86k", metric)) for metric in (PROBE, KNN)))
    assert min(gains("50k", PROBE)) > 5
    text = said("results.md", "that were run; kNN gets", "of the 8") + said("results.md", "of the 8, and", "after")
    agree(text, *(fmean(gains(length, KNN)) for length in ("50k", "86k")))
    _, block, run = max((*best(run, KNN), run) for run in seeds("22k-*"))
    assert run == "22k-xavier-alpha-0.6-seed-0"
    agree(said("results.md", "0.6 over 50,000 steps, whose block", "has the best"), block)
    text = said("choosing-alpha.md", "the probe of the ordinary network rises by", "(seeds 0 and 1)")
    both = [[fmean(by_seed(length, alpha, PROBE)[:2]) for length in ("22k", "50k")] for alpha in ("1.0", "0.7")]
    agree(text, *(b - a for a, b in both))
    for page, start, end, length, metrics in (
        ("results.md", "the ordinary network stands at", ". Whether", "86k", (PROBE,)),
        ("choosing-alpha.md", "training images) it stands at", ". Training losses", "50k", (PROBE, KNN)),
    ):
        text = points(said(page, start, end))
        runs = [seeds(f"{length}-xavier-alpha-{alpha}") for alpha in ("1.0", "0.7")]
        values = [[fmean(each) for each in zip(*(along(r, m) for r in own))] for m in metrics for own in runs]
        agree(text, *values[0], 0.7, *chain.from_iterable(values[1:]))
    text = said("choosing-alpha.md", "Training losses do not show it:", "(mean of the last 1,000")
    agree(text, *(fmean(map(last_loss, seeds(f"50k-xavier-alpha-{alpha}"))) for alpha in ("1.0", "0.7")))


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
