// What runs across a chart. An axis knows the share of the width that a place is at, how to name a
// place, and what to draw for it.

function stepOf(place) {
  const task = Math.min(Math.floor(place), tasks - 1);
  const start = task ? data.axis.ends[task - 1] : 0;
  return start + (place - task) * (data.axis.ends[task] - start);
}

// Places of the stream: 2.25 is a quarter through the third task.
const streamAxis = {
  rest: tasks,
  share: (place) => stepOf(place) / stepOf(tasks),
  named(place) {
    const task = `task ${Math.min(Math.floor(place) + 1, tasks)}`;
    if (place === tasks) return "at the end";
    if (place && place === Math.floor(place)) return `after task ${place}`;
    return data.axis.unit === "step" ? `step ${Math.round(stepOf(place))}, ${task}` : `in ${task}`;
  },
  label: data.axis.unit === "step" ? "training steps" : "position in the stream",
  draw(plot, x, size) {
    for (let task = 0; task < tasks; task += 1) {
      const [from, to] = [x(task), x(task + 1)];
      if (task) make(plot, "line", { class: "border", x1: from, x2: from, y1: size.top, y2: size.bottom });
      const text = to - from > 46 ? `task ${task + 1}` : to - from > 14 ? `${task + 1}` : null;
      if (text) make(plot, "text", { x: (from + to) / 2, y: 13, "text-anchor": "middle" }, text);
    }
    if (data.axis.unit !== "step") return;
    const total = data.axis.ends[tasks - 1];
    const step = roundStep(total, Math.max((size.right - size.left) / 90, 1));
    for (let value = 0; value <= total; value += Math.max(step, 1)) {
      const place = size.left + (value / total) * (size.right - size.left);
      const anchor = place > size.right - 14 ? "end" : "middle";
      make(plot, "text", { x: place, y: size.bottom + 17, "text-anchor": anchor }, value.toLocaleString("en"));
    }
  },
};

// Values of an option: by their ratios, or side by side as they were tried.
function valueAxis(name, values, logarithmic) {
  const margin = 0.06;
  const [low, high] = [values[0], values[values.length - 1]];
  const raw = (value) => (logarithmic
    ? Math.log(value / low) / Math.log(high / low)
    : values.indexOf(value) / Math.max(values.length - 1, 1));
  return {
    rest: null,
    share: (value) => margin + (1 - 2 * margin) * raw(value),
    named: (value) => `${name} ${value}`,
    label: name,
    draw(plot, x, size) {
      for (const value of values) {
        make(plot, "text", { x: x(value), y: size.bottom + 17, "text-anchor": "middle" }, String(value));
      }
    },
  };
}

// A round step that divides `range` into at most about `parts`.
function roundStep(range, parts) {
  const rough = range / parts;
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((factor) => factor * power).find((value) => value >= rough * 0.999);
}
