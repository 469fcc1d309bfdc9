// What happens when somebody chooses a frame, a batch, a limit or a theme.

const select = (frame) => {
  chart.select(frame.index);
  table.select(frame.index);
  describe(frame);
};

/** A frame with its source line and its numbers, below the chart. */
function describe(frame) {
  const code = [];
  if (frame.source) {
    const where = `${frame.source.file}:${frame.source.line}`;
    const copy = element("button", { type: "button" }, "Copy");
    copy.hidden = !navigator.clipboard; // where the browser does not trust files
    copy.addEventListener("click", async () => {
      await navigator.clipboard.writeText(where);
      copy.textContent = "Copied";
    });
    code.push(element("pre", { id: "code" }, frame.source.code), element("p", { class: "place" }, where, " ", copy));
  }
  const rows = element("table", {}, element("thead", {}, headOf()), element("tbody", {}, ...rowsOf(frame)));
  const note = frame.note ? [element("p", { class: "place" }, frame.note)] : [];
  $("selected").replaceChildren(element("strong", {}, frame.title || frame.kind), ...note, ...code, rows);
  $("selected").hidden = false;
}

const chart = new Chart($("chart"), $("tip"), select, () => batches?.draw());
const table = new Table(select);
let batches = null; // draws below the chart, from when there is one
const tree = new Tree($("tree"), select, (module) => {
  chart.zoomTo(module.first - 0.5, module.last + 0.5);
  table.search(module.name);
});

function showSheet(number) {
  const sheet = DATA.sheets[number];
  const frames = framesOf(number);
  chart.show(frames, sheet.cause);
  $("zoom-cause").hidden = sheet.cause === null;
  batches?.draw(number);
  tree.show(frames);
  table.show(frames);
  const state = stateOf(sheet, frames);
  $("batch-name").textContent = sheet.label;
  $("batch-state").textContent = `${number + 1} of ${DATA.sheets.length}: ${state}`;
  $("batch").setAttribute("aria-valuetext", `batch ${sheet.label}, ${state}`);
  const several = DATA.sheets.length > 1;
  $("of-batch").hidden = !several || !sheet.verdict.length || number === DATA.opens; // the headline says it
  const [first, ...more] = sheet.verdict;
  const lines = more.map((line) => element(/^ {2}(fix|or): /.test(line) ? "strong" : "span", {}, `${line}\n`));
  $("of-batch").replaceChildren(element("p", {}, first || ""), element("pre", {}, ...lines));
  if (chart.chosen !== null && chart.chosen < frames.length) describe(frames[chart.chosen]);
}

/** What one looks for in a batch, in a few words. */
function stateOf(sheet, frames) {
  if (SIDES.length > 1) return sheet.marked.length ? `${sheet.marked.length} frames differ` : "nothing differs";
  if (sheet.verdict.length) return sheet.cause === null ? "something was found" : called(frames[sheet.cause]);
  const bad = frames.filter((frame) => frame.bad).length;
  return bad ? `${bad} frame${bad > 1 ? "s hold" : " holds"} inf or NaN` : "all numbers are finite";
}

function offerLines() {
  const offer = (id, label, on, change) => {
    const box = element("input", { type: "checkbox", id });
    box.checked = on;
    box.addEventListener("change", () => {
      change(box.checked);
      chart.draw();
    });
    $("lines").append(element("label", {}, box, ` ${label}`));
  };
  offer("smallest", "abs min", chart.smallest, (on) => { chart.smallest = on; });
  for (const name of ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]) {
    chart.limits.set(name, true);
    offer(`limit-${name}`, name, true, (on) => chart.limits.set(name, on));
  }
}

function offerBatches() {
  const count = DATA.sheets.length;
  $("batches").hidden = count < 2;
  $("batch").max = count - 1;
  $("batch").value = DATA.opens;
  $("batch").addEventListener("input", () => showSheet(Number($("batch").value)));
}

function explainLines() {
  const key = $("chart-key");
  const swatch = (colour) => element("span", { class: "swatch", style: `background: var(${colour})` });
  if (SIDES.length > 1)
    key.append(swatch("--a"), `A: ${DATA.sides[0]}  `, swatch("--b"), `B, dashed: ${DATA.sides[1]}. `);
  key.append(
    `Thick: largest magnitude${SIDES.length > 1 ? "" : ", coloured by module"}; thin: smallest. `,
    swatch("--bad"), "inf or NaN. Zeros, and what is too small for the axis, lie on the lower edge. ",
    SIDES.length === 1 && chart.cause?.bad ? "The filled circle is the cause; what comes after it is pale." : "",
  );
}

const marks = SIDES.length > 1 ? "what differs" : "what is blamed";
$("kind").querySelector("[value=marked]").textContent = marks;
$("kind").querySelector("[value=marked]").hidden = !DATA.sheets.some((sheet) => sheet.marked.length);
document.querySelector("main").hidden = false;
$("zoom-in").addEventListener("click", () => chart.zoomBy(0.5));
$("zoom-out").addEventListener("click", () => chart.zoomBy(2));
$("zoom-all").addEventListener("click", () => chart.zoomTo(-0.5, chart.frames.length - 0.5));
$("zoom-cause").addEventListener("click", () => chart.zoomToCause());
$("theme").addEventListener("click", () => {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  chart.draw();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => chart.draw());
offerLines();
offerBatches();
showSheet(DATA.opens);
explainLines();
batches = new Batches($("by-batch"), chart, (number, index) => {
  $("batch").value = number;
  showSheet(number);
  select(chart.frames[index]);
});
requestAnimationFrame(() => batches.draw(DATA.opens)); // when the chart has its size
if (chart.cause) {
  select(chart.cause);
  chart.zoomToCause();
}
