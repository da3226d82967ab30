"""The HTML report in headless Chromium: drawn, sorted, filtered, silent, alone with its file."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium: the extra 'test'")

from report_cases import NASTY, compared, deep, small  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

from costmodels.prices import Price  # noqa: E402
from planner.compare.hardware import Offer, Offers  # noqa: E402
from planner.html.offers import write_offers  # noqa: E402
from planner.html.page import write_report  # noqa: E402

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (BROWSER and DRIVER),
    reason="needs Chromium and its driver: apt-get install chromium chromium-driver",
)
FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync "
    "--force-prefers-reduced-motion "
    "--window-size=1280,1000"
).split()
SECTIONS = "summary step graph mesh collectives arguments compute activations meshes notes".split()
TITLE = "<lambda> " + NASTY


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    os.environ["SE_OFFLINE"] = "true"
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.set_page_load_timeout(60)
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    write_report(small(), path, title=TITLE)
    return path


def load(browser: Any, path: Path) -> None:
    """Open a report and wait until it is drawn."""
    for kind in ("browser", "performance"):
        browser.get_log(kind)
    browser.get(path.as_uri())
    WebDriverWait(browser, 30).until(
        lambda b: b.execute_script(
            "return document.documentElement.dataset.ready && "
            "document.querySelector('.figure path')"
        )
    )


def silent(browser: Any, path: Path) -> None:
    """Fail if anything was said on the console, or asked of anyone but the file."""
    assert browser.get_log("browser") == []
    asked = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    urls = [
        event["params"]["request"]["url"]
        for event in asked
        if event["method"] == "Network.requestWillBeSent"
        and event["params"]["documentURL"].startswith(path.as_uri())  # not the browser's own pages
    ]
    assert path.as_uri() in urls
    assert [u for u in urls if u != path.as_uri() and not u.startswith("data:")] == []


def column(browser: Any, table: str, number: int) -> list[str]:
    cells = browser.find_elements(
        By.CSS_SELECTOR, f"[data-table='{table}'] tbody td:nth-child({number})"
    )
    return [cell.text for cell in cells]


def seconds(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1.0}[unit]


def head(browser: Any, table: str, label: str) -> Any:
    heads = browser.find_elements(By.CSS_SELECTOR, f"[data-table='{table}'] th")
    return next(h for h in heads if h.text.split("\n")[0].strip().startswith(label))


@pytest.mark.long
def test_everything_is_drawn(browser: Any, report: Path) -> None:
    load(browser, report)
    assert [
        s.get_attribute("id") for s in browser.find_elements(By.TAG_NAME, "section")
    ] == SECTIONS
    assert browser.find_element(By.TAG_NAME, "h1").text.startswith("<lambda> </script>")
    assert browser.find_elements(By.CSS_SELECTOR, "img, iframe") == []
    assert len(browser.find_elements(By.TAG_NAME, "script")) == 2
    assert len(browser.find_elements(By.CSS_SELECTOR, "#mesh .device")) == 8
    assert len(browser.find_elements(By.CSS_SELECTOR, "#graph details[open] .node")) >= 2
    planned = small()
    peak = browser.find_element(By.CSS_SELECTOR, "#step h3").text
    assert peak.startswith("At the peak: ")
    links = browser.find_elements(By.CSS_SELECTOR, "nav a")
    assert [link.get_attribute("href").split("#")[1] for link in links] == SECTIONS
    shown = browser.find_element(By.CSS_SELECTOR, "[data-table=collectives] [role=status]").text
    assert int(shown.split()[0]) <= len(planned.plan.collectives)
    silent(browser, report)


@pytest.mark.long
def test_tables_sort(browser: Any, report: Path) -> None:
    load(browser, report)
    times = [seconds(t) for t in column(browser, "collectives", 6)]
    assert len(times) > 2 and times == sorted(times, reverse=True)
    head(browser, "collectives", "time a step").find_element(By.TAG_NAME, "button").click()
    assert [seconds(t) for t in column(browser, "collectives", 6)] == sorted(times)
    assert head(browser, "collectives", "time a step").get_attribute("aria-sort") == "ascending"
    head(browser, "collectives", "collective").find_element(By.TAG_NAME, "button").click()
    kinds = column(browser, "collectives", 1)
    assert kinds == sorted(kinds) and len(set(kinds)) > 1
    assert head(browser, "collectives", "time a step").get_attribute("aria-sort") is None
    head(browser, "arguments", "path").find_element(By.TAG_NAME, "button").send_keys(Keys.ENTER)
    paths = column(browser, "arguments", 1)
    assert paths == sorted(paths)
    silent(browser, report)


@pytest.mark.long
def test_tables_filter(browser: Any, report: Path) -> None:
    load(browser, report)
    everything = column(browser, "collectives", 1)
    kind = everything[0]
    assert set(everything) != {kind}
    box = browser.find_element(By.CSS_SELECTOR, "[data-table=collectives] input")
    box.send_keys(kind.upper())
    assert set(column(browser, "collectives", 1)) == {kind}
    status = browser.find_element(By.CSS_SELECTOR, "[data-table=collectives] [role=status]")
    assert f"of {len(everything)} rows" in status.text
    box.send_keys(" no such thing")
    assert column(browser, "collectives", 1) == ["Nothing matches."]
    box.send_keys(Keys.CONTROL, "a")
    box.send_keys(Keys.DELETE)
    menus = browser.find_elements(By.CSS_SELECTOR, "[data-table=collectives] select")
    other = next(k for k in everything if k != kind)
    webdriver.support.ui.Select(menus[0]).select_by_value(other)
    assert set(column(browser, "collectives", 1)) == {other}
    webdriver.support.ui.Select(menus[0]).select_by_value("")
    webdriver.support.ui.Select(menus[2]).select_by_value("every one")
    assert status.text.startswith(f"{len(small().plan.collectives)} rows")
    silent(browser, report)


@pytest.mark.long
def test_pictures_answer_to_the_keyboard(browser: Any, report: Path) -> None:
    load(browser, report)
    figure = browser.find_element(By.CSS_SELECTOR, ".figure")

    def ticks() -> list[str]:
        return [t.text for t in figure.find_elements(By.CSS_SELECTOR, "text[text-anchor=middle]")]

    def title() -> str:
        return str(browser.find_element(By.CSS_SELECTOR, "#step h3").text)

    before, peak = ticks(), title()
    figure.send_keys(Keys.ARROW_LEFT)
    assert title() != peak
    figure.send_keys("+")
    assert ticks() != before
    figure.send_keys("0")
    assert ticks() == before
    closed = browser.find_elements(By.CSS_SELECTOR, "#graph details.segment:not([open])")
    row = next(d for d in closed if d.find_element(By.TAG_NAME, "summary").is_displayed())
    row.find_element(By.TAG_NAME, "summary").send_keys(Keys.ENTER)
    WebDriverWait(browser, 5).until(lambda _: row.find_elements(By.CSS_SELECTOR, ".drawing"))
    silent(browser, report)


@pytest.mark.long
def test_a_click_lists_what_memory_holds(browser: Any, report: Path) -> None:
    load(browser, report)
    figure = browser.find_element(By.CSS_SELECTOR, ".figure")
    before = browser.find_element(By.CSS_SELECTOR, "#step h3").text
    browser.execute_script(
        "arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", figure
    )
    aim = webdriver.ActionChains(browser)
    aim.move_to_element_with_offset(figure, -figure.size["width"] // 4, figure.size["height"] // 4)
    aim.perform()
    tip = browser.find_element(By.ID, "tip")
    assert tip.is_displayed() and "parameters" in tip.text
    aim.click().perform()
    assert browser.find_element(By.CSS_SELECTOR, "#step h3").text != before
    assert len(browser.find_elements(By.CSS_SELECTOR, ".held > div")) > 2
    silent(browser, report)


def test_dark_follows_the_system(browser: Any, report: Path) -> None:
    def background(scheme: str) -> str:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        found = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
        return str(found)

    load(browser, report)
    try:
        light, dark = background("light"), background("dark")
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    shades = [[int(n) for n in c[4:-1].split(",")] for c in (light, dark)]
    assert min(shades[0]) > 200 and max(shades[1]) < 60


@pytest.mark.long
def test_plans_by_hand_stand_beside_the_chosen_one(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "compared.html"
    planned, comparison = compared()
    write_report(planned, path, "compared", comparison)
    load(browser, path)
    times = [text for text in column(browser, "comparison", 2) if " " in text]
    assert len(times) == len(comparison.candidates) - 1
    assert [seconds(t) for t in times] == sorted(seconds(t) for t in times)
    verdicts = column(browser, "comparison", 5)
    assert verdicts[-1] == "no plan" and "too large" in verdicts and "fits" in verdicts
    chosen = browser.find_elements(By.CSS_SELECTOR, "[data-table=comparison] tr.chosen")
    assert [row.text.split()[0] for row in chosen] == ["chosen"]
    silent(browser, path)


@pytest.mark.slow
def test_96_layers_open_and_answer(
    browser: Any, tmp_path: Path, record_property: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "deep.html"
    write_report(deep(96), path, title="96 layers")
    assert path.stat().st_size < 5e6
    load(browser, path)
    ready = browser.execute_script(
        "return performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd"
    )
    record_property("interactive_ms", ready)
    with capsys.disabled():
        print(f"\n96 layers: {path.stat().st_size / 1e6:.2f} MB, interactive in {ready:.0f} ms")
    menus = browser.find_elements(By.CSS_SELECTOR, "[data-table=collectives] select")
    webdriver.support.ui.Select(menus[2]).select_by_value("every one")
    rows = column(browser, "collectives", 1)
    assert 0 < len(rows) <= 20
    status = browser.find_element(By.CSS_SELECTOR, "[data-table=collectives] [role=status]")
    assert status.text.replace(",", "").startswith(f"{len(deep(96).plan.collectives)} rows")
    assert browser.find_element(By.CSS_SELECTOR, "#graph .times").text.strip()[1:] == "96"
    silent(browser, path)


@pytest.mark.long
@pytest.mark.parametrize("width", [420, 900, 1400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_notebook_card_fits_its_page(
    browser: Any, tmp_path: Path, width: int, scheme: str
) -> None:
    page = tmp_path / "card.html"
    page.write_text(
        f'<!doctype html><meta charset="utf-8"><meta name="color-scheme" content="{scheme}">'
        f"<title>card</title><body>{deep(96).plan._repr_html_()}",
        encoding="utf-8",
    )
    browser.get_log("browser")
    browser.set_window_size(width, 1000)
    browser.get(page.as_uri())
    for folded in browser.find_elements(By.TAG_NAME, "summary"):
        folded.click()
    assert len(browser.find_elements(By.CSS_SELECTOR, "details[open]")) == 2
    wide, seen = browser.execute_script(
        "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    )
    assert wide <= seen
    assert browser.get_log("browser") == []


@pytest.mark.long
@pytest.mark.parametrize("width", [420, 900, 1400])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_page_of_clusters(browser: Any, tmp_path: Path, width: int, theme: str) -> None:
    """Nothing sticks out of the window, and no label of the chart lies on another."""
    price = Price(2.0, "test")
    plan = small().plan
    offers = tuple(
        Offer(f"h100:8x{n}", "h100", 8 * n, n, 64 * n, plan, 0.4, price, pareto=n == 1)
        for n in (1, 2, 3)
    )
    path = tmp_path / "clusters.html"
    write_offers(Offers("tokens", (*offers, *offers)), path, TITLE)
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia",
        {"features": [{"name": "prefers-color-scheme", "value": theme}]},
    )
    browser.set_window_size(width, 900)
    for kind in ("browser", "performance"):
        browser.get_log(kind)
    browser.get(path.as_uri())
    assert browser.find_element(By.TAG_NAME, "h1").text.startswith("<lambda> </script>")
    assert len(browser.find_elements(By.CSS_SELECTOR, "tbody tr")) == 6
    wide = "return document.documentElement.scrollWidth <= document.documentElement.clientWidth"
    assert browser.execute_script(wide)
    labels = browser.find_elements(By.CSS_SELECTOR, "circle + text")
    tops = sorted(
        (round(label.rect["x"]), label.rect["y"] + label.rect["height"] / 2) for label in labels
    )
    assert len(tops) == 6
    for (x, y), (other, below) in itertools.combinations(tops, 2):
        assert abs(x - other) > 40 or abs(y - below) > 4, tops
    silent(browser, path)
    browser.set_window_size(1280, 1000)
