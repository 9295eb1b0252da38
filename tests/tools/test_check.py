"""`python -m ppo_rlhf.check`: ours matches, each known fault is rejected and named, and nothing crashes it."""

import functools
import inspect
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mistakes
import numpy as np
import our_adapter
import pytest
import torch
from checked import report_of, run
from mistakes import text_of
from processes import ForkingPopen, read_by_nobody
from runs import ROOT, error_line

from ppo_rlhf.check import __main__ as command, cases, diagnosis, faults, forms

PAGE = (ROOT / "docs/check.md").read_text()


@pytest.fixture(autouse=True)
def forked(monkeypatch):
    """The process of an adapter is a fork of this one."""
    monkeypatch.setattr(subprocess, "Popen", ForkingPopen)


# ---- What matches ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", cases.NAMES)
def test_the_plain_forms_match(name):
    """They are held to the golden numbers here; the numbers of properties are theirs."""
    report = report_of(name, getattr(forms, name))
    assert report.ok and report.cases == len(cases.all_cases()[name]) and not report.left_out, report


@pytest.mark.parametrize("name", sorted(set(cases.NAMES) & vars(our_adapter).keys()))
def test_our_functions_match(name):
    report = report_of(name, getattr(our_adapter, name))
    assert report.ok and report.cases == len(cases.all_cases()[name]), report


test_mistake_is_detected, test_rebuilt_functions_pass = mistakes.tests_of(globals())


def test_we_have_every_function_but_one():
    assert set(cases.NAMES) - vars(our_adapter).keys() == {"explained_variance"}  # ours comes from sums over a batch


# ---- What does not ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", faults.FAULTS, ids=lambda fault: f"{fault.function}: {fault.name}")
def test_a_fault_is_rejected_and_named(fault):
    function = functools.wraps(getattr(forms, fault.function))(lambda **named: fault(**named))
    report = report_of(fault.function, function)
    assert not report.ok and fault in report.diagnoses, (report.diagnoses, report.failed)


def test_an_unknown_fault_is_described(capsys):
    def whiten(values, mask, keep_mean):
        return forms.whiten(values, mask, keep_mean) * 1.5

    report = report_of("whiten", whiten)
    assert not report.ok and not report.diagnoses
    command.print_table([report], [], False)
    shown = capsys.readouterr().out
    assert "No known fault has these numbers." in shown
    assert "one_element_1x1 (golden): result [0, 0] is 4.875, not 3.25 (--case whiten:5)" in shown


def test_marks_have_entries_and_parts_of_the_text_are_found():
    """The register has each mark, and each text that an edit replaces is in its function exactly once."""
    pages = {path.name: path.read_text() for path in (ROOT / "docs/reference").glob("chapter*.md")}
    for fault in faults.BOOK:
        if fault.mark or fault in faults.FAULTS:
            page, _, mark = fault.page.removeprefix("docs/reference/").partition("#")
            assert f'<a id="{mark}"></a>' in pages[page], fault
        assert fault.says.endswith("."), fault
        for place, edits in fault.edits.items():
            assert faults.edited(text_of(place), edits) != text_of(place), fault
    assert len(faults.BOOK) == len({fault.title for fault in faults.BOOK}) > 350 and len(faults.FAULTS) > 250
    with pytest.raises(ValueError, match="'nothing' is there 0 times: def whiten"):
        faults.edited(text_of("train_policy.py::whiten"), (("nothing", ""),))


# ---- Correct code in another form ------------------------------------------------------------------------------


def policy_loss_of_one_bound(advantages, logprobs, new_logprobs, cliprange):
    mask = torch.ones_like(logprobs, dtype=torch.bool)
    return float(forms.policy_loss(new_logprobs, logprobs, advantages, mask, cliprange))


def kl_estimate_of_two(logprobs, ref_logprobs, name):
    return {"k1": logprobs - ref_logprobs, "k2": (logprobs - ref_logprobs) ** 2 / 2}[name]


LEFT_OUT = {
    policy_loss_of_one_bound: {"no mask", "no cliprange_high", "no dual_clip", "no tokens"},
    kl_estimate_of_two: {"no mask", *(f"name {name} is refused" for name in ("abs", "k3", "k1+", "k2+", "k3+"))},
}


@pytest.mark.parametrize("function", LEFT_OUT, ids=lambda function: function.__name__)
def test_what_correct_code_does_not_take_is_left_out(function):
    """test_check_score.py has correct code in other forms."""
    report = report_of(next(name for name in cases.NAMES if function.__name__.startswith(name)), function)
    assert report.ok and report.cases >= 2 and set(report.left_out) == LEFT_OUT[function], report


FLOAT_MASKS = re.findall(r"```python\n(.*?)```", PAGE.split("## Functions")[1], re.DOTALL)[2]


def test_the_page_s_adapter_for_float_masks_matches():
    """Code with a float mask and other names, as many people have it."""
    namespace = {}
    exec(FLOAT_MASKS, namespace)
    report = report_of("value_loss", namespace["value_loss"])
    assert report.ok and not report.left_out, report


# ---- Ways to call ----------------------------------------------------------------------------------------------


def mapped(change: Callable, x: Any, kind: type) -> Any:
    """Lists and tuples with each part of a kind changed."""
    if isinstance(x, list | tuple):
        return type(x)(mapped(change, part, kind) for part in x)
    return change(x) if isinstance(x, kind) else x


def of_arrays(function: Callable) -> Callable:
    """It computes with tensors inside, but raises an error if it gets one."""

    def inner(**given):
        if any(isinstance(x, torch.Tensor) for x in [*given.values(), *given.get("losses", [])]):
            raise TypeError("no tensors, please")
        given = {name: mapped(torch.from_numpy, x, np.ndarray) for name, x in given.items()}
        return mapped(torch.Tensor.numpy, function(**given), torch.Tensor)

    return functools.wraps(function)(inner)


def of_annotated_arrays(function: Callable) -> Callable:
    """It also takes tensors, of which it makes something else."""

    def inner(**given):
        given = {name: mapped(torch.zeros_like, x, torch.Tensor) for name, x in given.items()}
        given = {name: mapped(torch.from_numpy, x, np.ndarray) for name, x in given.items()}
        return function(**given)

    parameters = inspect.signature(function).parameters.values()
    inner.__signature__ = inspect.Signature([x.replace(annotation="np.ndarray | None") for x in parameters])
    return inner


def returning(kind: type, function: Callable) -> Callable:
    """It returns its results and metrics."""

    def inner(**given):
        returned = function(**given)
        return kind([*(returned if isinstance(returned, tuple) else [returned]), {"loss": 3.0}])

    return functools.wraps(function)(inner)


def in_a_pair(function: Callable) -> Callable:
    return functools.wraps(function)(lambda **given: (function(**given), {"loss": 3.0}))


def positional(function: Callable, prefix: str = "") -> Callable:
    names = [prefix + name for name in inspect.signature(function).parameters]
    found = eval(f"lambda {', '.join(names)}, /: function({', '.join(names)})", {"function": function})
    found.__defaults__ = function.__defaults__
    return found


class Object:
    def __init__(self, function: Callable):
        self.function = function

    def __call__(self, *args, scale, **kwargs):
        return self.function(*args, **kwargs)


class Compiled(Object):
    __signature__ = "cannot be read"

    def __call__(self, *args):
        return self.function(*args)


class Module(torch.nn.Module):
    def __init__(self, function: Callable):
        super().__init__()
        self.forward = function


def decorated(function: Callable) -> Callable:
    return lambda *args, **kwargs: function(*args, **kwargs)


WAYS = {
    "arrays": of_arrays,
    "annotated arrays": of_annotated_arrays,
    "a tuple with metrics": functools.partial(returning, tuple),
    "a list with metrics": functools.partial(returning, list),
    "a tuple in a tuple": in_a_pair,
    "**kwargs": lambda function: lambda **kwargs: function(**kwargs),
    "*args, **kwargs": decorated,
    "*args": lambda function: lambda *args: function(*args),
    "positional-only": positional,
    "positional-only, other names": functools.partial(positional, prefix="my_"),
    "positional-only, decorated": lambda function: decorated(positional(function)),
    "positional-only, *args": lambda function: lambda x, /, *args: function(x, *args),
    "no signature": Compiled,
    "partial of an object": lambda function: functools.partial(Object(function), scale=2.0),
    "module": Module,
}
CALLED = {
    "whiten": "not scaled",
    "policy_loss": "mean of each part",
    "group_advantages": "over the batch",
    "gae": "without lambda",
    "accumulate": "mean of means",
    "rejection_mask": "of tokens for sequences",
    "adam_step": "counts from 0",
}


@pytest.mark.parametrize("name", CALLED)
@pytest.mark.parametrize("way", WAYS)
def test_a_way_of_calling_hides_neither_correct_code_nor_a_mistake(way, name):
    report = report_of(name, WAYS[way](getattr(forms, name)))
    assert report.ok and report.cases == len(cases.all_cases()[name]) and not report.left_out, report
    (fault,) = [fault for fault in faults.of(name) if fault.name == CALLED[name]]
    report = report_of(name, WAYS[way](fault.compiled))
    assert not report.ok and report.cases and fault in report.diagnoses, report


@pytest.mark.parametrize("way", ["**kwargs", "*args, **kwargs", "*args", "no signature", "partial of an object"])
def test_an_argument_that_a_hidden_function_lacks_is_left_out(way):
    def few(new_logprobs, logprobs, advantages, mask, cliprange):
        return forms.policy_loss(new_logprobs, logprobs, advantages, mask, cliprange)

    def sized(scores, group_size):
        return forms.group_advantages(scores, None, group_size, "grpo")

    report = report_of("policy_loss", WAYS[way](few))
    assert report.ok and set(report.left_out) == {"no cliprange_high", "no dual_clip", "no tokens"}, report
    report = report_of("policy_loss", WAYS[way](lambda new, logprobs, advantages, mask, cliprange: new.sum()))
    assert not report.ok
    if "*args" not in way and way != "no signature":
        assert report_of("group_advantages", WAYS[way](sized)).ok


def test_a_value_that_is_refused_is_not_left_out():
    """The function takes the argument, so an error that names it is a mistake inside."""

    def policy_loss(**arguments):
        return (forms.policy_loss if arguments["dual_clip"] is None else forms.gspo_loss)(**arguments)

    report = report_of("policy_loss", policy_loss)
    assert not report.ok and not report.left_out
    assert all("unexpected keyword argument 'dual_clip'" in line for line in report.failed.values()), report


def test_of_two_errors_that_of_the_right_kind_of_argument_is_shown():
    def whiten(values, mask, keep_mean):
        return values.astype(float).reshape(3, 1_000)

    def rejection_mask(logprobs, sampler_logprobs, mask, kind, low, high):
        return logprobs.log_softmax(7)

    for function, words in ((whiten, "cannot reshape array"), (rejection_mask, "Dimension out of range")):
        (line, *_) = report_of(function.__name__, function).failed.values()
        assert words in line, line


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_what_cannot_be_called_is_no_wrong_number(tmp_path, monkeypatch, capsys):
    traced = torch.jit.trace(lambda x, y: x - y, (torch.ones(2), torch.ones(2)))
    refusals = {
        "kl_estimate": (
            traced,
            "torch.jit is not supported; wrap it in a Python function of (logprobs, ref_logprobs,",
        ),
        "token_logprobs": (lambda x, y: x, "it takes x, y; the arguments of token_logprobs are logits, tokens,"),
        "gae": (
            lambda values, rewards, *args: 0,
            "because of *args, its arguments must have the order rewards, values,",
        ),
    }
    for name, (function, words) in refusals.items():
        report = report_of(name, function)
        assert not report.ok and not report.cases and not report.failed and words in report.refused, report
    Path(tmp_path / "adapter.py").write_text(
        "def entropy(x): return x\nfrom ppo_rlhf.check.forms import has_stop, truncate"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["check", "adapter.py"])
    assert command.main() == 2
    shown = " ".join(capsys.readouterr().out.split())
    assert "entropy 0 0 - not called No number of it is known, because it cannot be called: it takes x;" in shown
    with Path("adapter.py").open("a") as file:
        file.write("\ndef has_stop(responses, stop_id, after): return responses[:, 0] == stop_id\n")
    assert command.main() == 1


# ---- What must not pass unseen -----------------------------------------------------------------------------------


def test_positions_are_checked_without_a_temperature():
    (fault,) = [each for each in faults.of("response_logprobs") if each.name == "without positions"]

    def response_logprobs(model, tokens, attention_mask, context_length):
        return fault(model=model, tokens=tokens, attention_mask=attention_mask, context_length=context_length)

    report = report_of("response_logprobs", response_logprobs)
    assert not report.ok and "no temperature" in report.left_out and fault in report.diagnoses


def test_a_loss_that_gets_no_parts_is_told_so(capsys):
    def policy_loss(new_logprobs, logprobs, advantages, mask, cliprange):
        return forms.policy_loss(new_logprobs, logprobs, advantages, mask, cliprange)

    command.print_table([report_of("policy_loss", policy_loss)], [], False)
    assert "a mean of each micro-batch would pass unseen" in capsys.readouterr().out
    command.print_table([report_of("policy_loss", forms.policy_loss)], [], False)
    assert "unseen" not in capsys.readouterr().out


def test_a_function_without_cases_is_not_ok(capsys):
    def policy_loss(new_logprobs, logprobs):
        return new_logprobs.mean()

    report = report_of("policy_loss", policy_loss)
    assert not report.ok and not report.cases
    command.print_table([report], [], True)
    assert "Nothing could be compared. policy_loss(new_logprobs" in capsys.readouterr().out


def test_results_of_a_dict_are_found_by_name():
    def gae(rewards, values, mask, gamma, lam):
        advantages, returns = forms.gae(rewards, values, mask, gamma, lam)
        return {"returns": returns, "loss": 0, "advantages": advantages}

    assert report_of("gae", gae).ok
    assert report_of("kl_controller", lambda **x: {"kl_coef": forms.kl_controller(**x)}).ok
    assert report_of("kl_controller", lambda **x: (forms.kl_controller(**x), 1)).ok


# ---- The command -----------------------------------------------------------------------------------------------

CRASHES = """
import sys
import torch

def whiten(values, mask, keep_mean): raise RuntimeError("no")
def gae(rewards, values, mask, gamma, lam): return rewards[:, :1], values[:, :1]
def truncate(responses, stop_id, pad_id, after): responses[:] = 0; return responses
def response_mask(responses, stop_id): sys.exit(0)
def entropy(logits): return "many"
def value_loss(new_values, values, returns): print("noise"); return None
def kl_controller(kl_coef, kl, target, episodes, horizon):
    return kl_coef * (1 + min(max(kl / target - 1, -0.2), 0.2) * episodes / horizon)
def helper(): pass
"""


def test_what_raises_or_ends_is_a_row(tmp_path):
    (tmp_path / "adapter.py").write_text(CRASHES)
    done = run("adapter.py", folder=tmp_path)
    assert done.status == 1 and done.stdout.endswith("names are not known: helper\n")
    said = {
        "whiten": "raises RuntimeError: no (adapter.py, line 5)",
        "gae": "shape (1, 1) where (1, 5) is expected",
        "truncate": "it changed its argument responses",
        "response_mask": "raises SystemExit: 0 (adapter.py, line 8)",
        "entropy": "it returned str, which holds no numbers",
        "value_loss": "it returned None",
    }
    for name, words in said.items():
        assert f"{words} (--case {name}:" in " ".join(done.stdout.split()), (name, done.stdout)
    assert re.search(r"^kl_controller +7 +7 .*\n\w", done.stdout, re.MULTILINE)


def test_the_tutorial_prints_what_the_page_shows(tmp_path, monkeypatch, capsys):
    functions = PAGE.split("## Functions")[1]
    blocks = [re.findall(rf"```{kind}\n(.*?)```", functions, re.DOTALL) for kind in ("python", "text")]
    assert [len(found) for found in blocks] == [3, 2]
    monkeypatch.chdir(tmp_path)
    Path("docs").symlink_to(ROOT / "docs")  # where it is, paths are short
    monkeypatch.setattr(sys, "argv", ["check", "adapter.py"])
    (wrong, last_line, _), shown = blocks
    corrected = wrong[: wrong.rindex("    return")] + last_line
    for adapter, printed, status in zip((wrong, corrected), shown, (1, 0), strict=True):
        Path("adapter.py").write_text(adapter)
        assert command.main() == status
        assert capsys.readouterr().out == printed


def test_quiet_prints_only_what_does_not_match(capsys):
    reports = [report_of("entropy", forms.entropy), report_of("entropy", faults.of("entropy")[0])]
    command.print_table(reports, ["helper"], True)
    assert capsys.readouterr().out.count("\nentropy") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "adapter.py is no file"),
        ("import nothing_of_this_name", "adapter.py cannot be imported: ModuleNotFoundError"),
        ("def gea(): pass", "adapter.py has none of the functions that can be checked, only gea"),
        ("def whiten(values):\n    raise NotImplementedError", "nothing could be compared"),
        ("import os\ndef whiten(values): os._exit(5)", "adapter.py: whiten:0 ended its process with status 5"),
        ("import time\ndef whiten(values): time.sleep(1_000)", "adapter.py: whiten:0 took longer than 5 seconds"),
    ],
)
def test_bad_input_ends_in_one_line(text, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path("adapter.py").write_text(text)
    if "longer" in message:
        monkeypatch.setattr(command, "LIMIT", 5)
    monkeypatch.setattr(sys, "argv", ["check", "adapter.py"])
    assert message in error_line(command.main)


def test_an_interpreter_that_does_not_serve_is_named(tmp_path):
    (tmp_path / "adapter.py").write_text("def whiten(values): return values")
    (tmp_path / "bare").write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    (tmp_path / "bare").chmod(0o755)
    lacks = "lacks what the check needs:"
    for python, message in (
        ("/nope", "cannot be run: No such file"),
        ("./bare", f"{lacks} Mod"),
        ("/bin/true", f"{lacks} it does not run Python code"),
    ):
        done = run("adapter.py", "--python", python, folder=tmp_path)
        assert done.status == 2 and f"--python {python} {message}" in done.stderr and done.stderr.count("\n") == 1


def test_the_numbers_of_one_case_are_printed(tmp_path):
    (tmp_path / "adapter.py").write_text("def whiten(values, mask, keep_mean): return values * 0 + 7")
    done = run("adapter.py", "--case", "whiten:\N{ARABIC-INDIC DIGIT THREE}", folder=tmp_path)
    assert done.status == 1
    for words in ("\nvalues = tensor", "\nexpected result = tensor", "\nyour result = "):
        assert words in done.stdout
    for number in ("1000", "\N{SUPERSCRIPT THREE}"):
        assert run("adapter.py", "--case", f"whiten:{number}", folder=tmp_path).status == 2


def test_the_list_can_be_cut_off(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["check", "--list"])
    assert command.main() == 0 and capsys.readouterr().out.startswith("truncate(")
    with read_by_nobody(), pytest.raises(SystemExit) as end:
        runpy.run_path(command.__file__, run_name="__main__")
    assert end.value.code == 2


def test_an_exercise_is_written_and_found_to_be_fixed(tmp_path):
    path, fault = tmp_path / "exercise_7.py", command.EXERCISES[6]
    (tmp_path / "exercise_8.py").symlink_to("nowhere/exercise_8.py")
    assert "No such file or directory: 'exercise_8.py'" in run("--exercise", "8", folder=tmp_path).stderr
    written, broken = (run("--exercise", "7", folder=tmp_path) for _ in range(2))
    assert written.status == 0 and path.read_text() in written.stdout and fault.says not in path.read_text()
    assert broken.status == 1 and "is not fixed yet" in broken.stdout
    path.write_text(
        "import math\n\nimport torch\nfrom torch import Tensor\n\n"
        + inspect.getsource(getattr(forms, fault.function))
    )
    fixed = run("--exercise", "7", folder=tmp_path)
    assert fixed.status == 0 and f"{fault.function} is fixed. What was wrong: {fault.says}" in fixed.stdout


def test_nan_is_an_error():
    expected = torch.ones(2)
    assert diagnosis.distance(expected * torch.nan, expected, None) > cases.TOLERANCE


# ---- The page --------------------------------------------------------------------------------------------------


def test_the_page_lists_every_function_with_its_arguments():
    page, _ = (ROOT / "docs/reference/adapter.md").read_text().split("## A dump")
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", page, re.MULTILINE))
    assert f"[{len(rows)} functions]" in PAGE and rows.keys() == set(cases.NAMES)
    for name, cell in rows.items():
        assert re.findall(r"`(\w+)", cell) == list(inspect.signature(getattr(forms, name)).parameters), name
