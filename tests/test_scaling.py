"""benchmark/cost/scaling.py against numbers by hand, and its page against the committed results."""

import runpy
import shlex
from dataclasses import replace

import pytest
from test_chapter2 import commands

from benchmark.cost import memory, scaling, speed
from benchmark.cost.scaling import (
    PAPER,
    Knobs,
    Machine,
    Work,
    memory_of,
    most,
    parameters,
    process_memory,
    update_seconds,
)
from ppo_rlhf import tldr_all

FOREVER = float("inf")
ARITHMETIC = Machine(matmul=1e12, memory=FOREVER, overhead=0.0, efficiency=1.0)  # nothing else takes time
WORK = Work("gpt2", query_length=64, response_length=24, batch_size=512)


def test_parameters():
    assert parameters(scaling.SHAPES["gpt2"]()) == 124_439_808
    assert parameters(scaling.SHAPES["gpt2-xl"]()) == 1_557_611_200
    assert parameters(scaling.SHAPES["pythia-6.9b"]()) == 6_857_302_016


def test_arithmetic_alone_is_that_of_the_flops():
    flops = speed.flops_per_episode(scaling.SHAPES["gpt2"](), 64, 24, 4)
    seconds = update_seconds(WORK, ARITHMETIC)
    for part in ("generation", "scoring", "training"):
        assert seconds[part] == pytest.approx(512 * flops[part] / 1e12)
    assert seconds["communication"] == 0


def test_memory_binds_generation_of_one_episode():
    """24 times all weights: GPT-2 in float32 at 1 GB/s."""
    machine = Machine(matmul=FOREVER, memory=1e9, overhead=0.0)
    seconds = update_seconds(replace(WORK, batch_size=1), machine)["generation"]
    assert seconds == pytest.approx(24 * 4 * 0.1244, rel=0.05)


def test_overhead_counts_for_each_layer_and_token():
    machine = Machine(matmul=FOREVER, memory=FOREVER, overhead=1e-3)
    assert sum(update_seconds(WORK, machine).values()) == pytest.approx(24 * 12 * 1e-3)


def test_all_reduce_by_hand():
    machine = replace(ARITHMETIC, interconnect=1e9)
    sent = 4 * 124_439_808  # bytes of the gradients
    for processes, sharded, times in ((1, False, 0), (8, False, 4 * 2 * 7 / 8), (8, True, (4 * 3 + 1) * 7 / 8)):
        seconds = update_seconds(replace(WORK, processes=processes, sharded=sharded), machine)
        assert seconds["communication"] == pytest.approx(times * sent / 1e9)


def test_memory_of_a_process_by_hand():
    assert process_memory(WORK) == 24 * 124_439_808
    assert process_memory(replace(WORK, processes=8)) == 32 * 124_439_808
    assert process_memory(replace(WORK, processes=8, sharded=True)) == (3 + 2) * 124_439_808


# A network of 2 layers, width 8, 16 ids, no middle worth naming: numbers by hand.
SMALL = memory.shape(8, 2, 1, 16)()
LAYER = 3 * 8 * 8 + 3 * 8 + 8 * 8 + 8 + 2 * 8 * 32 + 32 + 8 + 4 * 8  # queries, keys, values; out; feed-forward; norms
CRITIC = 2 * LAYER + 16 * 8 + 2 * 8  # embedding, last norm
POLICY = CRITIC + 16 * 8  # output layer
AROUND = POLICY + CRITIC - 4 * LAYER
KNOBS = Knobs(processes=4, sequence_length=10, response_length=3, rows=6, micro_batch=2)


def test_memory_of_chapter_2_by_hand():
    found = memory_of(SMALL, KNOBS)
    slices = (POLICY + CRITIC) / 4
    for kinds in found.values():
        always = [kinds[name] for name in ("weights", "gradients", "moments", "frozen models")]
        assert always == [4 * slices, 4 * slices, 8 * slices, 2 * slices]
    rollout, training = list(found.values())[:2], list(found.values())[2:]
    assert [kinds["copy that samples"] for kinds in rollout] == [2 * POLICY] * 2
    assert rollout[0]["cache"] == 6 * 10 * 2 * 2 * 8 * 2 and rollout[0]["logits"] == 24 * 6 * 16
    assert rollout[1]["logits"] == 12 * 6 * 3 * 16 and training[0]["logits"] == 12 * 2 * 3 * 16
    gathered = [kinds["gathered"] for kinds in (rollout[1], *training)]
    assert gathered == [4 * AROUND + 12 * LAYER, 4 * AROUND + 16 * LAYER, 12 * AROUND]
    assert training[0]["activations"] == 2 * 2 * 10 * 2 * 8 * 4 + 17 * 2 * 10 * 8 * 2  # what enters 4 layers; of one
    whole = memory_of(SMALL, replace(KNOBS, checkpointing=False))["a backward pass begins"]["activations"]
    assert whole == 4 * (17 * 2 * 10 * 8 * 2 + 2 * LAYER)
    assert most(SMALL, KNOBS) == {
        "rollout": max(sum(kinds.values()) for kinds in rollout),
        "training": max(sum(kinds.values()) for kinds in training),
    }


def test_memory_is_as_measured():
    """Within 10 %, at two sizes, in two and four processes, with all knobs and without."""
    rows = scaling.memory_check_rows(memory.RESULT)
    assert len(rows) == 8
    for row in rows:
        assert all(0.9 <= float(row[f"{phase}, ratio"]) <= 1.1 for phase in ("rollout", "training"))


def test_the_largest_model_of_the_paper_fits(tmp_path):
    """With the arguments of chapter2.sh."""
    (words,) = commands(tmp_path, "6.9b")
    args = tldr_all.parse(shlex.split(words[words.index("--command") + 1].partition("tldr_all.py")[2])).policy
    assert args.frozen_bfloat16 and args.gradient_checkpointing and args.dtype == "bfloat16"
    sizes = (args.ppo.local_rollout_batch_size, args.ppo.local_micro_batch_size, args.task.response_length)
    assert sizes == (PAPER.rows, PAPER.micro_batch, PAPER.response_length)
    assert PAPER.sequence_length == args.task.query_length + args.task.response_length
    assert max(most(scaling.SHAPES["pythia-6.9b"](), PAPER).values()) < 70e9


@pytest.mark.parametrize("word, status", [("--help", 0), ("bandwith", 2), ("--bandwidth", 2)])
def test_help_and_mistyped_words_write_nothing(monkeypatch, capsys, word, status):
    written = scaling.PAGE.stat().st_mtime_ns
    monkeypatch.setattr("sys.argv", ["scaling.py", word])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(scaling.__file__, run_name="__main__")
    assert ended.value.code == status and scaling.PAGE.stat().st_mtime_ns == written
    said = capsys.readouterr()
    assert "{tables,bandwidth}" in said.out if word == "--help" else word in said.err


def test_the_page_holds_what_the_script_writes():
    page = scaling.PAGE.read_text()
    assert page.count(scaling.START) == page.count(scaling.END) == 1
    assert page.split(scaling.START)[1].split(scaling.END)[0].strip() == scaling.tables()
    assert page.count(scaling.MEMORY_START) == page.count(scaling.MEMORY_END) == 1
    written = page.split(scaling.MEMORY_START)[1].split(scaling.MEMORY_END)[0].strip()
    assert written == scaling.memory_tables()
