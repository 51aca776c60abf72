// The loss of task 1 around the path of each method: bands of loss, the path, and a cursor.

function drawSurfaces() {
  if (!data.landscapes.length) return;
  const host = section("landscapes");
  const grid = host.querySelector(".surfaces");
  const panels = data.landscapes.map((found) => surface(make(grid, "figure"), found));
  const scale = host.querySelector(".levels");

  function paint() {
    const colours = bandColours();
    for (const panel of panels) panel(colours);
    scale.replaceChildren();
    data.levels.slice(0, -1).forEach((level, band) => {
      const step = make(scale, "span", {}, String(level));
      step.style.setProperty("--band", `rgb(${colours[band].join(" ")})`);
    });
    make(scale, "b", {}, String(data.levels[data.levels.length - 1]));
  }

  if (data.landscapes.some((found) => found.random)) {
    choices(host.querySelector(".choices"), "Plane", [["of the path", "grid"], ["of random directions", "random"]],
      (plane) => {
        grid.dataset.plane = plane;
        const notes = host.querySelectorAll(".note");
        [notes[0].hidden, notes[1].hidden] = [plane !== "grid", plane === "grid"];
        paint();
      });
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
  let width = 0;
  function fit() {
    if (grid.clientWidth === width) return; // a line more of text is no reason
    width = grid.clientWidth;
    paint();
  }
  fit(); // at once: the observer's first call comes with a frame, after the page has loaded
  new ResizeObserver(fit).observe(grid);
}

// A colour for each band between two levels, from the basin to the highlands.
function bandColours() {
  const style = getComputedStyle(document.documentElement);
  const stops = ["--basin", "--slope", "--high"].map((name) => {
    const hex = style.getPropertyValue(name).trim();
    return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  });
  const bands = data.levels.length - 1;
  return Array.from({ length: bands }, (_, band) => {
    const place = bands > 1 ? (2 * band) / (bands - 1) : 0;
    const from = Math.min(Math.floor(place), 1);
    return stops[from].map((value, part) => Math.round(value + (place - from) * (stops[from + 1][part] - value)));
  });
}

function surface(figure, found) {
  make(figure, "figcaption", {}, found.label);
  const frame = make(figure, "div", { class: "surface" });
  const canvas = make(frame, "canvas", { "aria-hidden": "true" });
  const svg = make(frame, "svg", { class: "plot", tabindex: 0, role: "img", "aria-label": `Loss of task 1, ${found.label}` });
  const readout = make(figure, "p", { class: "readout", "aria-live": "polite" });
  const names = { initialisation: "at the start", "task 1": "after task 1", "task 2": "after task 2" };
  const resting = Object.entries(found.losses).map(([name, loss]) => `${short(loss)} ${names[name] || name}`).join(", ");
  let map = found.grid;
  let cursor = null;
  let layer = null;
  let x = null;
  let y = null;

  function draw(colours) {
    const plane = figure.parentNode.dataset.plane || "grid";
    map = found[plane];
    frame.hidden = !map;
    readout.textContent = map ? `Loss ${resting}` : "not computed";
    if (!map) return;
    cursor = null;
    const width = Math.max(frame.clientWidth, 160);
    const [left, bottom] = [38, 22];
    const side = width - left - 2;
    const [wide, high] = [map.x[map.x.length - 1] - map.x[0], map.y[map.y.length - 1] - map.y[0]];
    x = (value) => left + ((value - map.x[0]) / wide) * side;
    y = (value) => side - ((value - map.y[0]) / high) * side;
    svg.setAttribute("viewBox", `0 0 ${width} ${side + bottom}`);
    svg.setAttribute("height", side + bottom);
    svg.replaceChildren();
    Object.assign(canvas.style, { left: `${left}px`, width: `${side}px`, height: `${side}px` });
    fill(canvas, map, colours, Math.round(side * Math.min(devicePixelRatio, 2)));
    ticks(svg, width, side);
    drawPath(svg);
    layer = make(svg, "g");
  }

  function ticks(parent, width, side) {
    const step = roundStep(map.x[map.x.length - 1] - map.x[0], 6);
    const decimals = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    const inside = (values) => {
      const first = Math.ceil(values[0] / step);
      const last = Math.floor(values[values.length - 1] / step);
      return Array.from({ length: last - first + 1 }, (_, place) => (first + place) * step);
    };
    for (const value of inside(map.x)) {
      if (x(value) > width - 14 || x(value) < 50) continue;
      make(parent, "text", { x: x(value), y: side + 16, "text-anchor": "middle" }, number(value, decimals));
    }
    for (const value of inside(map.y)) {
      if (y(value) < 8 || y(value) > side - 4) continue;
      make(parent, "text", { x: 33, y: y(value) + 4, "text-anchor": "end" }, number(value, decimals));
    }
  }

  function drawPath(parent) {
    const d = map.path.map(([a, b], place) => `${place ? "L" : "M"}${x(a).toFixed(1)} ${y(b).toFixed(1)}`).join("");
    make(parent, "path", { class: "way halo", d });
    make(parent, "path", { class: "way", d });
    for (const [a, b] of map.path) make(parent, "circle", { class: "step", cx: x(a), cy: y(b), r: 2 });
    const labels = [];
    for (const [name, [a, b]] of Object.entries(map.points)) {
      const near = labels.find((other) => Math.hypot(x(a) - other.x, y(b) - other.y) < 14);
      const text = name === "initialisation" ? "start" : name;
      if (near) near.text += `, ${text}`;
      else labels.push({ text, x: x(a), y: y(b), up: b > 0 });
    }
    for (const label of labels) {
      make(parent, "circle", { class: "place", cx: label.x, cy: label.y, r: 5 });
      make(parent, "text", {
        class: "label", x: label.x, y: label.y + (label.up ? -10 : 20), "text-anchor": "middle",
      }, label.text);
    }
  }

  function tell(column, line) {
    cursor = [column, line];
    const [loss, right] = [map.loss[line][column], map.accuracy[line][column]];
    layer.replaceChildren();
    for (const kind of ["here halo", "here"]) {
      make(layer, "circle", { class: kind, cx: x(map.x[column]), cy: y(map.y[line]), r: 6 });
    }
    const where = `${number(map.x[column], 2)}, ${number(map.y[line], 2)}`;
    readout.textContent = `Loss ${loss === null ? "beyond all bounds" : short(loss)}, accuracy ${number(right)} % at ${where}`;
  }

  function point(event) {
    const box = svg.getBoundingClientRect();
    const nearest = (values, at, where) => values.reduce(
      (best, value, place) => (Math.abs(at(value) - where) < Math.abs(at(values[best]) - where) ? place : best), 0);
    tell(nearest(map.x, x, event.clientX - box.left), nearest(map.y, y, event.clientY - box.top));
  }

  svg.addEventListener("pointermove", point);
  svg.addEventListener("pointerdown", point);
  svg.addEventListener("pointerleave", (event) => {
    if (event.pointerType !== "mouse") return;
    cursor = null;
    layer.replaceChildren();
    readout.textContent = `Loss ${resting}`;
  });
  svg.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] };
    if (!(event.key in moves)) return;
    event.preventDefault();
    const [right, up] = cursor ? moves[event.key] : [0, 0];
    const [column, line] = cursor || [map.x.length >> 1, map.y.length >> 1];
    const within = (place, values) => Math.min(Math.max(place, 0), values.length - 1);
    tell(within(column + right, map.x), within(line + up, map.y));
  });
  return draw;
}

// Between grid points the logarithm of the loss is interpolated; each pixel has its band's colour.
function fill(canvas, map, colours, pixels) {
  canvas.width = canvas.height = pixels;
  const image = new ImageData(pixels, pixels);
  const last = data.levels[data.levels.length - 1];
  const logs = map.loss.map((row) => row.map((loss) => Math.log(Math.max(loss === null ? last : loss, 1e-12))));
  const edges = data.levels.slice(1, -1).map(Math.log);
  const [columns, lines] = [map.x.length, map.y.length];
  for (let py = 0; py < pixels; py += 1) {
    const v = (1 - (py + 0.5) / pixels) * (lines - 1);
    const line = Math.min(Math.floor(v), lines - 2);
    for (let px = 0; px < pixels; px += 1) {
      const u = ((px + 0.5) / pixels) * (columns - 1);
      const column = Math.min(Math.floor(u), columns - 2);
      const [below, above] = [logs[line], logs[line + 1]];
      const low = below[column] + (u - column) * (below[column + 1] - below[column]);
      const top = above[column] + (u - column) * (above[column + 1] - above[column]);
      const value = low + (v - line) * (top - low);
      let band = 0;
      while (band < edges.length && value >= edges[band]) band += 1;
      image.data.set([...colours[band], 255], 4 * (py * pixels + px));
    }
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
}
