"""A replayed step is the step."""

import pytest
import torch
from drive import small

from residua.train import prepare
from residua.train.recorded import Recorded

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_a_step_that_cannot_be_recorded_is_called_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    calls: list[int] = []

    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(int(x))
        return x, x

    def refuse(self: Recorded, inputs: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(Recorded, "_record", refuse)
    monkeypatch.setattr(Recorded, "_ordinary", lambda self, inputs: self.step(*inputs))
    recorded = Recorded(step, said.append)
    for i in range(6):
        assert int(recorded(torch.tensor(i))[0]) == i
    assert calls == [0, 1, 2, 3, 4, 5]  # each step once
    (text,) = said
    assert text.endswith("operation not permitted when stream is capturing")


@needs_gpu
@pytest.mark.parametrize("resident", [True, False])
def test_replayed_training_follows_ordinary_training(resident: bool) -> None:
    """Through warm-up of the learning rate, annealing and clipping, all of which change from step to step."""
    losses, weights = {}, {}
    for way in ("recorded", "ordinary"):
        config = small(cpu=False, compile=True, precision="bf16", resident=resident, workers=0)
        loop = prepare(config).loop()
        if way == "ordinary":
            loop.recorded = None
        losses[way] = torch.stack([loop.advance(images)[0] for images in loop.batches(0, loop.settings.steps)])
        weights[way] = [p.detach().clone() for p in loop.bare.parameters()]
        if way == "recorded":
            assert loop.recorded is not None
            assert loop.recorded.graph is not None
    torch.testing.assert_close(losses["recorded"], losses["ordinary"], rtol=1e-3, atol=1e-4)
    for one, other in zip(weights["recorded"], weights["ordinary"]):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=2e-4)


@needs_gpu
def test_a_run_on_a_gpu_can_be_resumed(tmp_path) -> None:
    config = small(tmp_path / "run", cpu=False, compile=True, steps=6)
    session = prepare(config)
    session.config.save(tmp_path / "run" / "config.yaml")
    session.loop().fit()
    again = prepare(config.override(resume=True)).loop()
    assert again.resume() == 6
    for images in again.batches(6, 11):  # past the recording
        loss, _ = again.advance(images)
    assert loss.isfinite()
