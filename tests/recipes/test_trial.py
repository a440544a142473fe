"""Names and values of a sweep's runs."""

from pathlib import Path

from residua.recipes.trial import Trial, same_value, text_of, trained


def test_names_tell_settings_apart() -> None:
    sources = ("folder:d/x/y", "folder:d/x-y", "folder:d/x,y", "a,b", "a-b", "a" * 300, "a" * 301)
    names = [Trial({"data": data}).name for data in sources]
    assert len(set(names)) == len(sources)
    assert names[0].startswith("data=folder-d-x-y-")
    assert max(map(len, names)) < 130
    assert Trial({"stages": "2,2,6,2", "lr": "1e-3"}).name == "stages=2-2-6-2,lr=1e-3"


def test_values_as_typed() -> None:
    assert same_value("1", "1.0")
    assert not same_value("1", "auto")
    assert [text_of(value) for value in ((2, 2, 6, 2), None, True, 1e-3, "auto")] == [
        "2,2,6,2", "None", "True", "0.001", "auto",
    ]  # fmt: skip


def test_a_run_is_at_its_end_by_its_records_or_by_its_last_checkpoint(tmp_path: Path) -> None:
    """A power cut may lose the last record, which is written before the checkpoint and not waited for."""
    (tmp_path / "config.yaml").write_text("steps: 20\n")
    (tmp_path / "metrics.jsonl").write_text('{"step": 10, "loss": 1.0}\n')
    assert not trained(tmp_path)
    last = tmp_path / "checkpoints" / "step-0000020"
    last.mkdir(parents=True)
    assert not trained(tmp_path)
    (last / "model.json").write_text("{}")
    assert trained(tmp_path)
