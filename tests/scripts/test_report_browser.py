"""A report in a real browser: what it draws are the values of metrics.jsonl."""

import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
import report as script
from reporting.curves import smooth
from reporting.run_record import Series

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="needs chromium or google-chrome"),
]
LEFT = 54  # pixels of the labels of the y axis
# Moves the pointer over the middle of the first chart.
POINTER = """
<script>
const body = charts[0].body, box = body.getBoundingClientRect();
const at = (type, share) => body.dispatchEvent(new PointerEvent(type, { bubbles: true, button: 0,
  clientX: box.left + 54 + share * (box.width - 64), clientY: box.top + 50 }));
at("pointermove", 0.5);
document.title = [...tip.querySelectorAll("td")].map((cell) => cell.textContent).join("|");
ACTION
</script>
"""


class Drawing(HTMLParser):
    """The lines and marks that the page has drawn."""

    def __init__(self, dom: str):
        super().__init__()
        self.paths: dict[tuple[str, str, str], str] = {}
        self.marks: list[str] = []
        self.title, self.heat = "", []
        self._tag = ""
        self.feed(dom)

    def handle_starttag(self, tag, attrs):
        given, self._tag = dict(attrs), tag
        if tag == "path" and "data-metric" in given:
            self.paths[given["data-metric"], given["data-run"], given["class"]] = given["d"]
        if "data-kind" in given:
            self.marks.append(given["data-kind"])
        if tag == "canvas":
            self.heat.append((int(given["width"]), int(given["height"])))

    def handle_data(self, data):
        self.title += data if self._tag == "title" and not self.title else ""


def drawn(page: Path, folder: Path, action: str = "") -> Drawing:
    copy = folder / "shown.html"
    content = page.read_text().replace("</body>", POINTER.replace("ACTION", action) + "</body>")
    copy.write_text(content)
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += ["--window-size=1400,2000", f"--user-data-dir={folder / 'profile'}"]
    command += ["--enable-logging=stderr", "--virtual-time-budget=5000", copy.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    errors = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert not errors, errors
    return Drawing(done.stdout)


def points(path: str) -> np.ndarray:
    return np.array(
        [[float(x) for x in pair.split()] for pair in re.findall(r"[ML]([^ML]+)", path)]
    )


@pytest.fixture
def made(tmp_path):
    rng = np.random.default_rng(0)
    for name, steps in (("a", 50), ("b", 40)):
        (tmp_path / name).mkdir()
        with open(tmp_path / name / "metrics.jsonl", "w") as file:
            for step in range(1, steps + 1):
                entry = {"step": step, "loss": 2 + rng.random(), "learning_rate": step / 100}
                entry |= {"moe/layer_0/entropy": 1.0, "moe/layer_1/entropy": rng.random()}
                entry |= {"step_time": 1.0 + step % 3, "tokens_per_second": 100.0 + step}
                entry["bad_steps"] = float(step == 7)
                file.write(json.dumps(entry) + "\n")
    page = tmp_path / "report.html"
    assert script.main([str(tmp_path / "a"), str(tmp_path / "b"), "--output", str(page)]) == 0
    return page


def metrics(folder: Path, name: str) -> np.ndarray:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return np.array([json.loads(line)[name] for line in lines])


def test_the_browser_draws_every_value_where_it_belongs(made, tmp_path):
    shown = drawn(made, tmp_path)
    for metric, kind in (("loss", "raw"), ("learning_rate", "raw alone")):
        scales = []
        for run, name in (("0", "a"), ("1", "b")):
            x, y = points(shown.paths[metric, run, kind]).T
            values = metrics(tmp_path / name, metric)
            # Pixels are a linear function of steps and values, the same for both runs.
            for pixels, wanted in ((x, np.arange(1, len(values) + 1)), (y, values)):
                line = np.polyfit(wanted, pixels, 1)
                assert np.abs(np.polyval(line, wanted) - pixels).max() < 0.1
                scales.append(line)
        np.testing.assert_allclose(scales[:2], scales[2:], rtol=0.02)
        assert scales[0][0] > 0 > scales[1][0]
    assert shown.marks.count("skipped") >= 2 and shown.heat == [(50, 2), (40, 2)]
    assert all(("loss", run, "mean") in shown.paths for run in "01")


def test_the_browser_smooths_as_the_images_do(made, tmp_path):
    shown = drawn(made, tmp_path)
    for run, name in (("0", "a"), ("1", "b")):
        losses = metrics(tmp_path / name, "loss")
        line = np.polyfit(losses, points(shown.paths["loss", run, "raw"])[:, 1], 1)
        # A hundredth of the 50 steps of the longest run.
        wanted = smooth(Series(np.arange(1, len(losses) + 1), losses), 0.5).values
        pixels = points(shown.paths["loss", run, "mean"])[:, 1]
        assert np.abs(np.polyval(line, wanted) - pixels).max() < 0.2
        assert np.abs(wanted - losses).max() > 0.05


def test_the_pointer_shows_the_values_of_a_step(made, tmp_path):
    cells = drawn(made, tmp_path).title.split("|")
    step = int(cells[2].removeprefix("step "))
    loss = metrics(tmp_path / "a", "loss")[step - 1]
    assert cells[1] == "a" and 25 <= step <= 26 and cells[3] == f"{float(f'{loss:.8g}')}"
    assert cells[6] == "b" and cells[7] in ("step 25", "step 26")


def test_a_drag_zooms_every_chart_and_a_click_hides_a_run(made, tmp_path):
    drag = 'at("pointerdown", 0.5); at("pointermove", 1); at("pointerup", 1);'
    hide = 'document.querySelectorAll("button.run")[1].click();'
    before, after = drawn(made, tmp_path), drawn(made, tmp_path, drag + hide)
    rate = "learning_rate", "0", "raw alone"
    assert LEFT <= points(before.paths[rate])[0, 0] < points(before.paths[rate])[24, 0]
    # The steps 25 to 50 fill the chart.
    assert points(after.paths[rate])[23, 0] < LEFT <= points(after.paths[rate])[25, 0]
    assert {run for _, run, _ in before.paths} == {"0", "1"}
    assert {run for _, run, _ in after.paths} == {"0"}


def test_the_x_axis_can_be_tokens_or_hours(made, tmp_path):
    rate = "learning_rate", "0", "raw alone"
    seconds = metrics(tmp_path / "a", "step_time")
    tokens = seconds * metrics(tmp_path / "a", "tokens_per_second")
    for name, sizes in (("tokens", tokens), ("hours", seconds)):
        choose = 'const menu = document.getElementById("axis");'
        choose += f'menu.value = "{name}"; menu.onchange({{ target: menu }});'
        x, _ = points(drawn(made, tmp_path, choose).paths[rate]).T
        line = np.polyfit(np.cumsum(sizes), x, 1)
        assert np.abs(np.polyval(line, np.cumsum(sizes)) - x).max() < 0.1
