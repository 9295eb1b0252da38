"""Draw the three diagrams of the pages: who talks to whom, the six cases of the clip, and what flows in one update.

python benchmark/diagrams.py         # draws static/who.png, static/clip.png and static/update.png again
"""

import sys
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

STATIC = Path(__file__).resolve().parent.parent / "static"
TRAINED, FROZEN, DATA = "#cfe4f5", "#e6e6e6", "white"
BLUE, ORANGE = "#0072b2", "#d55e00"
CLIP = 0.2


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure whose unit is an inch."""
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return figure, axes


def box(axes: Axes, x: float, y: float, width: float, text: str, color: str = DATA) -> FancyBboxPatch:
    """A box around its middle, which is kept for arrows. A first line of its own is bold."""
    height = 0.42 + 0.19 * text.count("\n")
    corner, style = (x - width / 2, y - height / 2), "round,pad=0.02,rounding_size=0.08"
    patch = axes.add_patch(
        FancyBboxPatch(corner, width, height, style, facecolor=color, edgecolor="#555555", zorder=3)
    )
    for line, words in enumerate(text.split("\n")):
        place = y + height / 2 - 0.22 - 0.19 * line
        weight = "normal" if line or "\n" not in text else "bold"
        axes.text(x, place, words, ha="center", va="center", fontsize=9.5, fontweight=weight, zorder=4)
    return patch


def arrow(
    axes: Axes, start: FancyBboxPatch, end: FancyBboxPatch, bend: float = 0, shift: tuple = (0, 0, 0, 0)
) -> None:
    """From one box to another. shift: of its ends from their middles, as (x, y, x, y)."""
    ends = [(p.get_x() + p.get_width() / 2, p.get_y() + p.get_height() / 2) for p in (start, end)]
    (x0, y0), (x1, y1) = (
        (ends[0][0] + shift[0], ends[0][1] + shift[1]),
        (ends[1][0] + shift[2], ends[1][1] + shift[3]),
    )
    style = {"arrowstyle": "-|>", "color": "#333333", "linewidth": 1.3, "connectionstyle": f"arc3,rad={bend}"}
    style |= {"patchA": start, "patchB": end, "shrinkA": 3, "shrinkB": 3, "mutation_scale": 13}
    axes.annotate("", (x1, y1), (x0, y0), arrowprops=style, zorder=2)


def note(axes: Axes, x: float, y: float, text: str) -> None:
    style = {"facecolor": "white", "edgecolor": "none", "pad": 1}
    axes.text(x, y, text, ha="center", va="center", fontsize=9, style="italic", color="#333333", bbox=style, zorder=5)


# ---- Who talks to whom -----------------------------------------------------------------------------------------


def who() -> Figure:
    figure, axes = canvas(10, 4.3)
    axes.text(0.2, 4.05, "Part 1: learn what people prefer", fontsize=11, fontweight="bold", va="center")
    axes.text(0.2, 2.75, "Part 2: write, be judged, improve", fontsize=11, fontweight="bold", va="center")
    people = box(axes, 1.6, 3.55, 2.6, "people choose between texts")
    reward = box(axes, 6.2, 3.55, 1.9, "reward model\nscores a text", FROZEN)
    queries = box(axes, 0.75, 1.9, 1.0, "queries")
    policy = box(axes, 2.5, 1.9, 1.5, "policy\nwrites", TRAINED)
    responses = box(axes, 4.2, 1.9, 1.1, "responses")
    reference = box(axes, 6.2, 2.45, 1.9, "reference\nthe policy as it was", FROZEN)
    critic = box(axes, 6.2, 1.35, 1.9, "critic\npredicts the rewards", TRAINED)
    ppo = box(axes, 9.2, 1.9, 1.2, "PPO\none update")
    arrow(axes, people, reward)
    note(axes, 4.0, 3.72, "train it on their choices")
    arrow(axes, queries, policy)
    arrow(axes, policy, responses)
    for model, left in ((reward, -0.6), (reference, 0), (critic, 0)):
        arrow(axes, responses, model, shift=(0, 0, left, 0))
        arrow(axes, model, ppo)
    note(axes, 8.2, 2.95, "score")
    note(axes, 7.6, 2.4, "KL penalty")
    note(axes, 7.8, 1.38, "values")
    arrow(axes, ppo, critic, -0.35)
    arrow(axes, ppo, policy, -0.38)
    note(axes, 5.6, 0.42, "make tokens that went better than the critic predicted likelier, and others less likely")
    for x, color, text in ((0.25, TRAINED, "learns in part 2"), (1.75, FROZEN, "does not")):
        axes.text(
            x, 0.12, f" {text} ", fontsize=9, va="center", bbox={"facecolor": color, "edgecolor": "#555555", "pad": 2}
        )
    return figure


# ---- The clip --------------------------------------------------------------------------------------------------

CASES = {
    1: ("wrong way:\npulled back", "made\nlikelier", "clipped:\nno gradient"),
    -1: ("clipped:\nno gradient", "made\nless likely", "wrong way:\npulled back"),
}


def clip() -> Figure:
    """The loss of a token by its ratio, for an advantage of 1 and of -1."""
    figure = Figure(figsize=(10, 3.9), layout="constrained")
    ratio = np.linspace(0.5, 1.5, 501)
    for axes, (advantage, cases) in zip(figure.subplots(1, 2), CASES.items(), strict=True):
        plain, clipped = -advantage * ratio, -advantage * ratio.clip(1 - CLIP, 1 + CLIP)
        loss = np.maximum(plain, clipped)
        flat = clipped > plain
        axes.plot(ratio, clipped, color="#888888", linestyle="--", linewidth=1.2, label="with the clipped ratio")
        axes.plot(ratio, plain, color="#888888", linestyle=":", linewidth=1.6, label="with the ratio")
        axes.plot(ratio, loss, color=BLUE, linewidth=3, label="their maximum: the loss")
        axes.plot(ratio[flat], loss[flat], color=ORANGE, linewidth=3, label="the same, without a gradient")
        low, high = loss.min() - 0.6, loss.max() + 0.2
        for bound in (1 - CLIP, 1 + CLIP):
            axes.axvline(bound, color="#bbbbbb", linewidth=1, zorder=0)
        number = 1 if advantage > 0 else 4
        for place, (x, text) in enumerate(zip((0.65, 1, 1.35), cases, strict=True)):
            axes.text(x, low + 0.17, f"{number + place}  {text}", ha="center", va="center", fontsize=9.5)
        axes.plot(1, -advantage, "o", color="black", markersize=6, zorder=5)
        side = "better" if advantage > 0 else "worse"
        axes.set_title(f"advantage {advantage:+d}: the token did {side} than expected", fontsize=11)
        axes.set(xlabel="ratio: probability now / when sampled", xlim=(0.5, 1.5), ylim=(low, high))
        axes.set_xticks([0.5, 1 - CLIP, 1, 1 + CLIP, 1.5])
    figure.axes[0].set_ylabel("loss of the token")
    figure.axes[0].legend(fontsize=9, frameon=False, loc="upper right")
    return figure


# ---- One update ------------------------------------------------------------------------------------------------


def update() -> Figure:
    """The tensors of small/ppo.py, step by step; an arrow leads to the step that reads them."""
    figure, axes = canvas(10, 5.4)
    queries = box(axes, 1.6, 4.95, 2.0, "1  next queries\nqueries (64, 24)")
    tokens = box(axes, 5.2, 4.95, 2.3, "2  generate responses\ntokens (64, 48)", TRAINED)
    logprobs = box(axes, 1.6, 3.75, 2.0, "2  policy reads\nlogprobs (64, 24)")
    values = box(axes, 4.0, 3.75, 1.9, "2  critic reads\nvalues (64, 24)")
    reference = box(axes, 6.4, 3.75, 2.1, "3  reference reads\nref_logprobs (64, 24)", FROZEN)
    scores = box(axes, 8.8, 3.75, 2.1, "4  truncate, then score\nscores (64,)", FROZEN)
    rewards = box(
        axes,
        7.4,
        2.35,
        3.9,
        "5  rewards (64, 24)\n$-$kl_coef · (logprobs $-$ ref_logprobs),\nplus the score on the last token",
    )
    advantages = box(
        axes, 3.3, 2.35, 3.1, "6  advantages, returns (64, 24)\nwhitening, and GAE\nfrom the last token to the first"
    )
    steps = box(
        axes,
        3.0,
        0.75,
        4.2,
        "7  four epochs\nnew_logprobs, new_values (64, 24):\nratio, two clipped losses (), a step of Adam",
        TRAINED,
    )
    coefficient = box(
        axes, 8.1, 0.75, 2.9, "8  kl_coef ()\nrises while the KL is above\nits target, falls while below"
    )
    arrow(axes, queries, tokens)
    for read in (logprobs, values, reference, scores):
        arrow(axes, tokens, read)
    arrow(axes, logprobs, rewards, shift=(0, 0, -0.9, 0))
    for read in (reference, scores):
        arrow(axes, read, rewards)
    arrow(axes, values, advantages)
    arrow(axes, rewards, advantages)
    arrow(axes, advantages, steps)
    arrow(axes, values, steps, -0.16, shift=(0.85, 0, 1.85, 0))
    arrow(axes, logprobs, steps, shift=(-0.55, 0, -0.9, 0))
    arrow(axes, rewards, coefficient, shift=(0.7, 0, 0, 0))
    note(axes, 8.1, 1.52, "KL of the batch")
    arrow(axes, steps, queries, -0.25, shift=(-1.8, 0, -0.8, 0))
    note(axes, 0.45, 2.9, "next\nupdate")
    return figure


def main() -> None:
    for draw in (who, clip, update):
        draw().savefig(STATIC / f"{draw.__name__}.png", dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    sys.exit(main())
