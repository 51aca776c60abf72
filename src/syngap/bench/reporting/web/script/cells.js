// A table of cells that pointer, finger and arrow keys read one by one. `tell` is given the place of
// the cell that is read, `rest` is called when the pointer has left.

function readable(table, cells, tell, rest) {
  let place = null;
  let shown = null;

  function show(line, column) {
    if (shown) shown.classList.remove("shown");
    place = [line, column];
    shown = cells[line][column];
    shown.classList.add("shown");
    tell(line, column);
  }

  table.tabIndex = 0;
  cells.forEach((line, down) => line.forEach((cell, right) => {
    for (const event of ["pointerenter", "click"]) cell.addEventListener(event, () => show(down, right));
  }));
  table.addEventListener("pointerleave", (event) => {
    if (event.pointerType !== "mouse" || !shown) return; // a finger that was lifted is still reading
    shown.classList.remove("shown");
    rest();
  });
  table.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    if (!(event.key in moves)) return;
    event.preventDefault();
    const [down, right] = place ? moves[event.key] : [0, 0];
    const [line, column] = place || [0, 0];
    const within = (value, count) => Math.min(Math.max(value, 0), count - 1);
    show(within(line + down, cells.length), within(column + right, cells[0].length));
  });
}
