// Show the view of the address; count the jobs.
import { errorBox, every, get, h, pace } from "./dom.js";
import { showList, showJobs } from "./list.js";
import { showRun, showCompare } from "./run.js";
import { showForm } from "./form.js";
import { showChat } from "./chat.js";

const VIEWS = { "": showList, group: showList, run: showRun, compare: showCompare, new: showForm, chat: showChat, jobs: showJobs };
const TITLES = { "": "Runs", group: "Runs", compare: "Compare", new: "New run", chat: "Chat", jobs: "Jobs" };
const main = document.getElementById("main");
let leave = new AbortController();
let isBroken = false;

const route = async () => {
  if (location.hash === "#main") return;
  const [name = "", ...parts] = location.hash.replace(/^#\/?/, "").split("/").map((part) => {
    try { return decodeURIComponent(part); } catch { return part; }
  });
  leave.abort();
  leave = new AbortController();
  isBroken = false;
  const { signal } = leave;
  const view = VIEWS[name] ?? showList;
  document.title = `${TITLES[name] ?? parts.at(-1) ?? "Runs"} · crosstune`;
  for (const each of document.querySelectorAll(".bar nav a")) {
    const own = each.getAttribute("href").slice(2);
    const current = own === name || (own === "" && ["group", "run", "compare"].includes(name));
    if (current) each.setAttribute("aria-current", "page");
    else each.removeAttribute("aria-current");
  }
  const place = h("div", { class: `view ${name || "list"}` });
  main.replaceChildren(place);
  scrollTo(0, 0);
  try {
    await view(place, { parts, signal });
  } catch (error) {
    isBroken = true;
    if (!signal.aborted) place.replaceChildren(errorBox(error), h("p", {}, h("a", { href: "#/" }, "Back to the runs")));
  }
};

addEventListener("hashchange", route);
route();
every(5000, new AbortController().signal, async () => {
  const { jobs, pace: factor } = await get("/api/jobs");
  pace.factor = factor;
  if (isBroken) route(); // the server answers again
  const active = jobs.filter((job) => ["running", "ready"].includes(job.state)).length;
  document.getElementById("num-jobs").textContent = active ? String(active) : "";
});
