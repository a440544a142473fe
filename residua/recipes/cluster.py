"""The runs of a sweep on a Ray cluster: each a task that runs the same commands in processes of its own.

The sweep's folder and the images have to be where every machine of the cluster sees them under the same path.
"""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from residua.missing import pip_install
from residua.recipes.sweep import OnTrial, Sweep, Trial, carry_out, note_end

_GRACE = 60.0  # seconds that interrupted runs have to save where they are
_ANSWER = 10.0  # seconds that a cluster has to answer


def open_ray() -> Any:
    """The ray module, or an error that says how to get it."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it would call home
    try:
        import ray
    except ImportError as error:
        raise ValueError(f"--on ray needs Ray, which is not installed: {pip_install('ray')}") from error
    return ray


def check_gpus(gpus: float) -> None:
    if gpus < 0 or (gpus > 1 and gpus != int(gpus)):
        raise ValueError(f"--gpus-per-run {gpus:g}: give a share of a GPU such as 0.5, or a whole number")


def check_address(address: str) -> None:
    """Raise if nothing answers where a cluster should be: Ray itself would try for minutes."""
    try:
        place = urlsplit(address if "://" in address else f"//{address}")
        if place.hostname and place.port:
            socket.create_connection((place.hostname, place.port), timeout=_ANSWER).close()
    except (OSError, ValueError) as error:
        raise ValueError(f"no Ray cluster answers at {address} ({error}): see --ray-address and RAY_ADDRESS") from None


def run_on_ray(
    sweep: Sweep,
    *,
    address: str | None = None,
    gpus: float | None = None,
    jobs: int | None = None,
    on_end: OnTrial = lambda trial: None,
) -> None:
    """Run what is waiting, as many at once as fit, at most `jobs`; failures are noted and the others go on.

    `address` is a cluster's ("auto": the one that this machine is part of); none: this machine alone. `gpus` is what a
    run takes, 0.5 for two on each GPU; none: one, where the cluster has any.
    """
    ray = open_ray()
    check_gpus(gpus or 0)
    ours = not ray.is_initialized()
    if ours:
        given = address or os.environ.get("RAY_ADDRESS")
        if given:
            check_address(given)
        local = {} if given else {"include_dashboard": False}
        ray.init(address=address, log_to_driver=False, **local)
    try:
        there = ray.cluster_resources().get("GPU", 0.0)
        share = min(1.0, there) if gpus is None else gpus
        if share > there:
            raise ValueError(f"a run is to take {share:g} GPUs, but the cluster has {there:g}: see --gpus-per-run")
        _run(ray, sweep, share, jobs, on_end)
    finally:
        if ours:
            ray.shutdown()


def _run(ray: Any, sweep: Sweep, gpus: float, jobs: int | None, on_end: OnTrial) -> None:
    task = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=0)(_task)
    shared = replace(sweep, folder=sweep.folder.resolve(), trials=[])
    waiting = sweep.waiting
    flying: dict[Any, Trial] = {}
    try:
        while waiting or flying:
            while waiting and len(flying) < (jobs or len(sweep.trials)):
                trial = waiting.pop(0)
                flying[task.remote(shared, trial, os.getcwd())] = trial
            (ready,), _ = ray.wait(list(flying), num_returns=1)
            trial = flying.pop(ready)
            try:
                error = ray.get(ready)
            except ray.exceptions.RayError as failure:  # the worker or its machine is gone
                error = f"lost by Ray: {str(failure).strip().splitlines()[0]}"
            note_end(sweep, trial, error)
            on_end(trial)
    except BaseException:
        for left in flying:
            ray.cancel(left)
        if flying:
            ray.wait(list(flying), num_returns=len(flying), timeout=_GRACE)
        raise


def _task(sweep: Sweep, trial: Trial, cwd: str) -> str:
    return carry_out(sweep, trial, cwd=cwd if Path(cwd).is_dir() else None)
