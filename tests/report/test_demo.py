"""The demo, in its quick version, and what its page says."""

import json
import shutil
import sys
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import residua
from residua.report import demo
from residua.report.demo import CLAIMS, QUICK, SETTINGS, _said
from residua.report.runs import read_run
from residua.train.config import Pretrain

RECORD = Path(__file__).parent.parent.parent / "docs" / "records" / "demo-noise.json"


def test_one_page_and_one_table(quick_demo: Any, read_page: Callable[[Path], Any]) -> None:
    page, table, progress = quick_demo
    found = read_page(page)
    console = Console(file=StringIO(), width=200)
    console.print(table)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    numbers = json.loads((page.parent / "numbers.json").read_text())["numbers"]
    report = read_run(page.parent / "fading").evaluation
    assert report is not None
    assert len(report.layers) == QUICK["depth"]
    for metric, unit in (("linear probe", "%"), ("kNN", "%"), ("entropy rank", "nats")):
        for subject, name in (("model", "fading"), ("random init", "random init"), ("pixels", "pixels")):
            assert numbers[metric][name] == report.value(metric, subject)
            shown = f"{numbers[metric][name]:.{2 if unit == 'nats' else 1}f} {unit}"
            assert shown in found.text
            assert shown in printed
    for part in ("quick version", "chance decides that", "Your own photos", "Your own model", "x <- alpha x + f(x)"):
        assert part in found.text
    shares = [share for share, _ in progress]
    assert shares == sorted(shares)
    assert shares[-1] == 1


def test_the_two_runs_differ_in_alpha_alone(quick_demo: Any) -> None:
    models = {name: residua.load(quick_demo[0].parent / name) for name in ("fading", "plain")}
    assert residua.stream(models["plain"]).alpha_eff == 1
    assert residua.stream(models["fading"]).alpha_eff < 1
    config = {name: model.config for name, model in models.items()}
    assert {k for k in config["plain"] if config["plain"][k] != config["fading"][k]} == {"alpha_min"}


def test_branches_start_as_in_pretraining(quick_demo: Any) -> None:
    """By Xavier's initialisation: from zero the demo would show another network than `residua pretrain` trains."""
    for name in ("fading", "plain"):
        assert not residua.load(quick_demo[0].parent / name).config["zero_init"]


def test_commands_of_the_page_are_commands(quick_demo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each picture stands with what draws it of another model."""
    import html
    import re

    from residua import cli

    text = quick_demo[0].read_text("utf-8")
    lines = [html.unescape(line) for line in re.findall(r"<p><code>(.*?)</code></p>", text)]
    commands = [line.split() for line in lines if line.startswith("residua ")]
    assert {words[1] for words in commands} >= {"pretrain", "evaluate", "export", "anatomy", "counterfactual"}
    assert {words[1] for words in commands} <= set(cli.COMMANDS)
    python = [line for line in lines if not line.startswith("residua ")]
    real = residua.data.load
    scope: dict[str, Any] = {"residua": residua, "images": __import__("torch").randn(4, 3, 32, 32)}
    scope["model"] = residua.create_model("vit_nano", img_size=32, patch_size=4)
    monkeypatch.setattr(residua.data, "load", lambda name: real("shapes?n=16&test=16"))
    for line in python:
        exec(compile(line, "page", "exec"), scope)
    assert residua.stream(scope["model"]).alphas[-1] == pytest.approx(0.8)


def test_an_earlier_demo_is_replaced_and_other_files_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kept in ("mine.txt", "other/config.yaml", "plain/mine.txt", "blocks/mine.txt"):
        (tmp_path / kept).parent.mkdir(exist_ok=True)
        (tmp_path / kept).write_text("mine")
    (tmp_path / "fading").mkdir()
    for file in ("config.yaml", "settings.yaml"):
        (tmp_path / "fading" / file).write_text("data: shapes")
    (tmp_path / "fading/old.txt").write_text("old")
    # the runs themselves end at once
    monkeypatch.setattr(sys, "executable", shutil.which("true"))
    with pytest.raises(ValueError, match="holds no run"):
        demo(tmp_path, quick=True)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    fresh = {"fading/settings.yaml", "plain/settings.yaml"}
    assert left == {"mine.txt", "other/config.yaml", "plain/mine.txt", "blocks/mine.txt"} | fresh


def test_a_run_of_the_user_is_kept(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain/config.yaml").write_text("data: folder:mine")
    with pytest.raises(ValueError, match="plain holds a run that no demo made"):
        demo(tmp_path, quick=True)
    assert [path.name for path in tmp_path.rglob("*")] == ["plain", "config.yaml"]


def test_a_run_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(RuntimeError, match="the run fading failed"):
        demo(tmp_path, quick=True)


def test_settings_are_settings() -> None:
    known = Pretrain().settings()
    assert set(SETTINGS) | set(QUICK) <= set(known)


# ---------------------------------------------------------------- what it says, against many runs of it


def runs() -> list[dict[str, Any]]:
    return json.loads(RECORD.read_text())["runs"]


def test_the_record_is_of_these_settings() -> None:
    """Ten seeds with one thread and with two; a change of settings asks for a new record."""
    record = json.loads(RECORD.read_text())
    assert record["settings"] == json.loads(json.dumps(SETTINGS))
    assert {(run["seed"], run["threads"]) for run in record["runs"]} >= {(s, t) for s in range(10) for t in (1, 2)}


@pytest.mark.parametrize("claim", CLAIMS, ids=str)
def test_every_claim_has_the_same_sign_in_every_run(claim: Any) -> None:
    assert all(claim.margin(run["numbers"]) > 0 for run in runs())


def test_what_chance_decides_is_not_claimed() -> None:
    """Whether fading makes better features has both signs among these runs, so no claim compares the two."""
    assert not any(
        {claim.more, claim.less} == {"fading", "plain"} and "last layer" not in claim.score for claim in CLAIMS
    )


def test_a_claim_that_fails_in_this_run_is_told() -> None:
    numbers = runs()[0]["numbers"]
    held = _said(numbers, CLAIMS)
    assert "not above" not in held
    numbers["kNN"]["fading"] = 1.0
    assert f"kNN: 1.0 of fading, not above {numbers['kNN']['random init']:.1f} of random init." in _said(
        numbers, CLAIMS
    )


@pytest.mark.slow
def test_the_demo_in_full(tmp_path: Path) -> None:
    """What the page says, said of one more run."""
    demo(tmp_path)
    numbers = json.loads((tmp_path / "numbers.json").read_text())["numbers"]
    assert all(claim.margin(numbers) > 0 for claim in CLAIMS)
