// R.

function drawMatrices() {
  const known = rows.filter((row) => row.R);
  if (!known.length) return;
  const host = section("matrices").querySelector(".body");
  const usual = known.filter((row) => !variants.has(row.name));
  drawMatrixGrid(host, usual);
  if (usual.length === known.length) return;
  const details = make(host, "details");
  make(details, "summary", {}, `${plural(known.length - usual.length, "row")} at other values of an option`);
  drawMatrixGrid(details, known.filter((row) => variants.has(row.name)));
}

function drawMatrixGrid(host, some) {
  const grid = make(host, "div", { class: `matrices${tasks > 6 ? " wide" : ""}` });
  for (const row of byAccuracy(some)) drawMatrix(grid, row);
}

function drawMatrix(host, row) {
  const figure = make(host, "figure");
  make(figure, "figcaption", {}, row.label);
  const columns = row.R[0].mean.length;
  const square = row.R.length === columns && columns > 1;
  const table = make(figure, "table", {
    class: `heat${columns > 10 ? " bare" : ""}`,
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
      return td;
    });
  });

  function tell(after, task) {
    const { mean, sd } = row.R[after];
    const when = square ? `After task ${after + 1}` : "After all tasks";
    readout.textContent = `${when}, on task ${task + 1}: ${spread([mean[task], sd && sd[task]])}`;
  }

  readable(table, cells, tell, () => { readout.textContent = ""; });
}

// Plasticity and importance by layer: over the stream as lines, after each task as heat maps.

function drawLayers() {
  const telling = rows.filter((row) => row.plasticity);
  if (!telling.length) return;
  const host = section("plasticity");
  const show = chart(host.querySelector(".chart"), {
    format: (value) => value.toFixed(1), show: ([mean]) => mean.toFixed(2),
  });
  const maps = host.querySelector(".maps");
  const chosen = { row: telling[0], weights: true };

  function draw() {
    const { row, weights } = chosen;
    const kept = row.layers.names.filter((name, place) => row.layers.weight[place] === weights);
    const some = kept.length ? kept : row.layers.names;
    drawLines(row, some);
    maps.replaceChildren();
    if (row.layers.importance) {
      drawMap(maps, row, some, "importance", "Importance, in multiples of the network’s mean");
    }
    drawMap(maps, row, some, "plasticity", "Plasticity");
  }

  function drawLines(row, some) {
    const { places, lines } = row.plasticity;
    const titles = new Map(row.layers.names.map((name, place) => [name, row.layers.titles[place]]));
    const names = ["", ...some].filter((name) => `${name}/mean` in lines);
    const series = names.map((name) => {
      const depth = some.length > 1 ? some.indexOf(name) / (some.length - 1) : 0;
      const look = name
        ? { kind: "layer", depth, dash: name.endsWith("bias") ? "3 3" : "", strong: false }
        : { kind: "whole", dash: "", strong: true };
      return {
        name, label: name ? titles.get(name) : "whole network", look, places, mean: lines[`${name}/mean`], onhover: true,
        low: lines[`${name}/q05`], high: lines[`${name}/q95`],
      };
    });
    const top = Math.max(1, ...series.flatMap((line) => line.high || line.mean));
    show({ series, own: null, max: Math.ceil(top * 5 - 0.1) / 5, label: `Plasticity by layer, ${row.label}` });
  }

  const at = host.querySelector(".choices");
  if (telling.length > 1) {
    choices(at, "Row", telling.map((row) => [row.label, row]), (row) => {
      chosen.row = row;
      draw();
    });
  }
  if (telling.some((row) => new Set(row.layers.weight).size > 1)) {
    choices(at, "Tensors", [["weights", true], ["norms and biases", false]], (weights) => {
      chosen.weights = weights;
      draw();
    });
  }
  draw();
}

function drawMap(host, row, names, quantity, title) {
  const figure = make(host, "figure");
  make(figure, "figcaption", {}, title);
  const readout = make(figure, "p", { class: "readout", "aria-live": "polite" });
  const values = names.map((name) => row.layers[quantity][row.layers.names.indexOf(name)]);
  const positive = values.flat().filter((value) => value > 0);
  const [low, high] = [Math.min(...positive), Math.max(...positive)].map(Math.log);
  const share = quantity === "importance"
    ? (value) => (value > 0 ? (Math.log(value) - low) / Math.max(high - low, 1e-9) : 0)
    : (value) => 1 - Math.min(Math.max(value, 0), 1);
  readout.textContent = quantity === "importance"
    ? `${short(Math.exp(low))} to ${short(Math.exp(high))}, on a log scale`
    : "1 is all of a step; what is coloured takes less";
  const resting = readout.textContent;
  const table = make(figure, "table", { class: `heat tensors ${quantity}`, "aria-label": `${title}, ${row.label}` });
  const head = make(make(table, "thead"), "tr");
  make(head, "th", {}, "");
  values[0].forEach((_, task) => make(head, "th", { scope: "col" }, String(task + 1)));
  const body = make(table, "tbody");
  const cells = names.map((name, place) => {
    const line = make(body, "tr");
    make(line, "th", { scope: "row", title: name }, row.layers.titles[row.layers.names.indexOf(name)]);
    return values[place].map((value) => {
      const td = make(line, "td");
      td.style.setProperty("--v", 100 * share(value));
      return td;
    });
  });
  readable(table, cells, (place, task) => {
    readout.textContent = `${names[place]} after task ${task + 1}: ${short(values[place][task])}`;
  }, () => { readout.textContent = resting; });
}
