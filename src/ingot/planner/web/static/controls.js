// The form on the left: the legal values, and why other values are illegal. Both come from the server.

import { el, show } from "/shared/dom.js";

const SLIDERS = [
  ["tp", "Tensor parallel", "tp"],
  ["pp", "Pipeline", "pp"],
  ["cp", "Context parallel", "cp"],
  ["ep", "Expert parallel", "ep"],
  ["dp_replicate", "Copies of the model", "dp_replicate"],
  ["micro_batch", "Micro-batch", "sequences"],
  ["stages_per_rank", "Stages on each rank", "virtual"],
];
const SELECTS = [
  ["zero", "ZeRO stage"],
  ["recompute", "Recompute"],
  ["schedule", "Schedule"],
  ["context", "Form of context parallelism"],
  ["offload", "Optimizer state"],
  ["recipe", "Matrix products"],
];

export class Controls {
  #sliders = {};
  #selects = {};
  #fields = {};
  #options;
  #change;

  /** change(words, moved): called with changed settings and the last changed one. best(): starts the layout search. */
  constructor(form, options, { change, best }) {
    this.#options = options;
    this.#change = change;
    form.addEventListener("submit", (event) => event.preventDefault());
    show(form, this.#model(), this.#hardware(), this.#layout(best), this.#given());
  }

  #model() {
    const { models } = this.#options;
    const choice = (model) => el("option", { value: model.name, text: `${model.name}  (${model.size})` });
    return el(
      "fieldset", {}, el("legend", { text: "Model and data" }),
      el(
        "div", { class: "row model" },
        this.#select("model", "Model", [...models.map(choice), el("option", { value: "", text: "by its size alone" })], "model", () => this.#preset()),
        this.#field("params", "or its size", "", () => this.#size(), "70b"),
      ),
      el("p", { class: "hint", id: "model-hint" }),
      el(
        "div", { class: "row three" },
        this.#field("seq", "Sequence", "tokens"),
        this.#field("batch", "Batch", "sequences"),
        this.#field("tokens", "Tokens", "in all, as 1.5T"),
      ),
      el("p", { class: "hint", id: "batch-hint" }),
    );
  }

  #hardware() {
    const { clusters, devices } = this.#options;
    const typical = clusters.map((c) => el("option", { value: c.name, text: c.label }));
    const kinds = devices.map((d) => el("option", { value: d.name, text: d.label }));
    return el(
      "fieldset", {}, el("legend", { text: "Hardware" }),
      this.#select("typical", "Cluster", [el("option", { value: "", text: "as below" }), ...typical], "cluster"),
      this.#select("device", "Device", kinds, null, () => this.#cluster()),
      el(
        "div", { class: "row" },
        this.#field("groups", "Nodes", "", () => this.#cluster()),
        this.#field("each", "Devices in each", "", () => this.#cluster()),
      ),
      el("p", { class: "hint", id: "cluster-hint" }),
    );
  }

  #layout(best) {
    return el(
      "fieldset", {}, el("legend", { text: "Layout" }),
      el("button", { type: "button", id: "best", class: "main", text: "Find the best layout", onclick: best }),
      this.#keep(),
      el("p", { class: "hint", id: "layout-hint" }),
      SLIDERS.map(([key, label, unit]) => this.#slider(key, label, unit)),
      el("div", { class: "row" }, SELECTS.map(([key, label]) => this.#select(key, label, []))),
    );
  }

  #keep() {
    const box = ({ key, label }) => el("label", {}, el("input", { type: "checkbox", name: "keep", value: key }), label);
    const boxes = el("div", { class: "boxes" }, this.#options.keepable.map(box));
    return el("details", { id: "keep" }, el("summary", { text: "Keep some settings as they are" }), boxes);
  }

  /** The settings that a search keeps, like "tp,pp". */
  get kept() {
    return [...document.querySelectorAll("#keep input:checked")].map((input) => input.value).join(",");
  }

  #given() {
    return el(
      "details", { id: "given" }, el("summary", { text: "Your own figures instead of predictions and list prices" }),
      el(
        "div", { class: "row" },
        this.#field("price", "Price", "US$ per device-hour"),
        this.#field("mfu", "MFU", "a share, as 0.45"),
        this.#field("failures", "Failures", "per node per day, as 0.004"),
      ),
    );
  }

  #slider(key, label, unit) {
    const input = el("input", { type: "range", id: key, min: 0, max: 0, step: 1, value: 0, "aria-describedby": `${key}-why` });
    const output = el("output", { for: key, text: "" });
    const ends = el("span", { class: "ends", "aria-hidden": "true" });
    const why = el("p", { class: "why", id: `${key}-why` });
    const slider = { input, output, ends, why, values: [], unit };
    input.addEventListener("input", () => {
      const value = slider.values[input.valueAsNumber];
      this.#say(slider, value);
      this.#change({ [key]: String(value) }, key);
    });
    this.#sliders[key] = slider;
    return el(
      "div", { class: "control" },
      el("label", { for: key }, label, " ", el("small", { text: unit })), output, input, ends, why,
    );
  }

  #say(slider, value) {
    slider.output.textContent = value;
    slider.input.setAttribute("aria-valuetext", `${value}`);
  }

  #select(id, label, choices, key = id, changed = null) {
    const select = el("select", { id, "aria-describedby": `${id}-why` }, choices);
    const why = el("p", { class: "why", id: `${id}-why` });
    select.addEventListener("change", () => (changed ? changed() : select.value && this.#change({ [key]: select.value }, key)));
    this.#selects[id] = { select, why };
    return el("div", { class: "field" }, el("label", { for: id, text: label }), select, why);
  }

  #field(id, label, unit, changed = null, placeholder = null) {
    const input = el("input", { type: "text", id, placeholder, spellcheck: "false", "aria-describedby": `${id}-why` });
    const why = el("p", { class: "why", id: `${id}-why` });
    input.addEventListener("change", () => (changed ? changed() : this.#change({ [id]: input.value.trim() }, id)));
    const name = el("label", { for: id }, el("span", { text: label }), unit ? el("small", { text: ` ${unit}` }) : null);
    this.#fields[id] = { input, why, name };
    return el("div", { class: "field" }, name, input, why);
  }

  #preset() {
    const { value } = this.#selects.model.select;
    if (value) this.#change({ model: value, params: "" }, "model");
    else this.#fields.params.input.focus();
  }

  #size() {
    const size = this.#fields.params.input.value.trim();
    this.#change(size ? { params: size, model: "" } : { params: "" }, "params");
  }

  #cluster() {
    const part = (id) => this.#fields[id].input.value.trim() || "1";
    this.#change({ cluster: `${part("groups")}x${part("each")}x${this.#selects.device.select.value}` }, "cluster");
  }

  /** Show the settings of a plan, the other legal values, and which settings were adapted. */
  update(view) {
    const { state, choices, cluster } = view;
    this.#selects.model.select.value = state.params ? "" : state.model;
    const typical = this.#selects.typical.select;
    typical.value = [...typical.options].some((o) => o.value === state.cluster) ? state.cluster : "";
    this.#selects.device.select.value = cluster.device;
    const filled = { ...view.filled, groups: cluster.groups, each: cluster.each };
    for (const [id, { input }] of Object.entries(this.#fields)) {
      if (document.activeElement !== input || input.dataset.shown !== input.value) input.value = filled[id];
      input.dataset.shown = input.value;
    }
    this.#fields.groups.name.firstChild.textContent = cluster.unit;
    for (const key of Object.keys(this.#sliders)) this.#showSlider(key, choices[key], state[key]);
    for (const [key] of SELECTS) this.#showSelect(key, choices[key], state[key]);
    this.blame({});
    for (const [id, text] of Object.entries(view.hints)) document.getElementById(`${id}-hint`).textContent = text;
  }

  #showSlider(key, control, value) {
    const slider = this.#sliders[key];
    const { input, ends, why } = slider;
    slider.values = control.choices.map((choice) => choice.value);
    if (!slider.values.includes(value)) slider.values = [...slider.values, value].sort((a, b) => a - b);
    input.max = Math.max(slider.values.length - 1, 0);
    input.value = slider.values.indexOf(value);
    input.disabled = slider.values.length < 2;
    this.#say(slider, control.choices.find((choice) => choice.value === value)?.label ?? value);
    ends.replaceChildren(...slider.values.map((v) => el("i", { class: v === value ? "at" : null })));
    why.textContent = control.idle || control.refused.join("\n");
    input.closest(".control").classList.toggle("idle", Boolean(control.idle));
  }

  #showSelect(key, control, value) {
    const { select, why } = this.#selects[key];
    select.closest(".field").hidden = !control;
    if (!control) return;
    const option = (choice) =>
      el("option", { value: choice.value, text: choice.label, disabled: Boolean(choice.why), title: choice.why || null });
    select.replaceChildren(...control.choices.map(option));
    select.value = value;
    select.disabled = Boolean(control.idle);
    const refused = control.choices.filter((choice) => choice.why);
    why.textContent = control.idle || refused.map((choice) => `${choice.label}: ${choice.why}`).join("\n");
  }

  /** Mark the setting `key` as refused, with the reason `text`; {} removes all marks. */
  blame({ key, text }) {
    for (const [id, { input, why }] of Object.entries(this.#fields)) {
      const wrong = id === key || (key === "cluster" && (id === "groups" || id === "each"));
      input.setAttribute("aria-invalid", wrong);
      why.textContent = id === key || (key === "cluster" && id === "groups") ? text : "";
    }
  }
}
