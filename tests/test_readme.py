"""The commands and links of README and docs: what they name exists, with the options they give."""

import re
import shlex
from pathlib import Path

import pytest

from enginery import cli

ROOT = Path(__file__).parents[1]
PAGES = [
    page
    for page in [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *sorted((ROOT / "docs").rglob("*.md")),
    ]
    if page.is_file()
]
# Pages for those who change the code: they lie beside what they describe.
BESIDE_THE_CODE = [
    ROOT / "SECURITY.md",
    ROOT / "CHANGELOG.md",
    ROOT / "notebooks/README.md",
    ROOT / "tests/faults/README.md",
    *sorted((ROOT / "benchmarks").rglob("*.md")),
]


def commands(pages=PAGES):
    """Every line of a code block that starts a command of ours."""
    for page in pages:
        for block in re.findall(r"```\w*\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
            text = block.replace("\\\n", " ")
            # Variables may stand before it, or another program's output.
            start = r"^(?:\$ )?(?:[A-Z_]+=\S+ +|[^\n|]+ \| )?"
            for line in re.findall(rf"{start}((?:enginery|make) .*)$", text, re.MULTILINE):
                yield pytest.param(line, id=f"{page.relative_to(ROOT)}: {line[:60]}")


def targets():
    makefile = (ROOT / "Makefile").read_text()
    return set(re.findall(r"^([a-z0-9-]+):", makefile, re.MULTILINE))


@pytest.mark.parametrize("line", list(commands([*PAGES, *BESIDE_THE_CODE])))
def test_command_of_a_page_exists(line):
    program, *words = shlex.split(line.partition(" | ")[0], comments=True)
    if program == "make":
        named = [word for word in words if "=" not in word]
        assert set(named) <= targets()
        makefile = (ROOT / "Makefile").read_text()
        for variable in (word.partition("=")[0] for word in words if "=" in word):
            assert re.search(rf"^{variable} \?=", makefile, re.MULTILINE), variable
        return
    # Parsed as the command line does, without running anything.
    _, bound, ignored = cli.commands().parse_args(words, exit_on_error=False, print_error=False)
    assert bound is not None
    assert not ignored


def test_readme_opens_with_two_commands():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    first = re.search(r"```console\n(.*?)```", readme, re.DOTALL)[1]
    assert re.findall(r"^\$ (make [a-z]+)", first, re.MULTILINE) == ["make run", "make test"]
    assert {"run", "test"} <= targets()


def anchors(page):
    """What a link may name behind `#`: the headings, as GitHub and the site both write them."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    titles = re.findall(r"^#{1,4} (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize(
    "page", [*PAGES, *BESIDE_THE_CODE], ids=lambda page: str(page.relative_to(ROOT))
)
def test_links_between_pages_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target, _, anchor in re.findall(r"\]\(([^)#]*)(#([^)]*))?\)", text):
        if "://" in target:
            continue
        file = page.parent / target if target else page
        assert file.exists(), target
        if anchor:
            assert anchor in anchors(file), f"{target}#{anchor}"
