// What happens when somebody chooses a series, an event or a theme.

const BEFORE = 160, AFTER = 96; // steps around an event

const view = new View();
const loss = new Lines($("loss"), view, false);
const line = new Lines($("series"), view, true);
let map = null;

function select(index, column) {
  const row = ROWS[index];
  $("selected").hidden = false;
  $("series-name").textContent = row.name;
  const [first, middle, last, furthest] = row.texts;
  $("series-place").textContent = `${row.source ? `${row.source}: ` : ""}first ${first}, median ${middle}, last ${last}; ${furthest}`;
  $("series").setAttribute("aria-label", `${row.name} by steps: ${$("series-place").textContent}`);
  line.cursor = column ?? null;
  line.show([row]);
  explain(row);
  table.select(index);
}

/** What the colours of a line mean. */
function explain(row) {
  const swatch = (colour) => element("span", { class: "swatch", style: `background: var(${colour})` });
  const parts = [swatch("--a"), row.hasLow ? "largest magnitude " : `${row.name.split(" ", 1)[0]} `];
  if (row.hasLow) parts.push(swatch("--low"), "smallest ");
  parts.push(swatch("--band"), "its band: three deviations around the median of the 64 steps before");
  $("series-key").replaceChildren(...parts);
}

function explainMap() {
  const swatch = (colour, alpha) => element("span", { class: "swatch", style: `background: var(${colour}); opacity: ${alpha}` });
  const edges = DATA.edges;
  $("key").replaceChildren(
    "Each row is a series, in order of execution from top to bottom. ",
    swatch("--above", 0.3), swatch("--above", 0.62), swatch("--above", 1), "above its band ",
    swatch("--below", 0.3), swatch("--below", 0.62), swatch("--below", 1), "below it ",
    `(pale from ${edges[0]} deviations on, strongest from ${edges.at(-1)}) `,
    swatch("--infinite", 1), "inf or NaN. ",
    EVENTS.some((event) => event.row !== null) ? "A ring is around what changed first. " : "",
    RESUMED.length ? "At a dotted line the run was resumed. " : "",
    "A click shows a series.",
  );
}

/** Ranks to choose from. Each is a page of its own, which begins anew. */
function offerRanks() {
  $("meta").textContent = DATA.meta;
  if (RANKS.length < 2) return;
  $("rank").append(...[...RANKS].sort((a, b) => a - b).map((rank) => element("option", { value: rank }, rank)));
  $("rank").value = RANK;
  $("rank").hidden = document.querySelector("label[for=rank]").hidden = false;
  $("rank").addEventListener("input", () => { location.hash = `rank=${$("rank").value}`; });
  addEventListener("hashchange", () => { if (location.hash.startsWith("#rank=")) location.reload(); });
}

let shown = -1; // index of the event that was shown last
function nextEvent() {
  if (!EVENTS.length) return;
  shown = (shown + 1) % EVENTS.length;
  const { step, row } = EVENTS[shown];
  view.set(step - BEFORE, step + AFTER, 0, ROWS.length);
  if (row !== null) map.select(row, columnOf(step));
}

function redraw() {
  loss.draw();
  line.draw();
  map?.resize();
}

const table = new Table((index) => {
  map?.select(index);
  $("selected").scrollIntoView({ block: "nearest" });
});

async function begin() {
  document.querySelector("main").hidden = false;
  offerRanks();
  const losses = ROWS.filter((row) => row.kind === "loss");
  $("loss").hidden = !losses.length;
  if (losses.length) {
    $("loss").setAttribute("aria-label", losses.map((row) => `${row.name}: first ${row.texts[0]}, last ${row.texts[2]}`).join("; "));
    loss.show(losses.slice(0, 4));
  }
  explainMap();
  const levels = new Int8Array((await inflated(DATA.levels)).buffer);
  map = new SeriesMap($("map"), $("tip"), view, levels, select, (column) => {
    if (loss.cursor === column) return;
    loss.cursor = line.cursor = column;
    loss.draw();
    line.draw();
  });
  $("zoom-event").hidden = !EVENTS.length;
  $("zoom-event").textContent = EVENTS.length > 1 ? "Next event" : "Event";
  $("zoom-event").addEventListener("click", nextEvent);
  $("zoom-in").addEventListener("click", () => view.zoom(0.5));
  $("zoom-out").addEventListener("click", () => view.zoom(2));
  $("zoom-all").addEventListener("click", () => view.whole());
  $("theme").addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    redraw();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  new ResizeObserver(redraw).observe($("run"));
  map.resize();
  nextEvent();
  $("map").dataset.ready = "yes";
}

begin();
