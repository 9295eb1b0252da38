"""static/annotate.html computes what small/micro.py does, and can be used by keyboard alone."""

import hashlib
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


def of_the_reader(page) -> dict:
    """What the reader sees of what was done."""
    parts = ["#predicts", "#advice", "#outcome", "#new", "#charts", "#runs", "#moral", "#again", "#named"]
    return {part: page.locator(part).inner_text() for part in parts}


def test_by_keyboard_alone_the_reader_sees_a_policy_cheat_and_then_a_leash(opened):
    """Then the leash is moved during a run, and the texts get well; and a reload keeps it all."""
    page = opened(PAGE, viewport={"width": 390, "height": 844})
    page.add_init_script("Math.random = () => 0.5")
    page.reload()
    page.locator("#begin").wait_for(timeout=SECONDS)
    page.evaluate("pace = 0")
    press_on(page, "begin")
    take_the_pleasant(page, "#left", "#right", until="#left:disabled")
    assert "your 24 choices" in page.locator("#predicts").inner_text()
    press_on(page, "enough")
    leashes, cards = [], page.locator("#runs .card")
    while "leash kept the model near" not in page.locator("#moral").inner_text():
        assert len(leashes) < 3
        press_on(page, "guess", "ArrowDown")
        press_on(page, "run")
        page.locator("#ask:enabled").wait_for(timeout=SECONDS)
        press_on(page, "ask")
        take_the_pleasant(page, "#left2", "#right2", until="#verdict")
        _, kl, model, mine, old = cards.last.locator("p b").all_inner_texts()
        leashes.append(
            (cards.last.locator("b").first.inner_text(), float(kl), int(model[0]), int(mine[0]), int(old[0]))
        )
        assert page.locator("#to-ward").is_visible() == (leashes[-1][0] == "After: leash 0.3")
        press_on(page, "again")
    (*_, (free, free_kl, model, mine, old), (_, kl, _, mine_with_leash, old_with_leash)) = leashes
    assert free == "After: no leash" and free_kl > 3 > kl
    assert model >= 4 and old > mine and mine_with_leash > old_with_leash
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    page.evaluate("pace = 100")  # time to move the leash
    shown = [page.locator("#new li").all_inner_texts()]
    press_on(page, "guess", "ArrowDown")
    press_on(page, "run")
    page.get_by_text("Update 10 of").wait_for(timeout=SECONDS)
    shown.append(page.locator("#new li").all_inner_texts())
    press_on(page, "kl_coef", "End")
    page.locator("#ask:enabled").wait_for(timeout=SECONDS)
    shown.append(page.locator("#new li").all_inner_texts())
    assert shown[0] != shown[1] != shown[2] and {len(texts) for texts in shown} == {6}
    coefs = page.evaluate("runs.at(-1).rows.map((row) => row.kl_coef)")
    assert sorted(set(coefs)) == [0, 1] and coefs == sorted(coefs)
    assert page.locator("#vertical").is_visible() and page.locator("#charts .leash").count() == 2
    before = of_the_reader(page)
    page.reload()
    page.locator("#outcome").wait_for(timeout=SECONDS)
    assert of_the_reader(page) == before and "KL ended at" in before["#outcome"]
    page.locator("#afresh").click()
    page.locator("#begin").wait_for(timeout=SECONDS)
    assert not page.locator("#compare").is_visible()


def test_a_reload_among_the_choices_keeps_them(opened):
    page = opened(PAGE)
    page.locator("#begin").click(timeout=SECONDS)
    for _ in range(3):
        page.locator("#left").click()
    before = of_the_reader(page)
    page.reload()
    page.locator("#taste").wait_for(timeout=SECONDS)
    assert of_the_reader(page) == before and "3 of your 3 choices" in before["#predicts"]
    assert "You have made 3 of 24" in page.locator("#count").inner_text()
    page.keyboard.press("ArrowLeft")
    assert "You have made 4 of 24" in page.locator("#count").inner_text()


def test_presses_too_many_choose_and_predict_nothing(opened):
    """Sixty at one place; then two where the page goes on, as by somebody who double-clicks everything."""
    page = opened(PAGE)
    page.locator("#begin").click(timeout=SECONDS)
    box = page.locator("#left").bounding_box()
    for _ in range(60):
        page.mouse.click(box["x"] + 9, box["y"] + 9)
    assert page.evaluate("choices.length") == 24 and not page.locator("#practice").is_visible()
    for name in ("#enough", "#guess"):
        page.locator(name).dblclick()
    assert page.locator("#practice").is_visible() and page.locator("#guess").input_value() == ""
    page.keyboard.press("Escape")
    page.locator("#run").click()
    assert "Say first" in page.locator("#told").inner_text() and not page.locator("#result").is_visible()


# Of 23 choices, the reward model guessed so many. Then, of six pairs, it took the new text in so many, and the reader
# took the new and the old one; beta, and the score. A coin guesses 15 in 10.5 % of cases, 16 in 4.7 %.
CHEATED = (20, 6, 1, 5, 0, 1.62)
MORALS = [
    ("as a coin would", [(8, 6, 2, 4, 0, 1.5)]),
    ("as a coin would", [(15, 6, 0, 6, 0, 1.5)]),
    ("it cheats", [(16, 6, 0, 6, 0, 1.5)]),
    ("it cheats", [(20, 4, 2, 3, 0, 1.5)]),
    ("wasn't cheated", [(20, 3, 2, 3, 0, 1.5)]),
    ("wasn't cheated", [(20, 6, 3, 3, 0, 1.5)]),
    ("wasn't cheated", [(20, 6, 0, 0, 0, 1.5)]),
    ("not short enough", [CHEATED, (20, 6, 2, 4, 0.3, 1.4)]),
    ("came too late", [CHEATED, (20, 6, 2, 4, 0.3, 1.4, 0)]),  # no leash at first
    ("The score is lower than when it cheated, and still you like", [CHEATED, (20, 6, 4, 1, 0.3, 1.54)]),
    ("reward model knows. You like", [CHEATED, (20, 6, 4, 1, 0.3, 1.58)]),  # 1.6 both
    ("wasn't cheated", [CHEATED, (20, 6, 4, 1, 0, 1.4)]),  # There was no leash to thank.
]


def test_what_it_says_of_a_run_is_so(opened):
    page = opened(PAGE)
    page.locator("#begin").wait_for(timeout=SECONDS)
    for phrase, told in MORALS:
        found, cheated = page.evaluate(
            """told => {
                scores = GOLD;
                choices.length = 24;
                runs.length = 0;
                for (const [guessed, model, mine, old, kl_coef, score, at_first = kl_coef] of told) {
                    state.guessed = guessed;
                    const verdict = { model, mine, old, done: 6 };
                    runs.push({ rows: [{ kl_coef: at_first }, { kl_coef, score }], args: { mistakes: 0 }, verdict });
                }
                return [moral(runs.at(-1)), cheated(runs.at(-1))];
            }""",
            told,
        )
        assert phrase in found and cheated == (phrase in ("it cheats", "not short enough", "came too late")), told


def test_the_ward_has_a_patient_whose_mistake_can_be_named(opened):
    """Only the first try counts; who gives up is told."""
    page = opened(PAGE)
    page.locator("#begin").wait_for(timeout=SECONDS)
    page.evaluate("""() => {
        scores = GOLD; WARD.updates = 3;
        for (const id of ["ward", "practice"]) $(id).hidden = false;
    }""")
    diagnosis, named = page.locator("#diagnosis"), page.locator("#named")
    for patient, counts in enumerate(([1, 1], [1, 2], [1, 3])):
        page.locator("#admit").click()
        page.get_by_text("What does it have?").wait_for(timeout=SECONDS)
        truth = page.evaluate("patient.mistake")
        correct = page.locator(f"#diagnoses button[value='{truth}']")
        wrong = page.locator(f"#diagnoses button:not([value='{truth}'])").first
        give_up = page.get_by_text("I give up")
        for button in ([correct], [wrong, correct], [wrong, give_up])[patient]:
            button.click()
            answer = diagnosis.inner_text()
            assert button.is_disabled()
            assert answer.startswith("Yes." if button == correct else "It was: " if button == give_up else "No.")
        assert (correct.inner_text() in answer) == (button == give_up)
        assert page.locator("#diagnoses button:enabled").count() == 0
        assert "first try: {} of {} ".format(*counts) in named.inner_text()


def test_its_picture_is_of_this_page():
    digest = hashlib.sha256(PAGE.read_bytes()).hexdigest()
    picture = (ROOT / "static/annotate.png").read_bytes()
    assert b"Description\0" + digest.encode() in picture, "draw it again: python benchmark/pictures.py"


@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_it_is_one_small_file_in_both_schemes(opened, scheme):
    assert PAGE.stat().st_size < 300_000
    page = opened(PAGE, color_scheme=scheme)
    colors = page.evaluate("[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]")
    brightness = [sum(map(int, re.findall(r"\d+", color)[:3])) for color in colors]
    assert (brightness[0] > brightness[1]) == (scheme == "light")
