"""Two pictures of chapter 1's example report, static/demo/report.html.

    python benchmark/curves/report_pictures.py     # needs chromium, and the packages of the extra dev

static/derivation.png has some lines of the derivation of one token, from the KL to the whitened advantage.
static/report.png shows the answers to one query after the first and after the last update, coloured by KL.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

import tyro
from playwright.sync_api import Page, sync_playwright

STATIC = Path(__file__).parents[2] / "static"
TITLES = ["KL", "reward", "whitened reward", "temporal difference", "advantage", "whitened advantage"]

# Leaves only those lines in the panel.
SHORTEN = """titles => document.querySelectorAll("#derivation .line").forEach(line =>
  titles.includes(line.querySelector("b").textContent) || line.remove())"""


@dataclass
class Args:
    trace: int = 2
    """the derivation's traced update, counted from 0"""
    episode: int = 1
    """episode of its batch, counted from 1"""
    token: int = 5
    """token of the response, counted from 1"""
    query: int = 3
    """which of the queries that are the same each time, counted from 1"""


def draw_derivation(page: Page, args: Args) -> None:
    page.uncheck("#beside")
    page.locator("#left-update").fill(str(args.trace))
    page.select_option("#left-episode", str(args.episode - 1))
    page.locator("#left-response .token").nth(args.token - 1).click()
    page.mouse.move(0, 0)
    page.evaluate(SHORTEN, TITLES)
    page.locator("#derivation").evaluate("panel => document.body.replaceChildren(panel)")
    page.locator("#derivation").screenshot(path=STATIC / "derivation.png")


def draw_two_updates(page: Page, args: Args) -> None:
    page.check("#beside")
    page.select_option("#quantity", label="KL")
    page.locator("#left-update").press("Home")
    same = page.locator("#left-episode option", has_text=f"same query {args.query}")
    page.select_option("#left-episode", same.get_attribute("value"))
    page.locator("#right-update").press("End")
    page.mouse.move(0, 0)
    page.locator("#panes").screenshot(path=STATIC / "report.png")


def main(args: Args) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        for draw, width in ((draw_derivation, 900), (draw_two_updates, 1200)):
            page = chromium.new_page(viewport={"width": width, "height": 1000})
            page.goto((STATIC / "demo/report.html").as_uri())
            draw(page, args)
            page.close()
        chromium.close()


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
