// Chat with one or two models side by side, served by an ordinary `crosstune serve`.
import { doing, errorBox, get, h, link, post, send, toast } from "./dom.js";

export const showChat = async (place, { parts, signal }) => {
  if (parts[0] === "job") return talk(place, parts[1], signal);
  const [{ runs }, { models }] = await Promise.all([get("/api/runs"), get("/api/form")]);
  const trained = runs.filter((run) => run.status === "finished");
  const names = [...trained.map((run) => run.name), ...new Set([...trained.map((run) => run.model), ...models])];
  const list = h("datalist", { id: "chat-models" }, names.map((name) => h("option", { value: name })));
  const base = parts.length === 1 ? trained.find((run) => run.name === parts[0])?.model ?? "" : "";
  const box = (label, value, id) => [h("label", { for: id }, label), h("input", { id, value, list: "chat-models", autocomplete: "off" })];
  const start = doing(async () => {
    const chosen = [...place.querySelectorAll(".models input")].map((input) => input.value.trim()).filter(Boolean);
    const job = await post("serve", { models: chosen });
    if (!signal.aborted) location.hash = link("chat", "job", job.id);
  });
  place.append(h("div", { class: "head" }, h("h1", {}, "Chat")),
    h("p", { class: "quiet" }, "Choose a run and the model it started from, or two runs. Both answer the same messages."),
    h("form", { class: "models", onsubmit: (event) => event.preventDefault() }, list,
      h("div", {}, box("First", parts[0] ?? trained[0]?.name ?? "", "first-model")),
      h("div", {}, box("Second (may be empty)", parts[1] ?? base, "second-model")),
      h("button", { class: "primary", type: "submit", onclick: start }, "Load")),
    !trained.length ? h("p", { class: "empty-line" }, "No run has finished yet. To chat with a model, enter its name.") : "");
  return undefined;
};

const talk = async (place, id, signal) => {
  const head = h("h1", {}, "Chat");
  const state = h("pre", { class: "messages", role: "status" }, "Loading the models …");
  const stop = h("button", { type: "button", onclick: doing(async () => { await post("stop", { job: id }); toast("The models are unloaded."); if (!signal.aborted) location.hash = "#/chat"; }) }, "Unload");
  const columns = h("div", { class: "talks" });
  place.append(h("div", { class: "head" }, head, h("div", { class: "tools" }, stop)), state, columns);
  let names = [];
  while (!names.length && !signal.aborted) {
    const found = await get(`/api/models?job=${encodeURIComponent(id)}`);
    if (["failed", "stopped", "done"].includes(found.job.state)) {
      stop.hidden = true;
      state.replaceWith(errorBox({ message: "The models are not loaded.", why: found.job.messages.trim().split("\n").slice(-4).join("\n"), advice: "choose them again" }), h("p", {}, h("a", { href: "#/chat" }, "Choose models")));
      return;
    }
    names = found.models;
    state.textContent = found.job.messages.trim().split("\n").slice(-3).join("\n") || "Loading the models …";
    if (!names.length) await new Promise((resolve) => { setTimeout(resolve, 700); });
  }
  if (signal.aborted) return;
  state.remove();
  const talks = names.slice(0, 2).map((name) => {
    const log = h("div", { class: "log", tabindex: "0", "aria-label": `Conversation with ${name}` });
    columns.append(h("section", { class: "talk" }, h("h2", {}, name), log));
    return { name, log, messages: [] };
  });
  const input = h("textarea", { rows: 2, placeholder: "Write a message. Enter sends, Shift+Enter breaks the line.", "aria-label": "Message" });
  const temperature = h("input", { type: "number", min: 0, max: 2, step: 0.1, value: "0", "aria-label": "Temperature" });
  const length = h("input", { type: "number", min: 1, max: 8192, value: "256", "aria-label": "Longest answer in tokens" });
  let answering = null;
  const go = h("button", { class: "primary", type: "submit" }, "Send");
  const form = h("form", { class: "composer", onsubmit: async (event) => {
    event.preventDefault();
    if (answering) { answering.abort(); return; }
    const text = input.value.trim();
    if (!text) return;
    input.value = "";
    answering = new AbortController();
    go.textContent = "Stop";
    await Promise.all(talks.map((talk) => answer(talk, text, { id, temperature: Number(temperature.value), max_tokens: Number(length.value), signal: answering.signal })));
    answering = null;
    go.textContent = "Send";
    input.focus();
  } }, input, h("div", { class: "settings" }, h("label", {}, "temperature ", temperature), h("label", {}, "tokens ", length),
    h("button", { type: "button", onclick: () => talks.forEach((talk) => { talk.messages = []; talk.log.replaceChildren(); }) }, "Clear"), go));
  input.addEventListener("keydown", (event) => { if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); form.requestSubmit(); } });
  place.append(form);
  signal.addEventListener("abort", () => answering?.abort());
  input.focus();
};

const answer = async (talk, text, { id, temperature, max_tokens, signal }) => {
  const said = h("div", { class: "turn assistant", dir: "auto" });
  const rate = h("small", {}, "…");
  talk.log.append(h("div", { class: "turn user", dir: "auto" }, text), said, rate);
  const messages = [...talk.messages, { role: "user", content: text }];
  const began = performance.now();
  let full = "";
  let parts = 0;
  try {
    const reply = await send("chat", { job: id, model: talk.name, messages, temperature, max_tokens }, signal);
    const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:") || line.includes("[DONE]")) continue;
        const event = JSON.parse(line.slice(5));
        if (event.error) throw new Error(event.error.message);
        const more = event.choices?.[0]?.delta?.content ?? "";
        if (more) { full += more; parts += 1; said.textContent = full; talk.log.scrollTop = talk.log.scrollHeight; }
      }
    }
    talk.messages = [...messages, { role: "assistant", content: full }];
    const seconds = (performance.now() - began) / 1000;
    rate.textContent = `${parts} tokens, ${(parts / seconds).toFixed(1)} tok/s`;
    said.dataset.done = "true";
  } catch (error) {
    rate.textContent = error.name === "AbortError" ? "stopped" : error.message;
    talk.messages = full ? [...messages, { role: "assistant", content: full }] : talk.messages;
    said.dataset.done = "true";
  }
};
