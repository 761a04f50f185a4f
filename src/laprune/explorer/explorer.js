// The explorer and the calculator: mask.js with sliders. Each element of class laprune-explorer or
// laprune-calculator on the page becomes one.
(function () {
  "use strict";
  const { solve, lapsum, measure, floor, meanField, gammaFor, draw, DISTRIBUTIONS } =
    globalThis.laprune;
  const N = 400, BINS = 25, WIDTH = 460, HEIGHT = 250;
  const MARGIN = { left: 56, right: 10, top: 10, bottom: 38 };

  function element(parent, name, attributes = {}, text = "") {
    const svg = ["svg", "path", "line", "text", "rect", "title"].includes(name);
    const node = svg
      ? document.createElementNS("http://www.w3.org/2000/svg", name)
      : document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    node.textContent = text;
    parent.append(node);
    return node;
  }

  // A labelled slider: `show` writes its value, `from` makes the value of its position. A value that
  // is `put` there, between its positions or beyond them, holds until it is moved.
  function slider(parent, label, range, show, from = (x) => x) {
    const box = element(parent, "label");
    const caption = element(box, "span");
    element(caption, "span", {}, label);
    const output = element(caption, "output");
    const input = element(box, "input", { type: "range", "aria-label": label, ...range });
    let held = null;
    input.addEventListener("input", () => { held = null; });
    const value = () => held ?? from(Number(input.value));
    return {
      value,
      put(x, position) { input.value = position; held = x; },
      refresh() { output.textContent = show(value()); },
    };
  }

  function choice(parent, label, options, chosen) {
    const box = element(parent, "label");
    element(element(box, "span"), "span", {}, label);
    const select = element(box, "select", { "aria-label": label });
    for (const [value, text] of options) element(select, "option", { value }, text);
    select.value = chosen;
    return select;
  }

  const distributions = () =>
    Object.entries(DISTRIBUTIONS).map(([name, { label }]) => [name, label]);
  const EPSILONS = [["0.001", "0.001"], ["0.01", "0.01"], ["0.05", "0.05"]];
  const percent = (x) => `${(100 * x).toFixed(1)} %`;
  const plain = (x) => (Number.isFinite(x) ? String(Number(x.toPrecision(3))) : "∞");
  const digits = (x, count) => (Number.isFinite(x) ? x.toFixed(count) : "–");

  // An empty chart with axes; x and y give the place of a value.
  function chart(parent, title, xlabel, ylabel, xmax, xticks) {
    const figure = element(parent, "figure");
    const svg = element(figure, "svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" });
    element(svg, "title", {}, title);
    const x = (v) => MARGIN.left + ((WIDTH - MARGIN.left - MARGIN.right) * v) / xmax;
    const y = (v) => HEIGHT - MARGIN.bottom - (HEIGHT - MARGIN.top - MARGIN.bottom) * v;
    for (const v of [0, 0.25, 0.5, 0.75, 1]) {
      element(svg, "line", { x1: x(0), x2: x(xmax), y1: y(v), y2: y(v), class: "grid" });
      element(svg, "text", { x: x(0) - 6, y: y(v) + 4, "text-anchor": "end" }, String(v));
    }
    for (const v of xticks)
      element(svg, "text", { x: x(v), y: y(0) + 16, "text-anchor": "middle" }, String(v));
    const middle = (x(0) + x(xmax)) / 2;
    element(svg, "text", { x: middle, y: HEIGHT - 4, "text-anchor": "middle" }, xlabel);
    const turn = `translate(13 ${y(0.5)}) rotate(-90)`;
    element(svg, "text", { transform: turn, "text-anchor": "middle" }, ylabel);
    return { svg, x, y, path: (name) => element(svg, "path", { class: name }) };
  }

  function curve(p, { x, y }) {
    return p.map((v, i) => `${i ? "L" : "M"}${x(i + 0.5).toFixed(1)} ${y(v).toFixed(1)}`).join("");
  }

  function bars(p, { x, y }, side) {
    const counts = new Array(BINS).fill(0);
    for (const v of p) counts[Math.min(Math.floor(v * BINS), BINS - 1)] += 1 / p.length;
    return counts.map((share, i) => {
      const left = x((i + 0.06 + 0.44 * side) / BINS), right = x((i + 0.5 + 0.44 * side) / BINS);
      return share ? `M${left} ${y(0)}V${y(share)}H${right}V${y(0)}Z` : "";
    }).join("");
  }

  function explorer(host) {
    host.textContent = "";
    const controls = element(host, "div", { class: "controls" });
    const budget = slider(controls, "budget k/n", { min: 0.01, max: 0.99, step: 0.01, value: 0.1 },
      (a) => `${a.toFixed(2)}  (k = ${Math.round(a * N)} of ${N})`);
    const hardness = slider(controls, "hardness γ", { min: 0, max: 1, step: 0.005, value: 0.9 },
      (g) => g.toFixed(3));
    const scale = slider(controls, "scale of the scores", { min: -2, max: 2, step: 0.05, value: 0 },
      (c) => `× ${plain(c)}`, (v) => 10 ** v);
    const heat = slider(controls, "LapSum temperature t",
      { min: -3, max: 2, step: 0.05, value: -1 }, plain, (v) => 10 ** v);
    const kind = choice(controls, "scores", distributions(), "gaussian");
    const threshold = choice(controls, "near-binary within ε", EPSILONS, "0.01");
    const buttons = element(controls, "div", { class: "buttons" });
    const match = element(buttons, "button", { type: "button" }, "LapSum: take LaPrune’s t");
    const again = element(buttons, "button", { type: "button" }, "draw new scores");

    const charts = element(host, "div", { class: "charts" });
    const over = chart(charts, "Mask over sorted scores", "scores, largest first (dashed: k)",
      "mask p", N, [0, 100, 200, 300, 400]);
    const limit = element(over.svg, "line", { class: "budget", y1: over.y(0), y2: over.y(1) });
    const counts = chart(charts, "Histogram of the mask", "mask p", "share of the entries", 1,
      [0, 0.25, 0.5, 0.75, 1]);
    const shapes = {
      lapsum: [over.path("lapsum line"), counts.path("lapsum bar")],
      laprune: [over.path("laprune line"), counts.path("laprune bar")],
    };

    const frame = element(host, "div", { class: "numbers" });
    // A class of its own keeps the page's style for tables away.
    const table = element(frame, "table", { class: "laprune-table" });
    const head = element(element(table, "thead"), "tr");
    for (const [text, name] of [["", ""], ["LaPrune", "laprune"], ["predicted (mean field)", ""],
      ["floor, any scores", ""], ["LapSum", "lapsum"]])
      element(head, "th", { class: name, scope: "col" }, text);
    const body = element(table, "tbody");
    const cells = {};
    for (const row of ["mass Σp", "realised γ", "p < ε", "p > 1 − ε", "temperature t"]) {
      const line = element(body, "tr");
      element(line, "th", { scope: "row" }, row);
      cells[row] = [0, 1, 2, 3].map(() => element(line, "td"));
    }
    const fill = (row, values) => values.forEach((v, i) => { cells[row][i].textContent = v; });

    let seed = 1, waiting = false, temperature = NaN;
    function update() {
      waiting = false;
      for (const control of [budget, hardness, scale, heat]) control.refresh();
      const k = Math.round(budget.value() * N), a = k / N, gamma = hardness.value();
      const eps = Number(threshold.value), c = scale.value();
      const scores = draw(kind.value, N, seed).map((v) => c * v).sort((x, y) => y - x);
      const ours = solve(scores, k, gamma), theirs = lapsum(scores, k, heat.value());
      const m = measure(ours.mask, eps), l = measure(theirs, eps);
      const predicted = meanField(kind.value, a, gamma, eps);
      temperature = ours.temperature;
      limit.setAttribute("x1", over.x(k));
      limit.setAttribute("x2", over.x(k));
      for (const [name, p, side] of [["laprune", ours.mask, 0], ["lapsum", theirs, 1]]) {
        shapes[name][0].setAttribute("d", curve(p, over));
        shapes[name][1].setAttribute("d", bars(p, counts, side));
      }
      fill("mass Σp", [digits(m.mass, 6), String(k), "", digits(l.mass, 6)]);
      fill("realised γ", [digits(m.gamma, 6), gamma.toFixed(3), "", digits(l.gamma, 6)]);
      fill("p < ε", [percent(m.zero), percent(predicted.zero),
        `≥ ${percent(floor(a, gamma, eps))}`, percent(l.zero)]);
      fill("p > 1 − ε", [percent(m.one), percent(predicted.one), "", percent(l.one)]);
      fill("temperature t", [plain(ours.temperature), plain(c * predicted.temperature), "",
        plain(heat.value())]);
    }
    const soon = () => { if (!waiting) { waiting = true; requestAnimationFrame(update); } };
    controls.addEventListener("input", soon);
    again.addEventListener("click", () => { seed += 1; soon(); });
    match.addEventListener("click", () => {
      if (temperature > 0 && Number.isFinite(temperature))
        heat.put(temperature, Math.log10(temperature));
      soon();
    });
    update();
  }

  function calculator(host) {
    host.textContent = "";
    const controls = element(host, "div", { class: "controls" });
    const budget = slider(controls, "budget k/n", { min: 0.005, max: 0.5, step: 0.005, value: 0.1 },
      (a) => a.toFixed(3));
    const wanted = slider(controls, "near-binary entries wanted",
      { min: 0.5, max: 0.995, step: 0.005, value: 0.95 }, percent);
    const kind = choice(controls, "scores", distributions(), "gaussian");
    const threshold = choice(controls, "near-binary within ε", EPSILONS, "0.01");
    const answer = element(host, "p", { class: "answer", role: "status" });
    let waiting = false;
    function update() {
      waiting = false;
      for (const control of [budget, wanted]) control.refresh();
      const a = budget.value(), eps = Number(threshold.value), share = wanted.value();
      const gamma = gammaFor(kind.value, a, share, eps);
      answer.textContent = "";
      element(answer, "strong", {}, `γ = ${gamma.toFixed(4)}`);
      const least = percent(floor(a, gamma, eps));
      answer.append(` puts ${percent(share)} of the entries within ${eps} of 0 or 1, as predicted ` +
        `for these scores; whatever the scores, at least ${least} lie below ${eps}.`);
    }
    controls.addEventListener("input", () => {
      if (!waiting) { waiting = true; requestAnimationFrame(update); }
    });
    update();
  }

  function start() {
    document.querySelectorAll(".laprune-explorer").forEach(explorer);
    document.querySelectorAll(".laprune-calculator").forEach(calculator);
  }
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
})();
