// A measure against the value of an option: the learning rate above all.

function drawSweeps() {
  if (!data.sweeps.length) return;
  const host = section("sweeps");
  const show = chart(host.querySelector(".chart"), {
    format: (value) => String(Math.round(value)), show: (value) => spread(value), resting: "best of each",
  });
  const chosen = { sweep: data.sweeps[0], measure: "ACC" };

  function draw() {
    const { sweep, measure } = chosen;
    const series = sweep.lines.map((line, place) => {
      const own = line.rows.map((name) => rows.find((row) => row.name === name));
      const spreads = own.map((row) => row.values[measure]);
      const mean = spreads.map((value) => value[0]);
      const sd = spreads.every((value) => value[1] !== null) ? spreads.map((value) => value[1]) : null;
      // A negative FM counts as 0, and is not best itself.
      const scores = measure === "FM" ? mean.map((value) => -Math.max(value, 0)) : mean;
      const top = Math.max(...scores);
      const best = mean.findIndex((value, at) => scores[at] === top && (measure !== "FM" || value >= 0));
      return {
        name: line.method, label: line.label, look: lookOf(line, place), places: line.values, mean, sd, dots: true,
        low: sd && mean.map((value, index) => Math.max(value - sd[index], 0)),
        high: sd && mean.map((value, index) => value + sd[index]),
        resting: best < 0 ? "–" : `${number(mean[best])} at ${line.values[best]}`,
      };
    });
    const top = Math.max(...series.flatMap((line) => line.high || line.mean));
    host.querySelector("h2").textContent = `What the ${sweep.name} does`;
    const about = `${measure} against ${sweep.name}`;
    const missing = sweep.missing.length ? ` Not over all seeds: ${sweep.missing.join("; ")}.` : "";
    host.querySelector(".note").textContent = `${about[0].toUpperCase()}${about.slice(1)}, in percent; `
      + `bands are ± sd over seeds. All else is as in the method’s own row.${missing}`;
    show({
      series, own: null, max: Math.max(Math.ceil(top / 10) * 10, 10), label: about,
      axis: valueAxis(sweep.name, sweep.values, sweep.logarithmic),
    });
  }

  function lookOf(line, place) {
    const own = line.rows.find((name) => name === line.method) || line.rows[0];
    const look = looks.get(own);
    return look.kind === "bound" ? { ...look, dash: DASHES[place % 4] } : look;
  }

  const at = host.querySelector(".choices");
  if (data.sweeps.length > 1) {
    choices(at, "Option", data.sweeps.map((sweep) => [sweep.name, sweep]), (sweep) => {
      chosen.sweep = sweep;
      draw();
    });
  }
  choices(at, "Measure", [["ACC", "ACC"], ["FM", "FM"]], (measure) => {
    chosen.measure = measure;
    draw();
  });
  draw();
}

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
