// The modules as a tree that opens, each with the least headroom inside it.

class Tree {
  constructor(host, onSelect, onShow) {
    Object.assign(this, { host, onSelect, onShow, open: new Set([""]) });
  }

  show(frames) {
    this.root = modulesOf(frames);
    for (const frame of frames.filter((it) => it.marked).slice(0, 1)) this.reveal(frame.name);
    this.host.replaceChildren(this.branch(this.root));
  }

  /** Open everything down to a module. */
  reveal(name) {
    const parts = name.split(".");
    for (let depth = 0; depth <= parts.length; depth++) this.open.add(parts.slice(0, depth).join("."));
  }

  branch(module) {
    const summary = element(
      "summary", {},
      heat(module.headroom),
      module.part, " ", element("span", { class: "kind" }, module.kind),
    );
    const inside = element("div");
    const details = element("details", {}, summary, inside);
    const fill = () => {
      if (inside.hasChildNodes()) return; // a deep model has more modules than anybody opens
      const more = element("button", { type: "button", class: "leaf kind" }, "show in chart and table");
      more.addEventListener("click", () => this.onShow(module));
      inside.append(more, ...module.inside.map((it) => (it.inside ? this.branch(it) : this.leaf(it))));
    };
    details.addEventListener("toggle", () => {
      this.open[details.open ? "add" : "delete"](module.name);
      if (details.open) fill();
    });
    if (this.open.has(module.name)) {
      details.open = true;
      fill();
    }
    return details;
  }

  leaf({ frame }) {
    const button = element("button", { type: "button", class: "leaf" }, heat(frame.headroom), frame.kind);
    button.addEventListener("click", () => this.onSelect(frame));
    return button;
  }
}

/** Nested modules, in order of their first frame. */
function modulesOf(frames) {
  const root = { name: "", part: "model", kind: "", headroom: Infinity, first: 0, last: 0, inside: [], parts: new Map() };
  for (const frame of frames) {
    let module = root;
    const path = frame.name ? frame.name.split(".") : [];
    const around = [root];
    path.forEach((part, depth) => {
      if (!module.parts.has(part)) {
        const child = { name: path.slice(0, depth + 1).join("."), part, kind: "", headroom: Infinity, first: frame.index, inside: [], parts: new Map() };
        module.parts.set(part, child);
        module.inside.push(child);
      }
      module = module.parts.get(part);
      around.push(module);
    });
    for (const each of around) {
      each.last = frame.index;
      each.headroom = Math.min(each.headroom, frame.headroom);
    }
    if (frame.isOp) module.inside.push({ frame });
    else module.kind = frame.kind;
  }
  return root;
}

/** Headroom in bits, with a colour. */
function heat(bits) {
  if (bits === Infinity) return element("span", { class: "heat" }, "");
  const level = bits === -Infinity ? 0 : bits < 2 ? 1 : bits < 5 ? 2 : bits < 10 ? 3 : 4;
  const text = bits === -Infinity ? "inf/NaN" : `${bits.toFixed(1)} bits`;
  return element("span", { class: `heat heat${level}` }, text);
}
