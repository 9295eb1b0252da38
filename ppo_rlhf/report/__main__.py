"""Look inside a run: writes report.html, one file that any browser opens, without a network, and learning_curves.png.

It opens with what training changed: the scores before and after, and an answer before and after. If the run was
started with --trace_interval, a few episodes follow token by token, and each number of the chosen token is derived
from what the models said. Then come all learning curves with notes on how to read them, and what was run.

    python ppo_rlhf/report                               # the newest run below runs/
    python ppo_rlhf/report runs/<run>                    # of any script and chapter, finished or not
    python ppo_rlhf/report runs/<run> --explain 20 1 5   # where the numbers of one token come from, as text
"""

from dataclasses import dataclass
from pathlib import Path

import tyro

from ppo_rlhf.report import learning_curves, page
from ppo_rlhf.train_policy import Arguments, InputError, checked, run_script


@dataclass(frozen=True, kw_only=True)
class Args(Arguments):
    run: tyro.conf.Positional[str] = ""
    """folder of a run; empty: the newest below runs/"""
    out: str = ""
    """file to write; empty: report.html in the run's folder"""
    explain: tuple[int, int, int] | None = None
    """<update> <episode> <token>: print where the numbers of that token come from, and write no page. The update must
    be one that was traced; episodes and tokens are counted from 1, as on the page"""


def report(args: Args) -> Path:
    """Write the page, with learning_curves.png next to it, and return its path.

    Raises an InputError if the folder is not that of a run.
    """
    folder = Path(args.run) if args.run else newest_run(Path("runs"))
    one_run = page.read_run(folder)
    if args.explain:
        print(page.explained(one_run, *args.explain), flush=True)
        return folder
    path = Path(args.out) if args.out else folder / "report.html"
    if path.is_dir():
        raise InputError(f"--out {path} is a folder; name a file in it, such as {path / 'report.html'}")
    if not path.parent.is_dir():
        raise InputError(f"--out {path}: there is no folder {path.parent}; name a file in a folder that exists")
    path.write_text(page.render(one_run), encoding="utf-8")
    learning_curves.draw_learning_curves(path.parent, one_run.rows, one_run.meta["args"])
    print(f"report  {path}")
    return path


def newest_run(runs: Path) -> Path:
    """The run that was written to last."""
    metas = sorted(runs.glob("*/meta.json"), key=lambda path: path.stat().st_mtime)
    if not metas:
        raise InputError(f"there is no run below {runs}; name one: python ppo_rlhf/report <run>")
    return metas[-1].parent


if __name__ == "__main__":
    run_script(lambda: report(checked(tyro.cli(Args, description=__doc__))))
