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
