// Accuracy over the stream.

function drawStream() {
  const drawn = rows.filter((row) => row.lines);
  if (!drawn.length) return;
  const host = section("stream");
  const shown = byAccuracy(rows.filter((row) => row.lines || (row.joint && row.R)));
  const show = chart(host.querySelector(".chart"), {
    format: (value) => String(Math.round(value)), show: (value) => spread(value),
  });
  const note = host.querySelector(".note");
  let hidden = data.variants; // rows at other values of an option have a chart of their own

  function choose(task) {
    const series = shown.map((row) => {
      const line = { name: row.name, label: row.label, look: looks.get(row.name) };
      if (row.joint) {
        const final = row.R[row.R.length - 1];
        const level = task === null ? row.values.ACC : [final.mean[task], final.sd ? final.sd[task] : null];
        return { ...line, level };
      }
      const { mean, sd } = row.lines[task === null ? "seen" : String(task)];
      const low = sd && mean.map((value, index) => Math.max(value - sd[index], 0));
      const high = sd && mean.map((value, index) => Math.min(value + sd[index], 100));
      return { ...line, places: row.places, mean, sd, low, high };
    });
    const top = Math.max(...series.flatMap((line) => line.high || line.mean || [line.level[0]]));
    const about = task === null ? "Mean accuracy on the tasks seen so far" : `Accuracy on task ${task + 1}`;
    const level = shown.some((row) => row.joint) ? " Joint training is a level line: it sees all tasks at once." : "";
    note.textContent = `${about}, in percent; bands are ± sd over seeds.${level}`;
    show({ series, own: task, max: Math.min(Math.max(Math.ceil(top / 20) * 20, 20), 100), label: about, hidden });
    hidden = []; // once: what the reader chose stays
  }

  const each = Array.from({ length: tasks }, (_, task) => [String(task + 1), task]);
  choices(host.querySelector(".choices"), "Accuracy on", [["all seen so far", null], ...each.map(
    ([text, task]) => [task ? text : `task ${text}`, task])], choose);
  choose(null);
}
