"""benchmark/experiments/ablations.py, ablation_list.py and overoptimisation.py: what they change, and arithmetic."""

import json
import math
import re
import types
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import safetensors.torch
import torch
from processes import launch
from runs import (
    both_arguments,
    metrics_of,
    only,
    policy_arguments,
    posts_arguments,
    reward_arguments,
    world_arguments,
)

from benchmark.experiments import ablation_list, ablations, overoptimisation
from ppo_rlhf import rlvr_policy, tldr_policy, tldr_reward, train_policy, train_reward
from ppo_rlhf.lib import cli

ABLATIONS = Path(ablations.__file__)
TALES = ablations.WORLDS["tales"]
POLICY = [
    name
    for name, ablation in TALES.ablations.items()
    if not (ablation.reward or ablation.own_reward_model or ablations.is_setting(TALES, name))
]
EVERY = [(kind, name) for kind, world in ablations.WORLDS.items() for name in world.ablations]


def with_ablation(name: str, script: str, arguments: list[str], folder: Path) -> Path:
    result = launch(ABLATIONS, "with", name, f"ppo_rlhf/{script}.py", *arguments, folder=folder)
    assert result.status == 0, result
    return folder


def policy_run(name: str, world: Path, reward: Path, folder: Path) -> list[dict[str, float]]:
    arguments = [*world_arguments(world), *policy_arguments(), "--rewards.trained_model", str(reward)]
    return metrics_of(only(with_ablation(name, "train_policy", arguments, folder), "runs/*"))


@pytest.fixture(scope="module")
def baseline(tiny_world, tiny_reward, tmp_path_factory):
    """Metrics of the plain script."""
    folder = tmp_path_factory.mktemp("plain")
    arguments = [*world_arguments(tiny_world), *policy_arguments(), "--rewards.trained_model", str(tiny_reward)]
    assert launch("train_policy.py", *arguments, folder=folder).status == 0
    return metrics_of(only(folder, "runs/*"))


def test_the_baseline_is_the_plain_script(baseline, tiny_world, tiny_reward, tmp_path):
    assert policy_run("baseline", tiny_world, tiny_reward, tmp_path) == baseline


# What is different already in the first update of a run that begins with the same samples; else, later.
FIRST = {
    "no-reward-whitening": "ppo/returns/mean",
    "no-advantage-whitening": "ppo/val/advantage_var",
    "no-kl": "objective/kl_coef",
    "random-value-head": "ppo/val/mean",
    "torch-adam": "ppo/policy/approxkl",
    "lambda-1": "ppo/returns/var",
    "lambda-0": "ppo/returns/var",
    "gamma-0.9": "ppo/returns/mean",
    "one-epoch": "ppo/policy/approxkl",
}
LATER = {"constant-learning-rate": "ppo/policy/approxkl", "fixed-kl": "objective/kl_coef"}


@pytest.mark.parametrize("name", [*FIRST, *LATER])
def test_an_ablation_changes_what_it_names(name, baseline, tiny_world, tiny_reward, tmp_path):
    rows = policy_run(name, tiny_world, tiny_reward, tmp_path)
    metric = (FIRST | LATER)[name]
    assert rows[0]["objective/entropy"] == baseline[0]["objective/entropy"]  # the same samples
    changed = [abs(row[metric] - plain[metric]) > 1e-9 for row, plain in zip(rows, baseline, strict=True)]
    assert changed[0] == (name in FIRST) and any(changed)
    if name == "no-advantage-whitening":
        assert abs(rows[0]["ppo/val/advantage_var"] - 1) > 1e-3 > abs(baseline[0]["ppo/val/advantage_var"] - 1)
    if name == "fixed-kl":
        assert {row["objective/kl_coef"] for row in rows} == {0.15}


def test_every_policy_ablation_is_tried_above():
    """But for those that need more than a few updates of a tiny model before anything is clipped or penalised."""
    rare = {"baseline", "no-value-clipping", "no-policy-clipping", "no-score-penalty"}
    assert set(FIRST) | set(LATER) | rare == set(POLICY)


@pytest.mark.parametrize("name", ["not-normalised-before", "not-normalised-after", "never-normalised"])
def test_ablations_of_the_reward_model(name, tiny_world, tmp_path):
    arguments = [*world_arguments(tiny_world), *reward_arguments(tiny_world)]
    folder = with_ablation(name, "train_reward", arguments, tmp_path)
    first = metrics_of(only(folder, "runs/*"))[0]
    assert (abs(first["train/gain"] - 1) > 0.01) == (name == "not-normalised-after")  # one step moves it less
    meta = json.loads((only(folder, "runs/*") / "meta.json").read_text())
    switches = (meta["args"]["normalize_before"], meta["args"]["normalize_after"], meta["args"]["normalize_samples"])
    expected = {"before": (False, True, 32), "after": (True, False, 32), "normalised": (True, True, 0)}
    assert switches == expected[name.split("-")[-1]]


def test_scores_that_start_ten_times_as_wide(tiny_world, tmp_path):
    """The gain that normalises them is a tenth; without that it is 1. The first step has moved both a bit."""
    arguments, gains = [*world_arguments(tiny_world), *reward_arguments(tiny_world)], {}
    for name in ("baseline", "wide-scores", "wide-scores-not-normalised-before"):
        (tmp_path / name).mkdir()
        folder = with_ablation(name, "train_reward", arguments, tmp_path / name)
        gains[name] = metrics_of(only(folder, "runs/*"))[0]["train/gain"]
    plain, wide, raw = gains.values()
    assert abs(10 * wide - plain) < 0.02 and abs(raw - 1) < 0.002 < abs(plain - 1), gains


@pytest.mark.parametrize("kind", ablations.WORLDS)
def test_lines_are_where_they_were(kind):
    """Some script of the world contains the lines that an ablation replaces, and every copy of them is replaced."""
    world = ablations.WORLDS[kind]
    sources = {name: (ablations.ROOT / f"ppo_rlhf/{name}.py").read_text() for name in world.scripts}
    for name in world.ablations:
        for old, new in ablations.merged(world, name).lines.items():
            assert any(old in source for source in sources.values()) and old != new, name
            for source in sources.values():
                changed, found = ablations.replaced(source, {old: new})
                assert found == ({old} if old in source else set()) and old not in changed.replace(new, "")


PARSERS = {"tales": (train_policy, train_reward), "posts": (tldr_policy, tldr_reward), "sums": (rlvr_policy, None)}


@pytest.mark.parametrize("kind, name", EVERY)
def test_arguments_are_accepted_and_change_something(kind, name):
    """Every ablation has arguments or lines that its scripts take, and that differ from what it is compared with."""
    world, own = ablations.WORLDS[kind], ablations.WORLDS[kind].ablations[name]
    policy, reward = PARSERS[kind]
    for module, stage in ((policy, "policy"), (reward, "reward")):
        if not module:
            continue
        command = world.stages[stage].replace("{sft}", "sft").replace("{reward}", "reward").split()[1:]
        words = [getattr(ablations.merged(world, which), stage) for which in (own.against, name)]
        plain, changed = (cli.parse_args(module.PRESETS, [*command, *own_words]) for own_words in words)
        assert (plain != changed) == bool(getattr(own, stage)), stage
    assert (name == "baseline") != bool(own.policy or own.reward or own.lines)
    assert name == "baseline" or own.against in world.ablations


def test_a_line_that_is_gone_is_an_error():
    """Also where another of its lines is still there."""
    gone = ablations.Ablation("D00", "nothing", lines={ablation_list.POSITIONS: "pass", "no such line": ""})
    with pytest.raises(ValueError, match="no training script has what this ablation replaces: no such line"):
        ablations.change_scripts(gone, TALES.scripts)


def test_a_setting_comes_before_what_is_compared_with_it():
    """Arguments of both, those of the ablation last; lines of both."""
    merged = ablations.merged(TALES, "small-gradients-torch-adam")
    assert merged.policy == ("--ppo.total_episodes", "1280") and merged.lines.keys() == {
        ablation_list.LOSS,
        *ablation_list.ADAM,
    }
    assert ablations.owner(TALES, "many-epochs-no-value-clipping", "reward") == "baseline"
    assert ablations.owner(TALES, "never-normalised", "reward") == "never-normalised"


def test_what_an_ablation_is_compared_with_is_trained_too(tmp_path):
    """Also what that is compared with."""
    args = ablations.Args(only=("many-epochs-no-policy-clipping",), seeds=1, output=tmp_path)
    names = [name for name, _ in ablations.wanted(args, "tales")]
    assert names == ["baseline", "short", "many-epochs", "many-epochs-no-policy-clipping"]


def test_uneven_queries_by_hand():
    """One sentence, two, three, four, five, and one again; 9 ends a sentence, 0 is padding."""
    namespace = {"torch": torch}
    exec(ablation_list.UNEVEN["# ---- Step 1: queries"], namespace)
    query = [1, 9, 2, 3, 9, 4, 9, 5, 9, 6, 9]
    ids = types.SimpleNamespace(stop=9, pad=0)
    expected = [query[:kept] + [0] * (11 - kept) for kept in (2, 5, 7, 9, 11, 2)]
    assert namespace["uneven"](torch.tensor([query] * 6), ids).tolist() == expected


def test_positions_that_count_padding_by_hand():
    """As if the padding before the last real token stood to the left of the row."""
    expression = ablation_list.PADDING_COUNTS[ablation_list.POSITIONS]
    mask = torch.tensor([[1, 0, 0, 1, 1], [0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [0, 1, 0, 1, 0]]).bool()
    names = {"mask": mask}
    exec(expression, names)
    real = [row[kept].tolist() for row, kept in zip(names["position_ids"], mask, strict=True)]
    assert real == [[2, 3, 4], [2, 3, 4], [0, 1, 2], [2, 3]]


def test_positions_with_padding(tiny_world, tmp_path):
    """The same lines stand in both training scripts; train_both.py runs both with the ablation."""
    name, folders = "positions-count-padding", (tmp_path / "plain", tmp_path / "ablated")
    for folder in folders:
        folder.mkdir()
    assert launch("train_both.py", *both_arguments(tiny_world), folder=folders[0]).status == 0
    with_ablation(name, "train_both", both_arguments(tiny_world), folders[1])
    for kind in ("train_reward", "train_policy"):
        plain, ablated = (metrics_of(only(folder, f"runs/{kind}*"))[0] for folder in folders)
        assert plain != ablated, kind


def test_flags_reach_both_parts(tiny_world, tmp_path):
    with_ablation("fixed-kl", "train_both", both_arguments(tiny_world), tmp_path)
    meta = json.loads((only(tmp_path, "runs/train_policy*") / "meta.json").read_text())
    assert meta["args"]["rewards"]["adaptive_kl"]["target"] is None


@pytest.mark.parametrize("name", ["critic-from-sft", "critic-shared", "no-advantage-whitening"])
def test_lines_of_chapter_2(name, tiny_posts, tmp_path):
    """What differs in the first update: the values of the critic, or the loss of the policy.

    A shared network is saved twice, trained by both losses: as the policy and, with a head of its own, as the critic.
    """
    model = ["--base_model", str(tiny_posts / "model")]
    common = [*posts_arguments(tiny_posts), *model]
    train = [*common, "--batch_size", "16", "--normalize_posts", "16"]
    assert launch("tldr_reward.py", *train, folder=tmp_path).status == 0
    words = [*common, "--rewards.trained_model", str(only(tmp_path, "models/*/reward")), "--ppo.total_episodes", "16"]
    words += ["--ppo.batch_size", "16", "--ppo.nminibatches", "2", "--eval_interval", "0", "--eval_posts", "4"]
    found = {}
    for which in ("baseline", name):
        (tmp_path / which).mkdir()
        folder = with_ablation(which, "tldr_policy", words, tmp_path / which)
        (found[which],) = metrics_of(only(folder, "runs/*"))
    plain, changed = found["baseline"], found[name]
    assert plain["objective/entropy"] == changed["objective/entropy"]  # the same samples
    metric = "val/mean" if name.startswith("critic") else "loss/policy_avg"
    assert abs(plain[metric] - changed[metric]) > 1e-6
    saved = [only(tmp_path / name, f"models/*/{kind}/model.safetensors") for kind in ("policy", "value")]
    policy, value = (safetensors.torch.load_file(file) for file in saved)
    layers = [key for key in policy if ".layers." in key]
    assert layers and all(torch.equal(policy[key], value[key]) for key in layers) == (name == "critic-shared")


def test_details_exist():
    for kind, name in EVERY:
        world = ablations.WORLDS[kind]
        page = (ablations.ROOT / f"docs/reference/chapter{world.chapter}.md").read_text()
        assert name == "baseline" or f'id="{world.ablations[name].detail}"' in page, name


def test_the_whole_takes_less_than_ten_hours_on_two_cores(tmp_path, capsys):
    """By the minutes that a run takes, if nothing had been run yet; the atlas says how long."""
    ablations.list_all(ablations.Args(output=tmp_path))
    hours = float(re.findall(r"all: ([\d.]+) hours of one core", capsys.readouterr().out)[0]) / 2
    assert hours < 10 and round(hours) == 8 and "estimated at eight hours on two cores" in ATLAS


# ------------------------------------------------------------------------------------------------ report


def effects_table() -> pd.DataFrame:
    columns = dict.fromkeys(TALES.effects, 0.0)
    rows = [("baseline", 1, 1.0), ("baseline", 2, 2.0), ("baseline", 3, 6.0), ("one-epoch", 1, 2.0)]
    rows += [("one-epoch", 2, 4.0), ("one-epoch", 3, 9.0), ("no-kl", 1, 5.0)]
    return pd.DataFrame(
        [{"ablation": name, "seed": seed, **columns, "gold score": gold} for name, seed, gold in rows]
    )


def test_differences_by_hand():
    """Differences 1, 2, 3: mean 2, standard error 1 / sqrt(3). Student's 97.5 % point with 2 degrees is 4.3027."""
    table = ablations.differences(effects_table(), TALES).set_index("ablation")
    assert table.loc["one-epoch", "gold score"] == 2.0 and table.loc["one-epoch", "seeds"] == 3
    assert table.loc["one-epoch", "gold score +-"] == pytest.approx(4.3027 / math.sqrt(3), rel=1e-4)
    assert table.loc["baseline", "gold score"] == 3.0
    assert table.loc["no-kl", "gold score"] == 4.0 and math.isnan(table.loc["no-kl", "gold score +-"])
    # t = 2 sqrt(3) with 2 degrees of freedom: p = 1 - t / sqrt(2 + t^2).
    assert table.loc["one-epoch", "p"] == pytest.approx(1 - 2 * math.sqrt(3) / math.sqrt(14))
    assert math.isnan(table.loc["no-kl", "p"]) and math.isnan(table.loc["baseline", "p"])


def test_a_setting_is_compared_with_itself():
    columns = dict.fromkeys(TALES.effects, 0.0)
    golds = {"baseline": (1, 1), "short": (2, 2), "many-epochs": (4, 6), "many-epochs-no-policy-clipping": (5, 8)}
    rows = [
        {"ablation": name, "seed": seed, **columns, "gold score": gold}
        for name, own in golds.items()
        for seed, gold in enumerate(own, 1)
    ]
    table = ablations.differences(pd.DataFrame(rows), TALES).set_index("ablation")["gold score"]
    assert table.to_dict() == {"baseline": 1, "short": 1, "many-epochs": 3, "many-epochs-no-policy-clipping": 1.5}


def write_policy(folder: Path, name: str, seed: int, kl: float, **meta) -> None:
    run = folder / f"tales/policy-{name}/seed{seed}/runs/run"
    run.mkdir(parents=True)
    columns = {effect.column: np.full(20, kl) for effect in TALES.effects.values()}
    columns["objective/kl"] = np.where(np.arange(20) == 5, 30.0, kl)
    pd.DataFrame(columns).to_csv(run / "metrics.csv")
    (run / "meta.json").write_text(json.dumps({"args": {}, "finished": True, "commit": "abc"} | meta))


PARTS = (*ablations.WORLDS, "count")


def test_report(tmp_path):
    for seed in (1, 2, 3):
        write_policy(tmp_path / "runs", "baseline", seed, kl=1.0 + seed)
        write_policy(tmp_path / "runs", "one-epoch", seed, kl=1.5 + seed, finished=seed < 3)
    record = {"command": "", "commit": "", "finished": False, "status": 2, "starts": 1}
    (tmp_path / "runs/tales/policy-one-epoch/seed3/job.json").write_text(json.dumps(record))
    (tmp_path / "runs/tales/policy-one-epoch/seed3/runs/began").mkdir()  # and never got as far as meta.json
    write_policy(tmp_path / "runs", "no-kl", 1, kl=1.0, finished=False)
    (tmp_path / "runs/tales/policy-no-kl/seed1/job.json").write_text(json.dumps(record))
    arguments = ["--folder", "runs", "--output", "out", "--pictures", "out", "--atlas", "atlas.md"]
    (tmp_path / "atlas.md").write_text(
        "".join(f"{ablations.BEGIN.format(n)}what was here\n{ablations.END}" for n in PARTS)
    )
    result = launch(ABLATIONS, "report", *arguments, folder=tmp_path)
    assert result.status == 0, result
    (row,) = [line for line in result.stdout.splitlines() if "`one-epoch`" in line]
    assert re.search(
        r"\[D62\].*#D62.*\| 2, 1 failed \| \*\*\+0.50 ± 0.00\*\* \| \*\*\+0.50 ± 0.00\*\* \| \+0.00 ± 0.00", row
    ), row
    (gone,) = [line for line in result.stdout.splitlines() if "`no-kl`" in line]
    assert gone.endswith("| 0, 1 failed |  |  |  |  |  |")
    assert "commit: abc" in (tmp_path / "out/ablations.md").read_text()
    assert (tmp_path / "out/atlas.png").read_bytes()[:4] == b"\x89PNG"
    page = (tmp_path / "atlas.md").read_text()
    count = sum(len(world.ablations) - 1 for world in ablations.WORLDS.values())
    assert "what was here" not in page and f"\n1 of {count} changes have been run, 1 of them with two" in page
    (row,) = [line for line in page.splitlines() if 'id="tales-one-epoch"' in line]
    assert "| **+0.50 ± 0.00** |" in row and "[D62](chapter1.md#D62)" in row
    assert "not yet run" in next(line for line in page.splitlines() if 'id="sums-group-2"' in line)
    # The rows of the CSV stay when the runs are gone, and a newer run takes the place of its row.
    before = (tmp_path / "out/ablations.csv").read_text()
    again = launch(ABLATIONS, "report", "--folder", "gone", *arguments[2:], folder=tmp_path)
    assert again.status == 0 and (tmp_path / "out/ablations.csv").read_text() == before
    for seed in (1, 2):
        write_policy(tmp_path / "newer", "one-epoch", seed, kl=1.0000001 + seed)  # rounded: the baseline
    newer = launch(ABLATIONS, "report", "--folder", "newer", *arguments[2:], folder=tmp_path)
    assert "one-epoch,1,2," in (tmp_path / "out/ablations.csv").read_text()
    (row,) = [line for line in newer.stdout.splitlines() if "`one-epoch`" in line]
    assert "| +0.00 ± 0.00 |" in row and "**" not in row
    nothing = launch(ABLATIONS, "report", "--folder", "nowhere", "--output", "none", folder=tmp_path)
    assert nothing.status == 2 and "no baseline in nowhere or none is finished yet" in nothing.stderr


def test_run_goes_on_where_it_stopped(tiny_world, tmp_path):
    """Reward models first, one for the baseline and one for the ablation that changes it; then the policies."""
    policy = " ".join(["train_policy.py", *world_arguments(tiny_world), *policy_arguments()])
    reward = " ".join(["train_reward.py", *world_arguments(tiny_world), *reward_arguments(tiny_world)])
    policy += " --rewards.trained_model {reward}"
    arguments = ["--world", "tales", "--stages", f"tales.policy={policy}", f"tales.reward={reward}", "--seeds", "1"]
    arguments += ["--folder", str(tmp_path / "runs"), "--output", str(tmp_path / "out"), "--workers", "2"]
    arguments += ["--pictures", str(tmp_path / "out"), "--atlas", "none"]
    result = launch(ABLATIONS, "run", *arguments, "--only", "never-normalised", "--any_commit", folder=tmp_path)
    assert result.status == 0, result
    names = {"reward-baseline", "reward-never-normalised", "policy-baseline", "policy-never-normalised"}
    assert {path.name for path in (tmp_path / "runs/tales").iterdir()} == names
    again = launch(ABLATIONS, "run", *arguments, "--only", "never-normalised", "--any_commit", folder=tmp_path)
    assert again.status == 0 and "running" not in again.stdout
    assert len((tmp_path / "out/ablations.csv").read_text().splitlines()) == 3


@pytest.mark.parametrize(
    "words, message",
    [
        (["with", "nothing-like-it", "ppo_rlhf/train_policy.py"], "nothing-like-it is none of the ablations"),
        (["with", "no-kl", "ppo_rlhf/sample.py"], "ppo_rlhf/sample.py is none of"),
        (["run", "--only", "no-such"], "--only no-such: there are baseline"),
        (["run", "--seeds", "-1"], "--seeds is -1; it must be at least 0"),
        (["with", "group-2", "ppo_rlhf/train_policy.py"], "group-2 is none of the ablations of chapter 1"),
    ],
)
def test_bad_input(words, message, tmp_path):
    result = launch(ABLATIONS, *words, folder=tmp_path)
    assert result.status == 2 and message in result.stderr and result.stderr.count("\n") == 1, result


# ------------------------------------------------------------------------------------------------ the committed pages

RESULTS = ablations.ROOT / "benchmark/results/ablations"
ATLAS = (ablations.ROOT / "docs/reference/atlas.md").read_text()


def test_tables_and_atlas_follow_from_the_committed_effects(tmp_path):
    """Byte for byte; the arithmetic has tests by hand above, and in test_lab.py."""
    for file in RESULTS.glob("*.csv"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "atlas.md").write_text(ATLAS)
    where = {"folder": tmp_path / "none", "output": tmp_path, "pictures": tmp_path, "atlas": tmp_path / "atlas.md"}
    assert ablations.report(ablations.Args(**where)) == 0
    for file in RESULTS.iterdir():
        assert (tmp_path / file.name).read_bytes() == file.read_bytes(), file.name
    assert (tmp_path / "atlas.md").read_text() == ATLAS


def test_the_atlas_has_every_change():
    """Those that have not been run, too; and Holm's correction is over all worlds together."""
    for kind, world in ablations.WORLDS.items():
        part = ATLAS.partition(ablations.BEGIN.format(kind))[2].partition(ablations.END)[0]
        assert re.findall(rf'id="{kind}-([\w.-]+)"', part) == [name for name in world.ablations if name != "baseline"]
    tables = {kind: ablations.differences(effects_table(), TALES) for kind in ("tales", "posts")}
    every = ablations.all_differences(tables)
    p = every["p"].iloc[0]
    assert list(every["holm"].dropna()) == pytest.approx([2 * p, 2 * p])


# ------------------------------------------------------------------------------------------------ over-optimisation


def test_fit_finds_what_was_put_in():
    d = np.linspace(0, 6, 50)
    gold = np.where(d > 0, d * (1.5 - 0.7 * np.log(np.maximum(d, 1e-9))), 0)
    assert overoptimisation.fit(d, gold) == pytest.approx((1.5, 0.7))


def test_overoptimisation_of_made_up_runs(tmp_path):
    """Gold scores of deviation 2 and mean 1 in the language model, on the curve with alpha 1.5 and beta 0.5."""
    for seed in (1, 2, 3):
        run = tmp_path / f"runs/{seed}"
        run.mkdir(parents=True)
        d = np.linspace(0.1, 5, 40) + 0.01 * seed
        gold = 1 + 2 * d * (1.5 - 0.5 * np.log(d))
        columns = {
            "step": range(40),
            "objective/kl": d**2,
            "objective/gold_scores": gold,
            "objective/raw_score": 3 * d,
        }
        pd.DataFrame(columns).to_csv(run / "metrics.csv", index=False)
        args = {"seed": seed, "rewards": {"trained_model": f"models/reward{seed}/reward"}}
        (run / "meta.json").write_text(json.dumps({"args": args, "commit": "abc"}))
        (tmp_path / f"runs/reward{seed}").mkdir()
        reward = {"args": {}, "results": {"test_accuracy": seed / 10}}
        (tmp_path / f"runs/reward{seed}/meta.json").write_text(json.dumps(reward))
        own = [{"base gold": 1 + sign * math.sqrt(2), "base score": sign / math.sqrt(2)} for sign in (-1, 1)]
        (run / "comparison.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
    script = ABLATIONS.parent / "overoptimisation.py"
    result = launch(script, "--runs", "made up=runs/*", "--output", "out", folder=tmp_path)
    assert result.status == 0, result
    row, *seeds = [line for line in result.stdout.splitlines() if "made up" in line]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1:5] == ["3", "10 %, 20 %, 30 %", "1.50 [1.50, 1.50]", "0.50 [0.50, 0.50]"]
    assert cells[6] == "not seen"  # exp(alpha / beta - 1) is 7.4, and d ends at 5
    table = pd.read_csv(tmp_path / "out/overoptimisation.csv")
    np.testing.assert_allclose(table["proxy"], 3 * table["d"], rtol=1e-3)
    assert [line.split(" | ")[1:3] for line in seeds] == [["1", "10 %"], ["2", "20 %"], ["3", "30 %"]]
    d = 5.03 - 2 * 4.9 / 39  # the middle of the last five updates of seed 3; a mean of five is a little lower
    assert seeds[2].split(" | ")[3] == f"{d * (1.5 - 0.5 * math.log(d)):.1f} at d = {d:.1f}"
    assert (tmp_path / "out/overoptimisation.png").exists()
    more = "--runs", "out/overoptimisation.csv", "--output", "again", "--figure", "new/picture.png"
    again = launch(script, *more, folder=tmp_path)
    assert again.status == 0 and again.stdout == result.stdout and (tmp_path / "new/picture.png").exists()
    csvs = [(tmp_path / f"{folder}/overoptimisation.csv").read_text() for folder in ("out", "again")]
    assert csvs[0] == csvs[1]
    (tmp_path / "damaged.csv").write_text("a,b\n1,2\n")
    assert launch(script, "--runs", "damaged.csv", folder=tmp_path).status == 2
    assert launch(script, "--runs", "x=nowhere/*", "--output", "out", folder=tmp_path).status == 2
