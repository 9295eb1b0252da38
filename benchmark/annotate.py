"""Draw static/annotate.png: a policy has cheated the reward model of somebody who likes pleasant sentences.

    python benchmark/annotate.py    # needs Chromium and playwright; ten seconds

The picture has two pixels for each of the page's.
"""

import shutil
from pathlib import Path

from playwright.sync_api import sync_playwright

STATIC = Path(__file__).resolve().parent.parent / "static"
CHOOSE = """() => {
    while (!$("left").disabled) {
        const [left, right] = pair.map((text) => GOLD[number_of(text)]);
        if (left === right) next_pair();
        else take(right > left ? 1 : 0);
    }
}"""


def main() -> None:
    path = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 720, "height": 900}, device_scale_factor=2, color_scheme="light")
        page.add_init_script("Math.random = () => 0.5")  # the seed of the texts
        page.goto((STATIC / "annotate.html").as_uri())
        page.locator("#begin").click()
        page.evaluate(CHOOSE)
        page.locator("[name=guess]").first.check()
        page.locator("#run").click()
        page.locator("#ask:enabled").wait_for(timeout=120_000)
        page.locator("#ask").evaluate("button => button.remove()")
        page.locator("#result").evaluate("result => result.style.padding = '12px'")
        page.locator("#result").screenshot(path=STATIC / "annotate.png")
        browser.close()


if __name__ == "__main__":
    main()
