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

// Every method keeps one colour and one dash, in the table and in the chart. The method that
// the page is about is solid and wide, the others differ by dash as well as by colour.

const DASHES = ["", "7 3", "2 2.5", "9 3 2 3"];
const looks = new Map();
let others = 0;
const variants = new Set(data.variants);
for (const row of [...rows].sort((a, b) => variants.has(a.name) - variants.has(b.name))) {
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
