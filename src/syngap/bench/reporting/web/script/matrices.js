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
