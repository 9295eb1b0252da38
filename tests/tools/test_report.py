"""report.html: its numbers are those of the run, its texts are text, and a browser shows what it should."""

import csv
import hashlib
import html
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import matplotlib
import pytest
import torch
from invented_traces import Tensors, change, tensors_of, write_meta, write_trace
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.text import Text
from runs import ROOT, explained_metrics, metrics_of, write_rows

from benchmark import pictures
from ppo_rlhf.report import __main__ as report, learning_curves, traces
from ppo_rlhf.train_policy import InputError

EVIL = "</script><script>window.hacked = 1</script><b>&amp; \x1b[31mred"
UPDATES = (0, 3, 5)
WORDS = ("one", "two", "three", "four", "five")
RESPONSES = [[f" {word}" for word in WORDS], [EVIL, "\n", " b", "", " c"]]
NUMBERS = ("logprobs", "kl", "rewards", "values")
DRAWN = ("objective/scores", "objective/gold_scores", "objective/kl")
REWARDS = {"trained_model": "models/r/reward", "monitor": "a.b:gold_scores", "adaptive_kl": {"target": 6.0}}
PPO = {"samples_per_prompt": 2, "batch_size": 2, "nminibatches": 1, "gamma": 1.0, "lam": 0.95, "cliprange": 0.2}
ARGS = {"preset": EVIL, "ppo": PPO | {"cliprange_high": 0.2}, "rewards": REWARDS}


@pytest.fixture(autouse=True)
def draw(monkeypatch) -> Callable:
    """The function that draws learning_curves.png. In these tests the report doesn't, since that takes long."""
    with monkeypatch.context() as patch:
        whole = learning_curves.draw_learning_curves
        patch.setattr(learning_curves, "draw_learning_curves", lambda *_: None)
        yield whole


def write_table(path: Path, *rows) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)


def make_run(
    folder: Path, script: str = "train_policy", traced: bool = True, responses: list[list[str]] = RESPONSES
) -> Path:
    """The folder of a run that never was: six updates, and of three of them two episodes of five tokens."""
    folder.mkdir(parents=True)
    write_meta(folder, script, **ARGS)
    generator = torch.Generator().manual_seed(0)
    rows = [[step, *torch.rand(4, generator=generator).tolist()] for step in range(6)]
    write_table(folder / "metrics.csv", ["step", *DRAWN, "some/other"], *rows)
    for update in UPDATES if traced else ():
        # Chapter 1 trains on what it cuts, too.
        tokens = {"scored": torch.arange(5) < torch.tensor([[3], [5]])}
        tokens |= {name: torch.randn(2, 5, generator=generator) for name in (*NUMBERS, "new_logprobs")}
        tokens["logprobs"] -= 2  # none is above 0, and the largest advantage is of a token that was nearly certain
        names = ("advantages", "returns", "new_logprobs", "new_values")
        epochs = {name: torch.randn(2, 2, 5, generator=generator) for name in names}
        if script == "train_policy":
            epochs["permutations"] = torch.arange(2).expand(2, 1, 2)
        else:
            epochs["minibatches"] = torch.arange(2).expand(2, 1, 2)
        if script == "tldr_policy":
            tokens["value_mask"] = tokens["scored"].clone()
            epochs["token_counts"] = epochs["value_counts"] = torch.tensor([[8], [8]])
        if script == "rlvr_policy":
            tokens |= {"advantages": epochs.pop("advantages")[-1], "returns": epochs.pop("returns")[-1]}
            tokens["mask"] = tokens["scored"].clone()
        score = "score" if script == "train_policy" else "scores"
        write_trace(
            folder,
            update,
            queries=["the same query", f"query {update} {EVIL}"],
            responses=responses,
            tokens=tokens,
            episodes={score: torch.tensor([0.25, -1.0]), "stopped": torch.tensor([True, False])},
            epochs={name: tensor.clone() for name, tensor in epochs.items()},
            reference=[EVIL, "fine"],
        )
    return folder


def written(folder: Path, update: int) -> Tensors:
    """The numbers of a trace, under the names of the page."""
    x = tensors_of(traces.path_of(folder, update))
    found = {name.partition(".")[2]: tensor for name, tensor in x.items() if not name.startswith("epochs.")}
    found |= {"advantages": x["epochs.advantages"][-1]} if "epochs.advantages" in x else {}
    found["scores"] = found.get("scores", found.get("score"))
    return found | {"ratio": torch.exp(found["new_logprobs"] - found["logprobs"])}


def edit_traces(folder: Path, **tensors: torch.Tensor) -> None:
    """Give all traces other numbers of tokens."""
    for update in UPDATES:
        change(traces.path_of(folder, update), **{f"tokens.{name}": tensor for name, tensor in tensors.items()})


def data_of(page: str) -> dict:
    """What the page hands to its script."""
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(found)


def write_report(folder: Path, **more: str) -> str:
    return report.report(report.Args(run=str(folder), **more)).read_text()


@pytest.mark.parametrize(("script", "shown"), [("train_policy", 5), ("tldr_policy", 3), ("rlvr_policy", 3)])
def test_the_numbers_of_the_page_are_those_of_the_run(script, shown, tmp_path):
    folder = make_run(tmp_path / "a", script)
    data, rows = data_of(write_report(folder)), metrics_of(folder)
    lines = {line["metric"]: line for figure in data["figures"] for line in figure["data"]}
    assert set(lines) == set(DRAWN)
    assert [figure["targets"] for figure in data["figures"] if lines["objective/kl"] in figure["data"]] == [[6.0]]
    for name, line in lines.items():
        assert line["x"] == list(range(6)) and line["y"] == pytest.approx([row[name] for row in rows], rel=1e-7)
    assert [update["update"] for update in data["updates"]] == list(UPDATES)
    for update in data["updates"]:
        trace = written(folder, update["update"])
        for i, (episode, count) in enumerate(zip(update["episodes"], (shown, 5), strict=True)):
            assert episode["places"] == list(range(count))
            for name in (*NUMBERS, "advantages", "ratio", "ids"):  # of the last epoch, with which a step was made
                assert episode["tokens"][name] == pytest.approx(trace[name][i, :count].tolist(), rel=1e-5)
            assert episode["numbers"]["scores"] == trace["scores"][i] and episode["texts"]["reference"] in (
                EVIL,
                "fine",
            )
            assert episode["query"] == ["the same query", f"query {update['update']} {EVIL}"][i]


def drawn(folder: Path, *columns: str, **args: dict) -> list[str]:
    """Which of its metrics a run of chapter 3 has a panel for."""
    write_meta(folder, "rlvr_policy", **ARGS | args)
    write_table(folder / "metrics.csv", ["step", *columns], range(len(columns) + 1))
    return [line["metric"] for figure in data_of(write_report(folder))["figures"] for line in figure["data"]]


def test_which_metrics_are_drawn(tmp_path):
    """Those of sampling ahead, but for a time that is there twice, and of the run's own verifier.

    Groups of one have no deviation.
    """
    names = {name for name in explained_metrics(3) if name.startswith(("async/", "time/"))} - {"time/from_scratch"}
    names |= {"objective/sampler_gap", "train/staleness_mean", "val/first_ratio_gap"}
    assert set(drawn(tmp_path, *names)) == names
    columns = ["eval/mine:right", "val/groups_zero_std", "lr"]
    assert drawn(tmp_path, *columns, rewards={"verifier": "mine:right"}) == columns
    assert drawn(tmp_path, *columns[1:], ppo={"samples_per_prompt": 1}) == ["lr"]


def test_the_picture_of_the_metrics_is_next_to_the_page(draw, tmp_path, monkeypatch):
    monkeypatch.setattr(learning_curves, "draw_learning_curves", draw)
    folder = make_run(tmp_path / "a", traced=False)
    for place in (folder, tmp_path):
        write_report(folder, out=str(place / "page.html"))
        assert (place / "learning_curves.png").stat().st_size > 10_000


@pytest.mark.parametrize(("query", "score"), [("query", "score"), ("query", "scores"), ("prompt", "score")])
def test_a_run_that_compared_nothing_shows_two_samples(query, score, tmp_path):
    """The first and the last row that it left, each with its query, as the chapters call it."""
    folder = make_run(tmp_path / "a", traced=False)
    rows = [{"step": step, query: f"q{step}", "response": EVIL, score: step - 0.5} for step in (0, 0, 7, 9)]
    write_rows(folder / "samples.jsonl", *rows)
    page = write_report(folder)
    example = re.search(r'<article class="card example">(.*?)</article>', page, re.DOTALL)[1]
    assert re.findall(r'query">(.*?)<', example) == ["q0", "q9"] and EVIL not in example
    assert "in update 0, score -0.50" in example and "in update 9, score 8.50" in example
    for few in (rows[:2], [{"step": 5, "query": "of a reward model", "preferred": "a"}]):
        write_rows(folder / "samples.jsonl", *few)
        assert "card example" not in write_report(folder)


def test_texts_of_a_run_are_text(tmp_path):
    folder = make_run(tmp_path / "a", "tldr_policy")
    row = {"query": "half a character \ud83d", "response": EVIL, "reference": "r", "scores": 0.5}
    write_rows(folder / "evaluation.jsonl", row)
    page = write_report(folder)
    assert EVIL not in page and "\x1b" not in page and "<script>window.hacked" not in page
    assert "&lt;/script&gt;&lt;script&gt;window.hacked = 1" in page and "half a character ?" in page


def held_out(page: str) -> list[dict[str, str]]:
    """What the page says of each held-out query."""
    cards = page.split('id="texts"')[1].split("</section>")[0].split("<details")[1:]
    return [dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", card)) for card in cards]


def test_a_held_out_post_has_the_summaries_before_and_after(tmp_path):
    folder = make_run(tmp_path / "a", "tldr_policy")
    post = {"query": "a post", "reference": "in short", "reference_scores": 1.0}
    sft, other = post | {"response": "of SFT", "scores": -0.5}, post | {"query": "another post", "response": "x"}
    write_rows(folder / "evaluation_before.jsonl", sft)
    before = {"query": "a post", "reference": "in short", "reference scores": "1.0"}
    before |= {"response before": "of SFT", "scores before": "-0.5"}
    assert held_out(write_report(folder)) == [before]  # a run that is not finished
    write_rows(folder / "evaluation.jsonl", other, post | {"response": "after", "scores": 2.5, "gold_scores": 3.0})
    one, both = held_out(page := write_report(folder))
    summaries = re.findall(r"<summary>(.*?)</summary>", page.split('id="texts"')[1])
    assert [re.sub("<.*?>", "", text) for text in summaries[:2]] == ["x ", "after score -0.5 → 2.5, gold score 3"]
    assert both == before | {"response": "after", "scores": "2.5", "gold scores": "3.0"}
    assert one["query"] == "another post" and one["response"] == "x" and "scores" not in one


def test_damage_is_named(tmp_path):
    folder = make_run(tmp_path / "a", "tldr_policy")
    file = traces.path_of(folder, 0)
    whole = file.read_bytes()
    change(file, **{"tokens.kl": torch.zeros(2, 2)})
    for content in (file.read_bytes(), b"", whole[:-1]):
        file.write_bytes(content)
        with pytest.raises(InputError, match=r"traces/0\.safetensors is damaged; remove it"):
            write_report(folder)
    shutil.rmtree(folder / "traces")
    for name, text in {
        "evaluation.jsonl": ("{}\n", "[" * 100_000),
        "samples.jsonl": ('{"step": 1, "response": "", "score": "high"}\n',),
        "metrics.csv": ("step,kl\n0,much\n",),
    }.items():
        for damaged in text:
            (folder / name).write_text(damaged)
            with pytest.raises(InputError, match=f"{folder / name} is damaged"):
                write_report(folder)
        (folder / name).unlink()


def test_traces_of_an_older_version_are_left_out(tmp_path):
    """They came in pairs, and were of another form."""
    folder = make_run(tmp_path / "a", "tldr_policy")
    for name in ("3", "3_again"):
        (folder / f"traces/{name}.safetensors").write_bytes(b"of another form")
    assert [update["update"] for update in data_of(write_report(folder))["updates"]] == [0, 5]


def test_where_no_page_can_be_written_nothing_is_left(tmp_path):
    folder = make_run(tmp_path / "a")
    for out, message in ((folder / "traces", "is a folder"), (folder / "no/such/x.html", "there is no folder")):
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(InputError, match=f"--out .*{message}"):
            write_report(folder, out=str(out))
        assert sorted(tmp_path.rglob("*")) == before


def test_what_is_right_by_luck_is_called_so(tmp_path):
    """A wrong calculation before an answer that the verifier accepts, where one can tell."""
    texts = {
        "19+5=24\n24 * 2 = 48\n#### 48": "",
        "Then 3+2=6.": "3+2=6",
        "1+1=2, 5*2=15": "5*2=15",
        "9-12=3": "9-12=3",
        "1.5*2=3": "",  # only whole numbers
        "12/4*2=6": "",
        "1+2+3=6": "",
    }
    assert {text: report.page.wrong_calculation(text) for text in texts} == texts
    folder = make_run(tmp_path / "a", "rlvr_policy", responses=[["5", "*", "2", "=", "15"]] * 2)
    for update in UPDATES:
        everything = torch.ones(2, 5, dtype=torch.bool)
        change(
            traces.path_of(folder, update),
            **{"tokens.scored": everything, "episodes.verifier": torch.tensor([1.0, 0.0])},
        )
    for update in data_of(write_report(folder))["updates"]:
        assert [episode.get("luck") for episode in update["episodes"]] == ["5*2=15", None]


def test_a_place_has_the_lines_of_the_commit_that_ran():
    place, git = "ppo_rlhf/train_policy.py forward D26", ["git", "-C", str(ROOT)]
    commit = subprocess.check_output([*git, "rev-parse", "HEAD"], text=True).strip()
    lines = subprocess.check_output([*git, "show", f"{commit}:ppo_rlhf/train_policy.py"], text=True).splitlines()
    found = report.page.source_of(place, f"{commit}-dirty")
    assert found == report.page.source_of(place, commit)
    assert "[D26]" in found and "read_scalar(self.value_head, hidden_states)" in found
    assert {*found.splitlines()} <= {f"{number} {line}" for number, line in enumerate(lines, 1)}
    assert report.page.source_of(place, "0" * 40) == report.page.source_of(place, "") == ""


def test_a_quantity_has_one_colour(tmp_path):
    """Also in a run that lacks others, or has them in another order."""
    names = [f"{when}/{name}" for when in ("objective", "eval") for name in ("gold_scores", "scores")]
    names += ["eval/pass@1", "eval/pass@2"]
    seen = set()
    for columns in (names, names[::-1], names[:1], names[2:3]):
        drawn(tmp_path, *columns)
        for figure in data_of((tmp_path / "report.html").read_text())["figures"]:
            found = {(line["name"], line["color"]) for line in figure["data"]}
            assert len({color for _, color in found}) == len(figure["data"])
            seen |= found
    one, other = (pair for pair in seen if pair[0] in ("score", "gold score"))
    assert not {*one} & {*other}


@pytest.mark.parametrize("folder", pictures.REPORTS)
def test_an_example_report_is_of_the_run_beside_it(folder):
    name = "policy_meta.json" if folder == "demo-tldr" else "meta.json"
    commit = json.loads((ROOT / "static" / folder / name).read_text())["commit"]
    assert f">commit</th><td>{commit}<" in (ROOT / f"static/{folder}/report.html").read_text()


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_each_picture_has_the_hash_of_its_numbers_and_can_be_read_in_a_narrow_window(name):
    """At a width of 800 pixels no letter is smaller than 12; a title; at most five kinds of marks in a legend."""
    numbers, height, draw = pictures.PICTURES[name]
    digest = hashlib.sha256((ROOT / numbers).read_bytes()).hexdigest()
    assert b"Description\0" + digest.encode() in (ROOT / f"static/{name}.png").read_bytes(), "draw it again"
    with matplotlib.rc_context(pictures.STYLE):
        draw(figure := Figure(figsize=(pictures.WIDTH, height)))
    sizes = [text.get_fontsize() for text in figure.findobj(Text) if text.get_text()]
    assert min(sizes) / 72 * 800 / pictures.WIDTH >= 12
    assert figure.get_suptitle() or any(axes.get_title() + axes.get_title("left") for axes in figure.axes)
    assert all(len(legend.get_texts()) <= 5 for legend in figure.findobj(Legend))


def test_pictures_show_the_numbers_of_the_tables_of_their_studies():
    """benchmark/results/methods/methods.md and critic/critic.md, which were made by code that is gone."""
    pictures.draw_methods(figure := Figure())
    assert {text.get_text(): text.xy for text in figure.axes[0].texts} == {
        "one sample, no training": pytest.approx((0.0, 1.71), abs=0.005),
        "best of 64 samples": pytest.approx((3.17, 2.58), abs=0.005),
        "DPO on a long leash\n(β = 0.3)": pytest.approx((3.82, 2.39), abs=0.005),
        "DPO on a short leash\n(β = 1)": pytest.approx((0.47, 2.22), abs=0.005),
        "PPO on a long leash\n(KL coefficient 0.2)": pytest.approx((1.63, 2.49), abs=0.005),
        "PPO on a short leash\n(KL coefficient 0.6)": pytest.approx((0.44, 2.17), abs=0.005),
    }
    pictures.draw_critic(figure := Figure())
    points = [container[0] for container in figure.axes[0].containers]
    assert [point.get_xdata()[0] for point in points] == pytest.approx([2.2, 1.2, 0.9, 0.4, -2.4, -3.8], abs=0.05)
    assert [point.get_markerfacecolor() != "white" for point in points] == [True] + [False] * 5


def test_examples_are_those_of_the_newest_runs(tmp_path, monkeypatch):
    """Without a newest run that has finished, nothing is taken."""
    monkeypatch.setattr(pictures, "STATIC", tmp_path)
    monkeypatch.setattr(pictures, "EXAMPLES", [("", "train_policy__", "policy_", ["meta.json"])])
    monkeypatch.setattr(pictures, "REPORTS", {"": "train_policy__"})
    old, new = (make_run(tmp_path / f"train_policy__{number}", traced=False) / "meta.json" for number in (2, 1))
    finished = old.read_text().replace("{", '{"finished": true, ', 1)
    old.write_text(finished)
    os.utime(old, (0, 0))
    with pytest.raises(InputError, match=r"the newest run train_policy__. is missing or not finished"):
        pictures.take_examples(tmp_path)
    assert not (taken := tmp_path / "policy_meta.json").exists()
    new.write_text(finished)
    pictures.take_examples(tmp_path)
    assert taken.read_text() == finished
    assert ">run</th><td>train_policy__1<" in (tmp_path / "report.html").read_text()


def test_large_traces_are_thinned(tmp_path, monkeypatch):
    folder = make_run(tmp_path / "a")
    monkeypatch.setattr(report.page, "TRACE_BYTES", 3_000)
    page = write_report(folder)
    assert [update["update"] for update in data_of(page)["updates"]] == [0, 5]
    assert "Traces of 1 more updates were kept" in page


def test_a_run_without_traces_says_so_and_has_curves(tmp_path):
    """That of an evaluation has a point for each."""
    folder = make_run(tmp_path / "a", traced=False)
    write_meta(folder, "rlvr_policy")
    meta = json.loads((folder / "meta.json").read_text()) | {"results": {"eval/pass@2": 0.75}}
    (folder / "meta.json").write_text(json.dumps(meta))
    (folder / "metrics.csv").write_text("step,eval/pass@2\n0,0.25\n1,0.25\n2,0.5\n3,0.5\n")
    page = write_report(folder)
    data = data_of(page)
    assert "<h1>PPO on texts</h1>" in page and "There are no traces" in page and data["updates"] == []
    [line] = data["figures"][0]["data"]
    assert (line["x"], line["y"]) == ([0, 2, 4], [0.25, 0.5, 0.75])


HEADLINES = {  # script, arguments of rewards, each metric of the first update and of the last ones
    "A reward model's score rose from 0.5 to 2.4; what people would say, the gold score, fell from 6.0 to 0.1": (
        *("train_policy", REWARDS),
        {"objective/score": (0.51, 2.4), "objective/scores": (0.51, 2.4), "objective/gold_scores": (6, 0.1)},
    ),
    "The score stayed at 0.25; right or wrong, which only watches, rose from -0.5 to 1.0": (
        *("tldr_policy", {"function": "a:b", "monitor": "a.b:right_or_wrong"}),
        {"objective/kl": (-0.001, 9), "objective/scores": (0.2501, 0.2502), "objective/right_or_wrong": (-0.5, 1)},
    ),
    "The share of correct answers to problems that no update saw rose from 57 % to 85 %; "
    "the score fell from 0.5 to -2.0": (
        *("rlvr_policy", {"verifier": "boxed"}),
        {"objective/scores": (0.5, -2), "eval/boxed": (0.57, 0.85)},
    ),
    "The share of choices that a reward model gets right rose from 25 % to 50 %; the loss fell from 1.4 to 1.0": (
        *("train_reward", {}),
        {"train/loss": (1.39, 0.98), "train/accuracy": (0.25, 0.5)},
    ),
    "The correlation of a reward model's scores with ratings rose from 0.00 to 0.36": (
        *("train_reward", {}),
        {"train/corr": (-0.004, 0.36)},
    ),
    "The loss fell from 2.1 to 0.9": ("tldr_sft", {}, {"train/sft/loss": (2.1, 0.9)}),
}


@pytest.mark.parametrize("expected", HEADLINES)
def test_the_headline_says_in_words_what_happened(expected, tmp_path):
    """What a run has reached is the mean of its last ten rows, but the last one of evaluations."""
    script, rewards, metrics = HEADLINES[expected]
    write_meta(tmp_path, script, rewards=rewards, task={"posts": "some/where"})
    of_rows = [
        [first, *([first] * 9 + [last] if name.startswith("eval/") else [last + 7, last - 7] * 5)]
        for name, (first, last) in metrics.items()
    ]
    write_table(tmp_path / "metrics.csv", ["step", *metrics], *zip(range(11), *of_rows, strict=True))
    page = write_report(tmp_path)
    (found,) = re.findall("<h1>(.*?)</h1>", page)
    assert html.unescape(found).replace("\xa0", " ") == expected and f"<title>{found}</title>" in page
    method = {"train_reward": "A reward model", "tldr_sft": "Supervised fine-tuning"}.get(script, "PPO")
    assert f'<p class="story">{method} on where (chapter ' in page and "-0.00 →" not in page


def test_small_curves_reach_0():
    assert report.page.points([2.0, -2.0, 0.0]) == "0.0,0.0 50.0,20.0 100.0,10.0"
    assert report.page.points([0.5, 1.0]) == "0.0,10.0 100.0,0.0"
    assert len(report.page.points([1.0] * 1_501).split()) <= 100


def write_answers(folder: Path, script: str, gains: list[float], gold_gains: list[float] | None) -> None:
    """Held-out answers before and after, as a run of this script leaves them. At first all have 10, and gold -5."""
    score = {"train_policy": "score", "tldr_policy": "scores", "rlvr_policy": "boxed"}[script]
    gold = "gold" if script == "train_policy" else "gold_scores"
    before, after = (
        [
            {"response": f"{text} {i}", score: 10.0 + share * gain}
            | ({gold: -5.0 + share * gold_gains[i]} if gold_gains else {})
            for i, gain in enumerate(gains)
        ]
        for text, share in (("worse", 0), ("better", 1))
    )
    queries = [{"prompt" if script == "rlvr_policy" else "query": f"query {i}"} for i in range(len(gains))]
    if script == "train_policy":
        sides = [
            {f"{model} {name}".removesuffix(" response"): value for name, value in row.items()}
            for model, rows in (("base", before), ("policy", after))
            for row in rows
        ]
        rows = zip(queries, sides[: len(gains)], sides[len(gains) :], strict=True)
        write_rows(folder / "comparison.jsonl", *(query | base | policy for query, base, policy in rows))
    else:
        for name, rows in (("evaluation_before", before), ("evaluation", after)):
            write_rows(folder / f"{name}.jsonl", *(query | row for query, row in zip(queries, rows, strict=True)))


# Which query has the median gain, its scores before and after, and what the page says of all. Equal gains of the gold
# score are in the order of the score: in the first row -1 (2), 2 (1), 2 (3), 2 (4), 8 (-9).
MEDIANS = [
    ([8, 2, 2, -1, 2], 4, "score 10.00, gold score -5.00", "score 13.00, gold score -3.00", "gold score", 4, "."),
    (
        [0, 0, 0, 5, -1],
        3,
        "score 10.00, gold score -5.00",
        "score 12.00, gold score 0.00",
        "gold score",
        1,
        " of those",
    ),
    (None, 3, "score 10.00", "score 12.00", "score", 4, "."),
]


@pytest.mark.parametrize("script", ["train_policy", "tldr_policy", "rlvr_policy"])
@pytest.mark.parametrize(("gold", "chosen", "before", "after", "word", "rose", "end"), MEDIANS)
def test_the_example_has_the_median_gain(script, gold, chosen, before, after, word, rose, end, tmp_path):
    write_meta(tmp_path, script, rewards={"monitor": "a:gold_scores", "verifier": "boxed"})
    write_answers(tmp_path, script, [-9, 1, 4, 2, 3], gold)
    example = re.search(r'<article class="card example">(.*?)</article>', write_report(tmp_path), re.DOTALL)[1]
    assert re.findall('class="text.*?">(.*?)<', example) == [
        f"{text} {chosen}" for text in ("query", "worse", "better")
    ]
    assert re.findall("<b .*?>(.*?)<", example) == [f"before training, {before}", f"after training, {after}"]
    assert (
        f"Of 5 queries that were answered before and after training, the {word} of the answer rose for {rose} and "
        in example
    )
    assert f"fell for 1. This one has the median gain{end}" in example


def test_a_run_that_has_just_begun_or_writes_on_has_a_page(tmp_path):
    folder = make_run(tmp_path / "a")
    text = (folder / "metrics.csv").read_text()
    (folder / "metrics.csv").write_text(text[: text.index("\n5,") + 3])  # the row of the last trace is cut off
    page = write_report(folder)
    assert "not finished: 5 steps are logged" in page and len(data_of(page)["figures"][0]["data"][0]["x"]) == 5
    assert [update["update"] for update in data_of(page)["updates"]] == [0, 3]
    (folder / "metrics.csv").unlink()
    assert "has logged nothing yet" in write_report(folder)


def test_the_newest_run_is_taken_and_a_folder_that_is_none_is_refused(in_a_fresh_folder):
    with pytest.raises(InputError, match="there is no run below runs"):
        report.report(report.Args())
    for name in ("old", "new"):
        make_run(Path("runs") / name, traced=False)
    assert report.report(report.Args()) == Path("runs/new/report.html")
    with pytest.raises(InputError, match="is not the folder of a run"):
        report.report(report.Args(run="runs"))


# ---- In a browser ----------------------------------------------------------------------------------------------


@pytest.fixture
def shown(opened):
    """A function (folder of a run, options of the context) -> its page in a browser."""

    def show(folder: Path, **options):
        write_report(folder)
        return opened(folder / "report.html", **options)

    return show


def signs(page, *wanted: str) -> list[str]:
    """Which of these classes each token of the response has."""
    classes = [token.get_attribute("class").split() for token in page.locator(".token").all()]
    return [" ".join(name for name in of_token if name in wanted) for of_token in classes]


def background(page, token: int) -> str:
    return page.locator(".token").nth(token).evaluate("e => e.style.backgroundColor")


@pytest.mark.parametrize("stopped", [(True, False), (False, False)])
def test_where_the_page_opens(stopped, shown, tmp_path):
    """Where the advantage times 1 less the probability is farthest from 0.

    Of all scored tokens after the first update; in responses that end, if there are any.
    """
    folder = make_run(tmp_path / "a")
    for update in UPDATES:
        path = traces.path_of(folder, update)
        advantages = tensors_of(path)["epochs.advantages"]
        advantages[:, 1] += 9  # of the response that doesn't end
        change(path, **{"episodes.stopped": torch.tensor(stopped), "epochs.advantages": advantages})
    places = [
        ((tokens["advantages"].abs() * (1 - tokens["logprobs"].exp()))[episode, token].item(), update, episode, token)
        for update in UPDATES[1:]
        for tokens in [written(folder, update)]
        for episode, count in enumerate((3, 5))
        for token in range(count)
        if stopped[episode] or not any(stopped)
    ]
    _, update, episode, token = max(places)
    page = shown(folder)
    assert page.locator("#update-number").inner_text() == str(update)
    reason = page.locator("#reason").text_content()
    assert reason.startswith(f"The page opens on update {update}, episode {episode + 1}, token {token + 1}. ")
    assert ("in responses that end" in reason) == any(stopped)


def test_the_token_view_follows_the_reader(shown, tmp_path):
    folder = make_run(tmp_path / "a")
    page = shown(folder)
    trace = written(folder, 5)

    # The slider changes the update.
    page.select_option("#episode", "0")
    page.locator("#update").press("End")
    assert page.locator("#update-number").inner_text() == "5"
    assert page.locator(".response").inner_text().split() == [*WORDS]

    # Colours follow the picked quantity: their sign is that of its distance from the middle.
    for name, middle in (("kl", 0), ("ratio", 1), ("advantages", 0)):
        page.select_option("#quantity", name)
        for token in range(5):
            below = trace[name][0, token] < middle
            assert background(page, token).startswith("rgba(213, 94, 0" if below else "rgba(0, 114, 178")

    # What was cut is struck, and the stop token marked; a screen reader hears buttons with their number.
    assert signs(page, "cut", "stop") == ["", "", "stop", "cut", "cut"]
    token = page.get_by_role("button", name="three, advantage ")
    heard = float(token.get_attribute("aria-label").split()[-1])
    assert heard == pytest.approx(trace["advantages"][0, 2].item(), abs=5e-4)

    # A click, or Enter, chooses a token, whose derivation is shown.
    token.click()
    assert token.get_attribute("aria-pressed") == "true" and page.locator("[aria-pressed=true]").count() == 1
    assert "token 3" in page.locator("#token-title").inner_text()
    page.locator(".token").nth(1).press("Enter")
    assert "token 2" in page.locator("#token-title").inner_text()
    line = page.locator("#lines .line").first.inner_text()
    logprob = float(re.search(r"-?\d+\.\d+", line)[0])
    assert logprob == pytest.approx(trace["logprobs"][0, 1].item(), rel=1e-3)
    assert "NaN" not in page.locator("#lines").inner_text()  # the KL was recorded, but cannot be derived

    # Who sees no colours sees a line that is solid or dotted.
    styles = "tokens => tokens.map(x => [getComputedStyle(x).borderBottomStyle, x.style.backgroundColor])"
    for style, color in page.locator(".token").evaluate_all(styles):
        assert (style == "dotted") == color.startswith("rgba(213")

    # Texts of the run are text.
    page.select_option("#episode", "1")
    assert EVIL in page.locator(".response").inner_text()
    assert page.evaluate("window.hacked") is None


def test_curves_say_their_numbers(shown, tmp_path):
    folder = make_run(tmp_path / "a")
    page = shown(folder)
    rows = metrics_of(folder)
    page.locator("#plot-1 svg").hover()
    place, told = page.locator("#plot-1 .readout > *").all_inner_texts()
    step = int(place.removeprefix("update "))
    name, value = told.split()
    assert name == "KL" and float(value) == pytest.approx(rows[step]["objective/kl"], rel=1e-5)
    assert "target 6" in page.locator("#plot-1").text_content()
    page.locator("#plot-1 svg").press("ArrowRight")
    assert page.locator("#plot-1 .place").inner_text() == f"update {step + 1}"


def test_the_first_quantity_that_is_shown_says_something(shown, tmp_path):
    """All advantages of a batch may be 0."""
    folder = make_run(tmp_path / "a", "rlvr_policy")
    edit_traces(folder, advantages=torch.zeros(2, 5))
    page = shown(folder)
    assert page.locator("#quantity").input_value() == "kl" and background(page, 0)
    page.select_option("#quantity", "advantages")
    assert background(page, 0) == "rgba(0, 114, 178, 0)"


def test_what_the_losses_do_not_count_is_marked(shown, tmp_path):
    """Of four tokens with a value a tool wrote one, which is in no mask, and one comes after the end."""
    folder = make_run(tmp_path / "a", "tldr_policy")
    place = torch.arange(5).repeat(2, 1)
    edit_traces(folder, tool=place == 1, value_mask=place < 4, scored=(place == 0) | (place == 2))
    page = shown(folder)
    page.select_option("#episode", "0")
    assert signs(page, "stop", "masked", "tool") == ["", "masked tool", "stop", "masked"]


@pytest.mark.parametrize("traced", [True, False])
def test_the_first_screen_says_what_happened(traced, shown, tmp_path):
    """The headline, numbers before and after, a query with its answers, and a token's derivation or a curve."""
    folder = make_run(tmp_path / "a", traced=traced)
    write_answers(folder, "train_policy", [1, 2, 3], [4, 5, 6])
    page = shown(folder, viewport={"width": 1200, "height": 900})
    scores = [row["objective/scores"] for row in metrics_of(folder)]
    tile = page.locator(".tile", has=page.get_by_text("Score", exact=True))
    before, after = tile.locator("b").inner_text().split(" → ")
    assert (float(before), float(after)) == pytest.approx((scores[0], sum(scores) / 6), abs=0.006)
    assert page.locator("h1").inner_text().startswith("A reward model's score ")
    assert "Gold score" in page.locator(".tiles").inner_text()
    seen = [page.locator("h1"), tile.locator("polyline"), page.locator(".example")]
    if traced:
        seen += [page.locator(".token.chosen"), *page.locator("#lines .line").all()[:4]]
    else:
        seen += [page.locator("#plot-0")]
    for element in seen:
        place = element.bounding_box()
        assert place["y"] >= 0 and place["y"] + place["height"] <= 900 and place["x"] + place["width"] <= 1200
    assert page.locator("#plot-1").is_visible() and tile.locator("polyline").bounding_box()["width"] > 50


def test_on_a_phone_long_parts_are_folded_at_first(shown, tmp_path):
    folder = make_run(tmp_path / "a")
    write_answers(folder, "train_policy", [*range(20)], [*range(20)])
    page = shown(folder, viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    plot, text = page.locator("#plot-1"), page.locator("#texts dd", has_text="worse 7")
    assert not plot.is_visible() and not text.is_visible()
    page.locator("#all-curves > summary").tap()
    page.locator("#texts summary", has_text="better 7").tap()
    assert text.is_visible()
    page.wait_for_function("document.querySelector('#plot-1 .curve').getBoundingClientRect().width > 200")


def test_on_a_phone_the_derivation_is_below_the_token_that_was_tapped(shown, tmp_path):
    folder = make_run(tmp_path / "a")
    page = shown(folder, viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    page.locator(".token").nth(1).scroll_into_view_if_needed()
    page.locator(".token").nth(1).tap()
    token, panel = (page.locator(name).bounding_box() for name in (".token.chosen", "#panel"))
    assert token["y"] > 0 and token["y"] + token["height"] <= panel["y"]
    assert panel["y"] + panel["height"] <= 845 and page.locator("#lines .line").first.is_visible()
