// The steps and the series that are shown, and the room for drawings of them.

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const isDark = () => {
  const given = document.documentElement.dataset.theme;
  return given ? given === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
};
const LEAST = 8; // steps, and series, that are shown at least
const RIGHT = 10;
const gutter = () => (innerWidth < 600 ? 74 : 128);

class View {
  constructor() {
    this.watchers = [];
    this.whole();
  }

  whole() {
    this.set(FIRST, LAST, 0, ROWS.length);
  }

  /** Show steps and rows. */
  set(from, to, top = this.top, bottom = this.bottom) {
    const width = Math.min(Math.max(to - from, LEAST), LAST - FIRST);
    this.from = Math.min(Math.max(from, FIRST), LAST - width);
    this.to = this.from + width;
    const height = Math.min(Math.max(bottom - top, LEAST), ROWS.length);
    this.top = Math.min(Math.max(top, 0), ROWS.length - height);
    this.bottom = this.top + height;
    if (this.waits) return;
    this.waits = true;
    requestAnimationFrame(() => {
      this.waits = false;
      for (const watcher of this.watchers) watcher();
    });
  }

  zoom(factor, step, row) {
    const x = step ?? (this.from + this.to) / 2, y = row ?? (this.top + this.bottom) / 2;
    this.set(x - (x - this.from) * factor, x + (this.to - x) * factor, y - (y - this.top) * factor, y + (this.bottom - y) * factor);
  }

  /** Move what is shown to where it shows a column and a row. */
  uncover(column, row) {
    const step = BEGIN[column];
    let { from, to, top, bottom } = this;
    if (step < from || END[column] > to) [from, to] = [step - (to - from) / 2, step + (to - from) / 2];
    if (row < top || row + 1 > bottom) [top, bottom] = [row - (bottom - top) / 2, row + (bottom - top) / 2];
    if (from !== this.from || top !== this.top) this.set(from, to, top, bottom);
  }
}

/** A canvas in device pixels, which draws in the pixels of the page. */
class Sheet {
  constructor(canvas) {
    this.canvas = canvas;
    this.ctx = canvas.getContext("2d");
  }

  begin() {
    const ratio = devicePixelRatio || 1;
    this.width = this.canvas.clientWidth;
    this.height = this.canvas.clientHeight;
    const wide = Math.round(this.width * ratio), high = Math.round(this.height * ratio);
    if (this.canvas.width !== wide || this.canvas.height !== high) Object.assign(this.canvas, { width: wide, height: high });
    this.left = gutter();
    this.inner = Math.max(this.width - this.left - RIGHT, 1);
    this.ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.ctx.clearRect(0, 0, this.width, this.height);
    this.ctx.font = "11px system-ui, sans-serif";
    this.ctx.textBaseline = "middle";
    this.ctx.lineWidth = 1;
  }

  x(view, step) {
    return this.left + ((step - view.from) / (view.to - view.from)) * this.inner;
  }

  step(view, x) {
    return view.from + ((x - this.left) / this.inner) * (view.to - view.from);
  }

  line(x1, y1, x2, y2, colour, dash = []) {
    const { ctx } = this;
    ctx.strokeStyle = colour;
    ctx.setLineDash(dash);
    ctx.beginPath();
    ctx.moveTo(x1, y1);
    ctx.lineTo(x2, y2);
    ctx.stroke();
    ctx.setLineDash([]);
  }

  /** The steps with which a run was resumed, and those at which something happened. */
  events(view, top, bottom) {
    for (const step of RESUMED) {
      const x = Math.round(this.x(view, step)) + 0.5;
      if (x >= this.left && x <= this.left + this.inner) this.line(x, top, x, bottom, style("--faint"), [1, 3]);
    }
    for (const { step } of EVENTS) {
      const x = Math.round(this.x(view, step)) + 0.5;
      if (x >= this.left && x <= this.left + this.inner) this.line(x, top, x, bottom, style("--event"), [4, 3]);
    }
  }
}

/** Round numbers between two others, a few. */
function ticks(low, high, most) {
  const raw = (high - low) / most;
  if (!(raw > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(raw));
  const size = [1, 2, 5, 10].map((x) => x * power).find((x) => x >= raw);
  const found = [];
  for (let i = Math.ceil(low / size); i * size <= high * (1 + 1e-12); i++) found.push(i * size);
  return found;
}
