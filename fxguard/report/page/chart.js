// Magnitudes over depth: uPlot draws lines, axes and zoom; limits and modules are drawn around them.
// uPlot receives decimal logarithms: its own logarithmic axis has no labels beyond 1e17.

const PALETTE = {
  light: ["#0b57a4", "#b35900", "#1b7a4b", "#a3338b", "#00798c", "#8a6d00", "#5b4bb5", "#b3435a"],
  dark: ["#6db3f2", "#f2a65a", "#6fcf97", "#e08fd0", "#56c8d8", "#d9be4c", "#a99cf0", "#f08ba0"],
};
const GROUPS = 40; // more modules than that are seen as their parents,
const MANY = 160; // except where the parents would be fewer than
const FEW = 4;
const RIBBON = 14; // height in pixels of the strip of modules
const BEFORE = 36; // frames before the cause that the chart opens on,
const AFTER = 10; // and behind it
const ALL = 64; // so many are shown all
const NARROW = 600; // pixels: on a telephone the names of limits stand inside the chart
const FLOOR = 1e-10; // what is below is drawn there, unless a largest magnitude is

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const isDark = () => {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
};

/** Modules that follow each other, at the depth that still gives colours one can tell apart. */
function groupsOf(frames) {
  let best = null;
  for (let depth = 1; depth < 12; depth++) {
    const names = new Set();
    const prefix = (name) => name.split(".").slice(0, depth).join(".");
    for (const frame of frames) names.add(prefix(frame.name));
    if (best && names.size > (best.count < FEW ? MANY : GROUPS)) break;
    best = { prefix, count: names.size };
  }
  const groups = [];
  const colours = new Map();
  for (const frame of frames) {
    const name = best.prefix(frame.name);
    const last = groups[groups.length - 1];
    if (last && last.name === name) {
      last.end = frame.index;
      continue;
    }
    if (!colours.has(name)) colours.set(name, colours.size);
    groups.push({ name, start: frame.index, end: frame.index, colour: colours.get(name) });
  }
  return groups;
}

/** The lowest and highest magnitude of all sheets, so that they can be compared. */
function extent() {
  let low = Infinity;
  let lowestHigh = Infinity;
  let high = 0;
  for (const sheet of DATA.sheets)
    for (const [side, rows] of sheet.sides.entries())
      for (const [at, row] of rows.entries()) {
        if (row.high === null || !Number.isFinite(row.high.value)) continue;
        const [least, largest] = [row.low.value, row.high.value];
        if (least > 0) low = Math.min(low, least);
        if (largest > 0) lowestHigh = Math.min(lowestHigh, largest);
        if (largest > high && !sheet.masks[side].has(at)) high = largest;
      }
  low = Math.max(low, Math.min(FLOOR, lowestHigh));
  return [Number.isFinite(low) ? low : 1e-3, high || 1];
}

class Chart {
  constructor(host, tip, onSelect, onDraw) {
    Object.assign(this, { host, tip, onSelect, onDraw, at: 0, chosen: null, cause: null, limits: new Map(), smallest: SIDES.length === 1 });
    this.extent = extent();
    this.used = new Set(DATA.used);
    host.addEventListener("keydown", (event) => this.key(event));
    host.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    new ResizeObserver(() => this.resize()).observe(host);
  }

  /** Show other frames; where they are as many, what is zoomed stays zoomed. */
  show(frames, cause = null) {
    if (this.frames?.length !== frames.length) this.view = [-0.5, Math.max(frames.length, 2) - 0.5];
    this.frames = frames;
    this.cause = frames[cause ?? -1] ?? null;
    this.at = Math.min(this.at, Math.max(frames.length - 1, 0));
    this.groups = groupsOf(frames);
    this.draw();
  }

  draw() {
    this.plot?.destroy();
    this.palette = isDark() ? PALETTE.dark : PALETTE.light;
    const axis = { stroke: style("--text"), grid: { stroke: style("--grid"), width: 1 }, ticks: { stroke: style("--line") } };
    const line = { width: 2 };
    const colour = (side) => (SIDES.length > 1 ? style(side ? "--b" : "--a") : (plot) => this.byModule(plot));
    const series = [{}];
    const bands = [];
    SIDES.forEach((_, side) => {
      const at = series.length;
      const points = { show: (plot, i, from, to) => to - from < 150, size: 5, fill: colour(side), stroke: colour(side) };
      const dash = side ? [8, 4] : undefined;
      series.push({ ...line, stroke: colour(side), points, dash });
      series.push({ ...line, width: 1, stroke: colour(side), dash: side ? [2, 4] : undefined, points: { show: false }, show: this.smallest });
      series.push({ paths: () => null, points: { show: true, size: 7, width: 1.5, fill: style("--back"), stroke: style("--bad") } });
      if (SIDES.length === 1 && this.smallest) bands.push({ series: [at, at + 1], fill: isDark() ? "#ffffff0d" : "#0000000a" });
    });
    const narrow = (this.wasNarrow = this.isNarrow());
    this.plot = new uPlot({
      width: this.host.clientWidth || 800,
      height: this.host.clientHeight || 420,
      legend: { show: false },
      padding: [30, narrow ? 8 : 104, 0, 0],
      cursor: { y: false, drag: { x: true, y: false, dist: 4 }, points: { size: 8 } },
      scales: {
        x: { time: false, range: (plot, low, high) => this.across(low, high), min: this.view[0], max: this.view[1] },
        y: { range: () => this.upAndDown() },
      },
      axes: [
        { ...axis, ...named("operation, in order of execution"), size: 40, gap: RIBBON + 6, ticks: { show: false }, values: (plot, at) => at.map((x) => (Number.isInteger(x) ? x : "")) },
        { ...axis, ...named("magnitude"), size: narrow ? 44 : 58, incrs: [1, 2, 3, 4, 5, 10, 20, 50, 100], values: (plot, at) => at.map((x) => `1e${x}`) },
      ],
      series,
      bands,
      hooks: {
        drawClear: [(plot) => this.drawModules(plot)],
        draw: [(plot) => this.drawLimits(plot), (plot) => this.drawCause(plot), () => this.onDraw()],
        setCursor: [(plot) => this.hover(plot)],
      },
    }, this.values(), this.host);
    this.plot.over.addEventListener("click", () => this.click());
    this.plot.over.addEventListener("mousedown", (event) => { this.pressed = event.clientX; });
    this.plot.over.addEventListener("mouseup", (event) => { this.dragged = Math.abs(event.clientX - this.pressed) > 4; });
    this.plot.over.addEventListener("mouseleave", () => { this.tip.hidden = true; });
    this.describe();
  }

  isNarrow() {
    return (this.host.clientWidth || 800) < NARROW;
  }

  values() {
    const [low, high] = this.upAndDown();
    // A gap, null, where there is an inf or a NaN; where nothing was measured, undefined, none.
    const inside = (x, bad) =>
      bad ? null : x === null ? undefined : x.value > 0 ? Math.min(Math.max(Math.log10(x.value), low), high) : low;
    const columns = [this.frames.map((frame) => frame.index)];
    SIDES.forEach((_, side) => {
      const all = this.frames.map((frame) => frame.ranges[side]);
      columns.push(
        all.map((it) => inside(it.high, it.bad)),
        all.map((it) => inside(it.low, it.bad && it.low === null)),
        all.map((it) => (it.bad ? high - 0.1 : null)),
      );
    });
    return columns;
  }

  /** Called by uPlot for each new range: by dragging, by a double click, and by zoomTo. */
  across(low, high) {
    const end = Math.max(this.frames.length, 2) - 0.5;
    this.view = [Math.max(low ?? -0.5, -0.5), Math.min(high ?? end, end)];
    return this.view;
  }

  upAndDown() {
    let [low, high] = this.extent;
    for (const [name, on] of this.limits) // of what nobody computes in, what lies near is enough
      if (on && this.used.has(name)) high = Math.max(high, DATA.formats[name][0]);
    return [Math.floor(Math.log10(low)), Math.floor(Math.log10(high)) + 1];
  }

  byModule(plot) {
    const { left, width } = plot.bbox;
    if (!width) return this.palette[0];
    const gradient = plot.ctx.createLinearGradient(left, 0, left + width, 0);
    const { min, max } = plot.scales.x;
    const at = (x) => Math.min(Math.max((x - min) / (max - min), 0), 1);
    for (const { start, end, colour } of this.groups) {
      if (end + 0.5 < min || start - 0.5 > max) continue;
      const paint = this.palette[colour % this.palette.length];
      gradient.addColorStop(at(start - 0.5), paint);
      gradient.addColorStop(at(end + 0.5), paint);
    }
    return gradient;
  }

  /** Draw around what uPlot draws: in its coordinates, with small text. */
  paint(plot, what) {
    const { ctx } = plot;
    ctx.save();
    ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
    ctx.textBaseline = "middle";
    ctx.textAlign = "left";
    ctx.lineWidth = devicePixelRatio;
    what(ctx, plot.bbox, devicePixelRatio);
    ctx.restore();
  }

  drawModules(plot) {
    this.paint(plot, (ctx, { left, top, width, height }, ratio) => {
      for (const { name, start, end, colour } of this.groups) {
        const from = Math.max(plot.valToPos(start - 0.5, "x", true), left);
        const to = Math.min(plot.valToPos(end + 0.5, "x", true), left + width);
        if (to <= from) continue;
        ctx.fillStyle = this.palette[colour % this.palette.length];
        ctx.fillRect(from, top + height + 2 * ratio, Math.max(to - from - ratio, 1), RIBBON * ratio);
        const parts = name.split(".");
        const label = parts.map((_, i) => parts.slice(i).join(".")).find(
          (text) => !/^\d+$/.test(text) && ctx.measureText(text).width < to - from - 6 * ratio,
        );
        if (!label) continue;
        ctx.fillStyle = isDark() ? "#14171b" : "#ffffff";
        ctx.fillText(label, from + 3 * ratio, top + height + (2 + RIBBON / 2) * ratio);
      }
    });
  }

  drawLimits(plot) {
    this.paint(plot, (ctx, { left, top, width, height }, ratio) => {
      ctx.strokeStyle = ctx.fillStyle = style("--limit");
      const labels = [];
      const inside = this.isNarrow(); // where there is room for those alone that the model uses
      for (const [name, on] of this.limits) {
        if (!on) continue;
        DATA.formats[name].forEach((value, i) => {
          const y = plot.valToPos(Math.log10(value), "y", true);
          if (y > top + height || (inside && (y < top || !this.used.has(name)))) return;
          const short = name.replace("float8_", "").replace("float", "fp").replace("bfp", "bf");
          labels.push([Math.max(y, top), `${short} ${i ? "normal" : "max"}${y < top ? " \u2191" : ""}`]);
          if (y < top) return;
          ctx.setLineDash((i ? [1, 4] : this.used.has(name) ? [6, 4] : [2, 6]).map((x) => x * ratio));
          ctx.beginPath();
          ctx.moveTo(left, y);
          ctx.lineTo(left + width, y);
          ctx.stroke();
        });
      }
      let free = -Infinity; // labels that would lie on each other move down
      for (const [y, text] of labels.sort(([a], [b]) => a - b)) {
        free = Math.max(inside ? y - 7 * ratio : y, free + 12 * ratio);
        ctx.fillText(text, left + (inside ? 0 : width) + 4 * ratio, free);
      }
    });
  }

  /** The cause stands out: what comes after it is pale, and its name stands above it. */
  drawCause(plot) {
    this.paint(plot, (ctx, { left, top, width, height }, ratio) => {
      const line = (x, colour) => {
        if (x < left || x > left + width) return;
        ctx.strokeStyle = colour;
        ctx.beginPath();
        ctx.moveTo(x, top);
        ctx.lineTo(x, top + height);
        ctx.stroke();
      };
      if (this.chosen !== null && this.chosen !== this.cause?.index)
        line(plot.valToPos(this.chosen, "x", true), style("--text"));
      if (!this.cause) return;
      const x = plot.valToPos(this.cause.index, "x", true);
      if (SIDES.length === 1 && this.cause.bad && x < left + width) {
        const from = Math.max(plot.valToPos(this.cause.index + 0.5, "x", true), left);
        ctx.globalAlpha = 0.72;
        ctx.fillStyle = style("--back");
        ctx.fillRect(from, top - 8 * ratio, left + width - from, height + (10 + RIBBON) * ratio);
        ctx.globalAlpha = 1;
      }
      if (x < left || x > left + width) return;
      line(x, style("--bad"));
      ctx.fillStyle = style("--bad");
      if (this.cause.bad) {
        ctx.beginPath();
        ctx.arc(x, plot.valToPos(this.upAndDown()[1] - 0.1, "y", true), 6 * ratio, 0, 2 * Math.PI);
        ctx.fill();
      }
      ctx.font = `bold ${13 * ratio}px system-ui, sans-serif`;
      const text = called(this.cause);
      const wide = ctx.measureText(text).width;
      ctx.fillText(text, Math.min(Math.max(x - wide / 2, left), left + width - wide), top - 16 * ratio);
    });
  }

  hover(plot) {
    const { idx, left, top } = plot.cursor;
    if (idx === null || idx === undefined || left < 0) {
      this.tip.hidden = true;
      return;
    }
    this.at = idx;
    this.showTip(left, top);
  }

  /** Show the frame under the mouse, or where the keyboard has gone, beside that place. */
  showTip(left, top) {
    this.tip.replaceChildren(...summary(this.frames[this.at]));
    this.tip.hidden = false;
    const box = this.plot.over.getBoundingClientRect();
    const { offsetWidth: wide, offsetHeight: high } = this.tip;
    const right = box.left + left + 16;
    this.tip.style.left = `${right + wide > innerWidth ? Math.max(box.left + left - wide - 16, 4) : right}px`;
    this.tip.style.top = `${Math.min(box.top + Math.max(top, 0) + 12, innerHeight - high - 4)}px`;
  }

  click() {
    if (!this.dragged && this.frames.length) this.onSelect(this.frames[this.at]);
  }

  select(index) {
    this.at = this.chosen = index;
    this.uncover(index);
    this.plot.redraw(false);
  }

  /** Move what is zoomed to where it shows a frame. */
  uncover(index) {
    const [low, high] = this.view;
    if (index < low || index > high) this.zoomTo(index - (high - low) / 2, index + (high - low) / 2);
  }

  zoomTo(low, high) {
    const end = Math.max(this.frames.length, 2) - 0.5;
    const width = Math.min(Math.max(high - low, 4), end + 0.5);
    const from = Math.min(Math.max(low, -0.5), end - width);
    this.plot.setScale("x", { min: from, max: from + width });
  }

  /** Show the way to the cause, and a little of what came of it. */
  zoomToCause() {
    if (!this.cause) return;
    if (this.frames.length <= ALL) this.zoomTo(-0.5, this.frames.length - 0.5);
    else this.zoomTo(this.cause.index - BEFORE - 0.5, this.cause.index + AFTER + 0.5);
  }

  zoomBy(factor, centre) {
    const [min, max] = this.view;
    const middle = centre ?? (this.at >= min && this.at <= max ? this.at : (min + max) / 2);
    this.zoomTo(middle - (middle - min) * factor, middle + (max - middle) * factor);
  }

  wheel(event) {
    if (!event.ctrlKey && !event.metaKey) return; // else the page could not be scrolled over it
    event.preventDefault();
    const x = event.clientX - this.plot.over.getBoundingClientRect().left;
    this.zoomBy(event.deltaY > 0 ? 1.25 : 0.8, this.plot.posToVal(x, "x"));
  }

  key(event) {
    const last = this.frames.length - 1;
    if (last < 0) return;
    const moves = {
      ArrowLeft: this.at - 1, ArrowRight: this.at + 1, Home: 0, End: last, PageUp: this.at - 10, PageDown: this.at + 10,
    };
    if (event.key in moves) this.moveTo(Math.min(Math.max(moves[event.key], 0), last));
    else if (event.key === "Enter" || event.key === " ") this.onSelect(this.frames[this.at]);
    else if (event.key === "+" || event.key === "=") this.zoomBy(0.5);
    else if (event.key === "-") this.zoomBy(2);
    else if (event.key === "c" && !event.ctrlKey && !event.metaKey) this.zoomToCause();
    else if (event.key === "Escape") this.zoomTo(-0.5, last + 0.5);
    else return;
    event.preventDefault();
  }

  moveTo(index) {
    this.at = index; // frames may lie closer than pixels: the cursor would not tell them apart
    this.uncover(index);
    queueMicrotask(() => { // when the new range is in force
      const left = this.plot.valToPos(index, "x");
      this.plot.setCursor({ left, top: 20 }, false);
      this.showTip(left, 20);
    });
    this.host.setAttribute("aria-label", `${this.described} Now at ${spoken(this.frames[index])}`);
  }

  describe() {
    const bad = this.frames.filter((frame) => frame.bad);
    const where = bad.length ? `${bad.length} hold inf or NaN, the first is ${spoken(bad[0])}` : "none holds inf or NaN.";
    const cause = this.cause ? ` The chart opens on ${this.cause.kind}, frame ${this.cause.index}.` : "";
    this.described = `Smallest and largest magnitude that each of ${this.frames.length} frames made; ${where}${cause}`;
    this.host.setAttribute("aria-label", this.described);
  }

  resize() {
    if (!this.plot) return;
    if (this.isNarrow() !== this.wasNarrow) this.draw(); // its axes have other sizes
    else this.plot.setSize({ width: this.host.clientWidth, height: this.host.clientHeight });
  }
}

/** An axis with a title. */
const named = (label) => ({ label, labelSize: 18, labelGap: 0, labelFont: "12px system-ui, sans-serif" });

/** What is said of the frame that is to blame, in the chart. */
function called(frame) {
  if (SIDES.length > 1) return `${frame.kind}: here they part`;
  if (!frame.bad) return frame.kind;
  const last = frame.rows.at(-1)?.sides[0].high?.text;
  return `${frame.kind} made ${last === "nan" ? "NaN" : "inf"}`;
}

/** A frame in one sentence. */
function spoken(frame) {
  const ranges = frame.ranges.map((it, side) => {
    const range = it.high === null ? "nothing finite" : `${it.low.text} to ${it.high.text}`;
    return `${SIDES[side]} made ${range}${it.bad ? ", with inf or NaN" : ""}`.trim();
  });
  return `frame ${frame.index}, ${frame.title}, ${ranges.join("; ")}.`;
}

/** A frame in a few lines. */
function summary(frame) {
  const parts = [element("strong", {}, frame.title || frame.kind)];
  if (frame.note) parts.push(element("div", { class: "place" }, frame.note));
  if (frame.source) {
    parts.push(element("div", { class: "place mono" }, `${place(frame.source)}: ${frame.source.code}`));
  }
  const table = element("table", {}, element("thead", {}, headOf()), element("tbody", {}, ...rowsOf(frame)));
  return [...parts, table];
}
