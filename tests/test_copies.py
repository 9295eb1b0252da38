"""The training scripts share functions by copy: the same name stands for the same text, comments included."""

import ast
from pathlib import Path

import pytest

import ppo_rlhf

FOLDER = Path(ppo_rlhf.__file__).parent
SCRIPTS = sorted(
    [*FOLDER.glob("train_*.py"), *(FOLDER / f"tldr_{stage}.py" for stage in ("sft", "reward", "policy", "all"))]
)
DIFFERENT = {"Args", "train", "parse", "report"}


def definitions(source: str) -> dict[str, str]:
    """The text of each function and class at the top level, from its first decorator on."""
    lines, found = source.splitlines(), {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            found[node.name] = "\n".join(lines[start - 1 : node.end_lineno])
    return found


def copies(sources: list[str]) -> dict[str, set[str]]:
    """The different texts of each name that more than one source defines."""
    found = [definitions(source) for source in sources]
    names = [name for texts in found for name in texts]
    shared = {name for name in names if names.count(name) > 1} - DIFFERENT
    return {name: {texts[name] for texts in found if name in texts} for name in shared}


COPIES = copies([path.read_text() for path in SCRIPTS])


def test_the_scripts_share_functions():
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
