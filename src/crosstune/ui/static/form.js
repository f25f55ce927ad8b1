// A new run: a form made from the options, with the command and the plan of what it holds.
import { bytes, copyable, doing, duration, errorBox, explain, get, h, link, post } from "./dom.js";

const field = (option, { values, changed, models }) => {
  const id = `option-${option.name}`;
  let input;
  const choices = option.kind === "bool" ? ["true", "false"] : option.choices;
  if (choices) {
    input = h("select", { id }, h("option", { value: "" }, `${option.default || "not set"} (default)`), choices.map((each) => h("option", { value: each }, each)));
  } else {
    input = h("input", { id, placeholder: option.default || "not set", autocomplete: "off", spellcheck: "false", inputmode: ["int", "float"].includes(option.kind) ? "decimal" : null });
    if (option.name === "model_name") input.setAttribute("list", "models");
  }
  input.value = values[option.name] ?? "";
  input.addEventListener(input.tagName === "SELECT" ? "change" : "input", () => changed(option.name, input.value));
  const about = `about-${option.name}`;
  input.setAttribute("aria-describedby", about);
  const box = h("div", { class: "field", "data-option": option.name }, h("label", { for: id }, h("code", {}, option.name)), input,
    option.name === "model_name" ? h("datalist", { id: "models" }, models.map((each) => h("option", { value: each }))) : null,
    h("p", { class: "problem", role: "alert", hidden: true }),
    h("p", { id: about, class: "about" }, option.text, option.needs !== "always" ? h("small", {}, ` ${option.needs}`) : null));
  box.classList.toggle("set", Boolean(input.value));
  return box;
};

export const showForm = async (place, { parts, signal }) => {
  const { options, models, name } = await get("/api/form");
  const values = { name };
  if (parts.length) {
    const { asked } = await get(`/api/run?run=${encodeURIComponent(parts.join("/"))}`);
    for (const [key, value] of Object.entries(asked)) if (options.some((option) => option.name === key) && key !== "name") values[key] = String(value);
  }
  const search = h("input", { type: "search", placeholder: "Search all options", "aria-label": "Search options" });
  const fields = h("div", { class: "fields" });
  const command = h("div");
  const plan = h("div", { class: "plan", "aria-live": "polite" });
  const starting = h("div");
  const preview = h("section", { class: "preview" });
  const startButton = h("button", { type: "button", class: "primary", onclick: doing(async () => {
    const job = await post("train", { options: values });
    await started(job, starting, signal);
  }) }, "Start");
  const showData = doing(async () => {
    preview.replaceChildren(h("p", { class: "quiet" }, "Reading the data …"));
    try { drawData(preview, await post("data", { options: withoutName() }, signal)); } catch (error) { preview.replaceChildren(errorBox(error)); }
    preview.scrollIntoView({ block: "nearest" });
  });
  const side = h("aside", {}, h("h2", {}, "Command"), command, plan,
    h("p", { class: "buttons" }, startButton, h("button", { type: "button", onclick: showData }, "Preview the data")), starting);
  place.append(h("div", { class: "head" }, h("h1", {}, "New run"), h("div", { class: "tools" }, search)),
    h("div", { class: "columns" }, fields, side), preview);
  const withoutName = () => Object.fromEntries(Object.entries(values).filter(([key]) => key !== "name"));

  const changed = (option, value) => {
    if (value === "") delete values[option];
    else values[option] = value;
    fields.querySelectorAll(`[data-option="${option}"]`).forEach((box) => box.classList.toggle("set", value !== ""));
    if (option === "recipe") draw();
    check();
  };
  const draw = () => {
    const recipe = values.recipe || "sft";
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const fits = options.filter((option) => !option.recipes.length || option.recipes.includes(recipe));
    const make = (option) => field(option, { values, changed, models });
    if (words.length) {
      const found = options.filter((option) => words.every((word) => `${option.name} ${option.text} ${option.group}`.toLowerCase().replaceAll("_", " ").includes(word.replaceAll("_", " "))));
      fields.replaceChildren(found.length ? h("div", { class: "options" }, found.map(make)) : h("p", { class: "quiet" }, "No option matches. Search for a part of a name or of its description."));
      return;
    }
    const isFirst = (option) => option.first > 0 || option.first_of.includes(recipe);
    const first = fits.filter(isFirst).sort((a, b) => (a.first || 99) - (b.first || 99));
    const groups = [...new Set(fits.map((option) => option.group))];
    const open = new Set([...fields.querySelectorAll("details[open]")].map((each) => each.dataset.group));
    fields.replaceChildren(h("div", { class: "options" }, first.map(make)), ...groups.map((group) => {
      const rest = fits.filter((option) => option.group === group && !isFirst(option));
      const box = h("div", { class: "options" });
      const numSet = rest.filter((option) => option.name in values).length;
      const fill = () => { if (!box.children.length) box.append(...rest.map(make)); };
      const details = h("details", { "data-group": group, open: open.has(group) || numSet > 0, ontoggle: fill }, h("summary", {}, group, " ", h("small", {}, `${rest.length} ${rest.length === 1 ? "option" : "options"}${numSet ? `, ${numSet} set` : ""}`)), box);
      return rest.length ? details : "";
    }));
  };

  let asking = null;
  let timer = 0;
  const check = () => {
    clearTimeout(timer);
    timer = setTimeout(async () => {
      try {
        const found = await post("check", { options: values });
        if (signal.aborted) return;
        if (command.firstChild) command.querySelector("code").textContent = found.command;
        else command.append(copyable(found.command, "command"));
        fields.querySelectorAll(".problem").forEach((each) => { each.hidden = true; });
        const rest = [];
        for (const problem of found.problems) {
          const text = explain({ message: problem.message, why: problem.why, advice: problem.do });
          const place2 = problem.option && fields.querySelector(`[data-option="${problem.option}"] .problem`);
          if (place2) { place2.textContent = text; place2.hidden = false; } else rest.push(text);
        }
        startButton.disabled = found.problems.length > 0;
        if (found.problems.length) {
          asking?.abort();
          plan.replaceChildren(h("div", { class: "callout failed" }, h("strong", {}, "These values are not valid."), h("ul", {}, found.problems.map((each) => h("li", {}, each.message)))));
        } else makePlan();
      } catch (error) { if (!signal.aborted) plan.replaceChildren(errorBox(error)); }
    }, 150);
  };
  // One plan at a time, of the newest values.
  let again = false;
  const makePlan = async () => {
    again = true;
    if (asking) return;
    while (again && !signal.aborted) {
      again = false;
      plan.classList.add("busy");
      if (!plan.children.length) plan.append(h("p", { class: "quiet" }, "Planning …"));
      asking = new AbortController();
      signal.addEventListener("abort", () => asking?.abort(), { once: true });
      try { drawPlan(plan, await post("plan", { options: values }, asking.signal)); } catch (error) { if (error.name !== "AbortError") plan.replaceChildren(errorBox(error)); }
    }
    asking = null;
    plan.classList.remove("busy");
  };
  search.addEventListener("input", draw);
  draw();
  check();
};

// Wait until the run has a folder, or until its command has failed, and go there.
const started = async (job, place, signal) => {
  while (!signal.aborted) {
    const [{ runs }, { jobs }] = await Promise.all([get("/api/runs"), get("/api/jobs")]);
    const now = jobs.find((each) => each.id === job.id);
    if (runs.some((run) => run.name === job.run && run.changed >= job.started - 1)) { location.hash = link("run", job.run); return; }
    if (now?.state === "failed") { place.replaceChildren(h("div", { class: "callout failed", role: "alert" }, h("pre", { class: "said" }, now.messages.trim()))); return; }
    place.replaceChildren(h("p", { class: "quiet", role: "status" }, "Starting … ", now?.messages.trim().split("\n").at(-1) ?? ""));
    await new Promise((resolve) => { setTimeout(resolve, 700); });
  }
};

const drawPlan = (place, { result, error }) => {
  if (!result) { place.replaceChildren(h("div", { class: "callout failed" }, h("pre", { class: "said" }, error))); return; }
  const found = result.prediction ?? {};
  const needed = found.bytes_per_rank ?? result.estimated_bytes;
  const usable = found.usable_bytes ?? result.usable_bytes;
  const hours = found.hours ?? (found.step_s && found.num_steps ? (found.step_s * found.num_steps) / 3600 : null);
  const facts = [["memory", needed ? `${bytes(needed)} of ${bytes(usable)}` : "unknown"], ["time", hours ? duration(hours * 3600) : "measured in the first steps"],
    ["steps", found.num_steps ?? "–"], ["backend", result.backend], ["precision", result.precision], ["trained", found.trained_parameters ? `${found.trained_parameters.toLocaleString("en")} parameters` : "–"]];
  place.replaceChildren(
    h("h2", {}, "Plan"),
    needed && usable ? h("meter", { min: 0, max: usable, value: Math.min(needed, usable), high: 0.85 * usable, optimum: 0, "aria-label": "Memory" }) : "",
    h("dl", { class: "facts" }, facts.map(([title, value]) => h("div", {}, h("dt", {}, title), h("dd", {}, String(value))))),
    ...(result.cannot_train ?? []).map((text) => h("p", { class: "callout failed said" }, text)),
    found.fits === false ? h("p", { class: "callout failed" }, "It does not fit in memory. ", found.change_that_fits ?? "") : "",
    ...(result.warnings ?? []).map((text) => h("p", { class: "callout said" }, text)),
    result.adjustments?.length ? h("details", { open: true }, h("summary", {}, `${result.adjustments.length} chosen or changed automatically`),
      h("ul", { class: "adjusted" }, result.adjustments.map((each) => h("li", {}, h("code", {}, `${each.option} ${each.used}`), " ", h("span", { class: "quiet" }, each.reason))))) : "",
    ...(result.not_checked ?? []).map((text) => h("p", { class: "quiet" }, `Not checked: ${text}`)));
};

const drawData = (place, { result, error }) => {
  const failed = error ? h("div", { class: "callout failed" }, h("pre", { class: "said" }, error)) : null;
  if (!result) { place.replaceChildren(failed); return; }
  const { train } = result;
  const facts = [["read as", result.format], ["examples", train.examples], ["tokens", train.tokens],
    ...(train.supervised_share === undefined ? [] : [["supervised", `${(100 * train.supervised_share).toFixed(1)} %`]]), // prompts alone have none
    ["longest", train.longest], ["context", result.context_length], ["duplicates", train.duplicates], ["steps", result.num_steps]];
  place.replaceChildren(h("h2", {}, "Data ", h("small", {}, result.dataset)), failed ?? "",
    h("dl", { class: "facts" }, facts.map(([title, value]) => h("div", {}, h("dt", {}, title), h("dd", {}, typeof value === "number" ? value.toLocaleString("en") : String(value))))),
    ...(result.warnings ?? []).map((text) => h("p", { class: "callout said" }, text)),
    train.supervised_share === undefined ? "" : h("p", { class: "quiet" }, "Only the ", h("mark", {}, "highlighted"), " text is supervised; the rest is context."),
    ...result.pieces.map((pieces, index) => h("article", {}, h("h3", {}, `Example ${index + 1}`),
      h("pre", { class: "masked", dir: "auto" }, pieces.map(([text, counts]) => (counts ? h("mark", {}, text) : text))))));
};
