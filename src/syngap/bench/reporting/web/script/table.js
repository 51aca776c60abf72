// All methods, with the paper's numbers below ours where it has any.

function drawTable() {
  if (!rows.length) return;
  const host = section("results").querySelector(".scroll");
  const table = make(host, "table", { class: "plain" });
  const head = make(make(table, "thead"), "tr");
  const body = make(table, "tbody");
  const bound = make(table, "tbody");
  const lines = rows.map((row) => {
    const line = make(row.joint ? bound : body, "tr", { class: row.name === data.subject ? "ours" : "" });
    const name = make(line, "th", { scope: "row" });
    swatch(name, looks.get(row.name));
    make(name, "span", {}, row.label);
    if (row.few) make(name, "span", { class: "few" }, row.few);
    if (row.joint) make(name, "span", { class: "few" }, "upper bound");
    if (Object.keys(row.paper).length) make(name, "span", { class: "paper" }, "the paper");
    for (const measure of data.measures) cell(line, row, measure);
    return { item: row, line };
  });
  const columns = data.measures.map((measure) => (
    { ...measure, value: (row) => (row.values[measure.name] || [null])[0] }));
  const method = { name: "method", heading: "method", better: "down", value: (row) => row.label };
  sortable(head, [method, ...columns], lines, (row) => (row.joint ? bound : body), "ACC");
  for (const note of data.notes) make(document.getElementById("quoted"), "p", { class: "note" }, note);
}

function cell(line, row, measure) {
  const value = row.values[measure.name];
  const best = measure.best.includes(row.name);
  const td = make(line, "td", { class: best ? "best" : "" });
  if (value) {
    make(td, "span", { class: "mean" }, number(value[0], measure.decimals));
    if (value[1] !== null) make(td, "span", { class: "sd" }, ` ± ${number(value[1], measure.decimals)}`);
    if (best) make(td, "span", { class: "sr" }, " best");
  } else make(td, "span", { class: "sd" }, "–");
  const quoted = row.paper[measure.name];
  if (!quoted) return;
  const theirs = make(td, "span", { class: "paper" });
  make(theirs, "span", { class: "narrow" }, "paper "); // where its line is not beside its name
  const [mean, sd] = spread(quoted, measure.decimals).split(" ± ");
  theirs.append(mean);
  if (sd) make(theirs, "span", { class: "wide" }, ` ± ${sd}`);
}

function drawMissing() {
  if (!data.missing.length) return;
  const host = document.getElementById("missing");
  make(host, "p", {}, "Not in these numbers");
  const list = make(host, "ul");
  for (const line of data.missing) make(list, "li", {}, line);
}
