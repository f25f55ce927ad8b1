// The list of runs, and the jobs.
import { badge, bytes, copyable, doing, duration, errorBox, every, figure, get, h, link, post, toast } from "./dom.js";
import { showReport } from "./run.js";

const SVG = "http://www.w3.org/2000/svg";
const sparkline = (values) => {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("class", "spark");
  svg.setAttribute("viewBox", "0 0 100 30");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  if (values.length > 1) {
    const low = Math.min(...values);
    const range = Math.max(...values) - low || 1;
    const line = document.createElementNS(SVG, "polyline");
    line.setAttribute("points", values.map((value, place) =>
      `${((100 * place) / (values.length - 1)).toFixed(1)},${(28 - (26 * (value - low)) / range).toFixed(1)}`).join(" "));
    svg.append(line);
  }
  return svg;
};

const age = (changed) => {
  const seconds = Math.max(0, Date.now() / 1000 - changed);
  return seconds < 5 ? "now" : `${duration(seconds).split(" ").slice(0, 2).join(" ")} ago`;
};
const steps = (run) => (run.num_steps && run.num_steps !== run.steps
  ? `${run.steps.toLocaleString("en")} / ${run.num_steps.toLocaleString("en")}` : run.steps.toLocaleString("en"));

// A row keeps its element; only cells whose text changed are replaced.
const makeRow = (run, { chosen, onchoose }) => {
  const box = h("input", { type: "checkbox", "aria-label": `Choose ${run.name}`, checked: chosen.has(run.name),
    onchange: () => { if (box.checked) chosen.add(run.name); else chosen.delete(run.name); onchoose(); } });
  const short = run.name.split("/").at(-1);
  const cells = {
    status: () => badge(run.status),
    progress: () => {
      const share = run.num_steps ? Math.min(1, run.steps / run.num_steps) : 0;
      return h("span", { class: "steps" }, h("span", {}, steps(run)),
        run.status === "running" ? h("progress", { value: share, max: 1, "aria-label": "progress" }) : null);
    },
    loss: () => h("span", { class: "spark-cell" }, sparkline(run.spark), h("b", {}, figure(run.loss))),
    best: () => (run.best_eval === null ? "–" : h("span", { title: `at step ${run.best_step}` }, figure(run.best_eval))),
    speed: () => (run.tokens_per_s ? `${figure(run.tokens_per_s, 3)} tok/s` : "–"),
    left: () => (run.status === "running" ? (run.eta_s === null ? "…" : duration(run.eta_s)) : age(run.changed)),
    memory: () => bytes(run.peak_memory_bytes),
    what: () => h("span", {}, h("span", {}, run.model), h("small", {}, [run.recipe, run.method].filter((each) => each !== "-").join(" · "))),
  };
  const labels = { status: "", progress: "steps", loss: "loss", best: "best evaluation", speed: "speed", left: run.status === "running" ? "left" : "changed", memory: "memory", what: "" };
  const row = h("tr", { "data-run": run.name }, h("td", { class: "choose" }, box),
    h("th", { scope: "row" }, h("a", { href: link("run", run.name), title: run.name }, short)),
    Object.keys(cells).map((name) => h("td", { class: name, "data-label": labels[name] }, cells[name]())));
  return row;
};

const COLUMNS = ["", "Run", "Status", "Steps", "Loss", "Best eval", "Speed", "Left / changed", "Memory", "Model"];

export const showList = async (place, { parts, signal }) => {
  const group = parts.join("/");
  const chosen = new Set();
  const rows = new Map();
  const search = h("input", { type: "search", placeholder: "Search runs, models, status", "aria-label": "Search runs" });
  const compare = h("button", { type: "button", disabled: true, onclick: () => { location.hash = link("compare", ...chosen); } }, "Compare");
  const chat = h("button", { type: "button", disabled: true, onclick: () => { location.hash = link("chat", ...chosen); } }, "Chat");
  const onchoose = () => {
    compare.disabled = chosen.size < 2 || chosen.size > 12;
    chat.disabled = chosen.size < 1 || chosen.size > 2;
    compare.textContent = chosen.size > 1 ? `Compare ${chosen.size}` : "Compare";
  };
  const body = h("tbody");
  const table = h("table", { class: "runs" }, h("thead", {}, h("tr", {}, COLUMNS.map((name) => h("th", { scope: "col" }, name)))), body);
  const groups = h("ul", { class: "groups" });
  const report = h("div", { class: "group-report" });
  const empty = h("div", { class: "empty", hidden: true });
  const count = h("small");
  place.append(h("div", { class: "head" },
    h("div", {}, group ? h("p", { class: "crumbs" }, h("a", { href: "#/" }, "Runs"), " / ") : "", h("h1", {}, group || "Runs", " ", count)),
    h("div", { class: "tools" }, search, compare, chat, h("a", { class: "button primary", href: "#/new" }, "New run"))),
  empty, groups, report, group ? h("h2", {}, "Runs") : "", table);

  let shown = null;
  const draw = (found) => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const kept = found.runs.filter((run) => {
      const text = `${run.name} ${run.model} ${run.status} ${run.recipe} ${run.method}`.toLowerCase();
      return words.every((word) => text.includes(word));
    });
    kept.forEach((run, index) => {
      const before = rows.get(run.name);
      const key = JSON.stringify([run, run.status === "running" ? 0 : age(run.changed)]);
      const row = before?.row ?? makeRow(run, { chosen, onchoose });
      if (before && before.key !== key) {
        const cells = [...makeRow(run, { chosen, onchoose }).children];
        [...row.children].forEach((cell, at) => { if (at > 1 && cell.outerHTML !== cells[at].outerHTML) cell.replaceWith(cells[at]); });
      }
      rows.set(run.name, { row, key });
      if (body.children[index] !== row) body.insertBefore(row, body.children[index] ?? null);
    });
    while (body.children.length > kept.length) body.lastChild.remove();
    table.hidden = !kept.length;
    count.textContent = found.runs.length ? String(found.runs.length) : "";
    groups.replaceChildren(...found.groups.map((each) => h("li", {}, h("a", { href: link("group", ...each.name.split("/")) },
      h("b", {}, each.name), " ", h("small", {}, `${each.kind}, ${each.runs} ${each.runs === 1 ? "run" : "runs"}`)))));
    empty.hidden = Boolean(kept.length || found.groups.length);
    if (!empty.hidden) {
      empty.replaceChildren(...(found.runs.length
        ? [h("h2", {}, "No run matches."), h("p", {}, "Search for a part of a name, a model, or a status such as running.")]
        : group ? [h("h2", {}, "No runs."), h("p", {}, "The first trial has not started, or its folder was removed from ", h("code", {}, found.folder), ".")]
        : [h("h2", {}, "No runs yet."), h("p", {}, "Start one here or in a terminal. Runs are read from ", h("code", {}, found.folder), "."),
          h("p", {}, h("a", { class: "button primary", href: "#/new" }, "Start a run")), copyable(found.start)]));
    }
  };
  search.addEventListener("input", () => shown && draw(shown));
  const path = `/api/runs${group ? `?in=${encodeURIComponent(group)}` : ""}`;
  const read = async () => {
    shown = await get(path);
    if (signal.aborted) return;
    draw(shown);
    if (group) await showReport(report, `/api/page?run=${encodeURIComponent(group)}`).catch((error) => report.replaceChildren(errorBox(error)));
  };
  await read();
  every(2500, signal, read);
};

export const showJobs = async (place, { signal }) => {
  const rows = h("div", { class: "job-list" });
  place.append(h("div", { class: "head" }, h("h1", {}, "Jobs")), h("p", { class: "quiet about-jobs" },
    "Commands started from this page. They are ordinary processes and continue when the page is closed or its server ends."), rows);
  const made = new Map();
  const draw = ({ jobs }) => {
    if (!jobs.length) rows.replaceChildren(h("div", { class: "empty" }, h("h2", {}, "No jobs."), h("p", {}, "Start a run, or merge, export or chat with one.")));
    jobs.forEach((job, index) => {
      const key = JSON.stringify(job);
      if (made.get(job.id)?.key === key) return;
      const before = made.get(job.id)?.element;
      const lines = job.messages.trim().split("\n");
      const title = job.run ?? job.target;
      const element = h("article", { class: "job", "data-state": job.state },
        h("h2", {}, badge(job.state), " ", job.kind, " ", h("small", {}, title, job.seconds === null ? "" : `, for ${duration(job.seconds)}`)),
        copyable(job.command),
        h("p", { class: "said last-line" }, lines.at(-1).trim()),
        h("p", { class: "buttons" },
          job.run ? h("a", { class: "button", href: link("run", job.run) }, "Open the run") : null,
          job.kind === "serve" && job.state === "ready" ? h("a", { class: "button", href: link("chat", "job", job.id) }, "Open the chat") : null,
          ["running", "ready"].includes(job.state) ? h("button", { type: "button", onclick: doing(async () => { await post("stop", { job: job.id }); toast("Stopping …"); }) }, "Stop") : null),
        job.result?.path || job.result?.out ? h("p", {}, "Written: ", h("code", {}, job.result.path ?? job.result.out)) : null,
        h("details", { open: before?.querySelector("details")?.open || job.state === "failed" }, h("summary", {}, "Messages"), h("pre", { class: "messages" }, job.messages)));
      if (before) before.replaceWith(element);
      else rows.insertBefore(element, rows.children[index] ?? null);
      made.set(job.id, { key, element });
    });
  };
  await every(1500, signal, async () => draw(await get("/api/jobs")));
};
