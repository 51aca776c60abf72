// The scope, and the differences seed by seed.

const seeds = new Set(rows.flatMap((row) => row.seeds));
document.getElementById("scope").textContent = [
  tasks ? plural(tasks, "task") : null,
  rows.length ? plural(rows.length, "row") : null,
  seeds.size ? plural(seeds.size, "seed") : null,
].filter(Boolean).join(" · ");

function drawAgainst() {
  if (!data.against.length) return;
  const ends = { 1: "more accurate", 0: "no significant difference", "-1": "less accurate", null: "too few seeds" };
  const forgets = { 1: "forgets more", 0: "no significant difference", "-1": "forgets less", null: "too few seeds" };
  const host = section("against");
  host.querySelector(".flattered").hidden = !data.flattered;
  const table = make(host.querySelector(".scroll"), "table", { class: "plain" });
  const head = make(make(table, "thead"), "tr");
  const body = make(table, "tbody");
  const lines = data.against.map((rival) => {
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
    return { item: rival, line };
  });
  const ours = rows.find((row) => row.name === data.subject).label;
  sortable(head, [
    { heading: `${ours} against`, better: "down", value: (rival) => rival.rival },
    { heading: "ACC", better: "up", value: (rival) => rival.accuracy && rival.accuracy[0] },
    { heading: "FM", better: "down", value: (rival) => rival.forgetting && rival.forgetting[0] },
    { heading: "time", better: "down", value: (rival) => rival.time },
  ], lines, () => body);
}
