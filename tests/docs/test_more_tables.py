"""The same of smaller runs, of diffusion models, and of sentences on Tiny-ImageNet."""

import re
from itertools import chain, product
from statistics import fmean

from residua.train import read_metrics
from residua.train.options import auto_alpha, read_flat

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
    last_loss,
    losses,
    points,
    read,
    said,
    scores,
    seeds,
    table,
)

GAINS = "| alpha_min | 5,500 | 10,900 | 16,400 | 21,900 |"


def test_records_are_of_what_their_names_say():
    runs = sorted(path.parent for path in RECORDS.glob("**/metrics.jsonl"))
    for run in runs:
        settings, name = read_flat(run / "config.yaml"), run.name
        said = dict(re.findall(r"(alpha|anneal|seed|lr|zero|blocks)-(True|False|[\de.-]+\d|\d)", name))
        own = {
            "alpha": settings["alpha_min"], "anneal": settings["alpha_min"], "seed": settings["seed"],
            "lr": settings["lr"], "zero": settings.get("zero_init"), "blocks": sum(settings.get("stages") or ()),
        }  # fmt: skip
        for key, value in said.items():
            assert own[key] == (value == "True" if key == "zero" else float(value)), (name, key)
        if name.startswith("tiny-imagenet-22k"):
            assert settings["zero_init"] == ("xavier" not in name), name
            assert (settings["steps"], settings["batch_size"]) == (21875, 256), name
            assert settings["lr"] == (0.0006 if "lr-6e-4" in name else 0.0003), name


def last_block(record: str, metric: str) -> float:
    own = (metric, "model", LAST)
    found = read(f"{record}/evaluation.json")["scores"]
    return next(s["value"] for s in found if (s["metric"], s["subject"], s["layer"]) == own)


def test_further_measures():
    names = (
        "participation ratio", "stable rank", "alpha-ReQ", "LiDAR", "class separation", "variance ratio", "silhouette",
    )  # fmt: skip
    for (_, *cells), name in zip(table("results.md", "| | alpha_min 0.9 | alpha_min 1 |"), names, strict=True):
        for cell, alpha in zip(cells, ("0.9", "1.0"), strict=True):
            agree(cell, read(f"tiny-imagenet-22k-alpha-{alpha}-seed-0/geometry.json")[str(LAST)][name])


def test_shapes_by_recipe():
    found = read("mae-shapes/evaluation.json")
    own = {(s["subject"], s["metric"]): s["value"] for s in found["scores"] if s["layer"] in (5, -1)}
    values = [own[subject, m] for subject in ("model", "random init", "pixels") for m in (PROBE, KNN, RANK)]
    values.insert(4, found["probes"]["random init"]["accuracy"])
    text = said("results.md", "`records/mae-shapes`): last block,", ". ##").replace("(lbfgs)", "")
    agree(text, *values)


def test_first_steps():
    norms = read("zero-init/norms.json")
    for alpha, *cells in table("results.md", "| alpha_min | loss after 400 steps, from zero"):
        runs = [f"alpha-{alpha}-zero-{zero}" for zero in (True, False)]
        for cell, run in zip(cells[:2], runs):
            agree(cell, losses(f"zero-init/{run}", 390, 400))
        for cell, run in zip(cells[2:], runs):
            agree(cell, *(norms[run][step][str(LAST)] for step in ("40", "80", "400")))


def test_resnets():
    for alpha, *cells in table("results.md", "| alpha_min | 8 blocks | 12 blocks"):
        for cell, blocks in zip(cells, (8, 12, 16), strict=True):
            found = read(f"cifar-resnet/alpha-{alpha}-blocks-{blocks}/finetune.json")
            agree(cell, found["accuracy"], found["entropy_rank"])


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


def test_papers_tables():
    """Of what stands beside the paper's numbers, ours."""
    rows = [row for row in table("results.md", "| of the paper | its numbers") if row[2]]
    ours = {row[0].partition(",")[0]: points(row[2]) for row in rows}

    def mean(run: str, metric: str = PROBE) -> float:
        return fmean(scores(own)[metric, LAST] for own in seeds(run))

    lengths = [f"{length}-xavier-alpha-{alpha}" for length in ("22k", "50k", "86k") for alpha in ("1.0", "0.7")]
    lengths[2:2] = ["22k-xavier-alpha-0.8", "22k-xavier-alpha-0.6"]
    agree(ours["table 2"], *map(mean, [*lengths, *(f"22k-alpha-{alpha}" for alpha in ("1.0", "0.9", "0.8"))]))
    names = ("control-branch", "control-both", "alpha-0.7-attn-only", "alpha-0.7-mlp-only", "alpha-0.7", "alpha-1.0")
    runs = [f"22k-xavier-{name}-seed-0" for name in names]
    agree(ours["table 3b"], 0.7, *(scores(run)[PROBE, LAST] for run in runs))
    plain = ("22k-xavier-plain-decoder-seed-0", "22k-xavier-alpha-1.0-seed-0")
    agree(ours["table 3a"], 1.0, *(scores(run)[PROBE, LAST] for run in plain))
    diffusion = [f"cifar100-diffusion-8k-alpha-{alpha}-seed-0" for alpha in ("1.0", "0.7")]
    fids = (read(f"{run}/score.json")["scores"]["FID"]["value"] for run in diffusion)
    agree(ours["table 4"], *fids, *(read(f"{run}/evaluation.json")["probes"]["model"]["accuracy"] for run in diffusion))
    resnets = [f"cifar-resnet/alpha-{alpha}-blocks-{n}/finetune.json" for n in (8, 16) for alpha in ("1.0", "0.7")]
    agree(ours["figure 4"], *(read(run)[key] for key in ("accuracy", "entropy_rank") for run in resnets))


def test_sentences_on_longer_runs():
    def by_seed(length: str, alpha: str, metric: str) -> list[float]:
        return [scores(run)[metric, LAST] for run in seeds(f"{length}-xavier-alpha-{alpha}")]

    def gains(length: str, metric: str) -> list[float]:
        return [b - a for a, b in zip(*(by_seed(length, alpha, metric) for alpha in ("1.0", "0.7")))]

    text = said("results.md", "With 2.3 times the steps the gain of the two seeds", ", and 0.7 has its best")
    agree(text, *chain.from_iterable(gains(length, metric)[:2] for metric in (PROBE, KNN) for length in ("22k", "50k")))
    text = said("results.md", "over their shorter runs, and", "stay between them")
    agree(text, *(fmean(gains("86k", metric)) for metric in (PROBE, KNN)))
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
