"""The matrix of mistakes (matrix.py) has the whole book, and tests reject each of its mistakes."""

from pathlib import Path

from matrix import MATRIX, MUTANTS, rows_of


def test_each_mistake_of_the_book_is_rejected_by_a_test():
    rows = rows_of(MATRIX)
    assert {(title, place) for title, place, _, by, _ in rows if by} == set(MUTANTS)
    assert {file for _, _, file, _, _ in rows} <= {path.name for path in Path(__file__).parent.glob("test_*.py")}
