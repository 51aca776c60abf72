// A measure against the value of an option: the learning rate above all.

function drawSweeps() {
  if (!data.sweeps.length) return;
  const host = section("sweeps");
  const show = chart(host.querySelector(".chart"), {
    format: (value) => String(Math.round(value)), show: (value) => spread(value), resting: "best of each",
    labelled: true,
  });
  const chosen = { sweep: data.sweeps[0], measure: "ACC" };

  function draw() {
    const { sweep, measure } = chosen;
    const series = sweep.lines.map((line) => {
      const own = line.rows.map((name) => rows.find((row) => row.name === name));
      const spreads = own.map((row) => row.values[measure]);
      const mean = spreads.map((value) => value[0]);
      const sd = spreads.every((value) => value[1] !== null) ? spreads.map((value) => value[1]) : null;
      // A negative FM counts as 0, and is not best itself.
      const scores = measure === "FM" ? mean.map((value) => -Math.max(value, 0)) : mean;
      const top = Math.max(...scores);
      const best = mean.findIndex((value, at) => scores[at] === top && (measure !== "FM" || value >= 0));
      return {
        name: line.method, label: line.label, look: lookOf(line), places: line.values, mean, sd, dots: true,
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

  function lookOf(line) {
    const own = line.rows.find((name) => name === line.method) || line.rows[0];
    return looks.get(own);
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

const MOST_LINES = 8; // that are drawn before the reader asks for more

function drawStream() {
  if (!drawn.length) return;
  const host = section("stream");
  const shown = byAccuracy(rows.filter((row) => row.lines || (row.joint && row.R)));
  const show = chart(host.querySelector(".chart"), {
    format: (value) => `${Math.round(value)} %`, show: (value) => spread(value), labelled: true,
  });
  const note = host.querySelector(".note");
  const single = shown.filter((row) => !row.joint && !banded.has(row));
  const rank = (row) => (named.has(row.name) ? 0 : variants.has(row.name) ? 2 : 1);
  const kept = [...single].sort((a, b) => rank(a) - rank(b)).slice(0, MOST_LINES).filter((row) => rank(row) < 2);
  let hidden = single.filter((row) => !kept.includes(row)).map((row) => row.name);
  const chosen = { task: null, singly: false };

  function lineOf(row, task) {
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
  }

  // The range of the means of all methods without a memory.
  function rangeOf(lines) {
    const { places } = lines[0];
    const means = places.map((place) => lines.map((line) => interpolate(line.places, line.mean, place)));
    return {
      name: "without a memory", label: "without a memory", detail: lines.map((line) => line.label).join(", "),
      look: { kind: "band", dash: "", strong: false }, range: true, places,
      low: means.map((some) => Math.min(...some)), high: means.map((some) => Math.max(...some)),
    };
  }

  function draw() {
    const { task, singly } = chosen;
    const lines = shown.filter((row) => singly || !banded.has(row)).map((row) => lineOf(row, task));
    const together = singly ? [] : [...banded].map((row) => lineOf(row, task));
    const series = [...lines, ...(together.length ? [rangeOf(together)] : [])];
    const top = Math.max(...series.flatMap((line) => line.high || line.mean || [line.level[0]]));
    const about = task === null ? "Mean accuracy on the tasks seen so far" : `Accuracy on task ${task + 1}`;
    const names = together.map((line) => line.label);
    const others = names.splice(9).length;
    const range = names.length
      ? ` The grey band is the range of the methods without a memory: ${names.join("; ")}${others ? ` and ${others} more` : ""}.` : "";
    const level = shown.some((row) => row.joint) ? " Joint training is a level line: it sees all tasks at once." : "";
    note.textContent = `${about}. Shades are ± sd over seeds.${range}${level}`;
    show({ series, own: task, max: Math.min(Math.max(Math.ceil(top / 20) * 20, 20), 100), label: about, hidden });
    hidden = []; // once: what the reader chose stays
  }

  const each = Array.from({ length: tasks }, (_, task) => [String(task + 1), task]);
  const questions = host.querySelector(".choices");
  choices(questions, "Accuracy on", [["all seen so far", null], ...each.map(
    ([text, task]) => [task ? text : `task ${text}`, task])], (task) => {
    chosen.task = task;
    draw();
  });
  if (banded.size) {
    choices(questions, "Without a memory", [["as one band", false], ["singly", true]], (singly) => {
      chosen.singly = singly;
      draw();
    });
  }
  draw();
}
