"""A small run, and ways to end it: what the tests of the training loop share."""

import io
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import residua
from residua import data
from residua.data import Preprocessing
from residua.nn import MAE
from residua.nn.diffusion import VP
from residua.train import (
    Finetune,
    Hooks,
    Pretrain,
    checkpoint,
    classify,
    diffuse,
    fit,
    loop,
    metrics,
    prepare,
    read_metrics,
)
from residua.train.checkpoint import checkpoints, load_file, load_training
from residua.train.diffuse_config import Diffuse

STEPS = 12


def small(out: Path | None = None, **changes: Any) -> Pretrain:
    """12 steps in about a second, with everything that has a state: moving average, clipping, annealing."""
    settings = {
        "data": "shapes?n=40&size=16", "size": "nano", "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2,
        "decoder_embed_dim": 16, "decoder_depth": 1, "decoder_num_heads": 2, "alpha_min": 0.7, "anneal": 0.5,
        "steps": STEPS, "batch_size": 16, "lr": 2e-3, "clip": 1.0, "ema": 0.8, "cpu": True, "trackers": (),
        "checkpoint_every": 3, "log_every": 2, "resident": True, "out": str(out) if out else None,
        "dry_run": out is None,
    }  # fmt: skip
    return Pretrain().override(**settings | changes)


def pretrain(config: Pretrain, hooks: Hooks | None = None) -> MAE:
    return fit(prepare(config), hooks)


def small_classifier(model: str, out: Path | None = None, **changes: Any) -> Finetune:
    """12 steps of classification with everything random and everything that has a state."""
    settings = {
        "model": model, "data": "shapes?n=40&size=16&test=20", "mixup": 0.8, "cutmix": 1.0, "erasing": 0.5,
        "drop_path": 0.3, "smoothing": 0.1, "steps": STEPS, "batch_size": 16, "lr": 2e-3, "clip": 1.0, "ema": 0.8,
        "cpu": True, "trackers": (), "checkpoint_every": 3, "log_every": 2, "resident": True,
        "out": str(out) if out else None, "dry_run": out is None,
    }  # fmt: skip
    return Finetune().override(**settings | changes)


def finetune(config: Finetune, hooks: Hooks | None = None) -> Any:
    return fit(classify.prepare(config), hooks)


def small_diffusion(out: Path | None = None, **changes: Any) -> Diffuse:
    """12 steps of a conditional U-ViT with everything random and everything that has a state."""
    settings = {
        "data": "shapes?n=40&size=16&test=20", "size": "nano", "patch_size": 4, "embed_dim": 32, "depth": 2,
        "num_heads": 2, "conditional": True, "label_dropout": 0.3, "alpha_min": 0.7, "anneal": 0.5, "steps": STEPS,
        "batch_size": 16, "lr": 2e-3, "clip": 1.0, "ema": 0.8, "cpu": True, "trackers": (), "checkpoint_every": 3,
        "log_every": 2, "resident": True, "sample_every": 0, "out": str(out) if out else None, "dry_run": out is None,
    }  # fmt: skip
    return Diffuse().override(**settings | changes)


def network(**options: Any) -> Any:
    """A tiny U-ViT that can be sampled from."""
    torch.manual_seed(0)
    shape = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2, "zero_init": False}
    model: Any = residua.create_model("uvit", **shape | options).eval()
    model.process = VP()
    model.preprocessing = Preprocessing((8, 8), (0.5,) * 3, (0.5,) * 3)
    return model


def differences(one: Path, other: Path) -> list[str]:
    """What differs, to the last bit, between the ends of two runs: weights, average, optimiser, records."""
    a, b = checkpoints(one)[-1], checkpoints(other)[-1]
    found = [] if a.name == b.name else [f"last checkpoints {a.name} and {b.name}"]
    for file in ("model.safetensors", "ema.safetensors"):
        left, right = load_file(a / file), load_file(b / file)
        found += [f"{file} {k}" for k in left | right if k not in left or not torch.equal(left[k], right[k])]
    left, right = load_training(a)["optimizer"]["state"], load_training(b)["optimizer"]["state"]
    found += [f"optimizer {p} {k}" for p in left for k in left[p] if not torch.equal(left[p][k], right[p][k])]
    records = [[(r["step"], r["loss"], r["lr"], r["grad_norm"]) for r in read_metrics(run)] for run in (one, other)]
    steps = [[step for step, *_ in rows] for rows in records]
    found += [f"records of {run} are not in order" for run, s in zip((one, other), steps) if s != sorted(set(s))]
    if steps[0] != steps[1]:  # a run that was asked to stop has a record more, and means over other steps
        common = set(steps[0]) & set(steps[1])
        records = [[(step, lr, norm) for step, _, lr, norm in rows if step in common] for rows in records]
    found += [f"record {left}, not {right}" for left, right in zip(*records) if left != right]
    return found


# ---------------------------------------------------------------- processes of their own

_context = get_context("forkserver")
_context.set_forkserver_preload(["residua.train.pretrain", "residua.data", "timm", "accelerate"])


def start(target: Callable[..., None], *args: Any) -> Any:
    process = _context.Process(target=target, args=args)
    process.start()
    return process


def train(config: Any, stage: str | None = None, nth: int = 1) -> None:
    """Train, and die by SIGKILL the nth time that the run comes to a stage."""
    torch.set_num_threads(1)
    if stage is not None:
        STAGES[stage](_Nth(nth))
    fit(ready(config))


def ready(config: Any) -> Any:
    kinds = {Pretrain: prepare, Finetune: classify.prepare, Diffuse: diffuse.prepare}
    return kinds[type(config)](config)  # type: ignore[operator]


def take_place(rank: int, world: int, port: int) -> None:
    """Make this process one of several."""
    torch.set_num_threads(1)
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in places.items()}, MASTER_ADDR="127.0.0.1")
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # as under torchrun, who started them keeps their store


def train_rank(config: Any, rank: int, world: int, port: int) -> None:
    """One of several processes."""
    take_place(rank, world, port)
    session = ready(config)
    assert session.accelerator.num_processes == world
    fit(session)


def failing_rank(config: Any, shared: bool, rank: int, world: int, port: int) -> None:
    """One of several processes, of which the first fails when it looks at the model; the others may wait for it."""
    take_place(rank, world, port)
    if shared:
        loop.PATIENCE = timedelta(seconds=3)

    def look(step: int, model: Any) -> dict[str, float]:
        if rank == 0:
            raise ValueError("samples are not finite")
        if shared:
            dist.all_reduce(torch.ones(3))
        return {}

    fit(ready(config), Hooks(every=5, on_interval=look, on_message=lambda text: None))


def stopped_rank(config: Any, part: str, failing: int, log: Path, rank: int, world: int, port: int) -> None:
    """One of several processes, of which one cannot do its part: how each ends, while none of the others has left."""
    take_place(rank, world, port)

    def fail(*args: Any, **options: Any) -> Any:
        raise checkpoint.CheckpointError(f"no {part} here")

    if rank == failing:
        place, name = {"load": (data, "load"), "resume": (checkpoint, "read_checkpoint"),
                       "save": (checkpoint, "write_checkpoint"), "record": (loop, "append_metrics")}[part]  # fmt: skip
        setattr(place, name, fail)
    try:
        fit(ready(config))
    except Exception as error:
        (log / f"{rank}.txt").write_text(f"{type(error).__name__}: {error}")
    deadline = time.monotonic() + 60
    while len(list(log.glob("*.txt"))) < world and time.monotonic() < deadline:
        time.sleep(0.05)
    os._exit(0 if time.monotonic() < deadline else 1)  # a process that still waits for others is not waited for


def command_rank(args: list[str], log: Path, rank: int, world: int, port: int) -> None:
    """A command by one of several processes, which writes down what it did."""
    take_place(rank, world, port)
    from residua import cli
    from residua.evaluate import reading

    places: list[tuple[int, int]] = []
    loads: list[float] = []
    own_place, load = reading.world, data.load

    def world_of() -> tuple[int, int]:
        places.append(own_place())
        return places[-1]

    def loading(spec: str) -> Any:
        loads.append(time.monotonic())
        time.sleep(0.5 if rank == 0 else 0.0)
        found = load(spec)
        loads.append(time.monotonic())
        return found

    reading.world, data.load = world_of, loading
    said, wrong = io.StringIO(), io.StringIO()
    with redirect_stdout(said), redirect_stderr(wrong):
        status = cli.main(args)
    found = {"status": status, "places": places, "loads": loads, "said": said.getvalue(), "wrong": wrong.getvalue()}
    (log / f"{rank}.json").write_text(json.dumps(found | {"connected": dist.is_initialized()}))


def together(target: Callable[..., None], *args: Any, world: int = 2) -> list[int]:
    """Have several processes run a target, which gets its rank, their number and a port; their exit codes."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # a port that nobody else can take
    processes = [start(target, *args, rank, world, store.port) for rank in range(world)]
    for process in processes:
        process.join(180)
    return [process.exitcode for process in processes]


def kill_at_random(config: Pretrain, run: Path, chance: random.Random, last: int) -> int | None:
    """Start or continue the run, let it come some way, kill it; the step it had saved, or None if it came through."""
    done = checkpoints(run)
    reached = int(done[-1].name[5:]) if done else 0
    goal = chance.randint(reached, max(reached, last))
    process = start(train, config)
    deadline = time.monotonic() + 60
    while process.is_alive() and time.monotonic() < deadline:
        done = checkpoints(run)
        if (run / "config.yaml").exists() and (goal == 0 or (done and int(done[-1].name[5:]) >= goal)):
            break
        time.sleep(0.002)
    time.sleep(chance.random() * 0.05)
    process.kill()
    process.join()
    done = checkpoints(run)
    return (int(done[-1].name[5:]) if done else 0) if process.exitcode == -signal.SIGKILL else None


class _Nth:
    """Counts how often a stage was reached, and kills this process at the right time."""

    def __init__(self, nth: int) -> None:
        self.left = nth

    def due(self) -> bool:
        self.left -= 1
        return self.left == 0

    def kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def _half(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def _in_model_file(nth: _Nth) -> None:
    write = checkpoint.save_file

    def save_file(state: Any, path: Path, **options: Any) -> None:
        write(state, path, **options)
        if nth.due():
            _half(path)
            nth.kill()

    checkpoint.save_file = save_file


def _in_training_state(nth: _Nth) -> None:
    write = torch.save

    def save(content: Any, file: Any) -> None:
        write(content, file)
        if nth.due():
            file.flush()
            _half(Path(file.name))
            nth.kill()

    torch.save = save


def _in_text(name: str) -> Callable[[_Nth], None]:
    def arm(nth: _Nth) -> None:
        write = Path.write_text

        def write_text(path: Path, text: str, **options: Any) -> int:
            if name in path.name and nth.due():
                write(path, text[: len(text) // 2], **options)
                nth.kill()
            return write(path, text, **options)

        Path.write_text = write_text  # type: ignore[method-assign]

    return arm


def _around_rename(before: bool) -> Callable[[_Nth], None]:
    def arm(nth: _Nth) -> None:
        move = Path.rename

        def rename(path: Path, target: Path) -> Path:
            due = nth.due()
            if due and before:
                nth.kill()
            result = move(path, target)
            if due:
                nth.kill()
            return result

        Path.rename = rename  # type: ignore[method-assign]

    return arm


def _in_removal(file: str) -> Callable[[_Nth], None]:
    def arm(nth: _Nth) -> None:
        remove = shutil.rmtree

        def rmtree(path: Path, **options: Any) -> None:
            if Path(path).name.startswith("step-") and nth.due():
                (Path(path) / file).unlink()
                nth.kill()
            remove(path, **options)

        shutil.rmtree = rmtree  # type: ignore[assignment]

    return arm


def _in_metrics(nth: _Nth) -> None:
    write = metrics._append

    def append(path: Path, line: str) -> None:
        if nth.due():
            write(path, line[: len(line) // 2])
            nth.kill()
        write(path, line)

    metrics._append = append


STAGES: dict[str, Callable[[_Nth], None]] = {
    "in the weights": _in_model_file,
    "in the training state": _in_training_state,
    "in the description": _in_text("model.json"),
    "before the rename": _around_rename(before=True),
    "after the rename": _around_rename(before=False),
    "removing an old checkpoint's weights": _in_removal("model.safetensors"),
    "removing an old checkpoint's description": _in_removal("model.json"),
    "in a record": _in_metrics,
    "in the configuration": _in_text("config.yaml"),
}
