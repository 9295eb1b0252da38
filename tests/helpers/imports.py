"""Which packages the text of a module imports."""

import ast
import sys


def needs(source: str) -> set[str]:
    """The packages that a module imports, anywhere in it, beyond Python's own; a dot is a relative import."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {name.name.split(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add("." if node.level else node.module.split(".")[0])
    return found - sys.stdlib_module_names
