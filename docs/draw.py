"""Draw the documents' figures.

python docs/draw.py                      all figures of numbers, from the JSON in docs/records
python docs/draw.py demo                 after `make demo`: its scores to docs/records, its figures, and its pictures
python docs/draw.py tiny-imagenet RUN RUN    pictures of models at work, which need weights: alpha_min 1.0, then 0.9

A sweep is recorded by its sweep.json and summary.json in docs/records/NAME; its scores and, where alpha_min was swept,
its gains over ordinary shortcuts are drawn to docs/images/NAME-SCORE.png and NAME-gain-SCORE.png.
"""

import json
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import residua
from residua.evaluate import Report
from residua.recipes.summary import compare, read_summary
from residua.report import figures, gallery
from residua.report.runs import by_depth
from residua.report.sweep import numeric_setting, setting_curves

RECORDS, IMAGES = (Path(__file__).parent / name for name in ("records", "images"))
RUNS = {
    "demo": {"fading": "demo-fading", "plain": "demo-plain"},
    "tiny-imagenet": {
        "alpha_min 1.0": "tiny-imagenet-22k-alpha-1.0-seed-0",
        "alpha_min 0.9": "tiny-imagenet-22k-alpha-0.9-seed-0",
    },
}
"""Prefix of the figures -> label -> record of the run."""
METRICS = {"demo": ("linear probe", "entropy rank"), "tiny-imagenet": ("linear probe", "kNN", "entropy rank")}
PICTURES = {
    "reconstructions": gallery.reconstructions,
    "feature-maps": gallery.patch_maps,
    "spectral-maps": lambda models, data: gallery.patch_maps(models, data, basis="spectral"),
    "attention": gallery.attention,
    "tsne": gallery.tsne,
}
SHOWN = {"demo": ("reconstructions",), "tiny-imagenet": tuple(PICTURES)}
PLAIN = {"alpha_min": "1.0"}


def numbers(out: Path = IMAGES) -> list[Path]:
    """Every figure of numbers whose record is there."""
    drawn = []
    for prefix, runs in RUNS.items():
        files = {label: RECORDS / name / "evaluation.json" for label, name in runs.items()}
        if all(file.exists() for file in files.values()):
            drawn += by_block(prefix, files, out)
        else:
            print(f"no records of {prefix}: its figures stay as they are", file=sys.stderr)
    for file in sorted(RECORDS.glob("*/summary.json")):
        drawn += sweep(file, out)
    return drawn


def by_block(prefix: str, files: dict[str, Path], out: Path) -> list[Path]:
    """Scores by block, beside the baselines of the last run."""
    reports = {label: Report.from_dict(json.loads(file.read_text())) for label, file in files.items()}
    *_, last = reports.values()
    drawn = []
    for metric in METRICS[prefix]:
        curves = {label: by_depth(report, metric) for label, report in reports.items()}
        pixels = next(iter(by_depth(last, metric, "pixels").values()))
        baselines = {"random init": by_depth(last, metric, "random init"), "pixels": pixels}
        unit = "nats" if metric == "entropy rank" else "%"
        drawn.append(save(figures.depth_curves(metric, curves, baselines, unit), out / f"{prefix}-{slug(metric)}.png"))
    return drawn


def sweep(file: Path, out: Path) -> list[Path]:
    """Scores of a sweep against the setting that is a number, and gains over alpha_min 1."""
    found, drawn = compare(read_summary(file), PLAIN), []
    x = numeric_setting(found)
    for score in dict.fromkeys(s.score for s in found) if x else ():
        for of, name in (("score", ""), ("difference", "gain-")):
            figure = setting_curves(found, score, x, of)
            if figure is not None:
                drawn.append(save(figure, out / f"{file.parent.name}-{name}{slug(score)}.png"))
    return drawn


def pictures(prefix: str, runs: Sequence[Path], out: Path = IMAGES) -> list[Path]:
    """What a document shows of models at work."""
    models = {label: residua.load(run) for label, run in zip(RUNS[prefix], runs, strict=True)}
    splits = residua.data.load(residua.train.Pretrain.read(runs[0] / "config.yaml").data.data)
    return [save(PICTURES[name](models, splits), out / f"{prefix}-{name}.png") for name in SHOWN[prefix]]


def record(prefix: str, runs: Sequence[Path]) -> None:
    """Keep the numbers of runs in docs/records."""
    for name, run in zip(RUNS[prefix].values(), runs, strict=True):
        (RECORDS / name).mkdir(exist_ok=True)
        for file in ("config.yaml", "environment.json", "evaluation.json", "metrics.jsonl"):
            shutil.copy(run / file, RECORDS / name / file)


def save(figure: figures.Figure, path: Path) -> Path:
    figure.savefig(path, dpi=110)
    return path


def slug(text: str) -> str:
    """linear-probe, of `linear probe (simple)`."""
    return re.sub(r"[^a-z0-9]+", "-", text.partition(" (")[0].lower()).strip("-")


def main(args: Sequence[str]) -> None:
    prefix, *given = args or [""]
    if prefix and prefix not in RUNS:
        sys.exit(f"{prefix!r} has no pictures; there are {', '.join(RUNS)}")
    if prefix == "demo":
        runs = [Path(*given or ["demo"]) / name for name in RUNS["demo"]]
        record("demo", runs)
    else:
        runs = [Path(run) for run in given]
    drawn = numbers() + (pictures(prefix, runs) if prefix else [])
    print("\n".join(map(str, drawn)))


if __name__ == "__main__":
    main(sys.argv[1:])
