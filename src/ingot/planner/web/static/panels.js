// The head of the plan, its problems, found layouts, the comparison, and notes.

import { el, find, show } from "/shared/dom.js";

export function showHead(view) {
  const { plan, model, cluster } = view;
  find("title").textContent = `${model.name} on ${cluster.size}`;
  find("subtitle").textContent = `${model.count}: ${model.shape}. ${view.layout}, ${view.tokens_per_step}.`;
  const tile = (t) => el("div", { class: "tile", id: `tile-${t.key}` }, el("dt", { text: t.label }), el("dd", { text: t.value }), el("dd", { class: "note", text: t.note }));
  show(find("tiles"), plan ? plan.tiles.map(tile) : []);
  find("tiles").hidden = !plan;
  const kind = !plan || !plan.verdict.fits ? "bad" : plan.verdict.tight ? "tight" : "good";
  const words = !plan ? "not a legal layout" : plan.verdict.short;
  show(find("strip"), el("b", {}, el("a", { class: kind, href: "#plan", text: words })), plan ? plan.tiles.filter((t) => t.key !== "goodput").map((t) => el("span", { class: `brief-${t.key}`, text: t.brief })) : null);
}

/** Show the plan's problems, and buttons that fix them. apply(words): called with the settings of a clicked button. */
export function showTrouble(view, fixes, apply) {
  const box = find("trouble");
  const { plan } = view;
  if (plan?.verdict.fits) return show(box);
  const said = plan ? [plan.verdict.text] : view.problems.map((problem) => problem.message);
  const button = (fix) =>
    el("li", {}, el("button", { type: "button", onclick: () => apply(fix.words), text: fix.text }), el("span", { text: fix.effect }));
  const ways = fixes === null ? el("p", { class: "hint", text: "Trying every single change …" })
    : fixes.length ? el("div", {}, el("h3", { text: "The cheapest changes with which it fits" }), el("ul", { class: "fixes" }, fixes.map(button)))
    : el("p", { class: "hint", text: "No single change makes it fit. “Find the best layout” looks at all of them." });
  return show(box, el("div", { class: "notice bad-edge" }, el("strong", { text: plan ? "Does not fit" : "Not possible" }), said.map((text) => el("p", { text })), ways));
}

/** Show that the server refused a link or a field. */
export function showRefusal(error) {
  const { found, rule, fix } = error;
  const line = (name, text) => (text ? el("p", {}, el("small", { text: `${name}  ` }), text) : null);
  show(find("trouble"), el("div", { class: "notice bad-edge", role: "alert" }, el("strong", { text: found }), line("rule", rule), line("fix", fix)));
}

export function showSearch(found, apply) {
  const panel = find("search-panel"), box = find("search");
  panel.hidden = false;
  if (found === null) return show(box, el("p", { class: "hint busy", text: "Searching layouts …" }));
  if (!found.best.length) {
    const nearest = found.nearest ? el("p", {}, `Nearest: ${found.nearest.layout}, ${found.nearest.rest}: ${found.nearest.memory} `, use(found.nearest, apply)) : null;
    return show(box, el("p", { text: `Nothing fits. ${found.fix}` }), nearest, el("p", { class: "hint", text: found.considered }));
  }
  const row = (one, i) =>
    el(
      "tr", {}, el("th", { scope: "row" }, `${i + 1}  ${one.layout}`, el("small", { class: "under", text: one.rest })),
      ["step", "mfu", "memory", "bubble"].map((key) => el("td", { class: "r", text: one[key] })), el("td", { class: "r" }, use(one, apply)),
    );
  const head = el("tr", {}, ["layout", "step", "MFU", "memory", "bubble", ""].map((text, i) => el("th", { scope: "col", class: i ? "r" : null, text })));
  return show(box, el("div", { class: "scroll" }, el("table", {}, el("thead", {}, head), el("tbody", {}, found.best.map(row)))), el("p", { class: "hint", text: found.considered }));
}

const use = (one, apply) =>
  el("button", { type: "button", text: "use", "aria-label": `use ${one.layout}, ${one.rest}`, onclick: () => apply(one.words) });

export function showComparison(found, { swap, unpin }) {
  const judged = { "-1": "bad", 0: "", 1: "good" };
  const row = (r) =>
    el("tr", {}, el("th", { scope: "row", text: r.label }), el("td", { text: r.a }), el("td", { text: r.b }), el("td", { class: `r ${judged[r.judged]}`, text: r.change }));
  const head = el("tr", {}, ["", "A, pinned", "B, this one", "change"].map((text, i) => el("th", { scope: "col", class: i === 3 ? "r" : null, text })));
  const wrong = Object.entries(found.problems).map(([name, list]) => el("p", { class: "bad", text: `${name.toUpperCase()}: ${list.join("; ")}` }));
  show(
    find("compare"), wrong, el("div", { class: "scroll" }, el("table", {}, el("thead", {}, head), el("tbody", {}, found.rows.map(row)))),
    el("p", { class: "buttons" }, el("button", { type: "button", text: "Go back to A", onclick: swap }), el("button", { type: "button", text: "Unpin A", onclick: unpin })),
  );
  find("compare-panel").hidden = false;
}

export function showNotes(view) {
  const { plan } = view;
  const list = (texts) => (texts.length ? el("ul", { class: "notes" }, texts.map((text) => el("li", { text }))) : null);
  const formulas = el(
    "details", {}, el("summary", { text: "Every formula with its numbers" }),
    el("dl", { class: "formulas" }, plan.formulas.flatMap((f) => [el("dt", { text: f.name }), el("dd", { text: f.formula })])),
  );
  const same = el("div", { class: "command" }, el("p", { class: "hint", text: "The run file of this page is ready to train once its data exists:" }), el("pre", {}, el("code", { text: view.command })));
  show(find("notes"), list(plan.warnings), list(plan.notes), same, formulas);
}
