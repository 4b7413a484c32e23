"""docs/ as a site: every page has its place, looks the same on GitHub and on the site, and the reference is current.

None of this needs MkDocs; `make docs` builds the site itself.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conftest import PROJECT
from docs_site import find_command, load_script

from gptmill.cli.main import VERBS
from gptmill.config.schema import list_fields

DOCS = PROJECT / "docs"
REFERENCE = DOCS / "reference.md"
HOOKS = load_script("hooks")
PAGES = [*sorted(DOCS.glob("*.md")), *(PROJECT / name for name in HOOKS.PAGES)]


def read_prose(page: Path) -> str:
    """The page with its code blocks emptied."""
    return re.sub(r"^```.*?^```$", "```\n```", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


@pytest.mark.usefixtures("no_new_parts")
def test_the_reference_is_current() -> None:
    is_current = REFERENCE.read_text(encoding="utf-8") == load_script("reference").write_reference()
    assert is_current, "docs/reference.md is stale; run: python docs/site/reference.py"


@pytest.mark.parametrize("verb", VERBS)
def test_the_reference_has_every_verb_and_option_with_its_help(verb: str) -> None:
    text = REFERENCE.read_text(encoding="utf-8")
    assert f"\n## gptmill {verb}\n" in text
    for config in find_command(verb).configs:
        for field in list_fields(config):
            assert field.help, f"--{field.name} has no help"
            assert re.search(rf"^\| `--{field.name}[ `].*\S \|$", text, re.MULTILINE), field.name


def test_the_navigation_lists_every_page_once() -> None:
    (navigation,) = re.findall(r"^nav:\n(.*?)\n\n", (PROJECT / "mkdocs.yml").read_text(), re.DOTALL | re.MULTILINE)
    assert sorted(re.findall(r": ([\w-]+\.md)$", navigation, re.MULTILINE)) == sorted(page.name for page in PAGES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_has_one_title_and_it_comes_first(page: Path) -> None:
    text = read_prose(page)
    assert text.startswith("# ")
    assert len(re.findall(r"^# ", text, re.MULTILINE)) == 1


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_list_is_nested_by_less_than_four_spaces(page: Path) -> None:
    """GitHub takes two for a level; Python-Markdown, which makes the site, takes such an item for text."""
    assert not re.search(r"^ {1,3}(- |\d+\. )", read_prose(page), re.MULTILINE)


def test_lists_and_tables_after_text_are_the_same_to_github_and_the_site() -> None:
    given = "Text:\n- one\n  more\n- two\n```sh\nls\n| wc\n```\n| `a\\|b` | c |\n|---|---|"
    wanted = "Text:\n\n- one\n  more\n- two\n```sh\nls\n| wc\n```\n\n| `a|b` | c |\n|---|---|"
    assert HOOKS.separate_blocks(given) == wanted


def test_the_words_of_inline_code_stay_whole_and_blocks_as_they_are() -> None:
    html = HOOKS.on_page_content("<p><code>train --gpus 2</code></p><pre><code>a b</code></pre>")
    assert html == (
        "<p><code><span>train</span> <span>--gpus</span> <span>2</span></code></p><pre><code>a b</code></pre>"
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_out_of_docs_lead_to_files_that_the_site_has(page: Path) -> None:
    for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", read_prose(page)):
        target = (page.parent / link).resolve()
        assert target.is_file(), link
        inside = target.is_relative_to(DOCS) or target.is_relative_to(PROJECT / "examples")
        assert inside or str(target.relative_to(PROJECT)) in HOOKS.PAGES, f"{link} is not part of the site"


def test_pages_ask_no_other_server_for_anything() -> None:
    settings = (PROJECT / "mkdocs.yml").read_text(encoding="utf-8")
    assert "font: false" in settings
    for page in PAGES:
        assert not re.search(r"!\[[^]]*\]\(https?:", read_prose(page)), page.name
