"""`residua demo`."""

from __future__ import annotations

import signal

import tyro

from residua.commands.demo import Options, work


def demo(args: list[str]) -> None:
    """Two autoencoders, two fully connected networks, one page."""
    o = tyro.cli(Options, args=args, prog="residua demo")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C, so that no training is left behind
    work(o)
