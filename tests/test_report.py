"""report.html: its numbers are those of the run, its texts are text, and a browser shows what it should."""

import csv
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from runs import explained_metrics

from ppo_rlhf import report
from ppo_rlhf.lib.base import files
from ppo_rlhf.lib.base.errors import InputError
from ppo_rlhf.lib.services import traces

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
    for name, line in lines.items():
        assert line["x"] == [float(row["step"]) for row in rows]
        assert line["y"] == [float(row[name]) for row in rows]
    (run,) = data["runs"]
    assert [update["update"] for update in run["traces"]] == list(UPDATES)
    for update in run["traces"]:
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


def test_spikes_of_a_long_run_are_drawn_and_all_its_rows_are_counted(tmp_path):
    """Two curves share a panel; each has spikes of one row, up and down, and a row that is not a number."""
    folder, count = make_run(tmp_path, "a", chapter=3), 20_001
    generator, names = torch.Generator().manual_seed(3), ("policy/clipfrac_avg", "val/clipfrac_avg", "lr")
    columns = {name: torch.rand(count, generator=generator).tolist() for name in names}
    spikes = {"policy/clipfrac_avg": (17, 4_003, 19_999), "val/clipfrac_avg": (18, 4_004, 12_345)}
    for name, (up, down, nothing) in spikes.items():
        columns[name][up], columns[name][down], columns[name][nothing] = 1e6, -1e6, math.nan
    rows = (",".join(map(str, [step, *values])) for step, values in enumerate(zip(*columns.values(), strict=True)))
    (folder / "metrics.csv").write_text("\n".join([",".join(["step", *columns]), *rows]) + "\n")
    page = write_report(folder)
    assert "not finished: 20,001 steps are logged" in page and "Points are left out" in page
    lines = {line["name"]: line for figure in data_of(page)["figures"] for line in figure["data"]}
    assert set(lines) == set(columns)
    for name, line in lines.items():
        assert 1_000 < len(line["x"]) <= report.MOST_POINTS + 4 and line["x"] == sorted({*line["x"]})
        assert line["x"][0] == 0 and line["x"][-1] == count - 1 and {*spikes.get(name, ())} <= {*line["x"]}
        csv_says = [columns[name][step] for step in line["x"]]
        assert line["y"] == [None if math.isnan(value) else value for value in csv_says]
    clipped = [lines[name]["x"] for name in spikes]
    assert clipped[0] == clipped[1]  # else pointing at an update would not show both


def test_a_run_that_is_not_long_is_drawn_whole(tmp_path):
    folder = make_run(tmp_path, "a")
    rows = [f"{step},{step % 7}" for step in range(report.MOST_POINTS)]
    (folder / "metrics.csv").write_text("\n".join(["step,lr", *rows]) + "\n")
    page = write_report(folder)
    assert data_of(page)["figures"][0]["data"][0]["x"] == list(range(report.MOST_POINTS))
    assert "Points are left out" not in page


def test_curves_that_are_the_same_are_drawn_once():
    def curve(name: str, *y: float, dotted: bool = False) -> dict:
        return {"name": name, "x": [0, 1], "y": list(y), "color": "", "dotted": dotted}

    curves = [curve("a", 1, 2), curve("b", 1, 3), curve("c", 1, 2), curve("d", 1, 2, dotted=True)]
    curves += [curve("e", 0, 0), curve("f", 0, 0)]
    assert [one["name"] for one in report.joined(curves)] == ["a = c", "b", "d", "e", "f"]


def test_a_panel_says_what_its_metrics_mean(tmp_path):
    """Those of the run's chapter, and of the metrics that it has."""
    folder = make_run(tmp_path, "a", chapter=3)
    (folder / "metrics.csv").write_text("step,objective/kl,val/ratio_var\n0,0.5,0.1\n")
    page = write_report(folder)
    assert "<code>objective/kl; objective/kl_per_token</code>: divergence from the reference by kl_estimator" in page
    assert "<code>val/ratio; ratio_var</code>: mean and variance of the probability ratio" in page
    assert "minus that under the reference" not in page and "loss/policy_avg" not in page
    told = report.meanings(["objective/kl", "eval/own_rule", "eval/mean@16"], 3)
    assert [cell.split(";")[0] for cell, _ in told] == ["objective/kl", "eval/<verifier>", "eval/mean@<n>"]
    assert report.full_names("a/b; c; d; e/f; g") == ["a/b", "a/c", "a/d", "e/f", "e/g"]


def test_what_shows_the_danger_of_sampling_ahead_has_a_panel(tmp_path):
    """Each metric of rlvr/asynchronous.py, and what rlvr/policy.py says of sampler and staleness."""
    names = [name for name in explained_metrics(3) if name.startswith(("async/", "time/"))]
    names.remove("time/from_scratch")  # the same as time
    names += ["objective/sampler_gap", "train/staleness_mean", "val/first_ratio_gap"]
    assert {"async/kl", "async/staleness_mean", "async/ess", "async/rejected_share"} < set(names)
    folder = make_run(tmp_path, "a", chapter=3)
    (folder / "metrics.csv").write_text(",".join(["step", *names]) + "\n" + ",".join("0" * (len(names) + 1)) + "\n")
    drawn = [line["name"] for figure in data_of(write_report(folder))["figures"] for line in figure["data"]]
    assert sorted(drawn) == sorted(names)


def test_the_verifier_of_a_run_is_among_the_held_out_numbers(tmp_path):
    folder = make_run(tmp_path, "a", chapter=3)
    args = ARGS[3] | {"rewards": {"verifier": "my_rewards:right"}}
    (folder / "meta.json").write_text(json.dumps({"script": SCRIPTS[3], "args": args}))
    (folder / "metrics.csv").write_text("step,eval/my_rewards:right,eval/pass@2\n0,0.5,0.75\n")
    (figure,) = data_of(write_report(folder))["figures"]
    assert [line["name"] for line in figure["data"]] == ["eval/my_rewards:right", "eval/pass@2"]


def test_the_target_is_a_line_and_only_where_there_is_one(tmp_path):
    for chapter, targets in ((1, [6.0]), (3, [])):
        data = data_of(write_report(make_run(tmp_path, f"run{chapter}", chapter)))
        (figure,) = (figure for figure in data["figures"] if figure["data"][0]["name"] == "objective/kl")
        assert figure["targets"] == targets


def test_texts_of_a_run_are_text(tmp_path):
    folder = make_run(tmp_path, "a", chapter=2)
    row = {"query": "q", "response": EVIL, "reference": "r", "scores": 0.5}
    (folder / "evaluation.jsonl").write_text(json.dumps(row) + "\n")
    page = write_report(folder)
    assert EVIL not in page and "\x1b" not in page and "<script>window.hacked" not in page
    assert page.count("&lt;/script&gt;&lt;script&gt;window.hacked = 1") == 2  # preset, response


def held_out(page: str) -> list[dict[str, str]]:
    """What the page says of each held-out query."""
    cards = page.split('id="texts"')[1].split("</section>")[0].split("<article")[1:]
    pairs = r"<dt>(.*?)</dt><dd>(.*?)</dd>|<th[^>]*>(.*?)</th><td[^>]*>(.*?)</td>"
    return [{a or c: b or d for a, b, c, d in re.findall(pairs, card)} for card in cards]


def write_rows(path: Path, *rows: dict) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_held_out_post_has_the_summaries_before_and_after_and_those_of_another_run(tmp_path):
    one, two = make_run(tmp_path, "a", chapter=2), make_run(tmp_path, "b", chapter=2, seed=1)
    post = {"query": "a post", "reference": "in short", "reference_scores": 1.0}
    sft, other = post | {"response": "of SFT", "scores": -0.5}, post | {"query": "another post", "response": "x"}
    write_rows(one / "evaluation_before.jsonl", sft)
    before = {"query": "a post", "reference": "in short", "reference scores": "1"}
    before |= {"response before PPO": "of SFT", "scores before PPO": "-0.5"}
    assert held_out(write_report(one)) == [before]  # a run that is not finished
    write_rows(one / "evaluation.jsonl", other, post | {"response": "of a", "scores": 2.5, "gold_scores": 3.0})
    write_rows(two / "evaluation.jsonl", post | {"response": "of b", "scores": 0.25})
    write_rows(two / "evaluation_before.jsonl", sft)
    both, of_one = held_out(write_report(one, other=str(two)))
    after = {"response, run 1": "of a", "response, run 2": "of b", "scores, run 1": "2.5", "scores, run 2": "0.25"}
    assert both == before | after | {"gold scores, run 1": "3"}
    assert of_one["query"] == "another post" and of_one["response, run 1"] == "x" and "response, run 2" not in of_one


def test_damaged_answers_are_named(tmp_path):
    folder = make_run(tmp_path, "a", chapter=2)
    for text in ("[]\n", "{}\n", "{", "[" * 100_000):
        (folder / "evaluation.jsonl").write_text(text)
        with pytest.raises(InputError, match=r"evaluation\.jsonl is damaged"):
            write_report(folder)


def test_answers_may_hold_half_a_character_and_endless_numbers(tmp_path):
    folder = make_run(tmp_path, "a", chapter=2)
    row = {"query": "q", "response": "half \ud83d, one \N{OTTER}", "tokens": 10**400}
    (folder / "evaluation.jsonl").write_text(json.dumps(row) + "\n")
    (answer,) = held_out(write_report(folder))
    assert answer["response"] == "half ?, one \N{OTTER}" and answer["tokens"] == "10" + ",000" * 133


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"sizes": {"updates": "six", "batch": 8}}, "sizes.updates is 'six'"),
        ({"sizes": "none"}, "sizes is 'none'"),
        ({"versions": ["2.13"]}, "versions is"),
        ({"args": ARGS[1] | {"ppo": [1]}}, r"args.ppo is \[1\]"),
        ({"args": ARGS[1] | {"rewards": "many"}}, "args.rewards is 'many'"),
        ({"args": ARGS[1] | {"rewards": {"monitor": 5}}}, "args.rewards.monitor is 5"),
        ({"args": ARGS[1] | {"rewards": {"adaptive_kl": {"target": "6"}}}}, "args.rewards.adaptive_kl.target is '6'"),
    ],
)
def test_a_damaged_meta_file_is_named(change, name, tmp_path):
    folder = make_run(tmp_path, "a")
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(meta | change))
    with pytest.raises(InputError, match=rf"meta\.json was damaged: {name}"):
        write_report(folder)
    (folder / "meta.json").write_text(json.dumps({"args": meta["args"]}))
    with pytest.raises(InputError, match="names no training script; an older version"):
        write_report(folder)


def test_a_trace_with_fewer_numbers_than_texts_is_named(tmp_path):
    folder = make_run(tmp_path, "a")
    edit_traces(folder, lambda x: x.tokens.update(kl=x.tokens["kl"][:, :2]))
    with pytest.raises(InputError, match=r"traces/0\.safetensors is damaged: its numbers do not fit its texts"):
        write_report(folder)


def test_where_no_page_can_be_written_nothing_is_left(tmp_path):
    folder, elsewhere = make_run(tmp_path, "a"), tmp_path / "folder"
    elsewhere.mkdir()
    with pytest.raises(InputError, match=r"--out .*/folder is a folder; name a file in it, such as .*report\.html"):
        write_report(folder, out=str(elsewhere))
    with pytest.raises(InputError, match=r"--out .*/no/such/x\.html: there is no folder .*/no/such; name a file"):
        write_report(folder, out=str(tmp_path / "no/such/x.html"))
    for path, error in ((elsewhere, IsADirectoryError), (tmp_path / "no/such/x.html", FileNotFoundError)):
        with pytest.raises(error) as raised:
            files.replace_file(path, "text")
        assert raised.value.filename == str(path)
    assert sorted(os.listdir(tmp_path)) == ["a", "folder"] and os.listdir(elsewhere) == []


def test_a_page_needs_no_utf_8_locale(tmp_path):
    """In the locale POSIX, files are ASCII where no encoding is given."""
    folder = make_run(tmp_path, "a", chapter=2)
    row = json.dumps({"query": "q", "response": "M\u00fchle"}, ensure_ascii=False) + "\n"
    (folder / "evaluation.jsonl").write_text(row, encoding="utf-8")
    locale = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, report.__file__, "--run", str(folder)]
    done = subprocess.run(command, env=os.environ | locale, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    assert "M\u00fchle" in (folder / "report.html").read_text(encoding="utf-8")


def test_a_page_needs_no_network_and_fits(tmp_path):
    page = write_report(make_run(tmp_path, "a"))
    page = page.replace("http://www.w3.org/2000/svg", "")  # a name, which nothing loads
    assert not re.findall(r"(?:src|href)\s*=\s*[\"'](?!#)|https?://|@import|url\(", page)
    assert len(page.encode()) < 200_000


def test_groups_of_one_have_no_panel(tmp_path):
    folder = make_run(tmp_path, "a", chapter=3)
    (folder / "metrics.csv").write_text("step,val/groups_zero_std,lr\n0,1.0,0.0003\n1,1.0,0.0003\n")
    titles = [figure["data"][0]["name"] for figure in data_of(write_report(folder))["figures"]]
    assert titles == ["val/groups_zero_std", "lr"]
    (folder / "meta.json").write_text(
        json.dumps({"script": SCRIPTS[3], "args": ARGS[3] | {"ppo": {"samples_per_prompt": 1}}})
    )
    (figure,) = data_of(write_report(folder))["figures"]
    assert figure["data"][0]["name"] == "lr"


def test_large_traces_are_thinned(tmp_path, monkeypatch):
    folder = make_run(tmp_path, "a")
    monkeypatch.setattr(report, "TRACE_BYTES", 3_000)
    page = write_report(folder)
    assert [update["update"] for update in data_of(page)["runs"][0]["traces"]] == [0, 5]
    assert "For 2 updates you can see 2 episodes that were trained on. 1 more were kept" in page


def test_a_run_without_traces_says_so_and_has_curves(tmp_path):
    page = write_report(make_run(tmp_path, "a", traced=False))
    assert "left no traces: it was started without --trace_interval" in page and data_of(page)["figures"]
    assert data_of(page)["runs"][0]["traces"] == []


@pytest.mark.parametrize(("script", "what"), [("train_reward", "A reward model"), ("tldr_sft", "Fine-tuning")])
def test_a_run_without_ppo_has_curves_and_needs_no_traces(script, what, tmp_path):
    folder = make_run(tmp_path, "a", traced=False)
    (folder / "meta.json").write_text(json.dumps({"script": script, "args": {}, "finished": True}))
    (folder / "metrics.csv").write_text("step,train/loss\n0,1.5\n1,1.25\n")
    page = write_report(folder)
    assert what in page and "Only PPO leaves traces" in page
    assert data_of(page)["figures"][0]["data"][0]["y"] == [1.5, 1.25]


def test_a_run_that_has_just_begun_or_writes_on_has_a_page(tmp_path):
    folder = make_run(tmp_path, "a", chapter=3)
    with (folder / "metrics.csv").open("a") as file:
        file.write("6,0.5,0.")
    page = write_report(folder)
    assert "not finished: 6 steps are logged" in page and len(data_of(page)["figures"][0]["data"][0]["x"]) == 6
    text = (folder / "metrics.csv").read_text()
    (folder / "metrics.csv").write_text(text[: text.index("\n5,") + 3])  # the row of the last trace is cut off
    shown = data_of(write_report(folder))["runs"][0]["traces"]
    assert [update["update"] for update in shown] == [0, 3]
    (folder / "metrics.csv").unlink()
    page = write_report(folder)
    assert "has logged nothing yet" in page and "updates that metrics.csv has no row of" in page


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

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
QUIET += "--disable-component-update --disable-sync"
LOCAL = ("file:", "blob:", "data:")


@pytest.fixture(scope="module")
def browser() -> Iterator:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not CHROMIUM:
        pytest.skip("there is no Chromium")
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=QUIET.split())
        yield chromium
        chromium.close()


@pytest.fixture
def opened(browser):
    """A function (file, options of the context) -> the page in a browser; at the end nothing was wrong with it."""
    wrong, contexts = [], []

    def open_page(path: Path, **options):
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.on("console", lambda message: wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda request: None if request.url.startswith(LOCAL) else wrong.append(request.url))
        page.goto(path.as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert wrong == []


@pytest.fixture
def shown(opened):
    """A function (folder of a run, options of the context) -> its page in a browser."""

    def show(folder: Path, **options):
        write_report(folder)
        return opened(folder / "report.html", **options)

    return show


def number_of(page, name: str) -> float:
    return float(page.locator(f'#numbers [data-name="{name}"] .number').inner_text())


def signs(page, *wanted: str) -> list[str]:
    """Which of these classes each token of the first response has."""
    classes = [token.get_attribute("class").split() for token in page.locator("#left-response .token").all()]
    return [" ".join(name for name in of_token if name in wanted) for of_token in classes]


def background(page, token: int) -> str:
    return page.locator("#left-response .token").nth(token).evaluate("e => e.style.backgroundColor")


def test_the_token_view_follows_the_reader(shown, tmp_path):
    folder = make_run(tmp_path, "a")
    page = shown(folder)
    trace = {update: traces.read(folder, update) for update in UPDATES}

    # The page opens in the middle of training. The slider changes the episode, by mouse and by key.
    assert page.locator("#left-response").inner_text().split() == ["one3", "two3", "three3", "four3", "five3"]
    page.locator("#left-update").press("Home")
    assert page.locator("#left-response").inner_text().split() == ["one0", "two0", "three0", "four0", "five0"]
    page.locator("#left-update").press("ArrowRight")
    assert page.locator("#left-number").inner_text() == "3"
    assert page.locator("#left-response").inner_text().split()[0] == "one3"
    page.locator("#left-update").scroll_into_view_if_needed()
    box = page.locator("#left-update").bounding_box()
    y, ends = box["y"] + box["height"] / 2, (box["x"] + 4, box["x"] + box["width"] / 2, box["x"] + box["width"] - 4)
    page.mouse.move(ends[0], y)
    page.mouse.down()
    for x, update in zip(ends, UPDATES, strict=True):
        page.mouse.move(x, y, steps=3)
        assert page.locator("#left-number").inner_text() == str(update)
        assert page.locator("#left-response").inner_text().split()[0] == f"one{update}"
    page.mouse.up()

    # Colours follow the picked quantity: their sign is that of its distance from the middle.
    # So do the bars, which go up or down from the middle.
    bars = "bars => bars.map(x => [x.getAttribute('fill'), Number(x.getAttribute('y'))])"
    for name, middle in (("kl", 0), ("ratio", 1), ("advantages", 0)):
        page.select_option("#quantity", name)
        drawn = page.locator("#along rect[fill]").evaluate_all(bars)
        for token in range(5):
            below = trace[5].tokens[name][0, token] < middle
            assert background(page, token).startswith("rgba(213, 94, 0" if below else "rgba(0, 114, 178")
            assert drawn[token][0] == ("var(--down)" if below else "var(--up)")
        assert len({y for fill, y in drawn if fill == "var(--down)"}) == 1
        below = any(fill == "var(--down)" for fill, _ in drawn)
        assert (f"dots: below {middle}" in page.locator("#marks").inner_text()) == below

    # The panel shows the token under the pointer or the keyboard's focus, and otherwise the chosen token.
    page.locator("#left-response .token").nth(2).hover()
    assert number_of(page, "advantages") == pytest.approx(trace[5].tokens["advantages"][0, 2].item(), abs=5e-4)
    assert "three5" in page.locator("#numbers").inner_text()
    page.locator("#left-response .token").nth(0).focus()
    page.keyboard.press("ArrowRight")
    assert number_of(page, "kl") == pytest.approx(trace[5].tokens["kl"][0, 1].item(), abs=5e-4)
    page.locator("h2").first.hover()
    page.locator("#quantity").focus()
    assert "one5" in page.locator("#numbers").inner_text()

    # What was cut is struck, and the stop token marked; a screen reader hears buttons with their number.
    assert signs(page, "cut", "stop") == ["", "", "stop", "cut", "cut"]
    token = page.locator("#left-response").get_by_role("button", name="three5, advantage ")
    heard = float(token.get_attribute("aria-label").split()[-1])
    assert heard == pytest.approx(trace[5].tokens["advantages"][0, 2].item(), abs=5e-4)
    token.click()
    assert token.get_attribute("aria-pressed") == "true" and page.locator("[aria-pressed]").count() == 1

    # Who sees no colours sees a line that is solid or dotted.
    styles = "tokens => tokens.map(x => [getComputedStyle(x).borderBottomStyle, x.style.backgroundColor])"
    for style, color in page.locator("#left-response .token").evaluate_all(styles):
        assert (style == "dotted") == color.startswith("rgba(213")

    # The same query at two updates; and two episodes that have nothing in common.
    page.check("#beside")
    page.locator("#right-update").press("Home")
    assert page.locator("#right-query").inner_text() == "the same query"
    assert page.locator("#right-response").inner_text().split()[0] == "one0"
    page.uncheck("#follow")
    page.select_option("#right-episode", "1")
    assert EVIL.replace("\x1b", "␛") in page.locator("#right-response").inner_text()
    assert page.evaluate("window.hacked") is None


def test_curves_say_their_numbers(shown, tmp_path):
    folder = make_run(tmp_path, "a")
    page = shown(folder)
    rows = list(csv.DictReader((folder / "metrics.csv").open()))
    page.locator("#plot-1 svg").hover()
    place, told, jump = page.locator("#plot-1 .readout > *").all_inner_texts()
    step = int(place.removeprefix("update "))
    name, value = told.split()
    assert name == "objective/kl" and float(value) == pytest.approx(float(rows[step]["objective/kl"]), rel=1e-5)
    assert str(min(UPDATES, key=lambda update: abs(update - step))) in jump
    assert "target 6" in page.locator("#plot-1").text_content()


def test_what_is_not_known_of_an_episode_is_said(shown, tmp_path):
    """Of a query that is answered again there is no ratio: it is not trained on."""
    folder = make_run(tmp_path, "a")
    parts = {"tokens": {"kl": torch.ones(1, 2), "scored": torch.ones(1, 2).bool()}, "texts": {}}
    parts |= {"episodes": {"scores": torch.tensor([0.5])}, "queries": ["asked again"]}
    for update in UPDATES:
        traces.write(folder, traces.Trace(update=update, again=True, responses=[[" y", f" z{update}"]], **parts))
    page = shown(folder)
    page.check("#beside")
    page.select_option("#left-episode", "2")
    assert page.locator("#left-query").inner_text() == page.locator("#right-query").inner_text() == "asked again"
    assert [page.locator(f"#{pane}-response").inner_text() for pane in ("left", "right")] == [" y z3", " y z5"]
    page.select_option("#quantity", "kl")
    assert page.locator(".unknown").count() == 0
    page.select_option("#quantity", "ratio")
    assert "not trained on" in page.locator(".unknown").first.inner_text()
    assert background(page, 0) == ""
    page.select_option("#left-episode", "0")
    assert background(page, 0) != "" and page.locator(".unknown").count() == 0


def test_the_first_quantity_that_is_shown_says_something(shown, tmp_path):
    """All advantages of a batch may be 0; and no log-prob is above 0."""
    folder = make_run(tmp_path, "a", chapter=3)
    edit_traces(folder, lambda x: x.tokens.update(advantages=torch.zeros(2, 5), logprobs=-x.tokens["logprobs"].abs()))
    page = shown(folder)
    assert page.locator("#quantity").input_value() == "kl"
    assert background(page, 0)
    page.select_option("#quantity", "advantages")
    assert background(page, 0) == "rgba(0, 114, 178, 0)"
    page.select_option("#quantity", "logprobs")
    assert page.locator("#high").inner_text() == "0" and float(page.locator("#low").inner_text()) < -0.5


def test_the_page_opens_on_a_token_of_which_the_policy_was_not_sure(opened, tmp_path):
    """Token 2 has the largest gradient by its log-prob, but hardly any by its logit, and the last one is left out."""
    folder = make_run(tmp_path, "a")
    text = write_report(folder)
    data = data_of(text)
    tokens = data["runs"][0]["traces"][1]["episodes"][1]["tokens"]
    tokens["push"], tokens["logprobs"] = [0.1, -3, 2, 0.5, 9], [-1, -0.001, -2, -1, -1]
    begin, end = re.search(r'id="data">(.*?)</script>', text, re.DOTALL).span(1)
    told = json.dumps(data).replace("<", "\\u003c")
    (folder / "report.html").write_text(text[:begin] + told + text[end:])
    page = opened(folder / "report.html")
    assert page.locator("#left-episode").input_value() == "1"
    assert page.locator("#derivation > summary").inner_text() == "Where the numbers of token 3 come from"


def test_what_the_losses_do_not_count_is_grey(shown, tmp_path):
    """Chapter 2: three tokens, and the state after the end, which the critic learns."""
    folder = make_run(tmp_path, "a", chapter=2)
    page = shown(folder)
    assert signs(page, "stop", "masked") == ["", "", "stop", "masked"]
    shade = "e => getComputedStyle(e).color"
    counts, masked = (page.locator("#left-response .token").nth(i).evaluate(shade) for i in (0, 3))
    assert counts != masked == page.locator("#left-query").evaluate(shade)


def test_what_a_tool_wrote_has_a_wavy_line(shown, tmp_path):
    """It is in no mask, and it is shown all the same, but not struck."""
    folder = make_run(tmp_path, "a", chapter=3)
    assert "tool" not in shown(folder).locator("#tokens").inner_text()
    tool = torch.tensor([[0, 1, 0, 0, 0], [0, 0, 0, 0, 0]]).bool()
    without = torch.tensor([[1, 0, 1, 0, 0], [1, 1, 1, 1, 1]]).bool()
    edit_traces(folder, lambda x: x.tokens.update(tool=tool, mask=without, scored=without.clone()))
    page = shown(folder)
    assert "A wavy line marks what a tool wrote" in page.locator("#tokens").inner_text()
    tokens = page.locator("#left-response .token").all()
    assert signs(page, "masked", "cut", "tool", "stop") == ["", "masked cut tool", "stop"]
    line = tokens[1].evaluate(
        "e => [getComputedStyle(e).textDecorationStyle, getComputedStyle(e).textDecorationLine]"
    )
    assert line == ["wavy", "underline"] and tokens[1].evaluate("e => getComputedStyle(e).opacity") == "1"


def test_two_runs_stand_side_by_side(opened, tmp_path):
    one, two = make_run(tmp_path, "a"), make_run(tmp_path, "b", seed=1)
    alone = write_report(one)
    data = data_of(write_report(one, other=str(two)))
    assert (one / "report.html").read_text() == alone  # it is not overwritten
    assert [line["name"] for line in data["figures"][1]["data"]] == ["objective/kl, run 1", "objective/kl, run 2"]
    page = opened(one / "report_with_b.html")
    assert page.title() == "PPO on tales, against a reward model: two runs"
    assert page.locator("#left-query").inner_text() == page.locator("#right-query").inner_text() == "the same query"
    page.select_option("#quantity", "values")
    for pane, folder in (("left", one), ("right", two)):
        page.locator(f"#{pane}-response .token").nth(1).hover()
        expected = traces.read(folder, 3).tokens["values"][0, 1].item()
        assert number_of(page, "values") == pytest.approx(expected, abs=5e-4)


def test_the_first_screen_says_what_happened(shown, tmp_path):
    """Words and not a folder's name; score and judge before and after; one query and its answers; curves."""
    folder = make_run(tmp_path, "a")
    for_each = {"base": "worse", "base score": 0.5}
    rows = [for_each | {"query": f"query {i}", "policy": f"better {i}", "policy score": i} for i in (1, 2, -3)]
    write_rows(folder / "comparison.jsonl", *rows)
    page = shown(folder, viewport={"width": 1280, "height": 900})
    assert page.title() == page.locator("h1").inner_text() == "PPO on tales, against a reward model"
    metrics = list(csv.DictReader((folder / "metrics.csv").open()))
    for title, name in {"Score": "scores", "Gold score": "gold_scores", "KL": "kl"}.items():
        column = [float(row[f"objective/{name}"]) for row in metrics]
        tile = page.locator(".tile", has=page.get_by_text(title, exact=True))
        before, after = tile.locator("b").inner_text().split(" → ")
        assert (float(before), float(after)) == pytest.approx((column[0], sum(column) / 6), abs=0.006)
    example = page.locator(".example").inner_text()
    assert "query 1" in example and "worse" in example and "better 1" in example and "score 0.50" in example
    assert "Score higher than before: 2 of 3 held-out queries; lower: 1." in example
    names = {f"{what} {when} training" for what in ("response", "score") for when in ("before", "after")}
    assert {*held_out(page.content())[0]} == {"query"} | names
    assert page.locator("#outcome .plot").count() == 2
    below = page.locator("#outcome").bounding_box()
    assert below["y"] + below["height"] < 900
    sections = page.locator("section").evaluate_all("sections => sections.map(x => x.id)")
    assert sections[:2] == ["outcome", "tokens"] and sections[-1] == "run"


def test_the_judge_has_one_colour_and_what_is_trained_on_another(tmp_path):
    """As in the pictures of the pages."""
    for chapter in (1, 3):
        figures = data_of(write_report(make_run(tmp_path, str(chapter), chapter)))["figures"]
        color_of = {line["name"]: line["color"] for figure in figures for line in figure["data"]}
        assert color_of["objective/gold_scores"] == "#0072b2" and color_of["objective/scores"] == "#d55e00"
    folder = make_run(tmp_path, "2", 2)
    names = ["eval/scores", "eval/reference_gold_scores", "eval/gold_scores"]
    (folder / "metrics.csv").write_text(",".join(["step", *names]) + "\n0,1,2,3\n")
    (figure,) = data_of(write_report(folder))["figures"]
    color_of = {line["name"]: line["color"] for line in figure["data"]}
    assert [color_of[name] for name in names] == ["#d55e00", "#009e73", "#0072b2"]


def test_the_story_has_words_for_the_model_that_training_started_from():
    for start, words in {
        "sums": "the language model sums",
        "/a/b/gpt": "the language model b/gpt",
        "models/tldr_sft__posts__1__2/sft": "the fine-tuned model",
        "models/rlvr_policy__sums__1__2/policy": "the model of another run",
    }.items():
        meta = {"script": "tldr_policy", "args": {"base_model": start}}
        assert f"Training started from {words}." in report.OneRun(folder=Path("a"), meta=meta).story


def test_without_groups_no_text_speaks_of_one(shown, tmp_path):
    folder = make_run(tmp_path, "a", chapter=3)
    for groups in ([7, 7], [7, 8]):
        edit_traces(folder, lambda x, groups=groups: x.episodes.update(groups=torch.tensor(groups)))
        text = shown(folder).locator("#tokens").inner_text()
        assert ("group" in text) == (groups[0] == groups[1])


def test_a_curve_of_evaluations_has_a_point_for_each(tmp_path):
    folder = make_run(tmp_path, "a", chapter=3)
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(meta | {"results": {"eval/pass@2": 0.75}}))
    (folder / "metrics.csv").write_text("step,eval/pass@2\n0,0.25\n1,0.25\n2,0.5\n3,0.5\n")
    [line] = data_of(write_report(folder))["figures"][0]["data"]
    assert (line["x"], line["y"]) == ([0, 2, 4], [0.25, 0.5, 0.75])


def test_tables_are_saved_with_all_their_digits(shown, tmp_path):
    folder = make_run(tmp_path, "a", chapter=3)
    page = shown(folder)
    page.locator("#all-numbers > summary").click()
    for table in ("episode", "others", "table-arguments"):
        if table == "table-arguments":
            page.locator("#run details", has=page.locator(f"#{table}")).locator("summary").click()
        with page.expect_download() as download:
            page.locator(f'[data-table="{table}"]').click()
        assert download.value.suggested_filename == f"report-{table}.csv"
        rows = list(csv.reader(Path(download.value.path()).read_text("utf-8").splitlines(keepends=True)))
        if table == "episode":
            trace, titles = traces.read(folder, 3), rows[0]
            written = [float(row[titles.index("advantage")]) for row in rows[1:]]
            assert written == pytest.approx(trace.tokens["advantages"][0, :3].tolist(), rel=1e-7)
            assert [row[1] for row in rows[1:]] == trace.responses[0][:3]
        elif table == "others":
            assert [float(row[rows[0].index("score")]) for row in rows[1:]] == [0.25, -1.0]
            assert rows[2][-1] == (EVIL + "\n b c").replace("\x1b", "␛").strip()
        else:
            assert ["rewards.verifier", "sums"] in rows


def test_on_a_phone_the_derivation_is_below_the_token_that_was_tapped(shown, tmp_path):
    folder = make_run(tmp_path, "a")
    page = shown(folder, viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    page.locator("#left-response .token").nth(1).scroll_into_view_if_needed()
    page.locator("#left-response .token").nth(1).tap()
    token, panel = (page.locator(name).bounding_box() for name in ("#left-response .token.chosen", "#panel"))
    assert token["y"] > 0 and token["y"] + token["height"] <= panel["y"]
    assert panel["y"] + panel["height"] <= 845 and page.locator("#lines .line").first.is_visible()


@pytest.mark.parametrize(("chapter", "width", "scheme"), [(2, 360, "dark"), (3, 1280, "dark"), (3, 360, "light")])
def test_the_page_fits_every_window(shown, tmp_path, chapter, width, scheme):
    folder = make_run(tmp_path, "a", chapter)
    page = shown(folder, viewport={"width": width, "height": 800}, color_scheme=scheme)
    page.check("#beside")
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    colors = page.evaluate("[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]")
    brightness = [sum(map(int, re.findall(r"\d+", color)[:3])) for color in colors]
    assert (brightness[0] > brightness[1]) == (scheme == "light")
    assert page.locator("#others tr").count() == 3
    heights = page.evaluate("[...document.querySelectorAll('#others tr')].map(row => row.offsetHeight)")
    assert max(heights) < 150  # a few lines, and not one letter below the other
