"""The matrix of mistakes (benchmark/matrix.py) has the whole book, and tests reject each of its mistakes."""

from pathlib import Path

from mistakes import rows_of_matrix

from benchmark.matrix import MUTANTS


def test_each_mistake_of_the_book_is_rejected_by_a_test():
    rows = rows_of_matrix()
    assert {(title, place) for title, place, _, by, _ in rows if by} == set(MUTANTS)
    assert {file for _, _, file, _, _ in rows} <= {path.name for path in Path(__file__).parent.glob("test_*.py")}
