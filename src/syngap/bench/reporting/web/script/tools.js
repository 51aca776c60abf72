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

// Three digits, whatever the size.
function short(value) {
  if (value === null) return "–";
  if (value !== 0 && (Math.abs(value) >= 1e5 || Math.abs(value) < 1e-3)) return value.toExponential(1);
  return number(value, Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 10 ? 1 : Math.abs(value) >= 0.1 ? 2 : 3);
}

// Methods without a memory mostly end at the same place, so the chart draws their range. The method
// that the page is about and the most accurate one keep their lines, and so do all where none has a
// memory. Rows at other values of an option have a chart of their own.

const variants = new Set(data.variants);
const drawn = rows.filter((row) => row.lines);
const best = byAccuracy(drawn)[0];
const named = new Set([data.subject, best && best.name, ...data.against.map((rival) => rival.name)]);
const forgetful = drawn.filter((row) => (
  !row.memory && row !== best && row.name !== data.subject && !variants.has(row.name)));
const banded = new Set(forgetful.length > 1 && drawn.some((row) => row.memory) ? forgetful : []);

// A row keeps its colour, in the table and in the chart, and no two have the same. Rows that come
// after the last colour have none of their own: a chart lends them one that is free in it.

const PALETTE = Array.from({ length: 12 }, (_, place) => `c${place}`);
const looks = new Map();
const late = (row) => banded.has(row) + (variants.has(row.name) && !named.has(row.name) ? 2 : 0);
const spare = PALETTE.slice(1);
for (const row of [...rows].sort((a, b) => late(a) - late(b))) {
  const first = row.joint && ![...looks.values()].some((look) => look.kind === "bound");
  if (row.name === data.subject) looks.set(row.name, { kind: "c0", dash: "", strong: true });
  else looks.set(row.name, {
    kind: first ? "bound" : spare.shift() || "rest", dash: row.joint ? "1 3" : "", strong: false,
  });
}

function swatch(parent, look) {
  const svg = make(parent, "svg", { viewBox: "0 0 30 10", "aria-hidden": "true" });
  paint(svg, look);
  make(svg, "line", { x1: 0, x2: 30, y1: 5, y2: 5, "stroke-dasharray": look.dash });
  return svg;
}

function paint(svg, look, kind = look.kind) {
  svg.setAttribute("class", `swatch ${kind}${look.strong ? " strong" : ""}`);
  if (look.depth !== undefined) svg.style.setProperty("--depth", look.depth);
}

// A question with one answer at a time.

function choices(host, legend, items, choose) {
  const group = make(make(host, "form"), "fieldset");
  make(group, "legend", {}, legend);
  items.forEach(([text, value], place) => {
    const label = make(group, "label");
    const input = make(label, "input", { type: "radio", name: "choice", value: String(place) });
    input.checked = place === 0;
    input.addEventListener("change", () => choose(value));
    make(label, "span", {}, text);
  });
}
