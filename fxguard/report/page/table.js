// The frames as a table with search, a page at a time.

const PAGE = 100; // frames

class Table {
  constructor(onSelect) {
    Object.assign(this, { onSelect, page: 0, chosen: null });
    this.table = $("table");
    this.table.tHead.append(headOf());
    $("search").addEventListener("input", () => this.filter());
    $("kind").addEventListener("change", () => this.filter());
    $("previous").addEventListener("click", () => this.turn(this.page - 1));
    $("next").addEventListener("click", () => this.turn(this.page + 1));
  }

  show(frames) {
    this.frames = frames;
    this.words = frames.map(({ title, source, rows }) =>
      [title, source ? `${source.file}:${source.line} ${source.code}` : "", ...rows.map((row) => row.label)].join(" ").toLowerCase(),
    );
    this.filter(this.page);
  }

  filter(page = 0) {
    const wanted = $("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    const kinds = {
      all: () => true, op: (it) => it.isOp, module: (it) => !it.isOp, bad: (it) => it.bad, marked: (it) => it.marked,
    };
    const kind = kinds[$("kind").value];
    this.matching = this.frames.filter(
      (frame, i) => kind(frame) && wanted.every((word) => this.words[i].includes(word)),
    );
    const of = this.matching.length === this.frames.length ? "" : ` of ${this.frames.length}`;
    $("count").textContent = `${this.matching.length}${of} frames`;
    this.turn(page);
  }

  turn(page) {
    const last = Math.max(Math.ceil(this.matching.length / PAGE) - 1, 0);
    this.page = Math.min(Math.max(page, 0), last);
    const from = this.page * PAGE;
    const part = this.matching.slice(from, from + PAGE);
    for (const body of [...this.table.tBodies]) body.remove();
    this.table.append(...part.map((frame) => this.body(frame)));
    $("page-name").textContent = part.length ? `${from + 1} to ${from + part.length} of ${this.matching.length}` : "no frame";
    $("previous").disabled = this.page === 0;
    $("next").disabled = this.page === last;
  }

  body(frame) {
    const button = element("button", { type: "button" }, `${frame.index}  ${frame.title || frame.kind}`);
    button.addEventListener("click", () => this.onSelect(frame));
    const title = element("th", { scope: "rowgroup", colspan: this.table.tHead.rows[0].cells.length }, button);
    // The note of the cause stands with the selected frame, and in the verdict.
    if (frame.note && frame.index !== chart.cause?.index) title.append(element("span", { class: "place" }, frame.note));
    if (frame.source) {
      const { source } = frame;
      title.append(element("span", { class: "place" }, `${place(source)}: ${source.code}`));
    }
    const body = element("tbody", { "data-index": frame.index }, element("tr", {}, title), ...rowsOf(frame));
    body.classList.toggle("marked", frame.marked);
    body.classList.toggle("chosen", frame.index === this.chosen);
    return body;
  }

  /** Turn to a frame; what hides it is cleared. */
  select(index) {
    this.chosen = index;
    let at = this.matching.findIndex((frame) => frame.index === index);
    if (at < 0) {
      $("search").value = "";
      $("kind").value = "all";
      this.filter();
      at = index;
    }
    this.turn(Math.floor(at / PAGE));
    this.reveal();
  }

  /** Begin with the frame that is chosen: what led there is above it. */
  reveal() {
    const chosen = this.table.querySelector("tbody.chosen");
    if (!chosen) return;
    const scroll = this.table.parentElement;
    const head = this.table.tHead.offsetHeight;
    scroll.scrollTop += chosen.getBoundingClientRect().top - scroll.getBoundingClientRect().top - head;
  }

  search(text) {
    $("search").value = text;
    this.filter();
  }
}
