"""What mkdocs cannot do alone: pages that are made from the package, links that leave docs/, drawings, plain markdown.

The pages of docs/ are also read in the repository, so their links name files of it. Here a link to a page leads to the
page, and a link to any other file (an example, a result) to a copy of that file.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import posixpath
import re
import sys
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
ROOT_PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md", "SECURITY.md": "security.md"}
NOTEBOOK, NOTEBOOK_PAGE = "examples/first_steps.ipynb", "start/notebook.md"
COPIES = "source"                                                # folder of the site for files from outside docs/
README = f"{COPIES}/overview.md"                                  # links to one of its parts; to all of it is to index
# page -> the file of the repository that it is, from which its links lead
ORIGINS = {page: name for name, page in {**ROOT_PAGES, NOTEBOOK: NOTEBOOK_PAGE, "README.md": README}.items()}
LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s]+)(\))")
DRAWING = re.compile(r"^!\[([^\]]*)\]\(([^)\s]+\.svg)\)$", re.MULTILINE)
CALCULATOR = DOCS / "calculator/build.py"
SHOWN_AS_CODE = {".py": "python", ".toml": "toml", ".slurm": "bash"}

_markdown: dict[str, str] = {}                                   # page -> what is written beside it


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """A page that the navigation does not name yet joins the other pages of its folder."""
    sections = [entry for section in config.nav or [] for entry in section.values() if isinstance(entry, list)]
    listed = {path for section in sections for entry in section for path in entry.values()}
    for page in sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")):
        folder = posixpath.dirname(page)
        home = next((section for section in sections if folder and any(
            posixpath.dirname(path) == folder for entry in section for path in entry.values())), None)
        if page not in listed and home is not None:
            home.append({Path(page).stem.capitalize(): page})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made here, and a copy of every file that a page links to."""
    for name, page in ROOT_PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8")))
    files.append(File.generated(config, README, content=(ROOT / "README.md").read_text(encoding="utf-8"),
                                inclusion=InclusionLevel.NOT_IN_NAV))
    files.append(File.generated(config, "reference/docstrings.md", content=docstrings()))
    files.append(File.generated(config, NOTEBOOK_PAGE, content=notebook()))
    for name in sorted({name for file in files.documentation_pages() for name in _linked_outside(file)}):
        language = SHOWN_AS_CODE.get(Path(name).suffix)
        if language:
            text = f"# {name}\n\n````{language}\n{(ROOT / name).read_text(encoding='utf-8')}````\n"
            files.append(File.generated(config, f"{COPIES}/{name}.md", content=text,
                                        inclusion=InclusionLevel.NOT_IN_NAV))
        else:
            files.append(File.generated(config, f"{COPIES}/{name}", abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    path = page.file.src_uri

    def led(match: re.Match[str]) -> str:
        return match[1] + _link(path, match[2]) + match[3]

    text = _outside_code(markdown, lambda part: LINK.sub(led, part))
    _markdown[page.file.dest_uri] = text
    return DRAWING.sub(lambda match: _drawing(path, *match.groups()), text)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """A corner of a table that is left empty is no heading; long names in tables break after dots and underscores."""
    html = re.sub(r"<th([^>]*)></th>", r"<td\1></td>", html)
    return re.sub(r"(?<=<td><code>)[\w.]+(?=</code>)", lambda name: re.sub(r"([._])", r"\1<wbr>", name[0]), html)


def on_post_build(config: MkDocsConfig) -> None:
    """Write every page as markdown beside its html, and llms.txt, which lists them."""
    site = Path(config.site_dir)
    for name, text in _markdown.items():
        (site / name).with_suffix(".md").write_text(text, encoding="utf-8")
    (site / "llms.txt").write_text(llms(config), encoding="utf-8")
    print(_built_calculator(site / "calculator"))


def llms(config: MkDocsConfig) -> str:
    """Return the list of pages that language models read first: https://llmstxt.org."""
    lines = [f"# {config.site_name}", "", f"> {config.site_description}: core attention is cut into tasks and balanced "
             "over ranks. Begin with the skill.", ""]
    for title, entry in ((title, entry) for section in config.nav or [] for title, entry in section.items()):
        pages = entry if isinstance(entry, list) else [{title: entry}]
        lines += [f"## {title}", "", *(f"- [{name}]({path}): {_first_sentence(_markdown[_html(path)])}"
                                      for one in pages for name, path in one.items()), ""]
    return "\n".join(lines)


def docstrings() -> str:
    """Return every public name with its signature and docstring."""
    sys.path.insert(0, str(ROOT))
    import distca

    parts = ["# Docstrings", "Everything that `import distca` offers, by name. [API](api.md) has it by purpose."]
    for name in sorted(set(distca.__all__) - {"__version__"}, key=str.lower):
        parts += _described(f"distca.{name}", getattr(distca, name), "##")
    return "\n\n".join(parts) + "\n"


def _built_calculator(folder: Path) -> str:
    """Put the planner beside the page, if its Python was fetched before (`make calculator`), else closed forms."""
    spec = importlib.util.spec_from_file_location("build_calculator", CALCULATOR)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.build(folder, offline=True)


def notebook() -> str:
    """Return the notebook as a page: its texts, its code, and what it printed and drew when it was saved."""
    parts = []
    for cell in json.loads((ROOT / NOTEBOOK).read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/png" in data:
                picture = "data:image/png;base64," + "".join(data["image/png"]).replace("\n", "")
                parts.append(f'<img class="plot" alt="What the cell above draws" src="{picture}">')
            elif text := "".join(output.get("text", data.get("text/plain", []))):
                parts.append(f"```text\n{text.rstrip()}\n```")
    title, *rest = parts
    said = f"This page is [a notebook](first_steps.ipynb) as it was saved; `jupyter lab {NOTEBOOK}` opens it."
    return "\n\n".join([title, said, *rest]) + "\n"


def _described(name: str, thing: Any, level: str) -> list[str]:
    parts = [f"{level} `{name}`"]
    if inspect.ismodule(thing):
        thing = importlib.import_module(thing.__name__)
    elif callable(thing) and not (inspect.isclass(thing) and issubclass(thing, Exception)):
        parts.append(f"```python\n{_signature(name.rpartition('.')[2], thing)}\n```")
    parts.append(inspect.getdoc(thing) or "")
    if inspect.isclass(thing):
        methods = [(key, value) for key, value in vars(thing).items() if not key.startswith("_") and (
            inspect.isfunction(value) or isinstance(value, (classmethod, staticmethod, property))) and
            inspect.getdoc(getattr(thing, key))]
        for key, value in methods:
            doc = (inspect.getdoc(getattr(thing, key)) or "").split("\n\n")[0].replace("\n", " ")
            called = key if isinstance(value, property) else _signature(key, getattr(thing, key))
            parts.append(f"- `{' '.join(called.split())}`: {doc}")
    return parts


def _signature(name: str, thing: Any) -> str:
    try:
        text = re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(inspect.signature(thing)))  # types, not defaults
    except (TypeError, ValueError):
        return name
    text = text.removesuffix(" -> None") if inspect.isclass(thing) else re.sub(r"^\((self|cls)(, )?", "(", text)
    text = re.sub(r"\b(?:[a-z_]+\.)+([A-Z]\w*)", r"\1", text)
    if len(name) + len(text) <= 100:
        return name + text
    inside, end = re.fullmatch(r"\((.*)\)(.*)", text, re.DOTALL).groups()  # type: ignore[union-attr]
    commas = re.split(r", (?![^\[(]*[\])])", inside)
    return f"{name}(\n    " + ",\n    ".join(commas) + f",\n){end}"


def _linked_outside(file: File) -> set[str]:
    targets = (_target(file.src_uri, match[2])[0] for match in LINK.finditer(file.content_string))
    return {target for target in targets if target and not target.startswith("docs/") and target not in ROOT_PAGES
            and target != "README.md" and (ROOT / target).is_file()}


def _target(page: str, link: str) -> tuple[str, str]:
    """Return the repository's file that a page's link names, or nothing for addresses, and the part of it."""
    if "://" in link or link.startswith(("#", "mailto:")):
        return "", ""
    path, _, part = link.partition("#")
    origin = ORIGINS.get(page, f"docs/{page}")
    return posixpath.normpath(posixpath.join(posixpath.dirname(origin), unquote(path))), part


def _link(page: str, link: str) -> str:
    target, part = _target(page, link)
    if not target:
        return link
    if target == "README.md":
        shown = README if part else "index.md"
    elif target == NOTEBOOK and page != NOTEBOOK_PAGE:
        shown = NOTEBOOK_PAGE
    elif target in ROOT_PAGES:
        shown = ROOT_PAGES[target]
    elif target.startswith("docs/"):
        shown = target.removeprefix("docs/")
    else:
        shown = f"{COPIES}/{target}" + ".md" * (Path(target).suffix in SHOWN_AS_CODE)
    return posixpath.relpath(shown, posixpath.dirname(page) or ".") + (f"#{part}" if part else "")


def _drawing(page: str, label: str, link: str) -> str:
    """Return a drawing of ours as part of the page, so that it follows the page's colours."""
    file = DOCS / posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
    svg = file.read_text(encoding="utf-8").replace("\n", "")
    name = file.stem
    moving = '<button class="md-button hold" type="button" hidden>Pause</button>' if "animation:" in svg else ""
    return f'<figure class="drawing" id="figure-{name}"><div tabindex="0">{svg}</div>{moving}</figure>\n'


def _outside_code(text: str, change: Any) -> str:
    parts = re.split(r"(^(`{3,}).*?^\2$|`[^`\n]+`)", text, flags=re.DOTALL | re.MULTILINE)
    kept = []
    for number in range(0, len(parts), 3):                       # text, code, its fence
        kept += [change(parts[number]), *parts[number + 1:number + 2]]
    return "".join(kept)


def _html(path: str) -> str:
    return str(Path(path).with_suffix(".html"))


def _first_sentence(markdown: str) -> str:
    text = re.sub(r"\A---\n.*?\n---\n|^```.*?^```$", "", markdown, flags=re.DOTALL | re.MULTILINE)
    paragraph = next((part for part in text.split("\n\n") if part.strip() and part.strip()[0] not in "#!<|-"), "")
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(paragraph.split()))
    return re.split(r"(?<=[.!?]) ", plain)[0].rstrip(":")
