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
