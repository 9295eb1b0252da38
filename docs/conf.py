"""The site that `make site` writes: README.md and docs/ as pages, and what they link to of DATA."""

import re
import shutil
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {}).get("Repository", "")
DATA = [ROOT / "static", ROOT / "benchmark/results"]

project = html_title = "ppo_rlhf"
root_doc = "README"
include_patterns = ["README.md", "docs/**.md"]
exclude_patterns = [".*", "build", "models", "runs", "site"]
extensions = ["myst_parser"]
myst_heading_anchors = 6
myst_all_links_external = True  # link() reads them
suppress_warnings = ["toc.not_included"]  # two pages of docs/reference that others link to
highlight_language = "none"  # of blocks that name none
html_theme = "furo"
html_show_copyright = html_copy_source = html_use_index = False


def link(page: str, uri: str) -> str | None:
    """Where a link of a page leads on the site; None: nowhere, as it leaves the site and no repository is known."""
    path, mark, anchor = uri.partition("#")
    if not path or ":" in path:
        return uri
    up = "../" * page.count("/")
    file = (ROOT / page).parent.joinpath(path).resolve()
    target = file.relative_to(ROOT)
    if file.suffix == ".md" and target.parts[0] in ("README.md", "docs"):
        return up + re.sub("README$", "index", str(target.with_suffix(""))) + ".html" + mark + anchor
    if file.is_file() and file.suffix != ".md" and any(map(file.is_relative_to, DATA)):
        return f"{up}{target}"
    return f"{REPOSITORY}/blob/HEAD/{target}{mark}{anchor}" if REPOSITORY else None


def contents() -> str:
    """The pages in the order of docs/README.md, for the sidebar of each page."""
    _, *parts = re.split(r"^(To .*?):", (ROOT / "docs/README.md").read_text(), flags=re.MULTILINE)
    text = "\n\n```{toctree}\n:hidden:\n\ndocs/README\n```"
    for title, listed in zip(parts[::2], parts[1::2], strict=True):
        pages = "\n".join(f"docs/{name}" for name in re.findall(r"\]\(([\w/]+\.md)", listed))
        text += f"\n\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n{pages}\n```"
    return text


def setup(app):
    from docutils import nodes
    from sphinx.builders.html import StandaloneHTMLBuilder

    class Builder(StandaloneHTMLBuilder):
        """HTML in which a README is the index of its folder."""

        def get_output_path(self, page_name, /):
            return super().get_output_path(re.sub("README$", "index", page_name))

        def get_target_uri(self, docname, typ=None):
            return re.sub(r"README\.html$", "index.html", super().get_target_uri(docname, typ))

    def add_contents(app, page, source):
        if page == root_doc:
            source[0] += contents()

    def follow_links(app, doctree):
        page = app.env.docname
        for slug, (_, name, _) in app.env.metadata[page]["myst_slugs"].items():
            doctree.ids[name]["ids"] = list({name: 0, slug: 0})  # a heading's anchor is the one it has on GitHub
        for reference in list(doctree.findall(nodes.reference)):
            uri = link(page, reference["refuri"])
            if uri is None:
                reference.replace_self(reference.children)
            else:
                reference["refuri"] = uri

    def copy_data(app, error):
        for folder in DATA:
            shutil.copytree(folder, app.outdir / folder.relative_to(ROOT))

    app.add_builder(Builder, override=True)
    app.connect("source-read", add_contents)
    app.connect("doctree-read", follow_links)
    app.connect("build-finished", copy_data)
