"""Draw the documents' pictures from the runs of `make demo`: `python docs/draw.py demo`."""

import json
import sys
from pathlib import Path

import residua
from residua.evaluate import Report
from residua.report import figures, gallery
from residua.report.runs import by_depth

HERE = Path(__file__).parent / "images"


def main(demo: Path) -> None:
    runs = {name: demo / name for name in ("fading", "plain")}
    reports = {n: Report.from_dict(json.loads((run / "evaluation.json").read_text())) for n, run in runs.items()}
    models = {name: residua.load(run) for name, run in runs.items()}
    splits = residua.data.load(residua.train.Pretrain.read(runs["plain"] / "config.yaml").data.data)
    gallery.reconstructions(models, splits).savefig(HERE / "demo-reconstructions.png", dpi=110)
    for metric, unit in (("linear probe", "%"), ("entropy rank", "nats")):
        first = reports["plain"]
        curves = {name: by_depth(report, metric) for name, report in reports.items()}
        pixels = next(iter(by_depth(first, metric, "pixels").values()))
        baselines = {"random init": by_depth(first, metric, "random init"), "pixels": pixels}
        drawn = figures.depth_curves(metric, curves, baselines, unit)
        drawn.savefig(HERE / f"demo-{metric.replace(' ', '-')}.png", dpi=110)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "demo"))
