// The map: a row for each series, a column for each step, coloured by the distance from its band.

const SMALL = 4; // columns that become one in the next coarser picture
const SHARES = [0, 0.07, 0.16, 0.3, 0.46, 0.62, 0.77, 0.9, 1]; // of a colour, by level

/** The level that is furthest from the band; any is further than an unknown one. */
const further = (a, b) => (b === UNKNOWN ? a : a === UNKNOWN || Math.abs(b) > Math.abs(a) ? b : a);

/** Ever coarser pictures of the levels: no extreme is lost. */
function pyramid(levels) {
  const found = [{ levels, count: COUNT, size: 1 }];
  while (found.at(-1).count > 256) {
    const { levels: fine, count, size } = found.at(-1);
    const fewer = Math.ceil(count / SMALL);
    const coarse = new Int8Array(ROWS.length * fewer).fill(UNKNOWN);
    for (let row = 0; row < ROWS.length; row++)
      for (let i = 0; i < count; i++) {
        const at = row * fewer + ((i / SMALL) | 0);
        coarse[at] = further(coarse[at], fine[row * count + i]);
      }
    found.push({ levels: coarse, count: fewer, size: size * SMALL });
  }
  return found;
}

class SeriesMap {
  constructor(canvas, tip, view, levels, onSelect, onMove) {
    Object.assign(this, { canvas, tip, view, onSelect, onMove, chosen: null, at: null, drag: null });
    this.sheet = new Sheet(canvas);
    this.pictures = pyramid(levels);
    this.levels = levels;
    this.picture = document.createElement("canvas");
    view.watchers.push(() => { this.stale = true; this.draw(); });
    canvas.addEventListener("pointermove", (event) => this.moves(event));
    canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; this.onMove(null); });
    canvas.addEventListener("pointerdown", (event) => this.down(event));
    canvas.addEventListener("pointerup", (event) => this.up(event));
    canvas.addEventListener("pointercancel", () => { this.drag = null; this.draw(); });
    canvas.addEventListener("dblclick", () => view.whole());
    canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    canvas.addEventListener("keydown", (event) => this.key(event));
    canvas.addEventListener("blur", () => { this.tip.hidden = true; });
    this.describe();
  }

  get tall() {
    const most = innerWidth < 600 ? 400 : 520;
    return Math.min(Math.max(ROWS.length * 6, 160), most);
  }

  resize() {
    this.canvas.style.height = `${this.tall + AXIS}px`;
    this.stale = true;
    this.draw();
  }

  palette() {
    const ctx = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    const paint = (...colours) => {
      ctx.globalAlpha = 1;
      for (const [colour, share] of colours) {
        ctx.globalAlpha = share;
        ctx.fillStyle = colour;
        ctx.fillRect(0, 0, 1, 1);
      }
      return new Uint32Array(ctx.getImageData(0, 0, 1, 1).data.buffer)[0];
    };
    const found = new Uint32Array(256).fill(paint([style("--back"), 1]));
    const ground = style("--ground");
    SHARES.forEach((share, level) => {
      found[level + 128] = paint([ground, 1], [style("--above"), share]);
      found[128 - level] = paint([ground, 1], [style("--below"), share]);
    });
    found[INFINITE + 128] = paint([style("--infinite"), 1]);
    return found;
  }

  /** Paint the levels that are shown, a pixel of the page for each. */
  paint() {
    const { sheet, view } = this, wide = Math.floor(sheet.inner), high = this.tall;
    if (wide < 1) return;
    Object.assign(this.picture, { width: wide, height: high });
    const ctx = this.picture.getContext("2d");
    const image = ctx.createImageData(wide, high);
    const pixels = new Uint32Array(image.data.buffer), colours = this.palette();
    const perPixel = Math.max((columnOf(view.to - 1e-9) - columnOf(view.from) + 1) / wide, 1);
    const { levels, count, size } = this.pictures.findLast((each) => each.size * 2 <= perPixel) ?? this.pictures[0];
    const from = new Int32Array(wide), to = new Int32Array(wide);
    for (let x = 0; x < wide; x++) {
      const first = columnOf(view.from + (x / wide) * (view.to - view.from));
      const last = columnOf(view.from + ((x + 1) / wide) * (view.to - view.from) - 1e-9);
      from[x] = (first / size) | 0;
      to[x] = (Math.max(last, first) / size) | 0;
    }
    let before = -1;
    for (let y = 0; y < high; y++) {
      const top = Math.floor(view.top + (y / high) * (view.bottom - view.top));
      const bottom = Math.max(Math.ceil(view.top + ((y + 1) / high) * (view.bottom - view.top) - 1e-9), top + 1);
      const only = bottom === top + 1 ? top : -1;
      if (only >= 0 && only === before) {
        pixels.copyWithin(y * wide, (y - 1) * wide, y * wide);
        continue;
      }
      before = only;
      for (let x = 0; x < wide; x++) {
        let found = UNKNOWN, size = -1;
        for (let row = top; row < bottom; row++)
          for (let at = row * count + from[x], end = row * count + to[x]; at <= end; at++) {
            const level = levels[at], far = level === UNKNOWN ? -1 : level < 0 ? -level : level;
            if (far > size) [found, size] = [level, far];
          }
        pixels[y * wide + x] = colours[found + 128];
      }
    }
    ctx.putImageData(image, 0, 0);
    this.stale = false;
  }

  draw() {
    const { sheet, view } = this;
    sheet.begin();
    if (!sheet.width) return;
    if (this.stale || this.picture.width !== Math.floor(sheet.inner)) this.paint();
    const { ctx } = sheet, high = this.tall;
    ctx.imageSmoothingEnabled = false;
    ctx.drawImage(this.picture, sheet.left, 0);
    this.groups();
    sheet.events(view, 0, high);
    stepAxis(sheet, view, high);
    for (const { step, row } of EVENTS) if (row !== null) this.ring(step, row);
    if (this.chosen !== null) this.outline(this.chosen, style("--text"));
    if (this.at) {
      const x = sheet.x(view, BEGIN[this.at.column]), wide = Math.max(sheet.x(view, END[this.at.column]) - x, 2);
      const [y, tall] = this.place(this.at.row);
      ctx.strokeStyle = style("--text");
      if (x >= sheet.left - 1) ctx.strokeRect(x - 0.5, y - 0.5, wide + 1, tall + 1);
    }
    if (this.drag?.moved) {
      const { x, y, toX, toY, isWide } = this.drag;
      ctx.fillStyle = style("--faint");
      ctx.globalAlpha = 0.25;
      if (isWide) ctx.fillRect(x, 0, toX - x, high);
      else ctx.fillRect(x, y, toX - x, toY - y);
      ctx.globalAlpha = 1;
    }
  }

  /** Where a row is, and how tall. */
  place(row) {
    const tall = this.tall / (this.view.bottom - this.view.top);
    return [(row - this.view.top) * tall, tall];
  }

  outline(row, colour) {
    const { ctx, left, inner } = this.sheet, [y, tall] = this.place(row);
    if (y + tall < 0 || y > this.tall) return;
    ctx.fillStyle = colour;
    ctx.beginPath();
    ctx.moveTo(left - 1, y + tall / 2);
    ctx.lineTo(left - 8, y + tall / 2 - 4);
    ctx.lineTo(left - 8, y + tall / 2 + 4);
    ctx.fill();
    ctx.globalAlpha = 0.5;
    this.sheet.line(left, y - 0.5, left + inner, y - 0.5, colour);
    this.sheet.line(left, y + tall + 0.5, left + inner, y + tall + 0.5, colour);
    ctx.globalAlpha = 1;
  }

  /** A ring around what changed first. */
  ring(step, row) {
    const { ctx, left, inner } = this.sheet, [y, tall] = this.place(row);
    const x = this.sheet.x(this.view, step + 0.5);
    if (x < left || x > left + inner || y + tall < 0 || y > this.tall) return;
    for (const [colour, width] of [[style("--back"), 4], [style("--event"), 2]]) {
      ctx.strokeStyle = colour;
      ctx.lineWidth = width;
      ctx.beginPath();
      ctx.arc(x, y + tall / 2, 8, 0, 2 * Math.PI);
      ctx.stroke();
    }
    ctx.lineWidth = 1;
  }

  /** The names of neighbours on the left, where they have room. */
  groups() {
    const { ctx, left, inner } = this.sheet;
    const room = left - 18;
    ctx.textAlign = "right";
    let free = 0;
    for (const { name, start, end } of GROUPS) {
      const from = Math.max(this.place(start)[0], 0), to = Math.min(this.place(end)[0], this.tall);
      if (to <= from) continue;
      const edge = Math.round(from) + 0.5;
      if (from > 0) this.sheet.line(left - 6, edge, left + (to - from > 6 ? inner : 0), edge, style("--line"));
      const y = Math.min(Math.max((from + to) / 2, 6), this.tall - 6);
      if (y - 6 < free || to - from < 7) continue;
      let label = name;
      if (ctx.measureText(label).width > room) label = name.split(".").slice(-2).join(".");
      while (label.length > 1 && ctx.measureText(label).width > room) label = `${label.slice(0, -2)}\u2026`;
      ctx.fillStyle = style("--faint");
      ctx.fillText(label, left - 11, y);
      free = y + 6;
    }
    ctx.textAlign = "left";
  }

  /** The cell at a place of the page; null beside the map. */
  cell(event) {
    const box = this.canvas.getBoundingClientRect();
    const x = event.clientX - box.left, y = event.clientY - box.top;
    const { sheet, view } = this;
    const row = Math.floor(view.top + (y / this.tall) * (view.bottom - view.top));
    if (y < 0 || y >= this.tall || row < 0 || row >= ROWS.length || x > sheet.left + sheet.inner) return null;
    const step = Math.min(Math.max(sheet.step(view, x), view.from), view.to - 1e-6);
    return { ...this.strongest(step, y, row), x, y };
  }

  /** Of all that shares a pixel, what is furthest from its band: it gives the pixel its colour. */
  strongest(step, y, row) {
    const { view, sheet } = this, half = (view.to - view.from) / sheet.inner / 2;
    const from = columnOf(step - half), to = Math.max(columnOf(step + half - 1e-6), from);
    const rows = (view.bottom - view.top) / this.tall;
    const last = Math.min(Math.max(row, Math.ceil(row + rows) - 1), ROWS.length - 1);
    let found = { row, column: columnOf(step) };
    if (to - from < 1 && rows <= 1) return found;
    let best = -1;
    for (let r = row; r <= last; r++)
      for (let column = from; column <= to; column++) {
        const level = this.levels[r * COUNT + column];
        const far = level === UNKNOWN ? -1 : Math.abs(level);
        if (far > best) [best, found] = [far, { row: r, column }];
      }
    return found;
  }

  moves(event) {
    if (this.drag && event.buttons) return this.drags(event);
    const cell = this.cell(event);
    if (!cell) {
      this.tip.hidden = true;
      return this.onMove(null);
    }
    this.canvas.style.cursor = "crosshair";
    this.onMove(cell.column);
    this.showTip(cell, event.clientX, event.clientY);
  }

  showTip({ row, column }, x, y) {
    const series = ROWS[row];
    const lines = [element("strong", {}, series.name), element("div", {}, `${stepsOf(column)}: ${distanceText(this.levels[row * COUNT + column])}`)];
    this.tip.replaceChildren(...lines);
    this.tip.hidden = false;
    const { offsetWidth: wide, offsetHeight: high } = this.tip;
    this.tip.style.left = `${Math.max(x + 16 + wide > innerWidth ? x - wide - 16 : x + 16, 4)}px`;
    this.tip.style.top = `${Math.min(y + 14, innerHeight - high - 4)}px`;
    this.shown = `${row} ${column}`;
    numbersOf(row).then(({ high: largest, low }) => {
      if (this.shown !== `${row} ${column}` || this.tip.hidden) return;
      const value = text(valueOf(series, largest[column]));
      const smallest = low ? `, smallest ${text(valueOf(series, low[column]))}` : "";
      lines[1].after(element("div", {}, `${low ? "largest " : ""}${value}${smallest}`));
    });
  }

  down(event) {
    if (event.button !== 0 || event.pointerType === "touch") return;
    const box = this.canvas.getBoundingClientRect();
    const x = event.clientX - box.left, y = event.clientY - box.top;
    this.drag = { x, y, toX: x, toY: y, moved: false, isWide: true };
    this.canvas.setPointerCapture(event.pointerId);
  }

  drags(event) {
    const box = this.canvas.getBoundingClientRect(), { sheet, drag } = this;
    drag.toX = Math.min(Math.max(event.clientX - box.left, sheet.left), sheet.left + sheet.inner);
    drag.toY = Math.min(Math.max(event.clientY - box.top, 0), this.tall);
    drag.moved ||= Math.abs(drag.toX - drag.x) > 5 || Math.abs(drag.toY - drag.y) > 12;
    drag.isWide = Math.abs(drag.toY - drag.y) < 24; // else rows are chosen as well
    this.tip.hidden = true;
    this.draw();
  }

  up(event) {
    const { drag, view } = this;
    this.drag = null;
    if (drag?.moved) {
      const steps = [this.sheet.step(view, drag.x), this.sheet.step(view, drag.toX)].sort((a, b) => a - b);
      const row = (y) => view.top + (y / this.tall) * (view.bottom - view.top);
      const rows = drag.isWide ? [view.top, view.bottom] : [row(drag.y), row(drag.toY)].sort((a, b) => a - b);
      if (steps[1] - steps[0] < (view.to - view.from) / 100) [steps[0], steps[1]] = [view.from, view.to];
      view.set(...steps, ...rows);
      return;
    }
    const cell = this.cell(event);
    if (cell) this.select(cell.row, cell.column);
  }

  select(row, column) {
    this.chosen = row;
    if (column !== undefined) this.at = { row, column };
    this.draw();
    this.onSelect(row, column);
  }

  wheel(event) {
    if (!event.ctrlKey && !event.metaKey) return; // else the page could not be scrolled over it
    event.preventDefault();
    const cell = this.cell(event);
    this.view.zoom(event.deltaY > 0 ? 1.25 : 0.8, cell ? BEGIN[cell.column] : undefined, cell?.row);
  }

  key(event) {
    const at = this.at ?? { row: this.chosen ?? Math.floor(this.view.top), column: columnOf(this.view.from) };
    const moves = {
      ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0], PageUp: [-10, 0], PageDown: [10, 0],
      Home: [0, -COUNT], End: [0, COUNT],
    };
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key in moves) {
      const [down, right] = moves[event.key];
      const within = (x, count) => Math.min(Math.max(x, 0), count - 1);
      this.moveTo(within(at.row + (this.at ? down : 0), ROWS.length), within(at.column + (this.at ? right : 0), COUNT));
    } else if (event.key === "Enter" || event.key === " ") this.select(at.row, at.column);
    else if (event.key === "+" || event.key === "=") this.view.zoom(0.5, BEGIN[at.column], at.row);
    else if (event.key === "-") this.view.zoom(2, BEGIN[at.column], at.row);
    else if (event.key === "n") nextEvent();
    else if (event.key === "Escape") this.view.whole();
    else return;
    event.preventDefault();
  }

  moveTo(row, column) {
    this.at = { row, column };
    this.view.uncover(column, row);
    this.draw();
    this.onMove(column);
    const box = this.canvas.getBoundingClientRect();
    this.showTip(this.at, box.left + this.sheet.x(this.view, END[column]), box.top + this.place(row)[0]);
    const level = this.levels[row * COUNT + column];
    this.canvas.setAttribute("aria-label", `${this.described} Now at ${ROWS[row].name}, ${stepsOf(column)}: ${distanceText(level)}.`);
  }

  describe() {
    const left = ROWS.filter((row) => row.furthest >= DATA.edges[3]).length;
    this.described = `${ROWS.length} series by steps ${FIRST} to ${LAST - 1}; ${left} of them left their band.`;
    this.canvas.setAttribute("aria-label", this.described);
  }
}
