"""The training scripts share functions and constants by copy: the same name has the same text, comments included."""

import ast
from pathlib import Path

import pytest

import ppo_rlhf

FOLDER = Path(ppo_rlhf.__file__).parent
SCRIPTS = sorted(
    [*FOLDER.glob("train_*.py"), *(FOLDER / f"tldr_{stage}.py" for stage in ("sft", "reward", "policy", "all"))]
)
DIFFERENT = {
    *("Args", "train", "parse", "report"),  # what makes a script
    "PRESETS",  # values of the script's own Args
    "PANELS",  # curves of the script's own metrics
    "TAKEN",  # names of the script's own metrics
    "SHARED",  # arguments that the script's own stages have in common
}


def names_of(node: ast.stmt) -> list[str]:
    """The names that a statement at the top level defines: a function, a class or constants."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    targets = (
        node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    )
    return [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]


def definitions(source: str) -> dict[str, str]:
    """The text of each definition at the top level, from its first decorator on."""
    lines, found = source.splitlines(), {}
    for node in ast.parse(source).body:
        start = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
        found |= dict.fromkeys(names_of(node), "\n".join(lines[start - 1 : node.end_lineno]))
    return found


def copies(sources: list[str]) -> dict[str, set[str]]:
    """The different texts of each name that more than one source defines."""
    found = [definitions(source) for source in sources]
    names = [name for texts in found for name in texts]
    shared = {name for name in names if names.count(name) > 1} - DIFFERENT
    return {name: {texts[name] for texts in found if name in texts} for name in shared}


COPIES = copies([path.read_text() for path in SCRIPTS])


def test_the_scripts_share_functions_and_constants():
    assert {"FINAL_NORM_BIASES", "FIRST_RATIO_TOLERANCE"} <= set(COPIES)
    assert {"read_tokens", "scaled_logits", "RewardModel", "AdamTensorFlowStyle", "left_pad", "generate"} <= set(
        COPIES
    )
    assert {"scheduled_lr", "save_reward_model", "load_reward_model", "compute_gae", "truncate_at"} <= set(COPIES)


@pytest.mark.parametrize("name", sorted(COPIES))
def test_same_name_same_text(name):
    assert len(COPIES[name]) == 1


@pytest.mark.parametrize(
    "other", ["def f(x):\n    return x + 1", "def f(x):\n    # why\n    return x", "@g\ndef f(x):\n    return x"]
)
def test_a_difference_is_found(other):
    assert len(copies(["def f(x):\n    return x", other])["f"]) == 2


@pytest.mark.parametrize(
    "other",
    ["F = 2", "F = 1  # why", "F: int = 1", "F = G = 1", "(F, G) = 1, 2", "F = (\n    1\n)", "def F():\n    pass"],
)
def test_a_difference_of_constants_is_found(other):
    assert len(copies(["F = 1", other])["F"]) == 2
    assert copies([other, other])["F"] == {other}
