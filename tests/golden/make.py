"""Golden files: the numbers that the commands give on small sets of images, and the text of every `--help`.

    python tests/golden/make.py             # compare with what is committed: equal to the last bit
    python tests/golden/make.py --update    # write them anew

A change that moves code about leaves every number as it is. On another machine numbers differ by rounding: make the
files there before the change, and compare after it (`--folder`).

Files: `scores/NAME.json` has the numbers of one command, each under `metric | subject | block | settings`;
`help/COMMAND.txt` what `--help` says; `names.json` names that have changed since, old -> new (null: gone). `0.1/` has
runs that version 0.1.0 wrote, by these commands and `residua segment`, `sample`, `evaluate` and `score` after them:

    residua pretrain --data 'shapes?n=96&size=16&test=48' --patch-size 4 --embed-dim 8 --depth 3 --num-heads 2 \
        --decoder-embed-dim 8 --decoder-depth 1 --decoder-num-heads 2 --alpha-min 0.7 --steps 12 --batch-size 16 \
        --checkpoint-every 6 --eval-every 1 --lr 1e-2 --trackers --cpu --out mae
    residua diffuse --data 'digits?train=96' --patch-size 2 --embed-dim 8 --depth 2 --num-heads 2 --alpha-min 0.7 \
        --steps 8 --batch-size 16 --conditional --samples 4 --sample-every 2 --checkpoint-every 8 --lr 1e-2 \
        --trackers --cpu --out diffusion
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RUNS = HERE / "0.1"
Numbers = dict[str, float | None]
"""`metric | subject | block | settings` -> value."""

# ---------------------------------------------------------------- what is run

SHAPES, DIGITS = "shapes?n=96&size=16&test=48", "digits?train=96"
TINY = "--embed-dim 8 --depth 2 --num-heads 2 --steps 4 --batch-size 16 --lr 1e-2 --trackers --cpu"
MAE = f"--patch-size 4 --decoder-embed-dim 8 --decoder-depth 1 --decoder-num-heads 2 {TINY}"
RESMLP = "resmlp --steps 6 --batch-size 16 --width 8 --depth 2 --eval-every 0.25 --trackers --cpu"

READ: dict[str, tuple[str, str]] = {
    "evaluate-shapes": (
        "evaluate mae --layers all --readout tokens cls --k 1 20 --shots 2 --geometry --probe lbfgs "
        "--weight-decays 0.1 1 --out NAME.json",
        "evaluation",
    ),
    "evaluate-digits": (
        "evaluate diffusion --times 0.1 0.5 --probe lbfgs --weight-decays 0.1 1 --limit 120 --out NAME.json",
        "evaluation",
    ),
    "segment-shapes": ("segment mae --max-images 6 --intra 5 --inter 5 --out NAME.json", "segmentation"),
    "score-digits": (
        f"score diffusion/samples/twelve --reference {DIGITS} --reference-split train --extractor mae --fid --kid "
        "--prc --subset-size 8 --subsets 4 --k 2 --out NAME.json",
        "generative",
    ),
    "anatomy-shapes": ("anatomy mae --images 1 --top 2 --out NAME", "anatomy.json"),
    "anatomy-digits": ("anatomy diffusion --images 1 --top 2 --split train --out NAME", "anatomy.json"),
    "ujm": ("ujm --depth 4 --out NAME", "ujm.json"),
    "embed-shapes": (f"embed mae --data {SHAPES}&train=8 --layers all --out NAME.parquet", "features"),
}
"""Name -> what is typed, and what reads the numbers: these measure the runs in `0.1/`, within seconds. What rounding
changes much, as probes with little decay, is not among them, for these hold on other machines, too."""

TRAINED: dict[str, tuple[str, str]] = {
    "pretrain-shapes": (f"pretrain --data {SHAPES} {MAE} --alpha-min 0.7 --eval-every 0.5 --out NAME", "run"),
    "pretrain-digits": (
        f"pretrain --data {DIGITS} {MAE} --patch-size 2 --alpha-eff 0.3 --anneal 0.5 --decoder plain --out NAME",
        "run",
    ),
    "diffuse-shapes": (
        f"diffuse --data {SHAPES} --network sit --patch-size 4 {TINY} --alpha-min 0.8 --out NAME",
        "run",
    ),
    "score-shapes": (
        "score diffuse-shapes -n 12 --extractor pretrain-shapes --fid --kid --subset-size 8 --out NAME.json",
        "generative",
    ),
    "evaluate-probes": (
        "evaluate pretrain-shapes --layers all --probe simple --epochs 2 --readout patches --out NAME.json",
        "evaluation",
    ),
    "evaluate-cached": ("evaluate pretrain-shapes --probe cached --epochs 2 --out NAME.json", "evaluation"),
    "evaluate-mae": ("evaluate pretrain-digits --probe mae --epochs 2 --out NAME.json", "evaluation"),
    "evaluate-timm": (
        f"evaluate timm:vit_tiny_patch16_224 --weights random --img-size 32 --data {SHAPES} --layers 0 11 "
        "--probe lbfgs --out NAME.json",
        "evaluation",
    ),
    "finetune-digits": (f"finetune {RESMLP} --data {DIGITS} --out NAME", "run"),
    "finetune-shapes": (
        "finetune pretrain-shapes --steps 4 --batch-size 16 --eval-every 0.5 --trackers --cpu --out NAME",
        "run",
    ),
    "anatomy-classifier": ("anatomy finetune-digits --images 2 --top 3 --device cpu --out NAME", "anatomy.json"),
    "counterfactual-digits": (
        f"counterfactual shortcut --depth 2 --width 8 --epochs 1 --data {DIGITS} --device cpu --out NAME",
        "counterfactual.json",
    ),
    "sweep-shapes": (
        f"sweep --data {SHAPES} {MAE} --alpha-min 1.0 0.7 --seeds 2 --baseline alpha_min=1.0 --out NAME",
        "summary",
    ),
    "sweep-digits": (f"sweep finetune {RESMLP} --data {DIGITS} --alpha-min 1.0 0.7 --out NAME", "summary"),
}
"""The same of runs that are trained first, within minutes."""

HELP = (
    "anatomy", "compare", "counterfactual", "data", "data info", "data preview", "data stores", "demo", "diffuse",
    "embed", "evaluate", "export", "finetune", "pretrain", "recipes", "sample", "score", "segment", "sweep", "ujm",
)  # fmt: skip

# ---------------------------------------------------------------- numbers of a file

TELLS = ("k", "T", "shots", "protocol", "readout", "time")
"""Settings by which scores of one metric differ."""
SAME = ("n_train", "n_test", "seed")
"""Settings that all scores of a file share."""
TIMES = ("images_per_s", "wait", "mfu", "seconds")
"""What is another number each time."""


def key(metric: str, subject: str = "", block: object = "", settings: Mapping[str, Any] | None = None) -> str:
    told = ", ".join(f"{name}={value}" for name, value in (settings or {}).items() if name in TELLS)
    return f"{metric} | {subject} | {block} | {told}"


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, float | None]]:
    """The numbers in nested lists and dictionaries, with the way to each."""
    if isinstance(value, dict):
        for name, item in value.items():
            if name not in TIMES:
                yield from leaves(item, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from leaves(item, f"{path}[{i}]")
    elif value is None or isinstance(value, int | float):
        yield path, value


def evaluation(file: Path) -> Numbers:
    content = json.loads(file.read_text("utf-8"))
    found: Numbers = {}
    for s in content.pop("scores"):
        where = s["subject"], s["layer"], s["settings"]
        found[key(s["metric"], *where)] = s["value"]
        more = {name: value for name, value in s["settings"].items() if name not in TELLS + SAME}
        found |= {key(f"{s['metric']}: {path}", *where): value for path, value in leaves(more)}
    return found | {key(path): value for path, value in leaves(content)}


def segmentation(file: Path) -> Numbers:
    content = json.loads(file.read_text("utf-8"))
    found: Numbers = {}
    for subject, scores in content.pop("scores").items():
        found |= {key(path, subject, content["layer"]): value for path, value in leaves(scores)}
    return found | {key(path): value for path, value in leaves(content)}


def generative(file: Path) -> Numbers:
    content = json.loads(file.read_text("utf-8"))
    found: Numbers = {}
    for name, s in content.pop("scores").items():
        found[key(name, "samples")] = s.pop("value")
        found |= {key(f"{name}: {path}", "samples"): value for path, value in leaves(s)}
    return found | {key(path): value for path, value in leaves(content)}


def summary(folder: Path) -> Numbers:
    found: Numbers = {}
    for s in json.loads((folder / "summary.json").read_text("utf-8")):
        group = ", ".join(f"{name} {value}" for name, value in s.pop("settings").items())
        found |= {key(f"{s['score']}: {path}", group): value for path, value in leaves(s)}
    return found


def run(folder: Path) -> Numbers:
    """The losses of a run along training, and its scores at the end."""
    found: Numbers = {}
    for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines():
        record = json.loads(line)
        step = record.pop("step")
        found |= {key(path, "training", f"step {step}"): value for path, value in leaves(record)}
    if (folder / "evaluation.json").exists():
        found |= evaluation(folder / "evaluation.json")
    if (folder / "finetune.json").exists():
        scores = json.loads((folder / "finetune.json").read_text("utf-8"))
        found |= {key(path, "model"): value for path, value in leaves(scores)}
    return found


def features(file: Path) -> Numbers:
    """The first feature and the mean of every row of a table of features."""
    import pyarrow.parquet as pq

    table, found = pq.read_table(file), {}
    for name in table.column_names:
        column = table[name].to_pylist()
        for i, value in enumerate(column):
            if isinstance(value, list):
                found[key(f"{name}: first", f"row {i}")] = value[0]
                found[key(f"{name}: mean", f"row {i}")] = math.fsum(value) / len(value)
    return found


def written(name: str, kind: str) -> Numbers:
    """The numbers that the command of this name left in the working folder."""
    readers: dict[str, Callable[[Path], Numbers]] = {
        "evaluation": evaluation, "segmentation": segmentation, "generative": generative, "features": features,
        "summary": summary, "run": run,
    }  # fmt: skip
    if kind not in readers:
        content = json.loads((Path(name) / kind).read_text("utf-8"))
        return {key(path): value for path, value in leaves(content)}
    ends = {"summary": "", "run": "", "features": ".parquet"}
    return readers[kind](Path(f"{name}{ends.get(kind, '.json')}"))


# ---------------------------------------------------------------- making and comparing


def call(typed: list[str]) -> str:
    """What a command prints; an error where it fails."""
    from residua.cli import main

    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            status = main(typed)
        except SystemExit as end:  # of --help
            status = end.code or 0
    if status:
        raise RuntimeError(f"residua {' '.join(typed)}: {out.getvalue()}")
    return out.getvalue()


def scores(name: str) -> Numbers:
    """The numbers of one command, run in the working folder."""
    typed, kind = (READ | TRAINED)[name]
    call([part.replace("NAME", name) for part in typed.split()])
    return written(name, kind)


def help_text(command: str) -> str:
    """In a terminal of 80 columns."""
    text = call([*command.split(), "--help"])
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def help_file(folder: Path, command: str) -> Path:
    return folder / "help" / f"{command.replace(' ', '-')}.txt"


def flags(text: str) -> set[str]:
    """The options that a help text lists."""
    lines = re.findall(r"^[│|\s]*((?:-\w(?: [A-Z]+)?, )?--.*)", text, flags=re.MULTILINE)
    return {flag for line in lines for flag in re.findall(r"--[a-z][\w-]*", re.split(r"\s{2,}", line)[0])}


def renamed(name: str, names: Mapping[str, Mapping[str, str | None]]) -> str | None:
    """What a committed number is called now; None where it is gone."""
    metric, subject, block, settings = name.split(" | ")
    base, colon, rest = metric.partition(": ")
    now = names["metrics"].get(metric, metric)
    if now == metric and base in names["metrics"]:
        now = names["metrics"][base]
        now = now and now + colon + rest
    parts = [now, names["subjects"].get(subject, subject), names["blocks"].get(block, block)]
    told = [names["settings"].get(part.partition("=")[0], part.partition("=")[0]) for part in settings.split(", ")]
    if None in parts or None in told:
        return None
    values = [f"{new}={part.partition('=')[2]}" if part else "" for new, part in zip(told, settings.split(", "))]
    return " | ".join([*map(str, parts), ", ".join(values)])


def differences(before: Numbers, after: Numbers, tolerance: float = 0.0) -> list[str]:
    """What is missing, or differs by more than a share or an amount of `tolerance`."""
    names = json.loads((HERE / "names.json").read_text("utf-8"))
    told = []
    for name, old in before.items():
        now = renamed(name, names)
        if now is None:
            continue
        if now not in after:
            told.append(f"{now}: {old} before, nothing now")
            continue
        new = after[now]
        if old is None or new is None:
            alike = old is new
        else:
            alike = old == new or abs(old - new) <= tolerance * max(1.0, abs(old))
        if not alike:
            told.append(f"{now}: {old} before, {new} now")
    return told


def committed(folder: Path, name: str) -> Numbers:
    return json.loads((folder / "scores" / f"{name}.json").read_text("utf-8"))


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare the numbers of all commands with the committed ones.")
    parser.add_argument("--update", action="store_true", help="write the files anew")
    parser.add_argument("--folder", type=Path, default=HERE, help="where the files lie")
    parser.add_argument("--tolerance", type=float, default=0.0)
    parser.add_argument("only", nargs="*", help="names of commands, or help; default: all")
    o = parser.parse_args()
    sys.path.insert(0, str(HERE.parent.parent))
    os.environ["PYTHONPATH"] = str(HERE.parent.parent)  # of the runs of a sweep
    os.environ |= {"COLUMNS": "80", "NO_COLOR": "1"}
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_CBWR": "COMPATIBLE"}  # sums in one order, wherever arrays lie
    import torch

    torch.set_num_threads(1)
    folder, bad = o.folder.resolve(), 0
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        os.environ["RESIDUA_DATA"] = place + "/cache"
        for path in RUNS.iterdir():
            shutil.copytree(path, path.name)
        for name in [name for name in READ | TRAINED if not o.only or name in o.only]:
            found = scores(name)
            file = folder / "scores" / f"{name}.json"
            if o.update:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(json.dumps(found, indent=0, ensure_ascii=False) + "\n")
            told = differences(committed(folder, name), found, o.tolerance)
            bad += len(told)
            print(f"{name}: {len(found)} numbers, {len(told)} differ", *told[:20], sep="\n  ", flush=True)
        for command in HELP if not o.only or "help" in o.only else ():
            file, text = help_file(folder, command), help_text(command)
            if o.update:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text)
            if not file.exists() or file.read_text() != text:
                print(f"{command} --help reads otherwise: git diff after --update shows how")
    return bool(bad)


if __name__ == "__main__":
    raise SystemExit(main())
