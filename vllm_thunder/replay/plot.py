"""The picture of a comparison: progress, latencies and what each program was doing when."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vllm_thunder.replay.records import Replay
from vllm_thunder.replay.report import summarize

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_replays"]

_KIND_COLOURS = ("#7a7f87", "#1f6feb", "#d9730d", "#2a9d5c", "#8f4fd1", "#b8336a")
_WAITING = "#f0b98d"
_ANSWERING = "#1f4e8c"
_TOOL = "#e6e8eb"
_INK = "#24292f"


def plot_replays(replays: Sequence[Replay], path: Path, title: str) -> None:
    """Write a PNG. Kinds keep their order; lanes show the first run of each kind."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    by_kind: dict[str, list[Replay]] = {}
    for replay in replays:
        by_kind.setdefault(replay.kind, []).append(replay)
    colours = {kind: _KIND_COLOURS[i % len(_KIND_COLOURS)] for i, kind in enumerate(by_kind)}
    style = {
        "font.size": 10,
        "axes.edgecolor": "#c4c8cd",
        "axes.labelcolor": _INK,
        "axes.titlelocation": "left",
        "axes.titleweight": "bold",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "text.color": _INK,
        "xtick.color": _INK,
        "ytick.color": _INK,
    }
    lanes = max(len(runs[0].programs) for runs in by_kind.values())
    lane_height = min(6.0, 1.2 + 0.14 * lanes)
    height = 4.4 + lane_height * len(by_kind)
    with plt.rc_context(style):
        figure = plt.figure(figsize=(12, height), layout="constrained")
        rows = figure.add_gridspec(
            1 + len(by_kind), 2, height_ratios=[4.0] + [lane_height] * len(by_kind)
        )
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
        _plot_progress(figure.add_subplot(rows[0, 0]), by_kind, colours)
        _plot_latencies(figure.add_subplot(rows[0, 1]), by_kind, colours)
        end = max(runs[0].seconds for runs in by_kind.values())
        for index, (kind, runs) in enumerate(by_kind.items()):
            _plot_lanes(figure.add_subplot(rows[1 + index, :]), kind, runs[0], end, index == 0)
        figure.savefig(path, dpi=130)
        plt.close(figure)


def _plot_progress(axes: "Axes", by_kind: dict[str, list[Replay]], colours: dict[str, str]) -> None:
    for kind, runs in by_kind.items():
        for number, run in enumerate(runs):
            ends = sorted(s.started_at + s.latency_seconds for s in run.steps if s.error is None)
            rate = summarize(kind, runs).steps_per_minute
            axes.step(
                [0.0, *ends],
                range(len(ends) + 1),
                where="post",
                color=colours[kind],
                linewidth=2.0,
                alpha=1.0 if number == 0 else 0.45,
                label=f"{kind}: {rate:.0f} steps/min" if number == 0 else None,
            )
    axes.set_title("Steps finished")
    axes.set_xlabel("seconds since the start")
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.grid(color="#eceef0")
    axes.legend(frameon=False, loc="lower right")


def _plot_latencies(
    axes: "Axes", by_kind: dict[str, list[Replay]], colours: dict[str, str]
) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    for kind, runs in by_kind.items():
        values = np.sort([s.latency_seconds for run in runs for s in run.steps if s.error is None])
        if not len(values):
            continue
        shares = np.arange(1, len(values) + 1) / len(values)
        p99 = np.quantile(values, 0.99)
        axes.step(
            values,
            shares,
            where="post",
            color=colours[kind],
            linewidth=2.0,
            label=f"{kind}: mean {values.mean():.1f} s, p99 {p99:.1f} s",
        )
        axes.plot([p99], [0.99], marker="o", color=colours[kind], markersize=6)
    axes.axhline(0.99, color="#c4c8cd", linewidth=1.0, linestyle=":")
    axes.set_title("Share of steps done within x seconds, waiting included")
    axes.set_xlabel("step latency (s)")
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_ylim(0, 1.02)
    axes.grid(color="#eceef0", which="major")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, loc="upper left")


def _plot_lanes(axes: "Axes", kind: str, run: Replay, end: float, with_legend: bool) -> None:
    """One lane a program, in the order in which programs ended."""
    order = sorted(run.programs, key=lambda program: program.ended_at)
    lane = {program.program_id: number for number, program in enumerate(order)}
    spans: dict[str, list[tuple[int, float, float]]] = {_WAITING: [], _ANSWERING: [], _TOOL: []}
    for step in run.steps:
        row = lane[step.program_id]
        wait = step.latency_seconds
        if step.first_token_seconds is not None:
            wait = step.first_token_seconds
        done = step.started_at + step.latency_seconds
        spans[_WAITING].append((row, step.started_at, wait))
        spans[_ANSWERING].append((row, step.started_at + wait, step.latency_seconds - wait))
        spans[_TOOL].append((row, done, step.tool_seconds if step.error is None else 0.0))
    names = {
        _WAITING: "waiting for the first token",
        _ANSWERING: "answering",
        _TOOL: "tool",
    }
    for colour, found in spans.items():
        axes.barh(
            [row for row, _, _ in found],
            [length for _, _, length in found],
            left=[start for _, start, _ in found],
            height=0.8,
            color=colour,
            label=names[colour],
        )
    failed = [(p.ended_at, lane[p.program_id]) for p in order if p.error is not None]
    if failed:
        axes.plot(
            [x for x, _ in failed],
            [y for _, y in failed],
            linestyle="",
            marker="x",
            color="#c62828",
            label="failed",
        )
    axes.set_title(f"{kind}: one lane a program")
    axes.set_xlabel("seconds since the start")
    axes.set_yticks([])
    axes.set_xlim(0, end * 1.01)
    axes.set_ylim(-0.6, len(order) - 0.4)
    axes.spines["left"].set_visible(False)
    if with_legend:
        axes.legend(frameon=False, ncols=4, loc="lower right", bbox_to_anchor=(1.0, 1.0))
