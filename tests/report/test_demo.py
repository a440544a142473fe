"""The demo, in its quick version."""

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
from residua.report.demo import QUICK, SETTINGS
from residua.report.runs import headline, read_run, show
from residua.train.config import Pretrain


def test_one_page_and_one_table(quick_demo: Any, read_page: Callable[[Path], Any]) -> None:
    page, table, records = quick_demo
    found = read_page(page)
    console = Console(file=StringIO(), width=200)
    console.print(table)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    for name in ("fading", "plain"):
        report = read_run(page.parent / name).evaluation
        assert report is not None
        assert len(report.layers) == QUICK["depth"]
        for own in headline(report).values():
            assert show(own["model"]) in found.text
            assert show(own["model"]) in printed
    for part in ("does not show that fading shortcuts help", "one seed", "synthetic", "principal components"):
        assert part in found.text
    assert {r["run"] for r in records} == {"fading", "plain"}
    assert records[-1]["step"] == records[-1]["steps"]


def test_the_two_runs_differ_in_alpha_alone(quick_demo: Any) -> None:
    models = {name: residua.load(quick_demo[0].parent / name) for name in ("fading", "plain")}
    assert residua.stream(models["plain"]).alpha_eff == 1
    assert residua.stream(models["fading"]).alpha_eff < 1
    config = {name: model.config for name, model in models.items()}
    assert {k for k in config["plain"] if config["plain"][k] != config["fading"][k]} == {"alpha_min"}


def test_an_earlier_demo_is_replaced_and_other_files_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kept in ("mine.txt", "other/config.yaml", "plain/mine.txt"):
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
    assert left == {"mine.txt", "other/config.yaml", "plain/mine.txt"} | fresh


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
