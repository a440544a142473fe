"""Figures and pages: what a run learned, what runs have in common, what the demo shows."""

from residua.report import figures, gallery
from residua.report.compare import compare, comparison_table
from residua.report.demo import demo
from residua.report.page import Cell, Page
from residua.report.run import run_report
from residua.report.runs import NotARun, Run, read_run

__all__ = [
    "Cell",
    "NotARun",
    "Page",
    "Run",
    "compare",
    "comparison_table",
    "demo",
    "figures",
    "gallery",
    "read_run",
    "run_report",
]
