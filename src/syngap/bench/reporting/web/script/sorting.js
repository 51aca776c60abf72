// Headings that sort their table. A column has a heading, what it says, which end is better ("up"
// or "down") and a value; values that are absent stay last.

function sortable(head, columns, lines, bodyOf, first = null) {
  for (const column of columns) {
    const th = make(head, "th", { scope: "col", title: column.says });
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
