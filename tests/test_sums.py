"""worlds/sums.py: the problems, the pupils, and the world that is built from them."""

import dataclasses
import itertools
import json
import math
import random
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from runs import TINY_SUMS, rows_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from ppo_rlhf.lib.base.errors import InputError
from ppo_rlhf.lib.data import problems
from ppo_rlhf.worlds import building, find_paths, sums, tales
from ppo_rlhf.worlds.sums import SumsArgs

DEFAULT = SumsArgs()
NAMES = "|".join(tales.NAMES.split())

# What a sentence does to the number of things, read off the words and not off the world's own tables.
MEANINGS = [
    (rf"(?:{NAMES}) gives (?:her|him) (\d+)\.", lambda n, by: n + by),
    (r"(?:She|He) (?:finds|buys) (\d+)\.", lambda n, by: n + by),
    (rf"(?:She|He) gives (?:{NAMES}) (\d+)\.", lambda n, by: n - by),
    (r"(?:She|He) (?:loses|sells) (\d+)\.", lambda n, by: n - by),
    (r"Then (?:she|he) has (\d+) times as many\.", lambda n, by: n * by),
    (rf"(?:{NAMES}) makes them (\d+) times as many\.", lambda n, by: n * by),
]
WOMEN = {"Mara", "Ilse", "Petra", "Hanna", "Dorothea", "Clara"}


def read_problem(question: str) -> list[int]:
    """How many things there are at first and after each sentence."""
    first, *events, asked = re.findall(r"[^.?]+[.?]", question)
    name, number, things = re.fullmatch(rf"({NAMES}) has (\d+) (\w+)\.", first).groups()
    assert asked == f" How many {things} does {name} have?"
    others = r"\b[Hh](e|im)\b" if name in WOMEN else r"\b([Ss]he|her)\b"
    assert not re.search(others, question) and question.count(name) == 2
    numbers = [int(number)]
    for event in events:
        (found,) = [
            means(numbers[-1], int(match[1]))
            for pattern, means in MEANINGS
            if (match := re.fullmatch(pattern, event.strip()))
        ]
        numbers.append(found)
    return numbers


def equations(solution: str) -> list[tuple[int, str, int, int]]:
    return [(int(a), o, int(b), int(c)) for a, o, b, c in re.findall(r"(\d+)([-+*])(\d+)=(\d+)", solution)]


def holds(equation: tuple[int, str, int, int]) -> bool:
    a, operation, b, c = equation
    return {"+": a + b, "-": a - b, "*": a * b}[operation] == c


@pytest.fixture(scope="module")
def found() -> list[sums.Problem]:
    return sums.write_problems(random.Random(3), 2_000, DEFAULT, set())


# ---- Problems --------------------------------------------------------------------------------------------------


def test_a_problem_says_what_its_steps_do(found):
    for problem in found:
        numbers = read_problem(problem.question)
        assert numbers[0] == problem.first and 2 <= problem.first <= DEFAULT.largest_first
        for (operation, by), before, after in zip(problem.steps, numbers[:-1], numbers[1:], strict=True):
            assert sums.apply((operation, by), before) == after and 2 <= by <= DEFAULT.largest
        assert all(0 < number <= sums.MOST for number in numbers)


def test_one_to_four_steps_are_equally_likely_and_all_operations_occur(found):
    counts = Counter(len(problem.steps) for problem in found)
    assert set(counts) == {1, 2, 3, 4}
    # Fewer problems of one step differ from each other.
    assert all(count == pytest.approx(500, abs=4 * math.sqrt(2_000 * 0.25 * 0.75)) for count in counts.values())
    operations = Counter(operation for problem in found for operation, _ in problem.steps)
    assert min(operations[operation] for operation in "+-*") > 500


def test_the_longer_chains_have_one_to_six_steps_and_fit_their_task(tiny_sums):
    args, task = sums.LongArgs(), problems.TASKS["sums-long"]
    long = sums.write_problems(random.Random(1), 1_200, args, set())
    counts = Counter(len(problem.steps) for problem in long)
    assert set(counts) == set(range(1, 7)) and all(abs(count - 200) < 60 for count in counts.values())
    for problem in long:
        numbers = read_problem(problem.question)
        for (operation, by), before, after in zip(problem.steps, numbers[:-1], numbers[1:], strict=True):
            assert after == {"+": before + by, "-": before - by, "*": before * by}[operation]
    assert task.prompt_length + task.response_length == args.max_positions
    plain = SumsArgs()  # the plain world stays as it is: same name, same problems
    assert sums.name_of(plain) == "sums" and sums.name_of(args) == "sums-long" and not hasattr(plain, "most_steps")


def test_no_two_problems_are_equal(found):
    taken = {problem.question for problem in found}
    assert len(taken) == len(found)
    more = sums.write_problems(random.Random(3), 300, DEFAULT, taken)  # begins with the same ones
    assert len(taken) == len(found) + 300
    assert not {problem.question for problem in more} & {problem.question for problem in found}


# ---- Pupils ----------------------------------------------------------------------------------------------------


def test_who_never_errs_is_right_step_by_step(found):
    rng = random.Random(4)
    for problem in found[:500]:
        numbers = read_problem(problem.question)
        terse, wordy = (sums.solve(rng, problem, 0.0, share) for share in (0.0, 1.0))
        assert terse.splitlines()[-1] == wordy.splitlines()[-1] == f"#### {numbers[-1]}"
        assert equations(terse) == equations(wordy) and all(map(holds, equations(terse)))
        assert [(a, c) for a, _, _, c in equations(terse)] == list(itertools.pairwise(numbers))
        assert re.fullmatch(r"(\d+[-+*]\d+=\d+\n)+#### \d+", terse)
        assert re.sub(r"^[A-Z].*\. (?=\d)", "", wordy, flags=re.MULTILINE) == terse
        said = [line[: line.index(". ") + 1] for line in wordy.splitlines()[:-1]]
        assert said == [event.strip() for event in re.findall(r"[^.?]+[.?]", problem.question)[1:-1]]


def test_every_error_is_one(found):
    """A false equation, a right one of another step, or none: and the number is not the one that the step gives."""
    rng, kinds = random.Random(5), Counter()
    for problem in found:
        (operation, by), before = problem.steps[0], problem.first
        line, after = sums.err(rng, (operation, by), before)
        assert after != read_problem(problem.question)[1] and 0 <= after <= sums.MOST_OF_PUPILS
        if not line:
            kinds["forgets"] += 1
            assert after == before
            continue
        ((a, o, b, c),) = equations(line)
        assert a == before and c == after
        kind = "confuses" if o != operation else "misreads" if b != by else "slips"
        assert holds((a, o, b, c)) == (kind != "slips")
        kinds[kind] += 1
    assert set(kinds) == set(sums.ERRORS) and min(kinds.values()) > 300


def test_who_errs_goes_on_with_the_wrong_number(found):
    rng = random.Random(6)
    for problem in found:
        solution = sums.solve(rng, problem, 0.5, 0.0)
        numbers, lines = [problem.first], equations(solution)
        for a, _, _, c in lines:
            assert a == numbers[-1]
            numbers.append(c)
        assert solution.splitlines()[-1] == f"#### {numbers[-1]}"
        assert all(0 <= number <= sums.MOST_OF_PUPILS for number in numbers)


@pytest.mark.parametrize("rate", [0.1, 1.0])
def test_a_pupil_errs_as_often_as_the_world_says(found, rate):
    rng = random.Random(7)
    alone = [problem for problem in found if len(problem.steps) == 1] * 4
    wrong = sum(sums.solve(rng, p, rate, 0.0).split()[-1] != str(read_problem(p.question)[1]) for p in alone)
    deviation = math.sqrt(rate * (1 - rate) / len(alone))
    assert wrong / len(alone) == pytest.approx(rate, abs=4 * deviation + 1e-9)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_some_pupils_say_what_happened(found, share):
    rng = random.Random(8)
    wordy = sum("." in sums.solve(rng, problem, 0.0, share) for problem in found)
    assert wordy / len(found) == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / len(found)))


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_some_pupils_stop_after_two_steps(found, share):
    """What they write is right as far as it goes, and they say that it is all."""
    rng, stopped, long = random.Random(10), 0, 0
    for problem in found:
        numbers = read_problem(problem.question)
        solution = sums.solve(rng, problem, 0.0, 0.5, share)
        done = len(equations(solution))
        assert done in {len(numbers) - 1, min(len(numbers) - 1, 2)} and solution.endswith(f"\n#### {numbers[done]}")
        stopped, long = stopped + (done < len(numbers) - 1), long + (len(numbers) > 3)
    assert stopped / long == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / long))


# ---- The world -------------------------------------------------------------------------------------------------


def test_a_world_holds_problems_model_and_facts(tiny_sums):
    train, test = (rows_of(tiny_sums / f"problems_{split}.jsonl") for split in ("train", "test"))
    assert (len(train), len(test)) == (64, 32)
    questions = [row["question"] for row in train + test]
    assert len(set(questions)) == 96  # nothing that is held out is trained on
    for row in train + test:
        numbers = read_problem(row["question"])
        assert row["answer"].endswith(f"\n#### {numbers[-1]}") and row["steps"] == len(numbers) - 1
    facts = json.loads((tiny_sums / "world.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(tiny_sums / "model")
    assert facts["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert facts["settings"] == dataclasses.asdict(TINY_SUMS)
    for start in facts["start"].values():
        assert 0 <= start["right"] <= 1 and {f"{steps} steps" for steps in range(1, 5)} < set(start)
        assert 1 <= start["least tokens"] <= start["mean tokens"] <= start["most tokens"] <= 88


def test_the_language_model_learns_from_other_problems(tmp_path, monkeypatch):
    """What it is given is no problem of either split, also where there are few to choose from."""
    given, in_files = [], []

    def train(pairs, *_):
        given.extend(prompt for prompt, _ in pairs)
        raise KeyboardInterrupt

    monkeypatch.setattr(sums, "train_language_model", train)
    monkeypatch.setattr(sums, "write_rows", lambda path, found: in_files.extend(p.question + "\n" for p in found))
    args = dataclasses.replace(TINY_SUMS, train_problems=1_000, largest=2, largest_first=2)
    with pytest.raises(KeyboardInterrupt):
        sums.build_world(tmp_path / "world", args)
    assert (len(given), len(in_files)) == (2_000, 1_032)
    assert len({*given, *in_files}) == 3_032
    assert list(tmp_path.iterdir()) == []  # and a failure leaves nothing half built


def test_the_task_reads_the_world_and_all_of_it_fits(tiny_sums, found):
    task = dataclasses.replace(problems.TASKS["sums"], problems=str(tiny_sums))
    tokenizer = AutoTokenizer.from_pretrained(tiny_sums / "model")
    train, test = (problems.read_problems(task, tokenizer, split) for split in ("train", "test"))
    assert (len(train), len(test), train.too_long, train.unscorable) == (64, 32, 0, 0)
    assert test.texts[0].endswith("have?\n") and set(train.kinds) == {"1", "2", "3", "4"}
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("12+7=19")) == list("12+7=19")
    rng = random.Random(9)
    lengths = [
        (len(tokenizer.encode(f"{p.question}\n")), len(tokenizer.encode(sums.solve(rng, p, 0.1, 0.5))) + 1)
        for p in found
    ]
    prompt, response = (max(column) for column in zip(*lengths, strict=True))
    assert prompt <= task.prompt_length and response <= task.response_length
    assert task.prompt_length + task.response_length <= DEFAULT.max_positions
    right = [len(tokenizer.encode(sums.solve(rng, p, 0.0, 0.5))) + 1 for p in found]
    assert max(right) >= 4 * min(right)  # so that what lengths do shows


def test_a_model_learns_to_end(tiny_sums):
    """It reads prompts and learns solutions only, and the end behind them."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_sums / "model")
    args = dataclasses.replace(TINY_SUMS, lm_steps=200, lm_lr=1e-2)
    model, loss = sums.train_language_model([("12?\n", "#### 7"), ("345?\n", "#### 89")], tokenizer, args, "cpu")
    assert loss < 0.1
    for prompt, solution in (("12?\n", "#### 7<|endoftext|>"), ("345?\n", "#### 89<|endoftext|>")):
        ids = torch.tensor([tokenizer.encode(prompt)])
        for _ in tokenizer.encode(solution):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(2)], dim=1)
        assert tokenizer.decode(ids[0]) == prompt + solution


def test_the_same_seed_trains_the_same_language_model(tiny_sums):
    tokenizer = AutoTokenizer.from_pretrained(tiny_sums / "model")
    pairs = [("1?\n", "#### 1"), ("2?\n", "1+1=2\n#### 2"), ("3?\n", "#### 3")]
    models = []
    for seed in (1, 1, 2):
        torch.rand(7)
        args = dataclasses.replace(TINY_SUMS, lm_short_steps=1, lm_steps=2, lm_batch_size=2, seed=seed)
        models.append(sums.train_language_model(pairs, tokenizer, args, "cpu")[0])
    first, again, other = (torch.cat([p.flatten() for p in model.parameters()]) for model in models)
    assert torch.equal(first, again) and not torch.equal(first, other)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache, in which a world is an empty folder."""
    monkeypatch.setenv("PPO_RLHF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sums, "build_world", lambda folder, args: folder.mkdir(parents=True))
    return tmp_path / "cache"


def test_every_setting_and_every_word_makes_another_world(cache, monkeypatch):
    folders = [sums.find_world(), sums.find_world(DEFAULT)]
    for name, value in dataclasses.asdict(DEFAULT).items():
        changed = value / 2 if type(value) is float else value * 2
        folders.append(sums.find_world(dataclasses.replace(DEFAULT, **{name: changed})))
    for name in ("THINGS", "ERRORS", "FACTORS"):
        with monkeypatch.context() as patch:
            patch.setattr(sums, name, getattr(sums, name)[:-1])
            folders.append(sums.find_world())
    assert folders[0] == folders[1] and len(set(folders)) == len(folders) - 1
    assert all(folder.parent == cache for folder in folders)


def test_sums_is_the_name_of_model_and_problems(cache):
    @dataclasses.dataclass(frozen=True)
    class Args:
        resume: str = ""
        base_model: str = "sums"
        task: problems.TaskArgs = problems.TASKS["sums"]

    found, world = find_paths(Args()), sums.find_world()
    assert found.base_model == f"{world}/model" and found.task.problems == str(world)
    assert found.task.test_problems == ""
    hub = find_paths(Args(task=problems.TASKS["gsm8k"]))
    assert hub.task.problems == "gsm8k"


BAD_SETTINGS = {
    "numbers too large": ({"largest": 100}, "largest is 100"),
    "numbers too small": ({"largest": 1}, "largest is 1"),
    "more than all err": ({"error_rate": 1.5}, "error_rate is 1.5"),
    "fewer than none speak": ({"wordy": -0.5}, "wordy is -0.5"),
    "more than all hurry": ({"hasty": 1.5}, "hasty is 1.5"),
    "heads that do not divide": ({"width": 16, "heads": 3}, "width 16"),
}


@pytest.mark.parametrize(("settings", "words"), BAD_SETTINGS.values(), ids=BAD_SETTINGS)
def test_bad_settings_are_refused_in_one_line(cache, settings, words):
    with pytest.raises(InputError) as caught:
        sums.find_world(dataclasses.replace(DEFAULT, **settings))
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert not cache.exists()


def test_what_the_world_says_of_itself(cache, capsys, monkeypatch, tiny_sums):
    monkeypatch.setattr(sums, "find_world", lambda args: tiny_sums)
    monkeypatch.setattr("sys.argv", ["sums.py"])
    sums.main()
    facts, printed = building.read_facts(tiny_sums), capsys.readouterr().out
    assert f"{facts['parameters']:,} parameters" in printed
    assert rows_of(tiny_sums / "problems_train.jsonl")[0]["question"] in printed
