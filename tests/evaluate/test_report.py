import itertools
import json
from pathlib import Path

import pytest
from rich.console import Console

from residua.evaluate import Report, Score


def report() -> Report:
    r = Report("photos", "cls", [0, 5], (32, 48), 1000, 200, "test split", seed=3)
    for subject, layers, base in (
        ("model", (0, 5), 60.0),
        ("random init", (0, 5), 20.0),
        ("pixels", (-1,), 30.0),
    ):
        for layer in layers:
            for k in (10, 20):
                r.scores.append(Score("kNN", subject, layer, base + layer + k / 100, "%", {"k": k, "T": 0.07}))
            probe = {"protocol": "simple", "epochs": 200, "holdout": 0.1, "selected": layer in (0, -1)}
            r.scores.append(Score("linear probe", subject, layer, base + 1, "%", probe))
            rank = {"n": 200, "of": "test"}
            r.scores.append(Score("entropy rank", subject, layer, base / 20 + layer, "nats", rank))
    return r


def test_value_is_of_the_last_layer_or_the_one_chosen() -> None:
    r = report()
    assert r.value("kNN", k=20) == pytest.approx(65.2)
    assert r.value("kNN", layer=0, k=10) == pytest.approx(60.1)
    assert r.value("kNN", "pixels", layer=0, k=10) == pytest.approx(29.1)
    assert r.value("entropy rank", "random init") == pytest.approx(6.0)
    r.scores.append(Score("linear probe", "model", 5, 1.0, "%", {"selected": False}))
    assert r.value("linear probe") == 61.0
    with pytest.raises(KeyError, match="entropy rank, kNN, linear probe"):
        r.value("accuracy")


def test_the_table_states_what_the_numbers_depend_on_and_fits_a_terminal() -> None:
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(report().table())
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80
    for part in (
        "photos, 32 x 48 px, read-out cls",
        "1,000 train and 200 test images (test split)",
        "simple protocol, 200 epochs",
        "settings and layer (*) from 10% held out of train",
        "200 test images",
        "layer 0 *",
    ):
        assert part in text
    table = report().table()
    column = next(c for c in table.columns if c.header == "kNN (k 20, T 0.07)")
    assert [str(c.header) for c in table.columns].count("linear probe (simple)") == 1
    labels, values = list(table.columns[0].cells), list(column.cells)
    assert dict(zip(labels, values)) | {"layer 5": "65.2 %", "random init, 5": "25.2 %", "pixels": "29.2 %"} == dict(
        zip(labels, values)
    )


def test_json_holds_everything_and_no_nan(tmp_path: Path) -> None:
    r = report()
    r.probes["model"] = {"by_layer": {0: 61.0}, "best": {"held_out": float("nan")}}
    path = r.save(tmp_path / "deep" / "scores.json")
    stored = json.loads(path.read_text())
    assert (stored["readout"], stored["seed"], stored["n_train"], stored["n_test"]) == ("cls", 3, 1000, 200)
    assert stored["scores"][0] == {
        **{"metric": "kNN", "subject": "model", "layer": 0, "value": 60.1, "unit": "%"},
        "settings": {"k": 10, "T": 0.07},
    }
    assert stored["probes"]["model"] == {"by_layer": {"0": 61.0}, "best": {"held_out": None}}
    assert [p.name for p in path.parent.iterdir()] == ["scores.json"]


def test_several_read_outs_have_a_row_each_and_the_caption_tells_the_uncertainty() -> None:
    r = Report("photos", "tokens, cls", [5], (32, 32), 1000, 200, "test split", seed=3)
    for subject, readouts in (
        ("model", ("tokens", "cls")),
        ("random init", ("tokens", "cls")),
        ("pixels", ("pixels",)),
    ):
        for i, readout in enumerate(readouts):
            layer = -1 if subject == "pixels" else 5
            settings = {"protocol": "mae", "epochs": 90, "holdout": 0.1, "selected": i == 1, "readout": readout}
            settings |= {"top5": 90.0 + i, "interval": [50.0 + i, 60.0 + i]}
            r.scores.append(Score("linear probe", subject, layer, 55.0 + i, "%", settings))
    table = r.table()
    labels = ["layer 5, tokens", "layer 5, cls *", "random init, 5, tokens", "random init, 5, cls", "pixels"]
    assert list(table.columns[0].cells) == labels
    assert list(table.columns[1].cells) == ["55.0 %", "56.0 %", "55.0 %", "56.0 %", "55.0 %"]
    assert "probe (cls), 56.0 %: 95 % interval 51.0 to 61.0 (Wilson), top-5 91.0 %" in str(table.caption)
    assert "settings and read-out (*) from 10% held out" in str(table.caption)
    assert r.value("linear probe") == 56.0
    assert r.value("linear probe", readout="tokens") == 55.0


def test_reports_written_before_intervals_are_still_read() -> None:
    old = report().to_dict()
    again = Report.from_dict(json.loads(json.dumps(old)))
    assert again.value("kNN", k=20) == report().value("kNN", k=20)
    assert list(again.table().columns[0].cells) == list(report().table().columns[0].cells)


def test_the_score_to_quote_is_named_where_there_are_several() -> None:
    def caption(ks: tuple[int, ...], readouts: tuple[str, ...], layers: list[int]) -> str:
        r = Report("photos", ", ".join(readouts), layers, (32, 32), 1000, 200, "test split", seed=3)
        for layer, readout, k in itertools.product(layers, readouts, ks):
            settings = {"k": k, "T": 0.07, "readout": readout, "interval": [30.0, 40.0]}
            r.scores.append(Score("kNN", "model", layer, 37.5, "%", settings))
        return str(r.table().caption)

    assert "kNN, 37.5 %: 95 % interval" in caption((20,), ("cls",), [5])
    assert "kNN (k 1, tokens), 37.5 %: 95 % interval" in caption((1, 20), ("tokens", "cls"), [5])
    assert "kNN (layer 5), 37.5 %: 95 % interval" in caption((20,), ("cls",), [4, 5])
