"""Numbers of the documents are those of docs/records; links lead somewhere; commands are understood."""

import json
import re
import shlex
from decimal import Decimal
from functools import cache
from itertools import chain
from pathlib import Path
from statistics import fmean, stdev

import pytest
import tyro
from scipy.stats import t as student

from residua import alphas, cli, recipes
from residua.report.along import as_dynamics
from residua.report.runs import read_runs, while_training
from residua.train import Pretrain, read_metrics
from residua.train.options import auto_alpha

ROOT = Path(__file__).parent.parent
RECORDS = ROOT / "docs" / "records"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "benchmarks" / "README.md"]
LAST = 11
PROBE, KNN, RANK, RANKME = "linear probe", "kNN", "entropy rank", "RankMe"


def table(page: str, start: str) -> list[list[str]]:
    """Rows of the table whose first line starts so, each with its first cell."""
    text = (ROOT / "docs" / page).read_text()
    assert text.count(f"\n{start}") == 1, f"{page} has no one table that starts with {start}"
    lines = text[text.index(f"\n{start}") + 1 :].partition("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def agree(cell: str, *values: float) -> None:
    """The numbers of a cell are these, rounded to as many digits as it shows."""
    found = re.findall(r"[-+]?\d+(?:\.\d+)?(?:e-\d+)?", cell)
    assert len(found) == len(values), f"{cell!r} is to show {values}"
    for shown, value in zip(found, values):
        _, _, last = Decimal(shown).as_tuple()
        assert abs(float(shown) - value) <= 0.5001 * 10.0**last, f"{cell!r} is to show {values}"


@cache
def report(run: str) -> dict:
    name = run if run.startswith("demo") else f"tiny-imagenet-{run}"
    return json.loads((RECORDS / name / "evaluation.json").read_text())


def scores(run: str, subject: str = "model") -> dict[tuple[str, int], float]:
    """(metric, block) -> value; of raw pixels the block is -1."""
    return {(s["metric"], s["layer"]): s["value"] for s in report(run)["scores"] if s["subject"] == subject}


def top5(run: str) -> float:
    """Of the last block; early records have it of the block that the probe chose alone, which there is the last."""
    own = (s for s in report(run)["scores"] if (s["metric"], s["subject"], s["layer"]) == (PROBE, "model", LAST))
    settings, probe = next(own)["settings"], report(run)["probes"]["model"]
    assert "top5" in settings or probe["best"]["layer"] == LAST
    return settings.get("top5", probe["top5"])


def seeds(run: str) -> list[str]:
    """Runs that differ in nothing else."""
    return [path.name.removeprefix("tiny-imagenet-") for path in sorted(RECORDS.glob(f"tiny-imagenet-{run}-seed-*"))]


def best(run: str, metric: str) -> tuple[float, int]:
    return max((value, block) for (name, block), value in scores(run).items() if name == metric)


def difference(plain: list[float], faded: list[float]) -> tuple[float, ...]:
    """One difference; of two seeds their mean and both; of more their mean and half of its 95 % interval."""
    each = [b - a for a, b in zip(plain, faded, strict=True)]
    if len(each) < 3:
        return (fmean(each), *each)[: 3 if len(each) == 2 else 1]
    return fmean(each), float(student.ppf(0.975, len(each) - 1)) * stdev(each) / len(each) ** 0.5


def last_loss(run: str) -> float:
    rows = [row for row in read_metrics(RECORDS / f"tiny-imagenet-{run}") if "loss" in row]
    return fmean(row["loss"] for row in rows if row["step"] > rows[-1]["step"] - 1000)


def along(run: str, metric: str) -> list[float]:
    rows = read_metrics(RECORDS / f"tiny-imagenet-{run}")
    return [row[f"eval/{metric.replace(' ', '_')}"] for row in rows if "eval/kNN" in row]


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
    page = " ".join(PAGES[0].read_text().split())
    text = page.partition("after 22,000 steps a probe")[2].partition("Whether fading")[0]
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


def anchor(heading: str) -> str:
    """What GitHub calls a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def test_links_lead_to_headings_that_exist():
    for page in PAGES:
        for name, target in re.findall(r"\]\(([^)#\s]*)#([^)]+)\)", page.read_text()):
            if not name.startswith("http"):
                headings = re.findall(r"^#+ (.*)$", (page.parent / name if name else page).read_text(), re.MULTILINE)
                assert target in map(anchor, headings), f"{page.name} links to {name}#{target}"


def commands(page: Path) -> list[str]:
    """Those that stand on lines of their own, without dots and comments behind them; letters stand for numbers."""
    text = re.sub(r"\\\n\s*", "", page.read_text())
    lines = re.findall(r"^ {4}(residua [a-z]+ .*)$", text, re.MULTILINE)
    return [re.sub(r" [A-Z](?= |$)", " 1", re.sub(r"( \.\.\.)?( +#.*)?$", "", line)) for line in lines]


class Understood(BaseException):
    """Raised where a command would begin its work."""


@pytest.mark.parametrize("page", filter(commands, PAGES), ids=lambda page: page.stem)
def test_commands_are_understood(page, monkeypatch, tmp_path, capsys):
    parse = tyro.cli

    def only_parse(*args, **kwargs):
        parse(*args, **kwargs)
        raise Understood

    monkeypatch.setattr(tyro, "cli", only_parse)
    monkeypatch.chdir(tmp_path)
    for line in commands(page):
        try:
            cli.main(shlex.split(line)[1:])
        except Understood:
            continue
        except SystemExit:
            pass
        raise AssertionError(f"{page.name}: {line}\n{capsys.readouterr().err}")
