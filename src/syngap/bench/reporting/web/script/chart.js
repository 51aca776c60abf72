// What runs across a chart. An axis knows the share of the width that a place is at, how to name a
// place, and what to draw for it.

function stepOf(place) {
  const task = Math.min(Math.floor(place), tasks - 1);
  const start = task ? data.axis.ends[task - 1] : 0;
  return start + (place - task) * (data.axis.ends[task] - start);
}

// Places of the stream: 2.25 is a quarter through the third task.
const streamAxis = {
  rest: tasks,
  share: (place) => stepOf(place) / stepOf(tasks),
  named(place) {
    const task = `task ${Math.min(Math.floor(place) + 1, tasks)}`;
    if (place === tasks) return "at the end";
    if (place && place === Math.floor(place)) return `after task ${place}`;
    return data.axis.unit === "step" ? `step ${Math.round(stepOf(place))}, ${task}` : `in ${task}`;
  },
  label: data.axis.unit === "step" ? "training steps" : "position in the stream",
  draw(plot, x, size) {
    for (let task = 0; task < tasks; task += 1) {
      const [from, to] = [x(task), x(task + 1)];
      if (task) make(plot, "line", { class: "border", x1: from, x2: from, y1: size.top, y2: size.bottom });
      const text = to - from > 46 ? `task ${task + 1}` : to - from > 14 ? `${task + 1}` : null;
      if (text) make(plot, "text", { x: (from + to) / 2, y: 13, "text-anchor": "middle" }, text);
    }
    if (data.axis.unit !== "step") return;
    const total = data.axis.ends[tasks - 1];
    const step = roundStep(total, Math.max((size.right - size.left) / 90, 1));
    for (let value = 0; value <= total; value += Math.max(step, 1)) {
      const place = size.left + (value / total) * (size.right - size.left);
      const anchor = place > size.right - 14 ? "end" : "middle";
      make(plot, "text", { x: place, y: size.bottom + 17, "text-anchor": anchor }, value.toLocaleString("en"));
    }
  },
};

// Values of an option: by their ratios, or side by side as they were tried.
function valueAxis(name, values, logarithmic) {
  const margin = 0.06;
  const [low, high] = [values[0], values[values.length - 1]];
  const raw = (value) => (logarithmic
    ? Math.log(value / low) / Math.log(high / low)
    : values.indexOf(value) / Math.max(values.length - 1, 1));
  return {
    rest: null,
    share: (value) => margin + (1 - 2 * margin) * raw(value),
    named: (value) => `${name} ${value}`,
    label: name,
    draw(plot, x, size) {
      for (const value of values) {
        make(plot, "text", { x: x(value), y: size.bottom + 17, "text-anchor": "middle" }, String(value));
      }
    },
  };
}

// A round step that divides `range` into at most about `parts`.
function roundStep(range, parts) {
  const rough = range / parts;
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((factor) => factor * power).find((value) => value >= rough * 0.999);
}

// The value of a curve at a place between those where it is known.
function interpolate(places, values, place) {
  const after = places.findIndex((known) => known >= place - 1e-9);
  if (after <= 0) return values[after < 0 ? values.length - 1 : 0];
  const share = Math.min((place - places[after - 1]) / (places[after] - places[after - 1]), 1);
  return values[after - 1] + share * (values[after] - values[after - 1]);
}

// A text that is at most so many pixels wide, and its width.
const pen = document.createElement("canvas").getContext("2d");
function fit(text, most, strong, font) {
  pen.font = `${strong ? 700 : 500} 12px ${font}`;
  let kept = text;
  while (kept && pen.measureText(kept === text ? text : `${kept}…`).width > most) kept = kept.slice(0, -1);
  const words = kept === text ? text : `${kept.trimEnd()}…`;
  return [words, pen.measureText(words).width];
}

// Tops for boxes [wanted top, height], in this order, that do not overlap and stay as near as they can.
function apart(boxes, top, bottom) {
  let above = 0;
  const groups = [];
  for (const [wanted, height] of boxes) {
    groups.push({ sum: wanted - above, count: 1 });
    above += height;
    for (let last = groups.length - 1; last && groups[last - 1].sum / groups[last - 1].count > groups[last].sum / groups[last].count; last -= 1) {
      const { sum, count } = groups.pop();
      groups[last - 1].sum += sum;
      groups[last - 1].count += count;
    }
  }
  const shifts = groups.flatMap(({ sum, count }) => Array(count).fill(sum / count));
  let before = 0;
  return boxes.map(([, height], place) => {
    const found = Math.max(Math.min(shifts[place], bottom - above), top) + before;
    before += height;
    return found;
  });
}

// A chart: lines over an axis, their names at their ends, a key that switches them, a cursor that the pointer or the arrow
// keys move and whose values the key shows.

function chart(host, options) {
  const plot = make(host, "svg", { class: "plot", tabindex: 0, role: "slider", "aria-valuemin": 0 });
  const key = make(host, "div", { class: "key" });
  const top = make(key, "p", { class: "at" });
  const at = make(top, "span");
  const all = make(top, "button", { type: "button" });
  const list = make(key, "ul");
  const hidden = new Set();
  let axis = streamAxis;
  let series = [];
  let grid = [];
  let cursor = null; // index into the grid
  let hot = null;
  let size = {};
  let layer = null;

  all.addEventListener("click", () => {
    if (series.some((line) => hidden.has(line.name))) hidden.clear();
    else series.forEach((line) => hidden.add(line.name));
    draw();
  });

  function show(next) {
    series = next.series;
    axis = next.axis || streamAxis;
    for (const name of next.hidden || []) hidden.add(name);
    host.classList.toggle("many", series.length > 16);
    plot.setAttribute("aria-label", next.label);
    grid = (series.find((line) => line.places) || { places: [] }).places;
    if (axis.rest === null) grid = [...new Set(series.flatMap((line) => line.places))].sort((a, b) => a - b);
    plot.setAttribute("aria-valuemax", Math.max(grid.length - 1, 0));
    options.own = next.own;
    options.max = next.max;
    if (cursor !== null && cursor >= grid.length) cursor = null;
    list.replaceChildren();
    for (const line of series) {
      const item = make(list, "li", { class: line.look.strong ? "ours" : line.range ? "range" : "" });
      const button = make(item, "button", { type: "button", title: line.label });
      line.swatch = swatch(button, line.look);
      make(button, "span", { class: "name" }, line.label);
      line.value = make(button, "span", { class: "value" });
      line.button = button;
      button.addEventListener("click", () => {
        if (!hidden.delete(line.name)) hidden.add(line.name);
        draw();
      });
      for (const event of ["pointerenter", "focus"]) button.addEventListener(event, () => point(line.name));
      for (const event of ["pointerleave", "blur"]) button.addEventListener(event, () => point(null));
    }
    draw();
  }

  // Seeds may have been measured at other places of the stream, so look the next place up.
  function valueAt(line, place) {
    if (line.level) return line.level;
    if (line.range) return [interpolate(line.places, line.low, place), interpolate(line.places, line.high, place)];
    let low = axis.rest === null ? line.places.indexOf(place) : 0;
    if (low < 0) return null;
    while (axis.rest !== null && low < line.places.length - 1 && line.places[low] < place - 1e-9) low += 1;
    return [line.mean[low], line.sd ? line.sd[low] : null];
  }

  function draw() {
    const width = Math.max(plot.clientWidth || 300, 200);
    const height = Math.round(Math.min(Math.max(width * 0.5, 230), 430));
    const names = dress(width);
    const widest = Math.max(0, ...names.map((label) => label.width));
    size = { left: 44, right: width - 8 - (widest ? widest + 14 : 0), top: 22, bottom: height - 40 };
    plot.setAttribute("viewBox", `0 0 ${width} ${height}`);
    plot.setAttribute("height", height);
    plot.replaceChildren();
    frame(height);
    const lines = make(plot, "g");
    // What matters is drawn last, on top.
    for (const line of [...series].sort((a, b) => a.look.strong - b.look.strong)) {
      line.button.setAttribute("aria-pressed", !hidden.has(line.name));
      line.group = hidden.has(line.name) ? null : curve(lines, line);
    }
    label(names);
    all.textContent = series.some((line) => hidden.has(line.name)) ? "show all" : "hide all";
    layer = make(plot, "g");
    point(hot);
    read();
  }

  // No two lines share a colour as long as there are enough. Returns what to write at their ends.
  function dress(width) {
    const shown = series.filter((line) => !hidden.has(line.name));
    const kinds = shown.map((line) => line.look.kind);
    const own = (line, place) => line.look.kind !== "rest" && kinds.indexOf(line.look.kind) === place;
    const free = PALETTE.filter((kind) => !kinds.includes(kind));
    shown.forEach((line, place) => {
      const shared = PALETTE.includes(line.look.kind) || line.look.kind === "rest";
      line.kind = !shared || own(line, place) ? line.look.kind : free.shift() || "rest";
    });
    for (const line of series) paint(line.swatch, line.look, hidden.has(line.name) ? line.look.kind : line.kind);
    if (!options.labelled) return [];
    const font = getComputedStyle(plot).fontFamily;
    const most = Math.min(width * 0.34, 190);
    return shown.map((line) => {
      const text = [line.label, line.detail].filter(Boolean).map((each) => fit(each, most, line.look.strong, font));
      return { line, text: text.map(([words]) => words), width: Math.max(...text.map(([, wide]) => wide)) };
    });
  }

  const ROW = 14; // pixels
  function label(names) {
    const room = Math.floor((size.bottom - size.top) / ROW);
    const kept = [...names].sort((a, b) => b.line.look.strong - a.line.look.strong).slice(0, room);
    for (const each of kept) {
      const { line } = each;
      const last = line.places ? line.places.length - 1 : 0;
      const value = line.level ? line.level[0] : line.range ? (line.low[last] + line.high[last]) / 2 : line.mean[last];
      each.from = [line.places ? x(line.places[last]) : size.right, y(value)];
      each.height = ROW * each.text.length;
    }
    kept.sort((a, b) => a.from[1] - b.from[1]);
    const tops = apart(kept.map((each) => [each.from[1] - each.height / 2, each.height]), size.top, size.bottom);
    kept.forEach(({ line, text, from, height }, place) => {
      const group = line.group;
      const left = size.right + 12;
      line.labelAt = [tops[place], tops[place] + height];
      make(group, "path", {
        class: "leader", d: `M${from[0].toFixed(1)} ${from[1].toFixed(1)}L${left - 3} ${(tops[place] + height / 2).toFixed(1)}`,
      });
      text.forEach((words, row) => make(group, "text", {
        class: row ? "detail" : "name", x: left, y: (tops[place] + ROW * row + 11).toFixed(1),
      }, words));
    });
  }

  const x = (place) => size.left + axis.share(place) * (size.right - size.left);
  const y = (value) => size.bottom - (value / options.max) * (size.bottom - size.top);

  function frame(height) {
    if (options.own !== null) {
      make(plot, "rect", {
        class: "own", x: x(options.own), width: x(options.own + 1) - x(options.own),
        y: size.top, height: size.bottom - size.top,
      });
    }
    const step = roundStep(options.max, 6);
    for (let value = 0; value <= options.max + 1e-9; value += step) {
      make(plot, "line", { class: "grid", x1: size.left, x2: size.right, y1: y(value), y2: y(value) });
      make(plot, "text", { x: size.left - 7, y: y(value) + 4, "text-anchor": "end" }, options.format(value));
    }
    axis.draw(plot, x, size);
    make(plot, "text", { x: (size.left + size.right) / 2, y: height - 5, "text-anchor": "middle" }, axis.label);
  }

  function curve(parent, line) {
    const look = line.look;
    const group = make(parent, "g", {
      class: `line ${line.kind}${look.strong ? " strong" : ""}${line.onhover ? " onhover" : ""}`,
      "data-name": line.name,
    });
    if (look.depth !== undefined) group.style.setProperty("--depth", look.depth);
    const path = (values, start) => values.map((value, index) =>
      `${index ? "L" : start}${x(line.places[index]).toFixed(1)} ${y(value).toFixed(1)}`);
    if (line.level) {
      const height = y(line.level[0]);
      make(group, "line", {
        class: "curve", x1: size.left, x2: size.right, y1: height, y2: height, "stroke-dasharray": look.dash,
      });
      return group;
    }
    if (line.low) {
      const back = path(line.low, "M").reverse().map((point) => `L${point.slice(1)}`);
      make(group, "path", { class: "area", d: `${path(line.high, "M").join("")}${back.join("")}Z` });
    }
    if (line.range) {
      for (const edge of [line.low, line.high]) make(group, "path", { class: "curve edge", d: path(edge, "M").join("") });
      return group;
    }
    make(group, "path", { class: "curve", d: path(line.mean, "M").join(""), "stroke-dasharray": look.dash });
    if (line.dots) {
      line.places.forEach((place, index) =>
        make(group, "circle", { class: "dot", cx: x(place), cy: y(line.mean[index]), r: 3.5 }));
    }
    return group;
  }

  function point(name) {
    hot = name;
    const line = series.find((other) => other.name === name);
    plot.classList.toggle("pointing", Boolean(line && line.group));
    for (const other of series) {
      other.button.classList.toggle("hot", other === line);
      if (other.group) other.group.classList.toggle("hot", other === line);
    }
  }

  function read() {
    const place = cursor === null ? axis.rest : grid[cursor];
    const when = place === null ? options.resting : axis.named(place);
    at.textContent = when;
    layer.replaceChildren();
    if (cursor !== null) {
      make(layer, "line", { class: "cursor", x1: x(place), x2: x(place), y1: size.top, y2: size.bottom });
    }
    const said = [];
    for (const line of series) {
      const value = place === null ? null : valueAt(line, place);
      const shown = value && line.range ? value.map((each) => number(each)).join("–") : value && options.show(value);
      const text = place === null ? line.resting : shown || "–";
      const [mean, sd] = text.split(" ± ");
      line.value.textContent = mean;
      if (sd) make(line.value, "span", { class: "sd" }, ` ± ${sd}`);
      if (hidden.has(line.name)) continue;
      said.push(`${line.label} ${text}`);
      if (cursor === null || line.level || line.range || !value) continue;
      const dot = make(layer, "circle", { class: `dot ${line.kind}`, cx: x(place), cy: y(value[0]), r: 4 });
      if (line.look.depth !== undefined) dot.style.setProperty("--depth", line.look.depth);
    }
    plot.setAttribute("aria-valuenow", cursor === null ? Math.max(grid.length - 1, 0) : cursor);
    plot.setAttribute("aria-valuetext", `${when}: ${said.join(", ")}`);
  }

  function nearest(event) {
    const box = plot.getBoundingClientRect();
    const [px, py] = [event.clientX - box.left, event.clientY - box.top];
    if (px > size.right + 10 && options.labelled) { // on the names
      const under = series.find(({ group, labelAt: [from, to] = [0, 0] }) => group && py >= from && py < to);
      cursor = null;
      read();
      point(under ? under.name : null);
      return;
    }
    let found = 0;
    grid.forEach((place, index) => {
      if (Math.abs(x(place) - px) < Math.abs(x(grid[found]) - px)) found = index;
    });
    cursor = grid.length ? found : null;
    read();
    let closest = null;
    let distance = 14;
    for (const line of series) {
      const value = line.group && cursor !== null ? valueAt(line, grid[cursor]) : null;
      if (!value) continue;
      const ends = line.range ? value.map((each) => y(each) - py) : [y(value[0]) - py];
      const away = ends[0] >= 0 && ends[ends.length - 1] <= 0 ? 0 : Math.min(...ends.map(Math.abs));
      if (away < distance) [closest, distance] = [line.name, away];
    }
    point(closest);
  }

  plot.addEventListener("pointermove", nearest);
  plot.addEventListener("pointerdown", nearest);
  plot.addEventListener("pointerleave", (event) => {
    point(null);
    if (event.pointerType !== "mouse") return; // a finger that was lifted is still reading
    cursor = null;
    read();
  });
  plot.addEventListener("keydown", (event) => {
    const last = grid.length - 1;
    const now = cursor === null ? last : cursor;
    const ends = grid.map((place, index) => (Number.isInteger(place) ? index : -1)).filter((i) => i >= 0);
    const moves = {
      ArrowLeft: now - 1, ArrowDown: now - 1, ArrowRight: now + 1, ArrowUp: now + 1, Home: 0, End: last,
      PageDown: ends.filter((index) => index < now).pop() ?? 0,
      PageUp: ends.find((index) => index > now) ?? last,
      Escape: null,
    };
    if (!(event.key in moves)) return;
    event.preventDefault();
    cursor = moves[event.key] === null ? null : Math.min(Math.max(moves[event.key], 0), last);
    read();
  });
  let width = 0;
  new ResizeObserver(() => {
    if (plot.clientWidth === width || !series.length) return;
    width = plot.clientWidth;
    draw();
  }).observe(plot);
  return show;
}
