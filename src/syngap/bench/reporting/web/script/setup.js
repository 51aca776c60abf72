// How it was made.

function drawSetup() {
  if (!rows.length) return;
  const list = section("measures").querySelector("dl");
  for (const measure of data.measures) {
    make(list, "dt", {}, measure.heading);
    make(list, "dd", {}, `${measure.says[0].toUpperCase()}${measure.says.slice(1)}.`);
  }
  const host = section("setup").querySelector(".setup");
  if (data.environment.length) {
    const facts = make(host, "dl");
    for (const [name, value] of data.environment) {
      make(facts, "dt", {}, name);
      make(facts, "dd", {}, value);
    }
  }
  make(host, "h3", {}, "Configuration");
  const parts = rows.map((row) => [row.label, row.config]);
  for (const [title, text] of [["Shared by all methods", data.shared], ...parts]) {
    if (!text) continue;
    const details = make(host, "details");
    make(details, "summary", {}, title);
    make(details, "pre", {}, text);
  }
  const closed = [];
  addEventListener("beforeprint", () => {
    closed.push(...document.querySelectorAll("details:not([open])"));
    for (const details of closed) details.open = true;
  });
  addEventListener("afterprint", () => {
    for (const details of closed.splice(0)) details.open = false;
  });
}

drawCards();
drawStream();
drawTable();
drawSearch();
drawMissing();
drawSweeps();
drawMatrices();
drawLayers();
drawSurfaces();
drawSetup();
