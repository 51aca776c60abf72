// A table of cells that pointer, finger and arrow keys read one by one. `tell` is given the place of
// the cell that is read, `rest` is called when the pointer has left.

function readable(table, cells, tell, rest) {
  let place = null;
  let shown = null;

  function show(line, column) {
    if (shown) shown.classList.remove("shown");
    place = [line, column];
    shown = cells[line][column];
    shown.classList.add("shown");
    tell(line, column);
  }

  table.tabIndex = 0;
  cells.forEach((line, down) => line.forEach((cell, right) => {
    for (const event of ["pointerenter", "click"]) cell.addEventListener(event, () => show(down, right));
  }));
  table.addEventListener("pointerleave", (event) => {
    if (event.pointerType !== "mouse" || !shown) return; // a finger that was lifted is still reading
    shown.classList.remove("shown");
    rest();
  });
  table.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    if (!(event.key in moves)) return;
    event.preventDefault();
    const [down, right] = place ? moves[event.key] : [0, 0];
    const [line, column] = place || [0, 0];
    const within = (value, count) => Math.min(Math.max(value, 0), count - 1);
    show(within(line + down, cells.length), within(column + right, cells[0].length));
  });
}

// Headings that sort their table. A column has a heading, what it says, which end is better ("up"
// or "down") and a value; values that are absent stay last.

function sortable(head, columns, lines, bodyOf, first = null) {
  for (const column of columns) {
    const th = make(head, "th", { scope: "col", title: column.says, class: column.main === false ? "more" : "" });
    make(th, "button", { type: "button" }, column.heading).addEventListener("click", () => sort(column, th));
    if (first !== null && column.name === first) sort(column, th);
  }

  function sort(column, th) {
    const natural = column.better === "down" ? "ascending" : "descending";
    const reverse = { ascending: "descending", descending: "ascending" };
    const before = th.getAttribute("aria-sort");
    const order = before ? reverse[before] : natural;
    for (const other of head.children) other.removeAttribute("aria-sort");
    th.setAttribute("aria-sort", order);
    const sign = order === "ascending" ? 1 : -1;
    const sorted = lines.map((each, place) => ({ ...each, place, value: column.value(each.item) }));
    sorted.sort((a, b) => {
      if (a.value === null || b.value === null) return (a.value === null) - (b.value === null);
      const differ = typeof a.value === "string" ? a.value.localeCompare(b.value) : a.value - b.value;
      return sign * differ || a.place - b.place;
    });
    for (const { item, line } of sorted) bodyOf(item).append(line);
  }
}

// The scope, and the three figures that matter with their differences, seed by seed.

const seeds = new Set(rows.flatMap((row) => row.seeds));
document.getElementById("scope").textContent = [
  tasks ? plural(tasks, "task") : null,
  rows.length ? plural(rows.length, "row") : null,
  seeds.size ? plural(seeds.size, "seed") : null,
].filter(Boolean).join(" · ");

function time(seconds) {
  const [unit, size] = seconds < 100 ? ["s", 1] : seconds < 6000 ? ["min", 60] : ["h", 3600];
  return [number(seconds / size, seconds / size < 10 ? 2 : 1), unit];
}

function drawCards() {
  const ours = rows.find((row) => row.name === data.subject);
  if (!ours) return;
  const host = section("against");
  host.querySelector("h2").textContent = ours.label;
  const cards = host.querySelector(".cards");
  const ends = { 1: "more accurate", 0: "not significant", "-1": "less accurate", null: "too few seeds" };
  const forgets = { 1: "forgets more", 0: "not significant", "-1": "forgets less", null: "too few seeds" };
  const points = (value) => (value ? spread(value, 1, true) : "–");
  card("ACC", "Accuracy", (mean) => [number(mean), "%"],
    (rival) => [points(rival.accuracy), rival.accuracy ? ends[rival.ends] : "", rival.ends]);
  card("FM", "Forgetting", (mean) => [number(mean), "points"],
    (rival) => [points(rival.forgetting), rival.forgetting ? forgets[rival.forgets] : "", rival.forgets]);
  card("seconds", "Training time", time,
    (rival) => (rival.time === null ? ["–", "", 0] : [`${number(rival.time, rival.time < 9.95 ? 1 : 0)} ×`, "as long", 0]));

  function card(name, title, figure, against) {
    const measure = data.measures.find((one) => one.name === name);
    const box = make(cards, "div", { class: "card" });
    const head = make(box, "div");
    make(head, "h3", { title: measure.says }, title);
    const value = ours.values[name];
    const [text, unit] = value ? figure(value[0]) : ["–", ""];
    const shown = make(head, "p", { class: "figure" });
    make(shown, "b", {}, text);
    shown.append(`${value && value[1] !== null && name !== "seconds" ? ` ± ${number(value[1])}` : ""} ${unit}`);
    const list = make(box, "ul");
    if (name === "seconds" && data.against.every((rival) => rival.time === null && rival.seeds)) {
      make(list, "li", { class: "says" }, data.against.length ? "runs below a second are not compared" : "");
      return;
    }
    const absent = name === "seconds" ? "runs below a second" : "not measured";
    for (const rival of data.against) {
      const [difference, words, sign] = against(rival);
      const line = make(list, "li");
      const label = make(line, "span", { class: "rival" }, `vs ${rival.rival}`);
      if (rival.seeds !== ours.seeds.length) make(label, "span", { class: "says" }, ` (${plural(rival.seeds, "seed")})`);
      const found = make(line, "span", { class: "found" });
      make(found, "span", { class: sign ? "decided" : "" }, difference);
      make(found, "span", { class: "says" }, difference !== "–" ? words : rival.seeds ? absent : "no common seed");
    }
  }

  document.querySelector(".intervals").hidden = !data.against.some((rival) => rival.accuracy);
  document.querySelector(".flattered").hidden = !data.flattered;
}

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
    swatch(name, banded.has(row) ? { kind: "band", dash: "" } : looks.get(row.name));
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
  const more = document.querySelector("#results .switch");
  more.addEventListener("click", () => {
    const all = table.classList.toggle("all");
    more.textContent = all ? "fewer columns" : "more columns";
  });
  for (const note of data.notes) make(document.getElementById("quoted"), "p", { class: "note" }, note);
}

function cell(line, row, measure) {
  const value = row.values[measure.name];
  const best = measure.best.includes(row.name);
  const td = make(line, "td", { class: `${best ? "best" : ""} ${measure.main ? "" : "more"}`.trim() });
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

// What a search tried and chose for every row.

function drawSearch() {
  if (!data.search) return;
  const host = section("search");
  host.querySelector(".note").textContent = data.search.says;
  const table = make(host.querySelector(".scroll"), "table", { class: "plain" });
  const head = make(make(table, "thead"), "tr");
  data.search.columns.forEach((name, place) => {
    make(head, "th", { scope: "col", class: place < 3 ? "options" : "" }, name);
  });
  const body = make(table, "tbody");
  for (const [label, tried, chosen, ...numbers] of data.search.rows) {
    const line = make(body, "tr");
    make(line, "th", { scope: "row" }, label);
    for (const options of [tried, chosen]) {
      const cell = make(line, "td", { class: "options" });
      for (const option of options.split("; ")) make(cell, "span", {}, option);
    }
    for (const text of numbers) make(line, "td", {}, text);
  }
  drawTrials(host);
}

function drawTrials(host) {
  const details = make(host, "details");
  make(details, "summary", {}, `All ${data.search.trials.length} trials`);
  const scroll = { class: "scroll", role: "region", "aria-label": "All trials", tabindex: "0" };
  const table = make(make(details, "div", scroll), "table", { class: "plain" });
  const head = make(make(table, "thead"), "tr");
  for (const name of data.search.trial_columns) make(head, "th", { scope: "col", class: "options" }, name);
  const body = make(table, "tbody");
  for (const [label, ...texts] of data.search.trials) {
    const line = make(body, "tr");
    make(line, "th", { scope: "row" }, label);
    for (const text of texts) make(line, "td", { class: "options" }, text);
  }
}
