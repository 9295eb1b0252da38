"""What `ppo_rlhf/report --explain` prints and a click on the page shows, for less usual settings of chapter 3."""

import contextlib
import json
import math
import re
from pathlib import Path
from unittest.mock import patch

import pytest
from runs import only
from test_report import browser, opened  # noqa: F401, they are fixtures

from ppo_rlhf.lib import command_line, learning_curves
from ppo_rlhf.lib.errors import InputError
from ppo_rlhf.report import __main__ as report, derivation, page
from ppo_rlhf.rlvr import policy as rlvr_policy

RUNS = {  # settings for which a trace has to hold something of its own
    "own targets": "--ppo.advantage gae --ppo.lam 0.8 --ppo.gamma 0.9 --ppo.critic_lam 0.6",
    "remax": "--ppo.advantage remax --rewards.kl_coef 0.1 --rewards.kl_estimator full --rewards.kl_loss_coef 0.1 "
    "--rewards.kl_loss_estimator full --ppo.nll_coef 0.2 "
    "--ppo.loss_aggregation seq-mean-token-mean",
}
GROUPS = (
    "--preset sums-grpo --rewards.verifier test_explain:odd --ppo.lr 0.01 --ppo.batch_size 16 --ppo.noptepochs 2 "
    "--ppo.samples_per_prompt 4 --ppo.total_episodes 32 --ppo.nminibatches 2 --save_interval 0 --log_interval 0 "
    "--eval_interval 0 --eval_samples 0 --eval_problems 4 --task.response_length 12 --trace_interval 1 "
    "--trace_episodes 4"
)


def odd(prompts, responses, answers):
    """A verifier that even an untrained model satisfies now and then."""
    return [float(sum(map(str.isalnum, response)) % 2) for response in responses]


@pytest.fixture(scope="module", params=RUNS)
def trained(request, tiny_sums, tmp_path_factory) -> Path:
    """The folder of a run."""
    folder = tmp_path_factory.mktemp("explained")
    words = [*GROUPS.split(), "--base_model", f"{tiny_sums}/model", "--task.problems", str(tiny_sums)]
    with contextlib.chdir(folder), patch.object(learning_curves, "draw_learning_curves"):  # longer than the run
        rlvr_policy.train(command_line.parse_args(rlvr_policy.PRESETS, [*words, *RUNS[request.param].split()]))
    return only(folder, "runs/*")


def test_every_number_is_derived_and_a_calculator_finds_it(trained):
    """All lines of all tokens; a result is what follows from its numbers as they are written, to the last digit."""
    one_run, checked = page.read_run(trained), 0
    settings = page.settings_of(one_run)
    steps = derivation.steps_of(settings)
    for update in one_run.kept():
        episodes = one_run.episodes(update)
        for episode in episodes:
            numbers = derivation.derive(episode, settings, steps, group=page.group_of(episode, episodes))
            for line in (line for lines in derivation.lines_of(episode, steps, numbers) for line in lines):
                assert not line.wrong and (episode["again"] or line.result != "?"), line
                checked += not math.isnan(line.recorded)
                if line.result != "?" and not line.is_read:
                    assert evaluated(line.filled) == pytest.approx(float(line.result), abs=unit(line.result)), line
    assert checked > 100


def evaluated(text: str) -> float:
    for sign, code in (("10⁻⁶", "1e-6"), ("·", "*"), ("−", "-"), ("²", "**2")):
        text = text.replace(sign, code)
    return eval(text, {"exp": math.exp, "clip": derivation.clip})


def unit(result: str) -> float:
    """One and a half of the last digit."""
    digits = result.lstrip("-0.").replace(".", "")
    decimals = len(result.partition(".")[2])
    return 1.5 * 10.0**-decimals if decimals else 1.5 * 10.0 ** (max(len(digits), 1) - min(len(digits), 4))


def test_a_click_shows_what_explain_prints(trained, opened, capsys):  # noqa: F811
    shown = opened(report.report(report.Args(run=str(trained))))
    update = int(shown.locator("#update-number").inner_text())
    shown.select_option("#episode", "1")
    for token in (0, 3):
        shown.locator(".response-card.current .token").nth(token).click()
        capsys.readouterr()
        report.report(report.Args(run=str(trained), explain=(update, 2, token + 1)))
        _, *printed = capsys.readouterr().out.strip().split("\n\n")
        assert "not known" not in printed[-1] and len(printed) > 4
        lines = [line.inner_text() for line in shown.locator("#lines .line").all()]
        plain = [re.sub(r"\s+", " ", line.replace(": ", " ", 1)) for line in printed]
        assert [re.sub(r"\s+", " ", line.replace(" ✓", "")) for line in lines] == plain


def test_what_explain_does_not_know_ends_in_one_line(trained):
    one_run = page.read_run(trained)
    for place, message in {
        (9, 1, 1): r"no trace of update 9; the run left those of 0, 1$",
        (0, 99, 1): r"episode 99 is not one of 1 to ",
        (0, 1, 99): r"token 99 of episode 1 is not known; there are 1, 2, ",
    }.items():
        with pytest.raises(InputError, match=message):
            page.explained(one_run, *place)


def test_a_wrong_number_is_said(trained, monkeypatch):
    for row in [row for row in derivation.TABLE["step"] if row["name"] == "rewards" and row["only"] == "last"]:
        monkeypatch.setitem(row, "expression", "score - 1")
    one_run = page.read_run(trained)
    last = one_run.episodes(0)[0]["places"][-1] + 1
    assert "WRONG: recorded " in page.explained(one_run, 0, 1, last)
    data = json.loads(re.search(r'id="data">(.*?)</script>', page.render(one_run), re.DOTALL)[1])
    assert "✗ recorded: " in "".join(data["updates"][0]["episodes"][0]["results"])
