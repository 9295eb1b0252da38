"""benchmark/cost/padding.py: what each way of reading reads, and what is reported of it. Not how fast it is."""

import contextlib
import json
from functools import partial

import pytest
import torch

from benchmark.cost import padding
from ppo_rlhf.lib import packing, passes, processes
from ppo_rlhf.lib.errors import InputError

# Queries of 4, 6 and 8 tokens.
CASES = {
    "tales": padding.Case(1, "tales", 3, 1, 2, (4, 8, 6), (3, 3, 3), 3),
    "posts": padding.Case(2, "tales", 3, 1, 2, (4, 8, 6), (1, 3, 2), 6),
}


@pytest.fixture
def small(monkeypatch):
    """Small cases, whose networks count as wide, and passes that cost nothing."""
    for name, case in CASES.items():
        monkeypatch.setitem(padding.CASES, name, case)
    monkeypatch.setattr(packing, "LEAST_WIDTH", 1)
    monkeypatch.setattr(passes, "cost_of_pass", lambda model: 0)
    monkeypatch.setattr(processes, "keep_freed_memory", lambda: None)


def tokens_read(case: padding.Case, monkeypatch, way: str) -> int:
    """What all networks read in an update, in tokens."""
    update, networks, _ = padding.make_update(case, torch.device("cpu"))
    reading = {"padded": padding.padded, "unpadded": partial(padding.packed, networks)}
    count, embed = 0, torch.nn.Embedding.forward

    def counted(module: torch.nn.Embedding, ids: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += ids.numel() if module.num_embeddings != 128 else 0  # tokens, not positions
        return embed(module, ids)

    with monkeypatch.context() as patched, reading.get(way, contextlib.nullcontext)():
        patched.setattr(torch.nn.Embedding, "forward", counted)
        update()
    assert not any(passes.is_packed(network) for network in networks)
    return count


def test_what_is_read(small, monkeypatch):
    """Three rows: 33 tokens with padding and 27 without, of the queries alone 24 and 18."""
    case = CASES["tales"]
    even = tokens_read(padding.even(case), monkeypatch, "even")
    reads = 4  # of all: the reference, the reward model, two epochs; two of three sampled tokens are read besides
    assert even == 18 + 3 * 2 + 27 * reads
    assert tokens_read(case, monkeypatch, "padded") == 24 + 3 * 2 + 33 * reads
    assert tokens_read(case, monkeypatch, "as it is") == 24 + 3 * 2 + 33 * reads
    # Queries keep their padding while it samples. Of all else, one token stands for the padding of each pass.
    assert tokens_read(case, monkeypatch, "unpadded") == 24 + 3 * 2 + (27 + 1) * reads


def test_padded_knows_no_end(small, monkeypatch):
    """Rows of 8 + 6 columns, of which 24 tokens are real: 18 of the queries, and responses of 1, 2 and 3."""
    case, reads = CASES["posts"], 8  # of policy and critic for log-probs, reference, reward, two epochs of both
    everything = tokens_read(case, monkeypatch, "padded")
    assert everything == 3 * 8 + 3 * 5 + 3 * (8 + 6) * reads
    packed = tokens_read(case, monkeypatch, "passes")
    assert packed == 18 + 3 * 3 + 24 * reads  # rows are looked at after 4 tokens, of which three are read


@pytest.mark.parametrize("wide", [True, False])
def test_report(small, tmp_path, capsys, monkeypatch, wide):
    if not wide:
        monkeypatch.setattr(packing, "LEAST_WIDTH", 10**6)
    output = tmp_path / "padding.json"
    padding.main(padding.Args(cases=("tales", "posts"), turns=2, kernels=True, output=output))
    report = json.loads(output.read_text())
    printed = capsys.readouterr().out
    for row in report["table"]:
        assert f"| {' | '.join(row.values())} |" in printed
        assert bool(row["unpadded"]) == wide and bool(row["passes"]) == (row[""] == "posts")
        ways = {"padded", "even"} | ({"unpadded"} if wide else set()) | ({"passes"} if row[""] == "posts" else set())
        measured = report["measured"][row[""]]
        assert set(measured["seconds"]) == ways
        assert all(len(turns) == 2 and min(turns) > 0 for turns in measured["seconds"].values())
        assert set(measured["kernels"]) == set(padding.KINDS)
        assert sum(measured["kernels"].values()) == pytest.approx(1) and measured["kernels"]["attention"] > 0
    assert report["measured"]["tales"]["tokens"] == pytest.approx(33 / 27)
    assert report["measured"]["posts"]["tokens"] == pytest.approx(3 * (8 + 6) / (18 + 6))
    assert report["table"][0]["tokens"] == "1.22"


def test_kernels_of_a_cpu_only():
    with pytest.raises(InputError, match="--kernels goes with --device cpu"):
        padding.main(padding.Args(device="cuda", kernels=True))


def test_kinds_of_kernels():
    names = {
        "aten::addmm": "matrix products",
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward": "attention",
        "aten::gelu_backward": "GELU",
        "aten::index_select": "copies",
        "aten::add_": "layer norm, sums, additions",
        "aten::_fused_adamw_": "optimiser",
        "aten::exp": "the rest",
    }
    assert {name: padding.kind_of(name) for name in names} == names
