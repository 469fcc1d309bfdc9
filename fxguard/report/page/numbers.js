// What the page is about: batches ("sheets"), their frames, and the numbers as they are shown.

const DATA = JSON.parse(document.getElementById("data").textContent);
const SIDES = DATA.sides ? ["A", "B"] : [""];
const WORDS = { inf: Infinity, nan: NaN };

// A row that is a number refers to an equal one: 0 to the same place of the sheet before, else so
// many rows back.
DATA.sheets.forEach((sheet, number) => {
  const { rows } = sheet;
  for (let i = 0; i < rows.length; i++)
    if (typeof rows[i] === "number") rows[i] = rows[i] ? rows[i - rows[i]] : DATA.sheets[number - 1].rows[i];
  sheet.masks = [new Set(sheet.masks), new Set(sheet.other_masks)];
});

const $ = (id) => document.getElementById(id);

/** A new element. Text is never read as HTML. */
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** The frames of a sheet, in order of execution, with what chart, tree and table ask about them. */
function framesOf(number) {
  const sheet = DATA.sheets[number];
  const plan = DATA.plans[sheet.plan];
  const marked = new Set(sheet.marked);
  let next = 0;
  const frames = plan.frames.map(([name, kind, isOp, place, labels, dtypes], index) => {
    const source = place === null ? null : plan.sources[place];
    const rows = labels.map((label, i) => {
      const at = next++;
      const sides = (sheet.other ? [sheet.rows[at], sheet.other[at]] : [sheet.rows[at]]).map(range);
      sides.forEach((it, side) => { it.mask = sheet.masks[side].has(at); });
      return { label, dtype: plan.dtypes[dtypes[i]], sides, difference: sheet.differences?.[at] ?? "" };
    });
    return {
      index, name, kind, isOp: Boolean(isOp), rows,
      title: `${name} ${kind}`.trim(),
      source: source && { file: source[0], line: source[1], code: source[2] },
      marked: marked.has(index),
      note: sheet.notes[index] || "",
      made: SIDES.map((_, side) => made(rows, side)),
    };
  });
  for (const frame of frames) {
    frame.bad = frame.made.some((it) => it.bad);
    frame.headroom = Math.min(...frame.made.map((it) => it.headroom));
  }
  return frames;
}

function range(written) {
  if (typeof written === "string") return { note: written, low: null, high: null };
  const [low, high] = written.map((x) => (typeof x === "string" ? WORDS[x] : x));
  return { note: "", low, high };
}

/** What a frame made: the range over its outputs, and how far it is from overflowing. */
function made(rows, side) {
  const found = { low: null, high: null, bad: false, headroom: Infinity };
  for (const row of rows) {
    const { low, high, mask } = row.sides[side];
    if (!row.label.startsWith("output") || high === null) continue;
    if (/^(u?int|bool)/.test(row.dtype)) continue; // limits say nothing of what a router returns
    if (!Number.isFinite(high)) {
      found.bad = true;
      found.headroom = -Infinity;
      if (Number.isNaN(low) || !Number.isFinite(low)) continue;
    }
    found.low = found.low === null ? low : Math.min(found.low, low);
    if (!Number.isFinite(high)) continue;
    found.high = found.high === null ? high : Math.max(found.high, high);
    const dtypes = row.dtype.split(" / ");
    const limit = (DATA.formats[dtypes[side] ?? dtypes[0]] || [null])[0];
    if (limit !== null && high > 0 && high < limit && !mask)
      found.headroom = Math.min(found.headroom, Math.log2(limit / high));
  }
  return found;
}

/** A number as in the report, 4.85e+02: of two that are as near the even one, as Python has it. */
function shown(x, decimals = 2) {
  if (Number.isNaN(x)) return "nan";
  if (x === Infinity) return "inf";
  const [exact, below] = x.toExponential(60).split("e");
  const [kept, rest] = [exact.slice(0, decimals + 2), exact.slice(decimals + 2)];
  const tie = /^50*$/.test(rest) && Number(kept.at(-1)) % 2 === 0;
  const [digits, exponent] = tie ? [kept, below] : x.toExponential(decimals).split("e");
  return `${digits}e${exponent[0]}${exponent.slice(1).padStart(2, "0")}`;
}

const place = (source) => `${source.file.split(/[\\/]/).pop()}:${source.line}`;

/** The rows of a frame as a table's rows. */
function rowsOf(frame) {
  return frame.rows.map((row) => {
    const cells = [element("td", {}, row.label)];
    for (const side of row.sides) {
      if (side.high === null) {
        cells.push(element("td", { class: "number", colspan: 2 }, side.note));
        continue;
      }
      for (const x of [side.low, side.high])
        cells.push(element("td", { class: Number.isFinite(x) ? "number" : "number bad" }, shown(x)));
    }
    if (SIDES.length > 1) cells.push(element("td", { class: "number" }, row.difference));
    cells.push(element("td", {}, row.dtype));
    return element("tr", {}, ...cells);
  });
}

/** The head of such a table. */
function headOf() {
  const numbers = SIDES.flatMap((side) => [`${side} abs min`.trim(), `${side} abs max`.trim()]);
  if (SIDES.length > 1) numbers.push("difference");
  const head = (name, kind) => element("th", { scope: "col", class: kind }, name);
  return element("tr", {}, head("value", ""), ...numbers.map((name) => head(name, "number")), head("dtype", ""));
}
