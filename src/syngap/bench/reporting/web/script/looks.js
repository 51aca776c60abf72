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
