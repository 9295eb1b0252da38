"""What chapter 3's pages say of presets, estimators, losses, KL, verifiers and demos is so in code and static/."""

import json
import re
import typing
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from ppo_rlhf.lib import tools
from ppo_rlhf.lib.rewards import VERIFIERS
from ppo_rlhf.rlvr import algebra, policy as rlvr_policy
from ppo_rlhf.rlvr.algebra import ESTIMATORS
from ppo_rlhf.rlvr.policy import PRESETS

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
CHAPTER3, METHODS = (DOCS / "chapter3.md").read_text(), (DOCS / "reference/methods.md").read_text()


def rows(first_words: str, page: str = METHODS) -> list[list[str]]:
    """Cells of the rows of a table whose first row begins so."""
    lines = page[page.index(first_words) :].splitlines()[2:]
    table = lines[: next(i for i, line in enumerate(lines) if not line.strip().startswith("|"))]
    return [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in table]


def metrics_of(demo: str) -> pd.DataFrame:
    return pd.read_csv(ROOT / f"static/{demo}/metrics.csv")


def test_presets():
    shown = rows("| `--preset`")
    assert re.findall(r"`(\S+)`", " ".join(row[0] for row in shown)) == list(PRESETS)
    (of_sums,) = [row for row in shown if "`sums`" in row[0]]
    for name, _, sizes, advantage, kl in [row for row in shown if row != of_sums]:
        args = PRESETS[re.search(r"`(\S+)`", name)[1]]
        n = args.ppo.samples_per_prompt
        assert list(map(int, re.findall(r"\d+", sizes)))[:2] == [args.ppo.batch_size // n, n]
        assert advantage.startswith(f"`{args.ppo.advantage}`")
        shaping = args.rewards
        penalties = [f"{shaping.kl_estimator} in the reward, {shaping.kl_coef}"] * bool(shaping.kl_coef)
        penalties += [f"{shaping.kl_loss_estimator} in the loss, {shaping.kl_loss_coef}"] * bool(shaping.kl_loss_coef)
        assert [kl] == (penalties or ["none"])
    assert of_sums[3:] == ["; ".join(f"`{PRESETS[name].ppo.advantage}`" for name in ("sums", "sums-grpo")), "none"]


def test_estimators_and_verifiers():
    assert [row[0].strip("`") for row in rows("| `--ppo.advantage` |")] == list(ESTIMATORS)
    named = {row[0].strip("`") for row in rows("| `--rewards.verifier` |")}
    assert named <= set(VERIFIERS) and {name for name in VERIFIERS if not re.search("format|think", name)} <= named


def test_losses_and_aggregations_and_papers():
    fields = typing.get_type_hints(rlvr_policy.PpoArgs)
    for name in ("loss", "loss_aggregation"):
        assert [row[0].strip("`") for row in rows(f"| `--ppo.{name}` |")] == list(typing.get_args(fields[name]))
    for row in rows("| `--ppo.advantage` |") + rows("| `--ppo.loss` |"):
        assert re.search(r"\]\(https://(arxiv\.org|doi\.org|github\.com)/", row[2]), row


def test_what_the_page_says_of_estimators_that_are_nearly_one():
    """rloo is n / (n - 1) times dr_grpo; reinforce++-baseline, once whitened, is dr_grpo shifted and scaled."""
    rewards = torch.randn(24, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mask, groups = torch.arange(5) < torch.arange(24).unsqueeze(1) % 5 + 1, torch.arange(24) // 8
    found = {name: ESTIMATORS[name](rewards, mask, groups)[0] for name in ("rloo", "dr_grpo", "reinforce++-baseline")}
    torch.testing.assert_close(found["rloo"], 8 / 7 * found["dr_grpo"])
    whitened = algebra.whiten(found["reinforce++-baseline"], mask, keep_mean=False)[mask]
    x = found["dr_grpo"][mask]
    torch.testing.assert_close(whitened, (x - x.mean()) / x.std(correction=0), atol=1e-7, rtol=0)


def test_k3_with_a_plus_is_the_unbiased_estimate_of_deepseek_v32():
    """Value and gradient of r * (exp(-d) - 1 + d), differentiated as it stands (arXiv 2512.02556)."""
    new, old, ref = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    new.requires_grad_(True)
    mask = torch.ones(4, 6, dtype=torch.bool)
    mb = SimpleNamespace(logprobs=old, ref_logprobs=ref, loss_mask=mask)
    shaping = rlvr_policy.RewardsArgs(kl_loss_coef=1.0, kl_loss_estimator="k3+")
    ours = rlvr_policy.kl_in_loss(new, mb, torch.zeros_like(old), shaping)
    theirs = torch.exp(new - old) * (torch.exp(ref - new) - 1 + new - ref)
    gradients = [torch.autograd.grad(kl.sum(), new, retain_graph=True)[0] for kl in (ours, theirs)]
    for one, other in ((ours.detach(), theirs.detach()), gradients):
        torch.testing.assert_close(one, other, atol=1e-15, rtol=1e-14)
    (of_k3,) = torch.autograd.grad(algebra.kl_estimate(new, ref, mask, "k3").sum(), new)
    assert (of_k3 - gradients[0]).abs().max() > 0.1  # k3 alone is something else


# ---- The demos -------------------------------------------------------------------------------------------------

SHARES = {"correct, mean of 16 samples: pass@1": "mean@16", "pass@16: one of 16 samples, or more": "pass@16"}
SHARES |= {"greedy accuracy: the likeliest response": "gsm8k_strict"} | {f"pass@{k}": f"pass@{k}" for k in (2, 4, 8)}
SHARES |= {f"{n} step{'s' * (n > 1)}": f"gsm8k_strict_steps_{n}" for n in (1, 2, 3, 4)}


@pytest.mark.parametrize(
    ("name", "preset", "updates", "made", "left_out"),
    [
        ("demo-rlvr", "sums", 70, "at commit {}, seed 1", set()),
        ("demo-tools", "sums-tools", 60, "seed 1 at commit {}", {"pass@2", "pass@8"}),
    ],
)
def test_the_table_of_a_demo(name, preset, updates, made, left_out):
    """Before the first update: the first row of the metrics; after the last: meta.json."""
    meta, metrics = json.loads((ROOT / f"static/{name}/meta.json").read_text()), metrics_of(name)
    assert len(metrics) == meta["sizes"]["updates"] == updates
    assert (meta["args"]["preset"], meta["args"]["seed"]) == (preset, 1)
    assert made.format(meta["commit"][:7]) in CHAPTER3
    table = rows(f"| language model | after {updates} updates", CHAPTER3)
    shown = {words.removeprefix("problems of "): numbers for words, *numbers in table}
    before, after = metrics.iloc[0], meta["results"]
    for words in SHARES.keys() - left_out:
        assert shown.pop(words) == [f"{100 * x[f'eval/{SHARES[words]}']:.1f} %" for x in (before, after)], words
    length = "tokens of the likeliest response, mean"
    assert shown.pop(length) == [f"{x['eval/length']:.1f}" for x in (before, after)]
    if name == "demo-tools":
        calls = metrics["val/tool_calls"]
        words = "answered calls in a sampled response to a training problem: first three updates, last three"
        assert shown.pop(words) == [f"{part.mean():.2f}" for part in (calls[:3], calls[-3:])]
    assert not shown


def test_samples_and_errors_of_the_demo():
    folder = ROOT / "static/demo-rlvr"
    after, before = json.loads((folder / "meta.json").read_text())["results"], metrics_of("demo-rlvr").iloc[0]
    errors = [100 * x[f"eval/{name}"] for name in ("mean_standard_error", "standard_error") for x in (before, after)]
    shown = "is {:.1f} points before training and {:.1f} after; that of the greedy accuracy is {:.1f} and {:.1f}."
    assert shown.format(*errors) in " ".join(CHAPTER3.split())
    solved = [json.loads(line) for line in (folder / "evaluation.jsonl").read_text().splitlines()]
    solved = {row["prompt"].strip(): row for row in solved}
    demo = CHAPTER3.partition("## The demo\n")[2].partition("\n## ")[0]
    shown = [line.strip("| ").split(" | ") for line in demo.splitlines() if "#### " in line and line.startswith("|")]
    assert len(shown) == 3
    for problem, *samples in shown:
        found = [" ".join(solved[problem][f"a_{which}_sample"].split()) for which in ("right", "wrong")]
        assert [sample.replace("\\*", "*") for sample in samples] == found


# ---- Code on the page ------------------------------------------------------------------------------------------


def code_with(words: str) -> str:
    (source,) = (block for block in re.findall(r"```python\n(.+?)```", CHAPTER3, re.DOTALL) if words in block)
    return source


def test_the_verifier_of_the_page_is_one():
    module: dict = {}
    exec(code_with("def right"), module)
    assert module["right"](["Two and two?"] * 3, ["2+2=4\n#### 4", "4 or 5", ""], ["4"] * 3) == [1.0, 0.0, 0.0]


def test_the_tool_of_the_page_is_one(tmp_path, monkeypatch):
    (tmp_path / "my_tools.py").write_text(code_with("def add"))
    monkeypatch.chdir(tmp_path)
    tool = tools.load_tool("my_tools:add", "tools.tool")
    assert [tool(call) for call in ("7+5", "1+2+3", "7*5")] == ["12", "6", "error: failed"]
