
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const rows = data.rows;
  const tasks = data.axis.ends.length;

  // Small tools. All text goes in as text, never as markup.

  function make(parent, tag, attributes = {}, text = null) {
    const drawn = tag === "svg" || parent.namespaceURI === "http://www.w3.org/2000/svg";
    const space = drawn ? "http://www.w3.org/2000/svg" : "http://www.w3.org/1999/xhtml";
    const element = document.createElementNS(space, tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (value !== null && value !== undefined && value !== "") element.setAttribute(name, value);
    }
    if (text !== null) element.textContent = text;
    parent.append(element);
    return element;
  }

  function number(value, decimals = 1, signed = false) {
    const text = Math.abs(value).toFixed(decimals);
    const zero = Number(text) === 0;
    return (value < 0 && !zero ? "−" : signed && !zero ? "+" : "") + text;
  }

  function spread([mean, sd], decimals = 1, signed = false) {
    return number(mean, decimals, signed) + (sd === null ? "" : ` ± ${number(sd, decimals)}`);
  }

  function section(id) {
    const found = document.getElementById(id);
    found.hidden = false;
    return found;
  }

  function byAccuracy(some) {
    return [...some].sort((a, b) => a.joint - b.joint || b.values.ACC[0] - a.values.ACC[0]);
  }

  const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

  // Every method keeps one colour and one dash, in the table and in the chart. The method that
  // the page is about is solid and wide, the others differ by dash as well as by colour.

  const DASHES = ["", "7 3", "2 2.5", "9 3 2 3"];
  const looks = new Map();
  let others = 0;
  for (const row of rows) {
    if (row.name === data.subject) looks.set(row.name, { kind: "c0", dash: "", strong: true });
    else if (row.joint) looks.set(row.name, { kind: "bound", dash: "1 3", strong: false });
    else {
      looks.set(row.name, { kind: `c${1 + (others % 5)}`, dash: DASHES[others % 4], strong: false });
      others += 1;
    }
  }

  function swatch(parent, look) {
    const svg = make(parent, "svg", {
      class: `swatch ${look.kind}${look.strong ? " strong" : ""}`, viewBox: "0 0 30 10", "aria-hidden": "true",
    });
    if (look.depth !== undefined) svg.style.setProperty("--depth", look.depth);
    make(svg, "line", { x1: 0, x2: 30, y1: 5, y2: 5, "stroke-dasharray": look.dash });
  }

  // The scope and the differences.

  const seeds = new Set(rows.flatMap((row) => row.seeds));
  document.getElementById("scope").textContent = [
    tasks ? plural(tasks, "task") : null, plural(rows.length, "method"), plural(seeds.size, "seed"),
  ].filter(Boolean).join(" · ");

  if (data.against.length) {
    const ends = { 1: "more accurate", 0: "not told apart", "-1": "less accurate", null: "no verdict" };
    const forgets = { 1: "forgets more", 0: "not told apart", "-1": "forgets less", null: "no verdict" };
    const table = make(section("against").querySelector(".scroll"), "table", { class: "plain" });
    const head = make(make(table, "thead"), "tr");
    const ours = rows.find((row) => row.name === data.subject).label;
    for (const text of [`${ours} against`, "ACC", "FM", "time"]) {
      make(head, "th", { scope: "col" }, text);
    }
    const body = make(table, "tbody");
    for (const rival of data.against) {
      const line = make(body, "tr");
      const name = make(line, "th", { scope: "row" });
      make(name, "span", {}, rival.rival);
      make(name, "span", { class: "says" }, plural(rival.seeds, "seed"));
      for (const [value, sign, words] of [
        [rival.accuracy, rival.ends, ends], [rival.forgetting, rival.forgets, forgets],
      ]) {
        const cell = make(line, "td");
        make(cell, "span", { class: sign ? "decided" : "" }, value ? spread(value, 1, true) : "–");
        if (value) make(cell, "span", { class: "says" }, words[sign]);
      }
      const time = make(line, "td");
      make(time, "span", {}, rival.time === null ? "–" : `${number(rival.time, 2)} ×`);
      if (rival.time !== null) make(time, "span", { class: "says" }, "as long");
    }
  }

  // The table.

  function drawTable() {
    const host = section("results").querySelector(".scroll");
    const table = make(host, "table", { class: "plain" });
    const head = make(make(table, "thead"), "tr");
    const body = make(table, "tbody");
    const bound = make(table, "tbody");
    const lines = rows.map((row, place) => {
      const line = make(row.joint ? bound : body, "tr", { class: row.name === data.subject ? "ours" : "" });
      const name = make(line, "th", { scope: "row" });
      swatch(name, looks.get(row.name));
      make(name, "span", {}, row.label);
      const all = row.seeds.length + row.unfinished;
      if (row.unfinished) make(name, "span", { class: "few" }, `${row.seeds.length} of ${plural(all, "seed")}`);
      if (row.joint) make(name, "span", { class: "few" }, "upper bound");
      for (const measure of data.measures) cell(line, row, measure);
      return { row, line, place };
    });

    const columns = [{ name: "method", heading: "method", better: "down" }, ...data.measures];
    for (const column of columns) {
      const th = make(head, "th", { scope: "col", title: column.says });
      make(th, "button", { type: "button" }, column.heading).addEventListener("click", () => sort(column, th));
      if (column.name === "ACC") sort(column, th);
    }

    function sort(column, th) {
      const natural = column.better === "down" ? "ascending" : "descending";
      const reverse = { ascending: "descending", descending: "ascending" };
      const before = th.getAttribute("aria-sort");
      const order = before ? reverse[before] : natural;
      for (const other of head.children) other.removeAttribute("aria-sort");
      th.setAttribute("aria-sort", order);
      const sign = order === "ascending" ? 1 : -1;
      const value = ({ row }) => (row.values[column.name] || [null])[0];
      const sorted = [...lines].sort((a, b) => {
        if (column.name === "method") return sign * a.row.label.localeCompare(b.row.label);
        const [x, y] = [value(a), value(b)];
        if (x === null || y === null) return (x === null) - (y === null);
        return sign * (x - y) || a.place - b.place;
      });
      for (const { row, line } of sorted) (row.joint ? bound : body).append(line);
    }
  }

  function cell(line, row, measure) {
    const value = row.values[measure.name];
    const best = measure.best.includes(row.name);
    const td = make(line, "td", { class: best ? "best" : "" });
    if (!value) return void make(td, "span", { class: "sd" }, "–");
    make(td, "span", { class: "mean" }, number(value[0], measure.decimals));
    if (value[1] !== null) make(td, "span", { class: "sd" }, ` ± ${number(value[1], measure.decimals)}`);
    if (best) make(td, "span", { class: "sr" }, " best");
  }

  // A chart: lines over the stream, a key that switches them, a cursor that the pointer or the
  // arrow keys move and whose values the key shows.

  function stepOf(place) {
    const task = Math.min(Math.floor(place), tasks - 1);
    const start = task ? data.axis.ends[task - 1] : 0;
    return start + (place - task) * (data.axis.ends[task] - start);
  }

  function named(place) {
    const task = `task ${Math.min(Math.floor(place) + 1, tasks)}`;
    if (place === tasks) return "at the end";
    if (place && place === Math.floor(place)) return `after task ${place}`;
    return data.axis.unit === "step" ? `step ${Math.round(stepOf(place))}, ${task}` : `in ${task}`;
  }

  function chart(host, options) {
    const plot = make(host, "svg", { class: "plot", tabindex: 0, role: "slider", "aria-valuemin": 0 });
    const key = make(host, "div", { class: "key" });
    const top = make(key, "p", { class: "at" });
    const at = make(top, "span");
    const all = make(top, "button", { type: "button" });
    const list = make(key, "ul");
    const hidden = new Set();
    let series = [];
    let grid = [];
    let cursor = null; // index into the grid
    let hot = null;
    let size = {};
    let layer = null;

    all.addEventListener("click", () => {
      if (hidden.size) hidden.clear();
      else series.forEach((line) => hidden.add(line.name));
      draw();
    });

    function show(next) {
      series = next.series;
      host.classList.toggle("many", series.length > 16);
      plot.setAttribute("aria-label", next.label);
      grid = (series.find((line) => line.places) || { places: [] }).places;
      plot.setAttribute("aria-valuemax", Math.max(grid.length - 1, 0));
      options.own = next.own;
      options.max = next.max;
      if (cursor !== null && cursor >= grid.length) cursor = null;
      list.replaceChildren();
      for (const line of series) {
        const item = make(list, "li", { class: line.look.strong ? "ours" : "" });
        const button = make(item, "button", { type: "button", title: line.label });
        swatch(button, line.look);
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

    // Seeds may have been measured at other places, so look the nearest place up.
    function valueAt(line, place) {
      if (line.level) return line.level;
      let low = 0;
      while (low < line.places.length - 1 && line.places[low] < place - 1e-9) low += 1;
      return [line.mean[low], line.sd ? line.sd[low] : null];
    }

    function draw() {
      const width = Math.max(plot.clientWidth || 300, 200);
      const height = Math.round(Math.min(Math.max(width * 0.5, 230), 430));
      size = { left: 34, right: width - 8, top: 22, bottom: height - 40 };
      plot.setAttribute("viewBox", `0 0 ${width} ${height}`);
      plot.setAttribute("height", height);
      plot.replaceChildren();
      frame(width, height);
      const lines = make(plot, "g");
      // What matters is drawn last, on top.
      for (const line of [...series].sort((a, b) => a.look.strong - b.look.strong)) {
        line.button.setAttribute("aria-pressed", !hidden.has(line.name));
        line.group = hidden.has(line.name) ? null : curve(lines, line);
      }
      all.textContent = hidden.size ? "show all" : "hide all";
      layer = make(plot, "g");
      point(hot);
      read();
    }

    const x = (place) => size.left + (stepOf(place) / stepOf(tasks)) * (size.right - size.left);
    const y = (value) => size.bottom - (value / options.max) * (size.bottom - size.top);

    function frame(width, height) {
      if (options.own !== null) {
        make(plot, "rect", {
          class: "own", x: x(options.own), width: x(options.own + 1) - x(options.own),
          y: size.top, height: size.bottom - size.top,
        });
      }
      const step = options.max / (options.max > 1.5 ? Math.round(options.max / 20) || 1 : 5);
      for (let value = 0; value <= options.max + 1e-9; value += step) {
        make(plot, "line", { class: "grid", x1: size.left, x2: size.right, y1: y(value), y2: y(value) });
        make(plot, "text", { x: size.left - 7, y: y(value) + 4, "text-anchor": "end" }, options.format(value));
      }
      for (let task = 0; task < tasks; task += 1) {
        const [from, to] = [x(task), x(task + 1)];
        if (task) make(plot, "line", { class: "border", x1: from, x2: from, y1: size.top, y2: size.bottom });
        const text = to - from > 46 ? `task ${task + 1}` : to - from > 14 ? `${task + 1}` : null;
        if (text) make(plot, "text", { x: (from + to) / 2, y: 13, "text-anchor": "middle" }, text);
      }
      if (data.axis.unit === "step") ticks(height);
      const unit = data.axis.unit === "step" ? "training steps" : "position in the stream";
      make(plot, "text", { x: (size.left + size.right) / 2, y: height - 5, "text-anchor": "middle" }, unit);
    }

    function ticks() {
      const total = data.axis.ends[tasks - 1];
      const rough = total / Math.max((size.right - size.left) / 90, 1);
      const power = 10 ** Math.floor(Math.log10(rough));
      const step = [1, 2, 5, 10].map((factor) => factor * power).find((value) => value >= rough);
      for (let value = 0; value <= total; value += Math.max(step, 1)) {
        const place = size.left + (value / total) * (size.right - size.left);
        const anchor = place > size.right - 14 ? "end" : "middle";
        make(plot, "text", { x: place, y: size.bottom + 17, "text-anchor": anchor }, value.toLocaleString("en"));
      }
    }

    function curve(parent, line) {
      const look = line.look;
      const group = make(parent, "g", {
        class: `line ${look.kind}${look.strong ? " strong" : ""}${line.onhover ? " onhover" : ""}`,
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
      make(group, "path", { class: "curve", d: path(line.mean, "M").join(""), "stroke-dasharray": look.dash });
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
      const place = cursor === null ? tasks : grid[cursor];
      at.textContent = named(place);
      layer.replaceChildren();
      if (cursor !== null) {
        make(layer, "line", { class: "cursor", x1: x(place), x2: x(place), y1: size.top, y2: size.bottom });
      }
      const said = [];
      for (const line of series) {
        const value = valueAt(line, place);
        const text = options.show(value);
        const [mean, sd] = text.split(" ± ");
        line.value.textContent = mean;
        if (sd) make(line.value, "span", { class: "sd" }, ` ± ${sd}`);
        if (hidden.has(line.name)) continue;
        said.push(`${line.label} ${text}`);
        if (cursor === null || line.level) continue;
        const dot = make(layer, "circle", { class: `dot ${line.look.kind}`, cx: x(place), cy: y(value[0]), r: 4 });
        if (line.look.depth !== undefined) dot.style.setProperty("--depth", line.look.depth);
      }
      plot.setAttribute("aria-valuenow", cursor === null ? Math.max(grid.length - 1, 0) : cursor);
      plot.setAttribute("aria-valuetext", `${named(place)}: ${said.join(", ")}`);
    }

    function nearest(event) {
      const box = plot.getBoundingClientRect();
      const [px, py] = [event.clientX - box.left, event.clientY - box.top];
      let found = 0;
      grid.forEach((place, index) => {
        if (Math.abs(x(place) - px) < Math.abs(x(grid[found]) - px)) found = index;
      });
      cursor = grid.length ? found : null;
      read();
      let closest = null;
      let distance = 14;
      for (const line of series) {
        if (!line.group || cursor === null) continue;
        const away = Math.abs(y(valueAt(line, grid[cursor])[0]) - py);
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

  function choices(host, legend, items, choose) {
    const group = make(make(host, "form", {}), "fieldset");
    make(group, "legend", {}, legend);
    items.forEach(([text, value], place) => {
      const label = make(group, "label");
      const input = make(label, "input", { type: "radio", name: "choice", value: String(place) });
      input.checked = place === 0;
      input.addEventListener("change", () => choose(value));
      make(label, "span", {}, text);
    });
  }

  // Accuracy over the stream.

  function drawStream() {
    const drawn = rows.filter((row) => row.lines);
    if (!drawn.length) return;
    const host = section("stream");
    const shown = byAccuracy(rows.filter((row) => row.lines || (row.joint && row.R)));
    const show = chart(host.querySelector(".chart"), {
      format: (value) => String(Math.round(value)), show: (value) => spread(value),
    });
    const note = host.querySelector(".note");

    function choose(task) {
      const series = shown.map((row) => {
        const line = { name: row.name, label: row.label, look: looks.get(row.name) };
        if (row.joint) {
          const final = row.R[row.R.length - 1];
          const level = task === null ? row.values.ACC : [final.mean[task], final.sd ? final.sd[task] : null];
          return { ...line, level };
        }
        const { mean, sd } = row.lines[task === null ? "seen" : String(task)];
        const low = sd && mean.map((value, index) => Math.max(value - sd[index], 0));
        const high = sd && mean.map((value, index) => Math.min(value + sd[index], 100));
        return { ...line, places: row.places, mean, sd, low, high };
      });
      const top = Math.max(...series.flatMap((line) => line.high || line.mean || [line.level[0]]));
      const about = task === null ? "Mean accuracy on the tasks seen so far" : `Accuracy on task ${task + 1}`;
      const level = shown.some((row) => row.joint) ? " Joint training is a level line: it sees all tasks at once." : "";
      note.textContent = `${about}, in percent; bands are ± sd over seeds.${level}`;
      show({ series, own: task, max: Math.min(Math.max(Math.ceil(top / 20) * 20, 20), 100), label: about });
    }

    const each = Array.from({ length: tasks }, (_, task) => [String(task + 1), task]);
    choices(host.querySelector(".choices"), "Accuracy on", [["all seen so far", null], ...each.map(
      ([text, task]) => [task ? text : `task ${text}`, task])], choose);
    choose(null);
  }

  // R.

  function drawMatrices() {
    const known = rows.filter((row) => row.R);
    if (!known.length) return;
    const host = section("matrices").querySelector(".matrices");
    host.classList.toggle("wide", tasks > 6);
    for (const row of byAccuracy(known)) drawMatrix(host, row);
  }

  function drawMatrix(host, row) {
    const figure = make(host, "figure");
    make(figure, "figcaption", {}, row.label);
    const columns = row.R[0].mean.length;
    const square = row.R.length === columns && columns > 1;
    const table = make(figure, "table", {
      class: `heat${columns > 10 ? " bare" : ""}`, tabindex: 0,
      "aria-label": `${row.label}: accuracy in percent, after each task on each task`,
    });
    const readout = make(figure, "p", { class: "readout", "aria-live": "polite" });
    const head = make(make(table, "thead"), "tr");
    make(head, "th", {}, "");
    for (let task = 0; task < columns; task += 1) {
      make(head, "th", { scope: "col" }, columns > 10 && task && (task + 1) % 5 ? "" : String(task + 1));
    }
    const body = make(table, "tbody");
    const cells = row.R.map((band, after) => {
      const line = make(body, "tr");
      const text = square ? String(after + 1) : "all";
      make(line, "th", { scope: "row" }, columns > 10 && after && (after + 1) % 5 ? "" : text);
      return band.mean.map((value, task) => {
        const kind = [
          value > 67 ? "over67" : "", value > 52 ? "over52" : "",
          square && task === after ? "own" : "", square && task > after ? "later" : "",
        ].filter(Boolean).join(" ");
        const td = make(line, "td", { class: kind });
        td.style.setProperty("--v", value);
        make(td, "span", {}, String(Math.round(value)));
        for (const event of ["pointerenter", "click"]) td.addEventListener(event, () => tell(after, task));
        return td;
      });
    });
    let shown = null;

    function tell(after, task) {
      if (shown) shown.classList.remove("shown");
      shown = cells[after][task];
      shown.classList.add("shown");
      place = [after, task];
      const { mean, sd } = row.R[after];
      const when = square ? `After task ${after + 1}` : "After all tasks";
      readout.textContent = `${when}, on task ${task + 1}: ${spread([mean[task], sd && sd[task]])}`;
    }

    let place = null;
    table.addEventListener("pointerleave", (event) => {
      if (event.pointerType !== "mouse" || !shown) return;
      shown.classList.remove("shown");
      readout.textContent = "";
    });
    table.addEventListener("keydown", (event) => {
      const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
      if (!(event.key in moves)) return;
      event.preventDefault();
      const [down, right] = place ? moves[event.key] : [0, 0];
      const [after, task] = place || [0, 0];
      tell(Math.min(Math.max(after + down, 0), cells.length - 1), Math.min(Math.max(task + right, 0), columns - 1));
    });
  }

  // Plasticity.

  function drawPlasticity() {
    const telling = rows.filter((row) => row.plasticity);
    if (!telling.length) return;
    const host = section("plasticity");
    const show = chart(host.querySelector(".chart"), {
      format: (value) => value.toFixed(1), show: ([mean]) => mean.toFixed(2),
    });

    function choose(row) {
      const { places, lines } = row.plasticity;
      const layers = Object.keys(lines).filter((name) => name.endsWith("/mean")).map((name) => name.slice(0, -5));
      const deep = layers.filter(Boolean);
      const series = layers.map((name) => {
        const depth = deep.length > 1 ? deep.indexOf(name) / (deep.length - 1) : 0;
        const bias = name.endsWith("bias");
        const look = name
          ? { kind: "layer", depth, dash: bias ? "3 3" : "", strong: false }
          : { kind: "whole", dash: "", strong: true };
        return {
          name, label: name || "whole network", look, places, mean: lines[`${name}/mean`], onhover: true,
          low: lines[`${name}/q05`], high: lines[`${name}/q95`],
        };
      });
      const top = Math.max(1, ...series.flatMap((line) => line.high || line.mean));
      series.sort((a, b) => b.look.strong - a.look.strong);
      show({ series, own: null, max: Math.ceil(top * 5 - 0.1) / 5, label: `Plasticity by layer, ${row.label}` });
    }

    if (telling.length > 1) {
      choices(host.querySelector(".choices"), "Row", telling.map((row) => [row.label, row]), choose);
    }
    choose(telling[0]);
  }

  // How it was made.

  function drawSetup() {
    const list = section("measures").querySelector("dl");
    for (const measure of data.measures) {
      make(list, "dt", {}, measure.heading);
      make(list, "dd", {}, `${measure.says[0].toUpperCase()}${measure.says.slice(1)}.`);
    }
    const host = section("setup").querySelector(".setup");
    if (data.environment.length) {
      const facts = make(host, "dl");
      for (const [name, value] of data.environment) {
        make(facts, "dt", {}, name);
        make(facts, "dd", {}, value);
      }
    }
    make(host, "h3", {}, "Configuration");
    const parts = rows.map((row) => [row.label, row.config]);
    for (const [title, text] of [["Shared by all methods", data.shared], ...parts]) {
      if (!text) continue;
      const details = make(host, "details");
      make(details, "summary", {}, title);
      make(details, "pre", {}, text);
    }
    const closed = [];
    addEventListener("beforeprint", () => {
      closed.push(...document.querySelectorAll("details:not([open])"));
      for (const details of closed) details.open = true;
    });
    addEventListener("afterprint", () => {
      for (const details of closed.splice(0)) details.open = false;
    });
  }

  function drawMissing() {
    if (!data.missing.length) return;
    const host = document.getElementById("missing");
    make(host, "p", {}, "Not in these numbers");
    const list = make(host, "ul");
    for (const line of data.missing) make(list, "li", {}, line);
  }

  drawTable();
  drawMissing();
  drawStream();
  drawMatrices();
  drawPlasticity();
  drawSetup();
})();
