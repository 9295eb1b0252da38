"""The picture of a derivation, static/derivation.png: the panel of the example report of chapter 1.

    python benchmark/curves/derivation.py     # needs chromium, and pip install -e '.[dev]'

It shows some lines of one token, from the KL to the whitened advantage.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

import tyro
from playwright.sync_api import sync_playwright

STATIC = Path(__file__).parents[2] / "static"
TITLES = ["KL", "reward", "whitened reward", "temporal difference", "advantage", "whitened advantage"]

# Leaves only those lines in the panel.
SHORTEN = """titles => document.querySelectorAll("#derivation .line").forEach(line =>
  titles.includes(line.querySelector("b").textContent) || line.remove())"""


@dataclass
class Args:
    trace: int = 2
    """traced update, counted from 0"""
    episode: int = 1
    """episode of its batch, counted from 1"""
    token: int = 5
    """token of the response, counted from 1"""


def main(args: Args) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        page = chromium.new_page(viewport={"width": 900, "height": 1000})
        page.goto((STATIC / "demo/report.html").as_uri())
        page.uncheck("#beside")
        page.locator("#left-update").fill(str(args.trace))
        page.select_option("#left-episode", str(args.episode - 1))
        page.locator("#left-response .token").nth(args.token - 1).click()
        page.mouse.move(0, 0)
        page.evaluate(SHORTEN, TITLES)
        page.locator("#derivation").screenshot(path=STATIC / "derivation.png")
        chromium.close()


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
