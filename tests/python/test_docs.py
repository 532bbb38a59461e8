"""What docs/ shows is out of examples/, which the tests run."""

import re

import pytest
from launch import EXAMPLES

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
