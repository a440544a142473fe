"""Runs that cost nothing, for what is about sweeps and not about training."""

import sys
from pathlib import Path

import pytest

from residua.evaluate import Report, Score
from residua.recipes import sweep

FAKE = """
import os, pathlib, sys
args = sys.argv[1:]
given = {a: args[i + 1] for i, a in enumerate(args[:-1]) if a.startswith("--")}
out = pathlib.Path(given["--out"])
with open(sys.argv[0] + ".log", "a") as log:
    log.write(out.name + "\\n")
print("working, threads:", os.environ.get("OMP_NUM_THREADS"))
alpha, seed = float(given["--alpha-min"]), int(given.get("--seed", 0))
if alpha == 0:
    sys.exit("error: no shortcut left")
steps, gain = int(given.get("--steps", 4)), {0: 0, 1: 1, 2: 5}[seed] * (alpha < 1)
out.mkdir(parents=True)
(out / "config.yaml").write_text(f"optim: {{steps: {steps}, batch_size: 16}}")
value = 10 * alpha + seed + gain
(out / "evaluation.json").write_text(TEXT.replace("1234.0", str(value)))
"""


def evaluation(value: float) -> str:
    report = Report("shapes", "tokens", [1], (16, 16), 10, 10, "test split", 0)
    report.scores.append(Score("kNN", "model", 1, value, "%", {"k": 20, "T": 0.07}))
    report.scores.append(Score("entropy rank", "model", 1, 2.5, "nats", {"n": 10, "of": "test"}))
    return report.to_json()


class Begun:
    """Names of the pretended runs that were begun, in order."""

    def __init__(self, log: Path) -> None:
        self.log = log

    @property
    def names(self) -> list[str]:
        return self.log.read_text().split() if self.log.exists() else []


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Begun:
    """Runs that only write a kNN of 10 alpha_min + seed, below alpha_min 1 plus 0, 1, 5 by seed; alpha 0 fails."""
    script = tmp_path / "fake.py"
    script.write_text(FAKE.replace("TEXT", repr(evaluation(1234.0))))
    monkeypatch.setattr(sweep, "program", lambda: [sys.executable, str(script)])
    return Begun(tmp_path / "fake.py.log")
