"""What the server of processes.py does once, so that none of its processes has to.

It fills tables of transformers. And the texts of arguments are read from the sources only if they are to be shown:
that takes longer than the rest of parsing a command line.
"""

import sys

import tyro
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

get_checkpoint_conversion_mapping("gpt2")
parse = tyro._docstrings.parse_docstring_from_object


def parse_if_shown(described: object) -> dict[str, str]:
    """The text of each argument of a class."""
    shown = {"-h", "--help"} & set(sys.argv)
    return parse(described) if shown else dict.fromkeys(vars(described).get("__annotations__", ()), "")


tyro._docstrings.parse_docstring_from_object = parse_if_shown
