"""tests/soak.py with a fixed seed: a run that is killed again and again gives the numbers of one that is not."""

from pathlib import Path

import pytest
import soak
from runs import only


def test_a_run_that_is_killed_again_and_again(tiny_world, tmp_path, capsys):
    places = soak.soak(8, 1, tmp_path, tiny_world, print)
    assert places.total() == 8 and len(places) >= 5
    assert places["tensors of a checkpoint"] + places["checksum of a checkpoint"] > 0
    undisturbed: Path = tmp_path / "undisturbed"

    # What the comparison sees: a number that differs in its last digit.
    file = only(undisturbed, "runs/train_policy__*/metrics.csv")
    header, first, rest = file.read_text().split("\n", 2)
    cells = first.split(",")
    column = header.split(",").index("objective/entropy")
    cells[column] = str(float(cells[column]) * (1 + 2**-50))
    file.write_text("\n".join([header, ",".join(cells), rest]))
    with pytest.raises(AssertionError):
        soak.compare(tmp_path / "disturbed", undisturbed)
