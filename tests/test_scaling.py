"""benchmark/scaling.py against numbers by hand, and its page against the committed results."""

import runpy
from dataclasses import replace

import pytest
import scaling
import speed
from scaling import Machine, Work, parameters, process_memory, update_seconds

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
    assert process_memory(replace(WORK, processes=8, sharded=True)) == (2 + 4 + 8) * 124_439_808


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
