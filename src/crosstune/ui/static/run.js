// The page of a run, live; and the comparison of runs. Their sections are those of the report.
import { ask, badge, copyable, doing, duration, errorBox, every, figure, get, h, link, post, query, toast } from "./dom.js";
import { makeCharts } from "./charts.js";

// Put the sections of a report into a place. A section is replaced only if it changed, and its open details stay open.
export const showReport = async (place, path, { without = [] } = {}) => {
  const html = (await get(path)).replace(/<style>[^]*?<\/style>/, "");
  const report = new DOMParser().parseFromString(html, "text/html");
  const header = report.querySelector("header");
  const parts = [h("section", { id: "lead" })];
  parts[0].append(...[...header.children].filter((each) => !each.matches("nav, .tool, .title, h1, .callout.running")));
  for (const section of report.querySelectorAll("main > section")) if (!without.includes(section.id)) parts.push(section);
  const old = new Map([...place.children].map((each) => [each.dataset.part, each]));
  const drawn = [];
  parts.forEach((part, index) => {
    const text = part.outerHTML;
    let shown = old.get(part.id);
    old.delete(part.id);
    if (!shown || shown.source !== text) {
      const open = shown ? [...shown.querySelectorAll("details")].map((each) => each.open) : [];
      const next = h("div", { "data-part": part.id }, document.importNode(part, true));
      next.querySelectorAll("details").forEach((each, at) => { each.open = open[at] ?? false; });
      next.source = text;
      shown?.replaceWith(next);
      shown = next;
      drawn.push(next);
    }
    if (place.children[index] !== shown) place.insertBefore(shown, place.children[index] ?? null);
  });
  for (const each of old.values()) each.remove();
  for (const each of drawn) each.dispatchEvent(new CustomEvent("crosstune:drawn", { bubbles: true }));
  return parts.map((part) => [part.id, part.querySelector("h2")?.firstChild?.textContent?.trim()]).filter(([, title]) => title);
};

const smoothingSelect = (onchange) => {
  const select = h("select", { "aria-label": "Smoothing", onchange: () => onchange(select.value) },
    [["0", "no smoothing"], ["1", "smoothed"], ["4", "strongly smoothed"]].map(([value, text]) => h("option", { value, selected: value === "1" }, text)));
  return select;
};

const WORD = { failed: "The training failed.", killed: "The training was killed: no process holds the run, and no end is recorded.", stopped: "The training was stopped." };

export const showRun = async (place, { parts, signal }) => {
  const name = parts.join("/");
  const own = query([name]);
  let about = await get(`/api/run?${own}`);
  const state = { smoothing: "1", position: "", recent: [], rows: [], status: about.status };
  const status = h("span");
  const live = h("div", { class: "live-line", "aria-live": "off" });
  const buttons = h("div", { class: "tools" });
  const word = h("div", { role: "status" });
  const charts = h("div", { class: "charts grid" });
  const sampled = h("p", { class: "quiet", hidden: true }, "This run has many steps: a part of them is drawn. Drag over a chart to see every step there.");
  const noCharts = h("p", { class: "empty-line", hidden: true }, "No step is recorded yet. The curves appear with the first step.");
  const sections = h("div", { class: "sections" });
  const jump = h("nav", { class: "jump", "aria-label": "Sections" });
  const checkpoints = h("section", { id: "checkpoints" });
  place.append(
    h("div", { class: "head" }, h("div", {}, h("p", { class: "crumbs" }, h("a", { href: "#/" }, "Runs"), " / ", parts.length > 1 ? [h("a", { href: link("group", parts[0]) }, parts[0]), " / "] : null),
      h("h1", {}, parts.at(-1), " ", status)), buttons),
    word, live, jump,
    h("section", { id: "charts" }, h("div", { class: "chart-head" }, h("h2", {}, "Charts"), smoothingSelect((value) => { state.smoothing = value; drawCharts(); })), noCharts, charts, sampled),
    sections, checkpoints);
  const grid = makeCharts(charts, { signal, closer: ([low, high]) => get(`/api/charts?${own}&smoothing=${state.smoothing}&from=${low}&to=${high}`) });

  const drawCharts = async () => {
    const found = await get(`/api/charts?${own}&smoothing=${state.smoothing}`);
    if (signal.aborted) return;
    state.position = found.position;
    grid.set(structuredClone(found.charts));
    // The charts may be older than the rows on the stream, which arrive once.
    const last = Math.max(0, ...found.charts.flatMap((chart) => chart.series.filter(({ key }) => key).map(({ x }) => x.at(-1) ?? 0)));
    state.rows = state.rows.filter((row) => row.step > last);
    grid.append(state.rows);
    noCharts.hidden = found.charts.length > 0;
    sampled.hidden = !found.sampled;
  };
  const drawReport = async () => {
    const titles = await showReport(sections, `/api/page?${own}`, { without: ["charts", about.status === "running" && "next"] });
    const names = [["charts", "Charts"], ...titles, ...(about.checkpoints.length ? [["checkpoints", "Checkpoints"]] : [])];
    jump.replaceChildren(...names.map(([id, title]) => h("button", { type: "button", onclick: () => document.getElementById(id)?.scrollIntoView() }, title)));
  };
  const start = (kind, body, said) => doing(async () => { await post(kind, { run: name, ...body }); toast(said); });
  const drawHead = () => {
    const { status: now } = about;
    if (status.dataset.now !== now) status.replaceChildren(badge(now));
    status.dataset.now = now;
    const running = now === "running";
    place.classList.toggle("running", running);
    const share = about.num_steps ? Math.min(1, about.steps / about.num_steps) : 0;
    live.hidden = !running;
    if (running) {
      const facts = [["step", [about.steps ?? 0, ...(about.num_steps ? [about.num_steps] : [])].map((each) => each.toLocaleString("en")).join(" of ")], ["left", about.eta_s === null ? "…" : duration(about.eta_s)],
        ["loss", figure(about.loss)], ["speed", about.tokens_per_s ? `${figure(about.tokens_per_s, 3)} tok/s` : "–"]];
      const [bar = h("progress", { max: 1, "aria-label": "Progress" }), list = h("dl", { class: "facts" })] = live.children;
      if (!live.children.length) live.append(bar, list);
      bar.value = share;
      list.replaceChildren(...facts.map(([title, value]) => h("div", {}, h("dt", {}, title), h("dd", {}, String(value)))));
    }
    const has = (title, primary, work) => h("button", { type: "button", class: primary ? "primary" : "", onclick: work }, title);
    const extend = doing(async () => {
      const values = await ask("Train longer", [{ name: "max_steps", label: "Steps in all", value: 2 * about.steps, hint: `${about.steps} are done` }], { go: "Train", text: "The run continues from its last checkpoint." });
      if (!values) return;
      // The steps count only within the epochs.
      const epochs = Number(about.asked.num_epochs ?? 1) * Math.max(1, Number(values.max_steps) / (about.num_steps || 1));
      const options = { max_steps: values.max_steps, ...(Number.isFinite(epochs) && { num_epochs: Math.ceil(epochs) }) };
      await post("resume", { run: name, options });
      toast("The run continues.");
    });
    const exportIt = doing(async () => {
      const values = await ask("Export", [{ name: "to", label: "For", choices: ["hf", "gguf", "ollama", "mlx"] }, { name: "gguf_type", label: "Type of GGUF weights", choices: ["", "q8_0", "q6_k", "q5_k_m", "q4_k_m", "bf16"], hint: "empty: the model's own" }], { go: "Export" });
      if (!values) return;
      await post("export", { run: name, to: values.to, gguf_type: ["gguf", "ollama"].includes(values.to) ? values.gguf_type : "" });
      if (!signal.aborted) location.hash = "#/jobs";
    });
    const key = [now, about.checkpoints.length > 0, ...about.uses].join();
    if (buttons.dataset.key === key) return; // a button in use stays
    buttons.dataset.key = key;
    buttons.replaceChildren(...[
      running && has("Stop", true, start("stop", {}, "Asked to stop. A checkpoint is saved first.")),
      !running && about.checkpoints.length > 0 && now !== "finished" && has("Resume", true, start("resume", {}, "The run continues.")),
      !running && about.checkpoints.length > 0 && has("Extend", false, extend),
      about.uses.includes("chat") && has("Chat", true, () => { location.hash = link("chat", name); }),
      about.uses.includes("merge") && has("Merge", false, doing(async () => { await post("merge", { run: name }); if (!signal.aborted) location.hash = "#/jobs"; })),
      about.uses.includes("export") && has("Export", false, exportIt),
      h("a", { class: "button", href: `#/new/${encodeURIComponent(name)}` }, "Copy as new"),
    ].filter(Boolean));
  };
  const drawCheckpoints = () => {
    checkpoints.hidden = !about.checkpoints.length;
    checkpoints.replaceChildren(h("h2", {}, "Checkpoints ", h("small", {}, String(about.checkpoints.length))),
      h("p", { class: "checkpoint-list" }, about.checkpoints.map((each) => h("code", {}, each))), copyable(about.list_command));
  };
  const drawAll = async () => {
    about = await get(`/api/run?${own}`);
    if (signal.aborted) return;
    drawHead();
    drawCheckpoints();
    await Promise.all([drawCharts(), drawReport()]);
  };

  // Take what was added to the run: rows at once, everything else at most every few seconds.
  let due = 0;
  let drawn = 0;
  const later = (wait) => { due = due || setTimeout(async () => { due = 0; drawn = Date.now(); try { await drawAll(); word.replaceChildren(); } catch (error) { failed(error); } }, wait); };
  const failed = (error) => { if (!signal.aborted) { word.replaceChildren(errorBox(error)); later(3000); } };
  const take = (found) => {
    if (signal.aborted) return;
    state.position = found.position;
    if (found.reset) state.rows = [];
    if (found.rows.length) {
      state.rows.push(...found.rows);
      grid.append(found.rows);
      noCharts.hidden = true;
      const last = found.rows.at(-1);
      state.recent = [...state.recent, ...found.rows].slice(-20);
      const seconds = state.recent.reduce((sum, row) => sum + (row.step_s ?? 0), 0) / state.recent.length;
      Object.assign(about, { steps: last.step, loss: last.loss, tokens_per_s: last.tokens_per_s ?? about.tokens_per_s,
        eta_s: about.num_steps ? Math.max(0, about.num_steps - last.step) * seconds : null });
    }
    const changed = found.status !== about.status;
    if (changed) {
      about = { ...about, status: found.status };
      word.replaceChildren(...(WORD[found.status] ? [h("p", { class: `callout ${found.status === "stopped" ? "" : "failed"}` }, WORD[found.status])] : []));
    }
    drawHead();
    if (changed || found.reset || found.events.some((kind) => kind !== "evaluating") || (found.rows.length && !charts.children.length)) later(changed ? 50 : Math.max(0, 3000 - (Date.now() - drawn)));
    else if (found.rows.length) later(20000); // smoothed curves and totals follow the steps
  };
  drawHead();
  drawCheckpoints();
  await Promise.all([drawCharts(), drawReport()]).catch(failed);
  if (signal.aborted) return;
  follow(name, state, { signal, take, gone: (message) => word.replaceChildren(h("p", { class: "callout failed" }, `${message} The page shows what was read before.`)) });
  signal.addEventListener("abort", () => clearTimeout(due));
};

// Follow a run by server-sent events; ask every second where they do not arrive, as behind some proxies.
const follow = (name, state, { signal, take, gone }) => {
  const address = (kind) => `/api/${kind}?${query([name])}&after=${encodeURIComponent(state.position)}`;
  let source = null;
  let arrived = false;
  const poll = () => every(1000, signal, async () => {
    const answer = await fetch(address("poll"));
    if (answer.ok) take(await answer.json());
    else if (answer.status === 400) gone((await answer.json()).error);
  });
  const open = () => {
    source = new EventSource(address("events"));
    source.onmessage = (event) => { arrived = true; document.getElementById("offline").hidden = true; take(JSON.parse(event.data)); };
    source.addEventListener("gone", (event) => { source.close(); gone(JSON.parse(event.data)); setTimeout(() => !signal.aborted && !document.hidden && open(), 5000); });
    source.onerror = () => {
      if (source.readyState !== EventSource.CLOSED) { document.getElementById("offline").hidden = !arrived; return; }
      if (!signal.aborted) setTimeout(() => !signal.aborted && open(), 2000);
    };
  };
  // A hidden page gives its connection back; it reads on from its position when it is seen again.
  document.addEventListener("visibilitychange", () => { if (!source) return; if (document.hidden) source.close(); else open(); }, { signal });
  signal.addEventListener("abort", () => source?.close());
  if (window.EventSource) {
    open();
    setTimeout(() => { if (!arrived && !signal.aborted) { source.close(); source = null; poll(); } }, 8000);
  } else poll();
};

export const showCompare = async (place, { parts, signal }) => {
  const own = query(parts);
  const charts = h("div", { class: "charts grid" });
  const sections = h("div", { class: "sections" });
  const draw = async (value) => grid.set(structuredClone((await get(`/api/charts?${own}&smoothing=${value}`)).charts));
  place.append(h("div", { class: "head" }, h("div", {}, h("p", { class: "crumbs" }, h("a", { href: "#/" }, "Runs"), " / compare"), h("h1", {}, parts.map((part) => part.split("/").at(-1)).join(" · "))),
    h("div", { class: "tools" }, parts.length === 2 ? h("a", { class: "button", href: link("chat", ...parts) }, "Chat with both") : null)),
  h("section", { id: "charts" }, h("div", { class: "chart-head" }, h("h2", {}, "Curves"), smoothingSelect(draw)), charts), sections);
  const grid = makeCharts(charts, { signal });
  const read = () => Promise.all([draw(place.querySelector("select").value), showReport(sections, `/api/compare?${own}`, { without: ["charts"] })]);
  await read();
  every(10000, signal, read);
};
