"""What docs/chapter3.md says of presets, estimators and verifiers is what the script has."""

import re
from pathlib import Path

from ppo_rlhf.lib.rewards import VERIFIERS
from ppo_rlhf.rlvr_policy import ESTIMATORS, PRESETS

CHAPTER3 = (Path(__file__).parent.parent / "docs/chapter3.md").read_text()


def rows(first_words: str) -> list[list[str]]:
    """Cells of the rows of a table whose first row begins so."""
    lines = CHAPTER3[CHAPTER3.index(first_words) :].splitlines()[2:]
    table = lines[: next(i for i, line in enumerate(lines) if not line.strip().startswith("|"))]
    return [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in table]


def test_presets():
    shown = rows("| `--preset`")
    assert re.findall(r"`(\S+)`", " ".join(row[0] for row in shown)) == list(PRESETS)
    for name, _, sizes, advantage, kl in shown[:-1]:
        args = PRESETS[re.search(r"`(\S+)`", name)[1]]
        n = args.ppo.samples_per_prompt
        assert list(map(int, re.findall(r"\d+", sizes)))[:2] == [args.ppo.batch_size // n, n]
        assert advantage.startswith(f"`{args.ppo.advantage}`")
        shaping = args.rewards
        penalties = [f"{shaping.kl_estimator} in the reward, {shaping.kl_coef}"] * bool(shaping.kl_coef)
        penalties += [f"{shaping.kl_loss_estimator} in the loss, {shaping.kl_loss_coef}"] * bool(shaping.kl_loss_coef)
        assert [kl] == (penalties or ["none"])
    assert shown[-1][3:] == ["; ".join(f"`{PRESETS[name].ppo.advantage}`" for name in ("sums", "sums-grpo")), "none"]


def test_estimators_and_verifiers():
    assert [row[0].strip("`") for row in rows("| `--ppo.advantage` |")] == list(ESTIMATORS)
    cells = " ".join(row[1] for row in rows("| argument |")[:2])
    assert set(VERIFIERS) <= set(re.findall(r"`(\w+)`", cells))


def test_the_verifier_of_the_page_is_one():
    module: dict = {}
    exec(re.search(r"```python\n(.+?)```", CHAPTER3, re.DOTALL)[1], module)
    assert module["right"](["Two and two?"] * 3, ["2+2=4\n#### 4", "4 or 5", ""], ["4"] * 3) == [1.0, 0.0, 0.0]
