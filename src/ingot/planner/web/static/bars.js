// The bars of memory, of the parts of a step, and of communication. The server computes their lengths.

import { el, find, show } from "/shared/dom.js";

const part = (p) => el("span", { class: `part k-${word(p.kind)}`, share: p.share, title: `${p.kind}: ${p.text}` });
const word = (kind) => kind.replaceAll(/[^a-z]+/g, "-");

export function showMemory(memory) {
  const limit = () => el("span", { class: "limit", share: memory.capacity_share });
  const judged = memory.fits ? (memory.tight ? "tight" : "good") : "bad";
  const bar = el(
    "div", { class: "bar large", role: "img", "aria-label": `${memory.used} of ${memory.capacity}, ${memory.of_capacity}` },
    memory.parts.map(part), limit(),
  );
  const head = el(
    "p", { class: "bar-head" },
    el("strong", { class: judged, text: memory.used }), ` of ${memory.capacity} · ${memory.of_capacity}`,
    el("span", { class: "right", text: memory.fits ? `${memory.free} free` : `${memory.free} too much` }),
  );
  show(find("memory"), head, bar, kinds(memory.parts), moments(memory.moments, limit), stages(memory.stages, limit));
}

const kinds = (parts) =>
  el(
    "ul", { class: "kinds" },
    parts.map((p) =>
      el(
        "li", {},
        el("details", {}, el("summary", {}, el("i", { class: `k-${word(p.kind)}` }), el("span", { text: p.kind }), el("b", { text: p.text })),
          el("p", { text: p.formula })),
      ),
    ),
  );

function moments(list, limit) {
  if (!list.length) return null;
  const row = (m) =>
    el("tr", {}, el("th", { scope: "row", text: m.name }), el("td", {}, track(m.share, m.fits ? "k-moment" : "over", limit())), el("td", { class: "r", text: m.text }));
  return el("div", {}, el("h3", { text: "Peak memory by phase" }), el("table", { class: "tracks" }, el("tbody", {}, list.map(row))));
}

function stages(list, limit) {
  if (list.length < 2) return null;
  const row = (stage) =>
    el(
      "tr", {}, el("th", { scope: "row", text: `rank ${stage.rank}` }),
      el("td", {}, el("div", { class: "bar small", "aria-hidden": "true" }, stage.parts.map(part), limit())),
      el("td", { class: stage.fits ? "r" : "r bad", text: stage.text }),
    );
  const table = el("table", { class: "tracks" }, el("tbody", {}, list.map(row)));
  return el("div", {}, el("h3", { text: "By pipeline rank" }), el("div", { class: "tall", tabindex: list.length > 16 ? "0" : null }, table));
}

const track = (share, kind, mark = null) =>
  el("div", { class: "bar small", "aria-hidden": "true" }, el("span", { class: `part ${kind}`, share }), mark);

export function showStep(parts) {
  const row = (p) =>
    el(
      "tr", {},
      el("th", { scope: "row" }, el("details", {}, el("summary", { text: p.name }), el("p", { text: p.formula })), track(p.share, "k-time")),
      el("td", { class: "r", text: p.percent }), el("td", { class: "r", text: p.text }),
    );
  const head = el("tr", {}, ["part", "share", "time"].map((text, i) => el("th", { scope: "col", class: i ? "r" : null, text })));
  show(find("step"), parts.length ? el("table", {}, el("thead", {}, head), el("tbody", {}, parts.map(row))) : el("p", { class: "hint", text: "No rate of this device is known." }));
}

export function showCommunication(lines) {
  const box = find("communication");
  if (!lines.length) return show(box, el("p", { class: "hint", text: "There is one device, or its links are not known." }));
  const row = (line) =>
    el(
      "tr", {},
      el("th", { scope: "row" }, line.name, " ", el("small", { text: line.where }),
        el("div", { class: "bar small", "aria-hidden": "true" },
          el("span", { class: "part k-exposed", share: line.exposed_share }),
          el("span", { class: "part k-hidden", share: line.hidden_share }))),
      el("td", { class: "r", text: line.sent }), el("td", { class: "r", text: line.alone }), el("td", { class: "r" }, line.exposed),
    );
  const names = ["axis", "sent", "alone", "exposed"];
  const head = el("tr", {}, names.map((text, i) => el("th", { scope: "col", class: i ? "r" : null, text })));
  const legend = el("p", { class: "legend" }, el("i", { class: "k-exposed" }), "exposed", el("i", { class: "k-hidden" }), "hidden by computation");
  return show(box, el("div", { class: "scroll", tabindex: "0" }, el("table", {}, el("thead", {}, head), el("tbody", {}, lines.map(row)))), legend);
}
