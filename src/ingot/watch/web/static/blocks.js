// The blocks of a chapter as elements. Every text of the server becomes a text node, never markup.

import { el } from "/shared/dom.js";

const LONG = 40; // characters

const right = (block, column) => (block.right.includes(column) ? "r" : null);

const KINDS = {
  text: (block) => el("p", { text: block.text }),
  pairs: (block) => el("dl", { class: "pairs" }, block.rows.flatMap(([name, value]) => [el("dt", { text: name }), el("dd", { text: value })])),
  sample: (block) => el("blockquote", {}, el("b", { text: block.prompt }), el("span", { text: block.text })),
  folded: (block) => folded(block.caption, block.blocks.map(draw)),
  table: (block) => (block.folded ? folded(block.caption, [table({ ...block, caption: "" })]) : table(block)),
  bars, heat,
};

/** Return the element of a block. */
export const draw = (block) => KINDS[block.kind](block);

function folded(caption, children) {
  return el("details", { "data-key": caption }, el("summary", { text: caption }), children);
}

function table(block) {
  const head = block.header.map((text, i) => el("th", { scope: "col", class: right(block, i), text }));
  const cell = (text, i) => (i === 0 && !block.right.includes(0) && block.header.length > 1 ? el("th", { scope: "row", text }) : el("td", { class: right(block, i), "data-title": block.header[i], text }));
  const rows = block.rows.map((row) => el("tr", {}, row.map(cell)));
  const compact = block.right.length === block.header.length ? "compact" : null;
  const many = block.header.length - block.right.length > 2;
  const long = many && block.rows.some((row) => row.some((text) => text.length > LONG)); // a phone shows a row as a card
  return el(
    "div", { class: `scroll${many ? (long ? " cards" : " many") : ""}` },
    el("table", { class: compact }, block.caption ? el("caption", { text: block.caption }) : null, el("thead", {}, el("tr", {}, head)), el("tbody", {}, rows)),
  );
}

function headOf(header) {
  return el("thead", {}, el("tr", {}, header.map((text, i) => el("th", { scope: "col", class: i ? "r" : null, text }))));
}

function bars(block) {
  const row = (bar) =>
    el(
      "tr", {},
      el("th", { scope: "row" }, bar.label, el("div", { class: "track", share: Math.min(Math.max(bar.fraction, 0), 1), "aria-hidden": "true" }, el("span")), bar.note ? el("small", { text: bar.note }) : null),
      bar.values.map((text) => el("td", { class: "r", text })),
    );
  return el("div", { class: "scroll" }, el("table", { class: "bars" }, headOf(block.header), el("tbody", {}, block.rows.map(row))));
}

function heat(block) {
  const shade = (level) => (level === 0 ? "r" : level > 0 ? `r above-${level}` : `r below-${-level}`);
  const row = (own) =>
    el(
      "tr", { class: own.note ? "slow" : null },
      el("th", { scope: "row" }, own.label, own.note ? el("small", { text: ` ${own.note}` }) : null),
      own.values.map((text, i) => el("td", { class: shade(own.levels[i]), text })),
    );
  return el("div", { class: "scroll" }, el("table", { class: "heat" }, headOf(block.header), el("tbody", {}, block.rows.map(row))));
}
