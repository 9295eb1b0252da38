"""static/annotate.html computes what small/micro.py does, and can be used by keyboard alone."""

import json
import re

import pytest
from runs import ROOT

PAGE = ROOT / "static/annotate.html"
PLEASANT = re.compile("the (cat|dog) is (kind|happy)|the (kind|happy) (cat|dog) sleeps")
SECONDS = 120_000  # milliseconds


def press_on(page, name: str, key: str = "Enter") -> None:
    """Go to an element with the tab key, and press a key there."""
    for _ in range(30):
        if page.evaluate("document.activeElement.id || document.activeElement.name") == name:
            return page.keyboard.press(key)
        page.keyboard.press("Tab")
    raise AssertionError(f"the tab key does not reach {name}")


def take_the_pleasant(page, left: str, right: str, until: str) -> None:
    """As an annotator who likes pleasant sentences, and takes neither text if both are, or none."""
    for _ in range(300):
        pleasant = [bool(PLEASANT.match(page.locator(name).inner_text())) for name in (left, right)]
        page.keyboard.press({-1: "ArrowLeft", 0: "ArrowDown", 1: "ArrowRight"}[pleasant[1] - pleasant[0]])
        if page.locator(until).is_visible():
            return
    raise AssertionError(f"{until} is not shown")


def largest_difference(ours, theirs) -> float:
    if isinstance(theirs, dict):
        return max(largest_difference(ours[name], theirs[name]) for name in theirs)
    if isinstance(theirs, list):
        return max(largest_difference(a, b) for a, b in zip(ours, theirs, strict=True))
    return abs(ours - theirs)


def test_it_agrees_with_the_golden_trajectory(opened):
    golden = json.loads((ROOT / "tests/golden/micro.json").read_text())
    ours = opened(PAGE).evaluate("trajectory(20)")
    for name, numbers in ours.items():
        assert largest_difference(numbers, golden[name]) < 1e-9, name
    assert {"language_model", "choices", "scores", "optimum", "updates", "policy"} == ours.keys()


def test_by_keyboard_alone_the_reader_sees_a_policy_cheat_and_then_a_leash(opened):
    page = opened(PAGE, viewport={"width": 390, "height": 844})
    page.add_init_script("Math.random = () => 0.5")
    page.reload()
    page.locator("#begin").wait_for(timeout=SECONDS)
    press_on(page, "begin")
    take_the_pleasant(page, "#left", "#right", until="#practice")
    assert "your 24 choices" in page.locator("#predicts").inner_text()
    leashes = []
    while "leash kept the model near" not in page.locator("#moral").inner_text():
        assert len(leashes) < 3
        press_on(page, "guess", "Space")
        press_on(page, "run")
        page.locator("#ask:enabled").wait_for(timeout=SECONDS)
        press_on(page, "ask")
        take_the_pleasant(page, "#left2", "#right2", until="#verdict")
        cells = page.locator("#runs tr").last.locator("td").all_inner_texts()
        leashes.append((float(cells[0]), float(cells[2]), int(cells[4][0]), int(cells[5][0])))
        assert page.locator("#to-ward").is_visible() == (leashes[-1][0] > 0)
        press_on(page, "again")
    (*_, (free, free_kl, model, mine), (leash, kl, *_, mine_with_leash)) = leashes
    assert free == 0 and leash == 0.3 and free_kl > 3 > kl and model - mine >= 2 and mine_with_leash > mine
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


def test_the_ward_has_a_patient_whose_mistake_can_be_named(opened):
    page = opened(PAGE)
    page.locator("#begin").wait_for(timeout=SECONDS)
    page.evaluate("""() => {
        scores = GOLD; WARD.updates = 3;
        for (const id of ["ward", "practice"]) $(id).hidden = false;
    }""")
    page.locator("#admit").click()
    page.get_by_text("What does it have?").wait_for(timeout=SECONDS)
    answers = []
    for button in page.locator("#diagnoses button").all():
        button.click()
        answers.append(page.locator("#diagnosis").inner_text().split(".")[0])
    assert sorted(answers) == ["No"] * 6 + ["Yes"]


@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_it_is_one_small_file_in_both_schemes(opened, scheme):
    assert PAGE.stat().st_size < 300_000
    page = opened(PAGE, color_scheme=scheme)
    colors = page.evaluate("[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]")
    brightness = [sum(map(int, re.findall(r"\d+", color)[:3])) for color in colors]
    assert (brightness[0] > brightness[1]) == (scheme == "light")
