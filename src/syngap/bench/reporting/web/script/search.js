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
}
