// The series as a table with search, a page at a time.

const PAGE = 100; // series

class Table {
  constructor(onSelect) {
    Object.assign(this, { onSelect, page: 0, chosen: null, matching: [] });
    this.words = ROWS.map((row) => `${row.name} ${row.kind} ${row.source} ${row.group}`.toLowerCase());
    for (const kind of new Set(ROWS.map((row) => row.kind))) $("kind").append(element("option", { value: kind }, kind));
    for (const id of ["search", "kind", "order"]) $(id).addEventListener("input", () => this.filter());
    $("previous").addEventListener("click", () => this.turn(this.page - 1));
    $("next").addEventListener("click", () => this.turn(this.page + 1));
    this.filter();
  }

  filter() {
    const wanted = $("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    const kind = $("kind").value;
    this.matching = ROWS.filter(
      (row, i) =>
        (!kind || (kind === "left" ? row.furthest >= DATA.edges[3] : row.kind === kind)) &&
        wanted.every((word) => this.words[i].includes(word)),
    );
    if ($("order").value === "furthest") this.matching.sort((a, b) => b.furthest - a.furthest);
    const of = this.matching.length === ROWS.length ? "" : ` of ${ROWS.length}`;
    $("count").textContent = `${this.matching.length}${of} series`;
    this.turn(0);
  }

  turn(page) {
    const last = Math.max(Math.ceil(this.matching.length / PAGE) - 1, 0);
    this.page = Math.min(Math.max(page, 0), last);
    const from = this.page * PAGE, part = this.matching.slice(from, from + PAGE);
    $("table").tBodies[0].replaceChildren(...part.map((row) => this.line(row)));
    $("page-name").textContent = part.length ? `${from + 1} to ${from + part.length} of ${this.matching.length}` : "no series";
    $("previous").disabled = this.page === 0;
    $("next").disabled = this.page === last;
  }

  line(row) {
    const button = element("button", { type: "button" }, row.name);
    button.addEventListener("click", () => this.onSelect(row.index));
    const cells = row.texts.map((each, i) => element("td", i < 3 ? { class: "number" } : {}, each));
    const line = element("tr", { "data-index": row.index }, element("th", { scope: "row" }, button), ...cells);
    line.classList.toggle("chosen", row.index === this.chosen);
    line.classList.toggle("left", row.furthest >= DATA.edges[3]);
    return line;
  }

  select(index) {
    this.chosen = index;
    for (const line of $("table").tBodies[0].rows) line.classList.toggle("chosen", Number(line.dataset.index) === index);
  }
}
