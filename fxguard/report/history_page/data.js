// What the page is about: series ("rows") by steps ("columns"), and how far each number is from its
// band. That was decided in Python, history/_page.py; here it is unpacked.

// The ranks of which the page knows; #rank=3 in its address chooses one.
const RANKS = [...document.querySelectorAll("script[data-rank][id^=data]")].map((node) => Number(node.dataset.rank));
const asked = Number(/^#rank=(\d+)$/.exec(location.hash)?.[1] ?? RANKS[0]);
const RANK = RANKS.includes(asked) ? asked : RANKS[0];
const DATA = JSON.parse(document.getElementById(`data-${RANK}`).textContent);
const UNKNOWN = -128, INFINITE = 9; // levels
const MISSING = -200000, ZERO = -102400, MOST = 524288, PER_OCTAVE = 512, LINEAR = 65535; // numbers
const PLANES = 3;

const $ = (id) => document.getElementById(id);

/** A new element. Text is never read as HTML. */
function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

async function inflated(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// The first step of each column, and the first one behind it.
const COUNT = DATA.columns.reduce((sum, [, , count]) => sum + count, 0);
const BEGIN = new Float64Array(COUNT), END = new Float64Array(COUNT);
{
  let at = 0;
  for (const [first, size, count] of DATA.columns)
    for (let i = 0; i < count; i++, at++) {
      BEGIN[at] = first + i * size;
      END[at] = BEGIN[at] + size;
    }
}
const FIRST = BEGIN[0], LAST = END[COUNT - 1];

/** The column of a step: of one that was not measured, the next one. */
function columnOf(step) {
  let low = 0, high = COUNT - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (END[middle] > step) high = middle;
    else low = middle + 1;
  }
  return low;
}

const stepsOf = (column) =>
  END[column] - BEGIN[column] === 1 ? `step ${BEGIN[column]}` : `steps ${BEGIN[column]} to ${END[column] - 1}`;

const ROWS = DATA.rows.map(([name, kind, source, group, texts, linear, hasLow, furthest], index) => ({
  index, name, kind, source, group, texts, linear, hasLow, furthest,
}));
const RESUMED = DATA.resumed;
const EVENTS = DATA.events.map(([step, headline, row]) => ({ step, headline, row }));

/** Neighbours that belong together. */
const GROUPS = [];
for (const row of ROWS) {
  const last = GROUPS.at(-1);
  if (last?.name === row.group) last.end = row.index + 1;
  else GROUPS.push({ name: row.group, start: row.index, end: row.index + 1 });
}

/** The numbers of a row: unpacked when they are first asked for. */
const known = new Map();
let packed = null;
function numbersOf(index) {
  if (!known.has(index)) known.set(index, unpack(index));
  return known.get(index);
}

async function unpack(index) {
  packed ??= JSON.parse($(`numbers-${RANK}`).textContent);
  const bytes = await inflated(packed[index]);
  const count = bytes.length / PLANES;
  const numbers = new Int32Array(count);
  let last = 0;
  for (let i = 0; i < count; i++) {
    const folded = bytes[i] | (bytes[count + i] << 8) | (bytes[2 * count + i] << 16);
    last += (folded >>> 1) ^ -(folded & 1);
    numbers[i] = last;
  }
  const row = ROWS[index], bands = Math.ceil(COUNT / DATA.each);
  const parts = { high: numbers.subarray(0, COUNT) };
  let at = COUNT;
  if (row.hasLow) parts.low = numbers.subarray(at, at += COUNT);
  parts.from = numbers.subarray(at, at += bands);
  parts.to = numbers.subarray(at, at += bands);
  return parts;
}

/** A number of a row as it was measured. */
function valueOf(row, number) {
  if (number === MISSING || number === undefined) return NaN;
  if (row.linear) return row.linear[0] + (number / LINEAR) * (row.linear[1] - row.linear[0]);
  return number <= ZERO ? 0 : number > MOST ? Infinity : 2 ** (number / PER_OCTAVE);
}

/** Three digits, as fxguard prints them. */
function text(value) {
  if (Number.isNaN(value)) return "not measured";
  if (!Number.isFinite(value)) return "inf or NaN";
  if (value === 0) return "0";
  const [digits, power] = value.toExponential(2).split("e");
  if (power < -4 || power >= 3) return `${Number(digits)}e${power < 0 ? "-" : "+"}${String(Math.abs(power)).padStart(2, "0")}`;
  return String(Number(value.toPrecision(3)));
}

/** How far a level says that a number is from its band. */
function distanceText(level) {
  if (level === UNKNOWN) return "too little was measured before";
  if (level === INFINITE) return "inf or NaN";
  if (level === 0) return "in its band";
  const edges = DATA.edges, size = Math.abs(level);
  const side = level > 0 ? "above" : "below";
  return size === edges.length ? `more than ${edges.at(-1)} deviations ${side} its band's middle`
    : `${edges[size - 1]} to ${edges[size]} deviations ${side} its band's middle`;
}
