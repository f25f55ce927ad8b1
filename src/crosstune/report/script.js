"use strict";
// Show the values of every curve at the step under the pointer or chosen with the arrow keys.
(() => {
  const nearest = (points, step) => {
    let low = 0;
    let high = points.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (points[middle][0] < step) low = middle;
      else high = middle;
    }
    return Math.abs(points[low][0] - step) <= Math.abs(points[high][0] - step) ? low : high;
  };

  const word = (label, value = "", color = 0) => {
    const line = document.createElement("span");
    const strong = document.createElement("b");
    strong.textContent = value;
    line.className = `c${color}`;
    line.append(label, strong);
    return line;
  };

  const attach = (plot) => {
    const { x: label, steps, series } = JSON.parse(plot.dataset.readout);
    const guide = plot.querySelector(".guide");
    const line = guide.querySelector("line");
    const output = plot.parentElement.querySelector(".readout");
    const main = series[0].points;
    const across = (step) => `${(100 * (step - steps[0])) / (steps[1] - steps[0])}%`;
    const dots = series.map((each) => {
      const dot = guide.appendChild(document.createElementNS(plot.namespaceURI, "circle"));
      dot.setAttribute("class", `c${each.color}`);
      dot.setAttribute("r", 4);
      return dot;
    });
    let place = main.length - 1;

    // Put the box on the side of the guide that has more room.
    const aside = (step) => {
      const at = plot.getBoundingClientRect().left - output.parentElement.getBoundingClientRect().left;
      const x = at + (plot.getBoundingClientRect().width * (step - steps[0])) / (steps[1] - steps[0]);
      const room = output.parentElement.clientWidth - x;
      output.style.left = room > x ? `${x + 12}px` : "auto";
      output.style.right = room > x ? "auto" : `${room + 12}px`;
    };
    const show = (index) => {
      place = Math.max(0, Math.min(main.length - 1, index));
      const step = main[place][0];
      line.setAttribute("x1", across(step));
      line.setAttribute("x2", across(step));
      const lines = [word(`${label} ${step.toLocaleString("en")}`)];
      series.forEach((each, number) => {
        const [at, height, text] = each.points[nearest(each.points, step)];
        dots[number].setAttribute("visibility", height === null ? "hidden" : "inherit");
        dots[number].setAttribute("cx", across(at));
        dots[number].setAttribute("cy", `${100 * (height ?? 0)}%`);
        const where = at === step ? "" : ` at ${at.toLocaleString("en")}`;
        lines.push(word(`${each.label}${where} `, text, each.color));
      });
      output.replaceChildren(...lines);
      aside(step);
      guide.setAttribute("visibility", "visible");
    };
    const hide = () => {
      guide.setAttribute("visibility", "hidden");
      output.replaceChildren();
    };

    plot.tabIndex = 0;
    plot.addEventListener("pointermove", (event) => {
      const box = plot.getBoundingClientRect();
      const fraction = (event.clientX - box.left) / box.width;
      show(nearest(main, steps[0] + fraction * (steps[1] - steps[0])));
    });
    plot.addEventListener("pointerleave", hide);
    plot.addEventListener("focus", () => show(place));
    plot.addEventListener("blur", hide);
    plot.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: place - 1, ArrowRight: place + 1, Home: 0, End: main.length - 1 }[event.key];
      if (move === undefined) return;
      event.preventDefault();
      show(move);
    });
  };

  // Replay the generation of an answer when it is first seen, and again with a button.
  const replay = (text) => {
    const frames = JSON.parse(text.dataset.frames);
    const last = text.textContent;
    const button = document.createElement("button");
    button.type = "button";
    button.className = "replay";
    button.textContent = `replay ${frames.length} steps`;
    text.after(button);
    let timer = 0;
    const play = () => {
      clearInterval(timer);
      text.style.minHeight = `${text.offsetHeight}px`; // shorter frames do not move the page
      let place = 0;
      timer = setInterval(() => {
        text.textContent = place < frames.length ? frames[place] : last;
        if (place++ >= frames.length) clearInterval(timer);
      }, 350);
    };
    button.addEventListener("click", play);
    if (matchMedia("(prefers-reduced-motion: reduce)").matches) return;
    new IntersectionObserver((seen, observer) => {
      if (!seen.some((entry) => entry.isIntersecting)) return;
      observer.disconnect();
      play();
    }).observe(text);
  };

  // Copy a command with a button, where the browser allows it.
  const offerCopy = (command) => {
    if (!navigator.clipboard) return;
    const button = document.createElement("button");
    button.type = "button";
    button.className = "copy";
    button.textContent = "copy";
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(command.querySelector("code").textContent);
      button.textContent = "copied";
      setTimeout(() => { button.textContent = "copy"; }, 1500);
    });
    command.append(button);
  };

  const enliven = (part) => {
    part.querySelectorAll(".command").forEach(offerCopy);
    part.querySelectorAll(".plot[data-readout]").forEach(attach);
    part.querySelectorAll("pre[data-frames]").forEach(replay);
  };
  enliven(document);
  window.report = { enliven, offerCopy }; // for a page that shows parts of a report
  // Open all details for printing: a closed one prints as its title alone.
  window.addEventListener("beforeprint", () => {
    document.querySelectorAll("details").forEach((each) => { each.open = true; });
  });
})();
