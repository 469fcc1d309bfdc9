// Series as lines over the steps: the largest magnitude, the smallest one, and the band.

const TOP = 18, BOTTOM = 8, AXIS = 20;

class Lines {
  constructor(canvas, view, withSteps) {
    Object.assign(this, { sheet: new Sheet(canvas), view, withSteps, rows: [], parts: [], cursor: null });
    view.watchers.push(() => this.draw());
  }

  async show(rows) {
    this.rows = rows;
    const parts = await Promise.all(rows.map((row) => numbersOf(row.index)));
    if (this.rows !== rows) return; // another one was chosen meanwhile
    this.parts = parts;
    this.draw();
  }

  /** For each pixel the columns in it, from one to the one behind the last. */
  pixels() {
    const { sheet, view } = this;
    const found = [];
    let column = columnOf(view.from);
    for (let x = 0; x < sheet.inner; x++) {
      const to = view.from + ((x + 1) / sheet.inner) * (view.to - view.from);
      let end = column;
      while (end < COUNT && BEGIN[end] < to) end++;
      found.push([column, Math.max(end, column)]);
      column = end;
      if (column > 0 && column < COUNT && END[column - 1] > to) column--; // it goes on in the next pixel
    }
    return found;
  }

  draw() {
    const { sheet, view } = this;
    sheet.begin();
    if (!this.parts.length || !sheet.width) return;
    const pixels = this.pixels();
    const [low, high] = this.extent(pixels);
    const bottom = sheet.height - (this.withSteps ? AXIS : BOTTOM);
    const y = (number) => bottom - ((number - low) / (high - low)) * (bottom - TOP);
    this.axis(low, high, y);
    if (this.withSteps) stepAxis(sheet, view, bottom);
    const colours = ["--a", "--b", "--limit", "--healthy"];
    const { ctx } = sheet;
    ctx.save();
    ctx.beginPath();
    ctx.rect(sheet.left, TOP - 8, sheet.inner, bottom - TOP + 9);
    ctx.clip();
    if (this.parts.length === 1) this.band(this.parts[0], pixels, y);
    if (this.parts.length === 1 && this.parts[0].low) this.stroke(this.parts[0].low, pixels, y, style("--low"), low);
    this.parts.forEach((part, i) => this.stroke(part.high, pixels, y, style(colours[i % colours.length]), low));
    ctx.restore();
    sheet.events(view, TOP - 6, bottom);
    this.names(TOP - 10);
    if (this.cursor !== null) {
      const x = sheet.x(view, (BEGIN[this.cursor] + END[this.cursor]) / 2);
      if (x >= sheet.left) sheet.line(x, TOP, x, bottom, style("--faint"));
    }
  }

  /** The names of the events, and where a run was resumed, as far as there is room. */
  names(y) {
    const { sheet, view } = this, { ctx, left, inner } = sheet;
    const taken = [];
    const name = (step, label, colour) => {
      const x = sheet.x(view, step), wide = ctx.measureText(label).width;
      if (x < left || x > left + inner) return;
      const isFree = (at) => !taken.some(([begin, end]) => at < end + 8 && at + wide + 8 > begin);
      const from = [x - 5, x - wide - 2] // to the right of the line, or else to the left
        .map((at) => Math.min(Math.max(at, left), left + inner - wide)).find(isFree);
      if (from === undefined) return;
      taken.push([from, from + wide]);
      ctx.fillStyle = style(colour);
      ctx.fillText(label, from, y);
    };
    for (const { step } of EVENTS) name(step, `\u25bc ${step}`, "--event");
    for (const step of RESUMED) name(step, `resumed ${step}`, "--faint");
  }

  extent(pixels) {
    let low = Infinity, high = -Infinity;
    this.hasZero = false;
    const from = pixels[0][0], to = pixels.at(-1)[1];
    const put = (number) => {
      if (number === MISSING) return;
      if (!this.rows[0].linear && (number <= ZERO || number > MOST)) {
        this.hasZero ||= number <= ZERO;
        return;
      }
      if (number < low) low = number;
      if (number > high) high = number;
    };
    for (const part of this.parts) {
      for (let i = from; i < to; i++) {
        put(part.high[i]);
        if (part.low && this.parts.length === 1) put(part.low[i]);
      }
    }
    if (low > high) [low, high] = [0, 1];
    const least = this.rows[0].linear ? 1 : PER_OCTAVE, more = Math.max((high - low) * 0.06, (least - high + low) / 2);
    return [low - more, high + more];
  }

  axis(low, high, y) {
    const { sheet } = this, row = this.rows[0];
    const from = row.linear ? valueOf(row, low) : 2 ** (low / PER_OCTAVE), to = row.linear ? valueOf(row, high) : 2 ** (high / PER_OCTAVE);
    const most = Math.max(2, Math.floor((y(low) - TOP) / 34));
    let found;
    if (row.linear || to / from < 8) found = ticks(from, to, most);
    else {
      const decades = ticks(Math.log10(from), Math.log10(to), most).filter((x) => Number.isInteger(x)).map((x) => 10 ** x);
      const fine = decades.length > 1 ? decades : [1, 2, 5].flatMap((x) => [-1, 0, 1, 2].map((i) => x * 10 ** (Math.floor(Math.log10(from)) + i)));
      found = fine.filter((x) => x >= from && x <= to).sort((a, b) => a - b);
    }
    sheet.ctx.textAlign = "right";
    if (this.hasZero) { // it has no place on this axis, and lies on its lower edge
      found = found.filter((value) => y(Math.log2(value) * PER_OCTAVE) < y(low) - 12);
      sheet.ctx.fillStyle = style("--faint");
      sheet.ctx.fillText("0", sheet.left - 5, y(low));
    }
    for (const value of found) {
      const number = row.linear ? ((value - row.linear[0]) / (row.linear[1] - row.linear[0])) * LINEAR : Math.log2(value) * PER_OCTAVE;
      const at = Math.round(y(number)) + 0.5;
      sheet.line(sheet.left, at, sheet.left + sheet.inner, at, style("--grid"));
      sheet.ctx.fillStyle = style("--faint");
      sheet.ctx.fillText(short(value), sheet.left - 5, at);
    }
    sheet.ctx.textAlign = "left";
  }

  /** A line through the largest and the smallest number of each pixel; above it what is not finite. */
  stroke(numbers, pixels, y, colour, floor) {
    const { ctx, left } = this.sheet;
    const isLinear = Boolean(this.rows[0].linear);
    ctx.strokeStyle = colour;
    ctx.fillStyle = style("--infinite");
    ctx.lineWidth = 1.3;
    ctx.beginPath();
    let isOn = false, last = null;
    pixels.forEach(([from, to], x) => {
      let low = Infinity, high = -Infinity, isFinite = true;
      for (let i = from; i < to; i++) {
        let number = numbers[i];
        if (number === MISSING) continue;
        if (!isLinear && number > MOST) { isFinite = false; continue; }
        if (!isLinear && number <= ZERO) number = floor;
        if (number < low) low = number;
        if (number > high) high = number;
      }
      if (!isFinite) ctx.fillRect(left + x - 1, TOP - 6, 3, 4);
      if (low > high) {
        if (!isFinite || to - from > 1) isOn = false;
        return;
      }
      // Up or down, whichever begins nearer to where the line is.
      const [first, second] = last !== null && Math.abs(last - high) < Math.abs(last - low) ? [high, low] : [low, high];
      if (isOn) ctx.lineTo(left + x + 0.5, y(first));
      else ctx.moveTo(left + x + 0.5, y(first));
      if (second !== first) ctx.lineTo(left + x + 0.5, y(second));
      else if (!isOn) ctx.lineTo(left + x + 1, y(first));
      [isOn, last] = [true, second];
    });
    ctx.stroke();
    ctx.lineWidth = 1;
  }

  band(part, pixels, y) {
    const { ctx, left } = this.sheet;
    ctx.fillStyle = style("--band");
    let from = null;
    const close = (x) => {
      if (from === null) return;
      ctx.beginPath();
      from.forEach(([at, , to], i) => (i ? ctx.lineTo(at, y(to)) : ctx.moveTo(at, y(to))));
      for (const [at, low] of [...from].reverse()) ctx.lineTo(at, y(low));
      ctx.fill();
      from = null;
    };
    pixels.forEach(([column], x) => {
      const at = Math.min(Math.floor(column / DATA.each), part.from.length - 1);
      if (part.from[at] === MISSING || part.to[at] === MISSING) return close(x);
      (from ??= []).push([left + x, part.from[at], part.to[at]]);
    });
    close(pixels.length);
  }
}

/** A round number beside an axis. */
function short(value) {
  const size = Math.abs(value);
  if (size === 0 || (size >= 1e-3 && size < 1e5)) return String(Number(value.toPrecision(6)));
  return value.toExponential().replace("e+", "e");
}

/** Steps below a drawing. */
function stepAxis(sheet, view, y) {
  sheet.ctx.fillStyle = style("--faint");
  sheet.ctx.textAlign = "center";
  for (const step of ticks(view.from, view.to, Math.max(2, Math.floor(sheet.inner / 70)))) {
    if (!Number.isInteger(step)) continue;
    const x = sheet.x(view, step);
    sheet.line(x, y, x, y + 4, style("--line"));
    sheet.ctx.fillText(String(step), Math.min(Math.max(x, sheet.left + 8), sheet.left + sheet.inner - 12), y + 12);
  }
  sheet.ctx.textAlign = "left";
}
