"use strict";
// Heat maps of the experts' metrics by layer and step, and the images of their load.
const RAMP = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];

function rampColour(share) {
  const scaled = Math.min(1, Math.max(0, share)) * (RAMP.length - 1), n = Math.min(3, Math.floor(scaled));
  return RAMP[n].map((low, part) => Math.round(low + (scaled - n) * (RAMP[n + 1][part] - low)));
}

function drawHeat(card) {
  const { steps, layers, values } = report.runs[card.dataset.run].heat[card.querySelector("select").value];
  const canvas = card.querySelector("canvas"), known = values.flat().filter((value) => value !== null);
  const low = Math.min(...known), high = Math.max(...known);
  canvas.width = steps.length;
  canvas.height = layers.length;
  canvas.style.height = `${Math.min(420, Math.max(60, 18 * layers.length))}px`;
  const context = canvas.getContext("2d"), image = context.createImageData(steps.length, layers.length);
  values.flat().forEach((value, n) => {
    const rgb = value === null ? [128, 128, 128] : rampColour(high > low ? (value - low) / (high - low) : 0);
    image.data.set([...rgb, 255], 4 * n);
  });
  context.putImageData(image, 0, 0);
  card.querySelector(".low").textContent = short(low);
  card.querySelector(".high").textContent = short(high);
  canvas.onpointermove = (event) => {
    const box = canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / box.width * steps.length);
    const row = Math.floor((event.clientY - box.top) / box.height * layers.length);
    if (values[row]?.[column] === undefined) return;
    tip.textContent = `layer ${layers[row]}, step ${steps[column].toLocaleString("en")}: ${values[row][column]}`;
    tip.style.display = "block";
    const isLeft = event.clientX + 260 > innerWidth;
    tip.style.left = `${event.clientX + (isLeft ? -16 - tip.offsetWidth : 16)}px`;
    tip.style.top = `${event.clientY + 16}px`;
  };
  canvas.onpointerleave = () => { tip.style.display = "none"; };
}

for (const card of document.querySelectorAll("[data-heat]")) {
  card.querySelector("select").onchange = () => drawHeat(card);
  const colours = RAMP.map((rgb) => `rgb(${rgb})`);
  card.querySelector(".ramp").style.background = `linear-gradient(90deg, ${colours})`;
  drawHeat(card);
}
for (const card of document.querySelectorAll("[data-loads]")) {
  const images = report.runs[card.dataset.run].images, slider = card.querySelector("input");
  const show = () => {
    const [step, source] = images[slider.value];
    card.querySelector("img").src = source;
    card.querySelector(".at").textContent = `Load at step ${step.toLocaleString("en")}.`;
  };
  slider.oninput = show;
  show();
}
