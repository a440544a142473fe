"""Tables of results.md, and the demo's of the front page, are of docs/records."""

import importlib.util
import json
import re
from itertools import chain
from statistics import fmean, stdev

import pytest

from residua import alphas
from residua.report.along import as_dynamics
from residua.report.demo import ECHO
from residua.report.demo import EMBEDDING as EMBEDDED
from residua.report.runs import read_runs, while_training
from residua.train import Pretrain, read_metrics
from residua.train.options import auto_alpha, read_flat

from .records import (
    KNN,
    LAST,
    PROBE,
    RANK,
    RANKME,
    RECORDS,
    ROOT,
    agree,
    along,
    best,
    difference,
    fids_along,
    last_loss,
    losses,
    points,
    read,
    report,
    said,
    scores,
    seeds,
    speed,
    table,
    top5,
    whole,
)


def demos() -> list[dict]:
    return json.loads((RECORDS / "demo-noise.json").read_text())["runs"]


def spread(score: str, subject: str) -> tuple[float, float]:
    """Mean and deviation over all runs of the demo."""
    values = [run["numbers"][score][subject] for run in demos()]
    return fmean(values), stdev(values)


def test_demo():
    spec = importlib.util.spec_from_file_location("demo_noise", ROOT / "benchmarks" / "demo_noise.py")
    noise = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(noise)
    page = (ROOT / "docs" / "results.md").read_text()
    assert noise.table(json.loads((RECORDS / "demo-noise.json").read_text())) in page
    gains = said("results.md", "has the same sign in all runs. Pretraining is worth", "over random weights; raw")
    gaps = [spread(score, "fading")[0] - spread(score, "random init")[0] for score in (PROBE, KNN)]
    agree(gains, *gaps)
    assert all(run["numbers"][KNN]["pixels"] > run["numbers"][KNN]["fading"] for run in demos())
    probes = [run["numbers"][PROBE]["fading"] - run["numbers"][PROBE]["plain"] for run in demos()]
    assert min(probes) < 0 < max(probes)


def test_bars_of_the_front_page():
    told = said("../README.md", "In the ordinary network above", "Tiny-ImageNet, after 50,000 steps, the echo is")
    told = told.partition("(`make demo`")[0]
    agree(told, *(value for name in ("plain", "fading") for score in (EMBEDDED, ECHO) for value in spread(score, name)))
    echoes = said("../README.md", "Tiny-ImageNet, after 50,000 steps, the echo is", "([more]")
    agree(echoes, *(100 * echo(name) for name in ("1.0-seed-2", "0.7-seed-2")))


def test_what_is_known_on_the_front_page():
    """Means over seeds and the interval of their differences, as in the tables of results.md."""
    rows = table("../README.md", "| training | linear probe |")
    for (_, probe, knn, count), length in zip(rows, ("22k", "50k", "86k"), strict=True):
        runs = [seeds(f"{length}-xavier-alpha-{alpha}") for alpha in ("1.0", "0.7")]
        assert int(count) == len(runs[0]) == len(runs[1])
        for cell, metric in ((probe, PROBE), (knn, KNN)):
            a, b = ([scores(run)[metric, LAST] for run in own] for own in runs)
            agree(cell.replace("->", ""), fmean(a), fmean(b), *difference(a, b))


def mixing_record(name: str) -> dict:
    """By alpha_min and seed of a run of 50,000 steps on Tiny-ImageNet, or by the name of another record."""
    run = name if name.startswith("imagenette") else f"tiny-imagenet-50k-xavier-alpha-{name}"
    return read(f"{run}/mixing.json")


def last_layer(name: str, kind: str = "centred") -> list[float]:
    return mixing_record(name)[kind]


def echo(name: str, kind: str = "centred") -> float:
    shares = last_layer(name, kind)
    return sum(shares[: (len(shares) - 1) // 3 + 1])


@pytest.mark.parametrize(("start", "names"), [
    ("| share of the last layer |", ["1.0-seed-2", "0.7-seed-2", "0.6-seed-0"]),
    ("| share of the last layer, photographs |",
     [f"imagenette-224-alpha-{name}" for name in ("1.0-seed-1", "0.8-seed-0", "0.7-seed-1", "0.6-seed-0")]),
])  # fmt: skip
def test_what_the_last_layer_is_made_of(start, names):
    rows = table("results.md", start)
    for column, name in enumerate(names, 1):
        shares = last_layer(name)
        assert sum(shares) == pytest.approx(1, abs=1e-3)
        first, second = len(shares) // 3 + 1, 2 * (len(shares) - 1) // 3 + 1
        parts = [shares[0], echo(name), sum(shares[first:second]), sum(shares[second:])]
        depth = sum(i * share for i, share in enumerate(shares)) / (len(shares) - 1)
        for row, value in zip(rows, [*(100 * part for part in parts), depth, 100 * echo(name, "raw")], strict=True):
            agree(row[column], value)


def test_sentences_on_what_the_last_layer_is_made_of():
    told = said("results.md", "first third of the sublayers, ", "Training could have undone that")
    ordinary, faded = (last_layer(name) for name in ("1.0-seed-2", "0.7-seed-2"))
    mlp = mixing_record("0.7-seed-2")["writers"].index("blocks.0.mlp")
    left = [mixing_record(name)["alpha_eff"] for name in ("0.7-seed-2", "0.6-seed-0")]
    shown = points(told.replace("alpha_min 0.7", "").replace("at 0.7", "").replace("at 0.6", ""))
    agree(shown, 100 * ordinary[mlp], 100 * faded[mlp], *left)


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


LONGER = {
    "probe": lambda run: (scores(run)[PROBE, LAST],), "best probe": lambda run: best(run, PROBE),
    "top 5": lambda run: (top5(run),), "kNN": lambda run: (scores(run)[KNN, LAST],),
    "best kNN": lambda run: best(run, KNN), "rank": lambda run: (scores(run)[RANK, LAST],),
    "RankMe": lambda run: (scores(run)[RANKME, LAST],), "loss": lambda run: (last_loss(run),),
}  # fmt: skip


def test_runs_of_50000_steps():
    plain, faded, more = (seeds(f"50k-xavier-alpha-{alpha}") for alpha in ("1.0", "0.7", "0.6"))
    assert (len(plain), len(faded), len(more)) == (3, 3, 1)
    rows = table("results.md", "| 50,000 steps | alpha_min 1 | mean |")
    for (_, ones, one, others, other, gain, stronger), of in zip(rows, LONGER.values(), strict=True):
        a, b = ([of(run)[0] for run in runs] for runs in (plain, faded))
        for cell, runs in ((ones, plain), (others, faded), (stronger, more)):
            agree(cell, *chain.from_iterable(map(of, runs)))
        agree(one, fmean(a))
        agree(other, fmean(b))
        agree(gain, *difference(a, b))


def test_photographs():
    plain, faded = (seeds(f"imagenette-224-alpha-{alpha}") for alpha in ("1.0", "0.7"))
    others = [f"imagenette-224-alpha-{name}-seed-0" for name in ("0.8", "0.6", "1.0-lr-6e-4")]
    assert (len(plain), len(faded)) == (2, 2)
    read = [of for name, of in LONGER.items() if name != "top 5"]
    rows = table("results.md", "| 200 epochs of Imagenette |")
    for (_, ones, one, less, many, mean, gain, more, slow), of in zip(rows, read, strict=True):
        a, b = ([of(run)[0] for run in runs] for runs in (plain, faded))
        for cell, runs in ((ones, plain), (many, faded), *zip((less, more, slow), ([run] for run in others))):
            agree(cell, *chain.from_iterable(map(of, runs)))
        agree(one, fmean(a))
        agree(mean, fmean(b))
        agree(gain, *difference(a, b))
    rows = iter(table("results.md", "| seed 1, after epochs |"))
    for metric in (PROBE, KNN):
        for run in (plain[1], faded[1]):
            for cell, value in zip(next(rows)[1:], along(run, metric), strict=True):
                agree(cell, value)
    free = [scores(plain[0], subject) for subject in ("random init", "pixels")]
    untrained, pixels = ([own[m, layer] for m in (PROBE, KNN)] for own, layer in zip(free, (LAST, -1)))
    agree(
        said("results.md", "An untrained encoder of alpha_min 1 has", "**In kNN").replace(".\n", ""),
        *untrained,
        *pixels,
    )


def test_sentences_on_photographs():
    def mean(name: str, metric: str) -> float:
        return fmean(scores(run)[metric, LAST] for run in seeds(f"imagenette-224-alpha-{name}"))

    def apart(a: str, b: str, metric: str) -> float:
        one, other = (scores(f"imagenette-224-alpha-{name}-seed-0")[metric, LAST] for name in (a, b))
        return other - one

    def chance(share: float) -> float:
        """95 % of the differences of two scores around this one lie within so many points, images being all chance."""
        return 196 * (2 * share * (1 - share) / 3925) ** 0.5

    gains = [mean("0.7", metric) - mean("1.0", metric) for metric in (PROBE, KNN)]
    text = said("results.md", "more than on Tiny-ImageNet after 50,000 steps**", "in both seeds over 5")
    longer = [fmean(scores(run)[KNN, LAST] for run in seeds(f"50k-xavier-alpha-{a}")) for a in ("1.0", "0.7")]
    agree(points(text), longer[1] - longer[0], gains[1], 0.7)
    text = said("results.md", "in both seeds over 5.", "0.8 and 0.6, one seed each, are in between")
    agree(points(text), 0.6, chance(0.67))
    for name in ("1.0", "0.7"):
        one, other = (scores(run)[KNN, LAST] for run in seeds(f"imagenette-224-alpha-{name}"))
        assert abs(one - other) < 0.6
    assert mean("1.0", KNN) < mean("0.8", KNN) < mean("0.6", KNN) < mean("0.7", KNN)
    text = said("results.md", "**In the probe there is no sure gain**:", "at the last block. Along")
    agree(points(text), gains[0], 0.7, chance(0.79), 0.8, -apart("1.0", "0.8", PROBE), 0.6)
    assert abs(apart("1.0", "0.6", PROBE)) < 0.1
    for name in ("0.8", "0.7"):  # "up to block 9 both are behind the ordinary network"
        pairs = zip(seeds("imagenette-224-alpha-1.0"), seeds(f"imagenette-224-alpha-{name}"))
        for plain, faded in pairs:
            ahead = [scores(faded)[KNN, block] > scores(plain)[KNN, block] for block in range(12)]
            assert ahead == [False] * 10 + [True] * 2
    text = said("results.md", "by the training loss: with 6e-4 it is", "in the probe. 3e-4, which")
    agree(text.replace("points worse in kNN and", ""), *(apart("1.0-lr-6e-4", "1.0", m) for m in (KNN, PROBE)))
    agree(
        said("log.md", "A learning rate of 6e-4 for the ordinary network** there.", "points less"),
        apart("1.0-lr-6e-4", "1.0", KNN),
    )
    text = said("../README.md", "7,400 steps, two seeds) kNN goes from", "gains no more than").replace("**", "")
    agree(text, *(mean(name, metric) for metric in (KNN, PROBE) for name in ("1.0", "0.7")))
    text = said("choosing-alpha.md", "7,398 steps of 256 images at 1.2e-3,", "which was not run; for").partition("): ")[
        2
    ]
    each = [
        b - a
        for a, b in zip(*([scores(r)[KNN, LAST] for r in seeds(f"imagenette-224-alpha-{n}")] for n in ("1.0", "0.7")))
    ]
    agree(
        points(text), 0.7, gains[1], *each, gains[0], 0.8, apart("1.0", "0.8", KNN), -apart("1.0", "0.8", PROBE),
        auto_alpha(7398, depth=12, zero_init=False),
    )  # fmt: skip
    speeds = said("results.md", "Three runs at once under MPS trained", ": 9 and 12 minutes")
    runs = ("imagenette-224-alpha-1.0-seed-0", "imagenette-224-alpha-1.0-seed-1")
    assert [abs(speed(run) - shown) < 10 for run, shown in zip(runs, whole(speeds), strict=True)] == [True, True]
    for run in RECORDS.glob("imagenette-224-*"):
        assert read_metrics(run)[-1]["step"] == 7398


def test_longer_runs():
    names = ("86k-xavier-alpha-1.0", "86k-xavier-alpha-0.7", "22k-xavier-plain-decoder", "22k-xavier-alpha-1.0")
    runs = [f"{name}-seed-0" for name in names]
    read = [of for name, of in LONGER.items() if name != "best probe"]
    for (_, *cells), of in zip(table("results.md", "| | 86k: alpha_min 1 |"), read, strict=True):
        agree(cells.pop(2), of(runs[1])[0] - of(runs[0])[0])
        for cell, run in zip(cells, runs, strict=True):
            agree(cell, *of(run))


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


def test_records_of_weights_name_their_file_and_digest():
    found = sorted(RECORDS.glob("**/weights.json"))
    assert len(found) >= 3
    for file in found:
        kept = read(str(file.relative_to(RECORDS)))
        assert kept["file"] == f"{file.parent.name}.safetensors"
        assert re.fullmatch(r"[0-9a-f]{64}", kept["sha256"])
        assert re.fullmatch(r"[0-9a-f]{7,40}", kept["commit"])


def test_records_are_of_what_their_names_say():
    runs = sorted(path.parent for path in RECORDS.glob("**/metrics.jsonl"))
    for run in runs:
        settings, name = read_flat(run / "config.yaml"), run.name
        said = dict(re.findall(r"(alpha|anneal|until|seed|lr|zero|blocks)-(True|False|[\de.-]+\d|\d)", name))
        own = {
            "alpha": settings["alpha_min"], "anneal": settings["alpha_min"], "until": settings["until"],
            "seed": settings["seed"], "lr": settings["lr"], "zero": settings.get("zero_init"),
            "blocks": sum(settings.get("stages") or ()),
        }  # fmt: skip
        for key, value in said.items():
            assert own[key] == (value == "True" if key == "zero" else float(value)), (name, key)
        assert ("anneal" in name) == (settings["anneal"] > 0), name
        assert name.startswith("constant") == (settings["schedule"] == "constant"), name
        if name.startswith("tiny-imagenet-22k"):
            assert settings["zero_init"] == ("xavier" not in name), name
            assert (settings["steps"], settings["batch_size"]) == (21875, 256), name
            assert settings["lr"] == (0.0006 if "lr-6e-4" in name else 0.0003), name


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


def resnets(alpha: str, blocks: int) -> list[dict]:
    """One a seed."""
    runs = sorted((RECORDS / "cifar-resnet").glob(f"alpha-{alpha}-blocks-{blocks}-seed-*"))
    return [read(f"cifar-resnet/{run.name}/finetune.json") for run in runs]


def test_resnets():
    for alpha, *cells in table("results.md", "| alpha_min | 8 blocks | 12 blocks"):
        for cell, blocks in zip(cells, (8, 12, 16), strict=True):
            found = resnets(alpha, blocks)
            agree(cell, *(run[key] for key in ("accuracy", "entropy_rank") for run in found))
    for name, *cells in table("results.md", "| | 8 blocks | 12 blocks"):
        key = "entropy_rank" if "rank" in name else "accuracy"
        for cell, blocks in zip(cells, (8, 12, 16), strict=True):
            agree(
                cell, *difference(*([run[key] for run in resnets(a, blocks)] for a in ("1.0", name.partition(":")[0])))
            )


def full_width(alpha: str, key: str, record: str = "cifar-resnet18") -> list[float]:
    """One a seed."""
    runs = sorted(RECORDS.glob(f"{record}/alpha-{alpha}-seed-*"))
    return [read(f"{record}/{run.name}/finetune.json")[key] for run in runs]


def test_resnets_of_full_width():
    accuracy, rank = table("results.md", "| ResNet-18, 8 blocks | alpha_min 1")
    for (_, *cells, apart), key in ((accuracy, "accuracy"), (rank, "entropy_rank")):
        plain, faded = full_width("1.0", key), full_width("0.7", key)
        for cell, values in zip(cells, (plain, faded), strict=True):
            agree(cell, *values)
        agree(apart, *difference(plain, faded))
    for run in ("alpha-1.0-seed-0", "alpha-0.7-seed-0"):
        own = read(f"cifar-resnet18/{run}/finetune.json")
        low, high = own["interval"]
        agree(said("results.md", "each accuracy is good to ±", "points"), (high - low) / 2)
    ranks = [
        [row["eval/entropy_rank"] for run in runs for row in read_metrics(run) if "eval/entropy_rank" in row]
        for runs in (sorted(RECORDS.glob(f"cifar-resnet18/alpha-{alpha}-seed-*")) for alpha in ("1.0", "0.7"))
    ]
    assert [faded < plain for plain, faded in zip(*ranks, strict=True)].count(True) == 28
    assert len(ranks[0]) == 30
    narrow = [[run["entropy_rank"] for run in resnets(alpha, 8)] for alpha in ("1.0", "0.7")]
    wide = [full_width(alpha, "entropy_rank") for alpha in ("1.0", "0.7")]
    assert 1.8 < difference(*wide)[0] / difference(*narrow)[0] < 2.2  # "by twice as much"


def test_resnets_on_cifar10():
    for (_, *cells, apart), key in zip(table("results.md", "| ResNet-18 on CIFAR-10"), ("accuracy", "entropy_rank")):
        pair = [full_width(alpha, key, "cifar10-resnet18") for alpha in ("1.0", "0.7")]
        for cell, values in zip(cells, pair, strict=True):
            assert len(values) == 8
            agree(cell, *values)
        agree(apart, *difference(*pair))
    plain, faded = (full_width(alpha, "accuracy", "cifar10-resnet18") for alpha in ("1.0", "0.7"))
    assert sum(y > x for x, y in zip(plain, faded)) == 4
    mean, half = difference(plain, faded)
    assert mean + half < 0.8  # the paper's gain
    plain, faded = (full_width(alpha, "entropy_rank", "cifar10-resnet18") for alpha in ("1.0", "0.7"))
    assert all(y < x for x, y in zip(plain, faded))


def test_resnets_of_16_blocks_on_cifar10():
    def last_epoch(run) -> float:
        return fmean(row["loss"] for row in read_metrics(run) if "loss" in row and row["step"] > 782 - 39)

    deep, longer = "cifar10-resnet18-16-blocks", "cifar10-resnet18-16-blocks-40-epochs"
    measured = [
        *([full_width(alpha, key, deep) for alpha in ("1.0", "0.7")] for key in ("accuracy", "entropy_rank")),
        [[last_epoch(run) for run in sorted((RECORDS / deep).glob(f"alpha-{a}-*"))] for a in ("1.0", "0.7")],
        *([full_width(alpha, key, longer) for alpha in ("1.0", "0.7")] for key in ("accuracy", "entropy_rank")),
    ]
    rows = table("results.md", "| ResNet of 16 blocks on CIFAR-10")
    for (_, *cells, apart), pair in zip(rows, measured, strict=True):
        for cell, values in zip(cells, pair, strict=True):
            agree(cell, *values)
        agree(apart, *(difference(*pair) if len(pair[0]) == 3 else [pair[1][0] - pair[0][0]]))
    for key in ("accuracy", "entropy_rank"):  # "and there accuracy falls too", in every seed
        plain, faded = (full_width(alpha, key, deep) for alpha in ("1.0", "0.7"))
        assert all(y < x for x, y in zip(plain, faded, strict=True))
    page = (RECORDS.parent / "results.md").read_text().replace("\n", " ")
    shallow, plain = (fmean(full_width("1.0", "entropy_rank", name)) for name in ("cifar10-resnet18", deep))
    assert f"({shallow:.2f} with 8 blocks, {plain:.2f} here)" in page
    lost = [full_width("1.0", "accuracy", name)[0] - full_width("0.7", "accuracy", name)[0] for name in (longer, deep)]
    assert "{:.2f} points of {:.2f} are still missing".format(*lost) in page


def test_papers_tables():
    """Of what stands beside the paper's numbers, ours."""
    rows = [row for row in table("results.md", "| of the paper | its numbers") if row[2]]
    ours = {row[0].partition(",")[0]: points(row[2]) for row in rows}

    def mean(run: str, metric: str = PROBE) -> float:
        return fmean(scores(own)[metric, LAST] for own in seeds(run))

    lengths = [f"{length}-xavier-alpha-{alpha}" for length in ("22k", "50k", "86k") for alpha in ("1.0", "0.7")]
    lengths[4:4] = ["50k-xavier-alpha-0.6"]
    lengths[2:2] = ["22k-xavier-alpha-0.8", "22k-xavier-alpha-0.6"]
    lengths += [f"22k-alpha-{alpha}" for alpha in ("1.0", "0.9", "0.8")]
    lengths += [f"imagenette-224-alpha-{alpha}" for alpha in ("1.0", "0.7", "0.8", "0.6")]
    agree(ours["table 2"], *map(mean, lengths))
    names = ("control-branch", "control-both", "alpha-0.7-attn-only", "alpha-0.7-mlp-only", "alpha-0.7", "alpha-1.0")
    runs = [f"22k-xavier-{name}-seed-0" for name in names]
    agree(ours["table 3b"], 0.7, *(scores(run)[PROBE, LAST] for run in runs))
    plain = ("22k-xavier-plain-decoder-seed-0", "22k-xavier-alpha-1.0-seed-0")
    agree(ours["table 3a"], 1.0, *(scores(run)[PROBE, LAST] for run in plain))
    diffusion = [f"cifar100-diffusion-8k-alpha-{alpha}-seed-0" for alpha in ("1.0", "0.7")]
    fids = (read(f"{run}/score.json")["scores"]["FID"]["value"] for run in diffusion)
    found = [read(f"{run}/evaluation.json")["probes"]["model"]["accuracy"] for run in diffusion]
    longer = [fids_along(f"cifar100-diffusion-24k-alpha-{alpha}-seed-0") for alpha in ("1.0", "0.7")]
    agree(ours["table 4"], *fids, *found, *(own[step] for step in (8000, 24000) for own in longer))
    found = [resnets(alpha, blocks) for blocks in (8, 16) for alpha in ("1.0", "0.7")]
    narrow = (fmean(run[key] for run in own) for key in ("accuracy", "entropy_rank") for own in found)
    full = (
        fmean(full_width(alpha, key, record))
        for record in ("cifar-resnet18", "cifar10-resnet18", "cifar10-resnet18-16-blocks")
        for key in ("accuracy", "entropy_rank")
        for alpha in ("1.0", "0.7")
    )
    agree(ours["figure 4"], *narrow, *full)
