// The simulated schedule as SVG, with one row for each pipeline rank. The server computes all positions.

import { el, find, show, svg } from "/shared/dom.js";

const WINDOWS = [["step", "whole step"], ["start", "its start"], ["end", "its end"]];
const WORDS = { F: "forward", B: "backward", I: "backward, inputs", W: "backward, weights", M: "forward and backward in turn" };
const LEFT = 58, GAP = 2, LABEL_WIDTH = 13;

export class Timeline {
  #picture = null;
  #box = el("div", { class: "picture" });
  #head = el("p", { class: "bar-head" });
  #legend = el("p", { class: "legend" });
  #more = el("div");
  #buttons;
  window = "step";

  /** ask(): called when the user selects another part of the step, to fetch its picture. */
  constructor(ask) {
    this.#buttons = WINDOWS.map(([value, text]) =>
      el("button", {
        type: "button", text, "aria-pressed": String(value === "step"),
        onclick: () => { this.window = value; this.#press(); ask(); },
      }),
    );
    const choice = el("div", { class: "segments", role: "group", "aria-label": "Part of the step that is shown" }, this.#buttons);
    show(find("timeline"), this.#head, choice, this.#box, this.#legend, this.#more);
    new ResizeObserver(() => this.#picture && this.#draw()).observe(this.#box);
  }

  #press() {
    this.#buttons.forEach((button, i) => button.setAttribute("aria-pressed", String(WINDOWS[i][0] === this.window)));
  }

  update(picture) {
    this.#picture = picture;
    show(this.#head, el("strong", { text: picture.title }), ` · idle ${picture.bubble}`, el("span", { class: "right", text: picture.step }));
    this.#draw();
    this.#box.dataset.window = picture.window;
    const seen = new Set(picture.rows.flatMap((row) => row.pieces.map(([kind, upper]) => `${kind}${upper}`)));
    const entry = (kind, upper, text) => (seen.has(`${kind}${upper}`) ? [svgKey(kind, upper), text] : []);
    show(
      this.#legend, Object.entries(WORDS).flatMap(([kind, text]) => [...entry(kind, 0, text), ...entry(kind, 1, `${text}, second stage`)]),
    );
    show(this.#more, this.#table(picture));
  }

  #draw() {
    const { rows, shown, starts_at: from, ends_at: to, title, bubble } = this.#picture;
    const width = Math.max(this.#box.clientWidth, 280);
    const each = Math.max(7, Math.min(24, Math.floor(340 / rows.length)));
    const height = rows.length * (each + GAP) + 20;
    const across = width - LEFT - 1;
    const label = `${title}; ranks wait ${bubble} of the step; ${shown} are shown`;
    const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label });
    rows.forEach((row, index) => {
      const y = index * (each + GAP);
      const every = Math.ceil(11 / (each + GAP));
      if (index % every === 0) picture.append(svg("text", { x: 0, y: y + each - Math.max((each - 9) / 2, 0), text: `rank ${row.rank}` }));
      picture.append(svg("rect", { class: "idle", x: LEFT, y, width: across, height: each }));
      for (const [kind, upper, text, x, share, busy] of row.pieces) {
        const left = LEFT + x * across, wide = Math.max(share * across - (share * across > 3 ? 0.6 : 0), 0.5);
        picture.append(svg("rect", { class: `${kind}${upper}`, x: left, y, width: wide, height: each, opacity: busy < 1 ? busy : null }));
        if (text && each >= 11 && wide >= LABEL_WIDTH + 5 * (text.length - 1))
          picture.append(svg("text", { class: `on on${upper}`, x: left + wide / 2, y: y + each / 2 + 3.5, "text-anchor": "middle", text }));
      }
    });
    picture.append(svg("text", { x: LEFT, y: height - 4, text: from }), svg("text", { x: width - 1, y: height - 4, "text-anchor": "end", text: to }));
    show(this.#box, picture);
  }

  #table(picture) {
    const row = (r) => el("tr", {}, el("th", { scope: "row", text: `rank ${r.rank}` }), el("td", { class: "r", text: r.idle }), el("td", { class: "r", text: r.keeps }));
    const head = el("tr", {}, ["", "idle", "micro-batches kept at once"].map((text, i) => el("th", { scope: "col", class: i ? "r" : null, text })));
    return el(
      "details", {}, el("summary", { text: "Idle time and kept micro-batches, by rank" }),
      picture.published ? el("p", { text: picture.published }) : null,
      el("table", { class: "compact" }, el("thead", {}, head), el("tbody", {}, picture.rows.map(row))),
    );
  }
}

const svgKey = (kind, upper) => svg("svg", { class: "key", viewBox: "0 0 12 12", width: 12, height: 12, "aria-hidden": "true" }, svg("rect", { class: `${kind}${upper}`, width: 12, height: 12 }));
