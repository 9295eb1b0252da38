"""What `ppo_rlhf/report --explain` prints and a click on the page shows follows from what a run recorded."""

import json
import math
import re
from pathlib import Path

import pytest
from runs import lines_of, meta_of, sums_arguments, trained

from ppo_rlhf.report import __main__ as report, derivation, page
from ppo_rlhf.rlvr import policy as rlvr_policy
from ppo_rlhf.train_policy import InputError

TWO_UPDATES = (
    "--rewards.verifier own_functions:letters --rewards.kl_estimator full --ppo.critic_warmup 0 --ppo.lr 0.01 "
    "--ppo.total_episodes 32 --eval_interval 0 --eval_samples 0 --save_interval 0 --log_interval 0 --trace_interval 1"
)
OWN = {  # settings for which a trace has to hold something of its own
    "remax": "--ppo.advantage remax --ppo.samples_per_prompt 4 --ppo.nll_coef 0.2 "
    "--ppo.loss_aggregation seq-mean-token-mean --rewards.kl_coef 0.1 "
    "--rewards.kl_loss_coef 0.1 --rewards.kl_loss_estimator full",
    # The teacher is the start, from which the bonus leads away.
    "taught": "--rewards.teacher {world}/model --ppo.advantage reinforce++ --ppo.gamma 0.9 "
    "--ppo.whiten_advantages False --ppo.entropy_coef 0.5",
    "steps": "--rewards.verifier own_functions:one_for_each_token --rewards.steps own_functions:hundredths "
    "--rewards.kl_coef 0.1 --rewards.kl_estimator k1 --ppo.lam 0.9",
}


def own_run(name: str, world: Path, folder: Path) -> Path:
    """The folder of a run in this folder."""
    words = f"{TWO_UPDATES} {OWN[name]}".format(world=world).split()
    return trained(rlvr_policy, folder, [*sums_arguments(world), *words])


def exactly(value, digits=8):
    """What page.rounded does, without rounding."""
    if isinstance(value, list):
        return [exactly(one) for one in value]
    return value if math.isfinite(value) else None


@pytest.mark.parametrize("name", ["both", "all_three", "critic", "groups", *OWN])
def test_every_number_is_derived_and_a_calculator_finds_it(name, request, tiny_sums, tmp_path, monkeypatch):
    """A run in float64 has recorded the same.

    Each result follows from its numbers as they are written, to the last digit.
    """
    monkeypatch.setattr(page, "rounded", exactly)
    run = own_run(name, tiny_sums, tmp_path) if name in OWN else request.getfixturevalue(name).run("*policy")
    rounding = 1e-12 if meta_of(run)["args"]["dtype"] == "float64" else 1e-5
    checked = dict.fromkeys(derivation.RECORDED, 0)
    for _, line in lines_of(run):
        assert not line.wrong and line.result != "?", line
        if line.recorded == line.recorded:
            assert line.value == pytest.approx(line.recorded, rel=0, abs=rounding), line
            checked[line.step.recorded] += 1
        if line.result != "?" and not line.is_read:
            assert evaluated(line.filled) == pytest.approx(float(line.result), abs=unit(line.result)), line
    assert min(checked[name] for name in ("kl", "rewards", "advantages")) > 100
    assert (checked["returns"] > 100) == (name in ("both", "all_three", "critic", "steps"))


def evaluated(text: str) -> float:
    for sign, code in (("10⁻⁶", "1e-6"), ("·", "*"), ("−", "-"), ("²", "**2")):
        text = text.replace(sign, code)
    return eval(text, {"exp": math.exp, "clip": derivation.clip})


def unit(result: str) -> float:
    """One and a half of the last digit."""
    digits = result.lstrip("-0.").replace(".", "")
    decimals = len(result.partition(".")[2])
    return 1.5 * 10.0**-decimals if decimals else 1.5 * 10.0 ** (max(len(digits), 1) - min(len(digits), 4))


def test_a_click_shows_what_explain_prints(critic, opened, capsys, tmp_path):
    run = critic.run()
    shown = opened(report.report(report.Args(run=str(run), out=str(tmp_path / "report.html"))))
    update = int(shown.locator("#update-number").inner_text())
    shown.select_option("#episode", "1")
    for token in (0, 3):
        shown.locator(".response-card.current .token").nth(token).click()
        capsys.readouterr()
        report.report(report.Args(run=str(run), explain=(update, 2, token + 1)))
        _, *printed = capsys.readouterr().out.strip().split("\n\n")
        assert "not known" not in printed[-1] and len(printed) > 4
        lines = [line.inner_text() for line in shown.locator("#lines .line").all()]
        plain = [re.sub(r"\s+", " ", line.replace(": ", " ", 1)) for line in printed]
        assert [re.sub(r"\s+", " ", line.replace(" ✓", "")) for line in lines] == plain


def test_what_explain_does_not_know_ends_in_one_line(both):
    one_run = page.read_run(both.run("train_policy"))
    for place, message in {
        (9, 1, 1): r"no trace of update 9; the run left those of 0, 2, 3$",
        (0, 99, 1): r"episode 99 is not one of 1 to ",
        (0, 1, 99): r"token 99 of episode 1 is not known; there are 1, 2, ",
    }.items():
        with pytest.raises(InputError, match=message):
            page.explained(one_run, *place)


def test_a_wrong_number_is_said(both, monkeypatch):
    for row in [row for row in derivation.TABLE["step"] if row["name"] == "rewards" and row["only"] == "last"]:
        monkeypatch.setitem(row, "expression", "score - 1")
    one_run = page.read_run(both.run("train_policy"))
    last = one_run.episodes(0)[0]["places"][-1] + 1
    assert "WRONG: recorded " in page.explained(one_run, 0, 1, last)
    data = json.loads(re.search(r'id="data">(.*?)</script>', page.render(one_run), re.DOTALL)[1])
    assert "✗ recorded: " in "".join(data["updates"][0]["episodes"][0]["results"])
