"""Stage: two plots of a run, the loss curve and acceptance by position."""

import csv
from pathlib import Path
from typing import Any

import matplotlib

from draftflow.checks.loss_curve import read_metrics, series
from draftflow.stage import run_stage, stage_parser

matplotlib.use("Agg")
matplotlib.rcParams["svg.hashsalt"] = "draftflow"  # equal data, equal files
matplotlib.rcParams["svg.fonttype"] = "none"

from matplotlib import pyplot  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402

SIZE = (6.4, 4.0)  # inches


def draw_loss(axes: Axes, metrics: list[dict[str, Any]]) -> None:
    """Training loss, thin because it is noisy, and held-out loss over it (nats against optimizer steps)."""
    axes.plot(*series(metrics, "loss"), color="0.65", linewidth=1, label="training")
    axes.plot(*series(metrics, "held_out_loss"), color="C0", marker="o", markersize=4, label="held out")
    axes.set(xlabel="optimizer step", ylabel="loss (nats per token)", title="Loss")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)


def draw_acceptance(axes: Axes, rows: list[dict[str, str]]) -> None:
    """Share of the blocks in which the proposals up to each position were accepted."""
    positions = [int(row["position"]) for row in rows]
    rates = [float(row["rate"]) for row in rows]
    bars = axes.bar(positions, rates, color="C0")
    axes.bar_label(bars, labels=[f"{rate:.2f}" for rate in rates], padding=2, fontsize=8)
    axes.set(
        xlabel="position in the draft block",
        ylabel="share of blocks accepted up to here",
        title="Acceptance on held-out prompts",
        xticks=positions,
        ylim=(0, max(0.1, *rates) * 1.12),
    )
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)


def save(path: Path, draw: Any, data: Any) -> None:
    """Draw on a figure and write it to `path`, in the format of its suffix, whole or not at all."""
    figure, axes = pyplot.subplots(figsize=SIZE, layout="constrained")
    draw(axes, data)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}")
    metadata = {"Date": None} if path.suffix == ".svg" else None
    figure.savefig(temporary, format=path.suffix[1:], dpi=150, metadata=metadata)
    pyplot.close(figure)
    temporary.replace(path)


def main() -> None:
    parser = stage_parser(__doc__ or "", settings=False)
    parser.add_argument("--metrics", type=Path, required=True, help="metrics.jsonl")
    parser.add_argument("--acceptance", type=Path, required=True, help="acceptance.tsv")
    parser.add_argument("--loss-plot", type=Path, required=True, help="plot to write, .svg or .png")
    parser.add_argument("--acceptance-plot", type=Path, required=True, help="plot to write, .svg or .png")
    arguments = parser.parse_args()
    with arguments.acceptance.open(encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream, delimiter="\t"))
    save(arguments.loss_plot, draw_loss, read_metrics(arguments.metrics))
    save(arguments.acceptance_plot, draw_acceptance, rows)


if __name__ == "__main__":
    run_stage(main)
