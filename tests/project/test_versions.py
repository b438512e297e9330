"""The list of versions in the sidebar of the site."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.browser import Browser

pytestmark = pytest.mark.once

SCRIPT = Path(__file__).resolve().parents[2] / "docs" / "_static" / "versions.js"
SITE = "http://127.0.0.1:9"
"""Nothing listens there: the test answers."""


def listed(browser: Browser, versions: Sequence[str] | None) -> list[str]:
    """Versions in the sidebar of a page of version 0.1.0; then the address that the first leads
    to."""
    page = (
        f'<html data-content_root="../"><a class="sidebar-brand"></a><script>{SCRIPT.read_text()}'
    )
    page += "</script>"
    answers = {f"{SITE}/docs/0.1.0/guide/a.html": page, f"{SITE}/docs/0.2.0/": "new"}
    if versions is not None:
        answers[f"{SITE}/docs/versions.json"] = json.dumps(versions)
    tab = browser.chromium.new_page()
    tab.route(
        "**/*",
        lambda route: route.fulfill(
            status=200 if route.request.url in answers else 404,
            body=answers.get(route.request.url, ""),
            content_type="text/html",
        ),
    )
    tab.goto(f"{SITE}/docs/0.1.0/guide/a.html", wait_until="networkidle")
    chosen = tab.locator("select option").all_inner_texts()
    if chosen:
        assert tab.locator("select").input_value() == "0.1.0"
        tab.locator("select").select_option(chosen[0])
        tab.wait_for_url(f"{SITE}/docs/{chosen[0]}/")
    tab.close()
    return chosen


@pytest.mark.nightly
def test_versions_are_listed_where_there_are_several(browser: Browser) -> None:
    assert listed(browser, ["0.2.0", "0.1.0"]) == ["0.2.0", "0.1.0"]
    assert listed(browser, ["0.1.0"]) == []
    assert listed(browser, None) == []


def test_the_site_runs_the_script() -> None:
    conf = (SCRIPT.parents[1] / "conf.py").read_text()
    assert f'html_js_files = ["{SCRIPT.name}"]' in conf
