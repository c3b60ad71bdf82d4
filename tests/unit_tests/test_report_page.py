"""How a report looks: no label over another at 1, 3 and 6 blocks, legends inside; the page alone, on a phone and a desk."""

import html
import html.parser
import itertools
import json
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from blockgrow_titan.report import curves, states
from blockgrow_titan.report.experiment import Experiment, make_experiment
from blockgrow_titan.report.reading import find_runs, read_run
from blockgrow_titan.report.style import COLORS, Drawn, styled
from blockgrow_titan.report.write import FIGURES
from tests.unit_tests.report_runs import write_run, write_standard
from tools.report import main

CHROMIUM = next(
    filter(
        None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome"))
    ),
    None,
)


def read(folder: Path) -> Experiment:
    return make_experiment([read_run(path) for path in find_runs([folder])])


def drawn(experiment: Experiment, made_by: Sequence[Callable[[Experiment], Drawn]] = FIGURES) -> dict[str, Figure]:
    """Every figure as matplotlib has it, drawn once."""
    found: list[Figure] = []

    def keep(figure: Figure) -> dict[str, bytes]:
        found.append(figure)
        FigureCanvasAgg(figure).draw()
        return {"png": b"png", "svg": b"svg"}

    with pytest.MonkeyPatch.context() as patch, styled():
        patch.setattr(curves, "saved", keep)
        patch.setattr(states, "saved", keep)
        made = [figure(experiment) for figure in made_by]
    return dict(zip([figure.id for figure in made if figure.png], found, strict=True))


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Figure]:
    """Of the standard runs with three blocks."""
    return drawn(read(write_standard(tmp_path_factory.mktemp("three"))))


def texts_of(figure: Figure) -> list[Any]:
    """All texts that are seen: ticks, labels, titles, annotations, legend."""
    texts = []
    for axes in figure.axes:
        if not axes.get_visible():
            continue
        for axis, (low, high) in ((axes.xaxis, sorted(axes.get_xlim())), (axes.yaxis, sorted(axes.get_ylim()))):
            ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
            texts += [tick.label1 for tick in ticks if tick.label1.get_visible() and low <= tick.get_loc() <= high]
        texts += [axes.xaxis.label, axes.yaxis.label, axes.title, *axes.texts]
    for legend in figure.legends:
        texts += legend.get_texts()
    return [text for text in texts if text.get_visible() and text.get_text().strip()]


def check_layout(figure: Figure) -> None:
    """No text reaches over the figure's edge or into another one."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in texts_of(figure)]
    assert len(boxes) > 8
    for text, box in boxes:
        assert box.x0 >= -1 and box.y0 >= -1, f"{text!r} is cut"
        assert box.x1 <= figure.bbox.width + 1 and box.y1 <= figure.bbox.height + 1, f"{text!r} is cut"
    for (one, a), (other, b) in itertools.combinations(boxes, 2):
        apart = a.x1 <= b.x0 + 1 or b.x1 <= a.x0 + 1 or a.y1 <= b.y0 + 1 or b.y1 <= a.y0 + 1
        assert apart, f"{one!r} lies over {other!r}"
    for legend in figure.legends:
        box = legend.get_window_extent(renderer)
        assert box.x0 >= 0 and box.x1 <= figure.bbox.width and box.y0 >= 0
        assert all(not box.overlaps(axes.get_window_extent(renderer)) for axes in figure.axes)


@pytest.mark.parametrize("blocks", [1, 3, 6])
def test_nothing_overlaps(blocks: int, figures: dict[str, Figure], tmp_path: Path) -> None:
    if blocks != 3:
        figures = drawn(read(write_standard(tmp_path, (42, 43), blocks)))
    assert len(figures) == (6 if blocks == 1 else 7)  # one block cannot grow: no figure by phases of growth
    for name, figure in figures.items():
        try:
            check_layout(figure)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


def test_nothing_overlaps_with_variants(tmp_path: Path) -> None:
    """The legends of the curves hold all variants of a recipe, and leave room for the curves."""
    write_standard(tmp_path)
    policies = [("keep", "restart"), ("reset", "continue"), ("keep", "continue")]
    for (optimizer, lr), placement in itertools.product(policies, ("pre", "post")):
        changed = {"growth.optimizer_at_growth": optimizer, "growth.lr_at_growth": lr}
        write_run(tmp_path / f"{placement}-{optimizer}-{lr}", placement, [1, 2, 3], [5.0, 4.8, 4.6], changed=changed)
    figures = drawn(read(tmp_path), (curves.figure3b, curves.figure5b))
    for figure in figures.values():
        check_layout(figure)
        assert all(axes.get_window_extent().height > 150 for axes in figure.axes)


def test_one_color_for_each_placement(figures: dict[str, Figure]) -> None:
    """Lines in full colour are pre's or post's; those of pre are solid and those of post dashed where both stand for runs."""
    lines = [line for axes in figures["figure5b"].axes for line in axes.lines if line.get_label()[0] != "_"]
    assert {(to_hex(line.get_color(), False).upper(), line.get_linestyle()) for line in lines} == {
        (COLORS["pre"], "-"),
        (COLORS["post"], "--"),
    }
    bars = [bar for axes in figures["figure3a"].axes for bar in axes.patches]
    assert {(to_hex(bar.get_facecolor()).upper(), bar.get_hatch()) for bar in bars} == {
        (COLORS["pre"], ""),
        (COLORS["post"], "////"),
    }


def test_figures_show_the_runs(figures: dict[str, Figure]) -> None:
    """Points of figures against the numbers of the runs: ce by phase, and the RMS at each boundary of the last phase."""
    grow = figures["figure3b"].axes[0].lines[0]
    assert [round(float(y), 9) for y in grow.get_ydata()] == [4.6, 4.4, 4.2]
    last = figures["figure4"].axes[0].lines[2]
    expected = [10 * (1 + 0.5 * k) * 1.4 * (1 + 42 / 1e4) for k in range(4)]
    assert list(last.get_ydata()) == pytest.approx(expected)
    kind = figures["figure5a"].axes[1].lines[0]  # post, document boundary, after block 0
    assert list(kind.get_ydata()) == pytest.approx([4 * 1.3 * (1 + p) for p in range(3)])
    removal = figures["figureA2"].axes[0].containers[1]  # post-norm grow
    assert [bar.get_height() for bar in removal] == pytest.approx([3 / (k + 1) + 0.042 for k in range(3)])


def test_figures_of_one_placement(tmp_path: Path) -> None:
    """With one run alone the others' panels say so, and nothing breaks."""
    write_run(tmp_path / "a", "post", [1, 2, 3], [4.0, 3.0, 2.0])
    figures = drawn(read(tmp_path))
    assert len(figures) == 7
    assert "missing" in {text.get_text() for axes in figures["figure4"].axes for text in axes.texts}


class References(html.parser.HTMLParser):
    """Everything that a page would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.tags: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.found += [
            value or "" for name, value in attrs if name in ("src", "href", "srcset", "data", "action", "poster")
        ]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report with a missing run, an unfinished one and one whose name a page must escape."""
    folder = tmp_path_factory.mktemp("report")
    write_standard(folder / "runs", kinds=("joint1", "freeze"))
    write_run(folder / "runs" / "<b>&\"'", "post", [1, 2, 3], [4.0, 3.0, 2.0])
    write_run(folder / "runs" / "unfinished", "pre", [1, 2, 3], [4.0, 3.0, 2.0], until=10)
    assert main([str(folder / "runs"), "-o", str(folder / "out")]) == 0
    return folder / "out"


def test_page_needs_nothing_else(report: Path) -> None:
    text = (report / "report.html").read_text()
    references = References(text)
    assert all(re.match(r"data:|#\w+$", each) for each in references.found)
    assert sum(each.startswith("data:image/svg+xml;base64,") for each in references.found) == 7
    assert not references.tags & {"script", "iframe", "object", "embed", "b"}
    style = re.search("<style>(.*?)</style>", text, re.DOTALL)
    assert style and "url(" not in style[1] and "@import" not in style[1] and "prefers-color-scheme: dark" in style[1]
    assert "&lt;b&gt;&amp;" in text
    assert "<code>tools/run_recipe.py interaction --scale tiny --only grow_pre --seeds 42</code>" in text
    assert "unfinished: it has trained 10 of 60 steps" in text and "| - |" in (report / "report.md").read_text()


PROBE = """
<script>
addEventListener("load", () => {
  const images = [...document.images], root = document.documentElement;
  const wide = [...document.querySelectorAll("body *")].filter(
    e => !e.closest(".scroll") && e.getBoundingClientRect().right > innerWidth + 0.5).map(e => e.outerHTML.slice(0, 80));
  parent.postMessage(JSON.stringify({
    width: innerWidth, scrolls: root.scrollWidth > innerWidth || document.body.scrollWidth > innerWidth, wide: wide,
    images: images.length, loaded: images.filter(i => i.complete && i.naturalWidth > 0).length,
    least: Math.min(...images.map(i => i.getBoundingClientRect().width)),
    fetched: performance.getEntriesByType("resource").map(e => e.name).filter(n => !n.startsWith("data:")),
  }), "*");
});
</script>
"""
# The window of a browser is at least 500 pixels wide; a frame in it can be narrower.
FRAME = """<!doctype html><pre id="probe"></pre>
<script>addEventListener("message", event => { document.getElementById("probe").textContent = event.data; });</script>
<iframe style="width: WIDTHpx; height: 900px; border: 0" srcdoc="PAGE"></iframe>
"""


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine (chromium, google-chrome)")
@pytest.mark.parametrize("width", [390, 1280])
def test_page_in_a_browser(report: Path, width: int, tmp_path: Path) -> None:
    """Every image is loaded, the console is silent, nothing is fetched, the page does not scroll sideways."""
    assert CHROMIUM is not None
    page = tmp_path / "page.html"
    text = (report / "report.html").read_text().replace("</body>", PROBE + "</body>")
    page.write_text(FRAME.replace("WIDTH", str(width)).replace("PAGE", html.escape(text)))
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr"]
    flags += ["--window-size=1400,1000", f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=10000"]
    result = subprocess.run(
        [CHROMIUM, *flags, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=120, check=False
    )
    found = re.search(r'<pre id="probe">(.*?)</pre>', result.stdout, re.DOTALL)
    assert found and found[1], f"the page did not load: {result.stderr[-2000:]}"
    seen = json.loads(html.unescape(found[1]))
    assert seen["width"] == width and not seen["scrolls"] and seen["wide"] == []
    assert seen["images"] == seen["loaded"] == 7 and seen["least"] > 300 and seen["fetched"] == []
    assert "CONSOLE" not in result.stderr
