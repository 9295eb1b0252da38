"""report.html: its numbers are those of the run, its texts are text, and a browser shows what it should."""

import csv
import dataclasses
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from runs import explained_metrics

from ppo_rlhf.lib import traces
from ppo_rlhf.lib.errors import InputError
from ppo_rlhf.report import __main__ as report

EVIL = "</script><script>window.hacked = 1</script><b>&amp; \x1b[31mred"
UPDATES = (0, 3, 5)
SCRIPTS = {1: "train_policy", 2: "tldr_policy", 3: "rlvr_policy"}
NUMBERS = ("kl", "logprobs", "advantages", "ratio", "values")
REWARDS = {"trained_model": "models/r/reward", "monitor": "a.b:gold_scores", "adaptive_kl": {"target": 6.0}}
ARGS = {
    1: {"preset": "tales", "ppo": {"cliprange": 0.2}, "rewards": REWARDS},
    2: {"preset": EVIL, "ppo": {}, "rewards": REWARDS | {"missing_eos": "replace"}, "base_model": "models/fine/sft"},
    3: {"preset": "sums", "ppo": {"samples_per_prompt": 2}, "rewards": {"verifier": "sums"}},
}


def make_run(runs: Path, name: str, chapter: int = 1, traced: bool = True, seed: int = 0) -> Path:
    """The folder of a run that never was: six updates, and of three of them two episodes of five tokens."""
    folder = runs / name
    folder.mkdir(parents=True)
    meta = {
        "script": SCRIPTS[chapter],
        "args": ARGS[chapter],
        "sizes": {"updates": 6},
        "results": {"last_kl": 1.5},
        "finished": chapter != 3,
    }
    (folder / "meta.json").write_text(json.dumps(meta | {"wall_time": 90.0, "commit": "abc", "device": "cpu"}))
    generator = torch.Generator().manual_seed(seed)
    names = ["objective/scores", "objective/gold_scores", "objective/kl", "some/other"]
    lines = [",".join(["step", *names])]
    lines += [",".join(map(str, [step, *torch.rand(4, generator=generator).tolist()])) for step in range(6)]
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n")
    for update in UPDATES if traced else ():
        tokens = {name: torch.randn(2, 5, generator=generator) for name in NUMBERS}
        tokens["ids"] = torch.arange(10).view(2, 5)
        ends = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]).bool()
        tokens |= {"scored": ends} if chapter == 1 else {"mask": ends}
        tokens |= {"value_mask": torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]).bool()} if chapter == 2 else {}
        episodes = {"scores": torch.tensor([0.25, -1.0]), "stopped": torch.tensor([True, False])}
        episodes |= {"groups": torch.tensor([7, 7])} if chapter == 3 else {}
        pieces = [[f" {word}{update}" for word in ("one", "two", "three", "four", "five")]]
        pieces.append([EVIL, "\n", " b", "", " c"])
        queries = ["the same query", f"query {update} {EVIL}"]
        texts = {"reference": [EVIL, "fine"]} if chapter == 2 else {}
        (folder / "traces").mkdir(exist_ok=True)
        parts = {"tokens": tokens, "episodes": episodes, "texts": texts}
        traces.write(folder, traces.Trace(update=update, again=False, queries=queries, responses=pieces, **parts))
    return folder


def edit_traces(folder: Path, change: Callable[[traces.Trace], None]) -> None:
    for update in UPDATES:
        trace = traces.read(folder, update)
        change(trace)
        traces.write(folder, trace)


def data_of(page: str) -> dict:
    """What the page hands to its script."""
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(found)


def write_report(folder: Path, **more: str) -> str:
    return report.report(report.Args(run=str(folder), **more)).read_text()


@pytest.mark.parametrize("chapter", [1, 2, 3])
def test_the_numbers_of_the_page_are_those_of_the_run(chapter, tmp_path):
    folder = make_run(tmp_path, "a", chapter)
    data = data_of(write_report(folder))
    rows = list(csv.DictReader((folder / "metrics.csv").open()))
    lines = {line["name"]: line for figure in data["figures"] for line in figure["data"]}
    assert set(lines) == {"objective/scores", "objective/gold_scores", "objective/kl"}
    (targets,) = (figure["targets"] for figure in data["figures"] if figure["data"][0]["name"] == "objective/kl")
    assert targets == ([6.0] if "adaptive_kl" in ARGS[chapter]["rewards"] else [])
    for name, line in lines.items():
        assert line["x"] == [float(row["step"]) for row in rows]
        assert line["y"] == pytest.approx([float(row[name]) for row in rows], rel=1e-7)
    assert [update["update"] for update in data["updates"]] == list(UPDATES)
    for update in data["updates"]:
        trace = traces.read(folder, update["update"])
        for i, episode in enumerate(update["episodes"]):
            counts = (5, 4, 3)[chapter - 1] if i == 0 else 5  # chapter 1 trains on what it cuts, too
            assert episode["places"] == list(range(counts))
            for name in NUMBERS:
                expected = trace.tokens[name][i, :counts].tolist()
                assert episode["tokens"][name] == pytest.approx(expected, rel=1e-5)
            assert episode["tokens"]["ids"] == trace.tokens["ids"][i, :counts].tolist()
            assert episode["numbers"]["scores"] == trace.episodes["scores"][i]
            assert episode["query"] == trace.queries[i].replace("\x1b", "␛")


def test_what_shows_the_danger_of_sampling_ahead_has_a_panel(tmp_path):
    """Each metric of rlvr/asynchronous.py, but for a time that is there under two names."""
    names = {name for name in explained_metrics(3) if name.startswith(("async/", "time/"))} - {"time/from_scratch"}
    names |= {"objective/sampler_gap", "train/staleness_mean", "val/first_ratio_gap"}
    folder = make_run(tmp_path, "a", chapter=3)
    (folder / "metrics.csv").write_text(",".join(["step", *names]) + "\n" + ",".join("0" * (len(names) + 1)) + "\n")
    assert {line["name"] for figure in data_of(write_report(folder))["figures"] for line in figure["data"]} == names


@pytest.mark.parametrize(
    ("args", "columns", "drawn"),
    [
        ({"rewards": {"verifier": "mine:right"}}, ["eval/mine:right", "eval/pass@2"], [0, 1]),
        ({"ppo": {"samples_per_prompt": 2}}, ["val/groups_zero_std", "lr"], [0, 1]),
        ({"ppo": {"samples_per_prompt": 1}}, ["val/groups_zero_std", "lr"], [1]),  # groups of one
    ],
)
def test_which_metrics_are_drawn(args, columns, drawn, tmp_path):
    folder = make_run(tmp_path, "a", chapter=3)
    (folder / "meta.json").write_text(json.dumps({"script": SCRIPTS[3], "args": ARGS[3] | args}))
    (folder / "metrics.csv").write_text(f"step,{','.join(columns)}\n0,0.5,0.75\n")
    lines = [line["name"] for figure in data_of(write_report(folder))["figures"] for line in figure["data"]]
    assert lines == [columns[i] for i in drawn]


def test_texts_of_a_run_are_text(tmp_path):
    folder = make_run(tmp_path, "a", chapter=2)
    row = {"query": "half a character \ud83d", "response": EVIL, "reference": "r", "scores": 0.5}
    (folder / "evaluation.jsonl").write_text(json.dumps(row) + "\n")
    page = write_report(folder)
    assert EVIL not in page and "\x1b" not in page and "<script>window.hacked" not in page
    assert "&lt;/script&gt;&lt;script&gt;window.hacked = 1" in page and "half a character ?" in page


def held_out(page: str) -> list[dict[str, str]]:
    """What the page says of each held-out query."""
    cards = page.split('id="texts"')[1].split("</section>")[0].split("<article")[1:]
    return [dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", card)) for card in cards]


def write_rows(path: Path, *rows: dict) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_held_out_post_has_the_summaries_before_and_after(tmp_path):
    folder = make_run(tmp_path, "a", chapter=2)
    post = {"query": "a post", "reference": "in short", "reference_scores": 1.0}
    sft, other = post | {"response": "of SFT", "scores": -0.5}, post | {"query": "another post", "response": "x"}
    write_rows(folder / "evaluation_before.jsonl", sft)
    before = {"query": "a post", "reference": "in short", "reference scores": "1.0"}
    before |= {"response before PPO": "of SFT", "scores before PPO": "-0.5"}
    assert held_out(write_report(folder)) == [before]  # a run that is not finished
    write_rows(folder / "evaluation.jsonl", other, post | {"response": "after", "scores": 2.5, "gold_scores": 3.0})
    one, both = held_out(write_report(folder))
    assert both == before | {"response": "after", "scores": "2.5", "gold scores": "3.0"}
    assert one["query"] == "another post" and one["response"] == "x" and "scores" not in one


def test_damaged_answers_are_named(tmp_path):
    folder = make_run(tmp_path, "a", chapter=2)
    for text in ("{}\n", "[" * 100_000):
        (folder / "evaluation.jsonl").write_text(text)
        with pytest.raises(InputError, match=r"evaluation\.jsonl is damaged"):
            write_report(folder)


def test_a_trace_with_fewer_numbers_than_texts_is_named(tmp_path):
    folder = make_run(tmp_path, "a")
    edit_traces(folder, lambda x: x.tokens.update(kl=x.tokens["kl"][:, :2]))
    with pytest.raises(InputError, match=r"traces/0\.safetensors is damaged: its numbers do not fit its texts"):
        write_report(folder)


def test_where_no_page_can_be_written_nothing_is_left(tmp_path):
    folder, elsewhere = make_run(tmp_path, "a"), tmp_path / "folder"
    elsewhere.mkdir()
    for out, message in ((elsewhere, "/folder is a folder"), (tmp_path / "no/such/x.html", "there is no folder")):
        with pytest.raises(InputError, match=f"--out .*{message}"):
            write_report(folder, out=str(out))
    assert sorted(os.listdir(tmp_path)) == ["a", "folder"] and os.listdir(elsewhere) == []


def test_a_page_needs_no_network_and_fits(tmp_path):
    page = write_report(make_run(tmp_path, "a"))
    page = page.replace("http://www.w3.org/2000/svg", "")  # a name, which nothing loads
    assert not re.findall(r"(?:src|href)\s*=\s*[\"'](?!#)|https?://|@import|url\(", page)
    assert len(page.encode()) < 200_000


def test_large_traces_are_thinned(tmp_path, monkeypatch):
    folder = make_run(tmp_path, "a")
    monkeypatch.setattr(report.page, "TRACE_BYTES", 3_000)
    page = write_report(folder)
    assert [update["update"] for update in data_of(page)["updates"]] == [0, 5]
    assert "Traces of 1 more updates were kept" in page


@pytest.mark.parametrize("script", ["train_policy", "tldr_sft"])
def test_a_run_without_traces_says_so_and_has_curves(script, tmp_path):
    folder = make_run(tmp_path, "a", traced=False)
    (folder / "meta.json").write_text(json.dumps({"script": script, "args": {}, "finished": True}))
    (folder / "metrics.csv").write_text("step,train/loss,objective/kl\n0,1.5,1.5\n1,1.25,1.25\n")
    page = write_report(folder)
    assert f"<h1>{script} on texts</h1>" in page and "There are no traces" in page
    data = data_of(page)
    assert data["updates"] == [] and data["figures"][0]["data"][0]["y"] == [1.5, 1.25]


def test_a_run_that_has_just_begun_or_writes_on_has_a_page(tmp_path):
    folder = make_run(tmp_path, "a", chapter=3)
    text = (folder / "metrics.csv").read_text()
    (folder / "metrics.csv").write_text(text[: text.index("\n5,") + 3])  # the row of the last trace is cut off
    page = write_report(folder)
    assert "not finished: 5 steps are logged" in page and len(data_of(page)["figures"][0]["data"][0]["x"]) == 5
    assert [update["update"] for update in data_of(page)["updates"]] == [0, 3]
    (folder / "metrics.csv").unlink()
    assert "has logged nothing yet" in write_report(folder)


def test_the_newest_run_is_taken_and_a_folder_that_is_none_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="there is no run below runs"):
        report.report(report.Args())
    make_run(tmp_path / "runs", "old")
    make_run(tmp_path / "runs", "new")
    assert report.report(report.Args()) == Path("runs/new/report.html")
    with pytest.raises(InputError, match="is not the folder of a run"):
        report.report(report.Args(run=str(tmp_path)))
    (tmp_path / "runs/new/metrics.csv").write_text("step,objective/kl\n0,much\n")
    with pytest.raises(InputError, match=r"metrics\.csv is damaged"):
        report.report(report.Args())


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


def test_the_token_view_follows_the_reader(shown, tmp_path):
    folder = make_run(tmp_path, "a")
    page = shown(folder)
    trace = traces.read(folder, 5)

    # The page opens in the middle of training. The slider changes the update.
    assert page.locator("#update-number").inner_text() == "3"
    page.select_option("#episode", "0")
    page.locator("#update").press("End")
    assert page.locator("#update-number").inner_text() == "5"
    assert page.locator(".response").inner_text().split() == ["one5", "two5", "three5", "four5", "five5"]

    # Colours follow the picked quantity: their sign is that of its distance from the middle.
    for name, middle in (("kl", 0), ("ratio", 1), ("advantages", 0)):
        page.select_option("#quantity", name)
        for token in range(5):
            below = trace.tokens[name][0, token] < middle
            assert background(page, token).startswith("rgba(213, 94, 0" if below else "rgba(0, 114, 178")

    # What was cut is struck, and the stop token marked; a screen reader hears buttons with their number.
    assert signs(page, "cut", "stop") == ["", "", "stop", "cut", "cut"]
    token = page.get_by_role("button", name="three5, advantage ")
    heard = float(token.get_attribute("aria-label").split()[-1])
    assert heard == pytest.approx(trace.tokens["advantages"][0, 2].item(), abs=5e-4)

    # A click, or Enter, chooses a token, whose derivation is shown.
    token.click()
    assert token.get_attribute("aria-pressed") == "true" and page.locator("[aria-pressed=true]").count() == 1
    assert "token 3" in page.locator("#token-title").inner_text()
    page.locator(".token").nth(1).press("Enter")
    assert "token 2" in page.locator("#token-title").inner_text()
    line = page.locator("#lines .line").first.inner_text()
    logprob = float(re.search(r"-?\d+\.\d+", line)[0])
    assert logprob == pytest.approx(trace.tokens["logprobs"][0, 1].item(), rel=1e-3)
    assert "NaN" not in page.locator("#lines").inner_text()  # the KL was recorded, but cannot be derived

    # Who sees no colours sees a line that is solid or dotted.
    styles = "tokens => tokens.map(x => [getComputedStyle(x).borderBottomStyle, x.style.backgroundColor])"
    for style, color in page.locator(".token").evaluate_all(styles):
        assert (style == "dotted") == color.startswith("rgba(213")

    # Texts of the run are text.
    page.select_option("#episode", "1")
    assert EVIL.replace("\x1b", "␛") in page.locator(".response").inner_text()
    assert page.evaluate("window.hacked") is None


def test_curves_say_their_numbers(shown, tmp_path):
    folder = make_run(tmp_path, "a")
    page = shown(folder)
    rows = list(csv.DictReader((folder / "metrics.csv").open()))
    page.locator("#plot-1 svg").hover()
    place, told = page.locator("#plot-1 .readout > *").all_inner_texts()
    step = int(place.removeprefix("update "))
    name, value = told.split()
    assert name == "objective/kl" and float(value) == pytest.approx(float(rows[step]["objective/kl"]), rel=1e-5)
    assert "target 6" in page.locator("#plot-1").text_content()
    page.locator("#plot-1 svg").press("ArrowRight")
    assert page.locator("#plot-1 .place").inner_text() == f"update {step + 1}"


def test_what_is_not_known_of_an_episode_has_no_colour(shown, tmp_path):
    """Of a query that is answered again there is no ratio: it is not trained on."""
    folder = make_run(tmp_path, "a")
    trace = traces.read(folder, 0)
    tokens = {"kl": trace.tokens["kl"], "scored": trace.tokens["scored"]}
    traces.write(folder, dataclasses.replace(trace, again=True, tokens=tokens, queries=["again"] * 2))
    page = shown(folder)
    page.locator("#update").press("Home")
    page.select_option("#episode", "2")
    assert page.locator(".query.text").last.inner_text() == "again"
    for quantity, known in (("kl", True), ("ratio", False)):
        page.select_option("#quantity", quantity)
        assert (page.locator(".unknown").count() == 0) == known == bool(background(page, 0))


def test_the_first_quantity_that_is_shown_says_something(shown, tmp_path):
    """All advantages of a batch may be 0."""
    folder = make_run(tmp_path, "a", chapter=3)
    edit_traces(folder, lambda x: x.tokens.update(advantages=torch.zeros(2, 5)))
    page = shown(folder)
    assert page.locator("#quantity").input_value() == "kl" and background(page, 0)
    page.select_option("#quantity", "advantages")
    assert background(page, 0) == "rgba(0, 114, 178, 0)"


def test_what_the_losses_do_not_count_is_grey(shown, tmp_path):
    """Chapter 2: three tokens, and the state after the end, which the critic learns."""
    folder = make_run(tmp_path, "a", chapter=2)
    page = shown(folder)
    page.select_option("#episode", "0")
    assert signs(page, "stop", "masked") == ["", "", "stop", "masked"]
    shade = "e => getComputedStyle(e).color"
    counts, masked = (page.locator(".token").nth(i).evaluate(shade) for i in (0, 3))
    assert counts != masked == page.locator(".query.text").last.evaluate(shade)


def test_what_a_tool_wrote_has_a_wavy_line(shown, tmp_path):
    """It is in no mask, and it is shown all the same, but not struck."""
    folder = make_run(tmp_path, "a", chapter=3)
    tool = torch.tensor([[0, 1, 0, 0, 0], [0, 0, 0, 0, 0]]).bool()
    edit_traces(folder, lambda x: x.tokens.update(tool=tool, mask=x.tokens["mask"] & ~tool))
    page = shown(folder)
    page.select_option("#episode", "0")
    assert signs(page, "tool")[:3] == ["", "tool", ""]
    style = "e => (style => [style.textDecorationStyle, style.textDecorationLine])(getComputedStyle(e))"
    assert page.locator(".token").nth(1).evaluate(style) == ["wavy", "underline"]


def test_the_first_screen_says_what_happened(shown, tmp_path):
    """Score and judge before and after; one query and its answers; curves."""
    folder = make_run(tmp_path, "a")
    for_each = {"base": "worse", "base score": 0.5}
    rows = [for_each | {"query": f"query {i}", "policy": f"better {i}", "policy score": i} for i in (1, 2, -3)]
    write_rows(folder / "comparison.jsonl", *rows)
    page = shown(folder, viewport={"width": 1280, "height": 900})
    scores = [float(row["objective/scores"]) for row in csv.DictReader((folder / "metrics.csv").open())]
    tile = page.locator(".tile", has=page.get_by_text("Score", exact=True))
    before, after = tile.locator("b").inner_text().split(" → ")
    assert (float(before), float(after)) == pytest.approx((scores[0], sum(scores) / 6), abs=0.006)
    example = page.locator(".example").inner_text()
    assert "query 1" in example and "worse" in example and "better 1" in example and "score 0.50" in example
    assert page.locator("#outcome .plot").count() == 2
    below = page.locator("#outcome").bounding_box()
    assert below["y"] + below["height"] < 900


def test_a_curve_of_evaluations_has_a_point_for_each(tmp_path):
    folder = make_run(tmp_path, "a", chapter=3)
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(meta | {"results": {"eval/pass@2": 0.75}}))
    (folder / "metrics.csv").write_text("step,eval/pass@2\n0,0.25\n1,0.25\n2,0.5\n3,0.5\n")
    [line] = data_of(write_report(folder))["figures"][0]["data"]
    assert (line["x"], line["y"]) == ([0, 2, 4], [0.25, 0.5, 0.75])


def test_on_a_phone_the_derivation_is_below_the_token_that_was_tapped(shown, tmp_path):
    folder = make_run(tmp_path, "a")
    page = shown(folder, viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    page.locator(".token").nth(1).scroll_into_view_if_needed()
    page.locator(".token").nth(1).tap()
    token, panel = (page.locator(name).bounding_box() for name in (".token.chosen", "#panel"))
    assert token["y"] > 0 and token["y"] + token["height"] <= panel["y"]
    assert panel["y"] + panel["height"] <= 845 and page.locator("#lines .line").first.is_visible()


@pytest.mark.parametrize(("chapter", "width", "scheme"), [(2, 360, "dark"), (3, 360, "light")])
def test_the_page_fits_every_window(shown, tmp_path, chapter, width, scheme):
    folder = make_run(tmp_path, "a", chapter)
    page = shown(folder, viewport={"width": width, "height": 800}, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    colors = page.evaluate("[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]")
    brightness = [sum(map(int, re.findall(r"\d+", color)[:3])) for color in colors]
    assert (brightness[0] > brightness[1]) == (scheme == "light")
