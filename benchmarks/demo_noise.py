"""How much of the demo is chance: its trainings for several seeds, with one thread and with two.

    python benchmarks/demo_noise.py                      # ten seeds, both; goes on where it was stopped
    python benchmarks/demo_noise.py --table              # what the record says, as a table

Every run is `residua demo` with another seed; threads change the order in which numbers are added, and so rounding,
as another machine does. The page may claim a comparison only if its sign is the same in all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

from residua.report.demo import CLAIMS, SETTINGS

RECORD = Path(__file__).parent.parent / "docs" / "records" / "demo-noise.json"
RUN = (
    "import sys; from pathlib import Path; from residua.report.demo import demo; "
    "demo(Path(sys.argv[1]), seed=int(sys.argv[2]))"
)
UNCLAIMED = (
    ("linear probe", "fading", "plain"), ("kNN", "fading", "plain"), ("kNN", "fading", "pixels"),
    ("accuracy", "shortcuts", "no shortcuts"),
)  # fmt: skip
"""Comparisons that the page does not make, to be looked at."""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seeds", type=int, default=10)
    options.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    options.add_argument("--out", type=Path, default=Path("runs/demo-noise"), help="folder for the runs")
    options.add_argument("--table", action="store_true", help="print the table of the record, run nothing")
    o = options.parse_args()
    if o.table:
        return print(table(json.loads(RECORD.read_text())))
    settings = json.loads(json.dumps(SETTINGS))
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    if record.get("settings") != settings:
        record = {"settings": settings, "torch": torch.__version__, "date": str(date.today()), "runs": []}
    done = {(run["seed"], run["threads"]) for run in record["runs"]}
    for seed in range(o.seeds):
        for threads in o.threads:
            if (seed, threads) not in done:
                record["runs"].append(run(seed, threads, o.out))
                RECORD.write_text(json.dumps(record, indent=1) + "\n")
    print(table(record))


def run(seed: int, threads: int, out: Path) -> dict[str, Any]:
    """One demo, in a process of its own."""
    folder = out / f"seed-{seed}-threads-{threads}"
    started = time.perf_counter()
    env = os.environ | {"OMP_NUM_THREADS": str(threads)}
    subprocess.run([sys.executable, "-c", RUN, str(folder), str(seed)], env=env, check=True)
    seconds = round(time.perf_counter() - started)
    return {"seed": seed, "threads": threads, "seconds": seconds, **json.loads((folder / "numbers.json").read_text())}


def table(record: dict[str, Any]) -> str:
    """Every number of the page as mean ± deviation over all runs, then every comparison with the runs that agree."""
    runs = [run["numbers"] for run in record["runs"]]
    lines = ["| number | subject | mean ± deviation | least | most |", "|---|---|---|---|---|"]
    for score, subjects in runs[0].items():
        for subject in subjects:
            values = [numbers[score][subject] for numbers in runs]
            spread = f"{fmean(values):.2f} ± {stdev(values):.2f} | {min(values):.2f} | {max(values):.2f}"
            lines.append(f"| {score} | {subject} | {spread} |")
    lines += ["", "| comparison | mean difference | least | most | same sign |", "|---|---|---|---|---|"]
    for score, more, less in (*((claim.score, claim.more, claim.less) for claim in CLAIMS), *UNCLAIMED):
        gaps = [numbers[score][more] - numbers[score][less] for numbers in runs]
        up = sum(gap > 0 for gap in gaps)
        agree = f"{max(up, len(gaps) - up)} of {len(gaps)}"
        span = f"{fmean(gaps):+.2f} | {min(gaps):+.2f} | {max(gaps):+.2f}"
        lines.append(f"| {score}: {more} - {less} | {span} | {agree} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
