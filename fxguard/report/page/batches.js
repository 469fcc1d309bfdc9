// Operations by batches, below the chart: which one made other numbers in a batch than in most.

const STRONG = 3; // doublings at which a colour is at its strongest
const ROW = { least: 3, most: 16, all: 220 }; // heights in pixels

class Batches {
  constructor(host, chart, onPick) {
    Object.assign(this, { host, chart, onPick });
    this.shown = "changes" in DATA.sheets[0]; // where all batches have the same frames
    host.hidden = !this.shown;
    if (!this.shown) return;
    this.canvas = host.querySelector("canvas");
    // For each batch and frame: how many doublings it is above what is usual, null for no number.
    this.changes = DATA.sheets.map((sheet) => sheet.changes.map((change) => WORDS[change] ?? change));
    this.canvas.addEventListener("click", (event) => {
      const [batch, frame] = this.under(event);
      if (frame !== null) onPick(batch, frame);
    });
    this.canvas.addEventListener("mousemove", (event) => this.hover(event));
    this.canvas.addEventListener("mouseleave", () => { chart.tip.hidden = true; });
    this.describe();
  }

  /** Draw what the chart shows, below it: the same frames in the same places. */
  draw(selected = this.selected) {
    if (!this.shown) return;
    this.selected = selected;
    const count = DATA.sheets.length;
    const { left, width } = this.chart.plot.bbox; // in pixels of the canvas
    const row = Math.max(ROW.least, Math.min(ROW.most, Math.floor(ROW.all / count)));
    Object.assign(this, { row });
    const ratio = devicePixelRatio;
    this.canvas.width = this.host.clientWidth * ratio;
    this.canvas.height = row * count * ratio;
    this.canvas.style.height = `${row * count}px`;
    const ctx = this.canvas.getContext("2d");
    ctx.imageSmoothingEnabled = false;
    ctx.drawImage(this.picture(Math.max(Math.round(width), 1)), left, 0, width, this.canvas.height);
    ctx.strokeStyle = ctx.fillStyle = style("--text");
    ctx.lineWidth = ratio;
    ctx.strokeRect(left, selected * row * ratio, width, row * ratio);
    ctx.font = `${11 * ratio}px system-ui, sans-serif`;
    ctx.textAlign = "right";
    ctx.textBaseline = "middle";
    const step = Math.ceil(12 / row); // names that can be read below one another
    for (let batch = 0; batch < count; batch += step)
      ctx.fillText(DATA.sheets[batch].label.split(",")[0], left - 6 * ratio, (batch + 0.5) * row * ratio);
  }

  /** A row of pixels for each batch. Where several frames share a pixel, the greatest change shows. */
  picture(width) {
    const image = new OffscreenCanvas(width, this.changes.length);
    const ctx = image.getContext("2d");
    const pixels = ctx.createImageData(width, this.changes.length);
    const [low, high] = this.chart.view;
    const frameAt = (x) => Math.round(low + ((high - low) * x) / width);
    this.changes.forEach((row, batch) => {
      for (let x = 0; x < width; x++) {
        let change = row[frameAt(x + 0.5)] ?? null;
        for (let frame = frameAt(x); frame < frameAt(x + 1); frame++)
          if (Math.abs(row[frame]) > Math.abs(change)) change = row[frame];
        pixels.data.set(tint(change), 4 * (batch * width + x));
      }
    });
    ctx.putImageData(pixels, 0, 0);
    return image;
  }

  /** Batch and frame under the mouse; no frame beside the picture. */
  under(event) {
    const box = this.canvas.getBoundingClientRect();
    const batch = Math.min(Math.max(Math.floor((event.clientY - box.top) / this.row), 0), DATA.sheets.length - 1);
    const frame = Math.round(this.chart.plot.posToVal(event.clientX - this.chart.plot.over.getBoundingClientRect().left, "x"));
    const [low, high] = this.chart.view;
    return [batch, frame >= low && frame <= high && frame >= 0 && frame < this.chart.frames.length ? frame : null];
  }

  hover(event) {
    const [batch, frame] = this.under(event);
    const { tip } = this.chart;
    tip.hidden = frame === null;
    if (frame === null) return;
    const title = element("strong", {}, this.chart.frames[frame].title || this.chart.frames[frame].kind);
    tip.replaceChildren(title, element("div", {}, `batch ${DATA.sheets[batch].label}: ${inWords(this.changes[batch][frame])}`));
    tip.style.left = `${Math.min(event.clientX + 16, innerWidth - tip.offsetWidth - 4)}px`;
    tip.style.top = `${Math.min(event.clientY + 16, innerHeight - tip.offsetHeight - 4)}px`;
  }

  describe() {
    let [most, where] = [0, "no operation made larger numbers in one batch than in most"];
    this.changes.forEach((row, batch) => row.forEach((change, frame) => {
      if (!(change > most)) return;
      const [name, kind] = DATA.plans[DATA.sheets[0].plan].frames[frame];
      [most, where] = [change, `most at ${titleOf(name, kind)} in batch ${DATA.sheets[batch].label}, ${inWords(change)}`];
    }));
    this.canvas.setAttribute("role", "img");
    this.canvas.setAttribute("aria-label", `Operations by batch: ${where}`);
  }
}

/** Red for larger, blue for smaller, nothing for the same. */
function tint(change) {
  if (change === null || Number.isNaN(change)) return [128, 128, 128, 40];
  const strength = Math.min(Math.abs(change) / STRONG, 1);
  return [...(change > 0 ? [200, 40, 30] : [30, 100, 200]), 255 * strength];
}

function inWords(change) {
  if (change === null || Number.isNaN(change)) return "not measured";
  if (change === Infinity) return "infinitely larger than in most batches";
  const times = 2 ** Math.abs(change);
  if (times < 1.005) return "as in most batches";
  return `${times < 100 ? times.toPrecision(3) : times.toExponential(1)} times ${change > 0 ? "larger" : "smaller"} than in most batches`;
}
