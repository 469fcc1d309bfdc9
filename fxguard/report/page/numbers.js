// What the page is about: batches ("sheets"), their frames, and their numbers. What a number means
// was decided in Python, report/sheet.py; here it is looked up.

const DATA = JSON.parse(document.getElementById("data").textContent);
const SIDES = DATA.sides ? ["A", "B"] : [""];
const WORDS = { inf: Infinity, "-inf": -Infinity, nan: NaN };

/** A magnitude as it is shown, and as it is drawn; 1.80e+308 would be infinite. */
const magnitude = (text) => ({ text, value: WORDS[text] ?? Math.min(Number(text), Number.MAX_VALUE) });

/** A row: smallest and largest magnitude, or the note that stands in their place. */
const range = (row) =>
  typeof row === "string"
    ? { note: row, low: null, high: null }
    : { note: "", low: magnitude(row[0]), high: magnitude(row[1]) };

/** Rows of which a number refers to an equal one: 0 to the same place before, else so many rows back. */
function resolve(rows, before) {
  const resolved = [];
  rows.forEach((row, i) => resolved.push(typeof row !== "number" ? range(row) : row ? resolved[i - row] : before[i]));
  return resolved;
}

DATA.sheets.forEach((sheet, number) => {
  sheet.sides = [resolve(sheet.rows, number ? DATA.sheets[number - 1].sides[0] : [])];
  if (sheet.other) sheet.sides.push(resolve(sheet.other, []));
  sheet.masks = [new Set(sheet.masks), new Set(sheet.other_masks)];
});

const $ = (id) => document.getElementById(id);

/** A new element. Text is never read as HTML. */
function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** Module and kind; the bare kind for the root module. */
const titleOf = (name, kind) => `${name} ${kind}`.trim();

/** The frames of a sheet, in order of execution, with what chart, tree and table ask about them. */
function framesOf(number) {
  const sheet = DATA.sheets[number];
  const plan = DATA.plans[sheet.plan];
  const marked = new Set(sheet.marked);
  let next = 0;
  return plan.frames.map(([name, kind, isOp, place, labels, dtypes], index) => {
    const source = place === null ? null : plan.sources[place];
    const rows = labels.map((label, i) => {
      const at = next++;
      const sides = sheet.sides.map((all, side) => (sheet.masks[side].has(at) ? { ...all[at], mask: true } : all[at]));
      return { label, dtype: plan.dtypes[dtypes[i]], sides, difference: sheet.differences?.[at] ?? "" };
    });
    const bits = sheet.headroom[index];
    return {
      index, name, kind, isOp: Boolean(isOp), rows,
      title: titleOf(name, kind),
      source: source && { file: source[0], line: source[1], code: source[2] },
      marked: marked.has(index),
      note: sheet.notes[index] || "",
      bad: bits === "bad",
      headroom: bits === "bad" ? -Infinity : bits ?? Infinity,
      ranges: SIDES.map((_, side) => drawnRange(plan.outputs[index].map((i) => rows[i].sides[side]))),
    };
  });
}

/** What the chart draws of a frame: the range over its outputs, and whether it goes on to infinity. */
function drawnRange(outputs) {
  const drawn = { low: null, high: null, bad: false };
  for (const { low, high, mask } of outputs) {
    if (high === null) continue;
    const finite = Number.isFinite(high.value);
    if (!finite && !mask) drawn.bad = true;
    if (!finite && !Number.isFinite(low.value)) continue;
    if (drawn.low === null || low.value < drawn.low.value) drawn.low = low;
    if (finite && (drawn.high === null || high.value > drawn.high.value)) drawn.high = high;
  }
  return drawn;
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
        cells.push(element("td", { class: Number.isFinite(x.value) || side.mask ? "number" : "number bad" }, x.text));
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
