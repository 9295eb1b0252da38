"""The derivations of report.html and `report.py --explain`: every number of small runs, in a browser."""

import contextlib
import json
from pathlib import Path

import pytest
from runs import only, policy_arguments, posts_arguments, world_arguments
from test_report import browser, data_of, opened  # noqa: F401, they are fixtures

from ppo_rlhf import report, rlvr_policy, tldr_policy, train_policy
from ppo_rlhf.lib import cli, derivation

RUNS = {
    "1": "--rewards.function ppo_rlhf.worlds.tales:sentiment.gold_scores --ppo.lr 0.01 --ppo.gamma 0.9",
    "1 minibatches": "--rewards.function ppo_rlhf.worlds.tales:sentiment.gold_scores --ppo.lr 0.01 --ppo.gamma 0.9 "
    "--ppo.nminibatches 2 --ppo.no-whiten_rewards --rewards.adaptive_kl.target 1",
    "2": "--ppo.lr 0.01 --ppo.nminibatches 2",
    "2 k3": "--ppo.lr 0.01 --ppo.nminibatches 2 --ppo.whiten_rewards --ppo.gamma 0.9 --rewards.kl_estimator k3 "
    "--rewards.missing_eos subtract",
    "gae": "--ppo.advantage gae --ppo.lam 0.8 --ppo.gamma 0.9 --ppo.cliprange_value 0.01 --rewards.kl_coef 0.1",
    "grpo": "--ppo.advantage grpo --rewards.kl_coef 0.1 --rewards.kl_estimator k3 --ppo.dual_clip 1.25 "
    "--rewards.kl_loss_coef 0.1 --rewards.kl_loss_estimator k3 --ppo.loss_aggregation seq-mean-token-mean",
    "dr_grpo": "--ppo.advantage dr_grpo --ppo.loss cispo --rewards.kl_loss_coef 0.1 --rewards.kl_loss_estimator k2 "
    "--ppo.loss_aggregation seq-mean-token-sum-norm",
    "rloo": "--ppo.advantage rloo --rewards.kl_coef 0.1 --rewards.kl_estimator k2 --ppo.loss reinforce "
    "--ppo.loss_aggregation seq-mean-token-sum",
    "opo": "--ppo.advantage opo --rewards.kl_coef 0.1 --rewards.kl_estimator abs --ppo.loss gspo "
    "--ppo.cliprange_low 0.0003 --ppo.cliprange_high 0.0004 --rewards.kl_loss_coef 0.1 --rewards.kl_loss_estimator abs "
    "--ppo.loss_aggregation seq-mean-token-mean",
    "reinforce++": "--ppo.advantage reinforce++ --ppo.gamma 0.9 --rewards.kl_coef 0.1 --rewards.kl_loss_coef 0.1 "
    "--rewards.kl_loss_estimator k3+ --rewards.mask_truncated",
    "reinforce++-baseline": "--ppo.advantage reinforce++-baseline --rewards.kl_coef 0.1 --rewards.kl_loss_coef 0.1 "
    "--rewards.kl_loss_estimator k1+",
    "remax": "--ppo.advantage remax --rewards.kl_coef 0.1 --rewards.kl_estimator full --rewards.kl_loss_coef 0.1 "
    "--rewards.kl_loss_estimator full",
}
GROUPS = (
    "--preset sums-grpo --rewards.verifier test_explain:odd --ppo.lr 0.01 --ppo.batch_size 16 --ppo.noptepochs 2 "
    "--ppo.samples_per_prompt 4 --ppo.total_episodes 48 --ppo.nminibatches 2 --save_interval 0 --log_interval 0 "
    "--eval_interval 0 --eval_samples 0 --eval_problems 4 --task.response_length 12 --trace_interval 2"
)
SUMMARIES = (
    "--rewards.function ppo_rlhf.worlds.posts:gold_scores --ppo.total_episodes 48 --ppo.batch_size 16 "
    "--save_interval 0 --log_interval 0 --eval_interval 0 --eval_posts 8 --trace_interval 2"
)


def odd(prompts, responses, answers):
    """A verifier that even an untrained model satisfies now and then."""
    return [float(sum(map(str.isalnum, response)) % 2) for response in responses]


def script_of(name: str):
    return train_policy if name[0] == "1" else tldr_policy if name[0] == "2" else rlvr_policy


@pytest.fixture(scope="session")
def trained(request, tmp_path_factory):
    """A function name -> the folder of that run; each is made once."""
    made = {}

    def train(name: str) -> Path:
        if name not in made:
            script, folder = script_of(name), tmp_path_factory.mktemp("explained")
            if script is train_policy:
                arguments = [*world_arguments(request.getfixturevalue("tiny_world")), *policy_arguments()]
                arguments += ["--trace_interval", "3"]
            elif script is tldr_policy:
                world = request.getfixturevalue("tiny_posts")
                arguments = [*posts_arguments(world), "--base_model", f"{world}/model", *SUMMARIES.split()]
            else:
                world = request.getfixturevalue("tiny_sums")
                arguments = [*GROUPS.split(), "--base_model", f"{world}/model", "--task.problems", str(world)]
            with contextlib.chdir(folder):
                script.train(cli.parse_args(script.PRESETS, [*arguments, *RUNS[name].split()]))
            made[name] = only(folder, "runs/*")
        return made[name]

    return train


@pytest.mark.parametrize("name", RUNS)
def test_every_number_of_every_token_is_derived(name, trained, opened):  # noqa: F811
    folder = trained(name)
    report.report(report.Args(str(folder)))
    page = opened(folder / "report.html")
    found = page.evaluate("differences()")
    assert found["wrong"] == []
    assert found["checked"] > 300 and found["lines"] > 2 * found["checked"]


@pytest.mark.parametrize("name", RUNS)
def test_the_terminal_says_what_the_page_says(name, trained, opened, capsys):  # noqa: F811
    """The lines of every token in Python and in JavaScript: the same steps, and numbers that are equal to 1e-9."""
    folder = trained(name)
    data = data_of(report.report(report.Args(str(folder))).read_text())["runs"][0]
    page = opened(folder / "report.html")
    theirs = page.evaluate(LINES)
    settings = derivation.settings_of(json.loads((folder / "meta.json").read_text())["args"])
    ours = []
    for update in data["traces"]:
        for episode in update["episodes"]:
            group = report.group_of(episode, update["episodes"])
            for t in range(len(episode["places"])):
                lines, missing = derivation.explain(episode, settings, 0, t, group)
                ours.append([*([line.step.result, line.step.only, line.value] for line in lines), missing])
    assert [[line[:2] for line in lines] for lines in ours] == [[line[:2] for line in lines] for lines in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        for (*_, value), (*_, expected) in zip(mine[:-1], other[:-1], strict=True):
            assert value == pytest.approx(expected, rel=1e-9, abs=1e-12)
    report.report(report.Args(str(folder), explain=(data["traces"][-1]["update"], 1, 1)))
    text = capsys.readouterr().out
    assert "log π(y_t | x, y_<t)" in text and "WRONG" not in text and "not known" not in text


LINES = """() => data.runs[0].traces.flatMap(update => update.episodes.flatMap(episode => episode.places.map((_, t) => {
  const {lines, missing} = explainToken(data.runs[0].steps, episode, data.runs[0].settings, 0, t, groupOf(update, episode));
  return [...lines.map(line => [line.step.result, line.step.only, line.value]), missing];
})))"""

MISTAKES = {  # in the text of derivation.js
    "gamma once too often": (
        "1",
        "discountedSums(deltas, s.gamma * s.lam)",
        "discountedSums(deltas, s.gamma ** 2 * s.lam)",
    ),
    "value after the end": (
        "1",
        "t + 1 < values.length ? values[t + 1] : 0",
        "values[Math.min(t + 1, values.length - 1)]",
    ),
    "score on the first token": ("1", "t === last ? found.score", "t === 0 ? found.score"),
    "whitening without its mean": ("1", "(x - shared.advantage_mean)", "x"),
    "a mask shifted by one": (
        "2",
        "tokens[name].map(Boolean)",
        "tokens[name].map((_, t, row) => Boolean(row[t + 1]))",
    ),
    "a biased deviation": ("grpo", "Math.max(totals.length - 1, 1)", "totals.length"),
    "without leaving one out": ("rloo", "n / (n - 1) * ", ""),
    "lengths forgotten": ("opo", "x * lengths[i]", "x * lengths[0]"),
    "another estimate": ("grpo", "Math.expm1(Math.min(-d, 20)) + d", "Math.expm1(Math.min(d, 20)) - d"),
    "a baseline that is forgotten": ("remax", "x - less", "x"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_found(mistake, trained, opened, tmp_path):  # noqa: F811
    name, right, wrong = MISTAKES[mistake]
    page = report.report(report.Args(str(trained(name)), out=str(tmp_path / "report.html")))
    text = page.read_text()
    assert text.count(right) == 1
    page.write_text(text.replace(right, wrong))
    opened_page = opened(page)
    assert len(opened_page.evaluate("differences()")["wrong"]) > 5


def test_a_click_shows_where_a_number_comes_from(trained, opened):  # noqa: F811
    folder = trained("1")
    report.report(report.Args(str(folder)))
    page = opened(folder / "report.html", viewport={"width": 360, "height": 800}, color_scheme="dark")
    page.select_option("#left-episode", "0")
    page.locator("#left-response .token").nth(3).click()
    box = page.locator("#derivation")
    titles = box.locator(".line > b").all_inner_texts()
    wanted = ["log-prob", "log-prob, reference", "KL", "reward", "whitened reward", "value", "temporal difference"]
    wanted += ["advantage", "return", "whitened advantage", "new log-prob", "ratio", "policy loss of the token"]
    wanted += [
        "gradient",
        "share of the policy loss",
        "new value",
        "value loss of the token",
        "share of the value loss",
    ]
    assert titles == [*wanted, "all epochs"]
    assert box.locator(".wrong").count() == 0 and box.locator(".same").count() == 4
    assert "train_policy.py" in box.inner_text() and "[D56]" in box.inner_text()
    line = box.locator(".line", has_text="temporal difference").locator(".filled").inner_text()
    # The formula with its numbers is an equation that is true to its four digits.
    left, right = line.split(" = ")
    assert eval(left.replace("·", "*").replace("−", "-")) == pytest.approx(float(right), abs=2e-3)
    page.locator("#left-response .token").nth(0).focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    assert "token 2 come from" in box.locator("h3").inner_text()
    page.select_option("#epoch", "0")
    assert box.locator(".line", has_text="ratio").locator(".filled").first.inner_text().endswith("= 1")
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    page.select_option("#left-episode", "8")  # answered again
    assert "not trained on" in box.locator(".missing").inner_text()
