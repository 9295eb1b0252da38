"""The derivations of report.html and `report.py --explain`: every number of small runs, in a browser."""

import contextlib
import functools
import itertools
import json
import math
import re
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from processes import read_by_nobody
from runs import only, policy_arguments, posts_arguments, world_arguments
from test_report import browser, data_of, opened  # noqa: F401, they are fixtures

from ppo_rlhf import report, train_policy
from ppo_rlhf.lib.base import errors
from ppo_rlhf.lib.base.errors import InputError
from ppo_rlhf.lib.services import cli, derivation, plots, traces
from ppo_rlhf.rlvr import algebra, policy as rlvr_policy
from ppo_rlhf.tldr import policy as tldr_policy

RUNS = {
    "1": "--rewards.function ppo_rlhf.worlds.tales:sentiment.gold_scores --ppo.lr 0.01 --ppo.gamma 0.9",
    "1 minibatches": "--rewards.function ppo_rlhf.worlds.tales:sentiment.gold_scores --ppo.lr 0.01 --ppo.gamma 0.9 "
    "--ppo.nminibatches 2 --ppo.no-whiten_rewards --rewards.adaptive_kl.target 1 --ppo.whiten_groups 1 "
    "--trace_episodes 6",
    "2": "--ppo.lr 0.01 --ppo.nminibatches 2 --trace_episodes 12",
    "2 k3": "--ppo.lr 0.01 --ppo.nminibatches 2 --ppo.whiten_rewards --ppo.gamma 0.9 --rewards.kl_estimator k3 "
    "--rewards.missing_eos subtract --ppo.total_episodes 32 --trace_interval 1",
    "gae": "--ppo.advantage gae --ppo.lam 0.8 --ppo.gamma 0.9 --ppo.cliprange_value 0.01 --rewards.kl_coef 0.1",
    "critic": "--ppo.advantage gae --ppo.gamma 0.9 --ppo.critic_lam 0.6 --ppo.lam_alpha 0.3 --ppo.nll_coef 0.2",
    "pretraining": "--ppo.advantage gae --ppo.lam 0.8 --ppo.critic_warmup 1 --ppo.critic_explains 0.9",
    "maxrl": "--ppo.advantage maxrl --ppo.nll_coef 0.2 --ppo.loss_aggregation seq-mean-token-sum",
    "grpo": "--ppo.advantage grpo --rewards.kl_coef 0.1 --rewards.kl_estimator k3 --ppo.dual_clip 1.25 "
    "--rewards.kl_loss_coef 0.1 --rewards.kl_loss_estimator k3 --ppo.loss_aggregation seq-mean-token-mean",
    "dr_grpo": "--ppo.advantage dr_grpo --ppo.loss cispo --rewards.kl_loss_coef 0.1 --rewards.kl_loss_estimator k2 "
    "--ppo.loss_aggregation seq-mean-token-sum-norm",
    "gdpo": "--ppo.advantage gdpo --rewards.format test_explain:long --rewards.format_weight 0.5 --ppo.loss ipo "
    "--ppo.trust_region 0.001",
    "dppo": "--ppo.advantage dr_grpo --ppo.loss dppo --ppo.trust_region 0.001",
    "rloo": "--ppo.advantage rloo --rewards.kl_coef 0.1 --rewards.kl_estimator k2 --ppo.loss reinforce "
    "--ppo.loss_aggregation seq-mean-token-sum --trace_episodes 10 --ppo.total_episodes 48 --trace_interval 2",
    "opo": "--ppo.advantage opo --rewards.kl_coef 0.1 --rewards.kl_estimator abs --ppo.loss gspo "
    "--ppo.cliprange_low 0.0003 --ppo.cliprange_high 0.0004 --rewards.kl_loss_coef 0.1 "
    "--rewards.kl_loss_estimator abs --ppo.loss_aggregation seq-mean-token-mean",
    "reinforce++": "--ppo.advantage reinforce++ --ppo.gamma 0.9 --rewards.kl_coef 0.1 --rewards.kl_loss_coef 0.1 "
    "--rewards.kl_loss_estimator k3+",
    "reinforce++-baseline": "--ppo.advantage reinforce++-baseline --rewards.kl_coef 0.1 --rewards.kl_loss_coef 0.1 "
    "--rewards.kl_loss_estimator k1+",
    "remax": "--ppo.advantage remax --rewards.kl_coef 0.1 --rewards.kl_estimator full --rewards.kl_loss_coef 0.1 "
    "--rewards.kl_loss_estimator full",
}
GROUPS = (
    "--preset sums-grpo --rewards.verifier test_explain:odd --ppo.lr 0.01 --ppo.batch_size 16 --ppo.noptepochs 2 "
    "--ppo.samples_per_prompt 4 --ppo.total_episodes 32 --ppo.nminibatches 2 --save_interval 0 --log_interval 0 "
    "--eval_interval 0 --eval_samples 0 --eval_problems 4 --task.response_length 12 --trace_interval 1 "
    "--trace_episodes 4"
)
SUMMARIES = (
    "--rewards.function ppo_rlhf.worlds.posts:gold_scores --ppo.total_episodes 48 --ppo.batch_size 16 "
    "--rewards.normalize_samples 16 "
    "--save_interval 0 --log_interval 0 --eval_interval 0 --eval_posts 8 --trace_interval 2 --trace_episodes 4"
)


def odd(prompts, responses, answers):
    """A verifier that even an untrained model satisfies now and then."""
    return [float(sum(map(str.isalnum, response)) % 2) for response in responses]


def long(prompts, responses, answers):
    return [float(len(response) > 30) for response in responses]


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
                arguments += ["--ppo.total_episodes", "32", "--trace_interval", "1", "--trace_episodes", "4"]
            elif script is tldr_policy:
                world = request.getfixturevalue("tiny_posts")
                arguments = [*posts_arguments(world), "--base_model", f"{world}/model", *SUMMARIES.split()]
            else:
                world = request.getfixturevalue("tiny_sums")
                arguments = [*GROUPS.split(), "--base_model", f"{world}/model", "--task.problems", str(world)]
            with contextlib.chdir(folder), patch.object(plots, "draw_learning_curves"):  # longer than the run
                script.train(cli.parse_args(script.PRESETS, [*arguments, *RUNS[name].split()]))
            made[name] = only(folder, "runs/*")
        return made[name]

    return train


@pytest.fixture(scope="session")
def reported(trained):
    """A function name -> the file of that run's page; each is written once."""
    return functools.cache(lambda name: report.report(report.Args(run=str(trained(name)))))


def test_a_trace_keeps_as_many_episodes_as_it_is_told_to(trained):
    """In chapter 3 whole groups of four. As many queries as ever are answered again."""
    for name, most in (("1", 4), ("1 minibatches", 6), ("2", 12), ("gae", 4), ("rloo", 12)):
        for update, again in traces.kept(trained(name)):
            assert len(traces.read(trained(name), update, again).queries) == (8 if again else most), (name, update)


@pytest.mark.parametrize("name", RUNS)
def test_every_number_of_every_token_is_derived(name, trained, reported, opened, capsys):  # noqa: F811
    """The same steps in JavaScript and in Python, numbers that are equal to 1e-9, and those that the run recorded."""
    folder, page = trained(name), opened(reported(name))
    data = data_of(reported(name).read_text())["runs"][0]
    found = page.evaluate("differences()")
    assert found["wrong"] == []
    assert found["checked"] > 150 and found["lines"] > 2 * found["checked"]
    theirs = page.evaluate(LINES)
    meta = json.loads((folder / "meta.json").read_text())
    settings = derivation.settings_of(meta["args"], meta["script"])
    ours = []
    for update in data["traces"]:
        for episode in update["episodes"]:
            group = report.group_of(episode, update["episodes"])
            for lines, missing in derivation.explain(episode, settings, 0, range(len(episode["places"])), group):
                ours.append([*([line.step.result, line.step.only, line.value] for line in lines), missing])
    assert [[line[:2] for line in lines] for lines in ours] == [[line[:2] for line in lines] for lines in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        for (*_, value), (*_, expected) in zip(mine[:-1], other[:-1], strict=True):
            assert value == pytest.approx(expected, rel=1e-9, abs=1e-12)
    capsys.readouterr()
    report.report(report.Args(run=str(folder), explain=(data["traces"][-1]["update"], 1, 1)))
    text = capsys.readouterr().out
    assert "log π(y_t | x, y_<t)" in text and "WRONG" not in text and "not known" not in text


LINES = """() => data.runs[0].traces.flatMap(update => update.episodes.flatMap(episode => {
  const run = data.runs[0], group = groupOf(update, episode), derived = derive(episode, run.settings, 0, group);
  return episode.places.map((_, t) => {
    const {lines, missing} = explainToken(run.steps, episode, run.settings, 0, t, group, derived);
    return [...lines.map(line => [line.step.result, line.step.only, line.value]), missing];
  });
}))"""

MISTAKES = {  # in the text of derivation.js
    "gamma once too often": ("1", "discountedSums(deltas, s.gamma * x)", "discountedSums(deltas, s.gamma ** 2 * x)"),
    "one lambda for both": ("critic", "[lam, criticLam]", "[lam, lam]"),
    "a fixed lambda": ("critic", "policyLam(s.lam, s.lam_alpha, valued.length)", "s.lam"),
    "the usual targets in pretraining": ("pretraining", "Number.isNaN(recorded) ? ", "true ? "),
    "divided by the deviation": ("maxrl", "/ (mean + 1e-6)", "/ groupDeviation(totals)"),
    "value after the end": ("1", "t + 1 < values.length ? values[t + 1] : 0", "values[t + 1] ?? values[t]"),
    "score on the first token": ("1", "t === last ? found.score", "t === 0 ? found.score"),
    "whitening without its mean": ("1", "(x - shared.advantage_mean)", "x"),
    "a mask shifted by one": ("2", "tokens[name].map(Boolean)", "[...tokens[name].slice(1), 0].map(Boolean)"),
    "a biased deviation": ("grpo", "Math.max(totals.length - 1, 1)", "totals.length"),
    "without leaving one out": ("rloo", "n / (n - 1) * ", ""),
    "a weight that is forgotten": ("gdpo", "weight * scaled[", "scaled["),
    "lengths forgotten": ("opo", "x * lengths[i]", "x"),
    "another estimate": ("grpo", "Math.expm1(Math.min(-d, 20)) + d", "Math.expm1(Math.min(d, 20)) - d"),
    "a baseline that is forgotten": ("remax", "x - less", "x"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_found(mistake, reported, opened, tmp_path):  # noqa: F811
    name, right, wrong = MISTAKES[mistake]
    text, page = reported(name).read_text(), tmp_path / "report.html"
    assert text.count(right) == 1
    page.write_text(text.replace(right, wrong))
    assert len(opened(page).evaluate("differences()")["wrong"]) > 5


def test_a_click_shows_where_a_number_comes_from(reported, opened):  # noqa: F811
    page = opened(reported("1"), viewport={"width": 360, "height": 800}, color_scheme="dark")
    page.select_option("#left-episode", "0")
    page.locator("#left-response .token").nth(3).click()
    box = page.locator("#derivation")
    titles = box.locator(".line > b").all_inner_texts()
    wanted = ["log-prob", "log-prob, reference", "KL", "reward", "whitened reward", "value", "temporal difference"]
    wanted += ["advantage", "return", "whitened advantage", "new log-prob", "ratio", "policy loss of the token"]
    wanted += ["gradient", "share of the policy loss", "new value", "value loss of the token"]
    assert titles == [*wanted, "share of the value loss", "all epochs"]
    assert box.locator(".wrong").count() == 0 and box.locator(".same").count() == 4
    assert "train_policy.py" in box.inner_text() and "[D56]" in box.inner_text()
    line = box.locator(".line", has_text="temporal difference").locator(".filled").inner_text()
    # The formula with its numbers is an equation that is true to its four digits.
    left, right = line.split(" = ")
    assert eval(left.replace("·", "*").replace("−", "-")) == pytest.approx(float(right), abs=2e-3)
    page.locator("#left-response .token").nth(0).focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    assert "token 2 come from" in box.locator("summary").first.inner_text()
    page.select_option("#epoch", "0")
    assert box.locator(".line", has_text="ratio").locator(".filled").first.inner_text().endswith("= 1")
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    page.select_option("#left-episode", "4")  # answered again
    assert "not trained on" in box.locator(".missing").inner_text()


def test_the_page_opens_on_a_token_that_training_pushed(reported, opened):  # noqa: F811
    for name in ("1", "2", "gae"):
        data = data_of(reported(name).read_text())["runs"][0]
        page = opened(reported(name), viewport={"width": 1280, "height": 900})
        update = data["traces"][len(data["traces"]) // 2]
        assert page.locator("#left-number").inner_text() == str(update["update"])
        assert page.locator("#quantity").input_value() == "push"
        token, beside = page.locator("#left-response .token.chosen"), page.locator("#panel")
        assert float(page.locator("#numbers .picked .number").inner_text()) != 0
        titles = page.locator("#derivation .line > b").all_inner_texts()
        assert {"whitened advantage", "ratio", "gradient"} <= {*titles} and page.locator(".missing").count() == 0
        text, panel = token.bounding_box(), beside.bounding_box()
        assert text["x"] + text["width"] < panel["x"] and panel["y"] < text["y"] < panel["y"] + panel["height"]


def test_tokens_are_pushed_where_the_gradient_says(reported):
    """Without clipping and with one epoch, that is the advantage; over all, minus the gradient of PPO's loss."""
    for name in ("1", "2", "gae", "opo"):
        data = data_of(reported(name).read_text())["runs"][0]
        compared = 0
        for episode in (episode for update in data["traces"] for episode in update["episodes"]):
            assert ("push" in episode["tokens"]) != episode["again"]
            if episode["again"]:
                assert not {"advantages", "returns"} & episode["tokens"].keys()
                continue
            counts = torch.tensor(episode["tokens"].get("mask", [1] * len(episode["places"]))).bool()
            old = torch.tensor(episode["tokens"]["logprobs"], dtype=torch.float64)[counts]
            told = episode["epochs"].get("advantages") or [episode["tokens"]["advantages"]] * 9
            grads = []
            for k, row in enumerate(episode["epochs"]["new_logprobs"]):
                new = torch.tensor(row, dtype=torch.float64)[counts].requires_grad_()
                ratio = torch.exp(new - old)
                low, high = data["settings"]["low"], data["settings"]["high"]
                if name == "opo":  # gspo has the ratio of the response
                    ratio = torch.exp((new - old).mean()).detach() * torch.exp(new - new.detach())
                advantages = torch.tensor(told[k], dtype=torch.float64)[counts]
                (-torch.minimum(advantages * ratio, advantages * ratio.clamp(1 - low, 1 + high))).sum().backward()
                grads.append(-new.grad)
            found = torch.tensor([x for x in episode["tokens"]["push"] if x is not None], dtype=torch.float64)
            torch.testing.assert_close(found, torch.stack(grads).mean(0), rtol=1e-3, atol=1e-5)
            compared += len(found)
        assert compared > 50


def test_the_digits_of_a_line_give_its_result(reported, opened):  # noqa: F811
    """A pocket calculator finds what is shown, to the last digit or one more."""
    compared = 0
    for name in ("1", "2 k3", "gae", "grpo", "critic", "rloo"):
        for numbers, result in opened(reported(name)).evaluate(SHOWN):
            text = re.sub(r"\|([^|]*)\|", r"abs(\1)", numbers.replace("½", "0.5 *").replace(")²", ")**2"))
            text = text.replace("·", "*").replace("−", "-").replace("10⁻⁶", "1e-6")
            unit = 10.0 ** -len(result.partition(".")[2])
            largest = max(map(abs, map(float, re.findall(r"\d+(?:\.\d+)?", numbers))))
            assert "e" not in result and "e" not in numbers.replace("exp", "")
            near = pytest.approx(float(result), abs=max(1.5 * unit, 2e-6 * largest))
            assert eval(text, {"exp": math.exp}) == near, (name, numbers, result)
            compared += 1
    assert compared > 1_500


SHOWN = """() => data.runs[0].traces.flatMap(update => update.episodes.flatMap(episode => {
  const run = data.runs[0], group = groupOf(update, episode), derived = derive(episode, run.settings, 0, group);
  return episode.places.flatMap((_, t) => {
    const {lines} = explainToken(run.steps, episode, run.settings, 0, t, group, derived);
    return lines.filter(line => /[^{}\\w]/.test(line.step.numbers)).map(line => [line.numbers, line.result]);
  });
}))"""


def test_a_group_is_side_by_side(reported, opened):  # noqa: F811
    """All four responses with score and advantage; a click on a token of one chooses that episode."""
    data = data_of(reported("rloo").read_text())["runs"][0]
    page = opened(reported("rloo"), viewport={"width": 1280, "height": 900})
    episodes = data["traces"][len(data["traces"]) // 2]["episodes"]
    first = int(page.locator("#left-episode").input_value())
    group = [i for i, e in enumerate(episodes) if e["numbers"]["groups"] == episodes[first]["numbers"]["groups"]]
    group = [i for i in group if episodes[i]["again"] == episodes[first]["again"]]
    cards = page.locator(".response-card")
    assert cards.count() == len(group) == 4
    for i, card in zip(group, cards.all(), strict=True):
        said = re.findall(r"(?:score|advantage) (\S+?)(?:,|$)", card.locator("b").inner_text())
        score, advantage = map(float, said)
        tokens, mask = episodes[i]["tokens"], episodes[i]["tokens"]["mask"]
        assert score == pytest.approx(episodes[i]["numbers"]["scores"], abs=5e-4)
        kept = [x for x, counts in zip(tokens["advantages"], mask, strict=True) if counts]
        assert advantage == pytest.approx(sum(kept) / len(kept), abs=5e-4)
    other = next(i for i in group if i != first)
    cards.nth(group.index(other)).locator(".token").first.click()
    assert page.locator("#left-episode").input_value() == str(other)
    assert "token 1 come from" in page.locator("#derivation summary").first.inner_text()
    assert "score" not in page.locator("#left-response").inner_text() and cards.count() == 4


def test_without_a_penalty_no_text_speaks_of_one(reported, opened):  # noqa: F811
    for name, pays in {"maxrl": False, "gae": True}.items():
        panel = opened(reported(name)).locator("#lines").inner_text()
        assert ("The reward penalises it" in panel) == ("pays for it" in panel) == pays
        assert ("log-prob, reference" in panel) == pays  # none is loaded


# ---- What if? --------------------------------------------------------------------------------------------------

CHANGES = [
    {"estimator": name, "whiten_advantages": name in algebra.WHITENED, "gamma": 0.9, "lam": 0.7}
    for name in algebra.ESTIMATORS
]
CHANGES += [
    {"loss": loss, "low": 0.1, "high": 0.3, "dual_clip": 1.4}
    for loss in ("ppo", "gspo", "cispo", "ipo", "dppo", "reinforce")
]
CHANGES += [{"kl_estimator": name, "kl_coef": 0.4} for name in ("k1", "abs", "k2", "k3")]
CHANGES += [{"critic_lam": 1.0, "lam": 0.8}, {"lam_alpha": 0.6, "gamma": 0.9}, {"critic_lam": 0.7, "lam_alpha": 0.2}]
CHANGES += [{"whiten_advantages": False}, {"whiten_advantages": True, "estimator": "rloo"}]


def invented(seed: int) -> dict[str, torch.Tensor]:
    """A batch of chapter 3 in float64: eight responses of at most nine tokens, in two groups."""
    generator = torch.Generator().manual_seed(seed)
    drawn = {name: torch.randn(8, 9, generator=generator).double() for name in ("logprobs", "values", "new_values")}
    for name in ("ref_logprobs", "new_logprobs"):
        drawn[name] = drawn["logprobs"] + 0.4 * torch.randn(8, 9, generator=generator).double()
    drawn["scored"] = torch.arange(9) < torch.randint(1, 10, (8, 1), generator=generator)
    drawn |= {"scores": torch.randint(0, 3, (8,), generator=generator).double(), "groups": torch.arange(8) // 4}
    return drawn | {"baselines": torch.rand(8, generator=generator).double()}


def episodes_of(x: dict[str, torch.Tensor], critic_lam: float = 0.95) -> list[dict]:
    """The batch as the page has it. critic_lam: the lambda of the critic's targets that the run has recorded."""
    found = []
    for i in range(8):
        places = list(range(int(x["scored"][i].sum())))
        told = {name: x[name][i, : len(places)].tolist() for name in x if x[name].dim() == 2}
        tokens = {name: told[name] for name in ("logprobs", "ref_logprobs", "values")}
        marks = {"scored": [1] * len(places), "mask": [1] * len(places)}
        epochs = {name: [told[name]] for name in ("new_logprobs", "new_values")}
        shared = {"kl_coef": 0.2, "baselines": x["baselines"][i].item(), "tokens": int(x["scored"].sum())}
        shared["critic_lam"] = critic_lam
        numbers = {"scores": x["scores"][i].item(), "groups": int(x["groups"][i])}
        numbers |= {"verifier": x["scores"][i].item(), "format": x["baselines"][i].item()}
        found.append({"places": places, "tokens": tokens | marks, "epochs": epochs, "statistics": shared})
        found[-1] |= {"numbers": numbers, "again": False}
    return found


def with_tensors(x: dict[str, torch.Tensor], s: dict) -> dict[str, torch.Tensor]:
    """What rlvr/algebra.py makes of the batch."""
    mask = x["scored"]
    told = (x["scores"], x["logprobs"], x["ref_logprobs"], mask, s["kl_coef"], s["kl_estimator"])
    rewards, _, kl = algebra.compute_rewards(*told)
    estimate = algebra.ESTIMATORS[s["estimator"]]
    more = {"values": x["values"], "baselines": x["baselines"]}
    more |= {"parts": torch.stack([x["scores"], x["baselines"]], 1), "weights": [1.0, 0.5]}
    more |= {name: s[name] for name in ("gamma", "lam", "critic_lam", "lam_alpha")}
    advantages, returns = estimate(rewards, mask, x["groups"], **more)
    if s["whiten_advantages"]:
        advantages = algebra.whiten(advantages, mask, keep_mean=False)
    told = (x["new_logprobs"], x["logprobs"], advantages, mask, s["loss"])
    bounds = {name: s[name] for name in ("low", "high", "dual_clip", "trust_region")}
    loss, clipped, dual = algebra.token_losses(*told, **bounds)
    found = {"rewards": rewards, "kl": kl, "advantages": advantages, "loss": loss, "is_dual": dual.double()}
    found["share"] = loss / mask.sum()
    if s["loss"] in ("ppo", "gspo", "ipo", "dppo"):
        found["is_clipped"] = (clipped & ~dual).double()
    if returns is not None:
        told = (x["new_values"], x["values"], returns, mask, s["cliprange_value"])
        found |= {"returns": returns, "value_loss": algebra.value_losses(*told)[0]}
    return found


SETTINGS = derivation.settings_of({"ppo": {"cliprange_value": 0.2, "cliprange_low": None}}, "rlvr_policy")
SETTINGS |= {"gamma": 1.0, "lam": 0.95, "high": 0.2, "kl_coef": 0.2, "dual_clip": None}


def check_what_if(
    page, episodes: list[dict], settings: dict, changes: dict, expected: dict[str, torch.Tensor]
) -> None:
    """The page computes these numbers of the episodes with other settings than those of the run."""
    for i, row in enumerate(page.evaluate("([...told]) => whatIf(...told)", [episodes, settings, changes, 0])):
        for name, tensor in expected.items():
            wanted = tensor[i, : len(row[name])].tolist()
            assert list(map(float, row[name])) == pytest.approx(wanted, rel=1e-6, abs=1e-6), (changes, name, i)


def test_what_if_computes_what_the_scripts_compute(reported, opened):  # noqa: F811
    page, settings = opened(reported("gae")), SETTINGS | {"sources": {"verifier": 1.0, "format": 0.5}}
    for changes, seed in itertools.product(CHANGES, range(3)):
        x = invented(seed)
        check_what_if(page, episodes_of(x), settings, changes, with_tensors(x, settings | changes))


def test_what_if_keeps_the_lambda_of_value_pretraining_and_shows_no_slider_without_effect(reported, opened):  # noqa: F811
    page, x = opened(reported("critic")), invented(0)
    page.locator("#what-if > summary").click()
    page.locator("#what-gamma").wait_for()
    assert page.locator("#what-lam").count() == 0  # it has --ppo.lam_alpha and --ppo.critic_lam
    for name, changed in {"lam_alpha": "advantage", "critic_lam": "return"}.items():
        page.locator(f"#what-{name}").press("Home")
        assert changed in page.locator("#compared th").all_inner_texts()
        page.get_by_role("button", name="as in the run").click()
    expected = with_tensors(x, SETTINGS | {"lam": 0.3, "critic_lam": 1.0})
    check_what_if(page, episodes_of(x, critic_lam=1.0), SETTINGS, {"lam": 0.3}, expected)
    found = {"valued": [True, False, False, True, False], "deltas": [1, 0, 0, 2, 0]}
    following = page.evaluate("([...told]) => [0, 3].map(t => numbersOf(...told, t).next_deltas)", [found, SETTINGS])
    assert following == [2, 0]


def test_what_if_computes_chapter_1(reported, opened):  # noqa: F811
    page, ppo = opened(reported("gae")), {"cliprange": 0.2, "cliprange_value": 0.2}
    settings = derivation.settings_of({"ppo": ppo}, "train_policy") | {"gamma": 1.0, "lam": 1.0}
    for rewards_too, seed in itertools.product([True, False], range(3)):
        x, changes = invented(seed), {"gamma": 0.8, "lam": 0.6, "kl_coef": 0.5, "whiten_rewards": rewards_too}
        x["scored"] = torch.ones_like(x["scored"])
        rewards, _, _ = train_policy.compute_rewards(x["scores"], x["logprobs"], x["ref_logprobs"], 0.5)
        ppo_args = train_policy.PpoArgs(gamma=0.8, lam=0.6, whiten_rewards=rewards_too)
        [advantages], [returns] = train_policy.group_advantages(rewards[None], x["values"][None], ppo_args)
        expected = {"advantages": advantages, "returns": returns, "rewards": rewards}
        check_what_if(page, episodes_of(x, critic_lam=1.0), settings, changes, expected)


def test_without_changes_what_if_shows_the_recorded_numbers(reported, opened):  # noqa: F811
    for name in ("1", "1 minibatches", "2", "2 k3", "gae", "grpo", "reinforce++-baseline"):
        page = opened(reported(name))
        recorded = page.evaluate(RECORDED)
        assert recorded and max(abs(one - other) for one, other in recorded) < 1e-4


RECORDED = """() => {
  const run = data.runs[0], episodes = run.traces[0].episodes.filter(episode => !episode.again);
  return whatIf(episodes, run.settings, {}, 0).flatMap((found, i) => {
    const told = (episodes[i].epochs.advantages || [episodes[i].tokens.advantages])[0];
    return found.advantages.map((x, t) => [x, told[t]]).filter((_, t) => found.learns[t]);
  });
}"""


def test_an_explanation_may_be_cut_off_and_needs_a_token_that_counts(trained, monkeypatch):
    folder = trained("gae")
    monkeypatch.setattr(errors, "how_to_go_on", "")  # of the run that this process has trained
    with read_by_nobody(), pytest.raises(SystemExit) as end:
        errors.run_script(lambda: report.report(report.Args(run=str(folder), explain=(0, 1, 1))))
    assert end.value.code == 0
    one_run = report.read_run(folder)
    unscored = {"episodes": [{"places": []}]}
    monkeypatch.setattr(report.OneRun, "traced_update", lambda *_: unscored)
    with pytest.raises(InputError, match=r"^--explain: episode 1 has no token that counts$"):
        report.explained(one_run, (one_run.kept()[0][0][0], 1, 1))


def test_a_slider_changes_the_numbers_beside_the_recorded_ones(reported, opened):  # noqa: F811
    page = opened(reported("1"))
    page.locator("#what-if > summary").click()
    page.locator("#what-lam").wait_for()  # a browser draws what is folded away a moment after the click
    assert "no number of this episode differs" in page.locator("#summary").inner_text()
    assert page.locator("#compared tr").count() == 0
    page.locator("#what-lam").press("Home")  # to 0
    # Only what changes has a column: not the reward. Each cell has the number of the run, and the other one.
    assert page.locator("#compared th").all_inner_texts()[:4] == ["token", "advantage", "return", "gradient"]
    told, other = page.locator("#compared .changed").first.inner_text().split(" → ")
    assert float(told) != float(other) and page.locator("#compared .changed").count() > 10
    assert "would be" in page.locator("#summary").inner_text()
    page.get_by_role("button", name="as in the run").click()
    assert page.locator("#compared .changed").count() == 0


# ---- Find an episode -------------------------------------------------------------------------------------------


def rows_of(page) -> list[dict[str, str]]:
    """The table of episodes, as the reader sees it."""
    heads, *rows = page.evaluate(TABLE)
    return [dict(zip([head.rstrip(" ↑↓") for head in heads], row, strict=True)) for row in rows]


TABLE = """() => [...document.querySelectorAll("#others tr")].map(row => [...row.children].map(x => x.textContent))"""


def number_in(text: str) -> float:
    return float("nan") if text == "–" else float(text)


def test_episodes_are_sorted_and_filtered(reported, opened):  # noqa: F811
    data = data_of(reported("rloo").read_text())["runs"][0]
    page = opened(reported("rloo"), viewport={"width": 390, "height": 800})
    first = data["traces"][len(data["traces"]) // 2]["episodes"]
    for i, row in enumerate(rows_of(page)):
        counts = first[i]["tokens"]["mask"]
        assert number_in(row["tokens"]) == sum(counts)
        kl = sum(x for x, count in zip(first[i]["tokens"]["kl"], counts, strict=True) if count)
        assert number_in(row["KL"]) == pytest.approx(kl, rel=1e-3, abs=1e-6)

    # A title sorts, from the highest down; again, from the lowest up. What is not known comes last.
    for title in ("KL", "tokens", "score", "mean advantage"):
        for down in (True, False):
            page.locator("#others .sort").get_by_text(re.compile(f"^{title}( [↑↓])?$")).press("Enter")
            numbers = [number_in(row[title]) for row in rows_of(page)]
            known = [x for x in numbers if x == x]
            assert known == sorted(known, reverse=down) == numbers[: len(known)]
            assert len(set(known)) > 1 or title == "tokens"  # none of these responses ends
            order = page.locator("#others th[aria-sort]").get_attribute("aria-sort")
            assert order == ("descending" if down else "ascending")

    # Filters, one by one, over all updates, as a person moves through them: all are shown, and the filters say so.
    page.locator("#find-which").press("ArrowDown")
    for name, says in {"which": "all updates", "stopped": "end or not", "right": "correct or wrong"}.items():
        assert page.locator(f"#find-{name} option:checked").inner_text() == says
    everything = [e for update in data["traces"] for e in update["episodes"]]
    assert len(rows_of(page)) == len(everything)
    for choice, right in (("correct", True), ("wrong", False)):
        page.locator("#find-right").press("ArrowDown")
        assert page.locator("#find-right option:checked").inner_text() == choice
        wanted = [e for e in everything if e["numbers"]["verifier"] is not None]
        assert len(rows_of(page)) == sum((e["numbers"]["verifier"] > 0) == right for e in wanted) > 0
    page.locator("#find-all").click()
    page.locator("#find-stopped").press("End")
    assert len(rows_of(page)) == sum(not e["numbers"]["stopped"] for e in everything) > 0
    page.locator("#find-all").click()
    page.select_option("#find-column", "score")
    page.fill("#find-from", "0.5")
    found = [e["numbers"]["scores"] for e in everything]
    assert len(rows_of(page)) == sum(x is not None and x >= 0.5 for x in found) > 0
    page.fill("#find-to", "0.75")
    assert len(rows_of(page)) == 0 and page.locator("#found").inner_text().startswith("0 of")
    page.locator("#find-all").click()
    word = everything[-1]["query"].split()[-1]
    page.fill("#find-text", word.upper())
    texts = [" ".join([e["query"], "".join(e["pieces"]), *e["texts"].values()]) for e in everything]
    assert len(rows_of(page)) == sum(word.lower() in text.lower() for text in texts) > 0

    # A row leads to its episode.
    page.fill("#find-text", "")
    page.locator("#others td button").last.click()
    assert page.locator("#left-number").inner_text() == str(data["traces"][-1]["update"])
    assert page.locator("#left-query").inner_text() == everything[-1]["query"]
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


def test_episodes_that_end_are_found(reported, opened):  # noqa: F811
    data = data_of(reported("2").read_text())["runs"][0]
    page = opened(reported("2"))
    page.select_option("#find-which", "all")
    found = []
    for choice in ("1", "0"):
        page.locator("#find-stopped").press("ArrowDown")
        found.append(len(rows_of(page)))
        stopped = [e["numbers"]["stopped"] for update in data["traces"] for e in update["episodes"]]
        assert found[-1] == stopped.count(int(choice)) > 0
    assert sum(found) == len(stopped)


def test_a_point_of_a_curve_leads_to_the_nearest_trace(reported, opened):  # noqa: F811
    traced = [update["update"] for update in data_of(reported("rloo").read_text())["runs"][0]["traces"]]
    page, last = opened(reported("rloo")), traced[-1]
    for key, update in (("ArrowRight", last), ("ArrowLeft", 0)):
        page.locator("#plot-0 svg").focus()
        for _ in range(last + 2):
            page.keyboard.press(key)
        assert page.locator("#plot-0 .place").inner_text() == f"update {update}"
        page.keyboard.press("Enter")
        assert page.locator("#left-number").inner_text() == str(update)
    page.locator("#plot-0 svg").click()
    middle = int(page.locator("#plot-0 .place").inner_text().removeprefix("update "))
    page.locator("#plot-0 .jump").click()
    assert page.locator("#left-number").inner_text() == str(min(traced, key=lambda x: abs(x - middle)))


def test_a_drag_over_a_chart_zooms(reported, opened):  # noqa: F811
    page = opened(reported("rloo"))
    chart = page.locator("#plot-0 svg")
    whole = page.locator("#plot-0 path").first.get_attribute("d")
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    y = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + 40, y)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.75, y, steps=4)
    page.mouse.up()
    assert 0 < page.locator("#plot-0 path").first.get_attribute("d").count("L") < whole.count("L")
    chart.dblclick()
    assert page.locator("#plot-0 path").first.get_attribute("d") == whole
