"""What docs/ shows is out of examples/, which the tests run, and so is the README's picture."""

import re
from xml.etree import ElementTree

import pytest
from launch import EXAMPLES
from made_traces import SVG

PAGES = sorted((EXAMPLES.parent / "docs").glob("*.md"))
PROGRAMS = "\n".join(path.read_text() for path in sorted(EXAMPLES.glob("*.py")))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_shows_is_out_of_an_example(page):
    blocks = re.findall(r"^```\w*\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    assert blocks or page.name == "README.md"
    for block in blocks:
        assert block in PROGRAMS, block
    for example in re.findall(r"examples/\w+\.py", page.read_text()):
        assert (EXAMPLES.parent / example).is_file(), example


def test_the_readme_shows_a_step_of_the_demo():
    root = EXAMPLES.parent
    (picture,) = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", (root / "README.md").read_text())
    texts = [text.text for text in ElementTree.parse(root / picture).iter(f"{SVG}text")]
    assert re.match(r"Step \d+ of train_gpt\.json: [\d.]+ ms", texts[0])
    assert sum(text.endswith("exposed communication") for text in texts) == 3  # legend, ranks
    assert {"forward", "backward", "compute", "gather", "reduce"} <= set(texts)
