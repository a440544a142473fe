"""Draw the documents' figures.

python docs/draw.py                      all figures of numbers, from the JSON in docs/records
python docs/draw.py tiny-imagenet RUN RUN    pictures of models at work, which need weights: alpha_min 1.0, then 0.9

A sweep is recorded by its sweep.json and summary.json in docs/records/NAME; its scores and, where alpha_min was swept,
its gains over ordinary shortcuts are drawn to docs/images/NAME-SCORE.png and NAME-gain-SCORE.png.
"""

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, stdev

import torch

import residua
from residua.anatomy.mixing import EMBEDDING, Mixing
from residua.evaluate import Report
from residua.evaluate.diffusion import best, grid
from residua.recipes.summary import compare, read_summary
from residua.report import figures, gallery
from residua.report.anatomy import share_bars
from residua.report.curves import epoch_curves, noise_heatmap, norm_curves, size_curves, step_curves
from residua.report.demo import ECHO
from residua.report.demo import EMBEDDING as EMBEDDED
from residua.report.runs import by_depth
from residua.report.sweep import numeric_setting, setting_curves
from residua.train import read_metrics

Curve = Mapping[float, float]
Folders = Mapping[str, Sequence[Path]]  # label -> runs, one a seed

RECORDS, IMAGES = (Path(__file__).parent / name for name in ("records", "images"))
RUNS = {
    "tiny-imagenet": {
        "alpha_min 1.0": "tiny-imagenet-22k-alpha-1.0-seed-0",
        "alpha_min 0.9": "tiny-imagenet-22k-alpha-0.9-seed-0",
        "alpha_min 0.8": "tiny-imagenet-22k-alpha-0.8-seed-0",
        "annealed to 0.7": "tiny-imagenet-22k-anneal-0.7-seed-0",
    },
    "tiny-imagenet-xavier": {
        "alpha_min 1.0": "tiny-imagenet-22k-xavier-alpha-1.0-seed-*",
        "alpha_min 0.8": "tiny-imagenet-22k-xavier-alpha-0.8-seed-*",
        "alpha_min 0.7": "tiny-imagenet-22k-xavier-alpha-0.7-seed-*",
        "alpha_min 0.6": "tiny-imagenet-22k-xavier-alpha-0.6-seed-*",
    },
    "tiny-imagenet-50k": {
        "alpha_min 1.0": "tiny-imagenet-50k-xavier-alpha-1.0-seed-*",
        "alpha_min 0.7": "tiny-imagenet-50k-xavier-alpha-0.7-seed-*",
        "alpha_min 0.6": "tiny-imagenet-50k-xavier-alpha-0.6-seed-*",
    },
    "tiny-imagenet-86k": {
        "alpha_min 1.0": "tiny-imagenet-86k-xavier-alpha-1.0-seed-*",
        "alpha_min 0.7": "tiny-imagenet-86k-xavier-alpha-0.7-seed-*",
    },
    "imagenette-224": {
        "alpha_min 1.0": "imagenette-224-alpha-1.0-seed-*",
        "alpha_min 0.8": "imagenette-224-alpha-0.8-seed-*",
        "alpha_min 0.7": "imagenette-224-alpha-0.7-seed-*",
        "alpha_min 0.6": "imagenette-224-alpha-0.6-seed-*",
    },
    "tiny-imagenet-batch-64": {
        "alpha_min 1.0": "tiny-imagenet-batch-64-alpha-1.0-lr-1.5e-4-seed-0",
        "alpha_min 0.8": "tiny-imagenet-batch-64-alpha-0.8-lr-1.5e-4-seed-0",
        "alpha_min 0.7": "tiny-imagenet-batch-64-alpha-0.7-lr-1.5e-4-seed-0",
    },
    "cifar100-1200-steps": {
        "alpha_min 1.0": "cifar100-1200-steps/alpha-1.0-zero-False-seed-*",
        "alpha_min 0.7": "cifar100-1200-steps/alpha-0.7-zero-False-seed-*",
        "0.7, annealed": "cifar100-1200-steps/alpha-0.7-annealed-seed-*",
        "0.7, until 0.75": "cifar100-1200-steps/alpha-0.7-until-0.75-seed-*",
        "constant 0.846": "cifar100-1200-steps/constant-0.846-seed-*",
    },
    "cifar100-diffusion": {
        "alpha_min 1.0": "cifar100-diffusion-8k-alpha-1.0-seed-0",
        "alpha_min 0.7": "cifar100-diffusion-8k-alpha-0.7-seed-0",
    },
    "cifar100-diffusion-seed-1": {
        "alpha_min 1.0": "cifar100-diffusion-8k-alpha-1.0-seed-1",
        "alpha_min 0.7": "cifar100-diffusion-8k-alpha-0.7-seed-1",
    },
    "cifar100-diffusion-24k": {
        "alpha_min 1.0": "cifar100-diffusion-24k-alpha-1.0-seed-*",
        "alpha_min 0.7": "cifar100-diffusion-24k-alpha-0.7-seed-*",
    },
}
"""Prefix of the figures -> label -> record of the run, or a pattern of its seeds."""
METRICS = {
    "tiny-imagenet": ("linear probe", "kNN", "entropy rank"),
    "tiny-imagenet-xavier": ("linear probe", "kNN", "entropy rank"),
    "tiny-imagenet-50k": ("linear probe", "kNN"),
    "tiny-imagenet-86k": ("linear probe", "kNN"),
    "imagenette-224": ("linear probe", "kNN"),
}
"""Scores drawn by block, from evaluation.json."""
GAINS = {"eval/linear_probe": "gain in linear probe", "eval/kNN": "gain in kNN"}
ALONG = {
    "tiny-imagenet": GAINS,
    "tiny-imagenet-xavier": GAINS,
    "tiny-imagenet-50k": GAINS,
    "tiny-imagenet-86k": GAINS,
    "tiny-imagenet-batch-64": GAINS,
    "cifar100-1200-steps": {"loss": "training loss"},
    "cifar100-diffusion": {"loss": "training loss"},
    "cifar100-diffusion-seed-1": {"loss": "training loss", "eval/fid": "FID (2,500 samples)"},
    "cifar100-diffusion-24k": {"loss": "training loss", "eval/fid": "FID (2,500 samples)"},
}
"""What is drawn along training, from metrics.jsonl."""
CHOOSING = {
    "tiny-imagenet": "from zero, batches of 256",
    "tiny-imagenet-xavier": "Xavier, batches of 256",
    "tiny-imagenet-batch-64": "from zero, batches of 64",
}
"""Prefixes whose gains over alpha_min 1.0 stand side by side, and their titles."""
LENGTHS = {"5k": "0.914", "10k": "0.814", "22k": "0.7", "50k": "0.7", "86k": "0.7"}
"""Length of runs on Tiny-ImageNet -> the alpha_min that `auto` chooses for it."""
CONTROLS = (
    "alpha-1.0", "alpha-0.7-attn-only", "alpha-0.7-mlp-only", "alpha-0.8", "alpha-0.7", "alpha-0.6", "control-both",
)  # fmt: skip
"""Runs of 22,000 steps on Tiny-ImageNet, seed 0, by what is left of the input at the end."""
SMOOTH = 10  # neighbouring losses whose mean is a point of a curve
PICTURES = {
    "reconstructions": gallery.reconstructions,
    "feature-maps": gallery.patch_maps,
    "spectral-maps": lambda models, data: gallery.patch_maps(models, data, basis="spectral"),
    "attention": gallery.attention,
    "tsne": gallery.tsne,
}
SHOWN = {"tiny-imagenet": tuple(PICTURES)}
PLAIN = {"alpha_min": "1.0"}


def numbers(out: Path = IMAGES) -> list[Path]:
    """Every figure of numbers whose record is there."""
    drawn = []
    for prefix, runs in RUNS.items():
        folders = {label: sorted(RECORDS.glob(name)) for label, name in runs.items()}
        if all(folders.values()):
            drawn += by_block(prefix, folders, out) + by_noise(prefix, folders, out) + along(prefix, folders, out)
        else:
            print(f"no records of {prefix}: its figures stay as they are", file=sys.stderr)
    for file in sorted(RECORDS.glob("*/summary.json")):
        drawn += sweep(file, out)
    return [
        *drawn,
        norms(RECORDS / "zero-init" / "norms.json", out),
        *by_depth_of_network(out),
        *choosing_alpha(out),
        by_length(out),
        by_alpha_eff(out),
        last_layer(out),
        last_layers_of_50k(out),
    ]


def by_depth_of_network(out: Path) -> list[Path]:
    """Accuracy and rank of the classifiers against their number of blocks."""
    drawn = []
    for key, metric, unit in (("accuracy", "accuracy", "%"), ("entropy_rank", "entropy rank", "nats")):
        groups: dict[str, list[tuple[float, float]]] = {}
        for file in sorted((RECORDS / "cifar-resnet").glob("*/finetune.json"), reverse=True):
            _, alpha, _, blocks, *_ = file.parent.name.split("-")
            groups.setdefault(f"alpha_min {alpha}", []).append((int(blocks), json.loads(file.read_text())[key]))
        drawn.append(save(size_curves(metric, groups, unit), out / f"cifar-resnet-{slug(metric)}.png"))
    return drawn


def norms(file: Path, out: Path) -> Path:
    """Norms of the stream by block, with and without zero initialisation."""
    runs = {}
    for name, steps in json.loads(file.read_text()).items():
        _, alpha, _, zero = name.split("-")
        last = read_metrics(file.parent / name)[-1]
        curves: dict[int, dict[float, float]] = {}
        for step, blocks in steps.items():
            for block, value in blocks.items():
                curves.setdefault(int(block), {})[int(step) * last["epoch"] / last["step"]] = value
        runs[f"{alpha}, {'from zero' if zero == 'True' else 'Xavier'}"] = curves
    return save(norm_curves(runs), out / "zero-init-norms.png")


def by_block(prefix: str, folders: Folders, out: Path) -> list[Path]:
    """Scores by block, means over seeds, beside the baselines of the first run where it has them."""
    drawn: list[Path] = []
    if prefix not in METRICS:
        return drawn
    reports = {label: [_report(run) for run in runs] for label, runs in folders.items()}
    first = next(iter(reports.values()))[0]
    for metric in METRICS[prefix]:
        curves = {label: _mean([by_depth(report, metric) for report in seeds]) for label, seeds in reports.items()}
        random, pixels = by_depth(first, metric, "random init"), by_depth(first, metric, "pixels")
        baselines = {"random init": random, "pixels": next(iter(pixels.values()))} if pixels else {}
        unit = "nats" if metric == "entropy rank" else "%"
        drawn.append(save(figures.depth_curves(metric, curves, baselines, unit), out / f"{prefix}-{slug(metric)}.png"))
    return drawn


def by_noise(prefix: str, folders: Folders, out: Path) -> list[Path]:
    """The probe of diffusion models, layers x noise levels."""
    drawn = []
    for label, runs in folders.items() if prefix == "cifar100-diffusion" else ():
        report = _report(runs[0])
        figure = noise_heatmap(grid(report), best(report), f"{label}: linear probe (%)")
        drawn.append(save(figure, out / f"{prefix}-probe-{label.split()[-1]}.png"))
    return drawn


def along(prefix: str, folders: Folders, out: Path) -> list[Path]:
    """Losses after the warm-up, scores, or gains in a score over the first setting, while training."""
    drawn = []
    for key, metric in ALONG.get(prefix, {}).items():
        if key == "loss":
            curves, unit = {label: [_losses(run) for run in runs] for label, runs in folders.items()}, ""
        elif key not in GAINS:
            curves, unit = {label: [_scores(run, key) for run in runs] for label, runs in folders.items()}, ""
        else:
            curves, unit = _gains(folders, partial(_scores, key=key)), "points"
        drawn.append(save(epoch_curves(metric, curves, unit), out / f"{prefix}-along-{slug(metric)}.png"))
    return drawn


def choosing_alpha(out: Path) -> list[Path]:
    """Gains in the linear probe over alpha_min 1.0 against steps: along training, and at the end where both have it;
    means over seeds."""
    panels, ends = {}, {}
    for prefix, title in CHOOSING.items():
        folders = {label: sorted(RECORDS.glob(name)) for label, name in RUNS[prefix].items()}
        if not all(folders.values()):
            return []
        on_the_way = _gains(folders, lambda run: _scores(run, "eval/linear_probe", "step"))
        panels[title] = {label: _mean(gains) for label, gains in on_the_way.items()}
        last = {label: _mean(gains) for label, gains in _gains(folders, _at_the_end).items()}
        ends[title] = {label: point for label, gain in last.items() for point in gain.items()}
    return [save(step_curves("gain in linear probe", panels, ends), out / "choosing-alpha-gain.png")]


def by_length(out: Path) -> Path:
    """Gains of `auto` over alpha_min 1.0 at the end of runs, against their length."""
    gains: dict[str, list[tuple[float, float]]] = {"linear probe": [], "kNN": []}
    for length, alpha in LENGTHS.items():
        named = {name: f"tiny-imagenet-{length}-xavier-alpha-{name}-seed-*" for name in ("1.0", alpha)}
        folders = {name: sorted(RECORDS.glob(pattern)) for name, pattern in named.items()}
        steps = 1000 * int(length.removesuffix("k"))  # of the two longest runs it is not quite the same number
        for metric, found in gains.items():
            (seeds,) = _gains(folders, partial(_at_the_end, metric=metric, step=steps)).values()
            found += [point for gain in seeds for point in gain.items()]
    figure = size_curves("gain over alpha_min 1.0", gains, "points", "training steps")
    return save(figure, out / "choosing-alpha-lengths.png")


def by_alpha_eff(out: Path) -> Path:
    """Scores of the last and the best block against the share of the input that is left at the end."""
    groups: dict[str, list[tuple[float, float]]] = {}
    for name in CONTROLS:
        run = RECORDS / f"tiny-imagenet-22k-xavier-{name}-seed-0"
        for metric in ("linear probe", "kNN"):
            scores = by_depth(_report(run), metric)
            for block, value in (("last", scores[max(scores)]), ("best", max(scores.values()))):
                groups.setdefault(f"{metric}, {block} block", []).append((alpha_eff(run), value))
    figure = size_curves("score", groups, size="alpha_eff, what is left of the input")
    (axes,) = figure.axes
    axes.set_xscale("log")
    axes.invert_xaxis()  # more fading to the right, as depth is
    return save(figure, out / "tiny-imagenet-alpha-eff.png")


def last_layer(out: Path) -> Path:
    """What the last layers of the demo's two autoencoders are made of, means over all runs of the record."""
    runs = json.loads((RECORDS / "demo-noise.json").read_text())["runs"]
    bars, spread = {}, {}
    for label, name in (("ordinary", "plain"), ("fading", "fading")):
        shares = [[run["last layer"][name][i] for run in runs] for i in range(len(runs[0]["last layer"][name]))]
        sublayers = [f"blocks.{i}.{kind}" for i in range(len(shares) // 2) for kind in ("attn", "mlp")]
        bars[label] = _shares([fmean(own) for own in shares], [EMBEDDING, *sublayers])
        scores = [[run["numbers"][score][name] / 100 for run in runs] for score in (EMBEDDED, ECHO)]
        spread[label] = (stdev(scores[0]), stdev(scores[1]))
    return save(share_bars(bars, spread), out / "demo-last-layer.png")


def last_layers_of_50k(out: Path) -> Path:
    """The same of encoders after 50,000 steps."""
    bars = {}
    for name in ("1.0-seed-2", "0.7-seed-2", "0.6-seed-0"):
        found = json.loads((RECORDS / f"tiny-imagenet-50k-xavier-alpha-{name}" / "mixing.json").read_text())
        bars[f"alpha_min {name[:3]}"] = _shares(found["centred"], found["writers"])
    return save(share_bars(bars), out / "tiny-imagenet-50k-last-layer.png")


def _shares(last: Sequence[float], names: Sequence[str]) -> Mixing:
    """A record of the last layer alone, to be drawn."""
    own = torch.tensor([last], dtype=torch.float64)
    return Mixing(list(names), own, own, centred=True)


def alpha_eff(run: Path) -> float:
    """Product of the alphas of a masked autoencoder's encoder, by its settings."""
    decay = residua.train.Pretrain.read(run / "config.yaml").shortcut.decay()
    return float(residua.alphas(12, **decay).prod())


def _at_the_end(run: Path, metric: str = "linear probe", step: int | None = None) -> Curve:
    """Last step, or `step`, -> score of the last block at the end of the run; nothing where it was not evaluated."""
    if not (run / "evaluation.json").exists():
        return {}
    scores = by_depth(_report(run), metric)
    return {step or read_metrics(run)[-1]["step"]: scores[max(scores)]}


def _gains(folders: Folders, read: Callable[[Path], Curve]) -> dict[str, list[Curve]]:
    """Of every setting but the first over the first, seed by seed, where both were measured."""
    scores = {label: {_seed(run): read(run) for run in runs} for label, runs in folders.items()}
    (_, first), *others = scores.items()
    return {
        label: [{x: y - first[seed][x] for x, y in curve.items() if x in first[seed]}
                for seed, curve in own.items() if seed in first]
        for label, own in others
    }  # fmt: skip


def _seed(run: Path) -> str:
    return run.name.partition("-seed-")[2]


def _mean(curves: Sequence[Curve]) -> Curve:
    """Where all were measured."""
    shared = set.intersection(*(set(curve) for curve in curves)) if curves else set()
    return {x: fmean(curve[x] for curve in curves) for x in sorted(shared)}


def _report(run: Path) -> Report:
    return Report.from_dict(json.loads((run / "evaluation.json").read_text()))


def _scores(run: Path, key: str, by: str = "epoch") -> Curve:
    """Epoch, or step, -> score."""
    return {row[by]: row[key] for row in read_metrics(run) if key in row}


def _losses(run: Path) -> Curve:
    """Epoch -> mean loss of the records before it, without the first fifth."""
    rows = [row for row in read_metrics(run) if "loss" in row]
    rows = rows[len(rows) // 5 :]
    parts = [rows[i : i + SMOOTH] for i in range(0, len(rows) - SMOOTH + 1, SMOOTH)]
    return {part[-1]["epoch"]: fmean(row["loss"] for row in part) for part in parts}


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
    models = {label: residua.load(run) for label, run in zip(RUNS[prefix], runs)}
    splits = residua.data.load(residua.train.Pretrain.read(runs[0] / "config.yaml").data.data)
    return [save(PICTURES[name](models, splits), out / f"{prefix}-{name}.png") for name in SHOWN[prefix]]


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
    drawn = numbers() + (pictures(prefix, [Path(run) for run in given]) if prefix else [])
    print("\n".join(map(str, drawn)))


if __name__ == "__main__":
    main(sys.argv[1:])
