"""What the documents say, and what docs/records holds."""

import json
import re
from decimal import Decimal
from functools import cache
from pathlib import Path
from statistics import fmean, median, stdev

from scipy.stats import t as student

from residua.train import read_metrics

ROOT = Path(__file__).parent.parent.parent
RECORDS = ROOT / "docs" / "records"
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


def folder(run: str) -> Path:
    """Of a run on Tiny-ImageNet, which goes without that name here, or on Imagenette."""
    return RECORDS / (run if run.startswith("imagenette") else f"tiny-imagenet-{run}")


@cache
def report(run: str) -> dict:
    return json.loads((folder(run) / "evaluation.json").read_text())


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
    found = sorted(RECORDS.glob(f"{folder(run).name}-seed-*"))
    return [path.name.removeprefix("tiny-imagenet-") for path in found]


def best(run: str, metric: str) -> tuple[float, int]:
    return max((value, block) for (name, block), value in scores(run).items() if name == metric)


def difference(plain: list[float], faded: list[float]) -> tuple[float, ...]:
    """One difference; of two seeds their mean and both; of more their mean and half of its 95 % interval."""
    each = [b - a for a, b in zip(plain, faded, strict=True)]
    if len(each) < 3:
        return (fmean(each), *each)[: 3 if len(each) == 2 else 1]
    return fmean(each), float(student.ppf(0.975, len(each) - 1)) * stdev(each) / len(each) ** 0.5


def last_loss(run: str) -> float:
    rows = [row for row in read_metrics(folder(run)) if "loss" in row]
    return fmean(row["loss"] for row in rows if row["step"] > rows[-1]["step"] - 1000)


def along(run: str, metric: str) -> list[float]:
    rows = read_metrics(folder(run))
    return [row[f"eval/{metric.replace(' ', '_')}"] for row in rows if "eval/kNN" in row]


def said(page: str, start: str, end: str) -> str:
    """What stands between two passages of a page, in one line."""
    text = " ".join((ROOT / "docs" / page).read_text().split())
    assert text.count(start) == 1, f"{page} does not say once {start!r}"
    return text.partition(start)[2].partition(end)[0]


def read(record: str) -> dict:
    return json.loads((RECORDS / record).read_text())


def losses(record: str, first: int, last: int) -> float:
    """Mean training loss after one step and up to another."""
    return fmean(r["loss"] for r in read_metrics(RECORDS / record) if "loss" in r and first < r["step"] <= last)


def fids_along(record: str) -> dict[int, float]:
    """Step -> FID."""
    return {row["step"]: row["eval/fid"] for row in read_metrics(RECORDS / record) if "eval/fid" in row}


def speed(record: str) -> float:
    """Median images per second along training."""
    return median(row["images_per_s"] for row in read_metrics(RECORDS / record) if "images_per_s" in row)


def points(text: str) -> str:
    """Its numbers that have a point and are no alpha_min with a colon behind it."""
    return " ".join(re.findall(r"(?<![\d.])\d+\.\d+(?![\d:])", text))


def last_block(record: str, metric: str) -> float:
    own = (metric, "model", LAST)
    found = read(f"{record}/evaluation.json")["scores"]
    return next(s["value"] for s in found if (s["metric"], s["subject"], s["layer"]) == own)


def take_off(record: str, level: float = 0.7) -> float:
    """The first step at which the mean loss of three records is below a level; infinite where none is."""
    rows = [row for row in read_metrics(RECORDS / record) if "loss" in row]
    below = (c["step"] for a, b, c in zip(rows, rows[1:], rows[2:]) if (a["loss"] + b["loss"] + c["loss"]) / 3 < level)
    return next(below, float("inf"))


def whole(cell: str) -> list[int]:
    """The whole numbers of a cell, which may have commas for thousands."""
    return [int(number.replace(",", "")) for number in re.findall(r"\d+(?:,\d{3})*", cell)]
