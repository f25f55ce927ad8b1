// Build elements from texts, never from HTML; ask the server; format values.

export const h = (tag, props = {}, ...children) => {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else if (name in element && typeof value !== "string") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
};

const token = document.querySelector("meta[name=token]").content;

export class Refused extends Error {
  constructor({ error, why = "", do: advice = "" }) {
    super(error);
    Object.assign(this, { why, advice });
  }
}

const respond = async (path, options) => {
  let answer;
  try {
    answer = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    document.getElementById("offline").hidden = false;
    throw new Refused({ error: "The server does not respond.", do: "start crosstune ui again" });
  }
  document.getElementById("offline").hidden = true;
  if (answer.ok) return answer;
  const text = await answer.text();
  let found = { error: text || `The server answered with ${answer.status}.` };
  try { found = JSON.parse(text); } catch { /* a plain sentence */ }
  throw new Refused(found);
};

export const get = async (path) => {
  const answer = await respond(path);
  return answer.headers.get("content-type").startsWith("application/json") ? answer.json() : answer.text();
};

export const send = (name, body, signal) =>
  respond(`/api/${name}`, {
    method: "POST", signal, body: JSON.stringify(body),
    headers: { "Content-Type": "application/json", "X-Crosstune-Token": token },
  });
export const post = async (name, body, signal) => (await send(name, body, signal)).json();

export const query = (names) => names.map((name) => `run=${encodeURIComponent(name)}`).join("&");
export const link = (...parts) => `#/${parts.map(encodeURIComponent).join("/")}`;

export const toast = (text, { bad = false } = {}) => {
  const shown = h("p", { class: bad ? "toast bad" : "toast" }, text);
  document.getElementById("toasts").append(shown);
  setTimeout(() => shown.remove(), bad ? 12000 : 5000);
};
export const explain = (error) => [error.message, error.why, error.advice && `Do: ${error.advice}.`].filter(Boolean).join(" ");
export const errorBox = (error) =>
  h("div", { class: "callout failed", role: "alert" }, h("strong", {}, error.message), " ",
    h("span", { class: "said" }, [error.why, error.advice && `Do: ${error.advice}`].filter(Boolean).join(" ")));
// Run what a button does; show what is wrong.
export const doing = (work) => async (event) => {
  const button = event.currentTarget;
  button.disabled = true;
  try { await work(event); } catch (error) {
    if (error.name !== "AbortError") toast(explain(error), { bad: true });
  } finally {
    button.disabled = false;
    if (document.activeElement === document.body) button.focus(); // a disabled button lost it
  }
};

// How much longer each page waits between its requests: the server raises it while many pages are open.
export const pace = { factor: 1 };

// Call `work` now and again after every wait, while the page is visible and the view is shown.
export const every = (wait, signal, work) => {
  let timer = 0;
  let busy = false;
  const tick = async () => {
    clearTimeout(timer);
    if (signal.aborted || busy) return;
    busy = true;
    try { if (!document.hidden) await work(); } catch { /* shown as offline */ }
    busy = false;
    if (!signal.aborted) timer = setTimeout(tick, wait * pace.factor);
  };
  document.addEventListener("visibilitychange", () => { if (!document.hidden) tick(); }, { signal });
  signal.addEventListener("abort", () => clearTimeout(timer));
  return tick();
};

const minus = (text) => text.replace("-", "\u2212");
export const figure = (value, digits = 4) => {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 1e9 || (size > 0 && size < 1e-4)) return minus(value.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e"));
  return minus(value.toLocaleString("en", { maximumSignificantDigits: size >= 1000 ? Math.ceil(Math.log10(size)) : digits }));
};
export const duration = (seconds) => {
  if (seconds === null || seconds === undefined) return "–";
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  if (whole < 172800) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86400)} days`;
};
export const bytes = (size) => {
  if (!size) return "–";
  const power = Math.min(5, Math.floor(Math.log2(size) / 10));
  return `${figure(size / 1024 ** power, 3)} ${["B", "KiB", "MiB", "GiB", "TiB", "PiB"][power]}`;
};
const GLYPHS = { finished: "✓", done: "✓", ready: "✓", stopped: "■", failed: "✕", killed: "✕", damaged: "✕", running: "▶" };
export const badge = (status) => h("span", { class: `badge ${status}` }, h("span", { "aria-hidden": "true" }, GLYPHS[status] ?? "●"), ` ${status}`);
export const copyable = (text, id) => {
  const command = h("pre", { class: "command" }, h("code", { id }, text));
  window.report.offerCopy(command);
  return command;
};
// A dialog with a form; resolves to its values, or null when it is closed.
export const ask = (title, fields, { go = "OK", text = "" } = {}) => new Promise((resolve) => {
  const inputs = fields.map(({ name, label, choices, value = "", hint }) => [
    h("label", { for: `ask-${name}` }, label),
    choices ? h("select", { id: `ask-${name}`, name }, choices.map((each) => h("option", { value: each }, each)))
      : h("input", { id: `ask-${name}`, name, value: String(value) }),
    hint ? h("small", {}, hint) : null,
  ]);
  const form = h("form", { method: "dialog" }, h("h2", {}, title), text ? h("p", { class: "quiet" }, text) : null, inputs,
    h("p", { class: "buttons" }, h("button", { type: "button", onclick: () => dialog.close() }, "Cancel"),
      h("button", { class: "primary", value: "go" }, go)));
  const dialog = h("dialog", {}, form);
  dialog.addEventListener("close", () => {
    resolve(dialog.returnValue === "go" ? Object.fromEntries(new FormData(form)) : null);
    dialog.remove();
  });
  document.body.append(dialog);
  dialog.showModal();
});
