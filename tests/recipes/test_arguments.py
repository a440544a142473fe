"""Arguments are read as the command itself would read them."""

from pathlib import Path
from typing import Any

import pytest

from residua.recipes.arguments import Kind, read, value_of


def test_the_settings_that_a_command_would_train_by(tmp_path: Path) -> None:
    assert read("pretrain", ["mae-shapes", "--alpha-min", "0.8"]).settings().items() >= {
        "alpha_min": 0.8, "lr": 1e-3, "seed": 0,
    }.items()  # fmt: skip
    assert read("finetune", ["resnet18", "--stages", "2", "2", "6", "2"]).network.stages == (2, 2, 6, 2)
    (tmp_path / "own.yaml").write_text("process: flow")
    assert read("diffuse", [str(tmp_path / "own.yaml")]).model.process == "flow"


@pytest.mark.parametrize("command", ["pretrain", "diffuse", "finetune"])
def test_of_settings_that_take_each_others_place_the_given_one_is_in_force(command: Kind, tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text("alpha_eff: 0.1\nsteps: 5\nlr: 1e-3")
    plain = read(command, [str(file), "--alpha-min", "1.0"])
    assert plain.shortcut.alpha_eff is None
    assert read(command, [str(file), "--epochs", "2", "--base-lr", "1e-4"]).settings().items() >= {
        "steps": None, "lr": "auto", "alpha_eff": 0.1,
    }.items()  # fmt: skip
    with pytest.raises(ValueError, match=r"^give --alpha-eff or --alpha-min, not both$"):
        read(command, [str(file), "--alpha-min", "1.0", "--alpha-eff", "0.5"])


@pytest.mark.parametrize(
    ("command", "args", "message"),
    [
        ("pretrain", ["--size", "giant"], "^invalid choice 'giant' for argument '--size'"),
        ("pretrain", ["--lr", "x"], "^Error parsing --lr: no type matching"),
        ("pretrain", ["--steps", "0"], "^steps is 0; expected a positive number$"),
        ("pretrain", ["--weight-decay", "-1"], r"^weight_decay is -1\.0; expected 0 or more$"),
        ("pretrain", ["--mask-ratio", "2"], r"^mask_ratio is 2\.0; expected a share of the patches between 0 and 1$"),
        ("pretrain", ["--patch-size", "-4"], "^patch_size is -4; expected a positive number$"),
        ("pretrain", ["--decoder-depth", "-1"], "^decoder_depth is -1; expected a positive number$"),
        ("diffuse", ["--img-size", "0"], "^img_size is 0; expected a positive number$"),
        ("diffuse", ["--depth", "-2"], "^depth is -2; expected a positive number$"),
        ("finetune", ["resnet18", "--stages", "2", "2", "0", "2"], "expected four positive numbers$"),
        ("diffuse", ["--samples", "0"], "^samples is 0; expected a positive number$"),
        ("finetune", ["resnet18", "--alpha-min", "2"], "alpha_min is 2.0; it must lie in"),
    ],
)
def test_what_it_would_refuse(command: Kind, args: list[str], message: str, capsys: Any) -> None:
    with pytest.raises(ValueError, match=message) as error:
        read(command, args)
    assert "\n" not in str(error.value)
    assert capsys.readouterr().err == ""


def test_a_value_is_the_same_however_it_is_typed() -> None:
    assert value_of("pretrain", "lr", "1e-3") == value_of("pretrain", "lr", "0.0010") == 0.001
    assert value_of("finetune", "stages", "2", "2", "06", "2") == (2, 2, 6, 2)
    assert value_of("pretrain", "clip", "None") is None
    assert value_of("pretrain", "lr", "abc") == "abc"
