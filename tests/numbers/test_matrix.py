"""The matrix of mistakes (benchmark/matrix.py) has the whole book, and names tests that exist.

That these tests still fail with their mistakes is measured when the matrix is made, which takes hours.
"""

import ast

from mistakes import rows_of_matrix

from benchmark.matrix import HANGS, MUTANTS, ROOT, paths_of_tests


def test_each_mistake_of_the_book_has_a_row():
    assert {(title, place) for title, place, _, by, _ in rows_of_matrix() if by} == set(MUTANTS)


def test_each_row_names_a_test_that_exists():
    """Of a test with cases, only the function is looked for."""
    rows = {(file, by.removesuffix(HANGS).strip().partition("[")[0]) for _, _, file, by, _ in rows_of_matrix()}
    files = {name: ast.parse((ROOT / path).read_text()) for name, path in paths_of_tests(ROOT).items()}
    functions = {(name, x.name) for name, file in files.items() for x in file.body if isinstance(x, ast.FunctionDef)}
    assert rows - functions == set()
