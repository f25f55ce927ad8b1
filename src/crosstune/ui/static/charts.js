// Draw the charts of the server with uPlot: zoom, other axes, marks, values under the pointer, and new points.
import { figure, h } from "./dom.js";

// A canvas needs the color itself, not a variable that depends on light or dark.
const probe = h("i", { hidden: true });
document.body.append(probe);
const color = (name) => { probe.style.color = `var(${name})`; return getComputedStyle(probe).color; };
const widthOf = (texts) => 22 + 7 * Math.max(...texts.map((text) => String(text ?? "").length), 3);
const NAMES = ["", "--blue", "--orange", "--teal", "--violet", "--pink", "--olive", "--quiet"];
const FEW_POINTS = 12;
const STEPS = [...Array(12).keys()].flatMap((power) => [1, 2, 5].map((size) => size * 10 ** power));

const drawMarks = (marks) => (u) => {
  const { ctx } = u;
  const { left, top, width, height } = u.bbox;
  const dpr = devicePixelRatio;
  ctx.save();
  ctx.font = `${11.5 * dpr}px system-ui, sans-serif`;
  marks.forEach((mark, place) => {
    const x = u.valToPos(mark.at, "x", true);
    if (x < left - 1 || x > left + width + 1) return;
    ctx.strokeStyle = ctx.fillStyle = color(mark.look === "best" ? "--orange" : mark.look === "overfit" ? "--warn" : "--quiet");
    if (mark.look === "overfit") {
      ctx.globalAlpha = 0.07;
      ctx.fillRect(x, top, left + width - x, height);
      ctx.globalAlpha = 1;
    }
    ctx.lineWidth = dpr;
    ctx.setLineDash(mark.look === "best" ? [] : [4 * dpr, 4 * dpr]);
    ctx.beginPath();
    ctx.moveTo(x, top);
    ctx.lineTo(x, top + height);
    ctx.stroke();
    ctx.fillStyle = color("--quiet");
    const onLeft = x > left + width / 2;
    ctx.textAlign = onLeft ? "right" : "left";
    ctx.fillText(mark.label, x + (onLeft ? -6 : 6) * dpr, top + (12 + 15 * place) * dpr);
  });
  ctx.restore();
};

// One chart with its other axes. `onzoom` is asked for the curves of a range of steps.
export const makeChart = (data, { onzoom } = {}) => {
  const box = h("div", { class: "plot-box" });
  const title = h("h3");
  const figures = h("p", { class: "figures" });
  const toggles = h("div", { class: "toggles", role: "group", "aria-label": "Axis" });
  const notes = h("div");
  const reset = h("button", { type: "button", class: "toggle", hidden: true, onclick: () => zoom(null) }, "whole run");
  const element = h("figure", { class: data.wide ? "wide live" : "live" },
    h("figcaption", {}, title, figures, toggles, reset), box, notes);
  let plot = null;
  let axis = 0;
  let isLog = false;
  let range = null;
  let shape = "";
  let fine = null;
  let setting = false;

  const view = () => (axis ? data.others[axis - 1] : data) ?? data;
  const join = () => uPlot.join((fine ?? view().series).map((each) => [each.x, each.y]));
  const clip = (table) => (isLog ? table.map((ys, place) => (place ? ys.map((y) => (y > 0 ? y : null)) : ys)) : table);
  const show = (value) => (value === null || value === undefined ? "–" : figure(value, 4));

  const build = () => {
    plot?.destroy();
    const { series, marks, unit } = view();
    const ink = color("--quiet");
    const grid = { stroke: color("--grid"), width: 1 };
    const size = { width: Math.max(160, box.clientWidth), height: data.wide ? 300 : 210 };
    plot = new uPlot({
      ...size,
      scales: {
        x: { time: false, range: (u, low, high) => range ?? [view().span?.[0] ?? low, Math.max(view().span?.[1] ?? high, high ?? 0, 1)] },
        y: isLog ? { distr: 3 } : { range: (u, low, high) => {
          if (low === null) return [0, 1];
          const floor = data.from_zero || (low > 0 && low < high / 2) ? Math.min(0, low) : low;
          if (floor === 0 && high === 0) return [0, 1];
          const pad = (high - floor || Math.abs(high) || 1) * 0.06;
          return [floor === 0 ? 0 : floor - pad, high + pad];
        } },
      },
      axes: [
        { stroke: ink, grid, ticks: grid, font: "11.5px system-ui, sans-serif", size: 30, incrs: STEPS,
          values: (u, ticks) => ticks.map((tick) => (Math.abs(tick) >= 10000 ? Intl.NumberFormat("en", { notation: "compact" }).format(tick) : tick.toLocaleString("en"))) },
        { stroke: ink, grid, ticks: grid, font: "11.5px system-ui, sans-serif", size: (u, texts) => (texts ? widthOf(texts) : 40), values: (u, ticks) => ticks.map((tick) => (tick === null ? "" : figure(tick, 6))) },
      ],
      series: [
        { label: view().x_label, value: (u, at) => (at === null ? "" : at.toLocaleString("en")) },
        ...series.map((each) => ({
          label: each.label + (unit ? `, ${unit}` : ""),
          stroke: color(NAMES[each.color] ?? "--blue"),
          alpha: each.look === "faint" ? 0.45 : 1,
          width: each.look === "faint" ? 1 : each.look === "marked" ? 1.5 : 2,
          dash: each.look === "marked" ? [5, 4] : undefined,
          points: { show: each.look === "marked" || each.x.length <= FEW_POINTS, size: 6, fill: color(NAMES[each.color] ?? "--blue") },
          value: (u, value, place, index) => (index === null ? "" : show(value)),
        })),
      ],
      cursor: { bind: { dblclick: () => () => { zoom(null); } }, drag: { x: true, y: false }, focus: { prox: 24 }, points: { size: 7 }, sync: axis ? undefined : { key: "steps", setSeries: false } },
      legend: { live: true },
      hooks: {
        draw: [drawMarks(marks)],
        setSelect: [(u) => {
          if (u.select.width < 4) return;
          const low = u.posToVal(u.select.left, "x");
          const high = u.posToVal(u.select.left + u.select.width, "x");
          u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
          zoom([Math.floor(low), Math.ceil(high)]);
        }],
      },
    }, clip(join()), box);
    const canvas = box.querySelector("canvas");
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", data.description);
  };

  const label = () => {
    title.replaceChildren(data.title, data.unit ? h("small", {}, ` ${data.unit}`) : "");
    figures.replaceChildren(...data.figures.map(([name, text]) => h("span", {}, `${name} `, h("b", {}, text))));
    notes.replaceChildren(...data.notes.map((note) => h("p", { class: "note" }, note)));
    const names = [data.x_label, ...data.others.map((each) => each.x_label)];
    const buttons = names.map((name, place) => [name, axis === place, () => { axis = place; range = fine = null; reset.hidden = true; label(); build(); }]);
    if (data.has_log) buttons.push(["log scale", isLog, () => { isLog = !isLog; label(); build(); }]);
    const focused = [...toggles.children].indexOf(document.activeElement);
    toggles.replaceChildren(...(buttons.length > 1 ? buttons : []).map(([name, on, onclick]) => h("button", { type: "button", class: "toggle", "aria-pressed": String(on), onclick }, name)));
    if (focused >= 0) toggles.children[focused]?.focus();
  };

  const zoom = (wanted, { told = false } = {}) => {
    range = wanted;
    fine = null;
    reset.hidden = !range;
    if (plot) plot.setData(clip(join()));
    if (!told && !axis) onzoom?.(range);
  };
  const update = (next) => {
    const now = JSON.stringify([next.series.map(({ label: name, look, x }) => [name, look, x.length > FEW_POINTS]), next.others.length, next.unit]);
    Object.assign(data, next);
    axis = Math.min(axis, data.others.length);
    isLog = isLog && data.has_log;
    label();
    if (!plot || now !== shape) build();
    else { plot.hooks.draw[0] = drawMarks(view().marks); plot.setData(clip(join())); }
    shape = now;
  };
  // Draw the finer curves of the range in view.
  const refine = (next) => {
    if (axis || !range) return;
    const found = new Map(next.series.map((each) => [each.look, each]));
    fine = data.series.map((each) => (each.look === "marked" ? each : found.get(each.look) ?? each));
    plot.setData(clip(join()));
  };
  // Add the rows of new steps. Means and figures follow when the charts are read again.
  const append = (rows) => {
    for (const each of data.series.filter(({ key }) => key)) {
      for (const row of rows) {
        if (!(each.key in row) || !(row.step > (each.x.at(-1) ?? -1))) continue;
        const value = row[each.key];
        each.x.push(row.step);
        each.y.push(typeof value === "number" ? value / data.divisor : null);
      }
    }
    if (data.span && rows.length) data.span = [data.span[0], Math.max(data.span[1], rows.at(-1).step)];
    if (plot && !axis && !range && !setting) {
      setting = true;
      requestAnimationFrame(() => { setting = false; plot?.setData(clip(join())); });
    }
  };
  // Arrow keys move the line under the pointer, plus and minus zoom, Escape shows all.
  box.tabIndex = 0;
  box.setAttribute("aria-label", `${data.title}: arrow keys read values, plus and minus zoom`);
  box.addEventListener("keydown", (event) => {
    const xs = plot.data[0];
    const at = plot.cursor.idx ?? xs.length - 1;
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: xs.length - 1 }[event.key];
    if (to !== undefined) plot.setCursor({ left: plot.valToPos(xs[Math.max(0, Math.min(xs.length - 1, to))], "x"), top: plot.over.clientHeight / 2 });
    else if (event.key === "Escape") zoom(null);
    else if (event.key === "+" || event.key === "-") {
      const { min, max } = plot.scales.x;
      const half = ((max - min) / 2) * (event.key === "+" ? 0.5 : 2);
      zoom([Math.max(0, Math.floor(xs[at] - half)), Math.ceil(xs[at] + half)]);
    } else return;
    event.preventDefault();
  });
  const resized = new ResizeObserver(() => { if (plot && box.clientWidth && box.clientWidth !== plot.width) plot.setSize({ width: box.clientWidth, height: plot.height }); });
  resized.observe(box);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  dark.addEventListener("change", build);
  queueMicrotask(() => update(data));
  return { element, update, refine, append, zoom, title: data.title, destroy: () => { resized.disconnect(); dark.removeEventListener("change", build); plot?.destroy(); } };
};

// A grid of charts that keeps the charts whose title stays.
export const makeCharts = (place, { closer, signal } = {}) => {
  const charts = new Map();
  const onzoom = async (range) => {
    for (const chart of charts.values()) chart.zoom(range, { told: true });
    if (!range || !closer) return;
    for (const each of (await closer(range)).charts) charts.get(each.title)?.refine(each);
  };
  signal?.addEventListener("abort", () => charts.forEach((chart) => chart.destroy()));
  return {
    set: (found) => {
      for (const [title, chart] of charts) {
        if (!found.some((each) => each.title === title)) { chart.destroy(); chart.element.remove(); charts.delete(title); }
      }
      found.forEach((each, index) => {
        let chart = charts.get(each.title);
        if (chart) chart.update(each);
        else charts.set(each.title, chart = makeChart({ ...each }, { onzoom }));
        if (place.children[index] !== chart.element) place.insertBefore(chart.element, place.children[index] ?? null);
      });
    },
    append: (rows) => charts.forEach((chart) => chart.append(rows)),
  };
};
