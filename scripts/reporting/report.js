"use strict";
// Charts of a report. The figures are in the element #report, as JSON; nothing else is loaded.
const report = JSON.parse(document.getElementById("report").textContent);
const state = { axis: "step", smoothing: report.smoothing, hidden: new Set(), zoom: null };
const charts = [];
const tip = document.getElementById("tip");
const MARKS = { restart: "▲", rollback: "◀", skipped: "✕", spike: "◆" };
const LEFT = 54, RIGHT = 10, TOP = 8, BOTTOM = 20;

function element(name, attributes = {}, ...children) {
  const isSvg = ["svg", "path", "line", "text", "rect", "circle", "g", "clipPath", "title"]
    .includes(name);
  const made = isSvg ? document.createElementNS("http://www.w3.org/2000/svg", name)
    : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

const colour = (run) => `var(--run${run % 8})`;
const swatch = (run) => element("i", { class: "swatch", style: `background:${colour(run)}` });

/** A number as short text: 12.3k, 0.00421, 3e-5. */
function short(value) {
  if (!Number.isFinite(value)) return "-";
  const size = Math.abs(value);
  if (size === 0) return "0";
  for (const [unit, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (size >= unit) {
      return `${trimmed((value / (letter === "k" ? 1e3 : unit)).toPrecision(4))}${letter}`;
    }
  }
  return size < 1e-3 ? value.toExponential(2).replace(/\.?0*e/, "e") : trimmed(value.toPrecision(5));
}
const trimmed = (text) => text.includes(".") ? text.replace(/\.?0+$/, "") : text;

/** Index of the last of ascending values that is <= x; 0 if there is none. */
function before(values, x) {
  let low = 0, high = values.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (values[middle] <= x) low = middle; else high = middle - 1;
  }
  return low;
}

/** Position of a step of a run on the chosen axis: step, tokens or hours. */
function position(run, step) {
  if (state.axis === "step") return step;
  const { step: steps, [state.axis]: values } = report.runs[run].axes;
  const n = Math.min(before(steps, step), steps.length - 2);
  if (n < 0) return values[0] ?? 0;
  const share = (step - steps[n]) / (steps[n + 1] - steps[n]);
  return values[n] + share * (values[n + 1] - values[n]);
}

/** Average with weights exp(-distance / width), to both sides; the same width for all runs. */
function smooth(steps, values) {
  const width = state.smoothing * Math.max(...report.runs.map((run) => run.lastStep));
  const kept = steps.map((_, n) => n).filter((n) => values[n] !== null);
  const x = kept.map((n) => steps[n]), y = kept.map((n) => values[n]);
  if (x.length < 3 || width <= 0) return [x, y];
  const decay = x.map((step, n) => n ? Math.exp((x[n - 1] - step) / width) : 0);
  const total = y.slice(), weight = y.map(() => 1), back = y.slice(), backWeight = y.map(() => 1);
  for (let n = 1; n < x.length; n++) {
    total[n] += decay[n] * total[n - 1];
    weight[n] += decay[n] * weight[n - 1];
  }
  for (let n = x.length - 2; n >= 0; n--) {
    back[n] += decay[n + 1] * back[n + 1];
    backWeight[n] += decay[n + 1] * backWeight[n + 1];
  }
  return [x, y.map((one, n) => (total[n] + back[n] - one) / (weight[n] + backWeight[n] - 1))];
}

function niceTicks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((size) => size >= rough);
  const ticks = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high * (1 + 1e-12) + 1e-300; n++) {
    ticks.push(n * step);
  }
  return ticks;
}

function logTicks(low, high) {
  const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
  const every = Math.ceil((last - first) / 5), ticks = [];
  for (let power = first; power <= last; power += every) {
    for (const factor of last - first <= 2 ? [1, 2, 5] : [1]) ticks.push(factor * 10 ** power);
  }
  const inside = ticks.filter((tick) => tick >= low * 0.999 && tick <= high * 1.001);
  return inside.length >= 2 ? inside : niceTicks(low, high, 4);
}

/** What a chart draws of every visible run: steps, positions, raw and smoothed values. */
function visibleLines(chart) {
  const lines = [];
  for (const [run, { curves }] of report.runs.entries()) {
    for (const metric of chart.metrics) {
      const curve = curves[metric];
      if (!curve || state.hidden.has(run)) continue;
      const isEval = metric.startsWith("eval"), [x, y, mx, my] = curve;
      const isPlain = isEval || !chart.isSmooth || x.length < 30;
      const mean = isPlain ? null : smooth(mx ?? x, my ?? y);
      const at = x.map((step) => position(run, step));
      lines.push({ run, metric, isEval, x, y, at, mean,
        meanAt: mean && mean[0].map((step) => position(run, step)) });
    }
  }
  return lines;
}

function xDomain() {
  if (state.zoom) return state.zoom;
  const ends = report.runs.flatMap((run, n) => state.hidden.has(n) || !run.lastStep ? []
    : [position(n, run.firstStep), position(n, run.lastStep)]);
  const low = Math.min(...ends), high = Math.max(...ends);
  return low < high ? [low, high] : [low - 0.5, low + 0.5];
}

/** Range of the y axis: all smoothed values, and all raw ones but the rarest, unless all are asked. */
function yDomain(chart, lines, [left, right]) {
  const usable = (value) => value !== null && (!chart.isLog || value > 0);
  const within = (values, at) => values.filter((y, n) => usable(y) && at[n] >= left && at[n] <= right);
  let kept = [], all = [];
  for (const line of lines) {
    const raw = within(line.y, line.at).sort((a, b) => a - b);
    all = all.concat(raw);
    if (!line.mean || chart.isWhole) kept = kept.concat(raw);
    else {
      const cut = Math.floor(raw.length * 0.01);
      kept = kept.concat(raw.slice(cut, raw.length - cut), within(line.mean[1], line.meanAt));
    }
  }
  if (!kept.length) return null;
  const extent = (values) => values.reduce(([a, b], y) => [Math.min(a, y), Math.max(b, y)],
    [Infinity, -Infinity]);
  let [low, high] = extent(kept);
  const isConstant = high - low <= 1e-9 * Math.max(Math.abs(low), Math.abs(high));
  if (isConstant) [low, high] = low ? [low - Math.abs(low) / 10, high + Math.abs(high) / 10] : [0, 1];
  const margin = 0.05 * (high - low), ratio = (high / low) ** 0.05;
  [low, high] = chart.isLog && low > 0 ? [low / ratio, high * ratio]
    : [low >= 0 && low < margin ? 0 : low - margin, high + margin];
  chart.outside = all.filter((y) => y < low || y > high).length;
  return [low, high];
}

function path(xs, ys, toX, toY, isLog) {
  let text = "", pen = "M";
  for (let n = 0; n < xs.length; n++) {
    if (ys[n] === null || (isLog && ys[n] <= 0)) { pen = "M"; continue; }
    text += `${pen}${toX(xs[n]).toFixed(1)} ${toY(ys[n]).toFixed(1)}`;
    pen = "L";
  }
  return text;
}

function drawAxes(svg, chart, width, height, toX, toY, xs, ys) {
  const floor = height - BOTTOM;
  for (const tick of chart.isLog ? logTicks(...ys) : niceTicks(...ys, chart.isWide ? 7 : 4)) {
    const y = toY(tick);
    svg.append(element("line", { class: "rule", x1: LEFT, x2: width - RIGHT, y1: y, y2: y }),
      element("text", { x: LEFT - 7, y: y + 4, "text-anchor": "end" }, short(tick)));
  }
  const ticks = niceTicks(...xs, Math.max(2, Math.floor(width / 110)));
  for (const tick of ticks) {
    const last = toX(tick) > width - RIGHT - 20;
    svg.append(element("text", { x: toX(tick), y: floor + 15,
      "text-anchor": last ? "end" : "middle" }, short(tick)));
  }
  svg.append(element("line", { class: "base", x1: LEFT, x2: width - RIGHT, y1: floor, y2: floor }));
}

function drawLine(group, chart, line, toX, toY) {
  const stroke = colour(line.run);
  const data = { "data-metric": line.metric, "data-run": line.run, style: `stroke:${stroke}` };
  const raw = path(line.at, line.y, toX, toY, chart.isLog);
  const kind = line.isEval ? chart.metrics.length > 1 ? "eval" : "mean" : line.mean ? "raw" : "raw alone";
  group.append(element("path", { class: kind, d: raw, ...data }));
  if (line.mean) {
    const d = path(line.meanAt, line.mean[1], toX, toY, chart.isLog);
    group.append(element("path", { class: "mean", d, ...data }));
  } else if (line.x.length <= 60) {
    line.y.forEach((y, n) => y === null || (chart.isLog && y <= 0) || group.append(
      element("circle", { cx: toX(line.at[n]), cy: toY(y), r: 2.6, style: `fill:${stroke}` })));
  }
}

function drawMarks(svg, group, chart, toX, height) {
  const floor = height - BOTTOM;
  for (const [run, { marks }] of report.runs.entries()) {
    if (state.hidden.has(run)) continue;
    for (const { kind, step, text } of marks) {
      const x = toX(position(run, step));
      if (kind === "restart" || kind === "rollback") {
        group.append(element("line", { class: "restart", x1: x, x2: x, y1: TOP, y2: floor,
          style: `stroke:${colour(run)}` }));
      }
      group.append(element("text", { class: "mark", "data-kind": kind, x,
        y: floor - 3 - 11 * run,
        "text-anchor": "middle", style: `fill:${colour(run)}` }, MARKS[kind],
      element("title", {}, text)));
    }
  }
}

function draw(chart) {
  const width = chart.body.clientWidth, height = chart.isWide ? 380 : 200;
  if (!width) return;
  const lines = visibleLines(chart), xs = xDomain(), ys = lines.length ? yDomain(chart, lines, xs) : null;
  const svg = element("svg", { viewBox: `0 0 ${width} ${height}`, height });
  chart.body.replaceChildren(svg);
  chart.whole.hidden = !chart.isWhole && !chart.outside;
  chart.whole.textContent = chart.isWhole ? "usual range" : `${chart.outside ?? 0} outside: show all`;
  chart.view = null;
  if (!ys) return;
  const scale = chart.isLog && ys[0] > 0 ? Math.log : (y) => y;
  const toX = (x) => LEFT + (x - xs[0]) / (xs[1] - xs[0]) * (width - LEFT - RIGHT);
  const toY = (y) => height - BOTTOM - (scale(y) - scale(ys[0])) / (scale(ys[1]) - scale(ys[0]))
    * (height - BOTTOM - TOP);
  drawAxes(svg, chart, width, height, toX, toY, xs, ys);
  const clip = `clip${charts.indexOf(chart)}`;
  svg.append(element("clipPath", { id: clip }, element("rect",
    { x: LEFT, y: 0, width: width - LEFT - RIGHT + 4, height: height - BOTTOM + 3 })));
  const group = element("g", { "clip-path": `url(#${clip})` });
  svg.append(group);
  for (const line of lines) drawLine(group, chart, line, toX, toY);
  if (chart.hasMarks) drawMarks(svg, group, chart, toX, height);
  chart.view = { svg, group, lines, xs, toX, toY, width, height };
}

const drawAll = () => charts.forEach(draw);
const axisName = () => ({ step: "step", tokens: "tokens", hours: "hours of training" })[state.axis];

function xOf(chart, event) {
  const { svg, xs, width } = chart.view, box = svg.getBoundingClientRect();
  const share = (event.clientX - box.left - LEFT) / (width - LEFT - RIGHT);
  return xs[0] + Math.min(1, Math.max(0, share)) * (xs[1] - xs[0]);
}

function nearest(at, x) {
  const n = before(at, x);
  return n + 1 < at.length && at[n + 1] - x < x - at[n] ? n + 1 : n;
}

function showTip(chart, event) {
  const { group, lines, toX, toY, height } = chart.view, x = xOf(chart, event);
  group.querySelectorAll(".hover").forEach((old) => old.remove());
  group.append(element("line", { class: "hover base", x1: toX(x), x2: toX(x), y1: TOP,
    y2: height - BOTTOM }));
  const rows = lines.map((line) => {
    const n = nearest(line.at, x), value = line.y[n];
    const m = line.mean && nearest(line.meanAt, x);
    const shown = line.mean ? line.mean[1][m] : value;
    if (shown !== null && shown !== undefined && !(chart.isLog && shown <= 0)) {
      group.append(element("circle", { class: "hover", r: 3.5, cy: toY(shown),
        cx: toX(line.mean ? line.meanAt[m] : line.at[n]), style: `fill:${colour(line.run)}` }));
    }
    const name = chart.metrics.length > 1 && line.isEval ? `${report.runs[line.run].name} eval`
      : report.runs[line.run].name;
    return element("tr", {}, element("td", {}, swatch(line.run)), element("td", {}, name),
      element("td", {}, `step ${line.x[n].toLocaleString("en")}`),
      element("td", {}, value === null ? "not finite" : String(value)),
      element("td", { class: "note" }, line.mean ? `smoothed ${short(shown)}` : ""));
  });
  tip.replaceChildren(element("div", { class: "note" }, `${axisName()} ${short(x)}`),
    element("table", {}, ...rows));
  tip.style.display = "block";
  const box = tip.getBoundingClientRect(), margin = 16;
  const isLeft = event.clientX + box.width + margin > innerWidth;
  tip.style.left = `${isLeft ? Math.max(4, event.clientX - box.width - margin) : event.clientX + margin}px`;
  tip.style.top = `${Math.min(event.clientY + margin, innerHeight - box.height - 8)}px`;
}

/** Hover shows values, a drag zooms all charts, a double click shows all steps again. */
function listen(chart) {
  let from = null;
  const hide = () => {
    tip.style.display = "none";
    chart.view?.group.querySelectorAll(".hover, .zoom").forEach((old) => old.remove());
  };
  chart.body.addEventListener("pointerdown", (event) => {
    if (chart.view && event.button === 0) from = xOf(chart, event);
    event.preventDefault();
  });
  chart.body.addEventListener("pointermove", (event) => {
    if (!chart.view) return;
    showTip(chart, event);
    if (from === null) return;
    const { group, toX, height } = chart.view, [a, b] = [from, xOf(chart, event)].sort((p, q) => p - q);
    group.querySelectorAll(".zoom").forEach((old) => old.remove());
    group.append(element("rect", { class: "zoom", x: toX(a), width: toX(b) - toX(a), y: TOP,
      height: height - TOP - BOTTOM }));
  });
  chart.body.addEventListener("pointerup", (event) => {
    if (!chart.view || from === null) return;
    const { xs } = chart.view, to = xOf(chart, event), range = [from, to].sort((p, q) => p - q);
    from = null;
    if (range[1] - range[0] > 0.01 * (xs[1] - xs[0])) setZoom(range);
  });
  chart.body.addEventListener("pointerleave", () => { from = null; hide(); });
  chart.body.addEventListener("dblclick", () => setZoom(null));
}

function setZoom(range) {
  state.zoom = range;
  document.getElementById("unzoom").hidden = !range;
  drawAll();
}

function openCharts() {
  for (const card of document.querySelectorAll("[data-metrics]")) {
    const metrics = JSON.parse(card.dataset.metrics);
    const chart = { metrics, isWide: card.classList.contains("wide"), isLog: "log" in card.dataset,
      hasMarks: "marks" in card.dataset, isSmooth: "smooth" in card.dataset, isWhole: false, body: element("div") };
    const log = element("button", { class: "small", "aria-pressed": chart.isLog }, "log");
    chart.whole = element("button", { class: "small" });
    log.onclick = () => {
      chart.isLog = !chart.isLog;
      log.setAttribute("aria-pressed", chart.isLog);
      draw(chart);
    };
    chart.whole.onclick = () => { chart.isWhole = !chart.isWhole; draw(chart); };
    card.querySelector(".head").append(chart.whole, log);
    card.append(chart.body);
    charts.push(chart);
    listen(chart);
  }
}

function openControls() {
  const runs = document.getElementById("runs");
  for (const [run, { name }] of report.runs.entries()) {
    const button = element("button", { class: "run", "aria-pressed": true }, swatch(run), name);
    button.onclick = () => {
      state.hidden.has(run) ? state.hidden.delete(run) : state.hidden.add(run);
      button.setAttribute("aria-pressed", !state.hidden.has(run));
      drawAll();
    };
    runs.append(button);
  }
  document.getElementById("axis").onchange = ({ target }) => {
    state.axis = target.value;
    setZoom(null);
  };
  const slider = document.getElementById("smoothing");
  slider.oninput = () => {
    state.smoothing = slider.value / 1000;
    document.getElementById("fraction").textContent = `${slider.value / 10} %`;
    drawAll();
  };
  document.getElementById("unzoom").onclick = () => setZoom(null);
  document.getElementById("scheme").onclick = () => {
    const root = document.documentElement, shown = root.style.colorScheme
      || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
    root.style.colorScheme = shown === "dark" ? "light" : "dark";
  };
}

openCharts();
openControls();
drawAll();
addEventListener("resize", drawAll);
